//! Taking keys by `flock`, all or none, and keeping them renewed.
//!
//! A place in line is lost by any signal, so nothing may interrupt a waiting `flock` but its end: what happens
//! meanwhile (saying who holds the key, renewing keys already taken) is done by a thread beside it. The end of the
//! patience, and the loss of a key already taken, come as `SIGALRM`.

use std::ffi::CStr;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use leasefs::client::epoch_of;
use leasefs::{Key, Ttl};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, SigmaskHow, Signal, pthread_sigmask, sigaction};
use nix::sys::stat::futimens;
use nix::sys::time::TimeSpec;
use nix::unistd::ftruncate;

use super::time::{Timer, boot_now};
use super::waiting::Mention;
use crate::cli::tree::{Status, Tree, trouble};
use crate::cli::{complain, show};

/// A signal that arrives before `flock` has begun to wait is missed by it, so the alarm goes on ringing.
const ALARM_INTERVAL: Duration = Duration::from_millis(20);
/// Pause before a renewal that failed for a reason other than the lease's loss is tried again, at most.
const RETRY: Duration = Duration::from_secs(1);

/// How long to wait for keys that are held.
#[derive(Clone, Copy, Debug)]
pub enum Patience {
    /// Not at all.
    None,
    /// Until this instant; the duration is what was asked for.
    Until(Instant, Duration),
    /// As long as it takes.
    Endless,
}

impl Patience {
    /// This long from now.
    pub fn limited(limit: Duration) -> Patience {
        Patience::Until(Instant::now() + limit, limit)
    }
}

/// Why the keys were not taken. None is held when this is returned.
pub enum Refusal {
    /// One is held by another, and was not given up in time.
    Held(String),
    /// One was lost again while waiting for the next.
    Lost(String),
    /// Anything else.
    Failed(anyhow::Error),
}

impl From<anyhow::Error> for Refusal {
    fn from(error: anyhow::Error) -> Refusal {
        Refusal::Failed(error)
    }
}

impl From<Errno> for Refusal {
    fn from(errno: Errno) -> Refusal {
        Refusal::Failed(errno.into())
    }
}

/// What a renewal came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// The lease goes on.
    Kept,
    /// The lease is lost.
    Lost,
    /// It could not be renewed, but has not run out: to be tried again.
    Failed,
}

/// A key that is held: the holder handle and when to renew it.
pub struct Claim {
    key: Key,
    epoch: u64,
    file: File,
    ttl: Duration,
    /// Last proof of the lease, on `CLOCK_BOOTTIME`.
    renewed_at: Duration,
    /// Next renewal, on `CLOCK_BOOTTIME`.
    due_at: Duration,
    complained: bool,
    /// `status/KEY` as it was last read; none where it could not be.
    news: Option<File>,
}

impl Claim {
    /// One that this open file holds already: it came from another process, or through `execve(2)`.
    ///
    /// # Errors
    /// `ESTALE` when it has lost its lease; those of reading it.
    pub fn adopt(tree: &Tree, key: Key, file: File) -> io::Result<Claim> {
        let epoch = epoch_of(&file)?;
        let now = boot_now()?;
        let ttl = Ttl::default().as_duration();
        let mut claim = Claim::new(key, epoch, file, ttl, now);
        claim.note_renewal(tree, now);
        Ok(claim)
    }

    /// One with this time to live, renewed now on `CLOCK_BOOTTIME`.
    pub fn new(key: Key, epoch: u64, file: File, ttl: Duration, now: Duration) -> Claim {
        Claim { key, epoch, file, ttl, renewed_at: now, due_at: now, complained: false, news: None }
    }

    /// The key.
    pub fn key(&self) -> &Key {
        &self.key
    }

    /// The epoch of this attempt.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The holder handle: `POLLERR` says that the lease is lost.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// The holder handle, with the lease.
    pub fn into_file(self) -> File {
        self.file
    }

    /// Its time to live, as of the last renewal.
    pub fn ttl(&self) -> Duration {
        self.ttl
    }

    /// Last renewal, on `CLOCK_BOOTTIME`.
    pub fn renewed_at(&self) -> Duration {
        self.renewed_at
    }

    /// Puts off the next renewal until this time on `CLOCK_BOOTTIME`.
    pub fn postpone(&mut self, until: Duration) {
        self.due_at = until;
    }

