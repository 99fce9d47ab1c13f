//! Which number a client gets for which refusal: contract §8, in one exhaustive table.

use fuser::Errno;
use leasefs::Error;
use leasefs::key::BadKey;

/// The errno of an engine error.
pub fn errno(error: &Error) -> Errno {
    match error {
        Error::Taken | Error::Exists => Errno::EEXIST,
        Error::WouldBlock => Errno::EAGAIN,
        Error::Interrupted => Errno::EINTR,
        Error::Stale => Errno::ESTALE,
        Error::Busy => Errno::EBUSY,
        Error::Denied => Errno::EACCES,
        Error::NotPermitted => Errno::EPERM,
        Error::NotFound => Errno::ENOENT,
        Error::NotEmpty => Errno::ENOTEMPTY,
        Error::BadKey(BadKey::Malformed) | Error::BadTtl(_) | Error::Invalid(_) => Errno::EINVAL,
        Error::BadKey(BadKey::NotUtf8) => Errno::EILSEQ,
        Error::BadKey(BadKey::TooLong) => Errno::ENAMETOOLONG,
        Error::TooLarge(_) => Errno::EFBIG,
        Error::Limit(_) => Errno::ENOLCK,
        // The contract knows two faults of the state directory; EROFS or EDQUOT of the disk below would read as if
        // they were about the mounted tree.
        Error::Storage { errno: libc::ENOSPC | libc::EDQUOT, .. } => Errno::ENOSPC,
        Error::Storage { .. } => Errno::EIO,
    }
}
