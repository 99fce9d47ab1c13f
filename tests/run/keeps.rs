//! Handles that the command inherits, and `--child-keeps`: the command outlives its runner and keeps the key.

use std::fs;
use std::time::{Duration, Instant};

use crate::common::luck::{in_peace, shown};
use crate::common::{InTime, Mount, assert_ok, stdout, wait_for};
use crate::{Next, Run, set_ttl};

/// A command that ends when its file `go` is there, with code 4.
const PATIENT: &str = r#"echo $$ >>"$SEEN"; while [ ! -e "$SEEN.go" ]; do sleep 0.01; done; exit 4"#;

/// For three TTLs the key is held by the first attempt, and the next waits.
fn assert_kept(mount: &Mount, next: &Next, time: Duration) {
    let until = Instant::now() + 3 * time;
    wait_for("three TTLs pass", || {
        let status = mount.status("job");
        assert_eq!((status["state"].as_str(), status["epoch"].as_u64()), (Some("held"), Some(1)), "{status}");
        assert!(next.waits(mount, "job"));
        Instant::now() > until
    });
}

fn let_go(run: &Run) {
    let go = run.seen.with_extension("go");
    fs::write(go, "").expect("go");
}

#[test]
fn the_command_of_a_killed_runner_keeps_the_key_until_it_ends() {
    in_peace(Duration::from_secs(1), |time| {
        let mount = Mount::new();
        let mut run = Run::script(&mount, &["--child-keeps", "--ttl", &shown(time)], PATIENT, 1);
        let next = Next::in_line(&mount, "job", &run.pids());
        run.runner.signal("KILL");
        assert_eq!(run.code(), None);
        assert_kept(&mount, &next, time);
        assert_eq!(run.living(), run.pids());
        let_go(&run);
        assert_eq!(next.found_alive(), [0; 0]);
        assert_eq!(mount.status("job")["epoch"], 2);
        assert_eq!(run.said(), "leasefs: job: `leasefs run` was killed: its command goes on and keeps the key\n");
        mount.verify();
    });
}

#[test]
fn the_command_of_a_killed_guard_goes_on_as_before() {
    in_peace(Duration::from_secs(1), |time| {
        let mount = Mount::new();
        let mut run = Run::script(&mount, &["--child-keeps", "--ttl", &shown(time)], PATIENT, 1);
        let next = Next::in_line(&mount, "job", &run.pids());
        run.kill_guard();
        assert_kept(&mount, &next, time);
        let_go(&run);
        assert_eq!(run.code(), Some(4), "the runner still tells how it ended");
        assert_eq!(next.found_alive(), [0; 0]);
        let said = run.said();
        assert_eq!(said, "leasefs: the process that guards the command was killed: the command goes on without\n");
    });
}

#[test]
fn a_guardless_command_is_ended_when_its_lease_is_lost() {
    let mount = Mount::new();
    let mut run = Run::script(&mount, &["--child-keeps", "-k", "0.1"], &format!("trap '' TERM; {PATIENT}"), 1);
    run.kill_guard();
    assert_ok(&mount.leasefs(&["evict", "job", "--epoch", "1"]));
    assert_eq!(run.code(), Some(75));
    assert_eq!(run.living(), [0; 0]);
}

#[test]
fn an_orphaned_command_is_ended_when_its_lease_is_lost() {
    let mount = Mount::new();
    let mut run = Run::script(&mount, &["--child-keeps", "-k", "0.1"], &format!("trap '' TERM; {PATIENT}"), 1);
    run.runner.signal("KILL");
    run.runner.wait();
    assert_eq!(run.living(), run.pids());
    assert_ok(&mount.leasefs(&["evict", "job", "--epoch", "1"]));
    wait_for("the command is dead", || run.living().is_empty());
}

#[test]
fn with_both_killed_the_command_keeps_the_key_by_its_own_handle() {
    let mount = Mount::new();
    let mut run = Run::script(&mount, &["--child-keeps"], PATIENT, 1);
    let next = Next::in_line(&mount, "job", &run.pids());
    run.runner.signal("STOP");
    run.kill_guard();
    run.runner.signal("KILL");
    assert_eq!(run.code(), None);
    assert_eq!(run.living(), run.pids());
    assert!(next.waits(&mount, "job"));
    assert_eq!(mount.status("job")["epoch"], 1);
    let_go(&run);
    // The kernel closes the files of a process that ends just before others see that it has ended.
    assert_eq!(next.found_alive(), [0; 0]);
    wait_for("the command has ended", || run.living().is_empty());
}

