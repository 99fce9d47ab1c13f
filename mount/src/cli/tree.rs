//! The mounted tree as the commands see it: where it is, what a KEY argument means, and in which words they say what is
//! wrong with either.
//!
//! Commands use the tree as any other program does, through its files, of which [`client`] knows. Those that look behind
//! it read the registry of its state directory.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use leasefs::Key;
use leasefs::client::{self, Status};
use leasefs::registry::sqlite::Reader;
use nix::errno::Errno;
use nix::unistd::{AccessFlags, access};
use serde::Deserialize;

use super::{complain, show};
use crate::failure::{self, Failure};
use crate::mountinfo;

/// Which tree is meant.
#[derive(clap::Args, Debug, Default)]
pub struct TreeArgs {
    /// Mountpoint of the tree [default: the one around the working directory, else the only one]
    #[arg(long, env = "LEASEFS_ROOT", value_name = "DIR")]
    pub root: Option<PathBuf>,
}

/// Which state directory is meant.
#[derive(clap::Args, Debug)]
pub struct StateArgs {
    /// State directory, for a tree that is not mounted
    #[arg(long, value_name = "DIR")]
    pub state: Option<PathBuf>,
    /// The tree.
    #[command(flatten)]
    pub tree: TreeArgs,
}

impl StateArgs {
    /// The directory: as given, else of the mounted tree.
    ///
    /// # Errors
    /// No tree is found, or it does not say.
    pub fn dir(&self) -> Result<PathBuf> {
        match &self.state {
            Some(dir) => Ok(dir.clone()),
            None => Ok(self.find_tree()?.config()?.state_dir),
        }
    }

    /// The mounted tree, where no directory is given.
    ///
    /// # Errors
    /// None is found: then a directory is to be given.
    pub fn find_tree(&self) -> Result<Tree> {
        Tree::find(&self.tree, &[]).map_err(|error| anyhow!("{error:#}, or give a state directory with --state"))
    }
}

/// A mounted tree.
#[derive(Clone)]
pub struct Tree {
    /// Its files.
    pub files: client::Tree,
}

/// `.leasefs/config`, as far as commands need it.
#[derive(Deserialize)]
pub struct Config {
    /// Where the registry and the results are.
    pub state_dir: PathBuf,
    /// Most bytes a result may have.
    #[serde(default)]
    pub max_result: Option<u64>,
}

impl Tree {
    /// Finds the tree: by `--root` or `LEASEFS_ROOT`, else by an absolute path among the keys, else by the working
    /// directory, else as the only leasefs mount.
    pub fn find(args: &TreeArgs, keys: &[String]) -> Result<Tree> {
        let root = match &args.root {
            Some(root) => root.clone(),
            None => choose(
                &mountinfo::trees().context("/proc/self/mountinfo")?,
                keys,
                std::env::current_dir().ok().as_deref(),
            )?,
        };
        Tree::at(&root)
    }

    fn at(root: &Path) -> Result<Tree> {
        match client::Tree::at(root).and_then(client::Tree::canonical) {
            Ok(files) => Ok(Tree { files }),
            Err(client::Error::NotATree(_)) => bail!(Failure::NoTree { path: failure::shown(root) }),
            Err(client::Error::Io { source, .. }) if source.raw_os_error() == Some(libc::EACCES) => {
                bail!(Failure::TreeShut { path: failure::shown(root) })
            }
            Err(error) => Err(told(root.display(), error)),
        }
    }

    /// The tree, and the key that a KEY argument means in it.
    ///
    /// # Errors
    /// As [`Tree::find`] and [`Tree::key`].
    pub fn find_with_key(args: &TreeArgs, text: &str) -> Result<(Tree, Key)> {
        let tree = Tree::find(args, &[text.to_owned()])?;
        let key = tree.key(text)?;
        Ok((tree, key))
    }

    /// The mountpoint, absolute.
    pub fn root(&self) -> &Path {
        self.files.root()
    }

    /// A KEY argument: a path below `claims/`, or its absolute path.
    pub fn key(&self, text: &str) -> Result<Key> {
        let relative = self.relative(text)?;
        Key::parse(&relative).map_err(|bad| anyhow!("{}: not a key: {bad}", show::plain(text)))
    }

    /// An argument without the tree's own part, if it is an absolute path.
    pub fn relative(&self, text: &str) -> Result<String> {
        if !text.starts_with('/') {
            return Ok(text.to_owned());
        }
        let claims = self.root().join("claims");
        let path = Path::new(text);
        // The mountpoint may have been reached through a symlink; the key itself need not exist.
        let resolved = || Some(fs::canonicalize(path.parent()?).ok()?.join(path.file_name()?));
        let below = path
            .strip_prefix(&claims)
            .map(Path::to_path_buf)
            .ok()
            .or_else(|| resolved()?.strip_prefix(&claims).map(Path::to_path_buf).ok());
        below
            .and_then(|below| below.into_os_string().into_string().ok())
            .ok_or_else(|| anyhow!(Failure::OutsideTree { path: show::plain(text), claims: failure::shown(&claims) }))
    }

    /// Opens `status/KEY`; none if there never was such a key.
    ///
    /// # Errors
    /// Those of the tree.
    pub fn open_status(&self, key: &Key) -> Result<Option<File>> {
        self.files.open_status(key).map_err(|error| told(key, error))
    }

