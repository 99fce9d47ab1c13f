//! Which process a process is, and which it comes from, as `/proc` tells it to a command.
//!
//! A pid alone names nobody: it is used again. With the start time it is one process for as long as the machine runs.
//! What cannot be seen has no identity, and so proves nothing.
//!
//! Reading `stat` waits for a process that is inside `execve(2)`; a command may, the server must not.

use std::fmt;
use std::fs;
use std::str::FromStr;

use nix::unistd::{getppid, getsid};

/// Parents followed at the most.
const LONGEST_LINE: usize = 128;
/// Comes in the place of any parent that ended before its children, so descending from it means nothing.
const ADOPTERS: [&str; 3] = ["systemd", "init", "launchd"];

/// One process, told from later ones of its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Proc {
    /// Its pid, in the reader's pid namespace.
    pub pid: i32,
    /// When it started, in clock ticks since boot: field 22 of `/proc/PID/stat`.
    pub start_time: u64,
}

impl fmt::Display for Proc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.pid, self.start_time)
    }
}

impl FromStr for Proc {
    type Err = String;

    fn from_str(text: &str) -> Result<Proc, String> {
        let (pid, start_time) = text.split_once(':').ok_or("not PID:START")?;
        let wrong = |error: std::num::ParseIntError| error.to_string();
        Ok(Proc { pid: pid.parse().map_err(wrong)?, start_time: start_time.parse().map_err(wrong)? })
    }
}

/// What `/proc/PID/stat` says.
pub struct Stat {
    /// The process.
    pub process: Proc,
    /// Its name.
    comm: String,
    /// Its parent's pid.
    parent: i32,
    /// Its session: the pid of the leader.
    session: i32,
}

impl Stat {
    /// Of this pid now; none where it cannot be seen.
    pub fn of(pid: i32) -> Option<Stat> {
        Stat::parse(pid, &String::from_utf8_lossy(&fs::read(format!("/proc/{pid}/stat")).ok()?))
    }

    fn parse(pid: i32, text: &str) -> Option<Stat> {
        // The name in parentheses may hold anything, also spaces and parentheses.
        let (before, after) = text.rsplit_once(") ")?;
        let (_, comm) = before.split_once('(')?;
        let fields: Vec<&str> = after.split_ascii_whitespace().collect();
        let start_time = fields.get(19)?.parse().ok()?;
        let (parent, session) = (fields.get(1)?.parse().ok()?, fields.get(3)?.parse().ok()?);
        Some(Stat { process: Proc { pid, start_time }, comm: comm.to_owned(), parent, session })
    }
}

/// The processes this one comes from, parent first.
pub fn ancestors() -> Vec<Proc> {
    let mut line = Vec::new();
    let mut next = getppid().as_raw();
    while next > 1
        && line.len() < LONGEST_LINE
        && let Some(stat) = Stat::of(next)
    {
        line.push(stat.process);
        next = stat.parent;
    }
    line
}

/// The leader of this process's session, if it lives.
pub fn session_leader() -> Option<Proc> {
    let session = getsid(None).ok()?.as_raw();
    // 0: outside of this pid namespace. A number that is used again is no leader of its own session.
    let leader = Stat::of(session).filter(|stat| session > 0 && stat.session == session)?;
    Some(leader.process)
}

/// The parent, if descending from it tells anything of who one is.
///
/// A parent in another session starts commands for many (a terminal multiplexer, say), so it counts for a named agent
/// only; one that adopts orphans, never.
pub fn telling_parent(is_named: bool) -> Option<Proc> {
    let parent = Stat::of(getppid().as_raw()).filter(|parent| parent.process.pid > 1)?;
    let own_session = getsid(None).ok()?.as_raw();
    let tells = !ADOPTERS.contains(&parent.comm.as_str()) && (is_named || parent.session == own_session);
    tells.then_some(parent.process)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_cannot_pass_for_other_fields() {
        let line = "7 (a) R 9 (b)) S 5 6 4 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 777 0 0";
        let stat = Stat::parse(7, line).expect("parses");
        assert_eq!((stat.process, stat.parent, stat.session), (Proc { pid: 7, start_time: 777 }, 5, 4));
        assert_eq!(stat.comm, "a) R 9 (b)");
        assert!(Stat::parse(7, "7 (a) S 5").is_none());
    }

    #[test]
    fn one_comes_from_ones_parent() {
        let parent = Stat::of(getppid().as_raw()).expect("it can be seen").process;
        assert_eq!(ancestors().first(), Some(&parent));
        assert_eq!(parent.to_string().parse(), Ok(parent));
        assert!("7".parse::<Proc>().is_err() && "x:1".parse::<Proc>().is_err());
    }
}
