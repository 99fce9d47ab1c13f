//! The runner's part while the command runs: signals, renewals and news of the command in one loop, one thread.
//!
//! The command itself is the child of the [`guard`](super::guard), which ends it when need be. Should that be killed, its
//! children become the runner's, which ends them in its place.

use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus};
use std::time::Duration;

use anyhow::{Result, anyhow};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl;
use nix::sys::signal::{SigSet, Signal, kill, raise};
use nix::sys::signalfd::{SfdFlags, SignalFd, siginfo};
use nix::sys::wait::waitpid;
use nix::unistd::{getpgid, getpgrp};

use super::family::Family;
use super::guard::{self, Guard, Rules};
use super::link::{News, Order, Reason, Received, Shared};
use super::program::Missing;
use crate::cli::complain;
use crate::cli::holding::claim::{Claim, Renewal};
use crate::cli::holding::time::{Timer, boot_now};
use crate::cli::tree::Tree;

/// Passed on to the command instead of ending `run`, which would end the lease under a running command.
const FORWARDED: [Signal; 6] =
    [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM, Signal::SIGUSR1, Signal::SIGUSR2];
/// How much later than it should a guard may act before it is taken for stopped.
const SLACK: Duration = Duration::from_secs(2);

/// How it ended.
pub enum End {
    /// With this code, 128+N for signal N.
    Code(u8),
    /// A lease was lost before it ended.
    LeaseLost,
    /// It could not be started after all.
    NotStarted(Missing),
}

/// Whether commands get a process group of their own: without a terminal. With one, the group is the shell's job, which
/// Ctrl-C, Ctrl-Z and `fg` are for, and the only one that may read from the terminal.
pub fn has_own_group() -> bool {
    OpenOptions::new().read(true).custom_flags(libc::O_NOCTTY).open("/dev/tty").is_err()
}

/// Runs the command to its end, or ends it when a lease is lost. No other thread may hold a lock.
pub fn run(mut command: Command, name: &OsStr, tree: &Tree, claims: &mut [Claim], rules: Rules) -> Result<End> {
    let signals = Signals::take_over()?;
    // A key taken early may have been lost while the last was taken.
    if claims.len() > 1 && is_any_lost(claims) {
        return Ok(End::LeaseLost);
    }
    command.arg0(name);
    let shared = Shared::new(claims)?;
    prctl::set_child_subreaper(true)?;
    let guard = guard::start(command, signals.before, rules, tree, claims, shared)
        .map_err(|errno| anyhow!("the process that guards the command cannot be started: {}", errno.desc()))?;
    let mut watch = Watch {
        tree,
        claims,
        rules,
        shared,
        guard: Some(guard),
        family: None,
        muted: Vec::new(),
        lost: false,
        force_at: None,
    };
    let end = watch.until_end(&signals);
    // The guard's copies of the handles are closed before ours are.
    watch.part_from_guard();
    let end = end?;
    if matches!(end, End::Code(_)) && (watch.lost || is_any_lost(watch.claims)) {
        return Ok(End::LeaseLost);
    }
    Ok(end)
}

/// The signals that `run` reads instead of being ended or stopped by them.
struct Signals {
    fd: SignalFd,
    before: SigSet,
}

impl Signals {
    fn take_over() -> nix::Result<Signals> {
        let mut set = SigSet::from_iter(FORWARDED);
        set.add(Signal::SIGCHLD);
        set.add(Signal::SIGTSTP);
        let before = SigSet::thread_get_mask()?;
        set.thread_block()?;
        let fd = SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        Ok(Signals { fd, before })
    }
}

/// Claims that have something to tell.
#[derive(Default)]
struct Heard {
    /// The handle reports trouble.
    alarmed: Vec<usize>,
    /// Something has changed: the TTL, perhaps.
    news: Vec<usize>,
}

/// The leases while the command runs.
struct Watch<'a> {
    tree: &'a Tree,
    claims: &'a mut [Claim],
    rules: Rules,
    shared: Shared,
    /// Until it is gone.
    guard: Option<Guard>,
    /// Ours, when the guard is gone and the command goes on.
    family: Option<Family>,
    /// Handles that report trouble which is no loss: not polled until a renewal succeeds by the timer.
    muted: Vec<usize>,
    lost: bool,
    /// When the guard should have ended the command long since, on `CLOCK_BOOTTIME`.
    force_at: Option<Duration>,
}

