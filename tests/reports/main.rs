//! Bugs that other lock software had in public, each as the behaviour that must not come back. See `tests/README.md`.

#[path = "../common/mod.rs"]
mod common;

use std::fs;
use std::time::Duration;

use libc::{LOCK_EX, LOCK_NB, LOCK_UN, O_CREAT, O_WRONLY};
use nix::errno::Errno;
use nix::sys::signal::Signal;
use serde_json::json;

use common::agent::{Agent, Fd, Script, Stray, count, has_ended, runs};
use common::luck::{in_peace, shown};
use common::{Background, InTime, LEASEFS, Mount, assert_ok, stdout, stop, wait_for};

/// filelock 634: a child that inherited the lock object released the parent's lock when it was garbage-collected.
#[test]
fn a_forked_childs_close_does_not_release_the_parents_lease() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (parent, other) = (Agent::new(), Agent::new());
    let fd = parent.handle(&path);
    parent.flock(fd, LOCK_EX).expect("free key");
    for end in ["close", "exit", "kill", "exec"] {
        let child = parent.fork();
        match end {
            "close" => child.close(fd),
            "exit" => child.exit(),
            "kill" => child.kill(),
            // Close-on-exec closes the copy.
            _ => {
                child.begin("execvp", json!(["true", ["true"]]));
                child.wait_end();
            }
        }
        assert_eq!(other.create(&path), Err(Errno::EEXIST), "after the child's {end}");
        assert_eq!(parent.epoch(fd), Ok(1), "after the child's {end}");
    }
    parent.close(fd);
    let fd = other.create(&path).expect("the parent's own close is the last");
    assert_eq!(other.epoch(fd), Ok(2));
}

/// redlock-rb 36: a lock whose time had run out could be extended, although another client might hold it.
#[test]
fn an_expired_lease_cannot_be_extended() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let agent = Agent::new();
    let fd = agent.create(&path).expect("free key");
    agent.set_xattr(&path, "user.lease.ttl", "200ms").expect("holder's user");
    mount.wait_status("k", "expired", |status| status["outcome"] == "expired");
    // Nobody else has claimed: even so there is nothing left to extend.
    assert_eq!(agent.write(fd, "beat"), Err(Errno::ESTALE));
    assert_eq!(agent.touch(fd), Err(Errno::ESTALE));
    assert_eq!(agent.flock(fd, LOCK_EX | LOCK_NB), Err(Errno::ESTALE));
    assert_eq!(agent.lock(fd, libc::F_SETLK, libc::F_WRLCK), Err(Errno::ESTALE));
    assert_eq!(agent.set_xattr(&path, "user.lease.ttl", "1h"), Err(Errno::ENOENT), "nor by a longer TTL");
    let status = mount.status("k");
    assert_eq!((status["state"].as_str(), status["epoch"].as_u64()), (Some("free"), Some(1)));
    let fresh = agent.create(&path).expect("a new claim is a new attempt");
    assert_eq!(agent.epoch(fresh), Ok(2));
}

/// curvine 1502: a release was sent in the background, so that the next lock came before it, and lost.
#[test]
fn close_then_claim_never_loses_500_of_500() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let agents = [Agent::new(), Agent::new(), Agent::new()];
    for round in 1..=500usize {
        let agent = &agents[round % 3];
        let fd = match round % 2 {
            0 => agent.create(&path),
            _ => {
                let fd = agent.handle(&path);
                agent.flock(fd, LOCK_EX | LOCK_NB).map(|()| fd)
            }
        };
        let fd = fd.unwrap_or_else(|e| panic!("round {round} of 500: {e}"));
        assert_eq!(agent.epoch(fd), Ok(round as u64));
        agent.close(fd);
    }
}

/// glusterfs 3179: a client that was signalled while it waited stayed in the lock table, and was granted the lock dead.
#[test]
fn a_signalled_waiter_leaves_no_phantom() {
    let mount = Mount::new();
    let path = mount.claim("k");
    for round in 0..20u64 {
        let holder = Agent::new();
        let fd = holder.create(&path).unwrap_or_else(|e| panic!("round {round}: a phantom holds the key: {e}"));
        assert_eq!(holder.epoch(fd), Ok(round + 1), "a phantom took an epoch");
        let waiter = Agent::new();
        waiter.call("on_signal", json!([libc::SIGUSR1, "raise"])).expect("sigaction");
        let handle = waiter.handle(&path);
        if round % 2 == 0 {
            waiter.begin_flock(handle, LOCK_EX);
        } else {
            waiter.begin("lock", json!([handle, libc::F_SETLKW, libc::F_WRLCK]));
        }
        mount.wait_status("k", "one waiter", |status| count(status, "waiters") == 1);
        if round % 4 < 2 {
            waiter.signal(Signal::SIGUSR1);
            assert_eq!(waiter.answer(), Err(Errno::EINTR));
        } else {
            waiter.kill();
        }
        mount.wait_status("k", "an empty line", |status| count(status, "waiters") == 0);
        holder.close(fd);
        assert_eq!(mount.state_of("k"), "free", "round {round}: given to a waiter that is gone");
    }
}

