//! A typed client for a mounted tree, blocking, and no more than a thin layer: everything here is done with the files
//! of the tree, as any other program does it, so it needs nothing but the mountpoint.
//!
//! ```no_run
//! use leasefs::Key;
//! use leasefs::client::{Error, Lease, Tree};
//! use std::io::Write;
//!
//! let tree = Tree::from_env()?; // LEASEFS_ROOT
//! let key = Key::parse("reports/june")?;
//! match Lease::try_claim(&tree, &key) {
//!     Ok(lease) => {
//!         println!("attempt {}", lease.epoch());
//!         let mut result = lease.result_writer();
//!         write!(result, "all is well")?;
//!         result.commit()?; // an error here means: not accepted
//!     } // dropped here, the lease ends
//!     Err(Error::Held(_)) => println!("somebody else is at it"),
//!     Err(error) => return Err(error.into()),
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! A [`Lease`] is the holder handle. Its descriptor is close-on-exec, so a program started meanwhile does not inherit the
//! lease; a `fork` without `exec` does, and then the lease ends when both copies are gone (contract §1). What another
//! process can do with a copy is in [`handle`]; what anybody sees of a key, in [`Status`].

pub mod handle;
mod lease;
mod result;
pub mod status;
mod tree;

use std::io;
use std::path::PathBuf;

pub use lease::Lease;
pub use result::ResultWriter;
pub use status::Status;
pub use tree::Tree;

use crate::key::Key;

/// What the tree refused, or what is wrong with it. Nothing is held, and no epoch taken, when a claim returns one.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Another holds or shares the key, or it is promised to the first in line.
    #[error("{0}: held by another: try later, or wait in line")]
    Held(Key),
    /// The key is finished: exclusive create is refused, a lock is not.
    #[error("{0}: finished: its result is there already")]
    Finished(Key),
    /// A signal ended the wait; the place in line is gone.
    #[error("{0}: the wait was interrupted by a signal")]
    Interrupted(Key),
    /// This attempt lost its lease or was superseded: nothing of it is accepted any more.
    #[error("{key}: epoch {epoch} lost its lease: stop, and claim again for a new epoch")]
    Lost {
        /// The key.
        key: Key,
        /// The attempt.
        epoch: u64,
    },
    /// The attempt has its result already, or another user's uid.
    #[error("{key}: epoch {epoch} takes no result from here: it has one, or belongs to another user")]
    NotAccepted {
        /// The key.
        key: Key,
        /// The attempt.
        epoch: u64,
    },
    /// There is no such namespace or attempt.
    #[error("{0}: there is no such namespace or attempt: a namespace is made with mkdir below claims/")]
    NotFound(Key),
    /// The namespace does not let this user claim.
    #[error("{0}: permission denied: whoever may create files in its namespace may claim")]
    Denied(Key),
    /// No tree is mounted there.
    #[error("{}: no leasefs tree is mounted here: run `leasefs mount`", .0.display())]
    NotATree(PathBuf),
    /// Anything else the system says: a full disk, a limit, a lost connection.
    #[error("{path}: {source}", path = .path.display())]
    Io {
        /// What it is about.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
}
