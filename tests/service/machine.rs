//! A machine of the test's own: systemd as the first process of a container whose files are those of this machine, below a
//! layer in memory. What is installed, started and mounted in there is nowhere else, and gone with the value.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use nix::mount::{MntFlags, umount2};

use crate::common::{InTime, assert_ok, end, stdout, wait_within};

/// What it boots into: nothing but what systemd itself needs.
const TARGET: &str = "[Unit]\nDescription=A machine for tests\nAllowIsolate=yes\n";

/// Longest that it may take to boot, or to go down: systemd waits for this and that up to a minute and a half.
const PATIENCE: Duration = Duration::from_secs(240);

/// The machine.
pub struct Machine {
    dir: tempfile::TempDir,
    podman: Option<Child>,
}

impl Machine {
    /// Boots one.
    pub fn boot() -> Machine {
        let dir = tempfile::Builder::new().prefix("leasefs-machine-").tempdir().expect("temporary directory");
        let mut machine = Machine { dir, podman: None };
        for name in ["layer", "root"] {
            fs::create_dir(machine.path(name)).expect("mkdir");
        }
        let run = |command: &mut Command| assert_ok(&command.output_in_time());
        let layer = machine.path("layer");
        run(Command::new("mount").args(["-t", "tmpfs", "-o", "mode=755", "leasefs-test"]).arg(&layer));
        // Empty in there: what others have there is none of its business.
        for name in ["tmp", "run", "home", "root", "work"] {
            let upper = layer.join("upper").join(name);
            fs::create_dir_all(&upper).expect("mkdir");
            run(Command::new("setfattr").args(["-n", "trusted.overlay.opaque", "-v", "y"]).arg(&upper));
        }
        fs::create_dir(layer.join("work")).expect("mkdir");
        let options = format!("lowerdir=/,upperdir={0}/upper,workdir={0}/work", layer.display());
        run(Command::new("mount").args(["-t", "overlay", "-o", &options, "leasefs-test"]).arg(machine.root()));
        let unit = machine.root().join("etc/systemd/system/leasefs-test.target");
        fs::create_dir_all(unit.parent().expect("a parent")).expect("mkdir");
        fs::write(unit, TARGET).expect("unit");
        let log = fs::File::create(machine.path("log")).expect("log");
        let mut podman = machine.podman();
        podman.args(["run", "--rm", "--name", "machine", "--privileged", "--network", "none", "--systemd=always"]);
        podman.args(["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096", "--rootfs"]).arg(machine.root());
        podman.args(["/lib/systemd/systemd", "systemd.unit=leasefs-test.target"]);
        let podman = podman.stdout(log.try_clone().expect("log")).stderr(log).spawn().expect("podman runs");
        machine.podman = Some(podman);
        wait_within(PATIENCE, "the machine is up", || {
            let podman = machine.podman.as_mut().expect("it was started");
            if let Some(status) = podman.try_wait().expect("wait") {
                panic!("{status}: {}", fs::read_to_string(machine.dir.path().join("log")).unwrap_or_default());
            }
            stdout(&machine.run("systemctl is-active leasefs-test.target")).trim() == "active"
        });
        machine
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Its files, as this machine sees them.
    pub fn root(&self) -> PathBuf {
        self.path("root")
    }

    fn podman(&self) -> Command {
        let mut command = Command::new("podman");
        for (option, name) in [("--root", "pod/root"), ("--runroot", "pod/run"), ("--tmpdir", "pod/tmp")] {
            command.arg(option).arg(self.path(name));
        }
        command.args(["--cgroup-manager", "cgroupfs", "--storage-driver", "vfs", "--runtime", "runc"]);
        command.args(["--events-backend", "none"]).stdin(Stdio::null());
        command
    }

    /// Runs a bash script in there.
    pub fn run(&self, script: &str) -> Output {
        self.podman().args(["exec", "machine", "timeout", "60", "bash", "-c", script]).output_in_time()
    }

    /// Runs one of which every command must succeed, and gives what it printed.
    pub fn ok(&self, script: &str) -> String {
        let output = self.run(&format!("set -e; {script}"));
        assert!(output.status.success(), "{script}: {output:?}\n{}", self.journal());
        stdout(&output)
    }

    /// Waits until it is off.
    pub fn wait_off(&mut self) {
        let podman = self.podman.as_mut().expect("it was started");
        wait_within(PATIENCE, "the machine is off", || podman.try_wait().expect("wait").is_some());
    }

    /// What the units said.
    fn journal(&self) -> String {
        stdout(&self.run("journalctl --no-pager -n 40 -o short-monotonic"))
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.podman().args(["rm", "--force", "--time", "0", "machine"]).quietly_in_time();
        if let Some(podman) = &mut self.podman {
            end(podman);
        }
        // What is still mounted below would be in the way of removing the directory.
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let at = mounts.lines().filter_map(|line| line.split(' ').nth(4));
        let below: Vec<&str> = at.filter(|at| Path::new(at).starts_with(self.dir.path())).collect();
        for at in below.into_iter().rev() {
            let _ = umount2(at, MntFlags::MNT_DETACH);
        }
    }
}
