//! Where keeper and server log: to stderr, which a service manager or a terminal reads, or to a file in the state directory
//! that never grows past its limit.
//!
//! Both processes append to the file. Whichever would make it too large puts it aside, over the one that was put aside
//! before; the other sees by the next line that its file is not the one by that name any more, and follows. So at most two
//! files of [`LIMIT`] are kept, and no other program has to look after them.
//!
//! A line that cannot be written, because the disk is full or the terminal is gone, is lost, and nothing else is: whoever
//! fails for that would take the tree along.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Result;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use parking_lot::Mutex;
use tracing::{Level, Metadata};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::MakeWriter;

use crate::failure::{self, Failure};

/// File name in the state directory.
pub const LOG: &str = "leasefs.log";
/// The one that was put aside.
pub const OLD: &str = "leasefs.log.old";
/// The most bytes in each of them.
pub const LIMIT: u64 = 1 << 20;
/// How long a line waits for another process at most.
const PATIENCE: Duration = Duration::from_secs(1);

/// The file, once there is one.
static FILE: Mutex<Option<LogFile>> = Mutex::new(None);

/// Sends the log to stderr; `LEASEFS_LOG` says how much. For the journal, each line has its priority and no time.
pub fn start() {
    let filter = EnvFilter::try_from_env("LEASEFS_LOG").unwrap_or_else(|_| EnvFilter::new("info"));
    let has_journal = is_journal();
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false);
    // Of an error it would tell on stderr, and panic where that cannot be written either.
    let builder = builder.log_internal_errors(false);
    let builder = builder.with_writer(Sink { has_journal });
    let _ = if has_journal { builder.without_time().with_level(false).try_init() } else { builder.try_init() };
}

/// Sends the log, and whatever else comes on stderr, to the file in a state directory from here on.
///
/// # Errors
/// Where it cannot be opened.
pub fn follow(state_dir: &Path) -> Result<()> {
    let path = || failure::shown(&state_dir.join(LOG));
    let file =
        LogFile::open(state_dir, true).map_err(|error| Failure::LogShut { path: path(), why: error.to_string() })?;
    *FILE.lock() = Some(file);
    Ok(())
}

/// Whether stderr is the journal's: `$JOURNAL_STREAM` names its device and inode.
fn is_journal() -> bool {
    let Ok(named) = std::env::var("JOURNAL_STREAM") else { return false };
    let found = fs::metadata("/proc/self/fd/2").map(|found| format!("{}:{}", found.dev(), found.ino()));
    found.is_ok_and(|found| found == named)
}

/// Makes a writer for each line.
struct Sink {
    has_journal: bool,
}

/// Writes a line.
struct Line {
    priority: Option<&'static str>,
}

impl<'a> MakeWriter<'a> for Sink {
    type Writer = Line;

    fn make_writer(&'a self) -> Line {
        Line { priority: None }
    }

    fn make_writer_for(&'a self, of: &Metadata<'_>) -> Line {
        let priority = match *of.level() {
            Level::ERROR => "<3>",
            Level::WARN => "<4>",
            Level::INFO => "<6>",
            _ => "<7>",
        };
        Line { priority: self.has_journal.then_some(priority) }
    }
}

impl Write for Line {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let _ = if let Some(file) = FILE.lock().as_mut() {
            file.append(line)
        } else if let Some(priority) = self.priority {
            // At once, or lines of two processes would be mixed.
            io::stderr().lock().write_all(&[priority.as_bytes(), line].concat())
        } else {
            io::stderr().lock().write_all(line)
        };
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The file as this process has it open.
struct LogFile {
    dir: PathBuf,
    file: File,
    /// Whether the file is this process's stderr too.
    is_stderr: bool,
    /// How long a line waits for another process to be done with its own.
    patience: Duration,
}

impl LogFile {
    fn open(dir: &Path, is_stderr: bool) -> io::Result<LogFile> {
        let file = OpenOptions::new().append(true).create(true).mode(0o600).open(dir.join(LOG))?;
        if is_stderr {
            nix::unistd::dup2_stderr(&file)?;
        }
        Ok(LogFile { dir: dir.to_owned(), file, is_stderr, patience: PATIENCE })
    }

