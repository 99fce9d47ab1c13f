//! Whose attempt it is: by number, or by proof; never by name alone.

use std::fs;
use std::os::unix::process::CommandExt;

use crate::common::agent::Script;
use crate::common::{InTime, assert_ok, leasefs_for_all};
use crate::tools::{Tools, assert_refused};

/// Neither root nor the mount's owner.
const STRANGER: u32 = 65_534;

/// What acts on one's own attempt.
const ACTS: [&str; 4] =
    ["leasefs release job", "leasefs renew job", "echo x | leasefs complete job", "leasefs abandon job --reason x"];

#[test]
fn a_name_alone_is_no_proof() {
    let tools = Tools::new();
    assert_eq!(tools.claim("job --agent planner"), 1);
    assert_ok(&tools.elsewhere("leasefs release job --epoch 1"));
    // The newer attempt of another session under the same name.
    assert_eq!(tools.claim("job --agent planner"), 2);
    for act in ACTS {
        for name in ["--agent planner", "--agent other", ""] {
            let refused = tools.elsewhere(&format!("{act} {name}"));
            assert_refused(&refused, 2, &["job: epoch 2 is held by pid", "agent planner", "give --epoch 2"]);
        }
    }
    assert_eq!((tools.mount.state_of("job"), tools.history("job").len()), ("held".into(), 2));
    assert!(!tools.mount.result("job", 2).exists());
}

#[test]
fn the_session_it_was_claimed_from_is() {
    let tools = Tools::new();
    for (number, act) in ACTS.into_iter().enumerate() {
        // Each by a shell of its own, which comes from nobody who ran the other.
        let script =
            format!("bash -c 'leasefs claim job --agent planner; true'; bash -c '{act} --agent planner; exit $?'");
        assert_ok(&tools.elsewhere(&script.replace("job", &format!("job{number}"))));
    }
    // The names have to be the same, also where there is none.
    for (claimed, named) in [("--agent planner", "--agent other"), ("--agent planner", ""), ("", "--agent other")] {
        let script = format!("leasefs claim fresh{claimed:.3} {claimed} && leasefs release fresh{claimed:.3} {named}");
        assert_refused(&tools.elsewhere(&script), 2, &["fresh", "give --epoch 1"]);
    }
    // And the session has to be that one: this number belongs to another process by now.
    assert_eq!((tools.mount.state_of("fresh"), tools.mount.state_of("fresh--a")), ("held".into(), "held".into()));
    assert_refused(&tools.elsewhere("leasefs release fresh"), 2, &["fresh", "give --epoch 1"]);
}

#[test]
fn coming_from_the_process_it_is_bound_to_is() {
    let tools = Tools::new();
    let mut agent = agent(&tools);
    agent.say(&format!("leasefs claim job --for {} --agent planner", agent.pid()));
    assert_eq!(agent.line().as_deref(), Some("1"));
    // Any call it makes, in whatever session.
    agent.line();
    agent.say("setsid -w sh -c 'leasefs renew job --agent planner; true'; echo renewed $?");
    assert_eq!(agent.line().as_deref(), Some("renewed 0"));
    assert_refused(&tools.elsewhere("leasefs release job --agent planner"), 2, &["give --epoch 1"]);
    agent.say("setsid -w sh -c 'leasefs release job --agent planner || exit 9'; echo released $?");
    assert_eq!(agent.line().as_deref(), Some("released 0"));
    assert_eq!(tools.mount.state_of("job"), "free");
}

#[test]
fn coming_from_who_ran_the_claim_is() {
    let tools = Tools::new();
    let mut agent = agent(&tools);
    // Each call is in a session of its own, as some agents make them; setsid makes way for the command.
    let call = |command: &str| format!("perl -MPOSIX -e 'fork && wait && exit($? >> 8); setsid; exec @ARGV' {command}");
    agent.say(&call("leasefs claim other --agent planner"));
    assert_eq!(agent.line().as_deref(), Some("1"));
    agent.line();
    // Who ran that one was perl, and is gone.
    agent.say(&format!("{}; echo $?", call("leasefs release other --agent planner 2>/dev/null")));
    assert_eq!(agent.line().as_deref(), Some("2"));
    agent.say("leasefs claim job --agent planner");
    assert_eq!(agent.line().as_deref(), Some("1"));
    agent.line();
    agent.say(&format!("{}; echo $?", call("leasefs release job --agent planner")));
    assert_eq!(agent.line().as_deref(), Some("0"));
    assert_eq!(tools.mount.state_of("job"), "free");
}

