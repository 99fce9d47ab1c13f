//! What SQLite's faults mean: the errno a client gets, and what the operator of a damaged registry is told to do.

use std::path::Path;

use crate::error::Error;

/// What to do about a registry that cannot be trusted. To serve an older one would give epochs out again.
pub const REMEDY: &str = "keep the state directory as it is, look at it with `leasefs verify --state`, and mount the newest \
                      backup made by `leasefs backup` in its place, or another --state";

pub(super) fn corrupt(path: &Path, what: &str) -> Error {
    Error::storage(None, format!("{} is damaged ({what}): {REMEDY}", path.display()))
}

/// A registry that is not the one this directory had.
pub(super) fn lost(path: &Path, what: &str) -> Error {
    Error::storage(None, format!("{} is damaged: {what}: {REMEDY}", path.display()))
}

/// SQLite's error with the errno a client should see: a full disk is `ENOSPC`, the rest is `EIO`.
pub(super) fn fault(error: &rusqlite::Error) -> Error {
    const ENOSPC: i32 = 28;
    // What the log's shared index cannot grow for lack of space has a code of its own.
    let is_full = error.sqlite_error_code() == Some(rusqlite::ErrorCode::DiskFull)
        || error.sqlite_error().is_some_and(|error| error.extended_code == rusqlite::ffi::SQLITE_IOERR_SHMSIZE);
    let errno = is_full.then_some(ENOSPC);
    let message = match error.sqlite_error_code() {
        Some(rusqlite::ErrorCode::DatabaseCorrupt | rusqlite::ErrorCode::NotADatabase) => {
            format!("the registry is damaged ({error}): {REMEDY}")
        }
        _ => format!("registry: {error}"),
    };
    Error::storage(errno, message)
}
