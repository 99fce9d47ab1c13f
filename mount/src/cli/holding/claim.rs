//! A key that is held: its handle, and its renewal in time for the TTL it has.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use leasefs::client::{Status, handle};
use leasefs::{Key, Ttl};
use nix::errno::Errno;

use super::time::boot_now;
use crate::cli::tree::{Tree, trouble};
use crate::cli::{complain, show};

/// Pause before a renewal that failed for a reason other than the lease's loss is tried again, at most.
const RETRY: Duration = Duration::from_secs(1);

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
        let epoch = handle::epoch(&file)?;
        let now = boot_now()?;
        let ttl = Ttl::default().as_duration();
        let mut claim = Claim::new(key, epoch, file, ttl, now);
        claim.note_renewal(tree, now);
        Ok(claim)
    }

    /// One whose lease this open file has just got.
    ///
    /// # Errors
    /// `ESTALE` when it has lost it again; those of renewing and of reading it.
    pub fn granted(tree: &Tree, key: Key, file: File, ttl: Option<Ttl>) -> io::Result<Claim> {
        // The grant may be some time ago. Counted from before a renewal, a lease ends no earlier than is believed here.
        let now = boot_now()?;
        handle::renew(&file)?;
        let epoch = handle::epoch(&file)?;
        let ttl = ttl.unwrap_or_default().as_duration();
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
        match handle::renew(&self.file) {
            Ok(()) => {
                self.note_renewal(tree, now);
                Ok(Renewal::Kept)
            }
            Err(error) if error.raw_os_error() == Some(libc::ESTALE) => Ok(Renewal::Lost),
            // Nobody answers any more; the lease still runs to its end.
            Err(_) if now >= self.renewed_at + self.ttl => Ok(Renewal::Lost),
            Err(error) => {
                if !self.complained {
                    let why = error.raw_os_error().map(Errno::from_raw).unwrap_or(Errno::UnknownErrno).desc();
                    complain(format_args!("{}: cannot be renewed: {why}: trying again", self.key));
                    self.complained = true;
                }
                self.due_at = (now + RETRY.min(self.ttl / 10)).min(self.renewed_at + self.ttl);
                Ok(Renewal::Failed)
            }
        }
    }

    /// Names the agent that holds.
    ///
    /// # Errors
    /// Those of the tree, in the commands' words.
    pub fn set_agent(&self, name: &str) -> anyhow::Result<()> {
        handle::set_agent(&self.file, name)
            .map_err(|error| trouble(format_args!("{}: its agent cannot be set to {name}", self.key), error))
    }

    /// The lease is this attempt's still.
    pub fn is_held(&self) -> bool {
        !matches!(handle::epoch(&self.file), Err(error) if error.raw_os_error() == Some(libc::ESTALE))
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
