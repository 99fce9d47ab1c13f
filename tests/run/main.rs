//! `leasefs run` beyond flock(1): its guard, the command's process group and its terminal, handles that are passed on.
//!
//! Runs have a session of their own here, so no terminal, whoever runs the tests; `terminal` gives them one.

#[path = "../common/mod.rs"]
mod common;

mod frozen;
mod guarded;
mod keeps;
mod signals;
mod terminal;
mod usage;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use common::agent::{Agent, Stray, count, has_ended};
use common::{Background, InTime, LEASEFS, Mount, assert_ok, read_in_time, wait_for};

/// A run in the background. What it started and has not ended is killed when the value goes.
struct Run {
    runner: Background,
    seen: PathBuf,
}

impl Run {
    /// Starts `leasefs run` with these arguments. Its command tells of its processes in the file `$SEEN`, a pid a line.
    fn start(mount: &Mount, args: &[&str]) -> Run {
        let seen = mount.scratch().join("seen");
        let _ = fs::remove_file(&seen);
        let mut command = mount.command("setsid");
        command.arg(LEASEFS).arg("run").args(args).env("SEEN", &seen);
        let runner = Background(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("setsid runs"));
        Run { runner, seen }
    }

    /// Starts one whose command is a shell script with so many processes, all of them at work when this returns.
    fn script(mount: &Mount, options: &[&str], script: &str, processes: usize) -> Run {
        let run = Run::start(mount, &[options, &["job", "--", "sh", "-c", script]].concat());
        wait_for("the command's processes are there", || run.pids().len() == processes);
        run
    }

    /// The processes that the command has told of.
    fn pids(&self) -> Vec<i32> {
        let seen = fs::read_to_string(&self.seen).unwrap_or_default();
        // The last line may be half written.
        let whole = seen.rsplit_once('\n').map_or("", |(whole, _)| whole);
        whole.lines().map(|line| line.parse().expect("a pid")).collect()
    }

    fn living(&self) -> Vec<i32> {
        self.pids().into_iter().filter(|pid| !has_ended(*pid)).collect()
    }

    /// The process that guards the command.
    fn guard(&self) -> i32 {
        let runner = self.runner.pid();
        let children = fs::read_to_string(format!("/proc/{runner}/task/{runner}/children")).expect("children");
        let guard = children.trim().parse().expect("the guard is the runner's only child");
        assert_eq!(fs::read_to_string(format!("/proc/{guard}/comm")).expect("comm"), "leasefs-guard\n");
        guard
    }

    fn kill_guard(&self) {
        send(self.guard(), Signal::SIGKILL);
    }

    /// Its exit code.
    fn code(&mut self) -> Option<i32> {
        self.runner.wait().code()
    }

    /// What runner and guard wrote to stderr, once all who have it are gone; shells have their say there as well.
    fn said(&mut self) -> String {
        let all = read_in_time(self.runner.0.stderr.take());
        all.lines().filter(|line| line.starts_with("leasefs: ")).map(|line| format!("{line}\n")).collect()
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.pids().into_iter().for_each(|pid| drop(Stray(pid)));
    }
}

fn send(pid: i32, signal: Signal) {
    kill(Pid::from_raw(pid), signal).unwrap_or_else(|e| panic!("{signal} to {pid}: {e}"));
}

/// Sets the TTL of a key that is held, as another process of the same user.
fn set_ttl(mount: &Mount, key: &str, ttl: &str) {
    let set = "import os, sys; os.setxattr(sys.argv[1], 'user.lease.ttl', sys.argv[2].encode())";
    let mut command = mount.command("python3");
    assert_ok(&command.args(["-c", set]).arg(mount.claim(key)).arg(ttl).output_in_time());
}

/// Whether a process is stopped.
fn is_stopped(pid: i32) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.lines().any(|line| line.starts_with("State:\tT"))
}

/// Who waits for a key in line, and looks whether certain processes live as the first thing it does when it holds it.
struct Next(Agent);

impl Next {
    fn in_line(mount: &Mount, key: &str, processes: &[i32]) -> Next {
        const SCRIPT: &str = "
fd = os.open(path, os.O_RDWR | os.O_CREAT)
fcntl.flock(fd, fcntl.LOCK_EX)
alive = []
for pid in pids:
    try:
        status = os.read(os.open(f'/proc/{pid}/status', os.O_RDONLY), 4096)
        # One that exits has no memory any more when its files are closed, and is a zombie a moment later.
        if status.split(b'State:\\t')[1][0:1] not in b'ZX' and b'VmSize:' in status:
            alive.append(pid)
    except (FileNotFoundError, ProcessLookupError):
        pass
result = [fd, alive]
";
        let agent = Agent::new();
        agent.begin("script", json!([SCRIPT, { "path": mount.claim(key), "pids": processes }]));
        mount.wait_status(key, "the next waits", |status| count(status, "waiters") == 1);
        Next(agent)
    }

    /// Waits for its turn: which of the processes it found alive.
    fn found_alive(&self) -> Vec<Value> {
        let found = self.0.answer().expect("its turn comes");
        found[1].as_array().expect("a list").clone()
    }

    /// Whether its turn has not come yet.
    fn waits(&self, mount: &Mount, key: &str) -> bool {
        count(&mount.status(key), "waiters") == 1 && !has_ended(self.0.pid())
    }
}

fn lines(path: &Path) -> usize {
    fs::read_to_string(path).unwrap_or_default().lines().count()
}
