//! A lease that is not renewed, or lost: the command is ended in time, also when the runner is stopped.

use std::time::{Duration, Instant};

use crate::common::luck::{in_peace, shown};
use crate::common::{LEASEFS, Mount, Stopped, assert_ok, wait_for};
use crate::{Next, Run, set_ttl};

/// Two processes deaf to TERM, one of them in a session of its own.
const DEAF: &str = r#"
trap '' TERM
setsid sh -c 'echo $$ >>"$SEEN"; exec sleep 1000' &
echo $$ >>"$SEEN"
exec sleep 1000"#;

#[test]
fn a_runner_frozen_past_its_ttl_has_no_command_when_the_next_begins() {
    in_peace(Duration::from_secs(1), |time| {
        let mount = Mount::new();
        for round in 1..=8u64 {
            let mut run = Run::script(&mount, &["--ttl", &shown(time)], DEAF, 2);
            let next = Next::in_line(&mount, "job", &run.pids());
            run.runner.signal("STOP");
            assert_eq!(next.found_alive(), [0; 0], "round {round}");
            let status = mount.status("job");
            assert_eq!((status["epoch"].as_u64(), status["outcome"].as_str()), (Some(2 * round), Some("expired")));
            run.runner.signal("CONT");
            assert_eq!(run.code(), Some(75));
        }
        mount.verify();
    });
}

