//! How long an attempt that outlives its command is kept: while a process lives, while a text is in the process table,
//! or for its TTL.
//!
//! Safe for the holder: what cannot be seen is no proof of an end. And bounded: what gives no sign of life is not
//! renewed, so its lease ends at the TTL.

use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, Thread};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::identity::{Proc, Stat};
use super::time::boot_now;

/// Between two looks at the process table.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// From the look that misses the text to the one that confirms it: a program that replaces another has no command line
/// for an instant.
const CONFIRM_AFTER: Duration = Duration::from_secs(2);

/// A living process, by a descriptor that no other process can come to stand behind.
pub struct Bound {
    /// The process.
    pub process: Proc,
    pidfd: OwnedFd,
}

impl Bound {
    /// Opens a process that is alive now.
    ///
    /// # Errors
    /// It is gone, is no process of its own, or cannot be seen: then nothing may be bound to it.
    pub fn open(pid: i32) -> Result<Bound> {
        // SAFETY: takes two integers and touches no memory of ours.
        let opened = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        let pidfd = match i32::try_from(opened) {
            // SAFETY: the call has just made this descriptor, so nobody else owns it.
            Ok(fd) if fd >= 0 => unsafe { OwnedFd::from_raw_fd(fd) },
            _ => match Errno::last() {
                Errno::ESRCH => bail!("--for {pid}: there is no such process: nothing was claimed"),
                Errno::EINVAL | Errno::ENOENT => bail!("--for {pid}: not a process: give the pid of one"),
                errno => bail!("--for {pid}: cannot be watched: {}", errno.desc()),
            },
        };
        let stat = Stat::of(pid);
        // Alive after its start time was read, so that is its own.
        if has_ended(pidfd.as_fd()).with_context(|| format!("--for {pid}"))? {
            bail!("--for {pid}: has ended: nothing was claimed");
        }
        let stat =
            stat.ok_or_else(|| anyhow!("--for {pid}: /proc does not show it: bind to a process that it shows"))?;
        Ok(Bound { process: stat.process, pidfd })
    }

    /// The one behind a descriptor that was inherited.
    pub fn inherited(process: Proc, pidfd: OwnedFd) -> Bound {
        Bound { process, pidfd }
    }

    /// The number of its descriptor.
    pub fn raw(&self) -> i32 {
        self.pidfd.as_raw_fd()
    }
}

impl AsFd for Bound {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }
}

fn has_ended(pidfd: BorrowedFd<'_>) -> nix::Result<bool> {
    poll(&mut [PollFd::new(pidfd, PollFlags::POLLIN)], PollTimeout::ZERO).map(|ready| ready > 0)
}

/// What a look at the process table came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Look {
    /// A process has the text in its command line.
    Seen,
    /// Every process was looked at, and none has.
    Absent,
    /// Not every process can be looked at, and none of the others has.
    Unknown,
}

/// A text that is looked for in the process table, from a thread of its own: a look may have to wait for a process, and
/// renewals must not.
pub struct Sentinel {
    watch: Arc<Watch>,
    watcher: Thread,
    grace_ends: Duration,
    gone: OwnedFd,
}

/// What the thread that looks shares with the one that renews, in nanoseconds.
struct Watch {
    /// Last sight of the text, on `CLOCK_BOOTTIME`.
    seen_at: AtomicU64,
    /// Between two looks.
    interval: AtomicU64,
}

impl Sentinel {
    /// Begins to look once the grace is over, at least six times per TTL.
    ///
    /// # Errors
    /// There is no thread or descriptor to be had.
    pub fn watch(text: &str, grace: Duration, ttl: Duration) -> io::Result<Sentinel> {
        let grace_ends = boot_now()? + grace;
        let watch = Arc::new(Watch { seen_at: AtomicU64::new(0), interval: AtomicU64::new(interval(ttl)) });
        let (gone, tell) = io::pipe()?;
        let (text, seen) = (text.to_owned(), Arc::clone(&watch));
        let thread = thread::Builder::new().name("sentinel".to_owned()).spawn(move || {
            // Its end is the sign: the pipe hangs up.
            let _tell = tell;
            thread::sleep(grace);
            watch_until_gone(&text, &seen);
        })?;
        Ok(Sentinel { watch, watcher: thread.thread().clone(), grace_ends, gone: gone.into() })
    }

