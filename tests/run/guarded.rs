//! The runner or its guard is killed: no process of the command is alive when the key is granted next.

use std::fs;

use crate::common::agent::has_ended;
use crate::common::{Mount, assert_ok, stop, wait_for};
use crate::{Next, Run};

/// The command, a child in its group, one in a session of its own, and one that has become a daemon; all deaf to TERM.
const FAMILY: &str = r#"
trap '' TERM HUP
member='echo $$ >>"$SEEN"; exec sleep 1000'
sh -c "$member" &
setsid sh -c "$member" &
(setsid sh -c "$member" &)
eval "$member""#;
const SIZE: usize = 4;

#[test]
fn a_killed_runners_command_and_all_that_descends_from_it_are_dead_before_the_next_grant() {
    let mount = Mount::new();
    for round in 1..=50u64 {
        let mut run = Run::script(&mount, &["-k", "0.02"], FAMILY, SIZE);
        let next = Next::in_line(&mount, "job", &run.pids());
        run.runner.signal("KILL");
        assert_eq!(next.found_alive(), [0; 0], "round {round}");
        assert_eq!(run.code(), None);
        assert_eq!(mount.status("job")["epoch"], 2 * round);
    }
    mount.verify();
}

#[test]
fn a_killed_runner_takes_its_command_along_on_every_one_of_several_keys() {
    let mount = Mount::new();
    let args = ["-k", "0.02", "b", "a", "c", "--", "sh", "-c", FAMILY];
    let run = Run::start(&mount, &args);
    wait_for("the command's processes are there", || run.pids().len() == SIZE);
    let next = ["a", "b", "c"].map(|key| Next::in_line(&mount, key, &run.pids()));
    run.runner.signal("KILL");
    for next in next {
        assert_eq!(next.found_alive(), [0; 0]);
    }
}

#[test]
fn the_command_of_a_killed_runner_may_tidy_up_while_the_key_is_held() {
    let mount = Mount::new();
    let tidy =
        r#"trap 'sleep 0.3; echo tidy >"$SEEN.tidy"; exit' TERM; echo $$ >>"$SEEN"; while :; do sleep 0.02; done"#;
    let mut run = Run::script(&mount, &[], tidy, 1);
    run.runner.signal("KILL");
    run.runner.wait();
    wait_for("the command has tidied up", || {
        let state = mount.state_of("job");
        let is_tidy = run.seen.with_extension("tidy").exists();
        assert!(is_tidy || state == "held", "{state} before the command ended");
        is_tidy
    });
    mount.wait_status("job", "free", |status| status["state"] == "free" && status["outcome"] == "released");
    let said = run.said();
    assert_eq!(said, "leasefs: job: `leasefs run` was killed: ending its command\n");
}

#[test]
fn a_killed_guard_takes_the_command_along_and_the_runner_does_its_work() {
    let mount = Mount::new();
    for _ in 0..10 {
        let mut run = Run::script(&mount, &[], FAMILY, SIZE);
        let next = Next::in_line(&mount, "job", &run.pids());
        run.kill_guard();
        assert_eq!(next.found_alive(), [0; 0]);
        assert_eq!(run.code(), Some(125));
        assert_eq!(run.said(), "leasefs: the process that guards the command was killed: the command was ended\n");
    }
    mount.verify();
}

#[test]
fn with_both_killed_the_command_does_not_go_on() {
    let mount = Mount::new();
    let mut run = Run::script(&mount, &[], r#"trap '' TERM; echo $$ >>"$SEEN"; exec sleep 1000"#, 1);
    let guard = run.guard();
    // Stopped, so that neither does anything about the other's death.
    stop(guard);
    run.runner.signal("STOP");
    run.kill_guard();
    run.runner.signal("KILL");
    assert_eq!(run.code(), None);
    wait_for("the command is dead", || run.living().is_empty());
    mount.wait_status("job", "free", |status| status["state"] == "free");
}

#[test]
fn a_guard_that_does_nothing_about_a_lost_lease_is_killed() {
    let mount = Mount::new();
    let mut run = Run::script(&mount, &["-k", "0.1"], FAMILY, SIZE);
    stop(run.guard());
    assert_ok(&mount.leasefs(&["evict", "job", "--epoch", "1"]));
    assert_eq!(run.code(), Some(75));
    assert_eq!(run.living(), [0; 0]);
}

#[test]
fn the_key_is_free_and_the_guard_gone_as_soon_as_a_run_has_ended() {
    let mount = Mount::new();
    let script = r#"cat /proc/$PPID/comm; echo $PPID"#;
    for _ in 0..50 {
        let output = mount.leasefs(&["run", "-n", "job", "--", "sh", "-c", script]);
        assert_ok(&output);
        let said = crate::common::stdout(&output);
        let guard = said.strip_prefix("leasefs-guard\n").expect("its parent is the guard").trim().parse().expect("pid");
        assert!(has_ended(guard));
        assert_eq!(mount.state_of("job"), "free");
    }
}

#[test]
fn what_a_command_leaves_behind_when_it_ends_goes_on_without_the_key() {
    let mount = Mount::new();
    let script = r#"setsid sh -c 'echo $$ >>"$SEEN"; exec sleep 1000' >/dev/null 2>&1 & while [ ! -s "$SEEN" ]; do sleep 0.01; done"#;
    let mut run = Run::script(&mount, &[], script, 1);
    assert_eq!(run.code(), Some(0));
    assert_eq!(mount.state_of("job"), "free");
    assert_eq!(run.living(), run.pids());
    // It is nobody's ward any more: not the runner's, not the guard's.
    let status = fs::read_to_string(format!("/proc/{}/status", run.pids()[0])).expect("alive");
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:\t")).expect("PPid");
    assert_ne!(parent.parse(), Ok(run.runner.pid()), "{status}");
}
