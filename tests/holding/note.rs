//! The note: replaced as a whole by each write of the holder, and by nobody else.

use libc::{F_SETLK, F_WRLCK, LOCK_EX, LOCK_SH, LOCK_UN, O_RDWR, O_WRONLY};
use nix::errno::Errno;
use serde_json::{Value, json};

use crate::common::agent::Agent;
use crate::common::{Mount, assert_ok};

#[test]
fn each_write_replaces_the_note_whatever_the_offset() {
    let mount = Mount::new();
    let agent = Agent::new();
    let fd = agent.create(&mount.claim("k")).expect("free key");
    assert!(matches!(mount.status("k")["note"].as_str(), None | Some("")), "no note yet");
    assert_eq!(agent.write(fd, "the first, a long one"), Ok(21));
    assert_eq!(mount.status("k")["note"], "the first, a long one");
    assert_eq!(agent.write(fd, "short"), Ok(5), "the descriptor's offset is 21 now");
    assert_eq!(mount.status("k")["note"], "short");
    assert_eq!(agent.call("pwrite", json!([fd, { "hex": "616263" }, 5000])), Ok(json!(3)));
    assert_eq!(mount.status("k")["note"], "abc");
    let appended = agent.script("os.lseek(fd, 0, 2); result = os.write(fd, b'end')", json!({ "fd": fd }));
    assert_eq!(appended, Ok(json!(3)));
    assert_eq!(mount.status("k")["note"], "end");
}

#[test]
fn a_shell_writes_its_note_through_its_descriptor() {
    let mount = Mount::new();
    let script =
        "exec 9>$M/claims/k; flock 9; printf 'building %s' x >&9; grep -qx 'note: building x' $M/claims/k || exit 3;
        printf done >&9; grep -qx 'note: done' $M/claims/k";
    assert_ok(&mount.bash(script));
}

#[test]
fn the_limit_is_4096_bytes() {
    let mount = Mount::new();
    let agent = Agent::new();
    let fd = agent.create(&mount.claim("k")).expect("free key");
    let longest = "é".repeat(2048);
    assert_eq!(agent.write(fd, &longest), Ok(4096));
    assert_eq!(mount.status("k")["note"], longest);
    let status = mount.status("k");
    for length in [4097, 8192, 100_000] {
        assert_eq!(agent.write(fd, &"x".repeat(length)), Err(Errno::EFBIG), "{length} bytes");
    }
    assert_eq!(mount.status("k"), status, "neither note nor deadline changed");
}

#[test]
fn what_is_not_utf8_is_refused_and_changes_nothing() {
    let mount = Mount::new();
    let agent = Agent::new();
    let fd = agent.create(&mount.claim("k")).expect("free key");
    agent.write(fd, "good").expect("holder");
    let status = mount.status("k");
    for bytes in ["ff", "61c3", "eda080", "c0af", "f4908080"] {
        assert_eq!(agent.call("write", json!([fd, { "hex": bytes }])), Err(Errno::EINVAL), "bytes {bytes}");
    }
    assert_eq!(mount.status("k"), status);
}

#[test]
fn only_the_holder_handle_may_write() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (holder, other) = (Agent::new(), Agent::new());
    let fd = holder.create(&path).expect("free key");
    holder.write(fd, "mine").expect("holder");
    let status = mount.status("k");
    let same = holder.open(&path, O_RDWR).expect("held key");
    assert_eq!(holder.write(same, "second handle"), Err(Errno::EACCES), "another handle of the holder's process");
    let handle = other.open(&path, O_WRONLY).expect("held key");
    assert_eq!(other.write(handle, "not mine"), Err(Errno::EACCES));
    assert!(!mount.bash("echo hello >$M/claims/k").status.success());
    assert!(!mount.bash("echo hello >>$M/claims/k").status.success());
    assert_eq!(mount.status("k"), status, "neither note nor deadline changed");
    holder.flock(fd, LOCK_UN).expect("unlock");
    assert_eq!(holder.write(fd, "late"), Err(Errno::EACCES), "unlocked: not the holder any more");
    holder.flock(fd, LOCK_SH).expect("free key");
    assert_eq!(holder.write(fd, "sharing"), Err(Errno::EACCES), "a sharer is no holder");
    assert!(!mount.bash("echo hello >$M/claims/free").status.success(), "a handle that never locked");
    assert_eq!(mount.state_of("free"), "free");
}

#[test]
fn a_posix_lock_owner_writes_like_any_holder() {
    let mount = Mount::new();
    let agent = Agent::new();
    let fd = agent.handle(&mount.claim("k"));
    agent.lock(fd, F_SETLK, F_WRLCK).expect("free key");
    assert_eq!(agent.write(fd, "noted"), Ok(5));
    assert_eq!(mount.status("k")["note"], "noted");
}

#[test]
fn a_note_ends_with_its_attempt() {
    let mount = Mount::new();
    let (first, second) = (Agent::new(), Agent::new());
    let path = mount.claim("k");
    let fd = first.create(&path).expect("free key");
    first.write(fd, "the first's").expect("holder");
    first.close(fd);
    let fd = second.handle(&path);
    second.flock(fd, LOCK_EX).expect("free key");
    assert!(matches!(mount.status("k")["note"].as_str(), None | Some("")), "{}", mount.status("k"));
    assert!(!second.read(fd).expect("holder").contains("the first's"));
}

/// Reads for a second, and until it has seen enough, by one's own open each time and by a descriptor kept open; the notes
/// seen.
const READER: &str = r#"
fd, seen, torn, began = os.open(path, os.O_RDONLY), set(), [], time.monotonic()
def goes_on():
    lasted = time.monotonic() - began
    return lasted < 1.5 or len(seen) <= 5 and lasted < 40
def note(record):
    return record.decode().split("\nnote: ")[1].rstrip("\n")
while goes_on():
    with open(path, "rb", buffering=0) as file:
        notes = [note(file.read()), note(os.pread(fd, 65536, 0))]
    with open(status, "rb", buffering=0) as file:
        notes.append(json.loads(file.read())["note"])
    for text in notes:
        if len(set(text)) != 1 or len(text) != 100 * (ord(text[0]) - 64):
            torn.append(text)
        seen.add(text[:1])
result = [len(seen), torn[:3]]
"#;

/// Writes one note after the other until it is told to stop; how many.
const WRITER: &str = r#"
result = 0
while result <= 50 or not os.path.exists(stop):
    n = result % 26 + 1
    os.write(fd, bytes([64 + n]) * (100 * n))
    result += 1
"#;

#[test]
fn readers_see_whole_notes_only() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let writer = Agent::new();
    let fd = writer.create(&path).expect("free key");
    writer.write(fd, &"A".repeat(100)).expect("holder");
    let readers: Vec<Agent> = (0..2).map(|_| Agent::new()).collect();
    for reader in &readers {
        reader.begin("script", json!([READER, { "path": path, "status": mount.root().join("status/k") }]));
    }
    // Letter and length belong together: A is 100 long, B 200, … Z 2,600.
    let stop = mount.scratch().join("stop");
    writer.begin("script", json!([WRITER, { "fd": fd, "stop": stop }]));
    for reader in &readers {
        let answer: Value = reader.answer().expect("the reader reads");
        assert_eq!(answer[1], json!([]), "torn notes");
        assert!(answer[0].as_u64() > Some(5), "the reader saw {} different notes", answer[0]);
    }
    std::fs::write(&stop, "").expect("written");
    let writes = writer.answer().expect("the holder writes");
    assert!(writes.as_u64() > Some(50), "{writes} writes are enough to tear something");
}
