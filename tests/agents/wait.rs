//! Waiting for a key, and giving up.

use std::io::Read;

use crate::common::{assert_ok, in_time};
use crate::tools::{Tools, assert_refused, epoch};

#[test]
fn it_waits_in_line_and_says_for_whom() {
    let tools = Tools::new();
    tools.claim("job --agent first");
    let mut second = tools.start("leasefs claim job --agent second");
    tools.mount.wait_status("job", "one waits", |status| status["waiters"] == 1);
    let mut stderr = second.0.stderr.take().expect("piped");
    let (_stderr, said) = in_time("a word about whom it waits for", move || {
        let mut said = [0; 64];
        let length = stderr.read(&mut said).expect("something is said");
        (stderr, String::from_utf8_lossy(&said[..length]).into_owned())
    });
    assert!(said.starts_with("leasefs: job: held by pid"), "{said}");
    assert_ok(&tools.elsewhere("leasefs release job --epoch 1"));
    assert_eq!(second.wait().code(), Some(0));
    let status = tools.mount.status("job");
    assert_eq!((status["epoch"].as_u64(), status["agent"].as_str()), (Some(2), Some("second")));
    tools.mount.verify();
}

#[test]
fn it_waits_no_longer_than_it_is_told_to() {
    let tools = Tools::new();
    tools.claim("job --agent first");
    for limit in ["-n", "-w 0", "-w 0.3"] {
        let refused = tools.step(&format!("leasefs claim job --agent second {limit}"));
        assert_refused(&refused, 1, &["job: held by pid", "nothing was claimed"]);
    }
    let status = tools.mount.status("job");
    assert_eq!((status["epoch"].as_u64(), status["waiters"].as_u64()), (Some(1), Some(0)));
    tools.wait_one_holder("job");
}

#[test]
fn one_who_is_killed_while_waiting_leaves_nobody_in_line() {
    let tools = Tools::new();
    tools.claim("job --agent first");
    for signal in ["INT", "TERM", "KILL", "HUP"] {
        let mut command = tools.command(&["leasefs", "claim", "job", "--agent", "second"]);
        let mut waiting = crate::common::Background(command.spawn().expect("leasefs runs"));
        tools.mount.wait_status("job", "one waits", |status| status["waiters"] == 1);
        waiting.signal(signal);
        assert!(!waiting.wait().success());
        tools.mount.wait_status("job", "nobody waits", |status| status["waiters"] == 0);
        tools.wait_one_holder("job");
    }
    assert_ok(&tools.elsewhere("leasefs release job --epoch 1"));
    assert_eq!(epoch(&tools.step("leasefs claim job --agent third")), 2, "no epoch was used in between");
}