/// juicefs 7462: a client that was frozen past its session's end wrote after others had taken its locks over.
#[test]
fn a_frozen_clients_write_after_the_takeover_fails() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (frozen, next) = (Agent::new(), Agent::new());
    let fd = frozen.create(&path).expect("free key");
    let draft = frozen.handle(&mount.result("k", 1));
    frozen.write(draft, "the first half, ").expect("registered attempt");
    // Only this lease runs out, however slow the machine is.
    frozen.set_xattr(&path, "user.lease.ttl", "1s").expect("holder's user");
    stop(frozen.pid());
    let handle = next.handle(&path);
    next.begin_flock(handle, LOCK_EX);
    next.answer().expect("granted at the deadline");
    next.write(handle, "mine now").expect("holder");
    frozen.signal(Signal::SIGCONT);
    assert_eq!(frozen.write(fd, "still mine"), Err(Errno::ESTALE));
    assert_eq!(frozen.write(draft, "the second half"), Err(Errno::ESTALE));
    assert_eq!(frozen.fsync(draft), Err(Errno::ESTALE));
    frozen.close(draft);
    frozen.close(fd);
    let status = mount.status("k");
    assert_eq!((status["epoch"].as_u64(), status["note"].as_str()), (Some(2), Some("mine now")));
    assert!(!mount.result("k", 1).exists() && !mount.result("k", 2).exists(), "nothing was published");
    assert_eq!(next.epoch(handle), Ok(2));
}

/// aegra 547: a finishing run marked as done whatever run now bore its name, though that was a newer one.
#[test]
fn an_old_attempt_cannot_finish_a_newer_one_under_a_reused_name() {
    let mount = Mount::new();
    let path = mount.claim("run");
    let (old, new, parent) = (Agent::new(), Agent::new(), Agent::new());
    let fd = old.create(&path).expect("free key");
    let draft = parent.handle(&mount.result("run", 1));
    parent.write(draft, "the old one's result").expect("registered attempt");
    assert_ok(&mount.leasefs(&["evict", "run", "--epoch", "1", "--reason", "restarted"]));
    let next = new.create(&path).expect("the name is free again");
    assert_eq!(new.epoch(next), Ok(2));
    // By its draft, by a new draft, by its handle, by the name of the new attempt under another user's eyes: nothing.
    assert_eq!(parent.write(draft, "!"), Err(Errno::ESTALE));
    assert_eq!(parent.fsync(draft), Err(Errno::ESTALE));
    parent.close(draft);
    assert_eq!(old.open(&mount.result("run", 1), O_WRONLY | O_CREAT), Err(Errno::ESTALE));
    assert_eq!(old.write(fd, "done"), Err(Errno::ESTALE));
    let _ = old.flock(fd, LOCK_UN);
    old.close(fd);
    let status = mount.status("run");
    assert_eq!((status["state"].as_str(), status["epoch"].as_u64()), (Some("held"), Some(2)));
    assert!(status["result"].is_null(), "{status}");
    let draft = new.handle(&mount.result("run", 2));
    new.write(draft, "the new one's result").expect("registered attempt");
    new.close(draft);
    new.close(next);
    assert_eq!(fs::read_to_string(mount.root().join("results/run/latest")).expect("latest"), "the new one's result");
    assert!(!mount.result("run", 1).exists());
    mount.verify();
}

/// beads 3575: several of many agents that claimed the same issue at once were told that they had it.
#[test]
fn of_fifty_processes_one_wins() {
    let mount = Mount::new();
    let claim = "
import select
select.select([gate], [], [])
try: fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL) if number % 2 else os.open(path, os.O_RDWR | os.O_CREAT)
except FileExistsError: result = None
else:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        result = int(read(fd).split(b'\\n')[0])
    except BlockingIOError: result = None
