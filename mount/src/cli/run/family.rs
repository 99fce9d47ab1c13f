//! The command and all that descends from it, as the process sees them that they are the children of.
//!
//! That process is a subreaper (`PR_SET_CHILD_SUBREAPER`): a descendant whose parent ends becomes its child, also one
//! that made a session of its own. So only children are ever signalled. Nobody else can reap them, so their numbers are
//! theirs; and when all are killed as they come, none is left at last, at whatever depth it began.

use std::collections::HashSet;
use std::fs;
use std::io;
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::{Id, WaitPidFlag, waitid};
use nix::unistd::{Pid, getpid};

/// How soon to look for children again that were not there yet when the others were killed.
const AGAIN: Duration = Duration::from_millis(10);
/// The same, for one that cannot be killed: it may last until its lease ends.
const AGAIN_LATER: Duration = Duration::from_secs(1);
/// How often KILL is sent before it is given up, however late it is: also a machine that has stood still past the time for
/// that has to let the signal take effect.
const KILLS: u32 = 50;

/// The command and its descendants.
pub struct Family {
    /// Unless it is not known, as its start was not heard of.
    command: Option<Pid>,
    own_group: bool,
    /// As `wait(2)` gives it, once the command has ended.
    status: Option<i32>,
    ending: Option<Ending>,
}

/// How they are brought to an end; times on `CLOCK_BOOTTIME`.
struct Ending {
    kill_at: Duration,
    give_up_at: Duration,
    /// Who was sent TERM.
    told: HashSet<i32>,
    /// When KILL was sent first, and how often it was sent.
    killed: Option<(Duration, u32)>,
}

impl Ending {
    /// Counts that KILL is sent now: when to send it again, nothing when that is of no use any more.
    fn kill_again(&mut self, now: Duration) -> Option<Duration> {
        let (first, times) = self.killed.get_or_insert((now, 0));
        *times += 1;
        if *times < KILLS || now < *first + AGAIN_LATER {
            return Some(now + AGAIN);
        }
        (now < self.give_up_at).then_some(now + AGAIN_LATER)
    }
}

impl Family {
    /// That of a child, which leads a process group of its own or does not.
    pub fn of(command: Option<Pid>, own_group: bool) -> Family {
        Family { command, own_group, status: None, ending: None }
    }

    /// The command's wait status, once it has ended.
    pub fn status(&self) -> Option<i32> {
        self.status
    }

    /// Sends a signal to the command; to all its process group, where it has one of its own and the signal means to end
    /// or to stop it.
    pub fn signal(&self, signal: Signal) {
        const TO_ALL: [Signal; 6] =
            [Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM, Signal::SIGKILL, Signal::SIGTSTP, Signal::SIGCONT];
        // Once it is reaped, the numbers of process and group may be another's.
        let (Some(command), None) = (self.command, self.status) else { return };
        let to_all = self.own_group && TO_ALL.contains(&signal);
        // One of another user is not ours to signal.
        let _ = if to_all { killpg(command, signal) } else { kill(command, signal) };
    }

    /// Takes notice of those that have ended. Whether none is left.
    pub fn reap(&mut self) -> bool {
        loop {
            let mut status = 0;
            // SAFETY: `status` is an integer that lives through the call. nix's waitpid refuses what it has no name for,
            // such as a real-time signal.
            match unsafe { libc::waitpid(-1, &raw mut status, libc::WNOHANG) } {
                0 => return false,
                -1 if Errno::last() == Errno::EINTR => {}
                -1 => return true,
                pid => {
                    if self.command == Some(Pid::from_raw(pid)) {
                        self.status = Some(status);
                    }
                    if let Some(ending) = &mut self.ending {
                        ending.told.remove(&pid);
                    }
                }
            }
        }
    }

    /// They are being ended.
    pub fn is_ending(&self) -> bool {
        self.ending.is_some()
    }

