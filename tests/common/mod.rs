//! A mount of one's own for a test, gone again when the test ends, however it ends.
//!
//! [`Mount`] starts the real binary on a fresh state directory and mountpoint. Its `Drop` unmounts, ends the keeper by
//! pid and removes the directories, also while a failed test unwinds. Every wait is for a state, with a generous bound.
#![allow(dead_code)]

pub mod agent;
pub mod environment;
pub mod intime;
pub mod luck;
pub mod podman;
pub mod witness;

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::mount::MntFlags;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

#[allow(unused_imports, reason = "not every test program uses all of it")]
pub use intime::{CutOff, InTime, end, in_time, read_in_time};
#[allow(unused_imports, reason = "not every test program uses all of it")]
pub use luck::shown_once;

/// The binary under test.
pub const LEASEFS: &str = env!("CARGO_BIN_EXE_leasefs");

/// Longest any wait for a state may take: far above what a loaded 2-core machine needs.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// A mounted tree that lasts as long as the value.
pub struct Mount {
    dir: TempDir,
    variables: Vec<(String, PathBuf)>,
    mounted: bool,
    keeper: Option<i32>,
    _cut_off: CutOff,
}

impl Mount {
    /// Mounts with `--durability process` and the options given.
    pub fn with(options: &[&str]) -> Mount {
        Mount::with_variables(options, &[])
    }

    /// The same, with more in the environment of `leasefs mount`.
    pub fn with_variables(options: &[&str], variables: &[(&str, &Path)]) -> Mount {
        let mut mount = Mount::unserved();
        mount.variables = variables.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
        mount.start(options);
        mount
    }

    /// The directories only, for a tree that the test mounts there in a way of its own, and unmounts.
    pub fn unserved() -> Mount {
        assert!(Path::new("/dev/fuse").exists(), "these tests need /dev/fuse");
        let dir = tempfile::Builder::new().prefix("leasefs-test-").tempdir().expect("temporary directory");
        // Other uids walk through it to reach the mountpoint.
        set_mode(dir.path(), 0o755);
        fs::create_dir(dir.path().join("mnt")).expect("mountpoint");
        let cut_off = CutOff::of(dir.path().join("mnt"));
        Mount { dir, variables: Vec::new(), mounted: false, keeper: None, _cut_off: cut_off }
    }

    /// Mounts with the defaults the tests share.
    pub fn new() -> Mount {
        Mount::with(&[])
    }

    /// Mounts for every uid (`--allow-other`).
    pub fn shared() -> Mount {
        Mount::with(&["--allow-other"])
    }

    /// Starts the server again on the same state directory, after [`Mount::unmount`].
    pub fn start(&mut self, options: &[&str]) {
        self.start_by(Command::new(LEASEFS), options);
    }

    /// The same, by a command that goes on as the program given after its own arguments.
    pub fn start_by(&mut self, mut command: Command, options: &[&str]) {
        command.arg("mount").arg(self.root()).arg("--state").arg(self.state());
        if !options.contains(&"--durability") {
            command.args(["--durability", "process"]);
        }
        let output = command.args(options).envs(self.variables.iter().cloned()).stdin(Stdio::null()).output_in_time();
        assert!(output.status.success(), "leasefs mount failed: {}", String::from_utf8_lossy(&output.stderr));
        self.mounted = true;
        self.keeper = self.keeper_pid();
    }

    /// The mountpoint.
    pub fn root(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }

    /// The state directory.
    pub fn state(&self) -> PathBuf {
        self.dir.path().join("state")
    }

    /// A directory outside the tree, removed with the mount.
    pub fn scratch(&self) -> PathBuf {
        let path = self.dir.path().join("scratch");
        fs::create_dir_all(&path).expect("scratch directory");
        set_mode(&path, 0o777);
        path
    }

    /// `claims/KEY`.
    pub fn claim(&self, key: &str) -> PathBuf {
        self.root().join("claims").join(key)
    }

    /// `results/KEY/EPOCH`.
    pub fn result(&self, key: &str, epoch: u64) -> PathBuf {
        self.root().join("results").join(key).join(epoch.to_string())
    }

    /// `status/KEY`, parsed.
    pub fn status(&self, key: &str) -> serde_json::Value {
        let path = self.root().join("status").join(key);
        let text = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{}: {e}: {text}", path.display()))
    }

