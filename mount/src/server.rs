//! The server: opens a state directory and answers the kernel on the connection it was handed, until that ends.
//!
//! It may end at any instruction: the keeper starts another, which goes on. See [`crate::keeper`].

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use leasefs::engine::Start;
use leasefs::registry::NamespaceRow;
use leasefs::registry::journal::Journal;
use leasefs::registry::sqlite::{self, Check};
use leasefs::results::Results;
use leasefs::{Config, Engine, Error, Ttl};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal};
use nix::unistd::{getegid, geteuid};
use serde::{Deserialize, Serialize};

use crate::connection::{self, Connection};
use crate::dead_mount::Record;
use crate::failure::{self, Failure};
use crate::flight::{Flight, STRIKES, Struck};
use crate::fs::{Kept, LeaseFs, Settings, Shared, any_open, survivors};
use crate::handover::{Handover, Passed};
use crate::kernel_mount::{self, Options};
use crate::openfiles::OpenFiles;
use crate::{clock, dead_mount, killpoint, mountinfo, orphans, timekeeper};

/// How a tree is to be served.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Plan {
    /// Where it is mounted.
    pub mountpoint: PathBuf,
    /// Its state directory.
    pub state_dir: PathBuf,
    /// How it is mounted.
    pub options: Options,
    /// TTL where no namespace sets one.
    #[serde(with = "crate::handover::ttl_ms")]
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

/// Serves a connection that the keeper handed over, until it ends. `ready` is called once the tree answers.
///
/// # Errors
/// What is wrong and what to do.
pub fn serve(handover: &Handover, passed: Passed, ready: impl FnOnce()) -> Result<()> {
    raise_file_limit();
    // It was started by another path, and is to be found by its name.
    let _ = nix::sys::prctl::set_name(c"leasefs");
    // Blocked before any thread is made, so that only the thread that waits for them gets them.
    let signals: SigSet = [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP].into_iter().collect();
    signals.thread_block().context("signals")?;
    let plan = &handover.plan;
    let (mountpoint, state_dir) = (&plan.mountpoint, &plan.state_dir);
    let flight = Arc::new(Flight::open(passed.flight)?);
    let takes_over = flight.has_answered_init();
    killpoint::arm(&flight);
    let files = Arc::new(OpenFiles::attach(&passed.files)?);
    let engine = open_engine(plan, state_dir, &files, takes_over)?;
    let settings = Settings {
        version: env!("CARGO_PKG_VERSION"),
        mountpoint: mountpoint.clone(),
        state_dir: state_dir.clone(),
        ttl_ms: plan.ttl.as_millis(),
        durability: plan.durability,
        max_result: plan.max_result,
        max_keys: plan.max_keys,
        max_waiters: plan.max_waiters,
        allow_other: plan.options.allow_other,
        mount_owner: geteuid().as_raw(),
        pid: std::process::id(),
        keeper_pid: handover.keeper_pid,
        starts: handover.starts,
        resend: handover.resend,
    };
    let device = passed.device.try_clone().context("descriptors")?;
    let fs = LeaseFs::new(engine, settings, device, Arc::clone(&flight), Arc::clone(&files))?;
    let polls = if takes_over { fs.restore() } else { Vec::new() };
    let struck = flight.strike(handover.blameless);
    if let Some(Struck { unique, opcode, ino, count }) = struck {
        let what = connection::describe(opcode, ino);
        tracing::warn!("the server before ended while it handled request {unique} ({what}): {count} of {STRIKES}");
    }
    fs.shared().set_careful(struck.is_some());
    start_threads(&fs, signals, files)?;
    let connection = Connection {
        device: passed.device,
        last_read: passed.last_read,
        init: &handover.init,
        resend: handover.resend,
        flight: &flight,
        polls: &polls,
        given_out: fs.given_out(),
    };
    let waiting = Arc::clone(fs.shared());
    let on_interrupt = move |unique| waiting.on_interrupt(unique);
    connection.run(fs.clone(), on_interrupt, || {
        fs.shared().set_careful(false);
        fs.shared().set_direct();
        tracing::info!("serving {} from {}", mountpoint.display(), state_dir.display());
        if !takes_over && !answers(mountpoint) {
            tracing::warn!("{} does not answer yet", mountpoint.display());
        }
        // Not before: whoever waits for an answer comes first.
        if let Err(error) = timekeeper::spawn("sweeper", fs.shared(), |shared| shared.sweep()) {
            tracing::warn!("files of pruned results stay until the next start: {error}");
        }
        if let Err(error) = timekeeper::spawn("keys", fs.shared(), read_keys) {
            tracing::warn!("keys are read when they are asked for only: {error}");
        }
        ready();
    })?;
    fs.shared().engine.flush(clock::now());
    if let Err(error) = fs.shared().engine.apply(clock::now()) {
        tracing::warn!("what is in the journal stays there for the next server: {error}");
    }
    drop(passed.lock);
    Ok(())
}

/// Says whether this program could serve what is served now, without touching it.
///
/// # Errors
/// Why it could not.
pub fn check(handover: &Handover, passed: Passed) -> Result<()> {
    Flight::open(passed.flight)?;
    OpenFiles::attach(&passed.files)?;
    let state_dir = &handover.plan.state_dir;
    let explain = |error: Error| anyhow::anyhow!("state directory {}: {}", state_dir.display(), message(&error));
    sqlite::can_serve(state_dir).map_err(explain)
}

/// Whether the mounted root can be looked at: by another process, since the server must not touch its own mount.
fn answers(mountpoint: &Path) -> bool {
    let probe = std::process::Command::new("/proc/self/exe").arg("probe").arg(mountpoint).status();
    probe.is_ok_and(|status| status.success())
}