    /// Begins to end them: TERM now (and CONT, for those that are stopped), KILL at `kill_at`. What cannot be killed is
    /// waited for until `give_up_at`, or for a second where that has passed already.
    pub fn end(&mut self, kill_at: Duration, give_up_at: Duration) {
        let ending = Ending {
            kill_at,
            give_up_at: give_up_at.max(kill_at),
            told: self.command.map(Pid::as_raw).into_iter().collect(),
            killed: None,
        };
        self.ending = Some(ending);
        self.signal(Signal::SIGTERM);
        self.signal(Signal::SIGCONT);
    }

    /// Goes on ending them, `now` on `CLOCK_BOOTTIME`: when to do so next at the latest, nothing when it is over.
    pub fn go_on(&mut self, now: Duration) -> Option<Duration> {
        if self.reap() {
            return None;
        }
        let command = self.command.map(Pid::as_raw);
        let ending = self.ending.as_mut()?;
        if now < ending.kill_at {
            for child in children() {
                if ending.told.insert(child) {
                    let _ = kill(Pid::from_raw(child), Signal::SIGTERM);
                    let _ = kill(Pid::from_raw(child), Signal::SIGCONT);
                }
            }
            return Some(ending.kill_at);
        }
        let again_at = ending.kill_again(now);
        // The whole group at one instant, as nothing that forks can evade.
        self.signal(Signal::SIGKILL);
        for child in children().into_iter().filter(|child| Some(*child) != command) {
            let _ = kill(Pid::from_raw(child), Signal::SIGKILL);
        }
        again_at
    }
}

/// The children of this thread. Any that is missing here is there the next time.
fn children() -> Vec<i32> {
    let listed = match fs::read_to_string("/proc/thread-self/children") {
        Ok(list) => list.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect(),
        // A kernel without CONFIG_PROC_CHILDREN.
        Err(_) => children_by_parent().unwrap_or_default(),
    };
    // `/proc` may be that of another pid namespace, whose numbers mean others here.
    listed.into_iter().filter(|pid| is_child(*pid)).collect()
}

fn children_by_parent() -> io::Result<Vec<i32>> {
    let own = format!("PPid:\t{}", getpid());
    let pids = fs::read_dir("/proc")?.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
    let is_ours = |pid: &i32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
        status.lines().any(|line| line == own)
    };
    Ok(pids.filter(is_ours).collect())
}

fn is_child(pid: i32) -> bool {
    let peek = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
    !matches!(waitid(Id::Pid(Pid::from_raw(pid)), peek), Err(Errno::ECHILD))
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn who_was_sent_kill_has_time_to_end_also_after_the_machine_stood_still() {
        let second = Duration::from_secs(1);
        let mut ending = Ending { kill_at: second, give_up_at: 2 * second, told: HashSet::new(), killed: None };
        // When it goes on, all its times have passed.
        let mut now = 10 * second;
        let mut sent = 1;
        while let Some(next) = ending.kill_again(now) {
            assert_eq!(next, now + AGAIN);
            // And once more it stands still.
            now = if sent == 3 { now + 5 * second } else { next };
            sent += 1;
        }
        assert_eq!(sent, KILLS);
        // Where it is killed in time it is waited for, once in a second.
        let mut ending = Ending { give_up_at: 20 * second, killed: None, ..ending };
        let mut now = 10 * second;
        while let Some(next) = ending.kill_again(now) {
            assert!(next > now);
            now = next;
        }
        assert!((20 * second..21 * second).contains(&now), "{now:?}");
    }

    #[test]
    fn only_children_are_listed() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().expect("cat runs");
        let pid = i32::try_from(child.id()).expect("a pid");
        assert!(children().contains(&pid));
        assert!(children_by_parent().expect("/proc").contains(&pid));
        assert!(is_child(pid) && !is_child(1));
        drop(child.stdin.take());
        child.wait().expect("cat ends");
        assert!(!is_child(pid));
    }
}
