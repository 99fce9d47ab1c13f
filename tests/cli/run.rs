//! `leasefs run` while all goes well, and when the keys or the command are not to be had.

use std::fs;
use std::time::{Duration, Instant};

use super::common::agent::{Agent, Stray};
use super::common::luck::in_luck;
use super::common::{Mount, assert_ok, read_in_time, shown_once, stdout, wait_for};
use super::{assert_refused, hold, start, stderr};

#[test]
fn the_command_runs_while_the_key_is_held() {
    let mount = Mount::new();
    let output = mount.leasefs(&["run", "job", "--", "cat", &format!("{}/status/job", mount.root().display())]);
    assert_ok(&output);
    let seen: serde_json::Value = serde_json::from_str(&stdout(&output)).expect("status is JSON");
    assert_eq!(
        (seen["state"].as_str(), seen["epoch"].as_u64(), seen["via"].as_str()),
        (Some("held"), Some(1), Some("lock"))
    );
    mount.wait_status("job", "free again", |status| status["state"] == "free" && status["outcome"] == "released");
    mount.verify();
}

#[test]
fn the_environment_names_key_epoch_and_result() {
    let mount = Mount::new();
    let script =
        r#"printf '%s %s %s' "$LEASEFS_KEY" "$LEASEFS_EPOCH" "$LEASEFS_RESULT"; echo done > "$LEASEFS_RESULT""#;
    for epoch in 1..=2 {
        let output = mount.leasefs(&["run", "job", "--", "sh", "-c", script]);
        assert_ok(&output);
        let result = mount.result("job", epoch);
        assert_eq!(stdout(&output), format!("job {epoch} {}", result.display()));
        assert_eq!(fs::read_to_string(result).expect("result"), "done\n");
        // Finished, and by lock it can be taken again all the same.
        mount.wait_status("job", "finished", |status| status["state"] == "finished");
    }
}

#[test]
fn several_keys_are_listed_in_the_order_given() {
    let mount = Mount::new();
    fs::create_dir(mount.root().join("claims/team")).expect("namespace");
    drop(hold(&mount, "a"));
    mount.wait_status("a", "free", |status| status["state"] == "free");
    let show = r#"printf '%s/' $LEASEFS_KEY; printf '%s/' $LEASEFS_EPOCH; echo "$LEASEFS_RESULT" | wc -l"#;
    let output = mount.leasefs(&["run", "team/z", "b", "a", "b", "--", "sh", "-c", show]);
    assert_ok(&output);
    assert_eq!(stdout(&output), "team/z/b/a/1/1/2/3\n");
}

#[test]
fn several_keys_are_taken_all_or_none() {
    let mount = Mount::new();
    let _held = hold(&mount, "b");
    let marker = mount.scratch().join("ran");
    let output = mount.leasefs(&["run", "-n", "c", "b", "a", "--", "touch", marker.to_str().expect("path")]);
    assert_refused(&output, 1, &["b: held by pid", "nothing was run"]);
    assert!(!marker.exists());
    mount.wait_status("a", "given back", |status| status["state"] == "free" && status["epoch"] == 1);
    // Taken in one order: c comes after b, so it was never touched.
    assert_eq!(mount.state_of("c"), "free");
    assert!(!mount.root().join("status/c").exists());
}

#[test]
fn runs_with_keys_in_opposite_orders_do_not_deadlock() {
    let mount = Mount::new();
    std::thread::scope(|scope| {
        for keys in [["a", "b"], ["b", "a"]] {
            let mount = &mount;
            scope.spawn(move || {
                for _ in 0..15 {
                    assert_ok(&mount.leasefs(&["run", "-w", "60", keys[0], keys[1], "--", "true"]));
                }
            });
        }
    });
    assert_eq!(mount.status("a")["epoch"], 30);
    assert_eq!(mount.status("b")["epoch"], 30);
    mount.verify();
}

#[test]
fn a_held_key_is_not_waited_for_with_n() {
    let mount = Mount::new();
    let _held = hold(&mount, "job");
    assert_refused(&mount.leasefs(&["run", "-n", "job", "--", "true"]), 1, &["job: held by pid", "uid 0"]);
    assert_refused(&mount.leasefs(&["run", "-n", "-E", "9", "job", "--", "true"]), 9, &["job: held"]);
    assert_refused(&mount.leasefs(&["run", "-w", "0", "job", "--", "true"]), 1, &["job: held"]);
    let status = mount.status("job");
    assert_eq!((status["epoch"].as_u64(), status["waiters"].as_u64()), (Some(1), Some(0)));
}

