//! `leasefs doctor`: it finds what is wrong, says what to do, and never hangs.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use nix::mount::{MntFlags, umount2};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::common::agent::Agent;
use crate::common::{
    Background, InTime, LEASEFS, Mount, Stopped, assert_ok, copy_program, leasefs_for_all, read_in_time, set_mode,
    stdout, wait_for,
};

fn doctor(arguments: &[&str]) -> Output {
    Command::new("timeout").args(["60", LEASEFS, "doctor"]).args(arguments).output_in_time()
}

fn path(path: &Path) -> String {
    path.to_str().expect("UTF-8").to_owned()
}

/// What a check of this name found: verdict, text and cure. There may be several; the one that has the word is meant.
fn found(output: &Output, check: &str, word: &str) -> (String, String, String) {
    let report: serde_json::Value =
        serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"));
    let checks = report["checks"].as_array().expect("checks");
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_owned();
    let is_meant = |one: &&serde_json::Value| one["check"] == check && text(&one["found"]).contains(word);
    let one = checks.iter().find(is_meant).unwrap_or_else(|| panic!("no {check} with {word:?}: {report}"));
    (text(&one["verdict"]), text(&one["found"]), text(&one["cure"]))
}

#[test]
fn a_tree_that_is_well_is_found_well() {
    let mount = Mount::new();
    let output = doctor(&[&path(&mount.root())]);
    assert_ok(&output);
    let text = stdout(&output);
    let line = |start: &str, word: &str| text.lines().any(|line| line.starts_with(start) && line.contains(word));
    assert!(line("ok    mount ", "answers (server"), "{text}");
    assert!(line("ok    version ", "is served by"), "{text}");
    assert!(line("ok    registry ", "can serve it"), "{text}");
    assert!(line("ok    device ", "/dev/fuse"), "{text}");
    assert!(text.contains("no failures, "), "{text}");
}

#[test]
fn a_dead_mount_is_told_of_and_its_cure_cures() {
    let mut mount = Mount::new();
    mount.lose_connection();
    let (root, state) = (path(&mount.root()), path(&mount.state()));
    let output = doctor(&[&root, "--json"]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let (verdict, text, cure) = found(&output, "mount", &root);
    assert!(verdict == "fail" && text.contains("is dead"), "{text}");
    assert!(cure.contains(&format!("leasefs mount {root}")), "{cure}");
    mount.start(&[]);
    let output = doctor(&[&root, "--state", &state, "--json"]);
    assert_ok(&output);
    assert_eq!(found(&output, "mount", &root).0, "ok");
}

#[test]
fn a_tree_that_does_not_answer_is_not_waited_for() {
    let mount = Mount::new();
    let pids = [mount.keeper_pid(), mount.server_pid()].map(|pid| pid.expect("it is served"));
    let stopped = Stopped::these(&pids);
    let began = Instant::now();
    let output = doctor(&[&path(&mount.root()), "--json"]);
    assert!(began.elapsed() < Duration::from_secs(30), "{:?}", began.elapsed());
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let (verdict, text, cure) = found(&output, "mount", &path(&mount.root()));
    assert!(verdict == "fail" && text.contains("does not answer") && cure.contains("leasefs.log"), "{text}: {cure}");
    drop(stopped);
    assert_ok(&doctor(&[&path(&mount.root())]));
}

#[test]
fn a_tree_that_is_unmounted_while_it_is_looked_at_is_nothing_to_complain_of() {
    let mut mount = Mount::new();
    let pids = [mount.keeper_pid(), mount.server_pid()].map(|pid| pid.expect("it is served"));
    let stopped = Stopped::these(&pids);
    let mut command = Command::new(LEASEFS);
    command.args(["doctor", "--json"]).arg(mount.root()).stdin(Stdio::null()).stdout(Stdio::piped());
    let mut looking = Background(command.spawn().expect("leasefs runs"));
    let children = format!("/proc/{0}/task/{0}/children", looking.pid());
    wait_for("its look at the tree", || fs::read_to_string(&children).is_ok_and(|list| !list.is_empty()));
    umount2(&mount.root(), MntFlags::MNT_DETACH).expect("umount");
    let said = read_in_time(looking.0.stdout.take());
    let report: serde_json::Value = serde_json::from_str(&said).expect("JSON");
    let trees = report["checks"].as_array().expect("checks").iter().filter(|check| check["check"] == "mount").count();
    assert!(trees == 0, "{said}");
    drop(stopped);
    wait_for("the keeper's end", || crate::common::agent::has_ended(pids[0]));
    mount.start(&[]);
}

#[test]
fn another_users_tree_is_not_this_users_to_mend() {
    let (shut, shared) = (Mount::new(), Mount::shared());
    let leasefs = leasefs_for_all(&shared);
    let as_other = |root: &Path| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", "12345", "--regid", "12345", "--clear-groups"]).arg(&leasefs);
        command.args(["doctor", "--json"]).arg(root).output_in_time()
    };
    let output = as_other(&shut.root());
    let (verdict, text, cure) = found(&output, "mount", &path(&shut.root()));
    assert!(verdict == "warn" && text.contains("not open to this user") && cure.contains("--allow-other"), "{text}");
    // This one can be used, and that is enough.
    let output = as_other(&shared.root());
    assert_eq!(output.status.code(), Some(0), "{output:?}");
    assert_eq!(found(&output, "mount", &path(&shared.root())).0, "ok");
    assert!(!stdout(&output).contains("\"state\""), "{output:?}");
}

