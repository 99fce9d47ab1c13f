//! Bystanders that notice when the machine stands still: then nobody could have kept any time, neither the server nor a test.
//!
//! On each processor one sleeps for 2 ms at a time: a virtual machine may lose one of its processors for a while, together
//! with whatever just runs there, and the others go on. One more writes to a file each time, as the server has to.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

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
    // SAFETY: all-zero is an empty set, and the kernel fills it up to the length that it is told.
    let allowed = unsafe {
        let mut allowed: libc::cpu_set_t = std::mem::zeroed();
        libc::sched_getaffinity(0, size_of_val(&allowed), &mut allowed);
        allowed
    };
    // SAFETY: each number is within the set.
    (0..libc::CPU_SETSIZE as usize).filter(|at| unsafe { libc::CPU_ISSET(*at, &allowed) }).collect()
}

/// Keeps this thread on a processor, if that can be done.
fn stay_on(processor: usize) {
    // SAFETY: all-zero is an empty set, the number is within it, and the set outlives the call.
    unsafe {
        let mut only: libc::cpu_set_t = std::mem::zeroed();
        libc::CPU_SET(processor, &mut only);
        libc::sched_setaffinity(0, size_of_val(&only), &only);
    }
}

/// Plays something in which leases of so long run out or are kept. Where it fails and the machine stood still meanwhile, for
/// so long that whoever has to end its work before the lease may have been late, it says nothing: then it is played again,
/// with leases of twice the time.
#[track_caller]
pub fn in_peace(mut ttl: Duration, play: impl Fn(Duration)) {
    for is_last in [false, false, false, true] {
        let witness = Witness::start(&std::env::temp_dir());
        let played = catch_unwind(AssertUnwindSafe(|| play(ttl)));
        let stood_still = Duration::from_nanos(witness.stop().iter().map(|(from, to)| to - from).sum());
        match played {
            Ok(()) => return,
            // `leasefs run` has its command dead by a tenth of the TTL before the end.
            Err(failure) if is_last || stood_still < ttl / 20 => resume_unwind(failure),
            Err(_) => eprintln!("the machine stood still for {stood_still:?}: once more with twice {ttl:?}"),
        }
        ttl *= 2;
    }
}

/// A time as a TTL is written.
pub fn ttl(time: Duration) -> String {
    format!("{}ms", time.as_millis())
}
