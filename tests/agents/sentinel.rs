//! `--sentinel TEXT`: held while a process has the text in its command line, once it had time to come up.

use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::{Background, InTime, assert_ok, shown_once, stdout, wait_for};
use crate::tools::{Tools, assert_refused};

/// A text that no other process has.
fn text(name: &str) -> String {
    format!("leasefs-test-{}-{name}", std::process::id())
}

/// A program with that among its arguments.
fn agent(text: &str) -> Background {
    let mut command = Command::new("sh");
    Background(command.args(["-c", "read -r _ </dev/zero; sleep 1000", "--session", text]).spawn().expect("sh runs"))
}

/// Claims the key `job`, and gives the pid of its holder.
fn claim(tools: &Tools, text: &str, options: &str) -> i32 {
    // The text is not in the shell's own command line.
    let script = format!("leasefs claim job --json {options} --sentinel \"$TEXT\"; exit $?");
    let output = tools.command(&["bash", "-c", &script]).env("TEXT", text).output_in_time();
    assert_ok(&output);
    let told: serde_json::Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    told["holder_pid"].as_i64().expect("a pid") as i32
}

#[test]
fn the_launcher_claims_before_its_agent_is_visible() {
    let tools = Tools::new();
    let text = text("later");
    let began = Instant::now();
    let holder = claim(&tools, &text, "--grace 13s --ttl 7s");
    // Longer than the TTL: the grace counts as a sign of life.
    tools.mount.wait_outlived(&["job"], 1);
    let mut agent = agent(&text);
    wait_for("the end of the grace", || began.elapsed() > Duration::from_secs(13));
    tools.mount.wait_outlived(&["job"], 1);
    agent.signal("STOP");
    assert_eq!(tools.mount.state_of("job"), "held");
    agent.signal("KILL");
    agent.wait();
    tools.wait_free("job", holder);
    let last = tools.history("job").pop().expect("an attempt");
    assert_eq!(last["outcome"], "released", "{last}");
    assert!(last["reason"].as_str().is_some_and(|why| why.contains(&text)), "{last}");
}

#[test]
fn one_that_never_comes_up_ends_it_after_the_grace() {
    let tools = Tools::new();
    let began = Instant::now();
    let holder = claim(&tools, &text("never"), "--grace 1500ms");
    tools.wait_free("job", holder);
    assert!(began.elapsed() > Duration::from_millis(1_500), "after {:?}", began.elapsed());
}

#[test]
fn two_that_are_held_for_the_same_text_do_not_keep_each_other() {
    let tools = Tools::new();
    let text = text("shared");
    let holder = claim(&tools, &text, "--grace 0s");
    let second = tools.command(&["leasefs", "claim", "other", "--grace", "0s", "--sentinel", &text]).output_in_time();
    assert_ok(&second);
    tools.wait_free("job", holder);
    tools.mount.wait_status("other", "free", |status| status["state"] == "free");
    tools.wait_no_holders();
}

#[test]
fn what_would_always_be_there_or_means_nothing_is_refused() {
    let tools = Tools::new();
    for bad in [
        "--sentinel ''",
        "--sentinel x --grace soon",
        "--grace 1s",
        "--sentinel x --for 1",
        "--sentinel x --grace 400d",
    ] {
        let output = tools.step(&format!("leasefs claim job {bad}"));
        assert_eq!(output.status.code(), Some(2), "{bad}: {output:?}");
    }
    assert_eq!(tools.mount.state_of("job"), "free");
    assert_refused(&tools.step("leasefs claim no/such/job --sentinel x"), 2, &["namespace does not exist", "mkdir -p"]);
    assert!(tools.mount.holders().is_empty());
}

#[test]
fn a_ttl_that_is_shortened_has_it_looked_for_more_often() {
    let tools = Tools::new();
    let text = text("shortened");
    let mut agent = agent(&text);
    let mut epoch = 0;
    let mut holder = 0;
    shown_once("a lease with a TTL shorter than the pause between two looks was", || {
        epoch += 1;
        holder = claim(&tools, &text, "--grace 0s --agent a");
        assert_eq!(tools.mount.status("job")["epoch"], epoch);
        claim(&tools, &text, "--agent a --ttl 3s");
        let began = Instant::now();
        loop {
            let status = tools.mount.status("job");
            if (status["state"].as_str(), status["epoch"].as_u64()) != (Some("held"), Some(epoch)) {
                return Err(format!("after {:?}: {status}", began.elapsed()));
            }
            // More than two of the former looks.
            if began.elapsed() > Duration::from_secs(11) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
    });
    agent.signal("KILL");
    agent.wait();
    tools.wait_free("job", holder);
}

#[test]
fn a_process_whose_first_thread_has_ended_is_still_there() {
    let tools = Tools::new();
    let text = text("headless");
    let headless = "
import ctypes, threading, time
threading.Thread(target=time.sleep, args=(1000,)).start()
ctypes.CDLL(None).syscall(60, 0)";
    let mut command = Command::new("/usr/bin/python3");
    let mut agent = Background(command.args(["-c", headless, &text]).spawn().expect("python3 runs"));
    let line = format!("/proc/{}/cmdline", agent.pid());
    // Empty as well for an instant as it starts: so it is seen first.
    let line = || std::fs::read(&line).expect("a command line");
    wait_for("it runs", || String::from_utf8_lossy(&line()).contains(&text));
    wait_for("its first thread has ended", || line().is_empty());
    let holder = claim(&tools, &text, "--grace 0s --ttl 9s");
    tools.mount.wait_outlived(&["job"], 1);
    agent.signal("KILL");
    agent.wait();
    tools.wait_free("job", holder);
}