    /// When it is to be renewed, on `CLOCK_BOOTTIME`.
    pub fn due_at(&self) -> Duration {
        self.due_at
    }

    /// Renews the lease by setting its file's time.
    pub fn renew(&mut self, tree: &Tree) -> nix::Result<Renewal> {
        let now = boot_now()?;
        match renew_by(&self.file) {
            Ok(()) => {
                self.note_renewal(tree, now);
                Ok(Renewal::Kept)
            }
            Err(Errno::ESTALE) => Ok(Renewal::Lost),
            // Nobody answers any more; the lease still runs to its end.
            Err(_) if now >= self.renewed_at + self.ttl => Ok(Renewal::Lost),
            Err(errno) => {
                if !self.complained {
                    complain(format_args!("{}: cannot be renewed: {}: trying again", self.key, errno.desc()));
                    self.complained = true;
                }
                self.due_at = (now + RETRY.min(self.ttl / 10)).min(self.renewed_at + self.ttl);
                Ok(Renewal::Failed)
            }
        }
    }

    /// The lease is this attempt's still.
    pub fn is_held(&self) -> bool {
        !matches!(self.file.read_at(&mut [0; 32], 0), Err(error) if error.raw_os_error() == Some(libc::ESTALE))
    }

    fn note_renewal(&mut self, tree: &Tree, at: Duration) {
        // The TTL may have been changed by xattr, ours or another process of this uid.
        if let Some(status) = self.read_news(tree)
            && status.epoch == self.epoch
            && let Some(ttl_ms) = status.ttl_ms
        {
            self.ttl = Duration::from_millis(ttl_ms);
        }
        self.renewed_at = at;
        self.due_at = at + self.ttl / 3;
        self.complained = false;
    }

    /// Reports `POLLPRI` when something has changed that [`Claim::take_notice`] is to look at.
    pub fn news(&self) -> Option<BorrowedFd<'_>> {
        self.news.as_ref().map(AsFd::as_fd)
    }

    /// Looks at what has changed: the TTL may have been set by another process of this uid.
    ///
    /// # Errors
    /// There is no clock.
    pub fn take_notice(&mut self, tree: &Tree) -> nix::Result<()> {
        match self.read_news(tree) {
            Some(status) => self.follow(&status).map(drop),
            None => Ok(()),
        }
    }

    /// Another process, of which this one has a copy of the handle, renewed the lease at this time on `CLOCK_BOOTTIME`.
    pub fn was_renewed(&mut self, at: Duration) {
        self.renewed_at = self.renewed_at.max(at);
    }

    /// Renews in time for the TTL that the key has now, which counts from when it was set. Whether it is another.
    ///
    /// # Errors
    /// There is no clock.
    pub fn follow(&mut self, status: &Status) -> nix::Result<bool> {
        let ttl = status.ttl_ms.map_or(self.ttl, Duration::from_millis);
        if status.epoch != self.epoch || ttl == self.ttl {
            return Ok(false);
        }
        let now = boot_now()?;
        if let Some(expires_ms) = status.expires.as_deref().and_then(show::parse_ms) {
            let left = Duration::from_millis(u64::try_from(expires_ms - show::now_ms()).unwrap_or(0));
            self.renewed_at = (now + left.min(ttl)).saturating_sub(ttl);
        }
        self.ttl = ttl;
        self.due_at = now;
        Ok(true)
    }

    /// A file that cannot be read is not kept: it would report for ever.
    fn read_news(&mut self, tree: &Tree) -> Option<Status> {
        self.news = None;
        let file = tree.open_status(&self.key).ok()??;
        let status = Status::read(&file).ok()?;
        self.news = Some(file);
        Some(status)
    }

    /// How the loss of this lease is told.
    pub fn loss(&self) -> String {
        format!("{}: epoch {} lost its lease: see `leasefs history {}` for why", self.key, self.epoch, self.key)
    }
}

/// Renews those that are due; gives the first that is lost.
pub fn renew_due<'a>(claims: &'a mut [Claim], tree: &Tree) -> nix::Result<Option<&'a Claim>> {
    for claim in claims {
        if claim.due_at <= boot_now()? && claim.renew(tree)? == Renewal::Lost {
            return Ok(Some(claim));
        }
    }
    Ok(None)
}

