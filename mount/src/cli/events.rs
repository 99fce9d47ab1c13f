//! `.leasefs/events` as a command follows it: from the moment of its opening on, in whole lines.

use std::fs::{File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::Deserialize;

use super::tree::{Tree, trouble};

/// Most bytes taken at a time.
const CHUNK: usize = 64 * 1024;

/// A line of it.
#[derive(Clone, Debug, Deserialize)]
pub struct Event {
    /// `granted`, `released`, …; `gap` for those that were missed.
    pub event: String,
    /// The key; none for a gap.
    #[serde(default)]
    pub key: Option<String>,
    /// The attempt.
    #[serde(default)]
    pub epoch: u64,
    /// When, RFC 3339.
    #[serde(default)]
    pub time: String,
    /// How many were missed, for a gap.
    #[serde(default)]
    pub missed: u64,
    /// Who waited in vain: none of other events.
    #[serde(flatten)]
    pub wait: Option<Wait>,
}

/// A wait in line that ended without the key.
#[derive(Clone, Debug, Deserialize)]
pub struct Wait {
    /// The process.
    pub pid: u32,
    /// Its user.
    pub uid: u32,
    /// What it runs.
    pub command: String,
    /// How long it waited, in milliseconds.
    pub waited_ms: i64,
}

impl Event {
    /// Something may have happened to any key.
    pub fn is_gap(&self) -> bool {
        self.event == "gap"
    }
}

/// A reader of the events, behind by nothing but what it has not read yet.
pub struct Events {
    file: File,
    buffer: Vec<u8>,
    /// The start of a line of which the rest has not come yet.
    rest: Vec<u8>,
}

impl Events {
    /// Opens them: what happens from now on is heard.
    ///
    /// # Errors
    /// Those of `open(2)`, with what to do.
    pub fn open(tree: &Tree) -> Result<Events> {
        let path = tree.control("events");
        let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path);
        let file = file.map_err(|error| trouble(path.display(), error))?;
        Ok(Events { file, buffer: vec![0; CHUNK], rest: Vec::new() })
    }

    /// Waits for whole lines; none when the time is over. They end with a newline each.
    ///
    /// # Errors
    /// Where the tree is gone.
    pub fn wait(&mut self, deadline: Option<Instant>) -> Result<Option<Vec<u8>>> {
        loop {
            if !sleep(self.file.as_fd(), PollFlags::POLLIN, deadline)? {
                return Ok(None);
            }
            let length = match self.file.read(&mut self.buffer) {
                Ok(0) => bail!(".leasefs/events: ended: see whether the tree is still mounted"),
                Ok(length) => length,
                Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {
                    continue;
                }
                Err(error) => return Err(trouble(".leasefs/events", error)),
            };
            let Some(end) = self.buffer[..length].iter().rposition(|byte| *byte == b'\n') else {
                self.rest.extend_from_slice(&self.buffer[..length]);
                continue;
            };
            let mut lines = std::mem::take(&mut self.rest);
            lines.extend_from_slice(&self.buffer[..=end]);
            self.rest.extend_from_slice(&self.buffer[end + 1..length]);
            return Ok(Some(lines));
        }
    }
}

/// The lines and what they say; none where a line is not understood.
pub fn parse(lines: &[u8]) -> impl Iterator<Item = (&[u8], Option<Event>)> {
    let lines = lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
    lines.map(|line| (line, serde_json::from_slice(line).ok()))
}

/// Sleeps until the file has something to tell; false when the time is over.
///
/// # Errors
/// Those of `poll(2)`.
pub fn sleep(file: BorrowedFd<'_>, flags: PollFlags, deadline: Option<Instant>) -> Result<bool> {
    loop {
        let timeout = match deadline.map(|deadline| deadline.saturating_duration_since(Instant::now())) {
            None => PollTimeout::NONE,
            // Rounded up, or the last millisecond would be spent asking again and again.
            Some(left) => PollTimeout::try_from(left + Duration::from_micros(999)).unwrap_or(PollTimeout::MAX),
        };
        match poll(&mut [PollFd::new(file, flags)], timeout) {
            Ok(0) if deadline.is_some_and(|deadline| Instant::now() >= deadline) => return Ok(false),
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(true),
            Err(errno) => return Err(errno.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_taken_apart() {
        let lines = b"{\"seq\":1,\"time\":\"t\",\"event\":\"granted\",\"key\":\"a/b\",\"epoch\":2}\n{\"event\":\"gap\",\"missed\":3}\n?\n";
        let parsed: Vec<_> = parse(lines).map(|(_, event)| event).collect();
        assert_eq!(parsed.len(), 3);
        assert!(parsed[0].as_ref().is_some_and(|event| event.key.as_deref() == Some("a/b") && !event.is_gap()));
        assert!(parsed[1].as_ref().is_some_and(|event| event.is_gap() && event.missed == 3));
        assert!(parsed[2].is_none());
        assert!(parsed.iter().flatten().all(|event| event.wait.is_none()));
        let line =
            br#"{"event":"interrupted","key":"k","epoch":2,"pid":7,"uid":1000,"command":"make","waited_ms":1500}"#;
        let (_, event) = parse(line).next().expect("a line");
        let wait = event.and_then(|event| event.wait).expect("a wait");
        assert_eq!((wait.pid, wait.uid, wait.command.as_str(), wait.waited_ms), (7, 1000, "make", 1500));
    }
}