#[test]
fn a_wait_ends_on_time() {
    let mount = Mount::new();
    let _held = hold(&mount, "job");
    for (secs, keys) in [(0.3, &["job"][..]), (1.2, &["a", "job"][..])] {
        shown_once(&format!("-w {secs} is kept"), || {
            let began = Instant::now();
            let limit = secs.to_string();
            let output = mount.leasefs(&[&["run", "-w", &limit], keys, &["--", "true"]].concat());
            let took = began.elapsed().as_secs_f64();
            assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
            assert!(took >= secs, "-w {secs} took {took} s");
            assert_eq!(mount.status("job")["waiters"], 0);
            if took < secs + 2.0 { Ok(()) } else { Err(format!("{took} s")) }
        });
    }
}

#[test]
fn a_wait_ends_when_the_key_is_given_up() {
    let mount = Mount::new();
    for limit in [&[][..], &["-w", "60"][..]] {
        let held = hold(&mount, "job");
        let mut run = start(&mount, &[&["run"], limit, &["job", "--", "true"]].concat());
        mount.wait_status("job", "one waits", |status| status["waiters"] == 1);
        drop(held);
        assert_eq!(run.wait().code(), Some(0));
    }
    assert_eq!(mount.status("job")["epoch"], 4);
}

#[test]
fn a_long_wait_says_who_holds_the_key() {
    let mount = Mount::new();
    // Not this process: a run that waits for its own parent is told of the ring.
    let agent = Agent::new();
    let _fd = agent.create(&mount.claim("job")).expect("free");
    let holder = format!("held by pid {}", agent.pid());
    // What is said after a second is not if the process gets no further than to that second until its time is over.
    shown_once("a wait of 1.8 s is mentioned", || {
        let said = stderr(&mount.leasefs(&["run", "-w", "1.8", "job", "--", "true"]));
        let lines: Vec<_> = said.lines().collect();
        let last = lines.last().expect("it says why it ended");
        assert!(last.contains(&holder) && last.ends_with("(waited 1.8 s): nothing was run"), "{said}");
        match lines[..] {
            [first, _] if first.contains(&holder) && first.ends_with(": waiting, 1st of 1 in line") => Ok(()),
            _ => Err(said),
        }
    });
    let quick = mount.leasefs(&["run", "-w", "0.2", "job", "--", "true"]);
    assert_eq!(stderr(&quick).lines().count(), 1, "{}", stderr(&quick));
}

/// Its process stood still until after its end, and after it would have been mentioned.
#[test]
fn a_wait_that_is_over_is_not_mentioned_any_more() {
    let mount = Mount::new();
    let agent = Agent::new();
    let _fd = agent.create(&mount.claim("job")).expect("free");
    let stand_still = || {
        let mut run = start(&mount, &["run", "-w", "0.7", "job", "--", "true"]);
        let began = Instant::now();
        let mut is_over = false;
        mount.wait_status("job", "one waits, or did", |status| {
            is_over = run.0.try_wait().expect("wait").is_some();
            is_over || status["waiters"] == 1
        });
        if !is_over {
            run.signal("STOP");
            wait_for("it would have been mentioned", || began.elapsed() > Duration::from_millis(1_500));
            run.signal("CONT");
        }
        assert_eq!(run.wait().code(), Some(1));
        let said = read_in_time(run.0.stderr.take());
        assert!(said.lines().count() == 1 && said.trim_end().ends_with("(waited 0.7 s): nothing was run"), "{said}");
        (!is_over).then_some(())
    };
    for _ in 0..4 {
        in_luck("it had ended before it was stopped", |_| stand_still());
    }
}

#[test]
fn a_signal_ends_a_waiting_run_and_its_place_in_line() {
    let mount = Mount::new();
    let _held = hold(&mount, "job");
    for signal in ["TERM", "INT", "KILL"] {
        let mut run = start(&mount, &["run", "job", "--", "true"]);
        mount.wait_status("job", "one waits", |status| status["waiters"] == 1);
        run.signal(signal);
        assert_eq!(run.wait().code(), None, "SIG{signal} ends it");
        mount.wait_status("job", "nobody waits", |status| status["waiters"] == 0);
    }
}

