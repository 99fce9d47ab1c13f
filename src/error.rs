//! Everything the engine refuses, and why. The mount's errno table gives each its number (contract §8).

use std::io;

use crate::key::BadKey;
use crate::ttl::BadTtl;

/// A refusal or a fault. Nothing was granted when one is returned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// Exclusive create of a key that is held, shared, reporting, finished or promised. `EEXIST`.
    #[error("the key is held or finished")]
    Taken,
    /// A lock that was asked not to wait. `EAGAIN`.
    #[error("the key is held by another")]
    WouldBlock,
    /// The wait was ended by a signal. `EINTR`.
    #[error("the wait was interrupted")]
    Interrupted,
    /// This handle or attempt lost its lease, or was superseded. `ESTALE`.
    #[error("this attempt is no longer registered")]
    Stale,
    /// Others may not unlink a held key. `EBUSY`.
    #[error("the key is held by another process")]
    Busy,
    /// Not the holder, or the namespace does not let the caller claim. `EACCES`.
    #[error("permission denied")]
    Denied,
    /// Immutable, or an operation this tree does not have. `EPERM`.
    #[error("not permitted in this tree")]
    NotPermitted,
    /// No such key, attempt or namespace. `ENOENT`.
    #[error("no such key or attempt")]
    NotFound,
    /// The name is taken by a key or a namespace. `EEXIST`.
    #[error("a path is a key or a namespace, never both")]
    Exists,
    /// A namespace that still has something in it. `ENOTEMPTY`.
    #[error("the namespace is not empty")]
    NotEmpty,
    /// A key whose name §1 rules out. `EINVAL`, `EILSEQ` or `ENAMETOOLONG`.
    #[error(transparent)]
    BadKey(#[from] BadKey),
    /// `EINVAL`.
    #[error(transparent)]
    BadTtl(#[from] BadTtl),
    /// A bad argument of another kind. `EINVAL`.
    #[error("{0}")]
    Invalid(&'static str),
    /// A note or a result over its limit. `EFBIG`.
    #[error("too large: {0}")]
    TooLarge(&'static str),
    /// Too many waiters or keys for one uid, or no number is left. `ENOLCK`.
    #[error("limit reached: {0}")]
    Limit(&'static str),
    /// The state directory's own fault, by its errno. `ENOSPC` or `EIO`; others as they are.
    #[error("state directory: {message}")]
    Storage {
        /// The errno the client gets.
        errno: i32,
        /// What went wrong.
        message: String,
    },
}

/// `EIO`, the same on every Linux architecture.
const EIO: i32 = 5;

impl Error {
    /// A fault of the state directory; without an errno of its own it is `EIO`.
    pub fn storage(errno: Option<i32>, message: impl Into<String>) -> Error {
        Error::Storage { errno: errno.unwrap_or(EIO), message: message.into() }
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Error {
        Error::storage(error.raw_os_error(), error.to_string())
    }
}
