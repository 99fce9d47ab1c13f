//! When the server, the connection or the mount ends.

use crate::common::{InTime, LEASEFS, assert_ok, wait_for};
use crate::tools::{Tools, assert_refused};

#[test]
fn a_killed_server_is_noticed_by_nobody() {
    let tools = Tools::new();
    let process = std::process::id();
    tools.claim(&format!("bound --for {process} --ttl 9s"));
    tools.claim("free --agent planner");
    let holders = (tools.holder("bound"), tools.holder("free"));
    for _ in 0..3 {
        tools.mount.kill_server();
        let renewed = tools.mount.status("bound")["renewed"].clone();
        tools.mount.wait_status("bound", "renewed", |status| status["renewed"] != renewed);
    }
    assert_eq!((tools.holder("bound"), tools.holder("free")), holders);
    assert_ok(&tools.elsewhere("echo done | leasefs complete free --epoch 1"));
    assert_ok(&tools.elsewhere("leasefs release bound --epoch 1"));
    tools.wait_no_holders();
    tools.mount.verify();
}

#[test]
fn after_a_lost_connection_the_attempt_is_taken_back() {
    let mut tools = Tools::new();
    tools.claim("job --agent planner --ttl 10m");
    let holder = tools.holder("job");
    tools.mount.lose_connection();
    tools.mount.start(&[]);
    tools.mount.wait_status("job", "held again", |status| status["state"] == "held" && status["epoch"] == 1);
    assert_eq!(tools.holder("job"), holder);
    assert_eq!(tools.claim("job --agent planner"), 1);
    assert_ok(&tools.elsewhere("echo done | leasefs complete job --epoch 1"));
    tools.wait_no_holders();
    tools.mount.verify();
}

#[test]
fn bound_to_one_who_ended_meanwhile_it_is_given_up() {
    let mut tools = Tools::new();
    let mut process =
        crate::common::Background(std::process::Command::new("sleep").arg("1000").spawn().expect("sleep"));
    tools.claim(&format!("job --for {} --ttl 10m", process.pid()));
    let holder = tools.holder("job");
    tools.mount.lose_connection();
    process.signal("KILL");
    process.wait();
    wait_for("end of the holder", || crate::common::agent::has_ended(holder));
    tools.mount.start(&[]);
    tools.mount.wait_status("job", "free", |status| status["state"] == "free");
}

#[test]
fn an_unmount_finds_it_busy_as_any_open_file() {
    let tools = Tools::new();
    tools.claim("job --agent planner");
    let root = tools.mount.root();
    let unmount = std::process::Command::new(LEASEFS).arg("unmount").arg(&root).output_in_time();
    assert_refused(&unmount, 1, &["is in use", "leasefs ls"]);
    assert_eq!(tools.mount.state_of("job"), "held");
    let holder = tools.holder("job");
    assert_ok(&tools.elsewhere("leasefs release job --epoch 1"));
    tools.wait_free("job", holder);
    let mut tools = tools;
    tools.mount.unmount();
}

/// As that of a holder process, which ends a moment after its key was given back. An unmount waits for a second.
#[test]
fn an_unmount_waits_for_a_file_that_is_just_being_closed() {
    let mut mount = crate::common::Mount::new();
    crate::common::shown_once("an unmount that waits", || {
        let agent = crate::common::agent::Agent::new();
        agent.create(&mount.claim("k")).expect("free key");
        let unmounted = std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(std::time::Duration::from_millis(100));
                drop(agent);
            });
            std::process::Command::new(LEASEFS).arg("unmount").arg(mount.root()).output_in_time()
        });
        if unmounted.status.success() { Ok(()) } else { Err(crate::common::stderr(&unmounted)) }
    });
    mount.start(&[]);
}

#[test]
fn an_evicted_attempt_has_no_holder_any_more() {
    let tools = Tools::new();
    tools.claim("job --agent planner");
    let holder = tools.holder("job");
    assert_ok(&tools.elsewhere("leasefs evict job --epoch 1 --reason test"));
    tools.wait_free("job", holder);
    let late = tools.elsewhere("echo late | leasefs complete job --epoch 1");
    assert_refused(&late, 75, &["job: epoch 1 does not hold it", "nothing was recorded"]);
}