#[test]
fn keys_taken_stay_alive_while_the_next_is_waited_for() {
    let mount = Mount::new();
    let held = hold(&mount, "b");
    let mut run = start(&mount, &["run", "--ttl", "9s", "a", "b", "--", "true"]);
    mount.wait_status("b", "one waits", |status| status["waiters"] == 1);
    mount.wait_outlived(&["a"], 1);
    drop(held);
    assert_eq!(run.wait().code(), Some(0));
}

#[test]
fn nothing_is_claimed_for_a_command_that_cannot_start() {
    let mount = Mount::new();
    assert_refused(
        &mount.leasefs(&["run", "job", "--", "no-such-command"]),
        127,
        &["no-such-command: command not found"],
    );
    assert_refused(&mount.leasefs(&["run", "job", "--", "/no/such/command"]), 127, &["command not found"]);
    assert_refused(&mount.leasefs(&["run", "job", "--", "/etc/passwd"]), 126, &["cannot be executed"]);
    assert!(!mount.root().join("status/job").exists());
}

#[test]
fn the_exit_code_is_the_command_s() {
    let mount = Mount::new();
    for (script, code) in [("exit 0", 0), ("exit 3", 3), ("exit 255", 255), ("kill -9 $$", 137), ("kill -TERM $$", 143)]
    {
        let output = mount.leasefs(&["run", "job", "--", "sh", "-c", script]);
        assert_eq!(output.status.code(), Some(code), "{script}: {}", stderr(&output));
    }
}

#[test]
fn a_short_ttl_is_kept_alive_by_renewal() {
    let mount = Mount::new();
    assert_ok(&mount.leasefs(&["run", "--ttl", "8s", "job", "--", "sleep", "10"]));
    mount.wait_status("job", "free", |status| status["state"] == "free");
    let history = stdout(&mount.leasefs(&["history", "--json", "job"]));
    let attempts: Vec<serde_json::Value> =
        history.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    assert_eq!(attempts.len(), 1, "{history}");
    assert_eq!((attempts[0]["outcome"].as_str(), attempts[0]["ttl_ms"].as_u64()), (Some("released"), Some(8000)));
}

#[test]
fn the_command_does_not_inherit_the_lease() {
    let mount = Mount::new();
    let marker = mount.scratch().join("pid");
    // A grandchild goes on after the command: it must not keep the key.
    let script = format!("ls -l /proc/self/fd; sleep 60 >/dev/null 2>&1 & echo $! > {}", marker.display());
    let output = mount.leasefs(&["run", "job", "--", "sh", "-c", &script]);
    assert_ok(&output);
    assert!(stdout(&output).contains(" -> ") && !stdout(&output).contains("claims/job"), "{}", stdout(&output));
    mount.wait_status("job", "free", |status| status["state"] == "free");
    let pid = fs::read_to_string(marker).expect("pid");
    drop(Stray(pid.trim().parse().expect("a pid")));
}

#[test]
fn what_cannot_be_claimed_says_why() {
    let mount = Mount::shared();
    fs::create_dir(mount.root().join("claims/team")).expect("namespace");
    super::common::set_mode(&mount.root().join("claims/team"), 0o755);
    drop(hold(&mount, "key"));
    let run = |key: &str| mount.leasefs(&["run", "-n", key, "--", "true"]);
    assert_refused(&run("no/such"), 125, &["its namespace does not exist", "mkdir -p"]);
    assert_refused(&run("team"), 125, &["team", "namespace, not a key"]);
    let _held = hold(&mount, "key");
    assert_refused(&run("key/below"), 125, &["nothing can be below a key"]);
    assert_refused(&run("a//b"), 125, &["a//b: not a key"]);
    let stranger = super::as_stranger(&mount, &["run", "-n", "team/job", "--", "true"]);
    assert_refused(&stranger, 125, &["team/job", "permission denied"]);
    for ttl in ["0s", "5", "400d"] {
        let output = mount.leasefs(&["run", "--ttl", ttl, "other", "--", "true"]);
        assert_eq!(output.status.code(), Some(2), "{ttl}: {}", stderr(&output));
    }
    assert!(!mount.root().join("status/other").exists());
}
