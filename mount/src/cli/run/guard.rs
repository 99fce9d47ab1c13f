//! The guard of `leasefs run`: a second process, which outlives the runner for as long as the command does.
//!
//! It is forked when the keys are held, with copies of the holder handles, and is the parent of the command; so it can
//! - end the command and all its descendants when the runner is killed, and only then let go of the handles;
//! - end them in time when the runner renews no more, because it is stopped or gets no answer, also where somebody
//!   shortens a TTL meanwhile;
//! - see the loss of a lease whose runner is stopped.
//!
//! If the guard is killed, the command goes with it (`PR_SET_PDEATHSIG`), what descends from it becomes the runner's, and
//! the runner ends that before it lets go. So the command outlives neither, nor both. With `--child-keeps` it outlives
//! both: the command has the handle itself, and whichever of the two is left renews the lease.
//!
//! The guard asks nothing of the tree that a server which does not answer could hold up, except where a handle has just
//! reported, and where it renews in its runner's place. Handles and `status/KEY` are heard by a thread: whenever the
//! server wakes those who wait for one, the kernel asks it what has happened, and waits for the answer. What a change of
//! `status/KEY` was, a thread finds out. Before it ends a command for want of a renewal it has a thread ask whether
//! somebody else has renewed, and waits for the answer no longer than until then.

use std::ffi::CStr;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::process::CommandExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;
use std::time::Duration;

use leasefs::client::Status;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use nix::sys::prctl;
use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::unistd::{ForkResult, Pid, dup2_stdin, dup2_stdout, fork, getpgrp, getpid, getppid, setpgid};

use super::family::Family;
use super::link::{Limits, Link, News, Order, Reason, Received, Shared};
use super::program::Missing;
use crate::cli::complain;
use crate::cli::holding::claim::{Claim, Renewal};
use crate::cli::holding::time::{Timer, boot_now};
use crate::cli::tree::Tree;

/// What the guard is called in `ps` and `top`.
const NAME: &CStr = c"leasefs-guard";

/// How the command is run and ended.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    /// From TERM to KILL.
    pub grace: Duration,
    /// The command inherits the holder handles.
    pub inherit: bool,
    /// The command is not ended when its runner is killed.
    pub child_keeps: bool,
    /// The command gets a process group of its own.
    pub own_group: bool,
}

/// The runner's end.
pub struct Guard {
    /// Its process.
    pub pid: Pid,
    /// To talk to it.
    pub link: Link,
}

/// Starts the guard, which starts the command.
///
/// The process must block the signals that are not to end the guard, have the limits set, and have no other thread that
/// may hold a lock.
pub fn start(
    command: Command,
    mask: SigSet,
    rules: Rules,
    tree: &Tree,
    claims: &mut [Claim],
    shared: Shared,
) -> nix::Result<Guard> {
    let (ours, theirs) = Link::pair()?;
    // SAFETY: no other thread holds a lock that the child could wait for. The only one there may be looks at other
    // processes (a wait's look for a ring), and the C library keeps its allocator fit for use across a fork.
    match unsafe { fork() }? {
        ForkResult::Parent { child } => Ok(Guard { pid: child, link: ours }),
        ForkResult::Child => {
            // The runner's death closes the last copy of its end.
            drop(ours);
            let told = claims.iter().map(|_| None).collect();
            let post = Post { link: theirs, rules, tree, claims, shared, told, renews: false, asked: Duration::ZERO };
            let guarded = catch_unwind(AssertUnwindSafe(|| post.work(command, mask)));
            let failed = match guarded {
                Ok(Ok(())) => false,
                Ok(Err(error)) => {
                    complain(format_args!("the process that guards the command: {error}"));
                    true
                }
                Err(_) => true,
            };
            // SAFETY: ends the process at once; what the runner would do on its way out is not the guard's to do.
            unsafe { libc::_exit(failed.into()) }
        }
    }
}

/// The guard at work.
struct Post<'a> {
    link: Link,
    rules: Rules,
    tree: &'a Tree,
    claims: &'a mut [Claim],
    shared: Shared,
    /// What the tree has said of each lease.
    told: Vec<Option<Told>>,
    /// In the place of a runner that is gone.
    renews: bool,
    /// The time for TERM before which the tree was asked for a later one.
    asked: Duration,
}

/// The limits of a lease as the tree gave them.
struct Told {
    /// When, on `CLOCK_BOOTTIME`: what the runner knows counts if it has renewed since.
    at: Duration,
    limits: Limits,
}

/// A status as it was looked at, and the file of it, which reports the next change.
struct Looked {
    index: usize,
    status: Status,
    file: Arc<File>,
}

