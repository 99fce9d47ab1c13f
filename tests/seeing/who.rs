//! `leasefs who`: whoever keeps a key held is found, however it came by the handle.

use std::process::Command;

use libc::{LOCK_EX, LOCK_SH, LOCK_UN};
use serde_json::{Value, json};

use crate::common::agent::{Agent, Script, count, runs};
use crate::common::{InTime, LEASEFS, Mount, assert_ok, stdout, wait_for};
use crate::{STRANGER, as_stranger, assert_refused, stderr};

/// What `who --json` says, with these further arguments.
fn who(mount: &Mount, key: &str, more: &[&str]) -> Value {
    let output = mount.leasefs(&[&["who", key, "--json"], more].concat());
    serde_json::from_str(&stdout(&output)).unwrap_or_else(|e| panic!("{e}: {}{}", stdout(&output), stderr(&output)))
}

/// Pids and what they have to do with the key.
fn people(told: &Value) -> Vec<(i64, String)> {
    let person =
        |person: &Value| (person["pid"].as_i64().expect("a pid"), person["how"].as_str().expect("a word").to_owned());
    told["processes"].as_array().expect("a list").iter().map(person).collect()
}

fn is(agent: &Agent, how: &str) -> (i64, String) {
    (agent.pid().into(), how.to_owned())
}

#[test]
fn children_and_grandchildren_have_the_handle_too() {
    let mount = Mount::new();
    let parent = Agent::new();
    let fd = parent.create(&mount.claim("job")).expect("free");
    let child = parent.fork();
    let grandchild = child.fork();
    let told = who(&mount, "job", &[]);
    let mut expected = vec![is(&parent, "claimed"), is(&child, "inherited"), is(&grandchild, "inherited")];
    expected.sort_by_key(|(pid, how)| (how.clone(), *pid));
    assert_eq!(people(&told), expected, "{told}");
    for person in told["processes"].as_array().expect("a list") {
        assert_eq!(person["fds"], json!([fd]), "{told}");
        assert_eq!((&person["keeps"], &person["uid"]), (&json!(true), &json!(0)), "{told}");
        assert!(person["command"].as_str().is_some_and(|line| line.contains("python3 -I")), "{told}");
    }
    let parents: Vec<_> =
        told["processes"].as_array().expect("a list").iter().map(|who| who["ppid"].as_i64()).collect();
    assert!(parents.contains(&Some(parent.pid().into())) && parents.contains(&Some(child.pid().into())), "{told}");
    assert_eq!((told["unseen"].as_u64(), told["remark"].as_str()), (Some(0), None), "{told}");
    parent.kill();
    child.close(fd);
    let told = who(&mount, "job", &[]);
    assert_eq!(people(&told), [is(&grandchild, "inherited")], "{told}");
    let table = stdout(&mount.leasefs(&["who", "job"]));
    let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["PID", "PPID", "UID", "HOW", "FD", "AGE", "COMMAND"], "{table}");
    assert_eq!((lines[1][0], lines[1][3]), (grandchild.pid().to_string().as_str(), "inherited"), "{table}");
    grandchild.close(fd);
    wait_for("free", || mount.state_of("job") == "free");
    assert_refused(&mount.leasefs(&["who", "job"]), 1, &["job: nobody holds it: it is free, its newest epoch is 1"]);
    assert_refused(&mount.leasefs(&["who", "never"]), 1, &["never: was never held"]);
}

#[test]
fn looking_neither_ends_a_lease_nor_prolongs_it() {
    let mount = Mount::new();
    let (holder, next) = (Agent::new(), Agent::new());
    for epoch in 1..=20 {
        let fd = holder.create(&mount.claim("job")).expect("free");
        assert_eq!(people(&who(&mount, "job", &[])), [is(&holder, "claimed")], "epoch {epoch}");
        assert_eq!(holder.epoch(fd), Ok(epoch * 2 - 1));
        holder.close(fd);
        // The close that has returned is before the next claim, also right after somebody looked.
        let fd = next.create(&mount.claim("job")).expect("free at once");
        next.close(fd);
    }
}

