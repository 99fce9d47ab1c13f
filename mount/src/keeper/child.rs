//! Starting a program as a server.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result};
use nix::fcntl::{OFlag, open};
use nix::sys::signal::{SigSet, SigmaskHow, Signal};
use nix::sys::stat::Mode;

use crate::handover::{Fds, Handover, VARIABLE};

/// A program by what it is, not by what is on disk under its name by now.
pub struct Program {
    file: OwnedFd,
    /// Where it was found.
    pub path: PathBuf,
}

/// A child, and what it says of itself.
pub struct Server {
    /// The process.
    pub child: Child,
    /// Where it says that; none once it has.
    pub report: Option<File>,
    /// What it said.
    pub said: String,
    /// That was, that it answers the kernel.
    pub ready: bool,
    /// The keeper ends it, for another.
    pub ended_by_keeper: bool,
    /// When it was started.
    pub since: Instant,
}

fn open_program(path: &std::path::Path) -> Result<OwnedFd> {
    open(path, OFlag::O_PATH | OFlag::O_CLOEXEC, Mode::empty()).with_context(|| format!("{}", path.display()))
}

impl Program {
    /// The program that this process runs.
    ///
    /// # Errors
    /// Where `/proc` is not there.
    pub fn this() -> Result<Program> {
        let path = std::env::current_exe().context("/proc is needed to start a server")?;
        Ok(Program { file: open_program("/proc/self/exe".as_ref())?, path })
    }

    /// What is on disk now where this one was found.
    ///
    /// # Errors
    /// Where there is nothing.
    pub fn on_disk(&self) -> Result<Program> {
        Ok(Program { file: open_program(&self.path)?, path: self.path.clone() })
    }

    /// Starts it as a server, or only has it say whether it could be one.
    ///
    /// # Errors
    /// Where it cannot be started.
    pub fn start(&self, handover: &Handover, check: bool) -> Result<Server> {
        let (ours, theirs) = nix::unistd::pipe2(OFlag::O_CLOEXEC | OFlag::O_NONBLOCK).context("pipe")?;
        let fds = Fds { report: theirs.as_raw_fd(), ..handover.fds };
        let handover = Handover { fds, ..handover.clone() };
        let mut command = Command::new(format!("/proc/self/fd/{}", self.file.as_raw_fd()));
        command.arg0("leasefs").arg("serve").env(VARIABLE, serde_json::to_string(&handover)?);
        if check {
            command.arg("--check");
        }
        // What is for the keeper is not for the server.
        command.env_remove("NOTIFY_SOCKET").stdin(Stdio::null()).stdout(Stdio::null());
        // A Ctrl-C is for the keeper too; in the background there is none.
        if !handover.log_there {
            command.process_group(0);
        }
        let inherited = [fds.device, fds.flight, fds.files, fds.last_read, fds.lock, fds.report];
        let mut blocked = SigSet::empty();
        for signal in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
            blocked.add(signal);
        }
        let keeper = nix::unistd::Pid::this();
        // SAFETY: between fork and exec only prctl(2), getppid(2), sigprocmask(2) and fcntl(2) are called, which are
        // async-signal-safe.
        unsafe {
            command.pre_exec(move || {
                nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
                // Had it ended before, nobody would tell.
                if nix::unistd::getppid() != keeper {
                    return Err(io::Error::from_raw_os_error(libc::ESRCH));
                }
                nix::sys::signal::sigprocmask(SigmaskHow::SIG_SETMASK, Some(&blocked), None)?;
                inherited.iter().try_for_each(|fd| inherit(*fd))
            });
        }
        let child = command.spawn().context("cannot start the server")?;
        let report = Some(File::from(ours));
        Ok(Server { child, report, said: String::new(), ready: false, ended_by_keeper: false, since: Instant::now() })
    }
}

fn inherit(fd: RawFd) -> io::Result<()> {
    // SAFETY: only changes a flag of a descriptor that is open, and of this process alone.
    if unsafe { libc::fcntl(fd, libc::F_SETFD, 0) } < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

impl Server {
    /// Reads what it says. True once it has said all.
    pub fn hear(&mut self) -> bool {
        let Some(report) = &mut self.report else { return false };
        let mut bytes = [0; 4096];
        loop {
            match report.read(&mut bytes) {
                Ok(0) => break,
                Ok(length) => self.said.push_str(&String::from_utf8_lossy(&bytes[..length])),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return false,
                Err(_) => break,
            }
        }
        self.report = None;
        true
    }

    /// Ends it.
    pub fn kill(&mut self) {
        // One that has ended is no error.
        let _ = self.child.kill();
    }
}
