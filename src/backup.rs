//! A copy of a state directory that can be served in its place, made while it is being served or not.
//!
//! The registry comes first, as of one moment; then the files of the results it has. A result's file is there before its
//! row and never changes after, so each row of the copy finds its file, and a result that comes meanwhile is not in it.
//! What is not in it either: open drafts, the log, and the seal, which speaks of the directory it is in.

use std::fs::{self, DirBuilder, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crate::error::Error;
use crate::ids::{Epoch, KeyId};
use crate::registry::sqlite::{FILE, Reader};
use crate::results::Results;

/// What a backup holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backup {
    /// Keys.
    pub keys: usize,
    /// Attempts.
    pub attempts: usize,
    /// Results.
    pub results: usize,
    /// Bytes of all results.
    pub result_bytes: u64,
}

/// How far a backup has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// The registry is being copied and checked.
    Registry,
    /// Results come next, so many of them.
    Results(usize),
    /// One of them is copied.
    Result,
    /// All is copied; the disk is waited for.
    Sync,
}

/// Copies a state directory to `dest`, which must not exist or be an empty directory; it appears there whole and synced,
/// or not at all. What `extra` names is copied along where it is there: files of a directory that nobody serves. `told`
/// hears of each step when it begins.
///
/// # Errors
/// [`Error::Storage`] about the state directory, or about `dest` with what to do; then what was copied is removed.
pub fn backup(state_dir: &Path, dest: &Path, extra: &[&str], told: &dyn Fn(Step)) -> Result<Backup, Error> {
    told(Step::Registry);
    check_free(dest)?;
    // No prune deletes a file whose row was copied.
    let _still = Results::at(state_dir).lock_shared();
    let reader = Reader::open(state_dir)?;
    let parent = dest.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let partial = Partial::create(dest)?;
    let about = |error: &io::Error| at(dest, error, hint(error));
    reader.copy_to(&partial.0.join(FILE)).map_err(|error| told_of(dest, error))?;
    let copy = Reader::open(&partial.0)?;
    let (keys, attempts) = copy.snapshot()?;
    drop(copy);
    let mut made = Backup { keys: keys.len(), attempts: attempts.len(), results: 0, result_bytes: 0 };
    let (from, to) = (Results::at(state_dir), Results::at(&partial.0));
    private_dir(&partial.0.join("results")).map_err(|e| about(&e))?;
    told(Step::Results(attempts.iter().filter(|attempt| attempt.result.is_some()).count()));
    for attempt in &attempts {
        let Some((size, _)) = attempt.result else { continue };
        told(Step::Result);
        let (key, epoch) = (KeyId(attempt.key_id), Epoch(attempt.epoch));
        let (source, target) = (from.result(key, epoch), to.result(key, epoch));
        let bytes = link_or_copy(&source, &target).map_err(|(path, error)| match error.kind() {
            ErrorKind::NotFound => at(&source, &error, "run `leasefs verify` on the state directory"),
            _ if path == source => at(&source, &error, "run `leasefs verify` on the state directory"),
            _ => about(&error),
        })?;
        if bytes != size {
            return Err(Error::storage(
                None,
                format!(
                    "{} has {bytes} bytes, its result {size}: run `leasefs verify` on the state directory",
                    source.display()
                ),
            ));
        }
        made.results += 1;
        made.result_bytes += size;
    }
    for name in extra {
        let source = state_dir.join(name);
        match fs::copy(&source, partial.0.join(name)) {
            Ok(_) => {}
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(about(&error)),
        }
    }
    fs::set_permissions(partial.0.join(FILE), fs::Permissions::from_mode(0o600)).map_err(|e| about(&e))?;
    told(Step::Sync);
    // All files at once: one by one, each would wait for the disk.
    sync_filesystem(&partial.0).map_err(|e| about(&e))?;
    fs::rename(&partial.0, dest).map_err(|error| match error.kind() {
        ErrorKind::DirectoryNotEmpty | ErrorKind::AlreadyExists => exists(dest),
        ErrorKind::ResourceBusy | ErrorKind::CrossesDevices => {
            at(dest, &error, "it is a mountpoint: give a directory in it that does not exist")
        }
        _ => about(&error),
    })?;
    partial.keep();
    File::open(parent).and_then(|dir| dir.sync_all()).map_err(|e| about(&e))?;
    Ok(made)
}

/// The copy under a name of its own until it is whole; removed if it never is.
struct Partial(PathBuf);

impl Partial {
    fn create(dest: &Path) -> Result<Partial, Error> {
        let mut name = dest.as_os_str().to_owned();
        name.push(".partial");
        let path = PathBuf::from(name);
        match private_dir(&path) {
            Ok(()) => Ok(Partial(path)),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => Err(Error::storage(
                error.raw_os_error(),
                format!("{} exists: another backup is being made, or one was interrupted: remove it", path.display()),
            )),
            Err(error) => Err(at(dest, &error, hint(&error))),
        }
    }

    fn keep(mut self) {
        self.0 = PathBuf::new();
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        if !self.0.as_os_str().is_empty() {
            let _ = fs::remove_dir_all(&self.0);
        }
    }
}

fn private_dir(path: &Path) -> io::Result<()> {
    DirBuilder::new().mode(0o700).create(path)
}

fn check_free(dest: &Path) -> Result<(), Error> {
    match fs::read_dir(dest) {
        Ok(mut entries) => {
            if entries.next().is_none() {
                Ok(())
            } else {
                Err(exists(dest))
            }
        }
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotADirectory && dest.exists() => Err(exists(dest)),
        Err(error) => Err(at(dest, &error, hint(&error))),
    }
}

fn exists(dest: &Path) -> Error {
    const EEXIST: i32 = 17;
    Error::storage(Some(EEXIST), format!("{} exists: give a directory that does not, or an empty one", dest.display()))
}

/// A second name for the same bytes where that can be, since they never change; else a copy. The bytes it has, or what
/// went wrong with which file.
fn link_or_copy(source: &Path, target: &Path) -> Result<u64, (PathBuf, io::Error)> {
    let of = |path: &Path| {
        let path = path.to_owned();
        move |error| (path, error)
    };
    if fs::hard_link(source, target).is_ok() {
        return fs::metadata(target).map(|meta| meta.len()).map_err(of(target));
    }
    let mut input = File::open(source).map_err(of(source))?;
    let mut output = File::create_new(target).map_err(of(target))?;
    output.set_permissions(fs::Permissions::from_mode(0o600)).map_err(of(target))?;
    io::copy(&mut input, &mut output).map_err(of(target))
}

fn sync_filesystem(dir: &Path) -> io::Result<()> {
    let dir = File::open(dir)?;
    rustix::fs::syncfs(&dir).map_err(io::Error::from)
}

fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded => {
            "what was copied is removed: free some space, or give a directory on another filesystem"
        }
        ErrorKind::NotFound => "the directory it is to be in must exist: mkdir it first",
        ErrorKind::ReadOnlyFilesystem | ErrorKind::PermissionDenied => "give a directory in one that you may write to",
        _ => "give a directory elsewhere",
    }
}

fn at(path: &Path, error: &io::Error, hint: &str) -> Error {
    Error::storage(error.raw_os_error(), format!("{}: {error}: {hint}", path.display()))
}

/// The copy's own fault, told of the place it was to be in; a fault of the registry speaks for itself.
fn told_of(dest: &Path, error: Error) -> Error {
    const ENOSPC: i32 = 28;
    match error {
        Error::Storage { errno: ENOSPC, .. } => {
            let full = io::Error::from_raw_os_error(ENOSPC);
            at(dest, &full, hint(&full))
        }
        other => other,
    }
}
