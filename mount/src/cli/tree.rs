//! The mounted tree as the commands see it: where it is, what a KEY argument means, what `status/KEY` says.
//!
//! Commands use the tree as any other program does, through its files; only `history` and `verify` look behind it.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, anyhow, bail};
use leasefs::Key;
use leasefs::registry::sqlite::Reader;
use nix::errno::Errno;
use nix::unistd::{AccessFlags, access};
use serde::Deserialize;

use super::show;
use crate::failure::{self, Failure};
use crate::mountinfo;

/// Which tree is meant.
#[derive(clap::Args, Debug, Default)]
pub struct TreeArgs {
    /// Mountpoint of the tree [default: the one around the working directory, else the only one]
    #[arg(long, env = "LEASEFS_ROOT", value_name = "DIR")]
    pub root: Option<PathBuf>,
}

/// A mounted tree.
#[derive(Clone)]
pub struct Tree {
    root: PathBuf,
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

/// `status/KEY`: contract §2.
#[derive(Clone, Debug, Deserialize)]
pub struct Status {
    /// The line it was read from.
    #[serde(skip)]
    pub json: String,
    /// The key.
    pub key: String,
    /// `free`, `held`, `shared`, `reporting`, `orphaned` or `finished`.
    pub state: String,
    /// The newest epoch; 0 before the first.
    pub epoch: u64,
    /// Who holds it, or none.
    #[serde(default)]
    pub holder: Option<Holder>,
    /// Start of the present state's attempt, RFC 3339.
    #[serde(default)]
    pub since: Option<String>,
    /// Last renewal, RFC 3339.
    #[serde(default)]
    pub renewed: Option<String>,
    /// End of the TTL, RFC 3339.
    #[serde(default)]
    pub expires: Option<String>,
    /// Time to live in milliseconds.
    #[serde(default)]
    pub ttl_ms: Option<u64>,
    /// `create` or `lock`.
    #[serde(default)]
    pub via: Option<String>,
    /// Locks waiting in line.
    #[serde(default)]
    pub waiters: u64,
    /// The first hundred of them, in order.
    #[serde(default)]
    pub line: Vec<Waiting>,
    /// Holders of shared locks.
    #[serde(default)]
    pub sharers: u64,
    /// The first hundred of them.
    #[serde(default)]
    pub sharing: Vec<Sharing>,
    /// The holder's note.
    #[serde(default)]
    pub note: Option<String>,
    /// The agent that it works for.
    #[serde(default)]
    pub agent: Option<String>,
    /// How the newest ended attempt ended.
    #[serde(default)]
    pub outcome: Option<String>,
    /// Why an orphaned key is not free yet.
    #[serde(default)]
    pub orphaned_why: Option<String>,
    /// The newest committed result.
    #[serde(default)]
    pub result: Option<Committed>,
}

/// The process that holds a key.
#[derive(Clone, Debug, Deserialize)]
pub struct Holder {
    /// Process id, as the server sees it; 0 where it does not.
    pub pid: u32,
    /// When it started, in clock ticks since boot: tells it from a later process of the same number.
    #[serde(default)]
    pub start_time: u64,
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Its command.
    #[serde(default)]
    pub command: String,
}

/// A process in line.
#[derive(Clone, Debug, Deserialize)]
pub struct Waiting {
    /// Process id, as the server sees it; 0 where it does not.
    pub pid: u32,
    /// When it started, in clock ticks since boot.
    pub start_time: u64,
    /// User id.
    pub uid: u32,
    /// Its command.
    pub command: String,
    /// Since when it waits, RFC 3339.
    pub since: String,
    /// `exclusive` or `shared`.
    pub mode: String,
}

/// A process that has a shared lock.
#[derive(Clone, Debug, Deserialize)]
pub struct Sharing {
    /// Process id, as the server sees it; 0 where it does not.
    pub pid: u32,
    /// When it started, in clock ticks since boot.
    pub start_time: u64,
    /// User id.
    #[allow(dead_code, reason = "for whoever looks for the process itself")]
    pub uid: u32,
    /// Its command.
    pub command: String,
}

/// A committed result.
#[derive(Clone, Debug, Deserialize)]
pub struct Committed {
    /// The attempt it is of.
    pub epoch: u64,
    /// Bytes.
    pub size: u64,
    /// When, RFC 3339.
    pub committed: String,
}

impl Status {
    /// Reads the status an open `status/KEY` has now.
    pub fn read(mut file: &File) -> io::Result<Status> {
        // One line, so there is nothing after its end: whoever reads very many of them does not ask again each time.
        let (mut bytes, mut buffer) = (Vec::new(), [0; 8 * 1024]);
        while !bytes.ends_with(b"\n") {
            match file.read(&mut buffer) {
                Ok(0) => break,
                Ok(length) => bytes.extend_from_slice(&buffer[..length]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        let line = std::str::from_utf8(&bytes).map_err(io::Error::other)?.trim_end();
        let mut status: Status = serde_json::from_str(line)?;
        status.json = line.to_owned();
        Ok(status)
    }

    /// Nobody holds it and no draft keeps it.
    pub fn is_open(&self) -> bool {
        matches!(self.state.as_str(), "free" | "finished")
    }

    /// Who is in the way and for how long: `held by pid 7 (make), uid 0, agent planner, for 3s`.
    pub fn in_the_way(&self) -> String {
        let mut text = match (&self.holder, self.state.as_str()) {
            (Some(holder), _) => {
                let agent = self.agent.as_deref().map(|name| format!(", agent {}", show::cell(name)));
                format!(
                    "{} by pid {} ({}), uid {}{}",
                    self.state,
                    holder.pid,
                    show::cell(&holder.command),
                    holder.uid,
                    agent.unwrap_or_default()
                )
            }
            (None, "shared") => format!("shared by {}", self.sharers),
            (None, "free") if self.waiters > 0 => format!("promised to the first of {} waiting", self.waiters),
            (None, state) => state.to_owned(),
        };
        if let Some(since_ms) = self.since.as_deref().and_then(show::parse_ms) {
            text += &format!(", for {}", show::span(show::now_ms() - since_ms));
        }
        text
    }
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
        match fs::metadata(root.join(".leasefs/version")) {
            Ok(_) => {
                let root = fs::canonicalize(root).with_context(|| root.display().to_string())?;
                Ok(Tree { root })
            }
            Err(error) => match error.raw_os_error() {
                Some(libc::ENOENT | libc::ENOTDIR) => bail!(Failure::NoTree { path: failure::shown(root) }),
                Some(libc::EACCES) => bail!(Failure::TreeShut { path: failure::shown(root) }),
                _ => Err(trouble(root.display(), error)),
            },
        }
    }

    /// The mountpoint, absolute.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// `claims/KEY`.
    pub fn claim(&self, key: &Key) -> PathBuf {
        self.root.join("claims").join(key.as_str())
    }

    /// `results/KEY/EPOCH`.
    pub fn result(&self, key: &Key, epoch: u64) -> PathBuf {
        self.root.join("results").join(key.as_str()).join(epoch.to_string())
    }

    /// `status/PATH`.
    pub fn status_path(&self, path: &str) -> PathBuf {
        self.root.join("status").join(path)
    }

    /// `.leasefs/NAME`.
    pub fn control(&self, name: &str) -> PathBuf {
        self.root.join(".leasefs").join(name)
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
        let claims = self.root.join("claims");
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
    pub fn open_status(&self, key: &Key) -> Result<Option<File>> {
        match File::open(self.status_path(key.as_str())) {
            Ok(file) if file.metadata().is_ok_and(|meta| meta.is_dir()) => Err(no_key(key)),
            Ok(file) => Ok(Some(file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(trouble(key, error)),
        }
    }

    /// Reads `status/KEY`; none if there never was such a key.
    pub fn status(&self, key: &Key) -> Result<Option<Status>> {
        let read = File::open(self.status_path(key.as_str())).and_then(|file| Status::read(&file));
        match read {
            Ok(status) => Ok(Some(status)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::IsADirectory => Err(no_key(key)),
            Err(error) => Err(trouble(key, error)),
        }
    }

    /// Reads `.leasefs/config`, and has the server record what it decided so far, so that whoever goes on to read the
    /// registry finds it there.
    pub fn config(&self) -> Result<Config> {
        let path = self.control("config");
        let read = || {
            let mut file = fs::File::open(&path)?;
            file.sync_all()?;
            io::read_to_string(&mut file)
        };
        let text = read().map_err(|error| trouble(path.display(), error))?;
        serde_json::from_str(&text).with_context(|| path.display().to_string())
    }
}

/// The state directory: as given, else of the mounted tree.
pub fn state_dir(given: Option<&Path>, tree: &TreeArgs) -> Result<PathBuf> {
    match given {
        Some(dir) => Ok(dir.to_owned()),
        None => match Tree::find(tree, &[]) {
            Ok(tree) => Ok(tree.config()?.state_dir),
            Err(error) => Err(anyhow!("{error:#}, or give a state directory with --state")),
        },
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

fn no_key(subject: impl std::fmt::Display) -> anyhow::Error {
    anyhow!(Failure::IsNamespace { subject: subject.to_string() })
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
        let tree = Tree { root: PathBuf::from("/mnt/a") };
        assert_eq!(tree.key("/mnt/a/claims/t/k").expect("key").as_str(), "t/k");
        assert_eq!(tree.key("t/k").expect("key").as_str(), "t/k");
        for bad in ["/mnt/a/status/k", "/mnt/a/claims", "/etc/passwd", "a//b", "../x", ""] {
            assert!(tree.key(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_status_may_gain_fields_and_lack_the_optional_ones() {
        let text = r#"{"key":"k","state":"held","epoch":3,"holder":{"pid":7,"start_time":1,"uid":0,"gid":0,"command":"make\nall"},"new":1}"#;
        let status: Status = serde_json::from_str(text).expect("parses");
        assert_eq!(status.in_the_way(), "held by pid 7 (make\\nall), uid 0");
        assert!(!status.is_open());
    }
}
