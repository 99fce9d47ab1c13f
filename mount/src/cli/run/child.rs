//! Running the command beside its leases: signals, renewals and the command's end in one loop, one thread.

use std::ffi::OsStr;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::time::Duration;

use anyhow::Result;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl;
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, kill, sigaction};
use nix::sys::signalfd::{SfdFlags, SignalFd, siginfo};
use nix::unistd::{AccessFlags, Pid, access, getpgid, getpgrp, getpid, getppid};

use crate::cli::complain;
use crate::cli::holding::claim::{Claim, Renewal};
use crate::cli::holding::time::{Timer, boot_now};
use crate::cli::tree::Tree;

/// Passed on to the command instead of ending `run`, which would end the lease under a running command.
const FORWARDED: [Signal; 6] =
    [Signal::SIGHUP, Signal::SIGINT, Signal::SIGQUIT, Signal::SIGTERM, Signal::SIGUSR1, Signal::SIGUSR2];
/// From TERM to KILL for a command whose lease is lost.
const GRACE: Duration = Duration::from_secs(5);

/// The command cannot be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// There is no such file.
    NotFound,
    /// It may not be executed.
    NotExecutable,
}

impl Missing {
    /// Says so, and gives the exit code that `env` gives.
    pub fn report(self, name: &OsStr) -> ExitCode {
        let (what, code) = match self {
            Missing::NotFound => ("command not found: check its name and PATH", 127),
            Missing::NotExecutable => ("cannot be executed: check its permissions", 126),
        };
        complain(format_args!("{}: {what}", name.display()));
        ExitCode::from(code)
    }

    /// That of an error of `execve(2)`.
    pub fn of(error: &io::Error) -> Missing {
        if error.kind() == io::ErrorKind::NotFound { Missing::NotFound } else { Missing::NotExecutable }
    }
}

/// How it ended.
pub enum End {
    /// With this code, 128+N for signal N.
    Code(u8),
    /// A lease was lost before it ended.
    LeaseLost,
    /// It could not be started after all.
    NotStarted(Missing),
}

/// The file that would be executed, by the shell's rules.
pub fn find_program(name: &OsStr) -> Result<PathBuf, Missing> {
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    find_program_in(name, &path)
}

fn find_program_in(name: &OsStr, path: &OsStr) -> Result<PathBuf, Missing> {
    if name.is_empty() {
        return Err(Missing::NotFound);
    }
    if name.as_encoded_bytes().contains(&b'/') {
        return check_program(Path::new(name));
    }
    let mut missing = Missing::NotFound;
    for dir in std::env::split_paths(path) {
        // An empty entry is the working directory; `./` keeps it from being searched for again.
        let dir = if dir.as_os_str().is_empty() { PathBuf::from(".") } else { dir };
        match check_program(&dir.join(name)) {
            Ok(program) => return Ok(program),
            Err(Missing::NotExecutable) => missing = Missing::NotExecutable,
            Err(Missing::NotFound) => {}
        }
    }
    Err(missing)
}

fn check_program(path: &Path) -> Result<PathBuf, Missing> {
    match path.metadata() {
        Ok(meta) if meta.is_file() && access(path, AccessFlags::X_OK).is_ok() => Ok(path.to_owned()),
        Ok(_) => Err(Missing::NotExecutable),
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => Err(Missing::NotFound),
        Err(error) => Err(Missing::of(&error)),
    }
}

/// Runs the command to its end, or ends it when a lease is lost.
pub fn run(mut command: Command, name: &OsStr, tree: &Tree, claims: &mut [Claim]) -> Result<End> {
    let signals = Signals::take_over()?;
    let mut watch = Watch { tree, claims, muted: Vec::new(), kill_at: None, lost: false };
    // A key taken early may have been lost while the last was taken.
    if watch.claims.len() > 1 && watch.is_any_lost() {
        return Ok(End::LeaseLost);
    }
    command.arg0(name);
    prepare(&mut command, &signals);
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => return Ok(End::NotStarted(Missing::of(&error))),
    };
    let status = match watch.until_end(&mut child, &signals) {
        Ok(status) => status,
        Err(error) => {
            // Without its guard the command must not go on.
            let _ = child.kill();
            let _ = child.wait();
            return Err(error);
        }
    };
    if watch.lost || watch.is_any_lost() {
        return Ok(End::LeaseLost);
    }
    Ok(End::Code(exit_code(status)))
}

fn exit_code(status: ExitStatus) -> u8 {
    let code = status.code().or_else(|| status.signal().map(|signal| 128 + signal));
    code.and_then(|code| u8::try_from(code).ok()).unwrap_or(super::EXIT_FAILURE)
}

/// Gives the command the signal mask `run` was started with, and ties its life to that of `run`.
fn prepare(command: &mut Command, signals: &Signals) {
    let (mask, parent) = (signals.before, getpid());
    let in_child = move || {
        mask.thread_set_mask()?;
        // The lease ends with `run`, so a command that outlives it would run without.
        prctl::set_pdeathsig(Signal::SIGKILL)?;
        if getppid() != parent {
            return Err(io::Error::from(Errno::ESRCH));
        }
        Ok(())
    };
    // SAFETY: between fork and exec the closure only makes system calls; it allocates nothing and takes no lock.
    unsafe { command.pre_exec(in_child) };
}