/// Takes every key, in bytewise order; what was taken is given back when one is refused.
pub fn take_all(tree: &Tree, keys: &[Key], ttl: Option<Ttl>, patience: Patience) -> Result<Vec<Claim>, Refusal> {
    let mut ordered = keys.to_vec();
    ordered.sort();
    let mut taken = Vec::with_capacity(ordered.len());
    for key in ordered {
        match take(tree, key, ttl, patience, &mut taken, &[]) {
            Ok(claim) => taken.push(claim),
            Err(refusal) => {
                give_back(taken);
                return Err(refusal);
            }
        }
    }
    Ok(taken)
}

/// Takes one key. A wait in line ends, too, when one of `until` becomes readable or hangs up.
pub fn take_one(
    tree: &Tree,
    key: Key,
    ttl: Option<Ttl>,
    patience: Patience,
    until: &[BorrowedFd<'_>],
) -> Result<Claim, Refusal> {
    take(tree, key, ttl, patience, &mut [], until)
}

/// Takes a key that is free and not finished, by exclusive create: it is done once.
pub fn create(tree: &Tree, key: Key, ttl: Option<Ttl>) -> Result<Claim, Refusal> {
    let path = tree.claim(&key);
    let opened = OpenOptions::new().read(true).write(true).create_new(true).mode(0o666).open(path);
    let file = match opened {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let why = tree.status(&key).ok().flatten().map_or_else(|| "held by another".to_owned(), |s| s.in_the_way());
            return Err(Refusal::Held(format!("{key}: {why}")));
        }
        Err(error) => return Err(Refusal::Failed(not_opened(tree, &key, error))),
    };
    claimed(tree, key, file, ttl)
}

/// Closes the holder handles, the last taken first.
pub fn give_back(mut claims: Vec<Claim>) {
    while claims.pop().is_some() {}
}

fn take(
    tree: &Tree,
    key: Key,
    ttl: Option<Ttl>,
    patience: Patience,
    taken: &mut [Claim],
    until: &[BorrowedFd<'_>],
) -> Result<Claim, Refusal> {
    let file = open(tree, &key)?;
    lock(tree, &key, &file, patience, taken, until)?;
    claimed(tree, key, file, ttl)
}

/// What is done with a handle that has just got the lease.
fn claimed(tree: &Tree, key: Key, file: File, ttl: Option<Ttl>) -> Result<Claim, Refusal> {
    if let Some(ttl) = ttl {
        set_ttl(&file, ttl).map_err(|error| trouble(format_args!("{key}: its TTL cannot be set to {ttl}"), error))?;
    }
    let refused = |error: io::Error| match error.raw_os_error() {
        Some(libc::ESTALE) => Refusal::Lost(format!("{key}: lost its lease at once: run it again, with a longer TTL")),
        _ => Refusal::Failed(trouble(&key, error)),
    };
    // The grant may be some time ago. Counted from before a renewal, a lease ends no earlier than is believed here.
    let now = boot_now()?;
    renew_by(&file).map_err(|errno| refused(errno.into()))?;
    let epoch = epoch_of(&file).map_err(refused)?;
    let ttl = ttl.unwrap_or_default().as_duration();
    let mut claim = Claim::new(key, epoch, file, ttl, now);
    claim.note_renewal(tree, now);
    Ok(claim)
}

fn open(tree: &Tree, key: &Key) -> anyhow::Result<File> {
    // std adds O_CLOEXEC: the command must not inherit the lease.
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o666);
    options.open(tree.claim(key)).map_err(|error| not_opened(tree, key, error))
}

fn not_opened(tree: &Tree, key: &Key, error: io::Error) -> anyhow::Error {
    match error.raw_os_error() {
        Some(libc::ENOENT) => {
            let path = tree.claim(key);
            let namespace = path.parent().unwrap_or(&path).display();
            anyhow!("{key}: its namespace does not exist: run `mkdir -p {namespace}`")
        }
        _ => trouble(key, error),
    }
}

