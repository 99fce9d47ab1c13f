//! The keeper: mounts, holds the connection to the kernel, and sees to it that there always is a server on it.
//!
//! It answers no request and knows nothing of leases, so that there is little in it that could fail. If a server ends
//! other than with the connection, the next one takes over: see [`crate::connection`]. If the keeper ends, so does the
//! server, and the connection with both.
//!
//! | file | what it is about |
//! |---|---|
//! | [`child`] | starting a program as a server |
//! | [`pace`] | how soon the next server is started, and when to give up |
//! | [`control`] | orders, through a socket in the state directory |
//! | [`upgrade`] | another program's server in the place of the present one |
//! | [`lock`] | one keeper for a state directory |
//! | [`service`] | what a service manager is told |
//!
//! **Giving up.** A server that never gets ready cannot be waited for for ever: callers would hang, deaf to signals. Then
//! the keeper ends and leaves the dead mount where it is. Every handle answers `ENOTCONN` from there on, which tells
//! holders that they are on their own, and so does every path: with the mount gone, a script that claims would make
//! plain files in the directory below, and take that for leases. Nothing that is held is given to anybody else: the
//! registry has it, and the next `leasefs mount` treats it as of a lost connection.
//!
//! One thread: the kernel ends a server when the *thread* that started it ends.

mod child;
pub mod control;
pub mod lock;
mod pace;
mod service;
mod upgrade;

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::ExitStatus;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::fcntl::Flock;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::memfd::{MFdFlags, memfd_create};
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use crate::dead_mount::Record;
use crate::failure::{self, Failure};
use crate::flight::Flight;
use crate::fs::any_open;
use crate::handover::{Fds, Handover, PROTOCOL, READY};
use crate::openfiles::OpenFiles;
use crate::server::{self, Plan};
use crate::{connection, dead_mount, kernel_mount, logfile};
use child::{Program, Server};
use control::{Control, Requester};
use lock::lock_state;
use pace::Pace;
use upgrade::{Check, Upgrade};

/// Where [`Keeper::memory`] has that of the open files.
const FILES: usize = 1;

/// How the keeper itself is to act.
#[derive(Clone, Copy, Debug)]
pub struct Manner {
    /// Log to the state directory.
    pub log_there: bool,
    /// Never ask the kernel for unanswered requests again.
    pub no_resend: bool,
    /// Servers in a row that do not get ready, before giving up.
    pub max_starts: u32,
}

