//! A walk through `status/`, while keys come and namespaces go: what the tree says of each key.

use std::fs;
use std::io;

use anyhow::Result;
use leasefs::Key;
use leasefs::client::Status;

use super::complain;
use super::show;
use super::tree::{Tree, trouble};

/// What a walk found.
#[derive(Debug, Default)]
pub struct Listing {
    /// What was asked for, in no order.
    pub found: Vec<Status>,
    /// Namespaces that may not be read.
    pub shut: usize,
}

/// Reads the status of every key whose name begins with `prefix`; `seen` hears of each.
///
/// # Errors
/// Those of the tree, with what to do. Keys and namespaces that go meanwhile are none.
pub fn walk(tree: &Tree, prefix: &str, seen: &mut dyn FnMut(&Status)) -> Result<Listing> {
    walk_through("status", tree, prefix, seen)
}

/// The same of the keys that somebody has or waits for, and of the finished ones: not of those that are free, of which there
/// may be very many more. Others may be among them.
///
/// # Errors
/// As above.
pub fn walk_used(tree: &Tree, prefix: &str, seen: &mut dyn FnMut(&Status)) -> Result<Listing> {
    // What is only shared has no file. Whoever waits, waits for a key that is held or shared.
    match shared_keys(tree) {
        Some(0) => walk_files(tree, prefix, seen),
        _ => walk(tree, prefix, seen),
    }
}

/// How many keys are shared; none where the server does not tell.
fn shared_keys(tree: &Tree) -> Option<u64> {
    let metrics = fs::read_to_string(tree.files.control_path("metrics")).ok()?;
    metrics.lines().find_map(|line| line.strip_prefix("leasefs_shared ")?.parse().ok())
}

/// The same of the keys that have a file in `claims/` only: most of those that matter, and few where most keys are free.
///
/// # Errors
/// As above.
pub fn walk_files(tree: &Tree, prefix: &str, seen: &mut dyn FnMut(&Status)) -> Result<Listing> {
    walk_through("claims", tree, prefix, seen)
}

fn walk_through(subtree: &'static str, tree: &Tree, prefix: &str, seen: &mut dyn FnMut(&Status)) -> Result<Listing> {
    let mut walk = Walk { subtree, tree, prefix, seen, listing: Listing::default() };
    walk.namespace(prefix.rsplit_once('/').map_or("", |(namespace, _)| namespace), true)?;
    Ok(walk.listing)
}

/// A PREFIX argument without the tree's own part. An absolute path loses its last slash when it is taken apart, and that
/// slash has a meaning here.
///
/// # Errors
/// Where it is a path of something else.
pub fn prefix(tree: &Tree, text: &str) -> Result<String> {
    let claims = tree.root().join("claims");
    if text.starts_with('/') && std::path::Path::new(text) == claims {
        return Ok(String::new());
    }
    let mut prefix = tree.relative(text)?;
    if text.ends_with('/') && !prefix.is_empty() && !prefix.ends_with('/') {
        prefix.push('/');
    }
    Ok(prefix)
}

/// Reads what others may remove meanwhile, or remove and make again: then what was opened is stale, or to the kernel a bad
/// inode, and is read anew; and so is what the server's replacement cut off, on a kernel that does not resend. None where it
/// is gone; or was not there, as where nothing begins with a prefix.
fn unless_gone<T>(read: impl Fn() -> io::Result<T>) -> io::Result<Option<T>> {
    const TRIES: usize = 100;
    let mut tries = 0;
    loop {
        tries += 1;
        match read() {
            Ok(found) => return Ok(Some(found)),
            Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {
                return Ok(None);
            }
            Err(error)
                if matches!(error.raw_os_error(), Some(libc::ESTALE | libc::EIO | libc::EINTR)) && tries < TRIES => {}
            Err(error) => return Err(error),
        }
    }
}

struct Walk<'a> {
    subtree: &'static str,
    tree: &'a Tree,
    prefix: &'a str,
    seen: &'a mut dyn FnMut(&Status),
    listing: Listing,
}

impl Walk<'_> {
    fn namespace(&mut self, namespace: &str, is_asked_for: bool) -> Result<()> {
        let directory = self.tree.root().join(self.subtree).join(namespace);
        // All of it before the first is looked at: it may have to be read anew.
        let entries = match unless_gone(|| fs::read_dir(&directory)?.collect::<io::Result<Vec<_>>>()) {
            Ok(entries) => entries.unwrap_or_default(),
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied && !is_asked_for => {
                self.listing.shut += 1;
                return Ok(());
            }
            Err(error) => return Err(trouble(directory.display(), error)),
        };
        for entry in entries {
            let Ok(name) = entry.file_name().into_string() else { continue };
            let path = if namespace.is_empty() { name } else { format!("{namespace}/{name}") };
            let is_dir = entry.file_type().is_ok_and(|kind| kind.is_dir());
            if is_dir && (path.starts_with(self.prefix) || self.prefix.starts_with(&format!("{path}/"))) {
                self.namespace(&path, false)?;
            } else if !is_dir && path.starts_with(self.prefix) {
                self.key(&path)?;
            }
        }
        Ok(())
    }

    fn key(&mut self, path: &str) -> Result<()> {
        let key = match Key::parse(path) {
            Ok(key) => key,
            Err(bad) => {
                complain(format_args!("{}: passed over: {bad}", show::plain(path)));
                return Ok(());
            }
        };
        let read = || Status::read(&fs::File::open(self.tree.files.status_path(&key))?);
        if let Some(status) = unless_gone(read).map_err(|error| trouble(&key, error))? {
            (self.seen)(&status);
            self.listing.found.push(status);
        }
        Ok(())
    }
}