    /// Whether there was a sign of life after this time on `CLOCK_BOOTTIME`; the grace counts as one.
    pub fn is_seen_since(&self, time: Duration, now: Duration) -> bool {
        now < self.grace_ends || self.watch.seen_at.load(Ordering::Acquire) > nanoseconds(time)
    }

    /// Looks at least six times per TTL from now on.
    pub fn look_within(&self, ttl: Duration) {
        let interval = interval(ttl);
        if self.watch.interval.swap(interval, Ordering::AcqRel) != interval {
            self.watcher.unpark();
        }
    }
}

/// Hangs up when the text is proven to be absent.
impl AsFd for Sentinel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.gone.as_fd()
    }
}

fn interval(ttl: Duration) -> u64 {
    nanoseconds(LOOK_EVERY.min(ttl / 6).max(Duration::from_millis(50)))
}

fn watch_until_gone(text: &str, watch: &Watch) {
    let mut was_absent = false;
    loop {
        let look = boot_now().map_or(Look::Unknown, |now| {
            let look = look(Path::new("/proc"), text);
            if look == Look::Seen {
                watch.seen_at.store(nanoseconds(now), Ordering::Release);
            }
            look
        });
        if look == Look::Absent && was_absent {
            return;
        }
        was_absent = look == Look::Absent;
        if was_absent {
            thread::sleep(CONFIRM_AFTER);
        } else {
            // Also ended by a change of the interval.
            thread::park_timeout(Duration::from_nanos(watch.interval.load(Ordering::Acquire)));
        }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Looks for a process whose command line, its arguments joined by blanks, contains the text.
fn look(proc_dir: &Path, text: &str) -> Look {
    let own = std::process::id().to_string();
    // Where /proc is that of other processes, ours among them is no proof that it shows all.
    let shows_us = fs::read_link(proc_dir.join("self")).is_ok_and(|link| link.as_os_str() == own.as_str());
    let Ok(entries) = fs::read_dir(proc_dir) else { return Look::Unknown };
    // With `hidepid` others are left out, and init is somebody else's.
    let mut complete = shows_us && fs::read(proc_dir.join("1/cmdline")).is_ok();
    for entry in entries {
        let Ok(entry) = entry else {
            complete = false;
            continue;
        };
        let name = entry.file_name();
        if name == own.as_str() || !name.as_encoded_bytes().iter().all(u8::is_ascii_digit) {
            continue;
        }
        match command_line(&entry.path()) {
            Ok(line) => {
                if contains(&line, text) && !is_holding(&line) {
                    return Look::Seen;
                }
            }
            Err(error) if is_gone(&error) => {}
            Err(_) => complete = false,
        }
    }
    if complete { Look::Absent } else { Look::Unknown }
}

/// A process whose first thread has ended while others go on shows its command line by them alone.
fn command_line(process: &Path) -> io::Result<Vec<u8>> {
    let line = fs::read(process.join("cmdline"))?;
    if !line.is_empty() {
        return Ok(line);
    }
    for thread in fs::read_dir(process.join("task"))? {
        match fs::read(thread?.path().join("cmdline")) {
            Ok(line) if !line.is_empty() => return Ok(line),
            Err(error) if !is_gone(&error) => return Err(error),
            _ => {}
        }
    }
    Ok(line)
}

fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(libc::ESRCH)
}

fn contains(line: &[u8], text: &str) -> bool {
    let joined: Vec<u8> = line.iter().map(|byte| if *byte == 0 { b' ' } else { *byte }).collect();
    joined.windows(text.len().max(1)).any(|window| window == text.as_bytes())
}

/// Whether this is the command line of one who claims or holds: it names the text, and is not what is looked for. Two
/// that hold for the same text would keep each other.
fn is_holding(line: &[u8]) -> bool {
    let mut words = line.split(|byte| *byte == 0);
    let program = words.next().and_then(|program| program.rsplit(|byte| *byte == b'/').next());
    program == Some(b"leasefs") && matches!(words.next(), Some(b"hold" | b"claim"))
}

/// Takes over a descriptor that was inherited by number.
///
/// # Errors
/// It is not open.
pub fn inherit(fd: i32) -> Result<OwnedFd> {
    // SAFETY: takes integers only; fails where the descriptor is not open.
    if fd < 3 || unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) } != 0 {
        bail!("descriptor {fd} was not passed on: `leasefs hold` is started by `leasefs claim`, not by hand");
    }
    // SAFETY: it is open, and was passed to this process by number, so nothing else here owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A `/proc` with these command lines beside init's and our own.
    fn table(lines: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().expect("directory");
        let own = std::process::id().to_string();
        symlink(&own, dir.path().join("self")).expect("link");
        for (pid, line) in [("1", "init\0"), (&own, "leasefs\0hold\0k\0--sentinel\0agent-7\0")].iter().chain(lines) {
            fs::create_dir(dir.path().join(pid)).expect("directory");
            fs::write(dir.path().join(pid).join("cmdline"), line).expect("file");
        }
        dir
    }

    #[test]
    fn a_text_is_looked_for_in_whole_command_lines() {
        let table = table(&[("901", "python3\0agent.py\0--name\0agent-7\0"), ("902", "")]);
        for text in ["agent-7", "--name agent-7", "python3"] {
            assert_eq!(look(table.path(), text), Look::Seen, "{text}");
        }
        assert_eq!(look(table.path(), "agent-8"), Look::Absent);
    }

    #[test]
    fn those_who_claim_or_hold_are_not_what_is_looked_for() {
        let table = table(&[
            ("901", "leasefs\0hold\0other\0--sentinel\0agent-7\0"),
            ("902", "/usr/bin/leasefs\0claim\0k\0--sentinel\0agent-7\0"),
        ]);
        assert_eq!(look(table.path(), "agent-7"), Look::Absent);
        fs::write(table.path().join("902/cmdline"), "leasefs\0run\0k\0--\0agent-7\0").expect("file");
        assert_eq!(look(table.path(), "agent-7"), Look::Seen);
    }

    #[test]
    fn what_cannot_be_read_is_no_proof() {
        let table = table(&[("901", "sleep\x0060\0")]);
        // Reading a directory fails, and not because it is gone.
        fs::create_dir_all(table.path().join("902/cmdline")).expect("directory");
        assert_eq!(look(table.path(), "agent-7"), Look::Unknown);
        assert_eq!(look(table.path(), "sleep 60"), Look::Seen);
        fs::remove_dir_all(table.path().join("902")).expect("removed");
        assert_eq!(look(table.path(), "agent-7"), Look::Absent);
        fs::remove_dir_all(table.path().join("1")).expect("removed");
        assert_eq!(look(table.path(), "agent-7"), Look::Unknown, "hidepid");
        assert_eq!(look(Path::new("/nowhere"), "agent-7"), Look::Unknown);
    }

    #[test]
    fn nothing_is_bound_to_one_who_is_gone_or_is_a_thread() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep runs");
        let pid = i32::try_from(child.id()).expect("pid");
        let bound = Bound::open(pid).expect("it is alive");
        assert_eq!(bound.process, Stat::of(pid).expect("stat").process);
        child.kill().expect("kill");
        poll(&mut [PollFd::new(bound.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE).expect("it ends");
        assert!(Bound::open(pid).is_err(), "a zombie");
        child.wait().expect("wait");
        assert!(Bound::open(pid).is_err() && Bound::open(0).is_err() && Bound::open(-1).is_err());
        let thread = thread::spawn(|| Bound::open(nix::unistd::gettid().as_raw()).is_err());
        assert!(thread.join().expect("thread"));
    }
}