fn lock(
    tree: &Tree,
    key: &Key,
    file: &File,
    patience: Patience,
    taken: &mut [Claim],
    until: &[BorrowedFd<'_>],
) -> Result<(), Refusal> {
    match lock_at_once(file) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
        done => return done.map_err(|error| Refusal::Failed(not_locked(key, error))),
    }
    let held = |waited: &str| {
        let status = tree.status(key).ok().flatten().filter(|status| !status.is_open());
        let by = status.map_or_else(|| "held by another".to_owned(), |status| status.in_the_way());
        Refusal::Held(format!("{key}: {by}{waited}"))
    };
    match patience {
        Patience::None => Err(held("")),
        Patience::Until(end, limit) => match wait_in_line(tree, key, file, Some(end), taken, until)? {
            true => Ok(()),
            false => Err(held(&format!(" (waited {} s)", limit.as_secs_f64()))),
        },
        Patience::Endless => wait_in_line(tree, key, file, None, taken, until).map(|_| ()),
    }
}

/// Waits for the lock; false when the time is over.
fn wait_in_line(
    tree: &Tree,
    key: &Key,
    file: &File,
    end: Option<Instant>,
    taken: &mut [Claim],
    until: &[BorrowedFd<'_>],
) -> Result<bool, Refusal> {
    let alarm = Alarm::install()?;
    let (stop_seen, stop) = std::io::pipe().map_err(|error| trouble(key, error))?;
    let stop_seen = OwnedFd::from(stop_seen);
    let (locked, lost) = thread::scope(|scope| {
        let beside = scope.spawn(|| beside_the_wait(tree, key, &stop_seen, taken, until));
        if let Some(end) = end {
            Alarm::ring_in(end.saturating_duration_since(Instant::now()));
        }
        let locked = loop {
            match flock(file, libc::LOCK_EX) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {
                    let over = end.is_some_and(|end| Instant::now() >= end);
                    if over || beside.is_finished() {
                        break Ok(false);
                    }
                }
                Err(error) => break Err(not_locked(key, error)),
                Ok(()) => break Ok(true),
            }
        };
        drop(stop);
        (locked, beside.join())
    });
    drop(alarm);
    match lost {
        Ok(Ok(None)) => Ok(locked?),
        Ok(Ok(Some(why))) => Err(Refusal::Lost(why)),
        Ok(Err(errno)) => Err(errno.into()),
        Err(panic) => std::panic::resume_unwind(panic),
    }
}

/// What is done while `flock` waits. Ends, with the alarm rung, when a key already taken is lost, or nobody wants the key
/// any more.
fn beside_the_wait(
    tree: &Tree,
    key: &Key,
    stop: &OwnedFd,
    taken: &mut [Claim],
    until: &[BorrowedFd<'_>],
) -> nix::Result<Option<String>> {
    let watched = watch_beside(tree, key, stop, taken, until);
    if !matches!(watched, Ok(None)) {
        Alarm::ring_in(Duration::ZERO);
    }
    watched
}

fn watch_beside(
    tree: &Tree,
    key: &Key,
    stop: &OwnedFd,
    taken: &mut [Claim],
    until: &[BorrowedFd<'_>],
) -> nix::Result<Option<String>> {
    // The alarm is for the thread that waits.
    SigSet::all().thread_block()?;
    let timer = Timer::new()?;
    let mut mention = Mention::new(tree, key, boot_now()?);
    loop {
        let next = taken.iter().map(Claim::due_at).chain([mention.next()]).min();
        if let Some(next) = next {
            timer.ring_at(next)?;
        }
        let watched = [stop.as_fd(), timer.as_fd()].into_iter().chain(until.iter().copied());
        let mut fds: Vec<PollFd> = watched.map(|fd| PollFd::new(fd, PollFlags::POLLIN)).collect();
        let first_news = fds.len();
        fds.extend(taken.iter().filter_map(Claim::news).map(|news| PollFd::new(news, PollFlags::POLLPRI)));
        match poll(&mut fds, PollTimeout::NONE) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno),
        }
        if fds[0].any() == Some(true) {
            return Ok(None);
        }
        if fds[2..first_news].iter().any(|fd| fd.any() == Some(true)) {
            return Ok(Some(format!("{key}: no longer waited for")));
        }
        if fds[first_news..].iter().any(|fd| fd.any() == Some(true)) {
            drop(fds);
            taken.iter_mut().try_for_each(|claim| claim.take_notice(tree))?;
        }
        mention.say(boot_now()?);
        if let Some(lost) = renew_due(taken, tree)? {
            return Ok(Some(format!("{} (while waiting for {key})", lost.loss())));
        }
    }
}

