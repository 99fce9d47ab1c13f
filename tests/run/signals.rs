//! Signals without a terminal: the command leads a process group, and what means to end or to stop it goes to all of it.

use std::fs;

use crate::common::agent::{Script, has_ended};
use crate::common::{LEASEFS, Mount, wait_for};
use crate::{Run, is_stopped, lines};

/// Two processes in one group, the second started in the background, that tell of the signals they get, and end by TERM.
const COUNTING: &str = r#"
member='
for signal in HUP INT QUIT USR1 USR2; do trap "echo $signal >>\"$SEEN.$name\"" $signal; done
trap "echo TERM >>\"$SEEN.$name\"; exit 9" TERM
echo $$ >>"$SEEN"
while :; do sleep 0.01 & wait; done'
name=child env --default-signal=INT,QUIT bash -c "$member" &
name=command exec bash -c "$member""#;

#[test]
fn signals_reach_the_command_and_where_they_end_it_its_group() {
    let mount = Mount::new();
    let mut run = Run::script(&mount, &[], COUNTING, 2);
    let got = |name: &str| {
        let text = fs::read_to_string(run.seen.with_extension(name)).unwrap_or_default();
        text.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let mut sent = Vec::new();
    for (signal, to_all) in [("HUP", false), ("USR1", false), ("INT", true), ("USR2", false), ("QUIT", true)] {
        run.runner.signal(signal);
        sent.push((signal, to_all));
        let commands: Vec<&str> = sent.iter().map(|(signal, _)| *signal).collect();
        let childs: Vec<&str> = sent.iter().filter(|(_, to_all)| *to_all).map(|(signal, _)| *signal).collect();
        wait_for("the command got it", || got("command") == commands && got("child") == childs);
    }
    run.runner.signal("TERM");
    assert_eq!(run.code(), Some(9));
    wait_for("its group has ended as well", || run.living().is_empty());
    assert_eq!(mount.state_of("job"), "free");
}

#[test]
fn the_command_leads_a_group_that_neither_runner_nor_guard_is_in() {
    let mount = Mount::new();
    let run = Run::script(&mount, &[], r#"echo $$ >>"$SEEN"; exec sleep 1000"#, 1);
    let command = run.pids()[0];
    let group = |pid: i32| nix::unistd::getpgid(Some(nix::unistd::Pid::from_raw(pid))).expect("alive").as_raw();
    assert_eq!(group(command), command);
    assert_eq!(group(run.guard()), run.guard());
    assert_eq!(group(run.runner.pid()), run.runner.pid());
}

#[test]
fn the_group_of_the_runner_can_be_killed_without_the_guard() {
    let mount = Mount::new();
    // As a supervisor does that wants all of it gone: `kill -9 -PGID`.
    let run = Run::script(&mount, &["-k", "0.02"], r#"trap '' TERM; echo $$ >>"$SEEN"; exec sleep 1000"#, 1);
    let next = crate::Next::in_line(&mount, "job", &run.pids());
    nix::sys::signal::killpg(nix::unistd::Pid::from_raw(run.runner.pid()), nix::sys::signal::Signal::SIGKILL)
        .expect("the group of the runner");
    assert_eq!(next.found_alive(), [0; 0]);
}

#[test]
fn a_stopped_runner_stops_its_command_and_continues_it() {
    let mount = Mount::new();
    let seen = mount.scratch().join("seen");
    // Job control, so that the runner's group may be stopped by TSTP: nobody could continue an orphaned one. And a command
    // that starts nothing: a shell whose child is stopped before it executes its program waits for it, unstopped.
    let script = format!(
        "set -m; {LEASEFS} run job -- sh -c 'echo $$ >{0}.new; mv {0}.new {0}; exec sleep 1000' & echo $!; read -r _",
        seen.display()
    );
    let shell = Script::start_with(&mount, &["setsid", "bash", "-c", &script]);
    let runner: i32 = shell.line().expect("the runner's pid").parse().expect("a pid");
    wait_for("the command runs", || seen.exists());
    let command: i32 = fs::read_to_string(&seen).expect("pid").trim().parse().expect("a pid");
    for _ in 0..3 {
        crate::send(runner, nix::sys::signal::Signal::SIGTSTP);
        wait_for("both are stopped", || is_stopped(runner) && is_stopped(command));
        assert_eq!(mount.state_of("job"), "held");
        crate::send(runner, nix::sys::signal::Signal::SIGCONT);
        wait_for("both go on", || !is_stopped(runner) && !is_stopped(command));
    }
    crate::send(runner, nix::sys::signal::Signal::SIGTERM);
    wait_for("both have ended", || has_ended(runner) && has_ended(command));
    mount.wait_status("job", "free", |status| status["state"] == "free");
}

#[test]
fn ignored_signals_stay_ignored() {
    let mount = Mount::new();
    let script = r#"trap '' HUP INT; exec "$0" run job -- sh -c 'echo $$ >"$SEEN"; while [ ! -e "$SEEN.go" ]; do sleep 0.01; done'"#;
    let seen = mount.scratch().join("seen");
    let mut command = mount.command("setsid");
    let command = command.args(["sh", "-c", script, LEASEFS]).env("SEEN", &seen);
    let mut run = crate::common::Background(command.spawn().expect("setsid runs"));
    wait_for("the command runs", || lines(&seen) == 1);
    for signal in ["HUP", "INT"] {
        run.signal(signal);
    }
    fs::write(seen.with_extension("go"), "").expect("go");
    assert_eq!(run.wait().code(), Some(0), "as with nohup");
}
