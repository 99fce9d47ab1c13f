//! `leasefs prune` on a mounted tree: what goes, what never does, and that whoever works there does not notice.

use std::fs;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use nix::errno::Errno;
use serde_json::{Value, json};

use crate::common::agent::{Agent, Script};
use crate::common::{
    Background, InTime, LEASEFS, Mount, assert_ok, assert_refused, leasefs_for_all, stderr, stdout, wait_for,
};
use crate::{complete, history, release, result_files, verify};

fn prune(mount: &Mount, args: &[&str]) -> String {
    let output = mount.leasefs(&[&["prune"], args].concat());
    assert_ok(&output);
    stdout(&output)
}

/// The last line of what it printed.
fn total(printed: &str) -> &str {
    printed.lines().last().expect("a line")
}

#[test]
fn without_a_bound_nothing_is_pruned() {
    let mount = Mount::new();
    complete(&mount, "k", &[3, 3]);
    for (args, says) in [
        (&[][..], "--completed-older D, --attempts-over N, or both"),
        (&["--dry-run"], "--completed-older D, --attempts-over N, or both"),
        (&["--attempts-over", "0"], "0 is not in 1.."),
        (&["--completed-older", "soon"], "30d, 12h"),
    ] {
        let output = mount.leasefs(&[&["prune"], args].concat());
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(stderr(&output).contains(says), "{args:?}: {}", stderr(&output));
    }
    // Nor by a program that writes the order itself.
    for order in [json!({"op":"prune"}), json!({"op":"prune","attempts_over":0}), json!({"op":"prune","keep":1})] {
        let sent = fs::write(mount.root().join(".leasefs/control"), order.to_string());
        assert_eq!(sent.map_err(|e| e.raw_os_error()), Err(Some(libc::EINVAL)), "{order}");
    }
    assert_eq!(history(&mount, "k"), [1, 2]);
}

#[test]
fn strangers_prune_nothing() {
    let mount = Mount::shared();
    complete(&mount, "k", &[3, 3]);
    let order = json!({"op":"prune","attempts_over":1}).to_string();
    let script = "fd = os.open(path, os.O_WRONLY)\nos.write(fd, order.encode())";
    let names = json!({"path": mount.root().join(".leasefs/control"), "order": order});
    assert_eq!(Agent::user(1234, 1234, &[]).script(script, names).map(drop), Err(Errno::EACCES));
    let leasefs = leasefs_for_all(&mount);
    let mut order = mount.command(leasefs.to_str().expect("UTF-8"));
    let output = order.args(["prune", "--attempts-over", "1"]).uid(1234).gid(1234).output_in_time();
    assert_refused(&output, 2, &["permission denied"]);
    assert_eq!(history(&mount, "k"), [1, 2]);
}

