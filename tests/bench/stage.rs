//! The mounts and directories a run measures on, gone again however the run ends.
//!
//! The do-nothing filesystem unmounts itself when its standard input ends. leasefs runs in the background, so it is
//! unmounted on every way out; signals that would end the program at once only make it stop at the next cell.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{SigHandler, Signal, signal};
use tempfile::TempDir;

use crate::{Variant, null};

const LEASEFS: &str = env!("CARGO_BIN_EXE_leasefs");

static STOP: AtomicBool = AtomicBool::new(false);

extern "C" fn stop(_signal: libc::c_int) {
    STOP.store(true, Ordering::Relaxed);
}

/// From here on SIGINT, SIGTERM and SIGHUP end the run in an orderly way.
pub fn stop_on_signals() {
    for which in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // SAFETY: the handler only stores to an atomic.
        if let Err(error) = unsafe { signal(which, SigHandler::Handler(stop)) } {
            eprintln!("bench: cannot handle {which}: {error}");
        }
    }
}

/// Fails once such a signal has come.
pub fn stop_if_told() -> Result<()> {
    if STOP.load(Ordering::Relaxed) {
        bail!("stopped by a signal");
    }
    Ok(())
}

/// Everything mounted for one placement.
pub struct Stage {
    // Unmounted in this order, before the directory goes.
    servers: Vec<(Variant, Server)>,
    dir: TempDir,
}

enum Server {
    /// The program's own filesystem.
    Null(Child),
    Leasefs {
        mounted: bool,
        root: PathBuf,
    },
}

impl Stage {
    /// Mounts what the variants need, in a new directory below `base`.
    pub fn set_up(base: &Path, variants: &[Variant]) -> Result<Stage> {
        let dir = tempfile::Builder::new().prefix("leasefs-bench-").tempdir_in(base)?;
        let mut stage = Stage { servers: Vec::new(), dir };
        for variant in variants {
            let root = stage.root(*variant);
            fs::create_dir(&root)?;
            match variant {
                Variant::Local => fs::create_dir(root.join("claims"))?,
                Variant::Null => stage.servers.push((*variant, Server::null(&root, None)?)),
                Variant::Rows => {
                    let database = root.with_extension("db");
                    stage.servers.push((*variant, Server::null(&root, Some(&database))?));
                }
                Variant::Process => stage.servers.push((*variant, Server::leasefs(&root, "process")?)),
                Variant::Full => stage.servers.push((*variant, Server::leasefs(&root, "full")?)),
            }
        }
        Ok(stage)
    }

    fn root(&self, variant: Variant) -> PathBuf {
        self.dir.path().join(format!("{variant:?}").to_lowercase())
    }

    /// Where the keys of a variant are.
    pub fn directory(&self, variant: Variant) -> Result<PathBuf> {
        let directory = self.root(variant).join("claims");
        fs::metadata(&directory).with_context(|| format!("{} does not answer", directory.display()))?;
        Ok(directory)
    }

    /// Unmounts everything and says whether that worked.
    pub fn tear_down(mut self) -> Result<()> {
        self.servers.drain(..).try_for_each(|(variant, mut server)| {
            server.end().with_context(|| format!("the {variant:?} mount did not end well"))
        })
    }
}

impl Server {
    fn null(root: &Path, database: Option<&Path>) -> Result<Server> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg(null::WAY_IN)
            .arg(root)
            .args(database)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            // Ctrl-C in the terminal is for the bench, which then ends its servers.
            .process_group(0)
            .spawn()?;
        let stdout = child.stdout.take().context("server without output")?;
        let server = Server::Null(child);
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        if line.trim() != null::MOUNTED {
            bail!("cannot mount a FUSE filesystem at {}", root.display());
        }
        Ok(server)
    }

    fn leasefs(root: &Path, durability: &str) -> Result<Server> {
        let state = root.with_extension("state");
        let status = Command::new(LEASEFS)
            .arg("mount")
            .arg(root)
            .arg("--state")
            .arg(&state)
            .args(["--durability", durability])
            .stdin(Stdio::null())
            .status()
            .with_context(|| format!("cannot run {LEASEFS}"))?;
        if !status.success() {
            bail!("leasefs mount --durability {durability} failed");
        }
        Ok(Server::Leasefs { mounted: true, root: root.to_owned() })
    }

    /// Unmounts; a second call does nothing.
    fn end(&mut self) -> Result<()> {
        match self {
            Server::Null(child) => {
                drop(child.stdin.take());
                if !child.wait()?.success() {
                    bail!("it said why above");
                }
            }
            Server::Leasefs { mounted, root } => {
                if !std::mem::take(mounted) {
                    return Ok(());
                }
                if !Command::new(LEASEFS).arg("unmount").arg(&*root).stdin(Stdio::null()).status()?.success() {
                    detach(root);
                    bail!("leasefs unmount failed");
                }
            }
        }
        Ok(())
    }
}

/// Takes the mount out of the tree even if something still uses it; the server then ends with the last user.
fn detach(root: &Path) {
    let root_user = nix::unistd::geteuid().is_root();
    let (program, option) = if root_user { ("umount", "-l") } else { ("fusermount3", "-uz") };
    if let Err(error) = Command::new(program).arg(option).arg(root).stdin(Stdio::null()).status() {
        eprintln!("bench: cannot run {program}: {error}");
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Err(error) = self.end() {
            eprintln!("bench: {error}");
        }
    }
}