#[test]
fn the_command_gets_term_in_time_to_tidy_up() {
    // Of two seconds, TERM is sent 400 ms before the end, KILL 200 ms before.
    in_peace(Duration::from_secs(2), |time| {
        let mount = Mount::new();
        let tidy = r#"trap 'cat "$LEASEFS_ROOT/status/job" >"$SEEN.tidy"; exit' TERM; echo $$ >>"$SEEN"; while :; do sleep 0.01; done"#;
        let mut run = Run::script(&mount, &["--ttl", &shown(time)], tidy, 1);
        run.runner.signal("STOP");
        wait_for("the command has tidied up", || run.living().is_empty());
        let seen = std::fs::read_to_string(run.seen.with_extension("tidy")).expect("it has tidied up");
        assert!(seen.contains(r#""state":"held""#), "the lease was still its own: {seen}");
        run.runner.signal("CONT");
        assert_eq!(run.code(), Some(75));
        assert!(run.said().starts_with("leasefs: job: "));
    });
}

#[test]
fn a_runner_whose_tree_does_not_answer_has_no_command_when_the_next_begins() {
    in_peace(Duration::from_secs(1), |time| {
        let mount = Mount::new();
        let mut run = Run::script(&mount, &["--ttl", &shown(time)], DEAF, 2);
        let next = Next::in_line(&mount, "job", &run.pids());
        let stopped = Stopped::these(&[mount.server_pid().expect("a server")]);
        wait_for("the command is dead", || run.living().is_empty());
        drop(stopped);
        assert_eq!(next.found_alive(), [0; 0]);
        assert_eq!(run.code(), Some(75));
    });
}

/// Whenever the server wakes those who wait for a handle, the kernel asks it what has happened.
#[test]
fn a_tree_that_does_not_say_what_it_has_woken_the_guard_for_does_not_hold_it_up() {
    in_peace(Duration::from_secs(2), |time| {
        let mount = Mount::new();
        let mut run = Run::script(&mount, &["--ttl", &shown(time)], DEAF, 2);
        let guard = Stopped::these(&[run.guard()]);
        let next = Next::in_line(&mount, "job", &run.pids());
        let server = Stopped::these(&[mount.server_pid().expect("a server")]);
        drop(guard);
        wait_for("the command is dead", || run.living().is_empty());
        drop(server);
        assert_eq!(next.found_alive(), [0; 0]);
        assert_eq!(run.code(), Some(75));
    });
}

#[test]
fn a_ttl_that_is_shortened_while_the_runner_is_frozen_is_kept() {
    in_peace(Duration::from_secs(1), shortened_while_frozen);
}

fn shortened_while_frozen(time: Duration) {
    let mount = Mount::new();
    // Of one key, of the second of two, of a command that would outlive a runner that is killed.
    let cases: [(&str, &[&str]); 3] = [("job", &["job"]), ("zz", &["job", "zz"]), ("job", &["--child-keeps", "job"])];
    for (key, args) in cases {
        let args = [&["--ttl", "1d"], args, &["--", "sh", "-c", DEAF]].concat();
        let mut run = Run::start(&mount, &args);
        wait_for("the command's processes are there", || run.pids().len() == 2);
        let next = Next::in_line(&mount, key, &run.pids());
        run.runner.signal("STOP");
        set_ttl(&mount, key, &shown(time));
        assert_eq!(next.found_alive(), [0; 0], "{args:?}");
        assert_eq!(mount.status(key)["outcome"], "expired", "{args:?}");
        run.runner.signal("CONT");
        assert_eq!(run.code(), Some(75));
        let said = run.said();
        assert!(said.contains("not renewed in time: the command was ended before the lease ran out"), "{said}");
    }
    mount.verify();
}

#[test]
fn a_command_goes_on_where_the_ttl_is_made_longer_again_while_its_runner_is_frozen() {
    in_peace(Duration::from_secs(3), |time| {
        let mount = Mount::new();
        let mut run = Run::script(&mount, &["--ttl", "1d"], DEAF, 2);
        run.runner.signal("STOP");
        set_ttl(&mount, "job", &shown(time));
        set_ttl(&mount, "job", "1h");
        let until = Instant::now() + time + Duration::from_secs(1);
        wait_for("the shorter TTL is over", || {
            assert_eq!((run.living().len(), mount.state_of("job").as_str()), (2, "held"));
            Instant::now() > until
        });
        // And shortened once more, it is ended all the same.
        set_ttl(&mount, "job", "1s");
        wait_for("the command is dead", || run.living().is_empty());
        run.runner.signal("CONT");
        assert_eq!(run.code(), Some(75));
    });
}

#[test]
fn an_evicted_lease_is_noticed_although_the_runner_is_frozen() {
    let mount = Mount::new();
    let began = Instant::now();
    let mut run = Run::script(&mount, &["-k", "0.2"], DEAF, 2);
    run.runner.signal("STOP");
    assert_ok(&mount.leasefs(&["evict", "job", "--epoch", "1"]));
    wait_for("the command is dead", || run.living().is_empty());
    assert!(began.elapsed() < Duration::from_secs(30), "the lease would last a day");
    run.runner.signal("CONT");
    assert_eq!(run.code(), Some(75));
    let said = run.said();
    assert!(said.starts_with("leasefs: job: epoch 1 lost its lease") && said.lines().count() == 1, "{said}");
}

#[test]
fn kill_after_says_how_long_a_command_may_take_to_end() {
    let mount = Mount::new();
    for (secs, deaf) in [("0", true), ("1.5", true), ("60", false)] {
        let trap = if deaf { "trap '' TERM" } else { "trap 'exit 0' TERM" };
        let script = format!("{trap}; echo $$ >>\"$SEEN\"; while :; do sleep 0.01; done");
        let mut run = Run::script(&mount, &["--kill-after", secs], &script, 1);
        let began = Instant::now();
        let epoch = mount.status("job")["epoch"].to_string();
        assert_ok(&mount.leasefs(&["evict", "job", "--epoch", &epoch]));
        assert_eq!(run.code(), Some(75));
        let took = began.elapsed().as_secs_f64();
        let least = if deaf { secs.parse().expect("secs") } else { 0.0 };
        assert!((least..least + 20.0).contains(&took), "-k {secs}: {took} s");
        assert_eq!(run.living(), [0; 0]);
    }
}

#[test]
fn a_command_that_renews_itself_goes_on_although_its_runner_is_frozen() {
    in_peace(Duration::from_secs(3), |time| {
        let mount = Mount::new();
        // For two TTLs.
        let renews = r#"echo $$ >>"$SEEN"; i=0; while [ $i -lt 20 ]; do "$LEASEFS" renew job || exit 9; i=$((i + 1)); sleep $PAUSE; done; exit 4"#;
        let script = format!("LEASEFS={LEASEFS} PAUSE={}; {renews}", time.as_secs_f64() / 10.0);
        let mut run = Run::script(&mount, &["--ttl", &shown(time)], &script, 1);
        run.runner.signal("STOP");
        wait_for("the command has ended", || run.living().is_empty());
        run.runner.signal("CONT");
        assert_eq!((run.code(), run.said().as_str()), (Some(4), ""));
        assert_eq!(mount.status("job")["outcome"], "released");
    });
}
