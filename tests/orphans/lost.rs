//! A tree that loses its connection and is mounted again, and what is known of it then.

use std::fs;
use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use parking_lot::RwLock;
use tempfile::TempDir;

use crate::common::agent::Agent;
use crate::common::{InTime, LEASEFS, Mount, PATIENCE, assert_ok};

/// How soon after the new mount a key is free whose holder is proven dead.
pub const SOON: Duration = Duration::from_secs(2);

/// A file on its way through a socket may be that of any key, in whichever tree, so nothing is proven while there is one.
/// Whoever sends one has this for writing; whoever waits for proof, and not for as long as it may take, for reading.
pub static ON_ITS_WAY: RwLock<()> = RwLock::new(());

/// The kernel's list of FUSE connections, mounted for a test. The server finds it wherever it is.
pub struct List(TempDir);

impl List {
    fn new() -> List {
        let dir = tempfile::Builder::new().prefix("leasefs-list-").tempdir().expect("temporary directory");
        mount(Some("none"), dir.path(), Some("fusectl"), MsFlags::empty(), None::<&str>).expect("fusectl");
        List(dir)
    }
}

impl Drop for List {
    fn drop(&mut self) {
        let _ = umount2(self.0.path(), MntFlags::MNT_DETACH);
    }
}

/// A mount whose connection can be lost.
pub struct Lost {
    tree: Mount,
    list: List,
}

impl Lost {
    pub fn with(options: &[&str]) -> Lost {
        let list = List::new();
        Lost { tree: Mount::with(options), list }
    }

    pub fn new() -> Lost {
        Lost::with(&[])
    }

    /// Server and keeper die; then the tree is mounted again. When it was.
    pub fn lose_and_mount(&mut self) -> Instant {
        self.tree.lose_connection();
        let began = Instant::now();
        self.tree.start(&[]);
        began
    }

    /// Where the kernel is told to abort the connection.
    pub fn abort_file(&self) -> PathBuf {
        let mounts = fs::read_to_string("/proc/self/mountinfo").expect("mounts");
        let root = self.tree.root();
        let line = mounts.lines().rfind(|line| line.split(' ').nth(4) == root.to_str()).expect("mounted");
        let minor = line.split(' ').nth(2).and_then(|device| device.strip_prefix("0:")).expect("no block device");
        self.list.0.path().join(minor).join("abort")
    }

    /// Waits until an orphaned key is said to be held for this reason.
    pub fn wait_why(&self, key: &str, what: &str) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let status = self.tree.status(key);
            let why = status["orphaned_why"].as_str().unwrap_or_default();
            if why.contains(what) {
                return;
            }
            assert!(Instant::now() < deadline, "{key} was to be held because {what}: {status}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    /// Nobody else gets an orphaned key by any form.
    pub fn assert_refused(&self, key: &str) {
        use nix::errno::Errno;
        let other = Agent::new();
        let path = self.tree.claim(key);
        assert_eq!(other.create(&path), Err(Errno::EEXIST), "{key}");
        let fd = other.open(&path, libc::O_RDONLY).expect("its record can be read");
        assert_eq!(other.flock(fd, libc::LOCK_EX | libc::LOCK_NB), Err(Errno::EWOULDBLOCK), "{key}");
        assert_eq!(other.flock(fd, libc::LOCK_SH | libc::LOCK_NB), Err(Errno::EWOULDBLOCK), "{key}");
        assert_eq!(self.tree.status(key)["state"], "orphaned", "{key}");
    }

    /// Waits until a key is free as lost, and gives its next epoch.
    pub fn wait_lost(&self, key: &str) -> u64 {
        self.tree.wait_status(key, "lost", |status| status["state"] == "free" && status["outcome"] == "lost");
        let agent = Agent::new();
        let fd = agent.create(&self.tree.claim(key)).expect("free");
        agent.epoch(fd).expect("held")
    }
}

impl Deref for Lost {
    type Target = Mount;

    fn deref(&self) -> &Mount {
        &self.tree
    }
}

impl DerefMut for Lost {
    fn deref_mut(&mut self) -> &mut Mount {
        &mut self.tree
    }
}

/// Whether this user may look into every process there is, so that a look through `/proc` can prove something. In some
/// sandboxes not even root may.
pub fn can_see_everybody() -> bool {
    let refused = |task: &Path| {
        let is_refused = fs::read_dir(task.join("fdinfo")).is_err_and(|e| e.raw_os_error() == Some(libc::EACCES));
        is_refused && fs::metadata(task.join("fd")).is_ok_and(|fds| fds.len() > 0)
    };
    let processes = fs::read_dir("/proc").expect("/proc").filter_map(|entry| Some(entry.ok()?.path().join("task")));
    let tasks = processes.filter_map(|tasks| fs::read_dir(tasks).ok()).flatten();
    !tasks.filter_map(|task| Some(task.ok()?.path())).any(|task| refused(&task))
}

/// Mounts a state directory by hand: for what is to be refused, or goes elsewhere.
pub fn mount_by_hand(mountpoint: &Path, state: &Path) -> std::process::Output {
    let mut command = Command::new(LEASEFS);
    command.arg("mount").arg(mountpoint).arg("--state").arg(state).args(["--durability", "process"]);
    command.stdin(Stdio::null()).output_in_time()
}

/// A second tree beside a [`Lost`] one, unmounted with the value.
pub struct Other {
    pub mountpoint: PathBuf,
    pub state: PathBuf,
}

impl Other {
    /// On a mountpoint, with a state directory of its own in this directory.
    pub fn new(mountpoint: &Path, beside: &Path) -> Other {
        Other { mountpoint: mountpoint.to_owned(), state: beside.join("other-state") }
    }

    pub fn mount(&self) {
        assert_ok(&mount_by_hand(&self.mountpoint, &self.state));
    }
}

impl Drop for Other {
    fn drop(&mut self) {
        Command::new(LEASEFS).arg("unmount").arg(&self.mountpoint).quietly_in_time();
    }
}
