//! Renewal: what renews, what does not, and that the deadline follows.

use libc::{F_GETLK, F_WRLCK, LOCK_EX, LOCK_NB, O_RDWR};
use nix::errno::Errno;
use serde_json::{Value, json};

use crate::common::Mount;
use crate::common::agent::{Agent, Fd};
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
        mount.bash("cat $M/claims/k $M/status/k; ls -l $M/claims; stat $M/claims/k");
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

#[test]
fn a_lease_that_is_renewed_lasts_and_one_that_is_not_ends() {
    let mount = Mount::with(&["--ttl", "1s"]);
    let agent = Agent::new();
    let fd = agent.create(&mount.claim("k")).expect("free key");
    // Three times the TTL, beaten.
    let beats = agent
        .script(
            "end, result = time.monotonic() + 3, 0\nwhile time.monotonic() < end:\n  os.write(fd, str(result).encode()); result += 1; time.sleep(0.1)",
            json!({ "fd": fd }),
        )
        .expect("each beat came in time");
    assert!(beats.as_u64() > Some(5), "{beats} beats");
    let status = mount.status("k");
    assert_eq!((status["state"].as_str(), status["epoch"].as_u64()), (Some("held"), Some(1)));
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