";
    let parent = Agent::new();
    for round in 1..=5u64 {
        // All of them sleep on one pipe, and wake together when its other end is closed.
        let pipe = parent.call("pipe", json!([])).expect("pipe");
        let (gate, open) = (pipe[0].as_i64().expect("a descriptor"), pipe[1].as_i64().expect("a descriptor"));
        let agents: Vec<Agent> = (0..50).map(|_| parent.fork()).collect();
        for (number, agent) in agents.iter().enumerate() {
            agent.close(open);
            agent.begin("script", json!([claim, { "gate": gate, "path": mount.claim("k"), "number": number }]));
        }
        parent.close(open);
        let won: Vec<u64> =
            agents.iter().filter_map(|agent| agent.answer().expect("claimed or refused").as_u64()).collect();
        assert_eq!(won, [round], "one winner, one epoch");
        assert_eq!(mount.status("k")["epoch"], round);
        parent.close(gate);
        drop(agents);
        mount.wait_status("k", "free again", |status| status["state"] == "free");
    }
}

/// filelock 574: the holder unlinked the lock file while others waited on it, and a newcomer locked a new file beside them.
#[test]
fn unlinking_while_others_wait_never_makes_two_holders() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let newcomer = Agent::new();
    for by in ["its holder", "another process", "a shell"] {
        let holder = Agent::new();
        holder.create(&path).expect("free key");
        let waiters: Vec<(Agent, Fd)> = (1..=3u64)
            .map(|place| {
                let agent = Agent::new();
                let fd = agent.handle(&path);
                agent.begin_flock(fd, LOCK_EX);
                mount.wait_status("k", "its place", |status| count(status, "waiters") == place);
                (agent, fd)
            })
            .collect();
        match by {
            "its holder" => holder.unlink(&path).expect("its own"),
            "another process" => assert_eq!(newcomer.unlink(&path), Err(Errno::EBUSY)),
            _ => {
                let script = Script::start(&mount, "rm -f $M/claims/k 2>/dev/null; echo $?");
                assert_eq!(script.line().as_deref(), Some("1"));
            }
        }
        assert_eq!(newcomer.create(&path), Err(Errno::EEXIST), "{by}: a newcomer beside the line");
        let handle = newcomer.handle(&path);
        assert_eq!(newcomer.flock(handle, LOCK_EX | LOCK_NB), Err(Errno::EAGAIN), "{by}");
        newcomer.close(handle);
        drop(holder);
        // One at a time, each in its turn.
        for (place, (agent, fd)) in waiters.iter().enumerate() {
            agent.answer().expect("its turn");
            let status = mount.status("k");
            assert_eq!(agent.epoch(*fd), Ok(status["epoch"].as_u64().expect("epoch")), "{by}: {place} holds");
            for (other, _) in &waiters[place + 1..] {
                assert_eq!(other.answer_within(Duration::from_millis(20)), None, "{by}: two holders");
            }
            agent.close(*fd);
        }
        assert_eq!(mount.state_of("k"), "free", "{by}");
    }
    mount.verify();
}

/// Starts `leasefs run` with a shell script that tells of its processes in a file, a pid a line, and waits for so many.
fn start_run(mount: &Mount, options: &[&str], script: &str, processes: usize) -> (Background, Vec<Stray>) {
    let seen = mount.scratch().join("seen");
    let mut command = mount.command("setsid");
    command.args([LEASEFS, "run"]).args(options).args(["job", "--", "sh", "-c", script]).env("SEEN", &seen);
    let run = Background(command.spawn().expect("setsid runs"));
    let read = || fs::read_to_string(&seen).unwrap_or_default();
    wait_for("the command's processes", || read().matches('\n').count() == processes);
    (run, read().lines().map(|pid| Stray(pid.parse().expect("a pid"))).collect())
}

/// factory 2098: a supervisor's TERM ended the wrapper, flock(1), alone; the daemon below it went on and kept the lock,
/// so that every later start was refused.
#[test]
fn a_terminated_wrapper_leaves_neither_its_daemon_nor_the_lock_behind() {
    let mount = Mount::new();
    let daemon = r#"sh -c 'echo $$ >>"$SEEN"; exec sleep 1000' & echo $$ >>"$SEEN"; wait"#;
    let (mut run, processes) = start_run(&mount, &[], daemon, 2);
    run.signal("TERM");
    assert_eq!(run.wait().code(), Some(128 + libc::SIGTERM));
    assert_ok(&mount.leasefs(&["run", "-n", "job", "--", "true"]));
    for Stray(pid) in processes {
        wait_for("the daemon's end", || has_ended(pid));
    }
}

