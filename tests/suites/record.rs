//! What a worker writes into its log: one line per fact, with the worker's own clock.
//!
//! A call is two lines, one before the system call and one after it returned, so a worker killed inside a call leaves
//! the first alone. Each line is one `write(2)`: a kill leaves whole lines, or nothing of one.
use serde::{Deserialize, Serialize};

use crate::sys::errno_name;

/// A way to claim. All of them are one lease.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Form {
    /// `O_CREAT|O_EXCL`.
    Create,
    /// `flock(LOCK_EX)`.
    Flock,
    /// `F_OFD_SETLK`, `F_OFD_SETLKW`.
    Ofd,
    /// `F_SETLK`, `F_SETLKW`.
    Posix,
    /// `flock(LOCK_SH)`: no lease, but excludes them.
    Share,
}

/// A way to renew.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Renewal {
    /// `write` of a note.
    Note,
    /// `futimens`.
    Touch,
    /// The lock taken once more.
    Relock,
}

/// A way to let go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ending {
    /// `close` of the last copy.
    Close,
    /// The same, by a forked child. If its parent was just being killed, that had one more.
    ChildsClose,
    /// `LOCK_UN` or `F_UNLCK`.
    Unlock,
    /// `unlink` by the holder.
    Unlink,
    /// The process leaves with the handle open.
    Exit,
}

/// One call on a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op {
    /// Claim, waiting in line or not.
    Claim {
        /// How.
        form: Form,
        /// Whether the call may wait.
        wait: bool,
    },
    /// Read of the own handle: the epoch.
    Epoch,
    /// Renewal on the own handle.
    Renew(Renewal),
    /// `user.lease.ttl` on the held file, in milliseconds.
    Ttl(u64),
    /// Release.
    Release(Ending),
    /// The epoch `status/KEY` tells.
    Observe,
    /// Open of `results/KEY/EPOCH` for writing.
    Draft(u64),
    /// Write to the draft.
    Write,
    /// `fsync` of the draft.
    Commit,
    /// `close` of the draft.
    Finish,
    /// `unlink` of the key by one who does not hold it: forgets a finished key, or is refused.
    Forget,
    /// `evict` of exactly this epoch.
    Evict(u64),
    /// A call that changes no lease.
    Side(Side),
}

/// A call that changes no lease, and never waits for one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Side {
    /// `open` of a key's file that is there or not, without `O_CREAT`.
    Open,
    /// `read` of a key's record by a handle that holds nothing.
    Read,
    /// `open` that may make the file, to lock it.
    Handle,
    /// `stat` of a key that is there or not.
    Stat,
    /// `stat` of a directory that is there.
    StatDir,
    /// A directory read whole.
    List,
    /// `status/KEY` of a key that is known.
    Status,
    /// `poll` of `status/KEY` until a change that is sure to come.
    Poll,
    /// `poll` of a holder handle until its loss.
    HangUp,
    /// `.leasefs/events` read without waiting.
    Events,
    /// `.leasefs/metrics`, `config`, `version`.
    Text,
    /// `results/KEY/latest` of a key with a result.
    Latest,
    /// A committed result read whole.
    Result,
    /// `mkdir` of one's own namespace, which is not there.
    Mkdir,
    /// `rmdir` of one's own empty namespace.
    Rmdir,
    /// `chmod` of one's own namespace.
    Chmod,
    /// `rename` of a key.
    Rename,
    /// `user.lease.ttl` of one's own namespace.
    Ttl,
    /// `user.lease.ttl` of a lease, so short that it may run out before the answer.
    ShortTtl,
}

/// One line of a log. Times are nanoseconds of `CLOCK_BOOTTIME`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Line {
    /// The worker runs; its pid as the server's pid namespace sees it.
    Start {
        /// When.
        t: u64,
        /// The worker.
        pid: i32,
    },
    /// About to call.
    Ask {
        /// When.
        t: u64,
        /// The key.
        key: String,
        /// The call.
        op: Op,
    },
    /// The call returned.
    Got {
        /// When.
        t: u64,
        /// Its value or errno.
        answer: Result<u64, i32>,
    },
    /// Alive, and still holding what it held.
    Beat {
        /// When.
        t: u64,
    },
    /// For the reader of a history.
    Note {
        /// When.
        t: u64,
        /// What.
        text: String,
    },
    /// Something that may never be.
    Wrong {
        /// When.
        t: u64,
        /// What.
        text: String,
    },
}

impl Line {
    /// When it was written.
    pub fn time(&self) -> u64 {
        match self {
            Line::Start { t, .. }
            | Line::Ask { t, .. }
            | Line::Got { t, .. }
            | Line::Beat { t }
            | Line::Note { t, .. }
            | Line::Wrong { t, .. } => *t,
        }
    }
}

/// Whether the contract lets this call answer so, in some state of the key. An errno outside this list is a violation
/// by itself, whatever the history.
pub fn allowed(op: &Op, errno: i32) -> bool {
    use libc::{EACCES, EAGAIN, EBUSY, EEXIST, EINTR, ENOENT, EPERM, ESTALE};
    let list: &[i32] = match op {
        Op::Claim { form: Form::Create, .. } => &[EEXIST],
        Op::Claim { wait: true, .. } => &[EINTR],
        Op::Claim { wait: false, .. } => &[EAGAIN],
        Op::Epoch | Op::Write | Op::Renew(Renewal::Note | Renewal::Relock) => &[ESTALE],
        // The kernel sends neither with the file handle, so a process that holds nothing any more is only "not the holder".
        Op::Renew(Renewal::Touch) | Op::Ttl(_) => &[ESTALE, EACCES, EPERM, ENOENT],
        Op::Release(Ending::Close | Ending::ChildsClose | Ending::Exit) | Op::Observe => &[],
        Op::Release(Ending::Unlock) => &[ESTALE],
        Op::Release(Ending::Unlink) => &[ENOENT, EBUSY, ESTALE, EACCES, EPERM],
        Op::Draft(_) | Op::Commit => &[ESTALE, EPERM, EACCES],
        // A commit at close has nobody to tell its error to, but the flush may try.
        Op::Finish => &[ESTALE, EPERM],
        Op::Forget => &[ENOENT, EBUSY, EACCES, EPERM],
        Op::Evict(_) => &[ESTALE, EACCES],
        Op::Side(Side::Open | Side::Stat) => &[ENOENT],
        Op::Side(Side::Events) => &[EAGAIN],
        Op::Side(Side::ShortTtl) => &[ESTALE],
        Op::Side(Side::Rename) => &[EPERM, ENOENT],
        Op::Side(_) => &[],
    };
    list.contains(&errno)
}

/// An answer for people.
pub fn describe(answer: &Option<Result<u64, i32>>) -> String {
    match answer {
        None => "never returned".into(),
        Some(Ok(value)) => format!("ok {value}"),
        Some(Err(errno)) => errno_name(*errno),
    }
}