/// What wakes the guard.
const LINK: u64 = 0;
const CHILDREN: u64 = 1;
const TIMER: u64 = 2;
const BELL: u64 = 3;

/// What the claims tell.
#[derive(Default)]
struct Heard {
    /// A holder handle has reported: a lease may be lost.
    alarmed: bool,
    /// Claims of which something has changed: the TTL, perhaps.
    news: Vec<usize>,
}

/// Where the guard sleeps.
struct Bed {
    epoll: Epoll,
    children: SignalFd,
    timer: Timer,
    /// The holder handles by their numbers, and after them the files that tell the news of each lease.
    files: Arc<Epoll>,
    /// Those that have reported.
    reports: Receiver<u64>,
    /// What threads have looked at.
    looks: (Sender<Looked>, Receiver<Looked>),
    /// What threads wake the guard by.
    bell: Arc<EventFd>,
    /// The number of the first lease's news.
    first_news: u64,
}

/// Has a thread listen to files of the tree.
fn listen(files: Arc<Epoll>, bell: Arc<EventFd>) -> io::Result<Receiver<u64>> {
    let (tell, reports) = mpsc::channel();
    let listen = move || {
        let mut events = [EpollEvent::empty(); 8];
        loop {
            let count = match files.wait(&mut events, EpollTimeout::NONE) {
                Ok(count) => count,
                Err(Errno::EINTR) => continue,
                Err(_) => return,
            };
            if events[..count].iter().any(|event| tell.send(event.data()).is_err()) || bell.write(1).is_err() {
                return;
            }
        }
    };
    thread::Builder::new().spawn(listen)?;
    Ok(reports)
}

impl Bed {
    /// Looks at what has changed of a key, in a thread, which is left to a server that does not answer. Of a tree that fails
    /// nothing more is heard.
    fn look(&self, index: usize, claim: &Claim, tree: &Tree) {
        let (key, tree, event) = (claim.key().clone(), tree.clone(), self.news_of(index));
        let (files, tell, bell) = (Arc::clone(&self.files), self.looks.0.clone(), Arc::clone(&self.bell));
        let look = move || -> Option<()> {
            let file = Arc::new(tree.open_status(&key).ok()??);
            let status = Status::read(&file).ok()?;
            // First what there is, so that what comes after it is heard of later.
            tell.send(Looked { index, status, file: Arc::clone(&file) }).ok()?;
            bell.write(1).ok()?;
            files.add(&*file, event).ok()
        };
        let _ = thread::Builder::new().spawn(look);
    }

    /// What is waited for of a status: its next change. A file that was read anew is another one; once it has reported it is
    /// not heard again.
    fn news_of(&self, index: usize) -> EpollEvent {
        EpollEvent::new(EpollFlags::EPOLLPRI | EpollFlags::EPOLLONESHOT, self.first_news + index as u64)
    }
}

