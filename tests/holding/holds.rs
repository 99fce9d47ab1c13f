//! `LEASEFS_IOC_HOLDS`: which lease an open file holds, asked by any copy of its handle.

use libc::{LOCK_EX, LOCK_SH, LOCK_UN};
use nix::errno::Errno;
use serde_json::json;

use crate::common::agent::{Agent, Answer, Fd};
use crate::common::{Mount, assert_ok};

/// Asks; `_IOR('L', 1, u64)`.
const HOLDS: &str = "result = int.from_bytes(fcntl.ioctl(fd, 0x80084c01, bytes(8)), 'little')";

fn holds(agent: &Agent, fd: Fd) -> Answer<u64> {
    agent.script(HOLDS, json!({ "fd": fd })).map(|epoch| epoch.as_u64().expect("an epoch"))
}

#[test]
fn a_handle_tells_the_epoch_it_holds_and_so_does_every_copy() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (holder, other) = (Agent::new(), Agent::new());
    let fd = holder.create(&path).expect("free key");
    assert_eq!(holds(&holder, fd), Ok(1));
    let copy = holder.call("dup", json!([fd])).expect("dup").as_i64().expect("a descriptor");
    let child = holder.fork();
    holder.close(fd);
    assert_eq!((holds(&holder, copy), holds(&child, fd), holds(&child, copy)), (Ok(1), Ok(1), Ok(1)));
    let plain = other.handle(&path);
    assert_eq!(holds(&other, plain), Ok(0), "a handle of a key that another holds");
    mount.kill_server();
    assert_eq!((holds(&child, fd), holds(&other, plain)), (Ok(1), Ok(0)), "another server says the same");
    child.kill();
    holder.close(copy);
    other.flock(plain, LOCK_EX).expect("free key");
    assert_eq!(holds(&other, plain), Ok(2));
    other.flock(plain, LOCK_UN).expect("holder");
    assert_eq!(holds(&other, plain), Ok(0), "unlocked");
    other.flock(plain, LOCK_SH).expect("free key");
    assert_eq!(holds(&other, plain), Ok(0), "a shared lock has no epoch");
}

#[test]
fn a_handle_that_lost_its_lease_is_told_so() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (holder, next) = (Agent::new(), Agent::new());
    let fd = holder.create(&path).expect("free key");
    assert_ok(&mount.leasefs(&["evict", "k", "--epoch", "1"]));
    assert_eq!(holds(&holder, fd), Err(Errno::ESTALE));
    let new = next.create(&path).expect("free key");
    assert_eq!((holds(&holder, fd), holds(&next, new)), (Err(Errno::ESTALE), Ok(2)));
    next.set_xattr(&path, "user.lease.ttl", "1ms").expect("the holder's uid");
    crate::wait_until(jiff::Timestamp::now().as_millisecond() + 2);
    assert_eq!(holds(&next, new), Err(Errno::ESTALE), "also where nothing else has touched it since");
}

#[test]
fn no_other_file_and_no_other_number_is_answered() {
    let mount = Mount::new();
    let agent = Agent::new();
    let fd = agent.create(&mount.claim("k")).expect("free key");
    let draft = agent.handle(&mount.result("k", 1));
    let status = agent.open(&mount.root().join("status/k"), libc::O_RDONLY).expect("held key");
    for other in [draft, status] {
        assert_eq!(holds(&agent, other), Err(Errno::ENOTTY));
    }
    for number in ["0x80084c02", "0x80044c01", "0x5401"] {
        let asked = agent.script(&HOLDS.replace("0x80084c01", number), json!({ "fd": fd }));
        assert_eq!(asked, Err(Errno::ENOTTY), "{number}");
    }
    assert_eq!(holds(&agent, fd), Ok(1));
}