/// consul 9788: `consul lock` ended the child a minute and a half after its session had, while the next had begun.
#[test]
fn the_child_of_a_lost_lock_is_dead_before_the_next_begins() {
    in_peace(Duration::from_secs(1), the_child_is_dead_before);
}

fn the_child_is_dead_before(time: Duration) {
    let mount = Mount::new();
    let deaf =
        r#"trap '' TERM; setsid sh -c 'echo $$ >>"$SEEN"; exec sleep 1000' & echo $$ >>"$SEEN"; exec sleep 1000"#;
    let (mut run, processes) = start_run(&mount, &["--ttl", &shown(time)], deaf, 2);
    let next = Agent::new();
    let look = "
fd = os.open(path, os.O_RDWR)
fcntl.flock(fd, fcntl.LOCK_EX)
def state(pid):
    try: return os.read(os.open(f'/proc/{pid}/status', os.O_RDONLY), 4096).split(b'State:\\t')[1][0:1]
    except OSError: return b'X'
result = [pid for pid in pids if state(pid) not in b'ZX']
";
    let pids: Vec<i32> = processes.iter().map(|process| process.0).collect();
    next.begin("script", json!([look, { "path": mount.claim("job"), "pids": pids }]));
    mount.wait_status("job", "the next waits", |status| count(status, "waiters") == 1);
    // Cut off, for all it can tell.
    run.signal("STOP");
    assert_eq!(next.answer(), Ok(json!([])), "alive beside the next holder");
    assert_eq!(mount.status("job")["outcome"], "expired");
    run.signal("CONT");
    assert_eq!(run.wait().code(), Some(75));
}

/// objectstack 9661: those with the longer patience lost the lock again and again to others who came later, since flock
/// grants it to whoever happens to be waiting.
#[test]
fn many_who_try_again_and_again_do_not_starve_one_who_waits() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let stop = mount.scratch().join("stop");
    let holder = Agent::new();
    let mut held = holder.create(&path).expect("free key");
    let again = "echo on; until [ -e $M/../scratch/stop ]; do flock -w 0.05 $M/claims/k sleep 0.01; done";
    let crowd: Vec<Script> = (0..6).map(|_| Script::start(&mount, again)).collect();
    crowd.iter().for_each(|script| assert_eq!(script.line().as_deref(), Some("on")));
    for round in 0..10 {
        let patient = Agent::new();
        let fd = patient.handle(&path);
        patient.begin_flock(fd, LOCK_EX);
        // Those before it give up, and come again behind it.
        mount.wait_status("k", "first in line, with others behind", |status| {
            status["line"][0]["pid"] == patient.pid() && count(status, "waiters") > 1
        });
        let before = mount.status("k")["epoch"].as_u64().expect("epoch");
        holder.close(held);
        patient.answer().expect("its turn");
        assert_eq!(patient.epoch(fd), Ok(before + 1), "round {round}: somebody came first");
        // The holder of the next round waits like anybody else.
        held = holder.handle(&path);
        holder.begin_flock(held, LOCK_EX);
        mount.wait_status("k", "it waits", |status| {
            status["line"].as_array().is_some_and(|line| line.iter().any(|place| place["pid"] == holder.pid()))
        });
        patient.close(fd);
        holder.answer().expect("its turn");
    }
    fs::write(stop, "").expect("stop");
    holder.close(held);
    crowd.into_iter().for_each(|script| assert!(script.finish().code().is_some()));
    mount.verify();
}

/// gastown 4698: a restarted worker was given work that it had finished, did it once more and handed it in twice.
#[test]
fn finished_work_is_not_started_again_by_a_restarted_worker() {
    let mut mount = Mount::new();
    let path = mount.claim("issue-7");
    let worker = Agent::new();
    let fd = worker.create(&path).expect("free key");
    let draft = worker.handle(&mount.result("issue-7", 1));
    worker.write(draft, "merged").expect("registered attempt");
    worker.fsync(draft).expect("committed");
    // It dies before it can say that it is done with it.
    worker.signal(Signal::SIGKILL);
    worker.wait_end();
    let assert_refused = |mount: &Mount| {
        mount.wait_status("issue-7", "finished", |status| status["state"] == "finished");
        let restarted: Vec<Agent> = (0..10).map(|_| Agent::new()).collect();
        restarted.iter().for_each(|agent| agent.begin("open", json!([path, libc::O_RDWR | O_CREAT | libc::O_EXCL])));
        for agent in &restarted {
            assert_eq!(agent.answer(), Err(Errno::EEXIST), "it would do it again");
        }
        // Nor can any hand it in again, under the old number or a new one.
        for (epoch, refusal) in [(1, Errno::EPERM), (2, Errno::ENOENT)] {
            let answer = restarted[0].open(&mount.result("issue-7", epoch), O_WRONLY | O_CREAT);
            assert_eq!(answer, Err(refusal), "result {epoch}");
        }
        assert_eq!(fs::read_to_string(mount.result("issue-7", 1)).expect("result"), "merged");
        assert_eq!(mount.status("issue-7")["epoch"], 1);
    };
    assert_refused(&mount);
    mount.unmount();
    mount.start(&[]);
    assert_refused(&mount);
    // Only whoever says so has it done again, and that is another attempt.
    let again = Agent::new();
    again.unlink(&path).expect("forgotten");
    let fresh = again.create(&path).expect("to be done again");
    assert_eq!(again.epoch(fresh), Ok(2));
    let _ = fd;
}

