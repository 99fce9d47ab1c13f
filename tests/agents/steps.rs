//! A piece of work whose every step is a new shell.

use std::fs;
use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::common::{Background, assert_ok, stdout};
use crate::tools::{Tools, assert_refused};

#[test]
fn each_step_is_a_new_shell() {
    let tools = Tools::new();
    let output = tools.elsewhere("leasefs claim job --agent planner --ttl 10m");
    assert_ok(&output);
    assert_eq!(stdout(&output), format!("1\n{}\n", tools.mount.result("job", 1).display()));
    let status = tools.mount.status("job");
    assert_eq!((status["state"].as_str(), status["agent"].as_str()), (Some("held"), Some("planner")), "{status}");
    assert_eq!(status["ttl_ms"], 600_000);
    let holder = tools.holder("job");

    assert_refused(&tools.elsewhere("leasefs claim -n job --agent other"), 1, &["job: held by pid"]);
    assert_ok(&tools.elsewhere("leasefs renew job --epoch 1"));
    let renewed = tools.mount.status("job");
    assert!(renewed["expires"].as_str() > status["expires"].as_str(), "{status} {renewed}");
    assert_ok(&tools.elsewhere("echo all is well | leasefs complete job --epoch 1"));

    assert_eq!(fs::read_to_string(tools.mount.result("job", 1)).expect("a result"), "all is well\n");
    tools.mount.wait_status("job", "finished", |status| status["state"] == "finished");
    crate::common::wait_for("end of the holder", || crate::common::agent::has_ended(holder));
    assert_refused(&tools.elsewhere("leasefs claim --once job --agent planner"), 1, &["job: finished"]);
    // By lock it can be taken again.
    assert_eq!(tools.claim("job --agent planner"), 2);
    tools.mount.verify();
}

#[test]
fn a_command_substitution_comes_back_at_once() {
    let tools = Tools::new();
    // The shell waits for the end of the pipe, which every copy of it in a holder would put off.
    let output = tools.step("x=$(leasefs claim a 2>&1 | cat); echo \"$x\" | head -1; leasefs claim b 3>&1 4>&2 | cat");
    assert_ok(&output);
    assert_eq!(stdout(&output), format!("1\n1\n{}\n", tools.mount.result("b", 1).display()));
    assert_eq!((tools.mount.state_of("a"), tools.mount.state_of("b")), ("held".into(), "held".into()));
}

#[test]
fn one_object_tells_all() {
    let tools = Tools::new();
    let output = tools.elsewhere("leasefs claim job --agent 'planner 7' --json");
    assert_ok(&output);
    let told: serde_json::Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    let status = tools.mount.status("job");
    assert_eq!((&told["key"], &told["epoch"]), (&status["key"], &status["epoch"]));
    assert_eq!((&told["holder_pid"], &told["expires"]), (&status["holder"]["pid"], &status["expires"]));
    assert_eq!(told["agent"], "planner 7");
    assert_eq!(told["result"], tools.mount.result("job", 1).to_str().expect("path"));
}

#[test]
fn claiming_again_renews_with_the_same_epoch() {
    let tools = Tools::new();
    assert_eq!(tools.claim("job --agent planner --ttl 10m"), 1);
    let (holder, before) = (tools.holder("job"), tools.mount.status("job"));
    assert_eq!(tools.claim("job --agent planner"), 1);
    let after = tools.mount.status("job");
    assert!(after["renewed"].as_str() > before["renewed"].as_str(), "{before} {after}");
    assert_eq!((after["ttl_ms"].as_u64(), &after["since"]), (Some(600_000), &before["since"]));
    assert_eq!(tools.claim("job --agent planner --ttl 20m -n"), 1);
    assert_eq!(tools.mount.status("job")["ttl_ms"], 1_200_000);
    assert_eq!(tools.claim("job --agent planner --once"), 1);
    assert_eq!((tools.holder("job"), tools.mount.holders()), (holder, vec![holder]));

    let other = tools.elsewhere("leasefs claim job --agent planner --sentinel nothing-has-this");
    assert_refused(&other, 2, &["job: this agent holds it already, at epoch 1, until its TTL", "release it first"]);
    // Without a name, whoever is proven to have claimed.
    let twice = tools.elsewhere("bash -c 'leasefs claim plain; true'; bash -c 'leasefs claim -n plain; exit $?'");
    assert_ok(&twice);
    assert_eq!(stdout(&twice).lines().filter(|line| *line == "1").count(), 2, "{twice:?}");
    assert_refused(&tools.elsewhere("leasefs claim plain -n"), 1, &["plain: held by pid"]);
}

#[test]
fn one_agent_that_claims_many_times_at_once_has_one_attempt() {
    let tools = Tools::new();
    let mut claims: Vec<_> = (0..8).map(|_| tools.start("leasefs claim job --agent planner")).collect();
    for claim in &mut claims {
        assert_eq!(claim.wait().code(), Some(0));
    }
    tools.wait_one_holder("job");
    assert_eq!(tools.mount.status("job")["epoch"], 1);
}

