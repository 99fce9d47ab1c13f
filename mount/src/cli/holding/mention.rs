//! What a wait in line says of itself: who is in the way, for how long, and what place in line this process has.
//!
//! To a terminal in one line that is kept up to date and taken away when the wait is over; to anything else in lines
//! further and further apart. Nothing is said of a wait that is over within a second. Where it is part of a ring of
//! processes that wait for each other, that is said once.

use std::io::{self, IsTerminal, Write};
use std::sync::mpsc::{self, Receiver, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use leasefs::Key;
use leasefs::client::Status;
use nix::unistd::getpgrp;

use crate::cli::tree::Tree;
use crate::cli::{complain, deadlock, show};

/// When it is said where there is no terminal, counted from the beginning; from then on at each multiple of the last.
const TIMES: [Duration; 4] =
    [Duration::from_secs(1), Duration::from_secs(10), Duration::from_secs(60), Duration::from_secs(600)];
/// How often a terminal's line is brought up to date.
const TICK: Duration = Duration::from_secs(1);
/// Between two looks for a ring, at least.
const RING_EVERY: Duration = Duration::from_secs(5);
/// How long a look for a ring may keep this waiting; what it finds later is told the next time.
const LOOK: Duration = Duration::from_millis(200);

/// A wait that is told of.
pub struct Mention<'a> {
    tree: &'a Tree,
    key: &'a Key,
    began: Duration,
    next: Duration,
    /// There is a line on the terminal.
    shown: bool,
    /// The ring that was told of.
    ring: Option<String>,
    /// What the look for a ring that is under way will find.
    look: Option<Receiver<Option<String>>>,
    look_for_ring_at: Duration,
}

impl<'a> Mention<'a> {
    /// Of a wait that begins now, on `CLOCK_BOOTTIME`.
    pub fn new(tree: &'a Tree, key: &'a Key, now: Duration) -> Mention<'a> {
        Mention { tree, key, began: now, next: now + TICK, shown: false, ring: None, look: None, look_for_ring_at: now }
    }

    /// When there is something to say next, on `CLOCK_BOOTTIME`.
    pub fn next(&self) -> Duration {
        self.next
    }

    /// Says what there is to say now, on `CLOCK_BOOTTIME`.
    pub fn say(&mut self, now: Duration) {
        if now < self.next {
            return;
        }
        let columns = columns();
        self.next = self.began + next_time(now.saturating_sub(self.began), columns.is_some());
        self.warn_of_ring(now);
        let Ok(Some(status)) = self.tree.status(self.key) else { return };
        let text = sentence(self.key, &status, std::process::id());
        match columns {
            Some(columns) => {
                let text: String = text.chars().take(columns.saturating_sub(1)).collect();
                let _ = write!(io::stderr(), "\r{text}\x1b[K");
                self.shown = true;
            }
            None => complain(text),
        }
    }

    fn warn_of_ring(&mut self, now: Duration) {
        if self.look.is_none() && now >= self.look_for_ring_at {
            self.look_for_ring_at = now + RING_EVERY;
            self.look = Some(look_for_ring(self.tree, self.key));
        }
        let Some(look) = &self.look else { return };
        let ring = match look.recv_timeout(LOOK) {
            Ok(ring) => ring,
            Err(RecvTimeoutError::Timeout) => return,
            Err(RecvTimeoutError::Disconnected) => None,
        };
        self.look = None;
        if ring == self.ring {
            return;
        }
        if let Some(ring) = &ring {
            self.clear();
            complain(ring);
        }
        self.ring = ring;
    }

    fn clear(&mut self) {
        if std::mem::take(&mut self.shown) {
            let _ = write!(io::stderr(), "\r\x1b[K");
        }
    }
}

impl Drop for Mention<'_> {
    fn drop(&mut self) {
        self.clear();
    }
}