    /// The state of a key as `status/KEY` says it; `free` for a key that never was.
    pub fn state_of(&self, key: &str) -> String {
        if !self.root().join("status").join(key).exists() {
            return "free".into();
        }
        self.status(key)["state"].as_str().expect("state is a string").to_owned()
    }

    /// Waits until `status/KEY` satisfies the condition.
    pub fn wait_status(&self, key: &str, what: &str, mut condition: impl FnMut(&serde_json::Value) -> bool) {
        wait_for(&format!("{key}: {what}"), || {
            self.root().join("status").join(key).exists() && condition(&self.status(key))
        });
    }

    /// Waits until these keys' leases are older than the time they had left at first, which they only are if somebody renews
    /// them; all the while each is held, at this epoch. A third of their TTL has to be more than any pause of the machine.
    pub fn wait_outlived(&self, keys: &[&str], epoch: u64) {
        let end = |key: &&str| -> jiff::Timestamp {
            let status = self.status(key);
            status["expires"].as_str().unwrap_or_else(|| panic!("not held: {status}")).parse().expect("RFC 3339")
        };
        let ends = keys.iter().map(end).max().expect("a key");
        wait_for(&format!("{keys:?} outlive their TTL"), || {
            for key in keys {
                let status = self.status(key);
                assert_eq!(
                    (status["state"].as_str(), status["epoch"].as_u64()),
                    (Some("held"), Some(epoch)),
                    "{status}"
                );
            }
            jiff::Timestamp::now() > ends
        });
    }

    /// Has a lease run out soon, however long it was to last: by a TTL set from outside, so that nothing before this has to be
    /// quick.
    pub fn shorten(&self, key: &str) {
        let set = "import os, sys; os.setxattr(sys.argv[1], 'user.lease.ttl', b'100ms')";
        assert_ok(&self.command("python3").args(["-I", "-S", "-c", set]).arg(self.claim(key)).output_in_time());
    }

    /// Waits until the registry's file has all that was decided so far, for whoever reads that: the server keeps it in a
    /// journal for a moment.
    pub fn wait_applied(&self) {
        let file = fs::File::open(self.root().join(".leasefs/version")).expect("the tree is served");
        file.sync_all().expect("the registry can be written");
    }

    /// The server's pid, from `.leasefs/config`.
    pub fn server_pid(&self) -> Option<i32> {
        self.pid_of("pid")
    }

    /// Kills the server, and waits until another answers.
    pub fn kill_server(&self) {
        let old = self.server_pid().expect("a server");
        kill(Pid::from_raw(old), Signal::SIGKILL).expect("it is there");
        wait_for("another server", || self.server_pid().is_some_and(|pid| pid != old));
    }

    /// The pid of the keeper, which starts another server when one ends.
    pub fn keeper_pid(&self) -> Option<i32> {
        self.pid_of("keeper_pid")
    }

    fn pid_of(&self, role: &str) -> Option<i32> {
        let text = fs::read_to_string(self.root().join(".leasefs/config")).ok()?;
        let config: serde_json::Value = serde_json::from_str(&text).ok()?;
        config[role].as_i64().map(|pid| pid as i32)
    }

    /// Runs `leasefs` with the mount named in the environment.
    pub fn leasefs<S: AsRef<OsStr>>(&self, args: &[S]) -> Output {
        self.command(LEASEFS).args(args).output_in_time()
    }

