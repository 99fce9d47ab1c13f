//! Bystanders that notice when the machine stands still: then nobody could have kept any time, neither the server nor a test.
//!
//! On each processor one sleeps for 2 ms at a time: a virtual machine may lose one of its processors for a while, together
//! with whatever just runs there, and the others go on. One more writes to a file each time, as the server has to.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;

/// A bystander's sleep.
const NAP: Duration = Duration::from_millis(2);

/// By more than this it overslept because something stood still.
const OVERSLEPT: Duration = Duration::from_millis(10);

/// Times from when to when, in nanoseconds of `CLOCK_BOOTTIME`.
pub type Stalls = Vec<(u64, u64)>;

/// The bystanders.
pub struct Witness {
    over: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Stalls>>,
}

impl Witness {
    /// They begin to watch; the file is in this directory, and has no name.
    pub fn start(directory: &Path) -> Witness {
        let over = Arc::new(AtomicBool::new(false));
        let file = tempfile::tempfile_in(directory).expect("a file");
        let mut threads: Vec<_> = processors()
            .into_iter()
            .map(|processor| {
                let over = over.clone();
                std::thread::spawn(move || {
                    stay_on(processor);
                    watch(&over, || {})
                })
            })
            .collect();
        let told = over.clone();
        threads.push(std::thread::spawn(move || watch(&told, || write(&file))));
        Witness { over, threads }
    }

    /// The times at which one of them at least could not go on, in order, without overlaps.
    pub fn stop(mut self) -> Stalls {
        self.over.store(true, Ordering::Relaxed);
        let threads = std::mem::take(&mut self.threads);
        merged(threads.into_iter().flat_map(|thread| thread.join().expect("a witness lives")).collect())
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
    }
}

fn watch(over: &AtomicBool, act: impl Fn()) -> Stalls {
    let nanos = |time: Duration| time.as_nanos() as u64;
    let mut stalls = Stalls::new();
    while !over.load(Ordering::Relaxed) {
        let before = now();
        std::thread::sleep(NAP);
        act();
        let after = now();
        if after - before > nanos(NAP + OVERSLEPT) {
            stalls.push((before + nanos(NAP), after));
        }
    }
    stalls
}

fn write(file: &File) {
    // A full disk is another test's concern.
    let _ = file.write_all_at(&[0; 512], 0);
}

fn now() -> u64 {
    let time = clock_gettime(ClockId::CLOCK_BOOTTIME).expect("a clock");
    time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64
}

fn merged(mut stalls: Stalls) -> Stalls {
    stalls.sort_unstable();
    let mut merged = Stalls::new();
    for (from, to) in stalls {
        match merged.last_mut() {
            Some((_, end)) if from <= *end => *end = to.max(*end),
            _ => merged.push((from, to)),
        }
    }
    merged
}

/// The processors that this program may run on.
fn processors() -> Vec<usize> {
    let allowed = sched_getaffinity(Pid::from_raw(0)).expect("a set");
    (0..CpuSet::count()).filter(|at| allowed.is_set(*at).expect("it is within the set")).collect()
}

/// Keeps this thread on a processor, if that can be done.
fn stay_on(processor: usize) {
    let mut only = CpuSet::new();
    only.set(processor).expect("it is within the set");
    let _ = sched_setaffinity(Pid::from_raw(0), &only);
}
