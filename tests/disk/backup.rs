//! `leasefs backup`: a copy that can be served, of a tree that goes on meanwhile.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Output};

use serde_json::json;

use crate::common::agent::{Agent, epoch_of};
use crate::common::{InTime, LEASEFS, Mount, assert_ok, stdout};
use crate::place::{Place, assert_not_mounted, assert_refused};

fn backup(state: &Path, dest: &Path) -> Output {
    let mut command = Command::new("timeout");
    command.args(["200", LEASEFS, "backup"]).arg(dest).arg("--state").arg(state);
    command.output_in_time()
}

fn verify(state: &Path) -> Output {
    Command::new(LEASEFS).arg("verify").arg("--state").arg(state).output_in_time()
}

/// Nothing is left beside a copy that did not come about.
fn assert_no_trace(dest: &Path) {
    let partial = format!("{}.partial", dest.display());
    assert!(!dest.exists() && !Path::new(&partial).exists(), "{} is left", dest.display());
}

#[test]
fn a_backup_of_a_tree_at_work_can_be_mounted_and_has_all_that_was_told_before() {
    // Without durability against a power cut, what was told may still be on its way.
    let mut mount = Mount::new();
    let (holder, worker) = (Agent::new(), Agent::new());
    fs::create_dir(mount.claim("team")).expect("namespace");
    let held = holder.create(&mount.claim("team/held")).expect("free key");
    holder.write(held, "a note").expect("holder");
    for round in 1..=20 {
        let fd = worker.handle(&mount.claim("job"));
        worker.flock(fd, libc::LOCK_EX).expect("free");
        assert_eq!(worker.epoch(fd), Ok(round));
        worker.close(fd);
    }
    let done = worker.create(&mount.claim("done")).expect("free key");
    let draft = worker.handle(&mount.result("done", 1));
    worker.write(draft, "the result").expect("registered");
    worker.fsync(draft).expect("commits");
    for fd in [draft, done] {
        worker.close(fd);
    }
    let open = worker.create(&mount.claim("open")).expect("free key");
    let unfinished = worker.handle(&mount.result("open", 1));
    worker.write(unfinished, "half").expect("registered");

    let dest = mount.scratch().join("backup");
    let output = mount.leasefs(&[Path::new("backup"), &dest]);
    assert_ok(&output);
    assert!(stdout(&output).contains("4 keys, 23 attempts, 1 results (10 bytes)"), "{}", stdout(&output));
    assert_eq!(fs::metadata(&dest).expect("backup").permissions().mode() & 0o777, 0o700);
    // What comes after is not in it, and does not change it.
    let fd = worker.handle(&mount.claim("job"));
    worker.flock(fd, libc::LOCK_EX).expect("free");
    assert_ok(&verify(&dest));
    worker.close(fd);
    worker.close(unfinished);
    worker.close(open);
    holder.close(held);
    drop((holder, worker));
    mount.unmount();

    let place = Place::new();
    assert_ok(&place.mount_at(&place.mnt(), &dest, &[]));
    let status = |key: &str| -> serde_json::Value {
        serde_json::from_str(&fs::read_to_string(place.mnt().join("status").join(key)).expect("status")).expect("JSON")
    };
    assert_eq!(fs::read_to_string(place.mnt().join("results/done/1")).expect("result"), "the result");
    assert_eq!((&status("done")["state"], &status("done")["epoch"]), (&json!("finished"), &json!(1)));
    // Held when the copy was made, by somebody who may still be at work.
    assert_eq!((&status("team/held")["note"], &status("team/held")["epoch"]), (&json!("a note"), &json!(1)));
    let next = Agent::new();
    let fd = next.handle(&place.mnt().join("claims/job"));
    next.flock(fd, libc::LOCK_EX).expect("free");
    assert_eq!(next.epoch(fd), Ok(21), "epochs go on");
    next.close(fd);
    drop(next);
    assert_ok(&place.unmount(&place.mnt()));
    assert_ok(&verify(&dest));
}

