//! The workers of a run: started, frozen, thawed, killed, replaced, and waited for until the last of them is gone.
//!
//! Each worker leads a process group, so its forked children are found too. While a fleet exists this process adopts
//! orphans: a group counts as gone only when its last member has been reaped, hence when the kernel closed its handles.
use std::fs::File;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use rand::Rng;
use rand::rngs::StdRng;

use crate::common::witness::Witness;
use crate::sys::{self, Board, Number, now};
use crate::worker::{JOB, Job};

const MS: u64 = 1_000_000;

/// How long nothing at all may happen.
const STUCK: u64 = 60_000 * MS;

/// A worker process that was, and the log it left.
pub struct Gone {
    /// Which worker it was an incarnation of.
    pub slot: usize,
    /// Its log.
    pub log: PathBuf,
    /// When its group was seen to be gone.
    pub at: u64,
    /// Whether a signal ended it.
    pub killed: bool,
}

/// A time in which a worker was stopped.
#[derive(Clone, Copy, Debug)]
pub struct Freeze {
    /// The worker.
    pub slot: usize,
    /// Before `SIGSTOP` was sent.
    pub from: u64,
    /// After `SIGCONT` was sent.
    pub to: u64,
}

struct Slot {
    job: Job,
    group: i32,
    incarnation: u64,
    log: PathBuf,
    alive: bool,
    again: bool,
    status: Option<ExitStatus>,
    frozen: Option<(u64, u64)>,
}

/// The workers.
pub struct Fleet {
    dir: PathBuf,
    board_path: PathBuf,
    /// What they share.
    pub board: Board,
    slots: Vec<Slot>,
    /// Those that ended.
    pub gone: Vec<Gone>,
    /// The times they were stopped.
    pub freezes: Vec<Freeze>,
    /// Workers killed.
    pub kills: u64,
    witness: Option<Witness>,
    beat: (u64, u64),
}

/// What went wrong with the workers themselves.
pub type Trouble = String;