impl Watch<'_> {
    /// Waits for the command's end.
    fn until_end(&mut self, signals: &Signals) -> Result<End> {
        let timer = Timer::new()?;
        let mut heard = Heard::default();
        loop {
            while let Some(info) = signals.fd.read_signal()? {
                self.take(&info)?;
            }
            if let Some(end) = self.hear(signals)? {
                return Ok(end);
            }
            if !self.lost {
                for index in heard.news {
                    self.claims[index].take_notice(self.tree)?;
                }
                self.renew(&heard.alarmed)?;
                self.shared.set_leases(self.claims);
            }
            let mut wake_at = self.claims.iter().map(Claim::due_at).min().filter(|_| !self.lost);
            if self.family.is_some() {
                match self.look_after_family()? {
                    ControlFlow::Continue(next) => wake_at = wake_at.into_iter().chain(next).min(),
                    ControlFlow::Break(end) => return Ok(end),
                }
            } else {
                wake_at = wake_at.into_iter().chain(self.force()?).min();
            }
            match wake_at {
                Some(at) => timer.ring_at(at)?,
                None => timer.stop()?,
            }
            heard = self.sleep(&timer, signals)?;
        }
    }

    /// Reads what the guard has to say. How the command ended, if it has.
    fn hear(&mut self, signals: &Signals) -> Result<Option<End>> {
        let Some(guard) = &self.guard else { return Ok(None) };
        match guard.link.receive()? {
            Received::Message(News::NotStarted(missing)) => Ok(Some(End::NotStarted(missing))),
            Received::Message(News::Ended(status, reason)) => Ok(Some(self.end_of(status, reason))),
            Received::Nothing => Ok(None),
            Received::Closed => self.do_without_guard(signals),
        }
    }

    fn end_of(&self, status: Option<i32>, reason: Reason) -> End {
        let Some(status) = status else {
            complain("the command could not be ended, and goes on without its lease: end it by hand");
            return End::LeaseLost;
        };
        match reason {
            Reason::Itself | Reason::RunnerGone => End::Code(exit_code(ExitStatus::from_raw(status))),
            Reason::LeaseLost => {
                if !self.lost {
                    is_any_lost(self.claims);
                }
                End::LeaseLost
            }
            Reason::LeaseRunsOut => {
                let keys: Vec<&str> = self.claims.iter().map(|claim| claim.key().as_str()).collect();
                complain(format_args!(
                    "{}: not renewed in time: the command was ended before the lease ran out",
                    keys.join(", ")
                ));
                End::LeaseLost
            }
        }
    }

    /// The guard is gone without a word: its children are ours now. If it was killed, so was the command, unless that is
    /// to outlive us.
    fn do_without_guard(&mut self, signals: &Signals) -> Result<Option<End>> {
        self.part_from_guard();
        let mut family = Family::of(self.shared.command(), self.rules.own_group);
        if self.rules.child_keeps && self.shared.command().is_some() && !self.lost {
            complain("the process that guards the command was killed: the command goes on without");
            self.family = Some(family);
            return Ok(None);
        }
        let now = boot_now()?;
        family.end(now, self.shared.limits().end());
        let timer = Timer::new()?;
        while let Some(next) = family.go_on(boot_now()?) {
            timer.ring_at(next)?;
            self.sleep(&timer, signals)?;
            while signals.fd.read_signal()?.is_some() {}
        }
        match self.lost {
            true => Ok(Some(End::LeaseLost)),
            false => Err(anyhow!("the process that guards the command was killed: the command was ended")),
        }
    }

    /// Does what the guard would do for a command that outlives it: when to do so next at the latest, or how it ended.
    fn look_after_family(&mut self) -> Result<ControlFlow<End, Option<Duration>>> {
        let (now, limits) = (boot_now()?, self.shared.limits());
        let Some(family) = &mut self.family else { return Ok(ControlFlow::Continue(None)) };
        let none_left = family.reap();
        let runs_out = now >= limits.term_at;
        if !family.is_ending() && family.status().is_none() && (self.lost || runs_out) {
            family.end((now + self.rules.grace).min(limits.kill_at), limits.end());
        }
        let next = match family.is_ending() {
            true => family.go_on(now),
            false if family.status().is_none() && !none_left => return Ok(ControlFlow::Continue(Some(limits.term_at))),
            false => None,
        };
        if next.is_some() {
            return Ok(ControlFlow::Continue(next));
        }
        let reason = match (family.is_ending(), self.lost) {
            (false, _) => Reason::Itself,
            (true, true) => Reason::LeaseLost,
            (true, false) => Reason::LeaseRunsOut,
        };
        let status = family.status();
        Ok(ControlFlow::Break(self.end_of(status, reason)))
    }

    /// Kills a guard that should have ended the command long since, which ends the command: when that would be.
    fn force(&mut self) -> Result<Option<Duration>> {
        let at = self.force_at.unwrap_or_else(|| self.shared.limits().end());
        if boot_now()? < at {
            return Ok(Some(at));
        }
        if let Some(guard) = &self.guard {
            // Not reaped yet, so the number is its own.
            kill(guard.pid, Signal::SIGKILL)?;
        }
        Ok(None)
    }

    /// Waits until the guard is gone.
    fn part_from_guard(&mut self) {
        let Some(Guard { pid, link }) = self.guard.take() else { return };
        // Should it still guard the command, this has it end that.
        drop(link);
        while waitpid(pid, None) == Err(Errno::EINTR) {}
    }

    /// Sleeps until something happens; gives the claims that have something to tell.
    fn sleep(&self, timer: &Timer, signals: &Signals) -> nix::Result<Heard> {
        let mut fds =
            vec![PollFd::new(signals.fd.as_fd(), PollFlags::POLLIN), PollFd::new(timer.as_fd(), PollFlags::POLLIN)];
        fds.extend(self.guard.as_ref().map(|guard| PollFd::new(guard.link.as_fd(), PollFlags::POLLIN)));
        let watched: Vec<usize> = match self.lost {
            true => Vec::new(),
            false => (0..self.claims.len()).filter(|index| !self.muted.contains(index)).collect(),
        };
        let first = fds.len();
        fds.extend(watched.iter().map(|index| PollFd::new(self.claims[*index].file().as_fd(), PollFlags::empty())));
        // Nobody renews any more once the command is being ended.
        let renews = !self.lost && (self.guard.is_some() || self.family.is_some());
        let followed: Vec<(usize, BorrowedFd<'_>)> = match renews {
            true => self.claims.iter().enumerate().filter_map(|(index, claim)| Some((index, claim.news()?))).collect(),
            false => Vec::new(),
        };
        let first_news = fds.len();
        fds.extend(followed.iter().map(|(_, news)| PollFd::new(*news, PollFlags::POLLPRI)));
        match poll(&mut fds, PollTimeout::NONE) {
            Ok(_) => {}
            Err(Errno::EINTR) => return Ok(Heard::default()),
            Err(errno) => return Err(errno),
        }
        let reports = |fd: &PollFd<'_>| fd.any() == Some(true);
        let alarms = watched.into_iter().zip(&fds[first..first_news]);
        let news = followed.into_iter().map(|(index, _)| index).zip(&fds[first_news..]);
        Ok(Heard {
            alarmed: alarms.filter_map(|(index, fd)| reports(fd).then_some(index)).collect(),
            news: news.filter_map(|(index, fd)| reports(fd).then_some(index)).collect(),
        })
    }

    /// Renews what is due, and what reports trouble: the answer tells whether it is lost.
    fn renew(&mut self, alarmed: &[usize]) -> nix::Result<()> {
        for (index, claim) in self.claims.iter_mut().enumerate() {
            let is_alarmed = alarmed.contains(&index);
            if !is_alarmed && claim.due_at() > boot_now()? {
                continue;
            }
            match claim.renew(self.tree)? {
                Renewal::Kept | Renewal::Failed if is_alarmed => self.muted.push(index),
                Renewal::Kept => self.muted.retain(|muted| *muted != index),
                Renewal::Failed => {}
                Renewal::Lost => {
                    complain(claim.loss());
                    self.lost = true;
                }
            }
        }
        if self.lost {
            self.force_at = Some(boot_now()? + self.rules.grace + SLACK);
            if let Some(guard) = &self.guard {
                guard.link.send(&Order::End);
            }
        }
        Ok(())
    }

    /// Passes a signal on, unless the terminal has sent it to the command already.
    fn take(&self, info: &siginfo) -> nix::Result<()> {
        let Some(signal) = i32::try_from(info.ssi_signo).ok().and_then(|number| Signal::try_from(number).ok()) else {
            return Ok(());
        };
        if signal == Signal::SIGCHLD {
            return Ok(());
        }
        let by_keyboard = matches!(signal, Signal::SIGINT | Signal::SIGQUIT | Signal::SIGTSTP);
        let from_terminal = info.ssi_code == libc::SI_KERNEL && by_keyboard;
        let has_it =
            from_terminal && self.shared.command().map(|command| getpgid(Some(command))) == Some(Ok(getpgrp()));
        if !has_it {
            self.pass_on(signal);
        }
        if signal == Signal::SIGTSTP {
            stop()?;
            // A job is continued as it was stopped, the command with the rest: told once more, and late, it would go on
            // although the job was stopped again meanwhile. But who continues this process alone means the command, too.
            if !has_it || self.is_command_stopped() {
                self.pass_on(Signal::SIGCONT);
            }
        }
        Ok(())
    }

    fn is_command_stopped(&self) -> bool {
        let Some(command) = self.shared.command() else { return false };
        let status = fs::read_to_string(format!("/proc/{command}/status")).unwrap_or_default();
        status.lines().any(|line| line.starts_with("State:\tT"))
    }

    fn pass_on(&self, signal: Signal) {
        match (&self.guard, &self.family) {
            (Some(guard), _) => guard.link.send(&Order::Signal(signal as i32)),
            (None, Some(family)) => family.signal(signal),
            (None, None) => {}
        }
    }
}

/// Stops this process as `SIGTSTP` would have done had it not been read, until it is continued.
fn stop() -> nix::Result<()> {
    let signal = SigSet::from(Signal::SIGTSTP);
    raise(Signal::SIGTSTP)?;
    signal.thread_unblock()?;
    signal.thread_block()
}

/// The command may have ended between a lease's loss and its notice.
fn is_any_lost(claims: &[Claim]) -> bool {
    let lost = claims.iter().find(|claim| !claim.is_held());
    if let Some(claim) = lost {
        complain(claim.loss());
    }
    lost.is_some()
}

fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(super::EXIT_FAILURE)
}