#[test]
fn a_handle_is_inherited_when_asked_for_and_only_then() {
    let mount = Mount::new();
    let open =
        r#"for fd in /proc/self/fd/*; do readlink "$fd"; done | grep -c "$LEASEFS_ROOT"; echo "fd=${LEASEFS_FD-none}""#;
    let output = mount.leasefs(&["run", "job", "--", "sh", "-c", open]);
    assert_eq!(stdout(&output), "0\nfd=none\n");
    // Nor that of a run around it, which did not ask for it to go further.
    let nested = mount
        .command(crate::LEASEFS)
        .env("LEASEFS_FD", "9")
        .args(["run", "job", "--", "sh", "-c", open])
        .output_in_time();
    assert_eq!(stdout(&nested), "0\nfd=none\n");
    let asked = mount.leasefs(&["run", "--inherit", "job", "--", "sh", "-c", open]);
    assert!(stdout(&asked).starts_with("1\n") && !stdout(&asked).contains("none"), "{asked:?}");

    let note = r#"for fd in $LEASEFS_FD; do readlink /proc/self/fd/$fd; echo "note $fd" >&$fd; done
        grep -o '"note":"note [0-9]*' $LEASEFS_ROOT/status/[ab] | wc -l"#;
    let output = mount.leasefs(&["run", "--inherit", "b", "a", "--", "bash", "-c", note]);
    assert_ok(&output);
    // In the order given, and each of them the holder's.
    let (b, a) = (mount.claim("b"), mount.claim("a"));
    assert_eq!(stdout(&output), format!("{}\n{}\n2\n", b.display(), a.display()));
}

#[test]
fn what_inherits_the_handle_in_the_background_keeps_the_key_after_the_run() {
    let mount = Mount::new();
    let script = format!("({PATIENT}) >/dev/null 2>&1 & while [ ! -s \"$SEEN\" ]; do sleep 0.01; done");
    let mut run = Run::script(&mount, &["--inherit"], &script, 1);
    assert_eq!(run.code(), Some(0));
    let next = Next::in_line(&mount, "job", &[]);
    assert_eq!(mount.status("job")["epoch"], 1, "held by what was left behind");
    let_go(&run);
    assert_eq!(next.found_alive(), [0; 0]);
}

#[test]
fn inheriting_alone_does_not_let_the_command_outlive_its_runner() {
    let mount = Mount::new();
    let run = Run::script(&mount, &["--inherit", "-k", "0.02"], &format!("trap '' TERM; {PATIENT}"), 1);
    let next = Next::in_line(&mount, "job", &run.pids());
    run.runner.signal("KILL");
    assert_eq!(next.found_alive(), [0; 0]);
}

#[test]
fn a_ttl_that_is_shortened_meanwhile_is_kept_as_well() {
    in_peace(Duration::from_secs(1), shortened_meanwhile);
}

fn shortened_meanwhile(time: Duration) {
    let mount = Mount::new();
    for (round, killed) in ["", "runner", "guard"].into_iter().enumerate() {
        let options: &[&str] = if killed.is_empty() { &["--ttl", "1d"] } else { &["--ttl", "1d", "--child-keeps"] };
        let mut run = Run::script(&mount, options, PATIENT, 1);
        match killed {
            "runner" => {
                run.runner.signal("KILL");
                assert_eq!(run.code(), None);
            }
            "guard" => run.kill_guard(),
            _ => {}
        }
        set_ttl(&mount, "job", &shown(time));
        let until = Instant::now() + 3 * time;
        wait_for("three TTLs pass", || {
            let status = mount.status("job");
            let (state, epoch) = (status["state"].as_str(), status["epoch"].as_u64());
            assert_eq!((state, epoch), (Some("held"), Some(round as u64 + 1)), "without its {killed}: {status}");
            Instant::now() > until
        });
        let_go(&run);
        mount.wait_status("job", "the command has ended", |status| status["state"] == "free");
        fs::remove_file(run.seen.with_extension("go")).expect("go");
    }
}