#[test]
fn those_who_only_opened_it_are_told_from_the_holder() {
    let mount = Mount::new();
    let (holder, opener, waiter) = (Agent::new(), Agent::new(), Agent::new());
    let path = mount.claim("job");
    let other = holder.handle(&path);
    let fd = holder.handle(&path);
    holder.flock(fd, LOCK_EX).expect("free");
    let copy = holder.call("dup", json!([fd])).expect("a copy").as_i64().expect("a descriptor");
    opener.handle(&path);
    let handle = waiter.handle(&path);
    waiter.begin_flock(handle, LOCK_EX);
    mount.wait_status("job", "waited for", |status| count(status, "waiters") == 1);
    let told = who(&mount, "job", &[]);
    assert_eq!(people(&told), [is(&holder, "claimed"), is(&waiter, "waits")], "{told}");
    assert_eq!(told["processes"][0]["fds"], json!([fd, copy]), "{told}");
    assert_eq!(
        (&told["processes"][1]["fds"], &told["processes"][1]["keeps"]),
        (&json!([handle]), &json!(false)),
        "{told}"
    );
    assert!(told["processes"][1]["since"].is_string(), "{told}");
    let all = who(&mount, "job", &["--all"]);
    let open: Vec<_> = people(&all).into_iter().filter(|(_, how)| how == "open").collect();
    assert_eq!(open.len(), 2, "{all}");
    assert!(open.contains(&is(&holder, "open")) && open.contains(&is(&opener, "open")), "{all}");
    // A handle that gave its lease back is one that is only open; a handle that was promised it has it.
    holder.flock(fd, LOCK_UN).expect("unlocked");
    waiter.answer().expect("granted");
    assert_eq!(people(&who(&mount, "job", &[])), [is(&waiter, "claimed")]);
    assert_ok(&mount.leasefs(&["evict", "job", "--epoch", "2"]));
    let told = who(&mount, "job", &["--all"]);
    assert!(people(&told).iter().all(|(_, how)| how == "open"), "{told}");
    let _ = other;
}

#[test]
fn a_handle_that_went_through_a_socket() {
    let mount = Mount::new();
    let (holder, heir) = (Agent::new(), Agent::new());
    let name = format!("leasefs-who-{}", holder.pid());
    heir.call("mailbox", json!([name])).expect("a socket");
    let fd = holder.create(&mount.claim("job")).expect("free");
    holder.call("send_fd", json!([name, fd])).expect("sent");
    holder.close(fd);
    let told = who(&mount, "job", &[]);
    assert_eq!(people(&told), []);
    let said = told["remark"].as_str().unwrap_or_default().to_owned();
    // Others may have something on its way as well, and what it is only they know.
    let (_, pids) = said.split_once("on its way through a socket of pid ").unwrap_or_else(|| panic!("{told}"));
    assert!(pids.split(" or ").any(|pid| pid == heir.pid().to_string()), "{told}");
    let output = mount.leasefs(&["who", "job"]);
    assert_ok(&output);
    assert!(stderr(&output).contains("job: held by pid"), "{}", stderr(&output));
    heir.call("receive_fd", json!([name])).expect("received");
    assert_eq!(people(&who(&mount, "job", &[])), [is(&heir, "inherited")]);
}

#[test]
fn a_program_that_was_executed_keeps_what_it_inherited() {
    let mount = Mount::new();
    let mut script = Script::start(&mount, "exec 9<>$M/claims/job; flock 9; sleep 1000 & echo $!; read -r _; kill $!");
    let sleeper: i64 = script.line().expect("a pid").parse().expect("a pid");
    wait_for("its program runs", || runs(i32::try_from(sleeper).expect("a pid"), "sleep"));
    let told = who(&mount, "job", &[]);
    let shell = i64::from(script.pid());
    // A shell may execute flock(1) itself only: the claimer is gone then.
    let keepers = people(&told);
    assert!(keepers.contains(&(sleeper, "inherited".to_owned())), "{told}");
    assert!(keepers.iter().any(|(pid, _)| *pid == shell), "{told}");
    let of_sleeper = told["processes"].as_array().expect("a list").iter().find(|who| who["pid"] == sleeper);
    assert_eq!(of_sleeper.map(|who| who["command"].clone()), Some(json!("sleep 1000")), "{told}");
    script.say("");
    script.wait();
}

