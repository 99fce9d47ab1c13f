//! What happens to the server: `SIGKILL` at random moments, now and then again before its successor has answered anybody.
//!
//! The pid is read from `.leasefs/config` after each kill, which also tells how long it took until a call was answered again.
//! Nothing is killed but a child of the process that was the first server's parent.
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::common::PATIENCE;
use crate::settings::number;
use crate::sys::{self, now};

/// `LEASEFS_KILLS`: kills of the server in one round, at least; 0 lets it live.
pub fn wanted() -> u64 {
    number("LEASEFS_KILLS").unwrap_or(320)
}

/// How the server is killed.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Longest pause between a recovery and the next kill, in microseconds.
    pub pause_us: u64,
    /// One kill in so many is followed by another before anybody was answered; 0: none.
    pub early_once_in: u32,
    /// Where the moments come from.
    pub seed: u64,
}

/// From the kill to the next call that was answered.
#[derive(Clone, Copy, Debug)]
pub struct Recovery {
    /// Before the first signal.
    pub killed: u64,
    /// After a call was answered by the new server.
    pub answered: u64,
    /// How many servers died of it.
    pub kills: u32,
}

impl Recovery {
    /// How long nobody was answered, in milliseconds.
    pub fn ms(&self) -> f64 {
        (self.answered - self.killed) as f64 / 1e6
    }
}

/// The pid of the server that answers now.
pub fn server_pid(root: &Path) -> Option<i32> {
    let config: serde_json::Value = serde_json::from_slice(&fs::read(root.join(".leasefs/config")).ok()?).ok()?;
    Some(config["pid"].as_i64()? as i32)
}

/// The parent, by a file of `/proc` that never waits.
pub fn parent_of(pid: i32) -> Option<i32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    status.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse().ok()
}

/// The children of a process's threads.
fn children_of(pid: i32) -> Vec<i32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let lists = tasks.filter_map(|task| fs::read_to_string(task.path().join("children")).ok());
    lists.flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>()).collect()
}

/// Kills the server once, and waits until another one answers.
pub fn kill_once(root: &Path) -> Result<Recovery, String> {
    let pid = server_pid(root).ok_or("`.leasefs/config` cannot be read")?;
    let killed = now();
    sys::kill(pid, libc::SIGKILL).map_err(|errno| format!("kill {pid}: {}", sys::errno_name(errno)))?;
    recovered(root, pid, killed, 1)
}

fn recovered(root: &Path, old: i32, killed: u64, kills: u32) -> Result<Recovery, String> {
    let until = now() + PATIENCE.as_nanos() as u64;
    loop {
        // The old server may have answered just before it died.
        match server_pid(root) {
            Some(pid) if pid != old => return Ok(Recovery { killed, answered: now(), kills }),
            Some(_) if now() > until => return Err(format!("{old} still answers {PATIENCE:?} after it was killed")),
            Some(_) => {}
            None => return Err("`.leasefs/config` cannot be read after a kill".into()),
        }
    }
}

/// Kills the server again and again on a thread of its own.
pub struct Killer {
    over: Arc<AtomicBool>,
    kills: Arc<AtomicU64>,
    thread: JoinHandle<(Vec<Recovery>, Option<String>)>,
}

impl Killer {
    /// Starts at once.
    pub fn start(root: PathBuf, plan: Plan) -> Killer {
        let (over, kills) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (told, count) = (over.clone(), kills.clone());
        let thread = std::thread::spawn(move || {
            let mut recoveries = Vec::new();
            let mut rng = StdRng::seed_from_u64(plan.seed);
            while !told.load(Ordering::Relaxed) {
                // Mostly short, so that a server dies young as well as in the middle of its work.
                let top = if rng.random_ratio(1, 3) { plan.pause_us } else { plan.pause_us / 4 };
                std::thread::sleep(Duration::from_micros(rng.random_range(0..=top)));
                let early = plan.early_once_in > 0 && rng.random_ratio(1, plan.early_once_in);
                let killed = if early { kill_twice(&root, rng.random_range(0..20_000)) } else { kill_once(&root) };
                match killed {
                    Ok(recovery) => {
                        count.fetch_add(recovery.kills.into(), Ordering::Relaxed);
                        recoveries.push(recovery);
                    }
                    Err(trouble) => return (recoveries, Some(trouble)),
                }
            }
            (recoveries, None)
        });
        Killer { over, kills, thread }
    }

    /// Servers killed so far.
    pub fn kills(&self) -> u64 {
        self.kills.load(Ordering::Relaxed)
    }

    /// Whether it gave up.
    pub fn gave_up(&self) -> bool {
        self.thread.is_finished()
    }

    /// Ends it. What it did, and why it gave up if it did.
    pub fn stop(self) -> (Vec<Recovery>, Option<String>) {
        self.over.store(true, Ordering::Relaxed);
        self.thread.join().expect("the killer lives")
    }
}

/// Kills the server, and its successor so many microseconds after that was born.
pub fn kill_twice(root: &Path, early_us: u64) -> Result<Recovery, String> {
    let first = server_pid(root).ok_or("`.leasefs/config` cannot be read")?;
    let keeper = parent_of(first).ok_or("the server has no parent")?;
    let killed = now();
    sys::kill(first, libc::SIGKILL).map_err(|errno| format!("kill {first}: {}", sys::errno_name(errno)))?;
    let until = now() + PATIENCE.as_nanos() as u64;
    let second = loop {
        match children_of(keeper).into_iter().find(|&pid| pid != first) {
            Some(pid) => break pid,
            None if now() > until => return Err(format!("no new server {PATIENCE:?} after {first} was killed")),
            None => std::thread::sleep(Duration::from_micros(200)),
        }
    };
    std::thread::sleep(Duration::from_micros(early_us));
    let died = sys::kill(second, libc::SIGKILL).is_ok();
    recovered(root, if died { second } else { first }, killed, 1 + u32::from(died))
}