/// Mounts, and serves until the tree is unmounted. `ready` is called once it answers, with what there is to say of it.
///
/// # Errors
/// What is wrong and what to do; if `ready` was not called, nothing is mounted.
pub fn run(plan: &Plan, manner: Manner, ready: impl FnOnce(&str)) -> Result<()> {
    if let Some(failure) = kernel_mount::request_timeout() {
        bail!(failure);
    }
    kernel_mount::check_proc()?;
    // It was started by another path, and is to be found by its name.
    let _ = nix::sys::prctl::set_name(c"leasefs-keeper");
    dead_mount::clean(&plan.state_dir, &plan.mountpoint)?;
    let mountpoint = kernel_mount::check_mountpoint(&plan.mountpoint)?;
    check_text(&mountpoint)?;
    check_text(&std::path::absolute(&plan.state_dir)?)?;
    let state_dir = server::make_state_dir(&plan.state_dir, &mountpoint)?;
    check_text(&state_dir)?;
    let lock = lock_state(&state_dir)?;
    if manner.log_there {
        logfile::follow(&state_dir)?;
    }
    // Blocked before there is a child, and read from a descriptor.
    let signals: SigSet = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP, Signal::SIGCHLD].into_iter().collect();
    signals.thread_block().context("signals")?;
    let signals = SignalFd::with_flags(&signals, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK).context("signals")?;
    let program = Program::this()?;
    let control = Control::open(&state_dir)?;
    let memory = |name: &str| memfd_create(name, MFdFlags::MFD_CLOEXEC).context("memfd_create");
    let (flight, files, last_read) = (memory("leasefs-flight")?, memory("leasefs-files")?, memory("leasefs-read")?);
    let place = kernel_mount::keep_others_off(&mountpoint)?;
    let device = kernel_mount::connect(&mountpoint, &plan.options)?;
    let mounted = match dead_mount::record(&state_dir, &mountpoint) {
        Ok(record) => Mounted(record),
        Err(error) => {
            // Nobody knows of it yet.
            let _ = kernel_mount::disconnect(&mountpoint, true);
            return Err(error);
        }
    };
    drop(place);
    let init = first_request(&device)?;
    let can_resend = connection::has_resend(&init);
    let plan = Plan { mountpoint, state_dir, ..plan.clone() };
    let mut keeper = Keeper {
        handover: Handover {
            protocol: PROTOCOL,
            resend: can_resend && !manner.no_resend,
            init,
            keeper_pid: std::process::id(),
            starts: 0,
            blameless: false,
            log_there: manner.log_there,
            fds: Fds {
                device: device.as_raw_fd(),
                flight: flight.as_raw_fd(),
                files: files.as_raw_fd(),
                last_read: last_read.as_raw_fd(),
                lock: lock.as_raw_fd(),
                report: -1,
            },
            plan,
        },
        device,
        memory: [flight, files, last_read],
        signals,
        control,
        _lock: lock,
        program,
        server: None,
        start_at: Some(Instant::now()),
        pace: Pace::new(manner.max_starts),
        check: None,
        upgrade: None,
        stopping: false,
        last_words: String::new(),
        mount: mounted.0.clone(),
    };
    let how = keeper.how(can_resend, manner.no_resend);
    tracing::info!("{how}");
    // With the keeper goes the lock, and whoever has it next must not meet the server.
    match keeper.keep(|| ready(how)).inspect_err(|_| keeper.end_server())? {
        Ending::Unmounted => {
            tracing::info!("unmounted {}", mounted.0.mountpoint().display());
            service::stopping();
            drop(mounted);
            Ok(())
        }
        Ending::GaveUp(starts) => {
            let path = failure::shown(mounted.0.mountpoint());
            std::mem::forget(mounted);
            bail!(Failure::GaveUp { starts: starts.to_string(), path, why: keeper.last_words })
        }
    }
}

/// A path that is not text cannot be handed over to a server, nor told to anybody.
fn check_text(path: &Path) -> Result<()> {
    match path.to_str() {
        Some(_) => Ok(()),
        None => bail!(Failure::PathNotText { path: failure::shown(path) }),
    }
}

enum Ending {
    /// The connection is gone, and the server with it.
    Unmounted,
    /// No server gets ready.
    GaveUp(u32),
}

struct Keeper {
    handover: Handover,
    device: OwnedFd,
    /// Of what is in flight, of what is open, and of what was read last.
    memory: [OwnedFd; 3],
    signals: SignalFd,
    control: Control,
    /// Below what is removed from the state directory, so that it is locked still.
    _lock: Flock<File>,
    program: Program,
    server: Option<Server>,
    /// When the next server is to be started, while there is none.
    start_at: Option<Instant>,
    pace: Pace,
    check: Option<Check>,
    upgrade: Option<Upgrade>,
    stopping: bool,
    /// Why the last server was not ready.
    last_words: String,
    /// What it serves.
    mount: Record,
}

