//! A container keeps its lease: it holds, waits in line for others, and commits a result while the server is killed twenty
//! times and replaced by an upgrade.
//!
//! The image has a static busybox, util-linux' `flock` with what it is linked to, and nothing else.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Stdio;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::common::{Background, InTime, LEASEFS, Mount, assert_ok, shown_once, wait_for};
use crate::rig::{Podman, with_libraries};

/// What the container does. It stops at each file below `/sync` that the test makes, and says where it is by making others.
const SCRIPT: &str = r#"
set -eu
busybox=/bin/busybox
M=/leases
until_there() { until [ -e "/sync/$1" ]; do $busybox usleep 10000; done; }

exec 9<>$M/claims/job
flock -n 9
read -r epoch <&9
# The lease is looked at all the time: locking it again renews it, or fails if it was lost.
(until [ -e /sync/end ]; do flock -n 9 || echo lost; $busybox usleep 5000; done >/sync/lost 2>&1) &
watcher=$!
exec 7>$M/results/job/$epoch
echo one >&7
echo "$epoch" >/sync/held

exec 8<>$M/claims/other
echo waits >/sync/waits
flock 8
read -r other <&8
echo "$other" >/sync/got
exec 8>&-

until_there write
echo two >&7
exec 7>&-
$busybox cat $M/results/job/latest >/sync/result
echo done >/sync/done
until_there end
wait $watcher
"#;

/// Kills the server, and waits until another answers.
fn kill_server(mount: &Mount) {
    let old = mount.server_pid().expect("a server");
    kill(Pid::from_raw(old), Signal::SIGKILL).expect("the server can be killed");
    wait_for("another server", || mount.server_pid().is_some_and(|pid| pid != old));
}

#[test]
fn a_container_keeps_its_lease_while_the_server_is_killed_and_upgraded() {
    let mount = Mount::shared();
    let sync = mount.scratch().join("sync");
    fs::create_dir(&sync).expect("mkdir");
    let told = |name: &str| fs::read_to_string(sync.join(name)).unwrap_or_default().trim().to_owned();
    let tell = |name: &str| drop(File::create(sync.join(name)).expect("a file of the test's own"));

    let podman = Podman::new(mount.scratch().join("podman"));
    let busybox = fs::canonicalize("/bin/busybox").expect("busybox-static is installed");
    let mut files = vec![busybox, PathBuf::from("/bin/busybox")];
    files.extend(with_libraries("flock"));
    podman.image("lease", &files);

    // Somebody on the host has what the container waits for.
    let other = mount.spawn_bash("exec 9<>$M/claims/other; flock 9; exec sleep 1000");
    mount.wait_status("other", "held on the host", |status| status["state"] == "held");

    let errors = mount.scratch().join("errors");
    let container = podman
        .command()
        .args(["run", "--rm", "--network", "none", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096"])
        .arg("-v")
        .arg(format!("{}:/leases", mount.root().display()))
        .arg("-v")
        .arg(format!("{}:/sync", sync.display()))
        .args(["--env", "PATH=/bin:/usr/bin", "lease", "/bin/busybox", "sh", "-c", SCRIPT])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(File::create(&errors).expect("file for its errors"))
        .spawn()
        .expect("podman runs");
    let mut container = Background(container);
    let is_alive = |container: &mut Background| {
        let ended = container.0.try_wait().expect("podman can be waited for");
        assert!(ended.is_none(), "the container ended: {ended:?}: {}", fs::read_to_string(&errors).unwrap_or_default());
    };
    wait_for("the container waits in line", || {
        is_alive(&mut container);
        !told("waits").is_empty() && mount.status("other")["waiters"] == 1
    });
    assert_eq!(told("held"), "1");
    let holder = mount.status("job")["holder"].clone();
    // From outside, its processes and the container they are in are to be seen.
    let is_inside =
        |keeper: &serde_json::Value| keeper["container"].as_str().is_some_and(|name| name.starts_with("podman:"));
    // Each lock is one by a process that is gone in an instant, perhaps before it is known where it was.
    shown_once("all that have the key are in the container", || {
        let who = mount.leasefs(&["who", "job", "--json"]);
        assert_ok(&who);
        let who: serde_json::Value = serde_json::from_slice(&who.stdout).expect("JSON");
        let keepers = who["processes"].as_array().expect("a list");
        if !keepers.is_empty() && keepers.iter().all(is_inside) { Ok(()) } else { Err(who.to_string()) }
    });

    let check = |container: &mut Background| {
        is_alive(container);
        let job = mount.status("job");
        assert_eq!((job["state"].as_str(), job["epoch"].as_u64()), (Some("held"), Some(1)), "{job}");
        assert_eq!(job["holder"], holder, "{job}");
        assert_eq!(told("lost"), "");
    };
    for _ in 0..10 {
        kill_server(&mount);
        check(&mut container);
        assert_eq!(mount.status("other")["waiters"], 1, "its place in line is kept");
    }
    let before = mount.server_pid();
    assert_ok(&mount.command(LEASEFS).arg("upgrade").output_in_time());
    assert_ne!(mount.server_pid(), before, "another server");
    check(&mut container);
    assert_eq!(mount.status("other")["waiters"], 1, "its place in line is kept");

    drop(other);
    wait_for("the container gets what it waited for", || {
        is_alive(&mut container);
        !told("got").is_empty()
    });
    assert_eq!(told("got"), "2");
    for _ in 0..10 {
        kill_server(&mount);
        check(&mut container);
    }
    assert!(!mount.result("job", 1).exists(), "a draft is not to be seen");
    tell("write");
    wait_for("the result", || {
        is_alive(&mut container);
        !told("done").is_empty()
    });
    assert_eq!(told("result"), "one\ntwo");
    assert_eq!(fs::read_to_string(mount.result("job", 1)).expect("the result"), "one\ntwo\n");
    tell("end");
    assert!(container.wait().success(), "{}", fs::read_to_string(&errors).unwrap_or_default());
    assert_eq!(told("lost"), "");
    assert_eq!(fs::read_to_string(&errors).expect("its errors"), "");
    mount.wait_status("job", "finished", |status| status["state"] == "finished");
    mount.verify();
}