impl Fleet {
    /// A fleet that keeps its logs in this directory, made here.
    pub fn new(dir: &Path) -> Fleet {
        std::fs::create_dir_all(dir).expect("directory of the logs");
        let board_path = dir.join("board");
        // SAFETY: plain prctl.
        unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1) };
        Fleet {
            dir: dir.into(),
            board: Board::open(&board_path),
            board_path,
            slots: Vec::new(),
            gone: Vec::new(),
            freezes: Vec::new(),
            kills: 0,
            witness: Some(Witness::start(dir)),
            beat: (0, now()),
        }
    }

    /// Adds a worker; log and board of the job are filled in. `again`: when it ends, it is started again.
    pub fn add(&mut self, job: Job, again: bool) -> usize {
        let slot = self.slots.len();
        self.slots.push(Slot {
            job,
            group: 0,
            incarnation: 0,
            log: PathBuf::new(),
            alive: false,
            again,
            status: None,
            frozen: None,
        });
        self.start(slot);
        slot
    }

    #[expect(clippy::zombie_processes, reason = "`bury` reaps the whole group")]
    fn start(&mut self, at: usize) {
        let slot = &mut self.slots[at];
        slot.incarnation += 1;
        slot.log = self.dir.join(format!("{at}-{}.log", slot.incarnation));
        let mut job = slot.job.clone();
        job.log = slot.log.clone();
        job.board = self.board_path.clone();
        job.seed = job.seed.wrapping_add(slot.incarnation.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let errors = File::create(slot.log.with_extension("err")).expect("file for standard error");
        let child = Command::new(std::env::current_exe().expect("own path"))
            .args(["--exact", "worker::entry", "--ignored", "--nocapture", "--test-threads=1"])
            .env(JOB, serde_json::to_string(&job).expect("a job is JSON"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(errors)
            .process_group(0)
            .spawn()
            .expect("a worker starts");
        slot.group = child.id() as i32;
        slot.alive = true;
        slot.status = None;
        slot.frozen = None;
    }

    /// Whether calls may be interrupted by the server's end.
    pub fn interrupted(&self) -> bool {
        self.slots.iter().any(|slot| slot.job.interrupted)
    }

    /// How many workers there are, living or not.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Stops a worker and its children for so long.
    pub fn freeze(&mut self, at: usize, ms: u64) {
        let slot = &mut self.slots[at];
        if slot.alive && slot.frozen.is_none() {
            let from = now();
            slot.frozen = Some((from, from + ms * MS));
            let _ = sys::kill(-slot.group, libc::SIGSTOP);
        }
    }

    /// Kills a worker, with its forked children or without.
    pub fn kill(&mut self, at: usize, children_too: bool) {
        let slot = &self.slots[at];
        // The status is known once the leader was reaped: its pid may be another's by now.
        if slot.alive && slot.status.is_none() {
            self.kills += 1;
            let _ = sys::kill(if children_too { -slot.group } else { slot.group }, libc::SIGKILL);
        }
    }

    fn thaw(&mut self, at: usize) {
        let slot = &mut self.slots[at];
        if let Some((from, _)) = slot.frozen.take() {
            let _ = sys::kill(-slot.group, libc::SIGCONT);
            self.freezes.push(Freeze { slot: at, from, to: now() });
        }
    }

    /// Thaws whose time has come, buries the dead, and starts again who is to be started again.
    pub fn tend(&mut self) -> Result<(), Trouble> {
        for at in 0..self.slots.len() {
            if self.slots[at].frozen.is_some_and(|(_, until)| until <= now()) {
                self.thaw(at);
            }
            if self.slots[at].alive && self.bury(at)? && self.slots[at].again && self.board.get(Number::Stop) == 0 {
                self.start(at);
            }
        }
        let pulse = self.board.get(Number::Pulse);
        if pulse != self.beat.0 {
            self.beat = (pulse, now());
        } else if now() - self.beat.1 > STUCK {
            return Err(format!("nothing happened for 60 s; alive: {}", self.living()));
        }
        Ok(())
    }

    /// Reaps what ended of a worker's group; true once nothing is left of it.
    fn bury(&mut self, at: usize) -> Result<bool, Trouble> {
        let slot = &mut self.slots[at];
        loop {
            let mut status = 0;
            // SAFETY: `status` is a valid place for the result.
            match unsafe { libc::waitpid(-slot.group, &mut status, libc::WNOHANG) } {
                0 => return Ok(false),
                pid if pid > 0 => {
                    if pid == slot.group {
                        slot.status = Some(ExitStatus::from_raw(status));
                    }
                }
                _ => break,
            }
        }
        slot.alive = false;
        let status = slot.status.unwrap_or_default();
        if let Some((from, _)) = slot.frozen.take() {
            self.freezes.push(Freeze { slot: at, from, to: now() });
        }
        let killed = status.signal().is_some();
        let slot = &self.slots[at];
        self.gone.push(Gone { slot: at, log: slot.log.clone(), at: now(), killed });
        if !killed && !status.success() {
            let errors = std::fs::read_to_string(slot.log.with_extension("err")).unwrap_or_default();
            return Err(format!("worker {at} ended with {status}: {errors}"));
        }
        Ok(true)
    }

    fn living(&self) -> String {
        let living = self.slots.iter().enumerate().filter(|(_, slot)| slot.alive);
        living
            .map(|(at, slot)| format!("worker {at} (group {}, {:?})", slot.group, slot.job.role))
            .collect::<Vec<_>>()
            .join(", ")
    }

    /// Tells all to stop, lets the frozen go, and waits until the last one is gone. Gives the times the machine itself
    /// stood still.
    pub fn finish(&mut self) -> Result<Vec<(u64, u64)>, Trouble> {
        self.board.count(Number::Stop);
        let deadline = now() + STUCK;
        while self.slots.iter().any(|slot| slot.alive) {
            for at in 0..self.slots.len() {
                self.thaw(at);
            }
            self.tend()?;
            if now() > deadline {
                return Err(format!("still there 60 s after the end of the run: {}", self.living()));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(self.witness.take().map(Witness::stop).unwrap_or_default())
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for slot in self.slots.iter().filter(|slot| slot.alive) {
            let _ = sys::kill(-slot.group, libc::SIGKILL);
        }
        // One that hangs in a call which nobody answers cannot be reaped: it is left behind.
        let deadline = now() + STUCK;
        for slot in self.slots.iter().filter(|slot| slot.alive) {
            // SAFETY: no status is asked for.
            while unsafe { libc::waitpid(-slot.group, std::ptr::null_mut(), libc::WNOHANG) } >= 0 && now() < deadline {
                std::thread::sleep(Duration::from_millis(1));
            }
        }
        // SAFETY: plain prctl.
        unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 0) };
    }
}

/// Freezes and kills at random.
pub struct Chaos {
    /// Its chance.
    pub rng: StdRng,
    /// One freeze in so many steps.
    pub freeze_once_in: u32,
    /// How long, in milliseconds; mostly near the lower end.
    pub freeze_ms: (u64, u64),
    /// One kill in so many steps.
    pub kill_once_in: u32,
}

impl Chaos {
    /// One step, about every millisecond.
    pub fn step(&mut self, fleet: &mut Fleet) {
        let at = self.rng.random_range(0..fleet.len());
        if self.rng.random_ratio(1, self.freeze_once_in) {
            let (low, high) = self.freeze_ms;
            let top = if self.rng.random_ratio(1, 8) { high } else { low + (high - low) / 8 };
            fleet.freeze(at, self.rng.random_range(low..=top));
        }
        if self.rng.random_ratio(1, self.kill_once_in) {
            fleet.kill(at, self.rng.random());
        }
    }
}