impl Keeper {
    fn how(&self, can_resend: bool, no_resend: bool) -> &'static str {
        match (self.handover.resend, can_resend, no_resend) {
            (true, ..) => {
                "should the server end, another takes over, and the kernel sends it what is unanswered (resend): nobody \
                 notices"
            }
            (_, false, _) => {
                "should the server end, another takes over; this kernel (before 6.9) has no resend: locks keep their \
                 place, other calls under way end with EINTR"
            }
            _ => {
                "should the server end, another takes over, without resend: locks keep their place, other calls under way \
                 end with EINTR"
            }
        }
    }

    fn keep(&mut self, ready: impl FnOnce()) -> Result<Ending> {
        let mut ready = Some(ready);
        loop {
            if self.server.is_none() && self.start_at.is_some_and(|at| at <= Instant::now()) {
                self.start()?;
            }
            self.give_up_check();
            let awake = self.wait()?;
            if awake.server_said && self.hear_server() {
                if let Some(ready) = ready.take() {
                    ready();
                }
                self.on_ready();
            }
            if awake.check_said {
                self.hear_check();
            }
            if awake.order
                && let Some(requester) = self.control.next_order()
            {
                self.begin_upgrade(requester);
            }
            while let Ok(Some(signal)) = self.signals.read_signal() {
                self.on_signal(signal.ssi_signo as i32);
            }
            if let Some(ending) = self.reap(ready.is_some())? {
                return Ok(ending);
            }
        }
    }

    fn start(&mut self) -> Result<()> {
        self.start_at = None;
        self.handover.starts += 1;
        let server = self.program.start(&self.handover, false);
        // Later, a moment's lack of memory or processes must not end what the others still hold.
        match server {
            Err(error) if self.handover.starts > 1 => {
                tracing::error!("cannot start a server: {error:#}");
                self.start_at = Some(Instant::now() + Duration::from_secs(1));
            }
            server => self.server = Some(server?),
        }
        self.handover.blameless = false;
        Ok(())
    }

    /// Sleeps until something happens.
    fn wait(&self) -> Result<Awake> {
        let due = [self.start_at.filter(|_| self.server.is_none()), self.check.as_ref().map(|check| check.until)];
        let timeout = due.into_iter().flatten().min().map_or(PollTimeout::NONE, |at| {
            let left = at.saturating_duration_since(Instant::now());
            // Rounded up, or it would spin for the last millisecond.
            PollTimeout::try_from(left + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX)
        });
        let mut fds = vec![PollFd::new(self.signals.as_fd(), PollFlags::POLLIN)];
        fds.extend(self.control.fds().map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        let orders = 1..fds.len();
        let children = [self.server.as_ref(), self.check.as_ref().map(|check| &check.child)];
        let places = children.map(|child| {
            let report = child?.report.as_ref()?;
            fds.push(PollFd::new(report.as_fd(), PollFlags::POLLIN));
            Some(fds.len() - 1)
        });
        // While there is a server, it is who finds the connection's end.
        if self.server.is_none() {
            fds.push(PollFd::new(self.device.as_fd(), PollFlags::empty()));
        }
        match poll(&mut fds, timeout) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(error) => return Err(error).context("poll"),
        }
        let is_ready = |at: usize| fds[at].revents().is_some_and(|events| !events.is_empty());
        Ok(Awake {
            order: orders.into_iter().any(is_ready),
            server_said: places[0].is_some_and(is_ready),
            check_said: places[1].is_some_and(is_ready),
        })
    }

    /// What the server says of itself. True when it is that it is ready.
    fn hear_server(&mut self) -> bool {
        let Some(server) = &mut self.server else { return false };
        if !server.hear() {
            return false;
        }
        server.ready = server.said == READY;
        server.ready
    }

    fn on_ready(&mut self) {
        let plan = &self.handover.plan;
        let text = format!("serving {} (server {})", plan.mountpoint.display(), self.handover.starts);
        service::ready(&text);
        self.end_upgrade();
    }

    fn on_signal(&mut self, signal: i32) {
        match Signal::try_from(signal) {
            Ok(Signal::SIGHUP) => self.begin_upgrade(Requester::nobody()),
            Ok(signal @ (Signal::SIGTERM | Signal::SIGINT)) => {
                if self.stopping {
                    tracing::warn!("ending with files open: what is held stays held until its TTL, as orphaned");
                    self.end_server();
                    std::process::exit(1);
                }
                tracing::info!("{signal}: unmounting");
                self.stopping = true;
                service::stopping();
                let mount = self.mount.clone();
                let memory = self.memory[FILES].try_clone();
                // Elsewhere: unmounting may have to look at the tree, and somebody must answer.
                std::thread::spawn(move || {
                    let files = memory.ok().and_then(|memory| OpenFiles::attach(&memory).ok());
                    kernel_mount::stop(&mount, || files.as_ref().is_some_and(any_open));
                });
            }
            _ => {}
        }
    }

    /// Ends the server and waits until it has.
    fn end_server(&mut self) {
        if let Some(mut server) = self.server.take() {
            server.kill();
            let _ = server.child.wait();
        }
    }

    /// Whether the connection has ended: unmounted, or aborted.
    fn is_gone(&self) -> bool {
        let mut fds = [PollFd::new(self.device.as_fd(), PollFlags::empty())];
        poll(&mut fds, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }

    /// Looks after children that have ended.
    fn reap(&mut self, never_ready: bool) -> Result<Option<Ending>> {
        self.reap_check();
        let Some(server) = &mut self.server else {
            return Ok(self.is_gone().then_some(Ending::Unmounted));
        };
        let Some(status) = server.child.try_wait().context("waiting for the server")? else { return Ok(None) };
        let heard = server.report.is_some() && self.hear_server();
        let Some(server) = self.server.take() else { return Ok(None) };
        let was_ready = server.ready || heard;
        if self.is_gone() {
            if !status.success() {
                tracing::warn!("the server ended with the connection, but not in order: {}", describe(status));
            }
            return Ok(Some(Ending::Unmounted));
        }
        let said = if server.said.is_empty() || was_ready { describe(status) } else { server.said.clone() };
        if never_ready && self.handover.starts == 1 && !was_ready && status.signal().is_none() {
            bail!("{said}");
        }
        self.last_words.clone_from(&said);
        if server.ended_by_keeper {
            self.handover.blameless = true;
            self.start_at = Some(Instant::now());
            return Ok(None);
        }
        if self.undo_upgrade(&said) {
            self.start_at = Some(Instant::now());
            return Ok(None);
        }
        let killed = status.signal() == Some(libc::SIGKILL);
        match self.pace.next(was_ready, killed, server.since.elapsed()) {
            Some(pause) => {
                let pid = server.child.id();
                tracing::warn!("server {pid} ended ({said}): starting another in {} ms", pause.as_millis());
                self.start_at = Some(Instant::now() + pause);
                Ok(None)
            }
            None if never_ready && !self.has_served() => bail!("no server gets ready: {said}"),
            None => Ok(Some(Ending::GaveUp(self.pace.unready()))),
        }
    }

    /// Whether a server has spoken to the kernel, so that somebody may hold something, though it was not ready yet.
    fn has_served(&self) -> bool {
        let flight = self.memory[0].try_clone().ok().and_then(|memory| Flight::open(memory).ok());
        flight.is_none_or(|flight| flight.has_answered_init())
    }
}

/// What woke the keeper.
struct Awake {
    order: bool,
    server_said: bool,
    check_said: bool,
}

fn describe(status: ExitStatus) -> String {
    status.to_string()
}

/// The kernel's first request, which it makes when it mounts.
fn first_request(device: &OwnedFd) -> Result<Vec<u8>> {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        match nix::unistd::read(device, &mut buffer) {
            Ok(length) => return Ok(buffer[..length].to_vec()),
            Err(Errno::EINTR | Errno::EAGAIN | Errno::ENOENT) => {}
            Err(error) => return Err(error).context("the kernel did not say hello"),
        }
    }
}

/// Unmounts when the keeper ends before somebody else did. By then another tree may be on the same path.
struct Mounted(Record);

impl Drop for Mounted {
    fn drop(&mut self) {
        if self.0.is_there().is_ok_and(|there| there) {
            let _ = kernel_mount::disconnect(self.0.mountpoint(), true);
        }
    }
}
