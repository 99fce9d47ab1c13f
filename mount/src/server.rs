//! The server: opens a state directory, connects it to a mountpoint, and answers until it is unmounted.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use fuser::{Session, SessionACL};
use leasefs::engine::Start;
use leasefs::registry::NamespaceRow;
use leasefs::registry::sqlite::SqliteRegistry;
use leasefs::results::Results;
use leasefs::{Config, Engine, Error, NamespaceId, RequestId, Ttl};
use nix::fcntl::{Flock, FlockArg};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::{getegid, geteuid};

use crate::fs::{Kept, LeaseFs, Settings, survivors};
use crate::kernel_mount::{self, Options};
use crate::openfiles::OpenFiles;
use crate::{clock, mountinfo, timekeeper};

/// How a tree is to be served.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Where it is mounted.
    pub mountpoint: PathBuf,
    /// Its state directory.
    pub state_dir: PathBuf,
    /// How it is mounted.
    pub options: Options,
    /// TTL where no namespace sets one.
    pub ttl: Ttl,
    /// What a success means for a power cut.
    pub durability: leasefs::engine::Durability,
    /// Most bytes in a result.
    pub max_result: u64,
    /// Most leases one uid may hold.
    pub max_keys: usize,
    /// Most lock requests of one uid that may wait.
    pub max_waiters: usize,
}

/// The log of a background server, in its state directory.
pub const LOG: &str = "leasefs.log";

/// Serves until the tree is unmounted, logging to the state directory where `log_there`. `ready` is called once it
/// answers.
///
/// # Errors
/// What is wrong and what to do; then nothing is mounted.
pub fn serve(plan: &Plan, log_there: bool, ready: impl FnOnce()) -> Result<()> {
    raise_file_limit();
    let timeout_s = kernel_mount::request_timeout_s();
    if timeout_s > 0 {
        tracing::warn!(
            "fs.fuse.max_request_timeout is {timeout_s} s: a wait longer than that would end the mount; set it to 0"
        );
        bail!(
            "fs.fuse.max_request_timeout is {timeout_s} s, and one longer wait would end the whole mount: \
             run `sysctl fs.fuse.max_request_timeout=0`"
        );
    }
    let mountpoint = kernel_mount::check_mountpoint(&plan.mountpoint)?;
    let state_dir = make_state_dir(&plan.state_dir, &mountpoint)?;
    let _lock = lock_state(&state_dir)?;
    if log_there {
        redirect_log(&state_dir)?;
    }
    let files = Arc::new(OpenFiles::alone()?);
    let engine = open_engine(plan, &state_dir, &files, false)?;
    let settings = Settings {
        version: env!("CARGO_PKG_VERSION"),
        state_dir: state_dir.clone(),
        ttl_ms: plan.ttl.as_millis(),
        durability: plan.durability,
        max_result: plan.max_result,
        max_keys: plan.max_keys,
        max_waiters: plan.max_waiters,
        allow_other: plan.options.allow_other,
        resend: true,
        mount_owner: geteuid().as_raw(),
        pid: std::process::id(),
    };
    // Blocked before any thread is made, so that only the thread that waits for them gets them.
    let signals: SigSet = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP].into_iter().collect();
    signals.thread_block().context("signals")?;
    let connection = kernel_mount::connect(&mountpoint, &plan.options)?;
    let mounted = Unmount(mountpoint.clone());
    let fs = LeaseFs::new(engine, settings, connection.as_fd().try_clone_to_owned()?, files)?;
    // The kernel lets in whom the mount options say; permissions inside are the tree's.
    let session = Session::from_fd(fs.clone(), connection, SessionACL::All, fuser::Config::default())
        .context("the kernel does not speak FUSE as it is needed here")?;
    start_threads(&fs, mountpoint.clone(), signals)?;
    tracing::info!("serving {} from {}", mountpoint.display(), state_dir.display());
    std::thread::scope(|scope| {
        let running = scope.spawn(|| session.run());
        if !answers(&mountpoint) {
            tracing::warn!("{} does not answer yet", mountpoint.display());
        }
        ready();
        match running.join() {
            Ok(result) => result.context("the connection to the kernel broke"),
            Err(_) => bail!("the thread that answers requests failed: see the log above"),
        }
    })?;
    drop(mounted);
    fs.shared().engine.flush(clock::now());
    tracing::info!("unmounted {}", mountpoint.display());
    Ok(())
}