#[test]
fn only_the_newest_attempts_stay_and_the_numbers_go_on() {
    let mut mount = Mount::new();
    complete(&mount, "a", &[10, 20, 30]);
    release(&mount, "a", 4);
    release(&mount, "b", 2);
    fs::create_dir(mount.claim("team")).expect("namespace");
    complete(&mount, "team/c", &[5, 0, 7]);
    let listed = prune(&mount, &["--attempts-over", "2", "--dry-run"]);
    assert_eq!(history(&mount, "a"), [1, 2, 3, 4, 5, 6, 7], "nothing went");
    let went = prune(&mount, &["--attempts-over", "2"]);
    assert_eq!(went, listed.replace("would go", "gone"), "what goes is what was said to go");
    let lines: Vec<Vec<&str>> = went.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(
        lines[..3],
        [vec!["KEY", "ATTEMPTS", "RESULTS", "BYTES"], vec!["a", "5", "3", "60"], vec!["team/c", "1", "1", "5"]]
    );
    assert_eq!(total(&went), "gone: 6 attempts, 4 results (65 bytes), of 2 keys");
    assert_eq!(history(&mount, "a"), [6, 7]);
    assert_eq!(history(&mount, "b"), [1, 2]);
    assert_eq!(history(&mount, "team/c"), [2, 3]);
    let text = stdout(&mount.leasefs(&["history", "a"]));
    assert!(text.ends_with("(5 earlier attempts pruned)\n"), "{text}");
    assert!(!stdout(&mount.leasefs(&["history", "b"])).contains("pruned"));
    // The result of the newest is there still, those of attempts that went are not, nor anything that points to them.
    assert_eq!(fs::read_to_string(mount.result("team/c", 3)).expect("result"), "xxxxxxx");
    assert_eq!(fs::read(mount.result("a", 3)).map_err(|e| e.kind()), Err(ErrorKind::NotFound));
    assert_eq!(fs::read_link(mount.root().join("results/a/latest")).map_err(|e| e.kind()), Err(ErrorKind::NotFound));
    assert_eq!(mount.status("a")["result"], Value::Null);
    assert_eq!(fs::read_dir(mount.root().join("results/a")).expect("listed").count(), 0);
    assert_eq!(result_files(&mount.state()), 2);
    assert_eq!(total(&prune(&mount, &["--attempts-over", "2"])), "gone: 0 attempts, 0 results (0 bytes), of 0 keys");
    for again in [false, true] {
        if again {
            mount.unmount();
            mount.start(&[]);
        }
        let agent = Agent::new();
        let fd = agent.create(&mount.claim("a")).expect("free");
        assert_eq!(agent.epoch(fd), Ok(if again { 9 } else { 8 }));
        agent.close(fd);
        mount.wait_status("a", "free", |status| status["state"] == "free");
        mount.verify();
    }
    let json: Value =
        serde_json::from_str(&prune(&mount, &["--attempts-over", "1", "--json"])).expect("one JSON object");
    assert_eq!((&json["attempts"], &json["keys"][0]["key"]), (&json!(5), &json!("a")), "{json}");
    mount.verify();
}

#[test]
fn a_finished_key_stays_finished_when_its_result_is_pruned() {
    let mut mount = Mount::new();
    complete(&mount, "k", &[10, 20]);
    assert_eq!(total(&prune(&mount, &["--completed-older", "1h"])), "gone: 0 attempts, 0 results (0 bytes), of 0 keys");
    let went = prune(&mount, &["--completed-older", "0s"]);
    assert_eq!(total(&went), "gone: 1 attempts, 2 results (30 bytes), of 1 keys");
    assert_eq!(result_files(&mount.state()), 0);
    for again in [false, true] {
        if again {
            mount.unmount();
            mount.start(&[]);
        }
        let status = mount.status("k");
        assert_eq!((&status["state"], &status["epoch"]), (&json!("finished"), &json!(2)), "{status}");
        assert_eq!((&status["outcome"], &status["result"]), (&json!("completed"), &Value::Null), "{status}");
        assert_eq!(fs::read(mount.result("k", 2)).map_err(|e| e.kind()), Err(ErrorKind::NotFound));
        let latest = fs::read_link(mount.root().join("results/k/latest"));
        assert_eq!(latest.map_err(|e| e.kind()), Err(ErrorKind::NotFound));
        let agent = Agent::new();
        assert_eq!(agent.create(&mount.claim("k")), Err(Errno::EEXIST), "finished work is not started again");
        // Within its TTL and by its own user: but it has had its result.
        for epoch in [1, 2] {
            let late = agent.open(&mount.result("k", epoch), libc::O_WRONLY | libc::O_CREAT);
            assert_eq!(late, Err(Errno::ESTALE), "no result comes in place of the one that went");
        }
        let shown = stdout(&mount.leasefs(&["history", "k"]));
        assert!(shown.contains("completed") && shown.contains(" pruned"), "{shown}");
        assert!(shown.ends_with("(1 earlier attempt pruned)\n"), "{shown}");
        mount.verify();
    }
    // A lock goes on with the next number, and a new result is a result like any.
    complete(&mount, "k", &[5]);
    assert_eq!(mount.status("k")["result"]["epoch"], 3);
    assert_eq!(fs::read_link(mount.root().join("results/k/latest")).expect("latest"), PathBuf::from("3"));
    mount.verify();
}

