//! A mount whose keeper runs in the foreground, from a program of its own, and is watched.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};

use nix::mount::MntFlags;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

use crate::common::agent::{Agent, Fd, has_ended};
use crate::common::{LEASEFS, assert_ok, copy_program, end, unmount_unused, wait_for};

/// The mount; it is gone when the value is.
pub struct Place {
    dir: TempDir,
    keeper: Option<Child>,
}

impl Place {
    /// Mounts with these options and variables, and waits until the tree answers.
    pub fn mount(options: &[&str], variables: &[(&str, &str)]) -> Place {
        let dir = tempfile::Builder::new().prefix("leasefs-keeper-").tempdir().expect("temporary directory");
        let mut place = Place { dir, keeper: None };
        fs::create_dir(place.mnt()).expect("mountpoint");
        place.start(LEASEFS.as_ref(), options, variables);
        place
    }

    /// A copy of the program, to mount from; it can be exchanged.
    pub fn mount_copy() -> Place {
        let dir = tempfile::Builder::new().prefix("leasefs-keeper-").tempdir().expect("temporary directory");
        let mut place = Place { dir, keeper: None };
        fs::create_dir(place.mnt()).expect("mountpoint");
        place.install(LEASEFS.as_ref());
        let program = place.program();
        place.start(&program, &[], &[]);
        place
    }

    /// Mounts the same state again, once its keeper has ended.
    pub fn mount_again(&mut self) {
        self.start(LEASEFS.as_ref(), &[], &[]);
    }

    fn start(&mut self, program: &Path, options: &[&str], variables: &[(&str, &str)]) {
        let log = File::create(self.path("log")).expect("log");
        let mut command = Command::new(program);
        command.arg("mount").arg(self.mnt()).arg("--state").arg(self.state());
        command.args(["--foreground", "--durability", "process"]).args(options).envs(variables.iter().copied());
        self.keeper = Some(command.stdin(Stdio::null()).stderr(log).spawn().expect("leasefs mount runs"));
        wait_for("the tree", || self.mnt().join("claims").is_dir());
    }

    /// Puts a program where the mount was started from, as a package manager does.
    pub fn install(&self, program: &Path) {
        let new = self.path("leasefs.new");
        copy_program(program, &new);
        fs::rename(new, self.program()).expect("rename");
    }

    /// A file beside the mountpoint.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn program(&self) -> PathBuf {
        self.path("leasefs")
    }

    pub fn mnt(&self) -> PathBuf {
        self.path("mnt")
    }

    pub fn state(&self) -> PathBuf {
        self.path("state")
    }

    pub fn claim(&self, key: &str) -> PathBuf {
        self.mnt().join("claims").join(key)
    }

    /// What keeper and servers logged.
    pub fn log(&self) -> String {
        fs::read_to_string(self.path("log")).expect("log")
    }

    /// A field of `.leasefs/config` that is a number.
    pub fn number(&self, field: &str) -> Option<i64> {
        let text = fs::read_to_string(self.mnt().join(".leasefs/config")).ok()?;
        let config: serde_json::Value = serde_json::from_str(&text).ok()?;
        config[field].as_i64()
    }

    pub fn server(&self) -> i32 {
        let mut pid = None;
        wait_for("a server", || {
            pid = self.number("pid");
            pid.is_some()
        });
        pid.expect("a pid") as i32
    }

    pub fn keeper(&self) -> i32 {
        self.keeper.as_ref().expect("a keeper").id() as i32
    }

    pub fn signal(&self, pid: i32, signal: Signal) {
        kill(Pid::from_raw(pid), signal).expect("it is there");
    }

    /// Kills the server and waits for its end.
    pub fn kill_server(&self) -> i32 {
        let pid = self.server();
        self.signal(pid, Signal::SIGKILL);
        wait_for("its end", || has_ended(pid));
        pid
    }

    /// Waits for the keeper's end.
    pub fn wait(&mut self) -> ExitStatus {
        let keeper = self.keeper.as_mut().expect("a keeper");
        let mut status = None;
        wait_for("the keeper's end", || {
            status = keeper.try_wait().expect("wait");
            status.is_some()
        });
        status.expect("it ended")
    }

    /// Whether it is mounted, alive or dead.
    pub fn is_mounted(&self) -> bool {
        mounts_on(&self.mnt()) > 0
    }

    /// Tells the keeper to stop while an agent holds the key `k`: the tree is out of sight, and served until that is closed.
    pub fn stop_while_held(&self) -> (Agent, Fd) {
        let agent = Agent::new();
        let fd = agent.create(&self.claim("k")).expect("free key");
        self.signal(self.keeper(), Signal::SIGTERM);
        wait_for("it is out of sight", || !self.is_mounted());
        (agent, fd)
    }

    pub fn unmount(&mut self) {
        assert_ok(&unmount_unused(&self.mnt()));
        assert!(self.wait().success());
    }
}

/// How many mounts are on a path.
pub fn mounts_on(root: &Path) -> usize {
    let mounts = fs::read_to_string("/proc/self/mounts").expect("mounts");
    mounts.lines().filter(|line| line.split(' ').nth(1) == root.to_str()).count()
}

impl Drop for Place {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", fs::read_to_string(self.path("log")).unwrap_or_default());
        }
        if let Some(keeper) = &mut self.keeper {
            // The server goes with it, and the connection with both.
            end(keeper);
        }
        let _ = nix::mount::umount2(&self.mnt(), MntFlags::MNT_DETACH);
    }
}