    /// A command that finds the mount by its environment (`LEASEFS_ROOT`, and `M` for shell scripts).
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command.env("LEASEFS_ROOT", self.root()).env("M", self.root()).stdin(Stdio::null());
        command
    }

    /// Runs a bash script; `$M` is the mountpoint.
    pub fn bash(&self, script: &str) -> Output {
        self.command("bash").arg("-c").arg(script).output_in_time()
    }

    /// Starts a bash script in the background; `$M` is the mountpoint.
    pub fn spawn_bash(&self, script: &str) -> Background {
        Background(self.command("bash").arg("-c").arg(script).stdout(Stdio::piped()).spawn().expect("bash runs"))
    }

    /// Runs a Python script; `M` is the mountpoint in its environment.
    pub fn python(&self, script: &str) -> Output {
        self.command("python3").arg("-c").arg(script).output_in_time()
    }

    /// Kills the server, and the keeper that would start it again, as a crash of both would: the connection is lost.
    pub fn lose_connection(&self) {
        let server = self.server_pid().expect("a server");
        let status = fs::read_to_string(format!("/proc/{server}/status")).expect("the server is there");
        let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")).and_then(|pid| pid.trim().parse().ok());
        let program = |pid: i32| fs::read_link(format!("/proc/{pid}/exe")).ok();
        let is_keeper = |pid: &i32| program(*pid).is_some() && program(*pid) == program(server);
        // The keeper first: it starts no other then.
        let pids: Vec<i32> = parent.filter(is_keeper).into_iter().chain([server]).collect();
        for pid in &pids {
            let _ = kill(Pid::from_raw(*pid), Signal::SIGKILL);
        }
        for pid in pids {
            wait_for("the server's end", || agent::has_ended(pid));
        }
    }

    /// Unmounts and waits for the server's end; the state stays.
    pub fn unmount(&mut self) {
        assert_ok(&unmount_unused(&self.root()));
        self.mounted = false;
    }

    /// Runs `leasefs verify` and fails the test with what it found.
    pub fn verify(&self) {
        let output = Command::new(LEASEFS).arg("verify").arg("--state").arg(self.state()).output_in_time();
        assert!(
            output.status.success(),
            "leasefs verify: {}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        );
    }
}

impl Mount {
    /// Pids of the processes that hold keys here for `leasefs claim`, also of those that wait.
    pub fn holders(&self) -> Vec<i32> {
        let root = format!("--root={}", self.root().display());
        let is_ours = |pid: &i32| {
            // Before the command line: to read that of a process which maps a file of a tree may have to wait.
            let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            if !name.starts_with("leasefs") && !name.starts_with("exe") {
                return false;
            }
            let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            let words: Vec<&str> = line.split('\0').collect();
            words.get(1) == Some(&"hold") && words.contains(&root.as_str())
        };
        let entries = fs::read_dir("/proc").expect("/proc").flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).filter(is_ours).collect()
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        // They would go on for their TTL, whatever becomes of the tree.
        for pid in self.holders() {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        if !self.mounted {
            return;
        }
        if !Command::new(LEASEFS).arg("unmount").arg(self.root()).quietly_in_time() {
            // A process of a failed test may still hold a handle, or the server may be stuck: cut its clients off,
            // detach, and end the keeper by its pid, which takes the server along.
            let _ = nix::mount::umount2(&self.root(), MntFlags::MNT_FORCE);
            let _ = nix::mount::umount2(&self.root(), MntFlags::MNT_DETACH);
            if let Some(pid) = self.keeper {
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
        }
    }
}

/// A child that is killed and reaped when the value goes, so a failed test leaves no process.
pub struct Background(pub Child);

impl Background {
    /// The child's pid.
    pub fn pid(&self) -> i32 {
        self.0.id() as i32
    }

    /// Sends a signal (`KILL`, `STOP`, `CONT`, `TERM`, …).
    pub fn signal(&self, name: &str) {
        if name == "STOP" {
            return stop(self.pid());
        }
        let signal: Signal = format!("SIG{name}").parse().expect("a signal");
        kill(Pid::from_raw(self.pid()), signal).unwrap_or_else(|e| panic!("{signal}: {e}"));
    }