#[test]
fn a_program_that_was_replaced_is_told_of_until_it_took_over() {
    let dir = tempfile::tempdir().expect("directory");
    set_mode(dir.path(), 0o755);
    let program = dir.path().join("leasefs");
    let install = || {
        copy_program(LEASEFS, dir.path().join("new"));
        fs::rename(dir.path().join("new"), &program).expect("rename");
    };
    install();
    let (root, state) = (dir.path().join("mnt"), dir.path().join("state"));
    fs::create_dir(&root).expect("mountpoint");
    let run = |arguments: &[&str]| {
        let output = Command::new(&program).args(arguments).output_in_time();
        assert_ok(&output);
    };
    run(&["mount", &path(&root), "--state", &path(&state), "--durability", "process"]);
    let unmount = Unmount(root.clone());
    assert_eq!(found(&doctor(&[&path(&root), "--json"]), "version", "").0, "ok");
    install();
    let (verdict, text, cure) = found(&doctor(&[&path(&root), "--json"]), "version", "");
    assert!(verdict == "warn" && text.contains("replaced"), "{text}");
    assert!(cure.contains(&format!("leasefs upgrade {}", path(&root))), "{cure}");
    run(&["upgrade", &path(&root)]);
    assert_eq!(found(&doctor(&[&path(&root), "--json"]), "version", "").0, "ok");
    drop(unmount);
}

/// Unmounts when the test ends, however it ends.
struct Unmount(std::path::PathBuf);

impl Drop for Unmount {
    fn drop(&mut self) {
        if !Command::new(LEASEFS).arg("unmount").arg(&self.0).quietly_in_time() {
            let _ = umount2(&self.0, MntFlags::MNT_DETACH);
        }
    }
}

#[test]
fn a_keeper_whose_tree_is_out_of_sight_is_named() {
    let mount = Mount::new();
    let agent = Agent::new();
    let fd = agent.create(&mount.claim("k")).expect("free key");
    let keeper = mount.keeper_pid().expect("a keeper");
    kill(Pid::from_raw(keeper), Signal::SIGTERM).expect("it is there");
    wait_for("the tree is out of sight", || mount.keeper_pid().is_none());
    let output = doctor(&["--json"]);
    let (verdict, text, cure) = found(&output, "keepers", "");
    let named = text.split(|c: char| !c.is_ascii_digit()).any(|word| word == keeper.to_string());
    assert!(verdict == "warn" && named && cure.contains("kill -TERM"), "{text}: {cure}");
    agent.close(fd);
    drop(agent);
    wait_for("its end", || crate::common::agent::has_ended(keeper));
}

/// A filesystem in memory, gone with the value.
struct Tmpfs(std::path::PathBuf);