    /// Reads `status/KEY`; none if there never was such a key.
    ///
    /// # Errors
    /// It is a namespace; those of the tree.
    pub fn status(&self, key: &Key) -> Result<Option<Status>> {
        self.files.status(key).map_err(|error| told(key, error))
    }

    /// As [`Tree::status`], and says it where there never was such a key.
    ///
    /// # Errors
    /// As [`Tree::status`].
    pub fn status_of_known(&self, key: &Key) -> Result<Option<Status>> {
        let status = self.status(key)?;
        if status.is_none() {
            complain(never_held(key));
        }
        Ok(status)
    }

    /// Reads `.leasefs/config`, and has the server record what it decided so far, so that whoever goes on to read the
    /// registry finds it there.
    pub fn config(&self) -> Result<Config> {
        let path = self.files.control_path("config");
        let read = || {
            let mut file = fs::File::open(&path)?;
            file.sync_all()?;
            io::read_to_string(&mut file)
        };
        let text = read().map_err(|error| trouble(path.display(), error))?;
        serde_json::from_str(&text).with_context(|| path.display().to_string())
    }
}

/// Opens the registry of a state directory for reading, also while it is being served.
pub fn open_registry(dir: &Path) -> Result<Reader> {
    // Told apart here, since the database would only say that it cannot open its file. Not by opening it: closing a
    // second descriptor would drop the database's own locks.
    let path = dir.join("registry.db");
    match access(&path, AccessFlags::R_OK) {
        Ok(()) => Reader::open(dir).with_context(|| path.display().to_string()),
        Err(Errno::ENOENT) => bail!(Failure::NoRegistry { path: failure::shown(dir) }),
        Err(Errno::EACCES) => bail!(Failure::StateShut { path: failure::shown(dir) }),
        Err(errno) => Err(trouble(path.display(), errno.into())),
    }
}

/// An error of the system about `subject`, with what to do where that is known.
pub fn trouble(subject: impl std::fmt::Display, error: io::Error) -> anyhow::Error {
    match Failure::of(&subject, &error) {
        Some(failure) => anyhow!(failure),
        None => anyhow!(error).context(subject.to_string()),
    }
}

/// What the client library says about `subject`, in the commands' words.
fn told(subject: impl std::fmt::Display, error: client::Error) -> anyhow::Error {
    match error {
        client::Error::Io { source, .. } => trouble(subject, source),
        other => anyhow!(other),
    }
}

/// Of a key that never was.
pub fn never_held(key: &Key) -> String {
    format!("{key}: was never held: check the name, or see `leasefs ls --all`")
}

/// Picks one of the mounts.
fn choose(mounts: &[PathBuf], keys: &[String], cwd: Option<&Path>) -> Result<PathBuf> {
    let paths = keys.iter().filter(|key| key.starts_with('/')).map(Path::new).chain(cwd);
    for path in paths {
        let around = mounts.iter().filter(|mount| path.starts_with(mount));
        if let Some(mount) = around.max_by_key(|mount| mount.as_os_str().len()) {
            return Ok(mount.clone());
        }
    }
    match mounts {
        [mount] => Ok(mount.clone()),
        [] => bail!(Failure::NoTreeAtAll),
        several => {
            let list: Vec<_> = several.iter().map(|mount| mount.display().to_string()).collect();
            bail!(Failure::SeveralTrees { list: list.join(", ") })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_working_directory_then_the_only_mount_decides() {
        let two = [PathBuf::from("/mnt/a"), PathBuf::from("/mnt/a/deep")];
        let chosen = |keys: &[&str], cwd: &str| {
            let keys: Vec<String> = keys.iter().map(|key| (*key).to_owned()).collect();
            choose(&two, &keys, Some(Path::new(cwd))).ok()
        };
        assert_eq!(chosen(&[], "/mnt/a/deep/claims"), Some(two[1].clone()));
        assert_eq!(chosen(&[], "/mnt/a/claims"), Some(two[0].clone()));
        assert_eq!(chosen(&["k", "/mnt/a/deep/claims/k"], "/mnt/a"), Some(two[1].clone()));
        assert_eq!(chosen(&[], "/mnt/ab"), None);
        assert_eq!(choose(&two[..1], &[], None).ok(), Some(two[0].clone()));
        assert!(choose(&[], &[], None).is_err());
    }

    #[test]
    fn an_absolute_path_below_claims_names_a_key() {
        let dir = tempfile::tempdir().expect("a directory");
        // No tree is mounted there, but it has the file that one is known by.
        fs::create_dir_all(dir.path().join(".leasefs/version")).expect("made");
        let tree = Tree::at(dir.path()).expect("a tree");
        let below = |path: &str| tree.root().join(path).to_str().expect("UTF-8").to_owned();
        assert_eq!(tree.key(&below("claims/t/k")).expect("key").as_str(), "t/k");
        assert_eq!(tree.key("t/k").expect("key").as_str(), "t/k");
        for bad in [&below("status/k"), &below("claims"), "/etc/passwd", "a//b", "../x", ""] {
            assert!(tree.key(bad).is_err(), "{bad:?}");
        }
    }
}