#[test]
fn the_environment_names_an_attempt() {
    let tools = Tools::new();
    assert_eq!(tools.claim("job"), 1);
    assert_refused(&tools.elsewhere("LEASEFS_EPOCH=1 LEASEFS_KEY=other leasefs release job"), 2, &["give --epoch 1"]);
    assert_refused(&tools.elsewhere("LEASEFS_EPOCH=x leasefs release job"), 2, &["LEASEFS_EPOCH=x"]);
    assert_ok(&tools.elsewhere("LEASEFS_EPOCH=1 leasefs renew job"));
    assert_ok(&tools.elsewhere("LEASEFS_EPOCH=1 LEASEFS_KEY=job leasefs release job"));
    let run = tools.elsewhere("leasefs run a job -- sh -c 'leasefs abandon job --reason \"not today\"'");
    assert_eq!(run.status.code(), Some(75), "its lease is gone: {run:?}");
    assert_eq!(tools.history("job").len(), 2);
    assert!(tools.history("job")[1]["reason"].as_str().is_some_and(|why| why.ends_with("not today")));
}

#[test]
fn another_user_is_told_so() {
    let tools = Tools::shared();
    assert_eq!(tools.claim("job --agent planner"), 1);
    let leasefs = leasefs_for_all(&tools.mount);
    let bin = leasefs.parent().expect("a directory");
    let as_stranger = |script: &str| {
        // The first one found is one that this user can run.
        let script = format!("PATH={}:$PATH\n{script}", bin.display());
        let mut command = tools.command(&["setsid", "-w", "bash", "-c", &script]);
        command.uid(STRANGER).gid(STRANGER).output_in_time()
    };
    for act in ["release", "renew"] {
        let refused = as_stranger(&format!("leasefs {act} job --epoch 1"));
        assert_refused(&refused, 2, &["job: epoch 1 is another user's"]);
    }
    let refused = as_stranger("echo x | leasefs complete job --epoch 1");
    assert_refused(&refused, 2, &["job: epoch 1 is another user's"]);
    // The same name of another user is another agent.
    assert_refused(&as_stranger("leasefs claim -n job --agent planner"), 1, &["job: held by pid", "uid 0"]);
    assert_eq!(tools.mount.state_of("job"), "held");
    // And a stranger's own are its own.
    assert_ok(&as_stranger("leasefs claim theirs --agent planner; leasefs renew theirs --agent planner"));
    assert_eq!(tools.mount.status("theirs")["holder"]["uid"], STRANGER);
    assert_refused(&tools.elsewhere("leasefs claim -n theirs --agent planner"), 1, &["theirs: held by pid"]);
    assert_ok(&as_stranger("echo done | leasefs complete theirs --epoch 1"));
    assert_eq!(fs::read_to_string(tools.mount.result("theirs", 1)).expect("a result"), "done\n");
    assert_ok(&tools.elsewhere("leasefs release job --epoch 1"));
}

#[test]
fn what_cannot_be_seen_is_named_by_its_epoch() {
    let tools = Tools::new();
    // In a pid namespace of its own, the holder has another number than the server gives.
    let script = "for name in planner planner other; do leasefs claim -n job --agent $name | head -1; done
        leasefs claim job --agent planner --for $$
        leasefs release job --agent planner; echo $?
        leasefs complete job --epoch 1 </dev/null; echo $?";
    let unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "bash", "-c", script];
    let output = tools.command(&unshare).output_in_time();
    assert_eq!(crate::common::stdout(&output), "1\n1\n2\n0\n", "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    for part in ["job: held by pid", "this agent holds it already, at epoch 1", "give --epoch 1"] {
        assert!(said.contains(part), "`{part}` is missing in {said}");
    }
    assert_eq!(tools.mount.state_of("job"), "finished");
}

#[test]
fn a_run_has_an_agent_too_and_is_not_gone_on_with() {
    let tools = Tools::new();
    let seen = tools.step("leasefs run job --agent planner -- cat \"$M/status/job\"");
    assert!(crate::common::stdout(&seen).contains("\"agent\":\"planner\""), "{seen:?}");
    // What it holds ends with it, so nobody is told that it is a claim's.
    let inner = tools.step("leasefs run job --agent planner -- leasefs claim job --agent planner -n");
    assert_refused(&inner, 1, &["job: held by pid", "nothing was claimed"]);
}

/// A long-lived program that makes calls when it is told to.
fn agent(tools: &Tools) -> Script {
    let setting = tools.path();
    let script = "while read -r call; do eval \"$call\"; done";
    Script::start_with(&tools.mount, &["env", "-u", "LEASEFS_AGENT", &setting, "setsid", "-w", "bash", "-c", script])
}
