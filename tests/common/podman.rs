//! Podman with everything of its own: images, containers and all that it keeps are in a directory of the test's own, gone
//! when the test ends, however it ends.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::mount::MntFlags;

use super::{InTime, assert_ok, copy_program};

/// Podman with everything of its own, in one directory.
pub struct Podman {
    dir: PathBuf,
}

impl Podman {
    pub fn new(dir: PathBuf) -> Podman {
        fs::create_dir(&dir).expect("podman's directory");
        Podman { dir }
    }

    /// `podman` with the options that keep it in its directory; the rest is still to be given.
    pub fn command(&self) -> Command {
        let mut command = Command::new("podman");
        command.args(self.options()).stdin(Stdio::null());
        command
    }

    /// The options that keep it in its directory, and have it need nothing that is not everywhere.
    pub fn options(&self) -> Vec<String> {
        let places = [("--root", "root"), ("--runroot", "run"), ("--tmpdir", "tmp")];
        let places = places.into_iter().flat_map(|(option, name)| {
            let place = self.dir.join(name);
            [option.to_owned(), place.to_str().expect("a plain path").to_owned()]
        });
        let others = [
            "--cgroup-manager",
            "cgroupfs",
            "--storage-driver",
            "vfs",
            "--runtime",
            "runc",
            "--events-backend",
            "none",
        ];
        places.chain(others.map(str::to_owned)).collect()
    }

    /// What goes into an image beside files of the host.
    pub fn rootfs(&self) -> PathBuf {
        self.dir.join("rootfs")
    }

    /// An image with these files of the host, each in its own place; busybox is the shell.
    pub fn image(&self, name: &str, files: &[PathBuf]) {
        let root = self.rootfs();
        for file in files {
            let place = root.join(file.strip_prefix("/").expect("an absolute path"));
            fs::create_dir_all(place.parent().expect("a parent")).expect("directory of the image");
            copy_program(file, &place);
        }
        let archive = self.dir.join("image.tar");
        assert_ok(&Command::new("tar").arg("-C").arg(&root).arg("-cf").arg(&archive).arg(".").output_in_time());
        assert_ok(&self.command().arg("import").arg(&archive).arg(name).output_in_time());
    }
}

impl Drop for Podman {
    fn drop(&mut self) {
        self.command().args(["rm", "--all", "--force", "--time", "0"]).quietly_in_time();
        self.command().args(["rmi", "--all", "--force"]).quietly_in_time();
        // What is still mounted below would be in the way of removing the directory.
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let below =
            mounts.lines().filter_map(|line| line.split(' ').nth(4)).filter(|at| Path::new(at).starts_with(&self.dir));
        for at in below.collect::<Vec<_>>().into_iter().rev() {
            let _ = nix::mount::umount2(at, MntFlags::MNT_DETACH);
        }
        let _ = fs::remove_dir_all(&self.dir);
    }
}