fn not_locked(key: &Key, error: io::Error) -> anyhow::Error {
    match error.raw_os_error() {
        Some(libc::ENOLCK) => {
            anyhow!("{key}: the limit on keys or waiters is reached: try later, or see --max-keys and --max-waiters")
        }
        Some(libc::EACCES) => anyhow!("{key}: permission denied: you may not create files in its namespace"),
        _ => trouble(key, error),
    }
}

/// Locks an open file, if nobody else has the key.
///
/// # Errors
/// Those of `flock(2)`; `EWOULDBLOCK` where it is held.
pub fn lock_at_once(file: &File) -> io::Result<()> {
    flock(file, libc::LOCK_EX | libc::LOCK_NB)
}

fn flock(file: &File, operation: libc::c_int) -> io::Result<()> {
    // SAFETY: takes two integers and touches no memory of ours.
    match unsafe { libc::flock(file.as_raw_fd(), operation) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Renews the lease that this handle has.
fn renew_by(file: &File) -> nix::Result<()> {
    match futimens(file, &TimeSpec::UTIME_NOW, &TimeSpec::UTIME_NOW) {
        // The kernel does not say through which handle, so that is for the process alone that took the lease. This may
        // be another, with a copy of the handle, or one that the server cannot see. Truncation comes with the handle.
        // Locking would not do: were the lease given back, it would take a new one.
        Err(Errno::EACCES) => ftruncate(file, 0),
        answer => answer,
    }
}

/// Sets the time to live of the attempt that holds the file's key.
///
/// # Errors
/// Those of `fsetxattr(2)`.
pub fn set_ttl(file: &File, ttl: Ttl) -> io::Result<()> {
    set_attribute(file, c"user.lease.ttl", &ttl.to_string())
}

fn set_attribute(file: &File, name: &CStr, value: &str) -> io::Result<()> {
    // SAFETY: the name ends with NUL, and the value is `value.len()` readable bytes; both live through the call.
    let set = unsafe { libc::fsetxattr(file.as_raw_fd(), name.as_ptr(), value.as_ptr().cast(), value.len(), 0) };
    if set == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Names the agent that holds, on a handle that has the lease.
///
/// # Errors
/// Those of `fsetxattr(2)`.
pub fn set_agent(file: &File, name: &str) -> io::Result<()> {
    set_attribute(file, c"user.lease.agent", name)
}

/// `SIGALRM` as what ends a waiting `flock`, while it lives. Signal and timer belong to the process.
struct Alarm {
    action: SigAction,
    mask: SigSet,
}

impl Alarm {
    fn install() -> nix::Result<Alarm> {
        extern "C" fn interrupt(_: libc::c_int) {}
        let handler = SigAction::new(SigHandler::Handler(interrupt), SaFlags::empty(), SigSet::empty());
        // SAFETY: the handler does nothing, so it is safe at any point of the program.
        let action = unsafe { sigaction(Signal::SIGALRM, &handler) }?;
        let mut mask = SigSet::empty();
        pthread_sigmask(SigmaskHow::SIG_UNBLOCK, Some(&SigSet::from(Signal::SIGALRM)), Some(&mut mask))?;
        Ok(Alarm { action, mask })
    }

    /// Sends the first `SIGALRM` after this long, and then one every [`ALARM_INTERVAL`].
    fn ring_in(first: Duration) {
        set_interval_timer(first.max(Duration::from_micros(1)), ALARM_INTERVAL);
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        set_interval_timer(Duration::ZERO, Duration::ZERO);
        // Restoring what was there cannot fail: both values came from the kernel.
        // SAFETY: the action is the one that was in force before.
        let _ = unsafe { sigaction(Signal::SIGALRM, &self.action) };
        let _ = self.mask.thread_set_mask();
    }
}

fn set_interval_timer(first: Duration, interval: Duration) {
    let timeval = |duration: Duration| libc::timeval {
        tv_sec: duration.as_secs().try_into().unwrap_or(libc::time_t::MAX),
        tv_usec: duration.subsec_micros().into(),
    };
    let value = libc::itimerval { it_interval: timeval(interval), it_value: timeval(first) };
    // SAFETY: `value` is a valid itimerval that lives through the call, and the old value is not asked for.
    unsafe { libc::setitimer(libc::ITIMER_REAL, &raw const value, std::ptr::null_mut()) };
}