impl Tmpfs {
    fn new(path: std::path::PathBuf, size: &str) -> Tmpfs {
        fs::create_dir_all(&path).expect("mountpoint");
        let options = format!("size={size}");
        assert_ok(&Command::new("mount").args(["-t", "tmpfs", "-o", &options, "x"]).arg(&path).output_in_time());
        Tmpfs(path)
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

#[test]
fn state_directories_that_will_not_last_or_cannot_be_used() {
    let dir = tempfile::tempdir().expect("directory");
    let of = |state: &Path| doctor(&["/nowhere", "--state", &path(state), "--json"]);

    let memory = Tmpfs::new(dir.path().join("memory"), "16m");
    let output = of(&memory.0);
    let (verdict, text, cure) = found(&output, "state-filesystem", "");
    assert!(verdict == "warn" && text.contains("tmpfs") && text.contains("next boot"), "{text}");
    assert!(cure.contains("--state"), "{cure}");
    assert_eq!(found(&output, "state-space", "MiB free").0, "warn");
    assert_eq!(found(&output, "state", "").0, "warn", "mode 1777");

    let full = Tmpfs::new(dir.path().join("full"), "64k");
    assert_eq!(found(&of(&full.0), "state-space", "ENOSPC").0, "fail");

    let (verdict, text, cure) = found(&of(&dir.path().join("no/such/place")), "state", "");
    assert!(verdict == "fail" && text.contains("does not exist") && cure.contains("mkdir"), "{text}");

    assert_eq!(found(&of(&dir.path().join("new")), "state", "is made by the first mount").0, "ok");
    assert!(!dir.path().join("new").exists(), "it only looks");
    fs::write(dir.path().join("file"), "").expect("file");
    assert_eq!(found(&of(&dir.path().join("file")), "state", "").0, "fail");
}

#[test]
fn a_state_directory_may_be_named_from_where_one_is() {
    let dir = tempfile::tempdir().expect("directory");
    fs::create_dir(dir.path().join("there")).expect("mkdir");
    let doctor = |state: &str| {
        let mut doctor = Command::new(LEASEFS);
        doctor.args(["doctor", "--json", "--state", state]).current_dir(dir.path()).output_in_time()
    };
    for state in ["new", "there/new", "./there/new"] {
        let (verdict, text, _) = found(&doctor(state), "state", "new");
        assert!(verdict == "ok" && text.contains("made by the first mount"), "{state}: {text}");
    }
    let (verdict, text, _) = found(&doctor("nowhere/new"), "state", "new");
    assert!(verdict == "fail" && text.ends_with("nowhere does not exist"), "{text}");
}

#[test]
fn a_registry_that_cannot_be_served_is_found_before_it_is_mounted() {
    let mut mount = Mount::new();
    let agent = Agent::new();
    agent.create(&mount.claim("k")).expect("free key");
    drop(agent);
    mount.unmount();
    let of = || doctor(&["/nowhere", "--state", &path(&mount.state()), "--json"]);
    assert_eq!(found(&of(), "registry", "").0, "ok");
    let registry = mount.state().join("registry.db");
    let set_version = |version: u32| {
        let registry = rusqlite::Connection::open(&registry).expect("registry");
        let before = registry.query_row("PRAGMA user_version", [], |row| row.get::<_, u32>(0)).expect("version");
        registry.execute_batch(&format!("PRAGMA user_version = {version}")).expect("SQL");
        before
    };
    let version = set_version(9999);
    let (verdict, text, _) = found(&of(), "registry", "");
    assert!(verdict == "fail" && text.contains("newer leasefs (schema 9999"), "{text}");
    set_version(version);
    fs::write(&registry, vec![0x5a; 8192]).expect("registry");
    let (verdict, text, _) = found(&of(), "registry", "");
    assert!(verdict == "fail" && text.contains("damaged"), "{text}");
}

#[test]
fn what_a_container_lacks_is_found() {
    let run = |program: &str, arguments: &[&str]| {
        Command::new("timeout").arg("60").arg(program).args(arguments).output_in_time()
    };
    // No device.
    let script = format!("mount -t tmpfs none /dev && exec {LEASEFS} doctor /nowhere --json");
    let output = run("unshare", &["-m", "sh", "-c", &script]);
    let (verdict, text, cure) = found(&output, "device", "");
    assert!(verdict == "fail" && text.contains("does not exist") && cure.contains("--device /dev/fuse"), "{text}");
    assert_eq!(output.status.code(), Some(1));
    // A pid namespace of its own.
    let output = run("unshare", &["-p", "-f", "--mount-proc", LEASEFS, "doctor", "/nowhere", "--json"]);
    let (verdict, text, cure) = found(&output, "pid-namespace", "");
    assert!(verdict == "warn" && text.contains("does not see") && cure.contains("--pid host"), "{text}");
    // Root without rights.
    for (capability, check, verdict, word) in
        [("sys_admin", "mounting", "fail", "SYS_ADMIN"), ("sys_ptrace", "ptrace", "warn", "SYS_PTRACE")]
    {
        let without = format!("--bounding-set=-{capability}");
        let output = run("setpriv", &[&without, LEASEFS, "doctor", "/nowhere", "--json"]);
        let found = found(&output, check, "");
        assert!(found.0 == verdict && found.2.contains(word), "{capability}: {found:?}");
    }
    // Processes that are hidden.
    let place = Mount::unserved();
    let script = format!(
        "mount -t proc -o hidepid=2 proc /proc && exec setpriv --reuid 12345 --clear-groups {} doctor /nowhere --json",
        leasefs_for_all(&place).display()
    );
    let output = run("unshare", &["-m", "sh", "-c", &script]);
    assert_eq!(found(&output, "proc", "hides").0, "warn");
}

#[test]
fn how_far_a_tree_is_seen_is_told() {
    let mount = Mount::new();
    let of = |how: &str| {
        let root = path(&mount.root());
        let script = format!("mount --make-{how} {root} && exec {LEASEFS} doctor {root} --json");
        let output = Command::new("unshare").args(["-m", "sh", "-c", &script]).output_in_time();
        found(&output, "propagation", &root)
    };
    assert_eq!(of("shared").0, "ok");
    let (verdict, text, cure) = of("private");
    assert!(verdict == "warn" && text.contains("private") && cure.contains("--make-rshared"), "{text}: {cure}");
}

#[test]
fn a_place_to_mount_on_is_judged_as_mount_does() {
    let dir = tempfile::tempdir().expect("directory");
    let state = path(&dir.path().join("state"));
    let of = |at: &Path| doctor(&[&path(at), "--state", &state, "--json"]);
    fs::create_dir(dir.path().join("empty")).expect("mkdir");
    assert_eq!(found(&of(&dir.path().join("empty")), "mountpoint", "can be mounted on").0, "ok");
    let (verdict, text, cure) = found(&of(dir.path()), "mountpoint", "");
    assert!(verdict == "fail" && text.contains("is not empty") && cure == "give an empty directory", "{text}: {cure}");
    let (_, text, cure) = found(&of(&dir.path().join("nowhere")), "mountpoint", "");
    assert!(text.contains("does not exist") && cure == "mkdir it first", "{text}: {cure}");
}
