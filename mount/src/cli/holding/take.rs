//! Taking keys, all or none: at once, in line, or by exclusive create.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::BorrowedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::time::{Duration, Instant};

use anyhow::anyhow;
use leasefs::client::handle;
use leasefs::{Key, Ttl};

use super::claim::Claim;
use super::in_line::{Wait, Waited};
use crate::cli::show;
use crate::cli::tree::{Tree, trouble};

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
    /// At most this long from now; without a limit, as long as it takes.
    pub fn of(limit: Option<Duration>) -> Patience {
        match limit {
            Some(Duration::ZERO) => Patience::None,
            Some(limit) => Patience::Until(Instant::now() + limit, limit),
            None => Patience::Endless,
        }
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
    let path = tree.files.claim_path(&key);
    let opened = OpenOptions::new().read(true).write(true).create_new(true).mode(0o666).open(path);
    let file = match opened {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let why =
                tree.status(&key).ok().flatten().map_or_else(|| "held by another".to_owned(), |s| show::in_the_way(&s));
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
        handle::set_ttl(&file, ttl)
            .map_err(|error| trouble(format_args!("{key}: its TTL cannot be set to {ttl}"), error))?;
    }
    Claim::granted(tree, key.clone(), file, ttl).map_err(|error| match error.raw_os_error() {
        Some(libc::ESTALE) => Refusal::Lost(format!("{key}: lost its lease at once: run it again, with a longer TTL")),
        _ => Refusal::Failed(trouble(&key, error)),
    })
}

fn open(tree: &Tree, key: &Key) -> anyhow::Result<File> {
    // std adds O_CLOEXEC: the command must not inherit the lease.
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o666);
    options.open(tree.files.claim_path(key)).map_err(|error| not_opened(tree, key, error))
}

fn not_opened(tree: &Tree, key: &Key, error: io::Error) -> anyhow::Error {
    match error.raw_os_error() {
        Some(libc::ENOENT) => {
            let path = tree.files.claim_path(key);
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
    match handle::try_lock(file) {
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
        done => return done.map_err(|error| Refusal::Failed(not_locked(key, error))),
    }
    let held = |waited: &str| {
        let status = tree.status(key).ok().flatten().filter(|status| !status.is_open());
        let by = status.map_or_else(|| "held by another".to_owned(), |status| show::in_the_way(&status));
        Refusal::Held(format!("{key}: {by}{waited}"))
    };
    let (end, waited) = match patience {
        Patience::None => return Err(held("")),
        Patience::Until(end, limit) => (Some(end), format!(" (waited {} s)", limit.as_secs_f64())),
        Patience::Endless => (None, String::new()),
    };
    match (Wait { tree, key, taken, until }).lock(file, end) {
        Ok(Waited::Locked) => Ok(()),
        Ok(Waited::TimeOver) => Err(held(&waited)),
        Ok(Waited::Broken(why)) => Err(Refusal::Lost(why)),
        Err(error) => Err(Refusal::Failed(not_locked(key, error))),
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