    /// Waits for its end and gives its exit status.
    pub fn wait(&mut self) -> std::process::ExitStatus {
        let deadline = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.0.try_wait().expect("child can be waited for") {
                return status;
            }
            assert!(Instant::now() < deadline, "process {} did not end", self.0.id());
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        end(&mut self.0);
    }
}

/// Stops a process, and waits until it is: the signal takes effect a moment after it was sent.
#[track_caller]
pub fn stop(pid: i32) {
    kill(Pid::from_raw(pid), Signal::SIGSTOP).unwrap_or_else(|e| panic!("process {pid} cannot be stopped: {e}"));
    let is_still = |task: fs::DirEntry| {
        let status = fs::read_to_string(task.path().join("status")).unwrap_or_default();
        let state = status.lines().find_map(|line| line.strip_prefix("State:\t"));
        state.is_none_or(|state| state.starts_with(['T', 't', 'Z', 'X']))
    };
    let is_stopped = || fs::read_dir(format!("/proc/{pid}/task")).is_ok_and(|tasks| tasks.flatten().all(is_still));
    wait_for(&format!("process {pid} is stopped"), is_stopped);
}

/// Processes that are stopped, such as a server that does not answer. They go on when the value goes.
pub struct Stopped(Vec<i32>);

impl Stopped {
    /// Stops them.
    #[track_caller]
    pub fn these(pids: &[i32]) -> Stopped {
        let stopped = Stopped(pids.to_vec());
        pids.iter().copied().for_each(stop);
        stopped
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        for pid in &self.0 {
            let _ = kill(Pid::from_raw(*pid), Signal::SIGCONT);
        }
    }
}

/// Copies a program that is to be executed. By a process of its own: what a test had open for writing, another test's
/// fork would have for a moment longer, and a program that is being written to cannot be executed.
#[track_caller]
pub fn copy_program(from: impl AsRef<Path>, to: impl AsRef<Path>) {
    assert_ok(&Command::new("cp").arg("--").arg(from.as_ref()).arg(to.as_ref()).output_in_time());
}

/// Writes a script that is to be executed. By a process of its own, for the same reason.
#[track_caller]
pub fn write_program(path: impl AsRef<Path>, text: &str) {
    let path = path.as_ref();
    let written = tempfile::NamedTempFile::new().expect("a file");
    fs::write(written.path(), text).expect("a script");
    // Another one in its place: what was there may be executed just now.
    let _ = fs::remove_file(path);
    copy_program(written.path(), path);
    set_mode(path, 0o755);
}

/// `leasefs unmount` of a tree that nobody uses any more. What this program had open of it, looking at a key, a
/// neighbour's child has as well until it executes its program, and on a slow machine that may take longer than the
/// command tries it.
#[track_caller]
pub fn unmount_unused(root: &Path) -> Output {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let output = Command::new(LEASEFS).arg("unmount").arg(root).output_in_time();
        if !stderr(&output).contains("in use") || Instant::now() > deadline {
            return output;
        }
    }
}

/// Waits until the condition holds; panics with `what` when it does not within [`PATIENCE`].
#[track_caller]
pub fn wait_for(what: &str, condition: impl FnMut() -> bool) {
    wait_within(PATIENCE, what, condition);
}

/// The same, for so long.
#[track_caller]
pub fn wait_within(limit: Duration, what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = Instant::now() + limit;
    while !condition() {
        assert!(Instant::now() < deadline, "never came about: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Standard output as text.
pub fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Asserts that a command succeeded, showing what it printed.
pub fn assert_ok(output: &Output) {
    assert!(
        output.status.success(),
        "{}\nstdout: {}\nstderr: {}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
}

/// Standard error as text.
pub fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Asserts the exit code and that standard error is one line `leasefs: …` that has the words in it.
#[track_caller]
pub fn assert_refused(output: &Output, code: i32, words: &[&str]) {
    let said = stderr(output);
    assert_eq!(output.status.code(), Some(code), "stderr: {said}");
    assert!(said.starts_with("leasefs: ") && said.trim_end().lines().count() == 1, "not one line: {said}");
    for word in words {
        assert!(said.contains(word), "`{word}` is missing in: {said}");
    }
}

/// A uid that is neither root nor the mount's owner.
pub const STRANGER: u32 = 65_534;

/// Runs `leasefs` as a stranger.
pub fn as_stranger(mount: &Mount, args: &[&str]) -> Output {
    use std::os::unix::process::CommandExt;
    let leasefs = leasefs_for_all(mount);
    mount.command(leasefs.to_str().expect("UTF-8")).args(args).uid(STRANGER).gid(STRANGER).output_in_time()
}

/// The program where every user can run it: others may not be let into the directory it was built in.
pub fn leasefs_for_all(mount: &Mount) -> PathBuf {
    if environment::is_open_to_all(LEASEFS.as_ref()) {
        return LEASEFS.into();
    }
    let bin = mount.scratch().join("bin");
    let copy = bin.join("leasefs");
    if !copy.exists() {
        fs::create_dir_all(&bin).expect("a directory for the program");
        copy_program(LEASEFS, &copy);
        set_mode(&copy, 0o755);
    }
    copy
}

/// Sets permission bits.
pub fn set_mode(path: &Path, mode: u32) {
    use std::os::unix::fs::PermissionsExt;
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("chmod");
}
