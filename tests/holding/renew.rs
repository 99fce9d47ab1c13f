//! Renewal: what renews, what does not, and that the deadline follows.

use std::time::Duration;

use libc::{F_GETLK, F_WRLCK, LOCK_EX, LOCK_NB, O_RDWR};
use nix::errno::Errno;
use serde_json::{Value, json};

use crate::common::agent::{Agent, Fd};
use crate::common::luck::{in_luck, longer, shown};
use crate::common::{Mount, PATIENCE, assert_ok};
use crate::{millis, wait_until};

/// Does something 20 ms after the last renewal, and gives the status before and after.
fn around(mount: &Mount, act: impl FnOnce()) -> (Value, Value) {
    let before = mount.status("k");
    wait_until(millis(&before, "renewed") + 20);
    act();
    (before, mount.status("k"))
}

#[test]
fn writing_touching_and_locking_again_renew() {
    type Renewal = (&'static str, fn(&Agent, Fd) -> Result<(), Errno>);
    let renewals: [Renewal; 4] = [
        ("write", |agent, fd| agent.write(fd, "beat").map(drop)),
        ("futimens", |agent, fd| agent.touch(fd)),
        ("flock", |agent, fd| agent.flock(fd, LOCK_EX)),
        ("futimens with times", |agent, fd| agent.script("os.utime(fd, (5, 5))", json!({ "fd": fd })).map(drop)),
    ];
    let mount = Mount::with(&["--ttl", "90s"]);
    let agent = Agent::new();
    let fd = agent.create(&mount.claim("k")).expect("free key");
    for (name, renew) in renewals {
        let (before, after) = around(&mount, || assert_eq!(renew(&agent, fd), Ok(()), "{name}"));
        assert!(millis(&after, "renewed") > millis(&before, "renewed"), "{name} renews");
        assert!(millis(&after, "expires") > millis(&before, "expires"), "{name} moves the deadline");
        assert_eq!((&after["epoch"], &after["since"]), (&json!(1), &before["since"]), "{name} keeps the epoch");
        let lasts = millis(&after, "expires") - millis(&after, "renewed");
        assert!((89_998..=90_002).contains(&lasts), "expires is renewed and the TTL: {lasts}");
    }
}

#[test]
fn looking_does_not_renew() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (holder, other) = (Agent::new(), Agent::new());
    let fd = holder.create(&path).expect("free key");
    let (before, after) = around(&mount, || {
        holder.read(fd).expect("holder");
        holder.call("fstat", json!([fd])).expect("holder");
        holder.lock(fd, F_GETLK, F_WRLCK).expect("holder");
        holder.poll(fd, libc::POLLIN, 0);
        let handle = other.open(&path, O_RDWR).expect("held key");
        other.read(handle).expect("held key");
        assert_eq!(other.flock(handle, LOCK_EX | LOCK_NB), Err(Errno::EAGAIN));
        assert_eq!(other.create(&path), Err(Errno::EEXIST));
        assert_eq!(other.write(handle, "x"), Err(Errno::EACCES));
        assert_ok(&mount.bash("cat $M/claims/k $M/status/k && ls -l $M/claims && stat $M/claims/k"));
    });
    assert_eq!(after, before);
}

#[test]
fn another_process_cannot_renew_by_touching_the_file() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (holder, other) = (Agent::new(), Agent::new());
    let fd = holder.create(&path).expect("free key");
    let (before, after) = around(&mount, || {
        // Whatever it is told, the deadline stays.
        let handle = other.open(&path, O_RDWR).expect("held key");
        let _ = other.touch(handle);
        let _ = other.script("os.utime(path)", json!({ "path": path }));
        mount.bash("touch $M/claims/k");
    });
    assert_eq!(after, before);
    assert_eq!(holder.epoch(fd), Ok(1));
}

/// Claims a key and renews it for three times the TTL; then what its status says, and the longest that any of these came
/// after the renewal before.
const BEAT: &str = r#"
last, beats, longest, failed = time.monotonic(), 0, 0, None
fd = os.open(f"{root}/claims/k", os.O_RDWR | os.O_CREAT | os.O_EXCL)
end = last + 3 * ttl
while time.monotonic() < end and failed is None:
    now = time.monotonic()
    try: os.write(fd, str(beats).encode())
    except OSError as error: failed = error.errno
    longest = max(longest, time.monotonic() - last)
    last, beats = now, beats + 1
    time.sleep(ttl / 10)
with open(f"{root}/status/k") as file: status = json.load(file)
longest = max(longest, time.monotonic() - last)
result = dict(fd=fd, beats=beats, longest=longest, failed=failed, status=status)
"#;

#[test]
fn a_lease_that_is_renewed_lasts_and_one_that_is_not_ends() {
    let (mount, agent, fd) = in_luck("it was stopped for a TTL between two beats", |attempt| {
        let ttl = longer(Duration::from_secs(1), attempt);
        let mount = Mount::with(&["--ttl", &shown(ttl)]);
        let agent = Agent::new();
        let names = json!({ "root": mount.root(), "ttl": ttl.as_secs_f64() });
        agent.begin("script", json!([BEAT, names]));
        let beaten = agent.answer_within(3 * ttl + PATIENCE).expect("in time").expect("a free key");
        if beaten["longest"].as_f64().expect("seconds") >= ttl.as_secs_f64() {
            return None;
        }
        assert_eq!(beaten["failed"], Value::Null, "each beat came in time");
        assert!(beaten["beats"].as_u64() > Some(5), "{beaten}");
        let status = &beaten["status"];
        assert_eq!((status["state"].as_str(), status["epoch"].as_u64()), (Some("held"), Some(1)));
        Some((mount, agent, beaten["fd"].as_i64().expect("a descriptor")))
    });
    mount.wait_status("k", "expired", |status| status["outcome"] == "expired");
    assert_eq!(agent.write(fd, "one more"), Err(Errno::ESTALE));
}

#[test]
fn futimens_renews_nothing_for_a_process_that_has_a_lost_handle_on_the_key() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let agent = Agent::new();
    let lost = agent.create(&path).expect("free key");
    assert!(mount.leasefs(&["evict", "k", "--epoch", "1"]).status.success());
    let held = agent.create(&path).expect("free again");
    let before = mount.status("k");
    assert_eq!(agent.touch(lost), Err(Errno::ESTALE));
    assert_eq!(mount.status("k"), before, "the later attempt is not renewed by the earlier one's handle");
    agent.write(held, "still mine").expect("the later handle holds");
}