    /// Writes a line under the file's lock, so that no other process writes, or puts the file aside, between the look at
    /// its length and the writing.
    fn append(&mut self, line: &[u8]) -> io::Result<()> {
        let mut lock = self.lock();
        // What it goes on in may have been filled meanwhile.
        for _ in 0..3 {
            let is_there = self.is_by_name()?;
            if is_there && (lock.is_none() || self.has_room(line, LIMIT)? || !self.put_aside()) {
                break;
            }
            drop(lock);
            self.reopen();
            lock = self.lock();
        }
        // Where it could not be put aside, it must not grow for ever either.
        if self.has_room(line, 2 * LIMIT)? {
            self.file.write_all(line)?;
        }
        drop(lock);
        Ok(())
    }

    /// The file's lock; none while another process keeps it, and where there is none to be had: a process that has no more
    /// descriptors has to say so. The other one may have been stopped, so it is waited for once, and not for long.
    fn lock(&mut self) -> Option<Flock<File>> {
        let until = Instant::now() + self.patience;
        let mut file = self.file.try_clone().ok()?;
        loop {
            match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
                Ok(lock) => {
                    self.patience = PATIENCE;
                    return Some(lock);
                }
                Err((back, Errno::EWOULDBLOCK)) if Instant::now() < until => file = back,
                Err((_, Errno::EWOULDBLOCK)) => {
                    self.patience = Duration::ZERO;
                    return None;
                }
                Err(_) => return None,
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn has_room(&self, line: &[u8], limit: u64) -> io::Result<bool> {
        Ok(self.file.metadata()?.len() + line.len() as u64 <= limit)
    }

    /// Whether the file is still the one by its name.
    fn is_by_name(&self) -> io::Result<bool> {
        let ours = self.file.metadata()?;
        Ok(fs::metadata(self.dir.join(LOG)).is_ok_and(|named| (named.dev(), named.ino()) == (ours.dev(), ours.ino())))
    }

    fn put_aside(&self) -> bool {
        fs::rename(self.dir.join(LOG), self.dir.join(OLD)).is_ok()
    }

    fn reopen(&mut self) {
        if let Ok(new) = LogFile::open(&self.dir, self.is_stderr) {
            *self = new;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A file as another process would have it.
    fn open(dir: &Path) -> LogFile {
        LogFile::open(dir, false).expect("file")
    }

    fn length(dir: &Path, name: &str) -> u64 {
        fs::metadata(dir.join(name)).expect("stat").len()
    }

    #[test]
    fn whoever_does_not_put_it_aside_sees_that_it_was() {
        let dir = tempfile::tempdir().expect("directory");
        let one = open(dir.path());
        assert!(one.is_by_name().expect("stat"));
        fs::rename(dir.path().join(LOG), dir.path().join(OLD)).expect("rename");
        assert!(!one.is_by_name().expect("stat"));
        let _another = open(dir.path());
        assert!(!one.is_by_name().expect("stat"));
    }

    #[test]
    fn however_many_write_at_once_each_file_is_full_and_not_longer() {
        let dir = tempfile::tempdir().expect("directory");
        let (writers, line) = (4, [b'x'; 1000]);
        std::thread::scope(|scope| {
            for _ in 0..writers {
                scope.spawn(|| {
                    let mut file = open(dir.path());
                    // Together more than both files can have.
                    (0..1000).for_each(|_| file.append(&line).expect("written"));
                });
            }
        });
        assert!(length(dir.path(), LOG) <= LIMIT);
        let old = length(dir.path(), OLD);
        assert!(old <= LIMIT && old + line.len() as u64 > LIMIT, "{old}");
    }

    #[test]
    fn whoever_was_stopped_with_the_lock_holds_nobody_up() {
        let dir = tempfile::tempdir().expect("directory");
        let _stopped = open(dir.path()).lock().expect("free");
        let mut other = open(dir.path());
        (0..3).for_each(|_| other.append(b"line\n").expect("written"));
        assert_eq!(length(dir.path(), LOG), 15);
        assert_eq!(other.patience, Duration::ZERO, "waited for once");
    }

    #[test]
    fn one_that_cannot_be_put_aside_does_not_grow_for_ever() {
        let dir = tempfile::tempdir().expect("directory");
        let mut one = open(dir.path());
        // A directory that is not empty is not replaced by rename(2).
        fs::create_dir_all(dir.path().join(OLD).join("x")).expect("mkdir");
        let line = vec![b'x'; 100 * 1024];
        for _ in 0..40 {
            one.append(&line).expect("written, or left out");
        }
        let length = length(dir.path(), LOG);
        assert!(length > LIMIT && length <= 2 * LIMIT, "{length}");
    }
}
