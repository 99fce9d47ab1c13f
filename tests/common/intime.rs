//! Nothing is waited for without end: a test that hangs would hold up all that come after it, and tell nobody why.
//!
//! What did not end in time is ended, as far as it can be, and the test fails with what it waited for.

use std::fs;
use std::io::Read;
use std::path::PathBuf;
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

use nix::mount::MntFlags;
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, gettid};

use super::PATIENCE;

/// Longest a command may take that the test waits for.
const COMMAND_LIMIT: Duration = Duration::from_secs(300);

/// How long a killed process may take to be gone.
const DEATH: Duration = Duration::from_secs(10);

/// Longest that a test may have a tree; suites that were told to go on for longer have that time on top.
const TREE_LIMIT: Duration = Duration::from_secs(20 * 60);

/// A command that is sure to end.
pub trait InTime {
    /// As [`Command::output`], for five minutes at most. What the command had is used up.
    fn output_in_time(&mut self) -> Output;

    /// Runs it to clean up, whatever came before: whether it ended well, and soon.
    fn quietly_in_time(&mut self) -> bool;
}

impl InTime for Command {
    #[track_caller]
    fn output_in_time(&mut self) -> Output {
        let shown = format!("{self:?}");
        let mut command = std::mem::replace(self, Command::new("false"));
        let (send_thread, thread) = mpsc::channel();
        let (send, done) = mpsc::channel();
        std::thread::spawn(move || {
            let _ = send_thread.send(gettid());
            let _ = send.send(command.output());
        });
        let late = match done.recv_timeout(COMMAND_LIMIT) {
            Ok(output) => return output.unwrap_or_else(|error| panic!("{shown}: {error}")),
            Err(_) => thread.recv().expect("the thread has begun"),
        };
        children_of(Pid::this(), Some(late)).into_iter().for_each(kill_family);
        let said = done.recv_timeout(DEATH).ok().and_then(Result::ok);
        panic!("did not end within {} s: {shown}; it said {said:?}", COMMAND_LIMIT.as_secs());
    }

    fn quietly_in_time(&mut self) -> bool {
        self.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        let Ok(mut child) = self.spawn() else { return false };
        let deadline = Instant::now() + PATIENCE;
        while Instant::now() < deadline {
            match child.try_wait() {
                Ok(None) => std::thread::sleep(Duration::from_millis(2)),
                ended => return ended.ok().flatten().is_some_and(|status| status.success()),
            }
        }
        end(&mut child);
        false
    }
}

/// Kills a child and reaps it. One that hangs in a call which nobody answers cannot be reaped, and is left behind.
pub fn end(child: &mut Child) {
    let _ = child.kill();
    let deadline = Instant::now() + DEATH;
    while matches!(child.try_wait(), Ok(None)) {
        if Instant::now() > deadline {
            eprintln!("process {} cannot be killed", child.id());
            return;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What a call gives that may never return: in [`PATIENCE`].
#[track_caller]
pub fn in_time<T: Send + 'static>(what: &str, call: impl FnOnce() -> T + Send + 'static) -> T {
    let (send, done) = mpsc::channel();
    std::thread::spawn(move || send.send(call()));
    match done.recv_timeout(PATIENCE) {
        Ok(value) => value,
        Err(RecvTimeoutError::Timeout) => panic!("never came about: {what}"),
        Err(RecvTimeoutError::Disconnected) => panic!("failed: {what}"),
    }
}

/// Reads a pipe to its end, which comes when the last of its writers is gone.
#[track_caller]
pub fn read_in_time(pipe: Option<impl Read + Send + 'static>) -> String {
    let pipe = pipe.expect("piped");
    in_time("the end of a pipe", || std::io::read_to_string(pipe).expect("text"))
}

/// The children of a process, or only those of one of its threads.
fn children_of(process: Pid, thread: Option<Pid>) -> Vec<Pid> {
    let tasks = match thread {
        Some(thread) => vec![PathBuf::from(format!("/proc/{process}/task/{thread}"))],
        None => {
            let tasks = fs::read_dir(format!("/proc/{process}/task")).into_iter().flatten().flatten();
            tasks.map(|task| task.path()).collect()
        }
    };
    let lists = tasks.into_iter().filter_map(|task| fs::read_to_string(task.join("children")).ok());
    let pids = |list: String| list.split(' ').filter_map(|pid| pid.trim().parse().ok()).collect::<Vec<i32>>();
    lists.flat_map(pids).map(Pid::from_raw).collect()
}

/// Kills a process and all that descend from it.
fn kill_family(process: Pid) {
    let children = children_of(process, None);
    let _ = kill(process, Signal::SIGKILL);
    children.into_iter().for_each(kill_family);
}

/// Cuts a tree's connection if a test has the tree for too long: whatever hangs in a call gets an error then.
pub struct CutOff {
    _over: Sender<()>,
}

impl CutOff {
    /// Of the tree on a mountpoint, for as long as the value lives.
    pub fn of(root: PathBuf) -> CutOff {
        let long = std::env::var("LEASEFS_LONG").ok().and_then(|seconds| seconds.parse().ok()).unwrap_or_default();
        let limit = TREE_LIMIT + 2 * Duration::from_secs_f64(long);
        let (over, is_over) = mpsc::channel();
        std::thread::spawn(move || {
            if is_over.recv_timeout(limit) == Err(RecvTimeoutError::Timeout) {
                eprintln!("{}: cut off, after {} s", root.display(), limit.as_secs());
                let _ = nix::mount::umount2(&root, MntFlags::MNT_FORCE);
            }
        });
        CutOff { _over: over }
    }
}
