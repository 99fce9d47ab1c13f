//! What a server cannot see proves nothing.

use std::process::{Command, Stdio};

use crate::common::agent::Agent;
use crate::common::{InTime, LEASEFS, assert_ok, stdout};
use crate::lost::Lost;

#[test]
fn processes_that_may_not_be_looked_into() {
    let tree = Lost::new();
    let (dead, alive) = (Agent::new(), Agent::new());
    dead.create(&tree.claim("dead")).expect("free");
    alive.create(&tree.claim("alive")).expect("free");
    tree.lose_connection();
    dead.kill();
    // A root that may not trace: processes with more rights than it are shut to it.
    let mut mount = Command::new("setpriv");
    mount.args(["--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace", LEASEFS, "mount"]);
    mount.arg(tree.root()).arg("--state").arg(tree.state()).args(["--durability", "process"]);
    assert_ok(&mount.stdin(Stdio::null()).output_in_time());
    for key in ["dead", "alive"] {
        tree.wait_why(key, "cannot be looked into: Permission denied");
        tree.assert_refused(key);
    }
    // The kernel's own word counts all the same.
    alive.kill();
    for key in ["dead", "alive"] {
        assert_eq!(tree.wait_lost(key), 2);
    }
}

#[test]
fn other_pid_namespaces() {
    let place = tempfile::tempdir().expect("directory");
    // All of it happens in a namespace that ends, with every process and mount in it, when the script does.
    let script = r#"
set -eu
# Copies of the neighbours' mounts would keep those alive.
while read -r _ _ _ _ path _; do
    case $path in */leasefs-test-*/*) umount -l "$path" || true ;; esac
done </proc/self/mountinfo
cd "$1"; mkdir mnt
start() { "$2" mount "$1/mnt" --state "$1/state" --durability process; }
start "$@"
bash -c 'set -C; exec 9>mnt/claims/alive; exec sleep 1000' &
bash -c 'set -C; exec 9>mnt/claims/dead; exec sleep 1000' & dead=$!
until [ -e mnt/claims/alive ] && [ -e mnt/claims/dead ]; do sleep 0.01; done
for exe in /proc/[0-9]*/exe; do
    # The server goes with its keeper, maybe before it is its turn.
    [ ! "$exe" -ef "$2" ] || kill -9 "${exe//[!0-9]/}" || true
done
kill -9 $dead
wait $dead || true
until start "$@" 2>/dev/null; do sleep 0.01; done
until "$2" status dead 2>/dev/null | grep -q 'pid namespaces'; do sleep 0.01; done
"$2" status dead
"$2" ls
"#;
    let output = Command::new("timeout")
        .args(["-s", "KILL", "240", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", script])
        .arg("bash")
        .arg(place.path())
        .arg(LEASEFS)
        .env("LEASEFS_ROOT", place.path().join("mnt"))
        .stdin(Stdio::null())
        .output_in_time();
    assert_ok(&output);
    let said = stdout(&output);
    assert!(said.contains("because  other pid namespaces cannot be seen"), "{said}");
    assert!(
        said.lines().any(|line| line.starts_with("alive") && line.ends_with("(sleep) still has it open")),
        "{said}"
    );
}
