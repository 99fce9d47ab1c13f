//! Keeping an attempt until it is over, or until whom it is kept for is gone.
//!
//! Renewing needs a sign of life: a process that lives, a text that is seen. Without one the lease runs to its TTL.
//! Ending needs a proof. A tree that does not answer is neither: the handle is kept, since it is what keeps the attempt
//! alive (as an orphan), and once the tree is served again the attempt is taken back.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use anyhow::Result;
use leasefs::client::{Status, handle};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::binding::{Bound, Sentinel};
use super::claim::{Claim, Renewal};
use super::time::{Timer, boot_now};
use crate::cli::tree::Tree;
use crate::cli::{order, show};

/// Between two attempts to reach a tree that does not answer.
const RETRY: Duration = Duration::from_secs(1);

/// What shows that an attempt is still wanted.
pub enum Liveness {
    /// Nothing.
    Unbound,
    /// A process.
    Process(Bound),
    /// A text in the process table, and the watch over it.
    Sentinel(String, Sentinel),
}

impl Liveness {
    /// Readable, or hung up, when it is proven to be gone.
    fn end(&self) -> Option<BorrowedFd<'_>> {
        match self {
            Liveness::Unbound => None,
            Liveness::Process(bound) => Some(bound.as_fd()),
            Liveness::Sentinel(_, sentinel) => Some(sentinel.as_fd()),
        }
    }

    fn has_shown_itself(&self, since: Duration, now: Duration) -> bool {
        match self {
            Liveness::Unbound => false,
            // It would have been told of its end.
            Liveness::Process(_) => true,
            Liveness::Sentinel(_, sentinel) => sentinel.is_seen_since(since, now),
        }
    }

    /// Has signs of life looked for often enough for this TTL.
    fn look_within(&self, ttl: Duration) {
        if let Liveness::Sentinel(_, sentinel) = self {
            sentinel.look_within(ttl);
        }
    }

    /// Why the attempt ends with it.
    fn epitaph(&self) -> String {
        match self {
            Liveness::Unbound => String::new(),
            Liveness::Process(bound) => format!("process {} has ended", bound.process.pid),
            Liveness::Sentinel(text, _) => format!("no process has {text} in its command line"),
        }
    }
}

/// What the tree says of the attempt.
enum Standing {
    /// It goes on; the file tells of the next change.
    Held(File),
    /// As an orphan: its handle is of a connection that is gone.
    Orphaned,
    /// It is over.
    Over,
    /// The tree does not answer.
    Unknown,
}

/// Keeps the attempt until it is over, and gives it back when that is for want of a sign of life.
///
/// # Errors
/// Descriptors or timers are not to be had.
pub fn until_over(tree: &Tree, mut claim: Claim, liveness: &Liveness) -> Result<()> {
    let timer = Timer::new()?;
    // When it is over by itself, for a tree that does not answer; on CLOCK_BOOTTIME.
    let mut ends_at = boot_now()? + claim.ttl();
    loop {
        let standing = standing(tree, &mut claim, &mut ends_at)?;
        liveness.look_within(claim.ttl());
        match standing {
            Standing::Over => return Ok(()),
            Standing::Unknown if boot_now()? >= ends_at => return Ok(()),
            Standing::Orphaned => {
                if let Some(again) = take_back(tree, &claim) {
                    claim = again;
                    continue;
                }
            }
            Standing::Held(_) | Standing::Unknown => {}
        }
        if let Standing::Held(_) = standing
            && renew(tree, &mut claim, liveness)? == Renewal::Lost
        {
            return Ok(());
        }
        let wake_at = match (&standing, liveness) {
            (Standing::Held(_), Liveness::Unbound) => None,
            (Standing::Held(_), _) => Some(claim.due_at()),
            _ => Some(boot_now()? + RETRY),
        };
        match wake_at {
            Some(at) => timer.ring_at(at)?,
            None => timer.stop()?,
        }
        if sleep(&timer, liveness, &standing, &claim)? {
            // Exactly this attempt; if it is over already, closing the handle does nothing more.
            let _ = order::send(tree, "release", claim.key(), claim.epoch(), Some(&liveness.epitaph()));
            return Ok(());
        }
    }
}

/// Renews what is due and wanted.
fn renew(tree: &Tree, claim: &mut Claim, liveness: &Liveness) -> Result<Renewal> {
    let now = boot_now()?;
    if matches!(liveness, Liveness::Unbound) || claim.due_at() > now {
        return Ok(Renewal::Kept);
    }
    if liveness.has_shown_itself(claim.renewed_at(), now) {
        return Ok(claim.renew(tree)?);
    }
    claim.postpone(now + (claim.ttl() / 20).clamp(Duration::from_millis(20), RETRY));
    Ok(Renewal::Kept)
}

fn standing(tree: &Tree, claim: &mut Claim, ends_at: &mut Duration) -> Result<Standing> {
    let seen = match tree.open_status(claim.key()) {
        Ok(Some(file)) => Status::read(&file).ok().map(|status| (file, status)),
        Ok(None) | Err(_) => None,
    };
    let Some((file, status)) = seen else { return Ok(Standing::Unknown) };
    if status.epoch != claim.epoch() {
        return Ok(Standing::Over);
    }
    if let Some(expires_ms) = status.expires.as_deref().and_then(show::parse_ms) {
        let left_ms = u64::try_from(expires_ms - show::now_ms()).unwrap_or(0);
        *ends_at = boot_now()? + Duration::from_millis(left_ms);
    }
    claim.follow(&status)?;
    Ok(match status.state.as_str() {
        "held" => Standing::Held(file),
        "orphaned" => Standing::Orphaned,
        _ => Standing::Over,
    })
}

/// Opens and locks the key again, as the process that holds it: it is given the same attempt.
fn take_back(tree: &Tree, claim: &Claim) -> Option<Claim> {
    let file = OpenOptions::new().read(true).write(true).open(tree.files.claim_path(claim.key())).ok()?;
    handle::try_lock(&file).ok()?;
    // Another epoch would be a lease that nobody asked for; it ends here.
    Claim::adopt(tree, claim.key().clone(), file).ok().filter(|again| again.epoch() == claim.epoch())
}

/// Sleeps until something happens; true when whom it is kept for is gone.
fn sleep(timer: &Timer, liveness: &Liveness, standing: &Standing, claim: &Claim) -> Result<bool> {
    let mut fds = vec![PollFd::new(timer.as_fd(), PollFlags::POLLIN)];
    let end = liveness.end();
    fds.extend(end.map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
    if let Standing::Held(status) = standing {
        fds.push(PollFd::new(status.as_fd(), PollFlags::POLLPRI));
        fds.push(PollFd::new(claim.file().as_fd(), PollFlags::empty()));
    }
    match poll(&mut fds, PollTimeout::NONE) {
        Ok(_) | Err(Errno::EINTR) => {}
        Err(errno) => return Err(errno.into()),
    }
    Ok(end.is_some() && fds[1].any() == Some(true))
}