/// Looks for a ring in a thread of its own: what `/proc` tells of another process may be a long time coming (it waits
/// for one that is inside `execve(2)`), and whoever waits here has leases to renew.
fn look_for_ring(tree: &Tree, key: &Key) -> Receiver<Option<String>> {
    let (tell, told) = mpsc::channel();
    let (tree, key) = (tree.clone(), key.clone());
    // It only looks and tells, and takes no lock that a process forked meanwhile could miss.
    let look = move || drop(tell.send(deadlock::ring_through(&tree, &key)));
    // Without a thread there is no warning.
    let _ = thread::Builder::new().spawn(look);
    told
}

/// How long after its beginning a wait is mentioned that has lasted this long.
fn next_time(waited: Duration, on_terminal: bool) -> Duration {
    let last = TIMES[TIMES.len() - 1];
    let every = if on_terminal { TICK } else { last };
    let multiple =
        || every * u32::try_from(waited.as_nanos() / every.as_nanos()).unwrap_or(u32::MAX - 1).saturating_add(1);
    match TIMES.into_iter().find(|time| waited < *time) {
        Some(time) if !on_terminal => time,
        _ => multiple(),
    }
}

/// `job: held by pid 7 (make), uid 0, for 3s: waiting, 2nd of 5 in line`.
fn sentence(key: &Key, status: &Status, pid: u32) -> String {
    let place = status
        .line
        .iter()
        .position(|place| place.pid == pid)
        .map_or_else(String::new, |index| format!(", {} of {} in line", ordinal(index + 1), status.waiters));
    format!("{key}: {}: waiting{place}", show::in_the_way(status))
}

fn ordinal(number: usize) -> String {
    let ending = match (number % 10, number % 100) {
        (_, 11..=13) => "th",
        (1, _) => "st",
        (2, _) => "nd",
        (3, _) => "rd",
        _ => "th",
    };
    format!("{number}{ending}")
}

/// The width of the terminal that this process may write a passing line to: it is in the foreground there.
fn columns() -> Option<usize> {
    let stderr = io::stderr();
    if !stderr.is_terminal() {
        return None;
    }
    // SAFETY: takes a descriptor and touches no memory of ours.
    if unsafe { libc::tcgetpgrp(libc::STDERR_FILENO) } != getpgrp().as_raw() {
        return None;
    }
    // SAFETY: all zeroes is a window size.
    let mut size: libc::winsize = unsafe { std::mem::zeroed() };
    // SAFETY: `size` is a window size that lives through the call.
    match unsafe { libc::ioctl(libc::STDERR_FILENO, libc::TIOCGWINSZ, &raw mut size) } {
        0 if size.ws_col > 0 => Some(size.ws_col.into()),
        _ => Some(80),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_wait_is_mentioned_less_and_less() {
        let mut said = Vec::new();
        let mut at = Duration::ZERO;
        for _ in 0..6 {
            at = next_time(at, false);
            said.push(at.as_secs());
        }
        assert_eq!(said, [1, 10, 60, 600, 1200, 1800]);
        assert_eq!(next_time(Duration::from_millis(3_700), true).as_secs(), 4);
        // Late, it does not make up for what was missed.
        assert_eq!(next_time(Duration::from_secs(6_001), false).as_secs(), 6_600);
    }

    #[test]
    fn the_place_in_line_is_told_where_the_server_tells_it() {
        let key = Key::parse("job").expect("a key");
        let told = |line: &str| {
            let text = format!(
                r#"{{"key":"job","state":"held","epoch":3,"waiters":12,"holder":{{"pid":7,"uid":0,"gid":0,"command":"make"}}{line}}}"#
            );
            sentence(&key, &text.parse().expect("a status"), 9)
        };
        assert_eq!(told(""), "job: held by pid 7 (make), uid 0: waiting");
        let place = |pid| {
            format!(r#"{{"pid":{pid},"start_time":1,"uid":0,"command":"leasefs","since":"","mode":"exclusive"}}"#)
        };
        let line = format!(r#","line":[{},{}]"#, place(8), place(9));
        assert_eq!(told(&line), "job: held by pid 7 (make), uid 0: waiting, 2nd of 12 in line");
        assert_eq!([1, 3, 11, 22, 113].map(ordinal), ["1st", "3rd", "11th", "22nd", "113th"]);
    }
}