#[test]
fn sharers_and_those_who_write_the_result() {
    let mount = Mount::new();
    let (one, other, writer) = (Agent::new(), Agent::new(), Agent::new());
    for agent in [&one, &other] {
        let fd = agent.handle(&mount.claim("shared"));
        agent.flock(fd, LOCK_SH).expect("free");
    }
    let mut expected = vec![is(&one, "shares"), is(&other, "shares")];
    expected.sort();
    assert_eq!(people(&who(&mount, "shared", &[])), expected);
    let fd = one.create(&mount.claim("job")).expect("free");
    writer.open(&mount.result("job", 1), libc::O_WRONLY | libc::O_CREAT).expect("the registered attempt");
    one.close(fd);
    mount.wait_status("job", "reporting", |status| status["state"] == "reporting");
    let told = who(&mount, "job", &[]);
    assert_eq!(people(&told), [is(&writer, "writes")], "{told}");
    assert_eq!(told["remark"], Value::Null);
}

#[test]
fn what_a_stranger_may_not_look_into_is_said() {
    let mount = Mount::shared();
    let holder = Agent::new();
    holder.create(&mount.claim("job")).expect("free");
    let output = as_stranger(&mount, &["who", "job"]);
    assert_ok(&output);
    let said = stderr(&output);
    assert!(said.contains("of other users could not be looked into: run as root"), "{said}");
    // Its own processes it can look into.
    let own = format!(
        "exec setpriv --reuid {STRANGER} --regid {STRANGER} --clear-groups perl -e '\
         use Fcntl qw(:flock); open(my $f, \"+>>\", \"{}\") or die; flock($f, LOCK_EX) or die; $| = 1; \
         print \"held\\n\"; <STDIN>'",
        mount.claim("own").display()
    );
    let script = Script::start(&mount, &own);
    assert_eq!(script.line().as_deref(), Some("held"));
    let output = as_stranger(&mount, &["who", "own", "--json"]);
    assert_ok(&output);
    let told: Value = serde_json::from_str(&stdout(&output)).expect("JSON");
    assert_eq!(people(&told), [(script.pid().into(), "claimed".to_owned())], "{told}");
}

#[test]
fn a_holder_in_a_pid_namespace_of_its_own() {
    let mount = Mount::new();
    let script = "exec 9<>$M/claims/job; flock 9; echo held; read -r _";
    let mut inside = Script::start_with(&mount, &["unshare", "--pid", "--fork", "--kill-child", "bash", "-c", script]);
    assert_eq!(inside.line().as_deref(), Some("held"));
    let told = who(&mount, "job", &[]);
    let keepers = told["processes"].as_array().expect("a list");
    assert!(
        keepers.iter().any(|who| who["command"].as_str().is_some_and(|line| line.starts_with("bash -c"))),
        "{told}"
    );
    // From inside another one, nobody is to be seen, and that is said.
    let look = format!("exec {LEASEFS} who job");
    let output = mount
        .command("unshare")
        .args(["--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", &look])
        .output_in_time();
    assert_ok(&output);
    assert!(stderr(&output).contains("no process that can be seen has the handle"), "{}", stderr(&output));
    inside.say("");
    inside.wait();
}

#[test]
fn the_holders_of_a_lost_connection() {
    let mut mount = Mount::new();
    let holder = Agent::new();
    holder.create(&mount.claim("job")).expect("free");
    mount.lose_connection();
    mount.start(&[]);
    mount.wait_status("job", "orphaned", |status| status["state"] == "orphaned");
    let told = who(&mount, "job", &[]);
    assert!(
        matches!(people(&told).as_slice(), [(pid, how)] if *pid == i64::from(holder.pid()) && how == "claimed"),
        "{told}"
    );
}

#[test]
fn a_table_in_a_narrow_terminal_stays_one_line_for_each() {
    let mount = Mount::new();
    let holder = Agent::new();
    holder.create(&mount.claim("job")).expect("free");
    let screen = crate::screen::Screen::leasefs(&mount, (60, 12), "who job");
    assert_eq!(screen.ended(), 0);
    let lines = screen.lines();
    assert!(
        lines[1].contains("claimed") && lines[1].ends_with('…') && lines[2].starts_with("ended with"),
        "{lines:#?}"
    );
    let bad = Command::new(LEASEFS).args(["who", "a//b"]).env("LEASEFS_ROOT", mount.root()).output_in_time();
    assert_refused(&bad, 2, &["a//b: not a key"]);
}