/// gbrain 2840: a holder in another container, whose pid means nothing here, was taken for dead by `kill -0`.
#[test]
fn a_holder_in_another_pid_namespace_is_not_taken_for_dead() {
    let mut mount = Mount::new();
    let told = mount.scratch().join("pid");
    let inside = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c"];
    let hold = "set -C; exec 9>$M/claims/page; echo $$ >$M/../scratch/pid; read -r _";
    let holder = Script::start_with(&mount, &[&inside[..], &[hold]].concat());
    wait_for("it holds the key", || fs::read_to_string(&told).is_ok_and(|pid| pid == "1\n"));
    let assert_refused = |mount: &Mount| {
        let status = mount.status("page");
        let seen = status["holder"]["pid"].as_i64().expect("the pid as seen from here");
        // In a namespace of its own, neither number is the holder's; ours is nobody's, and 1 is the asker's.
        let ask = format!(
            "kill -0 {seen} 2>/dev/null && exit 10; kill -0 1 || exit 11; set -C
             (exec 9>$M/claims/page) 2>/dev/null && exit 12; flock -n $M/claims/page true && exit 13
             {LEASEFS} run -n -E 14 page -- true 2>/dev/null; [ $? = 14 ]"
        );
        let asker = mount.command(inside[0]).args(&inside[1..]).arg(&ask).output_in_time();
        assert_ok(&asker);
        assert_eq!(mount.status("page")["epoch"], 1);
    };
    assert_refused(&mount);
    // Nor when nothing but a look at the processes could tell.
    mount.lose_connection();
    mount.start(&[]);
    assert_eq!(mount.state_of("page"), "orphaned");
    assert_refused(&mount);
    assert_eq!(mount.state_of("page"), "orphaned");
    drop(holder);
}

/// aidevops 18094: a daemon that a script started inherited the lock file's descriptor, so the lock stayed taken by nobody
/// that could be found, and the cure was to delete the file.
#[test]
fn a_daemon_that_inherited_the_handle_is_shown_and_can_be_evicted() {
    let mount = Mount::new();
    let mut script = Script::start(&mount, "exec 9<>$M/claims/k; flock 9; setsid sleep 1000 >&- & echo $!; read -r _");
    let daemon = Stray(script.line().expect("a pid").parse().expect("a pid"));
    script.say("");
    script.wait();
    wait_for("the daemon's program runs", || runs(daemon.0, "sleep"));
    let status = mount.status("k");
    assert_eq!((status["state"].as_str(), status["epoch"].as_u64()), (Some("held"), Some(1)), "the daemon has it");
    let who = mount.leasefs(&["who", "k"]);
    assert_ok(&who);
    let (table, pid) = (stdout(&who), daemon.0.to_string());
    let lines: Vec<Vec<&str>> = table.lines().skip(1).map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines.len(), 1, "nobody else: {table}");
    assert_eq!((lines[0][0], lines[0][3], lines[0][4]), (pid.as_str(), "inherited", "9"), "{table}");
    assert!(table.trim_end().ends_with("sleep 1000"), "{table}");
    assert_ok(&mount.leasefs(&["evict", "k", "--epoch", "1", "--reason", "a daemon inherited it"]));
    let next = Agent::new();
    let fd = next.create(&mount.claim("k")).expect("free, though the daemon lives");
    assert_eq!(next.epoch(fd), Ok(2));
    assert!(!has_ended(daemon.0), "nobody was killed for it");
    let who = stdout(&mount.leasefs(&["who", "k"]));
    assert!(who.contains(&next.pid().to_string()) && !who.contains(&pid), "{who}");
}