#[test]
fn what_is_in_use_stays() {
    let mount = Mount::new();
    let agent = Agent::new();
    // Completed, and its handle is open still.
    let held = agent.create(&mount.claim("held")).expect("free");
    let draft = agent.handle(&mount.result("held", 1));
    agent.fsync(draft).expect("commits");
    agent.close(draft);
    // Only a draft keeps it.
    let fd = agent.create(&mount.claim("reporting")).expect("free");
    let open = agent.handle(&mount.result("reporting", 1));
    agent.close(fd);
    mount.wait_status("reporting", "reporting", |status| status["state"] == "reporting");
    // Evicted, succeeded, and its draft is open.
    let evicted = agent.create(&mount.claim("evicted")).expect("free");
    let late = agent.handle(&mount.result("evicted", 1));
    assert_ok(&mount.leasefs(&["evict", "evicted", "--epoch", "1"]));
    agent.close(evicted);
    release(&mount, "evicted", 2);
    let output = mount.leasefs(&["prune", "--completed-older", "0s", "--attempts-over", "1"]);
    assert_ok(&output);
    assert_eq!(stderr(&output), "leasefs: 1 more stay for now: they are in use\n");
    assert_eq!(total(&stdout(&output)), "gone: 1 attempts, 0 results (0 bytes), of 1 keys");
    assert_eq!(history(&mount, "evicted"), [1, 3]);
    assert_eq!(mount.state_of("held"), "held");
    assert_eq!(mount.status("held")["result"]["epoch"], 1);
    assert_eq!(agent.epoch(held), Ok(1));
    assert_eq!(mount.state_of("reporting"), "reporting");
    agent.write(open, "done").expect("registered");
    agent.fsync(open).expect("commits");
    for fd in [open, late, held] {
        agent.close(fd);
    }
    mount.wait_status("reporting", "finished", |status| status["state"] == "finished");
    mount.wait_status("held", "finished", |status| status["state"] == "finished");
    let went = prune(&mount, &["--completed-older", "0s", "--attempts-over", "1"]);
    assert_eq!(total(&went), "gone: 1 attempts, 2 results (4 bytes), of 3 keys");
    mount.verify();
}

#[test]
fn events_and_the_status_tell_of_it() {
    let mount = Mount::new();
    complete(&mount, "a", &[1, 2, 3]);
    release(&mount, "b", 100);
    let agent = Agent::new();
    let events = agent.open(&mount.root().join(".leasefs/events"), libc::O_RDONLY).expect("events");
    let status = agent.open(&mount.root().join("status/a"), libc::O_RDONLY).expect("status");
    agent.read(status).expect("status");
    prune(&mount, &["--completed-older", "0s", "--attempts-over", "10"]);
    assert_ne!(agent.poll(status, libc::POLLPRI, 10_000) & libc::POLLPRI, 0, "its result is gone");
    let text = agent.call("os_read", json!([events, 65_536])).expect("events");
    let lines: Vec<Value> =
        text.as_str().expect("text").lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let told: Vec<_> = lines.iter().filter(|line| line["event"] == "pruned").collect();
    assert_eq!(told.len(), 2, "one for each key: {lines:?}");
    let of = |key: &str| told.iter().find(|line| line["key"] == key).expect("told of");
    assert_eq!((&of("a")["attempts"], &of("a")["results"], &of("a")["epoch"]), (&json!(2), &json!(3), &json!(3)));
    assert_eq!((&of("b")["attempts"], &of("b")["results"], &of("b")["epoch"]), (&json!(90), &json!(0), &json!(100)));
}