impl Post<'_> {
    fn work(self, mut command: Command, mask: SigSet) -> io::Result<()> {
        // Out of the way of what is sent to the runner's group, by the terminal or by hand.
        let group = getpgrp();
        setpgid(Pid::from_raw(0), Pid::from_raw(0))?;
        SigSet::all().thread_block()?;
        prctl::set_name(NAME)?;
        prctl::set_child_subreaper(true)?;
        let bed = self.make_bed()?;

        command.process_group(if self.rules.own_group { 0 } else { group.as_raw() });
        self.prepare(&mut command, mask);
        let child = match command.spawn() {
            Ok(child) => child,
            Err(error) => {
                self.link.send(&News::NotStarted(Missing::of(&error)));
                return Ok(());
            }
        };
        let pid = i32::try_from(child.id()).map_err(io::Error::other)?;
        // Input and output are the command's; whoever reads the output waits for its end, not for ours.
        let null = OpenOptions::new().read(true).write(true).open("/dev/null")?;
        dup2_stdin(&null)?;
        dup2_stdout(&null)?;
        let family = Family::of(Some(Pid::from_raw(pid)), self.rules.own_group);
        self.watch(family, &bed)
    }

    /// Gives the command the signal mask `run` was started with and the handles it is to have, and ties its life to that
    /// of the guard.
    fn prepare(&self, command: &mut Command, mask: SigSet) {
        let parent = getpid();
        let dies_with_guard = !self.rules.child_keeps;
        let handed_down: Vec<RawFd> = match self.rules.inherit {
            true => self.claims.iter().map(|claim| claim.file().as_raw_fd()).collect(),
            false => Vec::new(),
        };
        let shared = self.shared;
        let in_child = move || {
            shared.set_command(getpid());
            mask.thread_set_mask()?;
            for fd in &handed_down {
                // SAFETY: the handle is open in this process, which is about to execute its program.
                let fd = unsafe { std::os::fd::BorrowedFd::borrow_raw(*fd) };
                fcntl(fd, FcntlArg::F_SETFD(FdFlag::empty()))?;
            }
            if dies_with_guard {
                prctl::set_pdeathsig(Signal::SIGKILL)?;
                if getppid() != parent {
                    return Err(io::Error::from(Errno::ESRCH));
                }
            }
            Ok(())
        };
        // SAFETY: between fork and exec the closure only makes system calls; it allocates nothing and takes no lock.
        unsafe { command.pre_exec(in_child) };
    }

    fn make_bed(&self) -> io::Result<Bed> {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        let children =
            SignalFd::with_flags(&SigSet::from(Signal::SIGCHLD), SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)?;
        let timer = Timer::new()?;
        let bell = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?);
        epoll.add(&self.link, EpollEvent::new(EpollFlags::EPOLLIN, LINK))?;
        epoll.add(&children, EpollEvent::new(EpollFlags::EPOLLIN, CHILDREN))?;
        epoll.add(timer.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, TIMER))?;
        epoll.add(bell.as_fd(), EpollEvent::new(EpollFlags::EPOLLIN, BELL))?;
        let files = Arc::new(Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?);
        // Unlike poll(2), this asks the server now, and then only when it has told of a change. Each is heard once: it
        // reports for ever, be it a loss or a server that is gone for good.
        for (number, claim) in (0..).zip(self.claims.iter()) {
            files.add(claim.file(), EpollEvent::new(EpollFlags::EPOLLONESHOT, number))?;
        }
        let reports = listen(Arc::clone(&files), Arc::clone(&bell))?;
        let first_news = self.claims.len() as u64;
        let bed = Bed { epoll, children, timer, files, reports, looks: mpsc::channel(), bell, first_news };
        self.follow(&bed);
        Ok(bed)
    }

    /// From the command's start until it has ended, by itself or by the guard.
    fn watch(mut self, mut family: Family, bed: &Bed) -> io::Result<()> {
        let mut reason = Reason::Itself;
        // A status that could not be read before is looked at now.
        let unread = self.claims.iter().enumerate().filter(|(_, claim)| claim.news().is_none());
        let mut heard = Heard { news: unread.map(|(index, _)| index).collect(), ..Heard::default() };
        // Each is kept, so that its next change is heard of.
        let mut followed: Vec<Option<Arc<File>>> = self.claims.iter().map(|_| None).collect();
        loop {
            for index in heard.news {
                match self.claims.get_mut(index) {
                    Some(claim) if self.renews => claim.take_notice(self.tree)?,
                    Some(claim) => bed.look(index, claim, self.tree),
                    None => {}
                }
            }
            while let Ok(Looked { index, status, file }) = bed.looks.1.try_recv() {
                followed[index] = Some(file);
                self.take_notice(index, &status)?;
            }
            let mut ends = self.heed(&family, bed)?;
            family.reap();
            let now = boot_now()?;
            if !family.is_ending() {
                if family.status().is_some() {
                    break;
                }
                if heard.alarmed && self.claims.iter().any(|claim| !claim.is_held()) {
                    ends = Some(Reason::LeaseLost);
                }
                if let Some(why) = ends.or(self.runs_out(now)?) {
                    reason = why;
                    let limits = self.limits();
                    family.end((now + self.rules.grace).min(limits.kill_at), limits.end());
                }
            }
            let next = match family.is_ending() {
                true => match family.go_on(now) {
                    Some(next) => next,
                    None => break,
                },
                false if self.renews => self.claims.iter().map(Claim::due_at).min().unwrap_or(Duration::MAX),
                false => match self.limits() {
                    limits if self.asked == limits.term_at => limits.term_at,
                    limits => limits.ask_at(),
                },
            };
            if self.renews && !family.is_ending() {
                self.follow(bed);
            }
            bed.timer.ring_at(next)?;
            heard = self.sleep(bed)?;
        }
        self.link.send(&News::Ended(family.status(), reason));
        Ok(())
    }

    /// When the command is to be ended: the newest that is known of each lease.
    fn limits(&self) -> Limits {
        Limits::earliest((0..self.claims.len()).filter_map(|index| self.limits_of(index)))
    }

    fn limits_of(&self, index: usize) -> Option<Limits> {
        let (renewed_at, limits) = self.shared.leases().nth(index)?;
        let told = self.told[index].as_ref().filter(|told| told.at > renewed_at);
        Some(told.map_or(limits, |told| told.limits))
    }

    /// Takes notice of another TTL: a runner that is stopped does not.
    fn take_notice(&mut self, index: usize, status: &Status) -> nix::Result<()> {
        let claim = &mut self.claims[index];
        if claim.follow(status)? {
            self.told[index] = Some(Told { at: boot_now()?, limits: Limits::of(claim) });
        }
        Ok(())
    }

    /// Does what the runner says. Whether the command is to be ended.
    fn heed(&mut self, family: &Family, bed: &Bed) -> io::Result<Option<Reason>> {
        loop {
            match self.link.receive()? {
                Received::Message(Order::Signal(number)) => {
                    if let Ok(signal) = Signal::try_from(number) {
                        family.signal(signal);
                    }
                }
                Received::Message(Order::End) => return Ok(Some(Reason::LeaseLost)),
                Received::Nothing => return Ok(None),
                Received::Closed => {
                    // It stays readable for ever.
                    let _ = bed.epoll.delete(&self.link);
                    if self.renews || family.is_ending() {
                        return Ok(None);
                    }
                    let keys: Vec<&str> = self.claims.iter().map(|claim| claim.key().as_str()).collect();
                    let keys = keys.join(", ");
                    if self.rules.child_keeps {
                        complain(format_args!(
                            "{keys}: `leasefs run` was killed: its command goes on and keeps the key"
                        ));
                        self.renews = true;
                        for (claim, (renewed_at, _)) in self.claims.iter_mut().zip(self.shared.leases()) {
                            claim.was_renewed(renewed_at);
                        }
                        return Ok(None);
                    }
                    complain(format_args!("{keys}: `leasefs run` was killed: ending its command"));
                    return Ok(Some(Reason::RunnerGone));
                }
            }
        }
    }

    /// Asks the tree, for so long, whether the leases go on although their runner has not renewed them: the command may
    /// have done so itself. In a thread, which is left to a server that does not answer.
    fn ask(&mut self, within: Duration) -> nix::Result<()> {
        let keys: Vec<_> = self.claims.iter().map(|claim| claim.key().clone()).collect();
        let (tell, told) = mpsc::channel();
        let tree = self.tree.clone();
        let ask = move || tell.send(keys.iter().map(|key| tree.status(key).ok().flatten()).collect::<Vec<_>>());
        if thread::Builder::new().spawn(ask).is_err() {
            return Ok(());
        }
        for (index, status) in told.recv_timeout(within).unwrap_or_default().into_iter().enumerate() {
            let limits = status.and_then(|status| Limits::told(&status, self.claims[index].epoch()));
            let is_later = |limits: &Limits| self.limits_of(index).is_some_and(|known| limits.term_at > known.term_at);
            if let Some(limits) = limits.filter(is_later) {
                self.told[index] = Some(Told { at: boot_now()?, limits });
            }
        }
        Ok(())
    }

    /// Whether the command is to be ended because a lease is not renewed in time. Renews it, where there is nobody else.
    fn runs_out(&mut self, now: Duration) -> nix::Result<Option<Reason>> {
        if self.renews {
            for claim in self.claims.iter_mut().filter(|claim| claim.due_at() <= now) {
                if claim.renew(self.tree)? == Renewal::Lost {
                    complain(claim.loss());
                    return Ok(Some(Reason::LeaseLost));
                }
            }
            self.shared.set_leases(self.claims);
        } else {
            let limits = self.limits();
            if now < limits.term_at && now >= limits.ask_at() && self.asked != limits.term_at {
                self.asked = limits.term_at;
                self.ask(limits.term_at - now)?;
            }
        }
        let runs_out = now >= self.limits().term_at;
        Ok(runs_out.then_some(Reason::LeaseRunsOut))
    }

    /// Has it told when a TTL is changed.
    fn follow(&self, bed: &Bed) {
        for (index, claim) in self.claims.iter().enumerate() {
            if let Some(news) = claim.news() {
                // Most are there already.
                let _ = bed.files.add(news, bed.news_of(index));
            }
        }
    }

    /// Sleeps until something happens, and gives what the claims tell. Each holder handle is heard once.
    fn sleep(&self, bed: &Bed) -> nix::Result<Heard> {
        let mut events = [EpollEvent::empty(); 8];
        match bed.epoll.wait(&mut events, EpollTimeout::NONE) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno),
        }
        while bed.children.read_signal()?.is_some() {}
        let _ = bed.bell.read();
        let mut heard = Heard::default();
        for number in bed.reports.try_iter() {
            match number.checked_sub(bed.first_news) {
                None => heard.alarmed = true,
                Some(index) => heard.news.push(index as usize),
            }
        }
        Ok(heard)
    }
}