/// Unmounts when the server ends before somebody else did.
struct Unmount(PathBuf);

impl Drop for Unmount {
    fn drop(&mut self) {
        if mountinfo::is_leasefs(&self.0).is_ok_and(|mounted| mounted) {
            let _ = kernel_mount::disconnect(&self.0, true);
        }
    }
}

/// Whether the mounted root can be looked at: by another process, since the server must not touch its own mount.
fn answers(mountpoint: &Path) -> bool {
    let probe = std::process::Command::new("/proc/self/exe").arg("probe").arg(mountpoint).status();
    probe.is_ok_and(|status| status.success())
}

fn start_threads(fs: &LeaseFs, mountpoint: PathBuf, signals: SigSet) -> Result<()> {
    let shared = fs.shared();
    timekeeper::spawn("timekeeper", shared, |shared| {
        shared.timekeeper.run(|| shared.next_ns(), || shared.on_time());
    })?;
    timekeeper::spawn("writer", shared, |shared| {
        shared.writer.run(|| u64::MAX, || shared.on_write());
    })?;
    timekeeper::spawn("watcher", shared, |shared| shared.watcher.run(|wait| shared.on_signal(wait)))?;
    std::thread::Builder::new().name("signals".into()).spawn(move || unmount_on_signal(&mountpoint, signals))?;
    Ok(())
}

/// An orderly stop: unmounts; where files are open, the tree is taken out of sight and ends with the last of them, so
/// that no lease is cut short. A second signal does not wait for them.
fn unmount_on_signal(mountpoint: &Path, signals: SigSet) {
    let mut stopping = false;
    loop {
        match signals.wait() {
            Ok(Signal::SIGHUP) | Err(_) => continue,
            Ok(signal) => tracing::info!("{signal}: unmounting"),
        }
        if stopping {
            tracing::warn!("ending with files open: what is held stays held until its TTL, as orphaned");
            std::process::exit(1);
        }
        stopping = true;
        if kernel_mount::disconnect(mountpoint, false).is_ok() {
            continue;
        }
        match kernel_mount::disconnect(mountpoint, true) {
            Ok(()) => tracing::info!("files are open: serving them until the last one is closed"),
            Err(error) => tracing::error!("cannot unmount {}: {error}", mountpoint.display()),
        }
    }
}

/// Opens the engine of a state directory; `takeover` where its last server's connection lives on.
fn open_engine(plan: &Plan, state_dir: &Path, files: &Arc<OpenFiles>, takeover: bool) -> Result<Engine> {
    let explain = |error: Error| anyhow::anyhow!("state directory {}: {}", state_dir.display(), message(&error));
    let results = Results::open(state_dir).map_err(|error| explain(error.into()))?;
    let registry = SqliteRegistry::open(state_dir).map_err(explain)?;
    let now = clock::now();
    let now_ns = now.wall_ms * 1_000_000;
    let config = Config {
        ttl: plan.ttl,
        durability: plan.durability,
        max_result: plan.max_result,
        max_keys: plan.max_keys,
        max_waiters: plan.max_waiters,
        root: NamespaceRow {
            id: NamespaceId::ROOT,
            path: String::new(),
            present: true,
            made: 1,
            mode: if plan.options.allow_other { 0o777 } else { 0o700 },
            uid: geteuid().as_raw(),
            gid: getegid().as_raw(),
            atime_ns: now_ns,
            mtime_ns: now_ns,
            ctime_ns: now_ns,
            ttl_ms: None,
            request: RequestId(0),
        },
    };
    let boot_id = clock::boot_id().context("/proc is needed to tell one boot from another")?;
    if !takeover {
        results.drop_drafts(|_| false);
    }
    let memory = Box::new(Kept(Arc::clone(files)));
    let survivors = takeover.then(|| survivors(files));
    let start = Start { boot_id: &boot_id, now, memory, survivors };
    Engine::open(config, Box::new(registry), results, start).map_err(explain)
}

/// A storage fault's own words, without the frame that the caller gives.
fn message(error: &Error) -> String {
    match error {
        Error::Storage { message, errno: libc::ENOSPC } => {
            format!("{message}: free some space, or use another --state")
        }
        Error::Storage { message, errno: libc::EROFS } => {
            format!("{message}: remount it writable, or use another --state")
        }
        Error::Storage { message, .. } => message.clone(),
        other => other.to_string(),
    }
}