/// Claims and releases until told to stop, with a result each time; how many, and how long the slowest took in seconds.
/// Says when it is at it.
const BUSY: &str = r#"
count, slowest = 0, 0
while not os.path.exists(stop):
    if count == 1:
        open(begun, "w").close()
    count += 1
    began = time.monotonic()
    fd = os.open(f"{root}/claims/busy-{count % 5}", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    slowest = max(slowest, time.monotonic() - began)
    epoch = int(read(fd).split(b"\n")[0])
    draft = os.open(f"{root}/results/busy-{count % 5}/{epoch}", os.O_WRONLY | os.O_CREAT)
    os.write(draft, b"x" * (count % 500))
    os.fsync(draft)
    os.close(draft)
    os.close(fd)
result = [count, slowest]
"#;

#[test]
fn claims_and_backups_go_on_while_a_long_history_is_pruned() {
    let mount = Mount::new();
    for key in ["long", "longer"] {
        release(&mount, key, 3_000);
    }
    complete(&mount, "results", &[100; 300]);
    let stop = mount.scratch().join("stop");
    let workers: Vec<Agent> = (0..2).map(|_| Agent::new()).collect();
    for (number, worker) in workers.iter().enumerate() {
        let begun = mount.scratch().join(format!("begun-{number}"));
        worker.begin("script", json!([BUSY, { "root": mount.root(), "stop": stop, "begun": begun }]));
        wait_for("it claims", || begun.exists());
    }
    let went = prune(&mount, &["--attempts-over", "5", "--completed-older", "0s"]);
    // Backups find each result of the rows they have, however often history is pruned meanwhile.
    for round in 0..3 {
        let dest = mount.scratch().join(format!("backup-{round}"));
        let mut pruning = mount.command(LEASEFS);
        let pruning = pruning.args(["prune", "--attempts-over", "1"]).output_in_time();
        assert!(matches!(pruning.status.code(), Some(0 | 1)), "{}", stderr(&pruning));
        let output = mount.command(LEASEFS).arg("backup").arg(&dest).output_in_time();
        assert_ok(&output);
        assert_ok(&verify(&dest));
    }
    fs::write(&stop, "").expect("stop");
    for worker in workers {
        let answer = worker.answer().expect("nobody is refused");
        let (count, slowest) = (answer[0].as_u64().expect("a count"), answer[1].as_f64().expect("seconds"));
        eprintln!("{count} claims meanwhile, the slowest in {:.1} ms", slowest * 1e3);
        assert!(count > 1);
        // Below what all of the pruning takes on a slow machine, far above one step of it.
        assert!(Duration::from_secs_f64(slowest) < Duration::from_secs(20), "a claim waited {slowest} s");
    }
    assert!(went.contains("longer"), "{went}");
    assert_eq!(history(&mount, "long"), [3_000]);
    mount.verify();
}

#[test]
fn whoever_reads_a_result_reads_on() {
    let mount = Mount::new();
    complete(&mount, "k", &[100_000]);
    let agent = Agent::new();
    let fd = agent.open(&mount.result("k", 1), libc::O_RDONLY).expect("a result");
    prune(&mount, &["--completed-older", "0s"]);
    assert_eq!(agent.open(&mount.result("k", 1), libc::O_RDONLY), Err(Errno::ENOENT));
    // Also where another server goes on with the open file.
    let server = mount.server_pid().expect("a server");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(server), nix::sys::signal::Signal::SIGKILL).expect("there");
    let length = "result = len(os.read(fd, 1 << 20))";
    assert_eq!(agent.script(length, json!({ "fd": fd })), Ok(json!(100_000)));
    assert_ne!(mount.server_pid(), Some(server));
    assert_eq!(result_files(&mount.state()), 1, "while it is read");
    agent.close(fd);
    drop(agent);
    // The file goes with the new server's look for such files, or with the next prune.
    wait_for("the file is gone", || {
        prune(&mount, &["--completed-older", "0s"]);
        result_files(&mount.state()) == 0
    });
    mount.verify();
}

#[test]
fn a_prune_that_is_not_waited_for_any_more_stops() {
    let mount = Mount::new();
    release(&mount, "k", 2_000);
    // Whoever gives the order dies: nothing hangs, and what went is gone in good order.
    let mut order = mount.command(LEASEFS);
    let order = order.args(["prune", "--attempts-over", "1"]).stdout(Stdio::null()).spawn().expect("leasefs runs");
    let mut order = Background(order);
    wait_for("it has begun", || history(&mount, "k").len() < 2_000);
    order.0.kill().expect("it is a child");
    order.wait();
    wait_for("the rest is pruned", || {
        mount.leasefs(&["prune", "--attempts-over", "1"]).status.success() && history(&mount, "k") == [2_000]
    });
    mount.verify();
}

#[test]
fn a_prune_and_whoever_reads_all_results_keep_each_other_off() {
    let mount = Mount::new();
    complete(&mount, "k", &[3, 3]);
    let script = "exec 8<$M/../state/results && flock -s 8 && echo locked && exec sleep 1000";
    let reader = Script::start(&mount, script);
    assert_eq!(reader.line().as_deref(), Some("locked"));
    let output = mount.leasefs(&["prune", "--attempts-over", "1"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("a backup or a verify is at work"), "{}", stderr(&output));
    assert_eq!(history(&mount, "k"), [1, 2]);
    drop(reader);
    prune(&mount, &["--attempts-over", "1"]);
    assert_eq!(history(&mount, "k"), [2]);
}
