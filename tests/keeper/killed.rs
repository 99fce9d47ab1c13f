//! A server that is killed is replaced under its clients.

use std::fs;
use std::path::PathBuf;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::common::agent::{Agent, has_ended};
use crate::common::{Mount, wait_for};

/// `.leasefs/config`, parsed.
pub fn config(mount: &Mount) -> serde_json::Value {
    let text = fs::read_to_string(mount.root().join(".leasefs/config")).expect("config");
    serde_json::from_str(&text).expect("JSON")
}

/// Kills the server, and waits until another answers.
pub fn kill_server(mount: &Mount) -> i32 {
    let pid = mount.server_pid().expect("a server");
    kill(Pid::from_raw(pid), Signal::SIGKILL).expect("the server");
    wait_for("its end", || has_ended(pid));
    let next = mount.server_pid().expect("the next server");
    assert_ne!(next, pid);
    next
}

#[test]
fn another_server_serves_the_same_mount() {
    let mut mount = Mount::new();
    let before = config(&mount);
    let agent = Agent::new();
    let fd = agent.create(&mount.claim("held")).expect("free key");
    for starts in 2..=20 {
        kill_server(&mount);
        let after = config(&mount);
        assert_eq!(after["starts"], starts);
        assert_eq!(after["keeper_pid"], before["keeper_pid"]);
        assert_eq!(PathBuf::from(after["mountpoint"].as_str().expect("path")), mount.root());
        assert_eq!(mount.status("held")["epoch"], 1);
        assert_eq!(mount.state_of("held"), "held");
        assert_eq!(agent.epoch(fd), Ok(1));
        let other = Agent::new();
        assert_eq!(other.create(&mount.claim("held")), Err(Errno::EEXIST), "nobody else gets it");
        let fresh = other.create(&mount.claim(&format!("fresh{starts}"))).expect("new claims work");
        assert_eq!(other.epoch(fresh), Ok(1));
    }
    agent.close(fd);
    mount.unmount();
    mount.verify();
}