fn make_state_dir(path: &Path, mountpoint: &Path) -> Result<PathBuf> {
    let shown = path.display();
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty())
        && !parent.exists()
        && !is_default_parent(parent)
    {
        bail!("state directory {shown}: {} does not exist: mkdir it first", parent.display());
    }
    check_outside(path, mountpoint)?;
    match DirBuilder::new().recursive(true).mode(0o700).create(path) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(libc::EROFS) => {
            bail!("state directory {shown}: the filesystem is read-only: remount it writable, or use another --state")
        }
        Err(error) => bail!("state directory {shown}: {error}: use another --state"),
    }
    let path = path.canonicalize().with_context(|| format!("state directory {shown}"))?;
    let probe = path.join(".writable");
    let written = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&probe);
    match written.and_then(|mut file| file.write_all(b"leasefs\n")) {
        Ok(()) => drop(fs::remove_file(probe)),
        Err(error) => {
            let _ = fs::remove_file(probe);
            let hint = match error.raw_os_error() {
                Some(libc::ENOSPC | libc::EDQUOT) => "free some space, or use another --state",
                Some(libc::EROFS) => "remount it writable, or use another --state",
                _ => "make it writable for this user, or use another --state",
            };
            bail!("state directory {shown}: {error}: {hint}");
        }
    }
    Ok(path)
}

/// A state directory below the tree it serves, or in another tree of this kind, could never be read.
fn check_outside(path: &Path, mountpoint: &Path) -> Result<()> {
    let absolute = std::path::absolute(path)?;
    let existing = absolute.ancestors().find_map(|above| Some((above, above.canonicalize().ok()?)));
    let Some((above, real)) = existing else { return Ok(()) };
    let real = real.join(absolute.strip_prefix(above).unwrap_or(Path::new("")));
    if real.starts_with(mountpoint) {
        bail!("state directory {} is inside the mountpoint: use a --state outside it", path.display());
    }
    let trees = mountinfo::mounts()?.into_iter().filter(|mount| mount.fs_type == mountinfo::FS_TYPE);
    if let Some(tree) = trees.map(|mount| mount.path).find(|tree| real.starts_with(tree)) {
        let tree = tree.display();
        bail!("state directory {} is inside the leasefs tree {tree}: use a --state outside it", path.display());
    }
    Ok(())
}

/// The default state directory's parents may be made; a path somebody gave may be a slip of the pen.
fn is_default_parent(parent: &Path) -> bool {
    default_state_dir().is_ok_and(|default| default.parent() == Some(parent))
}

/// `$XDG_STATE_HOME/leasefs`, or `~/.local/state/leasefs`.
///
/// # Errors
/// Where neither `XDG_STATE_HOME` nor `HOME` is set.
pub fn default_state_dir() -> Result<PathBuf> {
    if let Some(base) = std::env::var_os("XDG_STATE_HOME").map(PathBuf::from).filter(|base| base.is_absolute()) {
        return Ok(base.join("leasefs"));
    }
    match std::env::var_os("HOME").map(PathBuf::from).filter(|home| home.is_absolute()) {
        Some(home) => Ok(home.join(".local/state/leasefs")),
        None => bail!("neither XDG_STATE_HOME nor HOME is set: give --state DIR"),
    }
}

/// Keeps a second server off the state directory for as long as the value lives.
fn lock_state(state_dir: &Path) -> Result<Flock<File>> {
    let path = state_dir.join("lock");
    let file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
    let file = file.with_context(|| format!("{}", path.display()))?;
    Flock::lock(file, FlockArg::LockExclusiveNonblock).map_err(|(_, errno)| match errno {
        nix::Error::EWOULDBLOCK => anyhow::anyhow!(
            "state directory {} is already served by another leasefs: unmount that one, or use another --state",
            state_dir.display()
        ),
        errno => anyhow::anyhow!("{}: {errno}", path.display()),
    })
}

/// Sends what is logged from here on to the state directory.
fn redirect_log(state_dir: &Path) -> Result<()> {
    let log = OpenOptions::new().append(true).create(true).mode(0o600).open(state_dir.join(LOG)).context(LOG)?;
    nix::unistd::dup2_stderr(log).context(LOG)
}

/// Drafts and files of `/proc` are kept open: as many as the hard limit allows.
fn raise_file_limit() {
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}