#[test]
fn of_twenty_that_claim_at_once_one_wins() {
    let tools = Tools::new();
    let mut claims: Vec<_> = (0..20).map(|n| tools.start(&format!("leasefs claim job -n --agent a{n}"))).collect();
    let codes: Vec<_> = claims.iter_mut().map(|claim| claim.wait().code()).collect();
    assert_eq!(codes.iter().filter(|code| **code == Some(0)).count(), 1, "{codes:?}");
    assert_eq!(codes.iter().filter(|code| **code == Some(1)).count(), 19, "{codes:?}");
    tools.wait_one_holder("job");
    assert_eq!(tools.mount.status("job")["epoch"], 1);
    tools.mount.verify();
}

#[test]
fn what_is_released_is_over_for_good() {
    let tools = Tools::new();
    tools.claim("job --agent planner");
    let holder = tools.holder("job");
    assert_ok(&tools.elsewhere("leasefs release job --epoch 1 --reason 'lunch time'"));
    assert_eq!(tools.mount.state_of("job"), "free");
    tools.wait_free("job", holder);
    for act in ["release job", "renew job", "abandon job --reason x"] {
        let again = tools.elsewhere(&format!("leasefs {act} --epoch 1"));
        assert_refused(&again, 75, &["job: epoch 1 does not hold it", "nothing was changed"]);
        let unnamed = tools.elsewhere(&format!("leasefs {act}"));
        assert_refused(&unnamed, 75, &["job: nobody holds it: epoch 1 is released"]);
    }
    let why = tools.history("job")[0]["reason"].clone();
    assert!(why.as_str().is_some_and(|why| why.ends_with("lunch time")), "{why}");
    // And the next attempt is not touched by those who speak of the old one.
    assert_eq!(tools.claim("job --agent planner"), 2);
    assert_refused(&tools.elsewhere("leasefs release job --epoch 1"), 75, &["epoch 2 is held by pid"]);
    assert_eq!(tools.mount.state_of("job"), "held");
}

#[test]
fn an_abandoned_key_is_free_and_the_history_says_why() {
    let tools = Tools::new();
    tools.claim("job");
    assert_refused(&tools.elsewhere("leasefs abandon job --epoch 1 --reason ''"), 2, &["--reason is empty"]);
    assert_eq!(tools.mount.state_of("job"), "held");
    assert_ok(&tools.elsewhere("leasefs abandon job --epoch 1 --reason 'tests do not build'"));
    assert_eq!(tools.claim("job -n"), 2);
    let first = tools.history("job")[0].clone();
    assert_eq!(first["outcome"], "released", "{first}");
    assert!(first["reason"].as_str().is_some_and(|why| why.ends_with("abandoned: tests do not build")), "{first}");
}

#[test]
fn without_a_sign_of_life_it_lasts_for_its_ttl() {
    let tools = Tools::new();
    const TTL: Duration = Duration::from_secs(9);
    let began = Instant::now();
    tools.claim("job --agent planner --ttl 9s");
    let holder = tools.holder("job");
    // Not renewed by whoever keeps it: after a third of the TTL the deadline is what it was.
    let expires = tools.mount.status("job")["expires"].clone();
    crate::common::wait_for("half the TTL", || began.elapsed() > TTL / 2);
    assert_eq!(tools.mount.status("job")["expires"], expires);
    // But by whoever holds it.
    let renewing = Instant::now();
    assert_ok(&tools.elsewhere("leasefs renew job --epoch 1"));
    tools.mount.wait_status("job", "expired", |status| status["outcome"] == "expired");
    assert!(renewing.elapsed() >= TTL, "after {:?}", renewing.elapsed());
    tools.wait_free("job", holder);
    assert_refused(&tools.elsewhere("leasefs renew job --epoch 1"), 75, &["job: epoch 1 does not hold it"]);
}

#[test]
fn nobody_goes_on_with_what_may_still_be_given_back() {
    let tools = Tools::new();
    // Its epoch cannot be printed: the pipe is full, until nobody reads from it any more.
    let script = "
import os, subprocess, sys
read, write = os.pipe()
os.set_blocking(write, False)
try:
    while True:
        os.write(write, b'x' * 4096)
except BlockingIOError:
    os.set_blocking(write, True)
first = subprocess.Popen(['leasefs', 'claim', 'job', '--agent', 'a'], stdout=write, stderr=subprocess.DEVNULL)
os.close(write)
sys.stdin.readline()
os.close(read)
sys.exit(first.wait())";
    let mut command = tools.command(&["python3", "-c", script]);
    command.stdin(Stdio::piped());
    let mut first = Background(command.spawn().expect("python3 runs"));
    tools.mount.wait_status("job", "the first is granted", |status| status["epoch"] == 1);
    let mut second = tools.start("leasefs claim job --agent a");
    tools.mount.wait_status("job", "its holder waits for the epoch to be printed", |status| {
        let pid = status["holder"]["pid"].as_i64().expect("a holder");
        std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name == "leasefs-new\n")
    });
    drop(first.0.stdin.take());
    assert_eq!(first.wait().code(), Some(2), "nothing is held for the first");
    assert_eq!(second.wait().code(), Some(0));
    let status = tools.mount.status("job");
    assert_eq!((status["state"].as_str(), status["epoch"].as_u64()), (Some("held"), Some(2)), "{status}");
}