/// Claims, commits and releases until told to stop; how many.
const BUSY: &str = r#"
count = 0
while not os.path.exists(stop):
    count += 1
    fd = os.open(f"{root}/claims/{name}-{count % 50}", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    epoch = int(read(fd).split(b"\n")[0])
    draft = os.open(f"{root}/results/{name}-{count % 50}/{epoch}", os.O_WRONLY | os.O_CREAT)
    os.write(draft, b"x" * (count % 500))
    os.fsync(draft)
    os.close(draft)
    os.close(fd)
result = count
"#;

#[test]
fn backups_of_a_tree_under_load_are_each_whole_and_hold_nobody_up() {
    let mount = Mount::new();
    let stop = mount.scratch().join("stop");
    let workers: Vec<Agent> = (0..3).map(|_| Agent::new()).collect();
    for (name, worker) in workers.iter().enumerate() {
        let names = json!({ "root": mount.root(), "stop": stop, "name": format!("w{name}") });
        worker.begin("script", json!([BUSY, names]));
    }
    let mut last = 0;
    for round in 0..12 {
        let dest = mount.scratch().join(format!("backup-{round}"));
        assert_ok(&mount.leasefs(&[Path::new("backup"), &dest]));
        assert_ok(&verify(&dest));
        let results = fs::read_dir(dest.join("results")).expect("results").count();
        assert!(results >= last, "later ones have more: {results} after {last}");
        last = results;
    }
    fs::write(&stop, "").expect("stop");
    for worker in &workers {
        assert!(worker.answer().expect("no error").as_u64() > Some(0));
    }
    assert!(last > 0);
    mount.verify();
}

#[test]
fn results_are_links_on_the_same_filesystem_and_copies_elsewhere() {
    let place = Place::new();
    place.used_state();
    fs::write(place.state().join("results/1-1"), "").expect("a file no row counts");
    let disk = place.tmpfs("disk", "16m");
    let mount = Mount::new();
    let agent = Agent::new();
    let fd = agent.create(&mount.claim("k")).expect("free key");
    let draft = agent.handle(&mount.result("k", 1));
    agent.write(draft, "result\n").expect("registered");
    agent.fsync(draft).expect("commits");
    agent.close(fd);
    let original = fs::metadata(mount.state().join("results/1-1")).expect("result");
    for (dest, shares) in [(mount.scratch().join("near"), true), (disk.join("far"), false)] {
        assert_ok(&mount.leasefs(&[Path::new("backup"), &dest]));
        let copy = fs::metadata(dest.join("results/1-1")).expect("result");
        assert_eq!((copy.dev(), copy.ino()) == (original.dev(), original.ino()), shares, "{}", dest.display());
        assert_eq!((copy.len(), copy.permissions().mode() & 0o777), (7, 0o600));
        assert_ok(&verify(&dest));
    }
    // What no row counts is not copied.
    assert_ok(&backup(&place.state(), &place.path("backup")));
    assert_eq!(fs::read_dir(place.path("backup/results")).expect("results").count(), 0);
}

#[test]
fn an_unmounted_state_directory_and_a_backup_can_be_backed_up_too() {
    let place = Place::new();
    place.used_state();
    // What was decided and not yet put into the registry goes along.
    fs::write(place.state().join("journal"), "").expect("journal");
    assert_ok(&backup(&place.state(), &place.path("first")));
    assert!(place.path("first/journal").exists());
    fs::create_dir(place.path("second")).expect("an empty directory");
    assert_ok(&backup(&place.path("first"), &place.path("second")));
    assert_ok(&verify(&place.path("second")));
    assert_ok(&place.mount_at(&place.mnt(), &place.path("second"), &[]));
    let agent = Agent::new();
    let fd = agent.create(&place.mnt().join("claims/ns/k")).expect("free key");
    assert_eq!(epoch_of(&agent.read(fd).expect("record")), 2);
    drop(agent);
    assert_ok(&place.unmount(&place.mnt()));
}

#[test]
fn what_cannot_be_done_is_one_line_and_leaves_nothing() {
    let place = Place::new();
    place.used_state();
    let refused = |state: &Path, dest: &Path, about: &Path, words: &[&[&str]]| {
        let output = backup(state, dest);
        assert_refused(&output, about, words);
        assert_eq!(output.status.code(), Some(2));
    };
    let dest = place.path("backup");
    refused(&place.path("nowhere"), &dest, &place.path("nowhere"), &[&["no registry"], &["--state"]]);
    assert_no_trace(&dest);
    refused(&place.state(), &place.path("no/such/backup"), &place.path("no"), &[&["mkdir"]]);
    fs::write(&dest, "mine").expect("file");
    refused(&place.state(), &dest, &dest, &[&["exists"]]);
    assert_eq!(fs::read_to_string(&dest).expect("file"), "mine");
    fs::remove_file(&dest).expect("file");
    fs::create_dir(&dest).expect("directory");
    fs::write(dest.join("mine"), "mine").expect("file");
    refused(&place.state(), &dest, &dest, &[&["exists"], &["empty"]]);
    fs::remove_dir_all(&dest).expect("directory");
    fs::create_dir(place.path("backup.partial")).expect("directory");
    refused(&place.state(), &dest, &place.path("backup.partial"), &[&["interrupted"], &["remove"]]);
    fs::remove_dir(place.path("backup.partial")).expect("directory");
    let disk = place.tmpfs("disk", "16m");
    refused(&place.state(), &disk, &disk, &[&["mountpoint"]]);
    assert_no_trace(&dest);
    let mount = Mount::new();
    refused(&mount.state(), &dest, &mount.state(), &[&["served"], &["--root"]]);
    assert_no_trace(&dest);
    let inside = mount.claim("backup");
    refused(&place.state(), &inside, &mount.root(), &[&["inside"]]);
    assert!(!inside.exists());
}

#[test]
fn a_full_disk_is_one_line_and_the_partial_copy_is_removed() {
    let place = Place::new();
    let mount = Mount::new();
    let agent = Agent::new();
    for epoch in 1..=8 {
        let fd = agent.handle(&mount.claim("k"));
        agent.flock(fd, libc::LOCK_EX).expect("free");
        let draft = agent.handle(&mount.result("k", epoch));
        agent.script("os.write(fd, b'x' * (300 << 10))", json!({ "fd": draft })).expect("draft");
        agent.fsync(draft).expect("commits");
        agent.close(draft);
        agent.close(fd);
    }
    drop(agent);
    // No room for the results, then not even for the registry.
    for size in ["1m", "8k"] {
        let disk = place.tmpfs(&format!("disk-{size}"), size);
        let dest = disk.join("backup");
        let output = mount.leasefs(&[Path::new("backup"), &dest]);
        assert_refused(&output, &dest, &[&["no space"], &["removed"]]);
        assert_no_trace(&dest);
    }
    mount.verify();
}

#[test]
fn a_damaged_registry_gives_no_backup() {
    let place = Place::new();
    place.used_state();
    let path = place.state().join("registry.db");
    // Everything in the main file, then the attempts' pages overwritten.
    let registry = rusqlite::Connection::open(&path).expect("registry");
    registry.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).expect("checkpoint");
    drop(registry);
    let mut bytes = fs::read(&path).expect("registry");
    bytes[3 * 1024..].fill(0x5a);
    fs::write(&path, &bytes).expect("registry");
    let output = backup(&place.state(), &place.path("backup"));
    assert_refused(&output, &place.state(), &[&["damaged", "malformed"], &["leasefs verify"]]);
    assert_no_trace(&place.path("backup"));
}

#[test]
fn a_backup_put_over_a_state_that_went_on_is_refused_and_never_gives_an_epoch_again() {
    let place = Place::new();
    place.used_state();
    assert_ok(&backup(&place.state(), &place.path("backup")));
    assert_ok(&place.mount());
    let agent = Agent::new();
    let fd = agent.create(&place.mnt().join("claims/ns/k")).expect("free key");
    assert_eq!(agent.epoch(fd), Ok(2));
    agent.close(fd);
    drop(agent);
    assert_ok(&place.unmount(&place.mnt()));
    for name in ["registry.db-wal", "registry.db-shm"] {
        let _ = fs::remove_file(place.state().join(name));
    }
    fs::copy(place.path("backup/registry.db"), place.state().join("registry.db")).expect("copy");
    let output = place.mount();
    assert_refused(&output, &place.state(), &[&["older"], &["leasefs verify"], &["leasefs backup"]]);
    let found = verify(&place.state());
    assert!(!found.status.success() && stdout(&found).contains("older"), "verify sees it too: {}", stdout(&found));
    let output = backup(&place.state(), &place.path("again"));
    assert_refused(&output, &place.state(), &[&["older"]]);
    assert_no_trace(&place.path("again"));
    assert_not_mounted(&place.mnt());
}
