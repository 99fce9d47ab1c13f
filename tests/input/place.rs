//! A mountpoint and a state directory for mounts that are to fail, and whatever must be cleaned up after them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

use crate::common::{InTime, LEASEFS, assert_ok, set_mode, unmount_unused};

/// Two directories; what is mounted below them is unmounted when the value goes.
pub struct Place {
    dir: TempDir,
}

impl Place {
    pub fn new() -> Place {
        let dir = tempfile::Builder::new().prefix("leasefs-input-").tempdir().expect("temporary directory");
        set_mode(dir.path(), 0o755);
        fs::create_dir(dir.path().join("mnt")).expect("mountpoint");
        Place { dir }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn mnt(&self) -> PathBuf {
        self.path("mnt")
    }

    pub fn state(&self) -> PathBuf {
        self.path("state")
    }

    /// `leasefs mount`, which must come to an end by itself.
    pub fn mount_at(&self, mountpoint: &Path, state: &Path, options: &[&str]) -> Output {
        Command::new("timeout")
            .args(["60", LEASEFS, "mount"])
            .arg(mountpoint)
            .arg("--state")
            .arg(state)
            .args(["--durability", "process"])
            .args(options)
            .stdin(Stdio::null())
            .output_in_time()
    }

    pub fn mount(&self) -> Output {
        self.mount_at(&self.mnt(), &self.state(), &[])
    }

    pub fn unmount(&self, mountpoint: &Path) -> Output {
        Command::new("timeout").args(["60", LEASEFS, "unmount"]).arg(mountpoint).output_in_time()
    }

    /// Makes a registry that once was served and is whole.
    pub fn used_state(&self) {
        assert_ok(&self.mount());
        fs::create_dir(self.mnt().join("claims/ns")).expect("mkdir");
        let claim = Command::new("flock").arg("-n").arg(self.mnt().join("claims/ns/k")).arg("true").output_in_time();
        assert_ok(&claim);
        self.assert_unmounts();
    }

    /// Nobody uses the tree any more.
    #[track_caller]
    pub fn assert_unmounts(&self) {
        assert_ok(&unmount_unused(&self.mnt()));
    }

    /// A small filesystem of its own at `name`.
    pub fn tmpfs(&self, name: &str, size: &str) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(&path).expect("mountpoint");
        let options = format!("size={size},mode=755");
        assert_ok(
            &Command::new("mount").args(["-t", "tmpfs", "-o", &options, "leasefs-test"]).arg(&path).output_in_time(),
        );
        path
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // The deepest first; a tree that is dead or busy is detached, and its server ends with it.
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        let prefix = self.dir.path().display().to_string();
        let ours = mounts.lines().filter_map(|line| line.split(' ').nth(1)).filter(|path| path.starts_with(&prefix));
        for path in ours.collect::<Vec<_>>().into_iter().rev() {
            if !Command::new("umount").arg(path).quietly_in_time() {
                Command::new("umount").arg("-l").arg(path).quietly_in_time();
            }
        }
    }
}

/// The command failed with one line that names what it is about, and says one of the words in each list.
pub fn assert_refused(output: &Output, about: &Path, words: &[&[&str]]) {
    assert!(!output.status.success(), "it should have been refused");
    assert_ne!(output.status.code(), Some(124), "it never came to an end");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(said.trim_end().lines().count(), 1, "one line: {said:?}");
    assert!(said.starts_with("leasefs: "), "{said:?}");
    assert!(said.contains(about.to_str().expect("UTF-8")), "{} is not named: {said:?}", about.display());
    let lower = said.to_lowercase();
    for any in words {
        assert!(any.iter().any(|word| lower.contains(word)), "none of {any:?} in {said:?}");
    }
    assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// Nothing is mounted there.
pub fn assert_not_mounted(path: &Path) {
    let mounts = fs::read_to_string("/proc/self/mounts").expect("mounts");
    let path = path.to_str().expect("UTF-8");
    assert!(!mounts.lines().any(|line| line.split(' ').nth(1) == Some(path)), "{path} is mounted");
}