fn start_threads(fs: &LeaseFs, signals: SigSet, files: Arc<OpenFiles>) -> Result<()> {
    let shared = fs.shared();
    // The keeper recorded it before there was a server.
    let mount = Record::read(&shared.settings.state_dir);
    timekeeper::spawn("timekeeper", shared, |shared| {
        shared.timekeeper.run(|| shared.next_ns(), || shared.on_time());
    })?;
    timekeeper::spawn("writer", shared, |shared| {
        shared.writer.run(|| shared.engine.apply_ns(), || shared.on_write());
    })?;
    timekeeper::spawn("watcher", shared, |shared| shared.watcher.run(|wait| shared.on_signal(wait)))?;
    let connections = dead_mount::connections(&shared.settings.state_dir);
    timekeeper::spawn("orphans", shared, move |shared| orphans::look_after(shared, &connections))?;
    let unmount = move || unmount_on_signal(mount.as_ref(), signals, &files);
    std::thread::Builder::new().name("signals".into()).spawn(unmount)?;
    Ok(())
}

/// Reads all keys that nobody has asked for yet.
fn read_keys(shared: &Shared) {
    const RETRY: Duration = Duration::from_secs(30);
    loop {
        match shared.engine.read_on() {
            // What of it has to be recorded is the timekeeper's business.
            Ok(more) => {
                shared.timekeeper.need(shared.next_ns());
                if !more {
                    return;
                }
            }
            Err(error) => {
                tracing::warn!("keys that nobody has asked for yet cannot be read: {error}");
                std::thread::sleep(RETRY);
            }
        }
    }
}

/// The keeper is who is to be told to stop; but a service manager may tell every process. Both then unmount, which is
/// the same as one.
fn unmount_on_signal(mount: Option<&Record>, signals: SigSet, files: &OpenFiles) {
    loop {
        if matches!(signals.wait(), Ok(Signal::SIGTERM | Signal::SIGINT))
            && let Some(mount) = mount
        {
            kernel_mount::stop(mount, || any_open(files));
        }
    }
}

/// Opens the engine of a state directory; `takes_over` where the connection of its last server lives on.
fn open_engine(plan: &Plan, state_dir: &Path, files: &Arc<OpenFiles>, takes_over: bool) -> Result<Engine> {
    let explain = |error: Error| anyhow::anyhow!("state directory {}: {}", state_dir.display(), message(&error));
    let results = Results::open(state_dir).map_err(|error| explain(error.into()))?;
    // One that was served a moment ago was looked through when it was mounted, and its clients wait.
    let check = if takes_over { Check::Quick } else { Check::Full };
    let registry = Journal::open(state_dir, check).map_err(explain)?;
    let now = clock::now();
    let config = Config {
        ttl: plan.ttl,
        durability: plan.durability,
        max_result: plan.max_result,
        max_keys: plan.max_keys,
        max_waiters: plan.max_waiters,
        root: NamespaceRow::root(
            if plan.options.allow_other { 0o777 } else { 0o700 },
            geteuid().as_raw(),
            getegid().as_raw(),
            now.wall_ms * 1_000_000,
        ),
    };
    let boot_id = clock::boot_id().context("/proc is needed to tell one boot from another")?;
    if !takes_over {
        results.drop_drafts(|_| false);
    }
    let memory = Box::new(Kept(Arc::clone(files)));
    let survivors = takes_over.then(|| survivors(files));
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

/// Makes the state directory if it is not there, and sees that it can be used.
///
/// # Errors
/// What is wrong with it and what to do.
pub fn make_state_dir(path: &Path, mountpoint: &Path) -> Result<PathBuf> {
    let shown = path.display();
    if let Some(parent) = path.parent().filter(|parent| !parent.as_os_str().is_empty())
        && !parent.exists()
        && !is_default_parent(parent)
    {
        bail!(Failure::NoStateParent { path: failure::shown(path), parent: failure::shown(parent) });
    }
    check_outside(path, mountpoint)?;
    match DirBuilder::new().recursive(true).mode(0o700).create(path) {
        Ok(()) => {}
        Err(error) if error.raw_os_error() == Some(libc::EROFS) => bail!(Failure::of_state(path, &error)),
        Err(error) => bail!(Failure::StateUnmade { path: failure::shown(path), why: error.to_string() }),
    }
    let path = path.canonicalize().with_context(|| format!("state directory {shown}"))?;
    // A power cut must not take it along with what is synced in it; where the directory above is not ours to look into,
    // it was there before.
    if let Some(above) = path.parent().and_then(|above| File::open(above).ok()) {
        above.sync_all().with_context(|| format!("state directory {shown}"))?;
    }
    let probe = path.join(".writable");
    let written = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&probe);
    match written.and_then(|mut file| file.write_all(b"leasefs\n")) {
        Ok(()) => drop(fs::remove_file(probe)),
        Err(error) => {
            let _ = fs::remove_file(probe);
            bail!(Failure::of_state(&path, &error));
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
        bail!(Failure::StateInMountpoint { path: failure::shown(path) });
    }
    let trees = mountinfo::mounts()?.into_iter().filter(|mount| mount.fs_type == mountinfo::FS_TYPE);
    if let Some(tree) = trees.map(|mount| mount.path).find(|tree| real.starts_with(tree)) {
        bail!(Failure::StateInTree { path: failure::shown(path), tree: failure::shown(&tree) });
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
        None => bail!(Failure::NoHome),
    }
}

/// Drafts and files of `/proc` are kept open: as many as the hard limit allows.
fn raise_file_limit() {
    if let Ok((_, hard)) = getrlimit(Resource::RLIMIT_NOFILE) {
        let _ = setrlimit(Resource::RLIMIT_NOFILE, hard, hard);
    }
}