/// The signals that `run` reads instead of being ended by them.
struct Signals {
    fd: SignalFd,
    before: SigSet,
}

impl Signals {
    fn take_over() -> nix::Result<Signals> {
        // If SIGCHLD was ignored, the kernel would reap the command unseen.
        let default = SigAction::new(SigHandler::SigDfl, SaFlags::empty(), SigSet::empty());
        // SAFETY: the default action runs no code of ours.
        unsafe { sigaction(Signal::SIGCHLD, &default) }?;
        let mut set = SigSet::from_iter(FORWARDED);
        set.add(Signal::SIGCHLD);
        let before = SigSet::thread_get_mask()?;
        set.thread_block()?;
        let fd = SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        Ok(Signals { fd, before })
    }
}

/// The leases while the command runs.
struct Watch<'a> {
    tree: &'a Tree,
    claims: &'a mut [Claim],
    /// Handles that report trouble which is no loss: not polled until a renewal succeeds by the timer.
    muted: Vec<usize>,
    /// When the command is killed, once a lease is lost; on `CLOCK_BOOTTIME`.
    kill_at: Option<Duration>,
    lost: bool,
}

impl Watch<'_> {
    /// Waits for the command's end.
    fn until_end(&mut self, child: &mut Child, signals: &Signals) -> Result<ExitStatus> {
        let timer = Timer::new()?;
        loop {
            let next = if self.lost { self.kill_at } else { self.claims.iter().map(Claim::due_at).min() };
            match next {
                Some(next) => timer.ring_at(next)?,
                None => timer.stop()?,
            }
            let alarmed = self.sleep(&timer, signals)?;
            while let Some(info) = signals.fd.read_signal()? {
                forward(&info, child)?;
            }
            if let Some(status) = child.try_wait()? {
                return Ok(status);
            }
            if !self.lost {
                self.renew(&alarmed)?;
                if self.lost {
                    self.kill_at = Some(boot_now()? + GRACE);
                    send(child, Signal::SIGTERM)?;
                }
            } else if self.kill_at.is_some_and(|at| boot_now().is_ok_and(|now| now >= at)) {
                self.kill_at = None;
                child.kill()?;
            }
        }
    }

    /// Sleeps until something happens; gives the claims whose handle reports trouble.
    fn sleep(&self, timer: &Timer, signals: &Signals) -> nix::Result<Vec<usize>> {
        let mut fds =
            vec![PollFd::new(signals.fd.as_fd(), PollFlags::POLLIN), PollFd::new(timer.as_fd(), PollFlags::POLLIN)];
        let watched: Vec<usize> = match self.lost {
            true => Vec::new(),
            false => (0..self.claims.len()).filter(|index| !self.muted.contains(index)).collect(),
        };
        fds.extend(watched.iter().map(|index| PollFd::new(self.claims[*index].file().as_fd(), PollFlags::empty())));
        match poll(&mut fds, PollTimeout::NONE) {
            Ok(_) => {}
            Err(Errno::EINTR) => return Ok(Vec::new()),
            Err(errno) => return Err(errno),
        }
        let reports = fds[2..].iter().map(|fd| fd.any() == Some(true));
        Ok(watched.into_iter().zip(reports).filter_map(|(index, report)| report.then_some(index)).collect())
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
        Ok(())
    }

    /// The command may have ended between a lease's loss and its notice.
    fn is_any_lost(&self) -> bool {
        let lost = self.claims.iter().find(|claim| !claim.is_held());
        if let Some(claim) = lost {
            complain(claim.loss());
        }
        lost.is_some()
    }
}

/// Passes a signal on, unless the terminal has sent it to the command already.
fn forward(info: &siginfo, child: &Child) -> nix::Result<()> {
    let Some(signal) = i32::try_from(info.ssi_signo).ok().and_then(|number| Signal::try_from(number).ok()) else {
        return Ok(());
    };
    if signal == Signal::SIGCHLD {
        return Ok(());
    }
    let from_terminal = info.ssi_code == libc::SI_KERNEL && matches!(signal, Signal::SIGINT | Signal::SIGQUIT);
    if from_terminal && getpgid(Some(pid(child))) == Ok(getpgrp()) {
        return Ok(());
    }
    send(child, signal)
}

/// The child is not reaped yet, so the pid is its own.
fn send(child: &Child, signal: Signal) -> nix::Result<()> {
    kill(pid(child), signal)
}

fn pid(child: &Child) -> Pid {
    Pid::from_raw(i32::try_from(child.id()).unwrap_or(i32::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_as_a_shell_finds_them() {
        let find = |name: &str, path: &str| find_program_in(OsStr::new(name), OsStr::new(path));
        assert_eq!(find("sh", "/nowhere:/bin"), Ok(PathBuf::from("/bin/sh")));
        assert_eq!(find("/bin/sh", ""), Ok(PathBuf::from("/bin/sh")));
        assert_eq!(find("no-such-command", "/bin:/usr/bin"), Err(Missing::NotFound));
        assert_eq!(find("", "/bin"), Err(Missing::NotFound));
        assert_eq!(find("/no/such/command", "/bin"), Err(Missing::NotFound));
        assert_eq!(find("/", "/bin"), Err(Missing::NotExecutable));
        assert_eq!(find("passwd", "/etc"), Err(Missing::NotExecutable));
        assert_eq!(find("/etc/passwd/x", "/bin"), Err(Missing::NotFound));
    }
}
