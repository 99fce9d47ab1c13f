//! A container in a user namespace of its own: its users are others to the tree, and its root is nobody special.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

use crate::common::{Mount, assert_ok, stdout};
use crate::rig::{Podman, Shell};

/// What the container's root is outside.
const MAPPED: u32 = 100_000;

#[test]
fn the_root_of_a_user_namespace_is_an_ordinary_user_of_the_tree() {
    let mount = Mount::shared();
    let podman = Podman::new(mount.scratch().join("podman"));
    podman.empty_image("empty");
    let map = format!("0:{MAPPED}:1000");
    let mut inside = podman.shell(&mount, "mapped", &["--uidmap", &map, "--gidmap", &map]);
    let mut host = Shell::host(&mount);
    assert_eq!(inside.must("id -u"), "0");

    // The tree sees the id outside, whatever the container calls it; and the container its own.
    inside.must("exec 9<>$M/claims/k; flock -n 9; read -r epoch <&9");
    assert_eq!(mount.status("k")["holder"]["uid"], MAPPED);
    assert_ne!(mount.status("k")["holder"]["pid"], 0);
    assert_eq!(fs::metadata(mount.claim("k")).expect("its file").uid(), MAPPED);
    assert_eq!(inside.must("stat -c %u $M/claims/k"), "0");
    assert_eq!(host.try_all("k"), "EEXIST EAGAIN EAGAIN EAGAIN EAGAIN ");
    inside.must("echo done >$M/results/k/$epoch && cat $M/results/k/latest && exec 9>&-");
    assert_eq!(fs::metadata(mount.result("k", 1)).expect("a result").uid(), MAPPED);

    // What is somebody else's outside stays theirs.
    host.must("exec 8<>$M/claims/hosts; flock -n 8");
    assert_eq!(inside.try_all("hosts"), "EEXIST EAGAIN EAGAIN EAGAIN EAGAIN ");
    assert_eq!(inside.must("stat -c %u $M/claims/hosts"), "65534", "an id that is not mapped");
    let (status, said) = inside.ask("rm -f $M/claims/hosts");
    assert!(status != 0 && said.contains("busy"), "{said}");
    let (status, said) = inside.ask("echo forged >$M/results/hosts/1");
    assert!(status != 0 && said.contains("Permission denied"), "{said}");
    let order = r#"printf '{"op":"evict","key":"hosts","epoch":1}' >$M/.leasefs/control"#;
    let (status, said) = inside.ask(order);
    assert!(status != 0 && said.contains("Permission denied"), "its root may not evict: {said}");
    assert_eq!(mount.state_of("hosts"), "held");

    // A namespace is shut to it, or its own, by the id outside.
    let team = mount.claim("team");
    fs::create_dir(&team).expect("mkdir");
    fs::set_permissions(&team, fs::Permissions::from_mode(0o770)).expect("chmod");
    assert_eq!(inside.try_all("team/x"), "EACCES EACCES EACCES EACCES EACCES ");
    chown(&team, Some(MAPPED), None).expect("chown");
    assert_eq!(inside.try_all("team/x"), "ok ok ok ok ok ");
    assert_eq!(count_evicted(&mount), 0);
    // By group as well, as everywhere.
    chown(&team, Some(0), Some(MAPPED + 7)).expect("chown");
    assert_eq!(inside.try_all("team/x"), "EACCES EACCES EACCES EACCES EACCES ");
    let by_group =
        inside.must("setpriv --groups 7 python3 -S $CLAIM try $M/claims/team/x create flock posix ofd shared");
    assert_eq!(by_group, "ok ok ok ok ok ");
    mount.verify();
}

fn count_evicted(mount: &Mount) -> usize {
    let history = mount.leasefs(&["history", "hosts"]);
    assert_ok(&history);
    stdout(&history).matches("evicted").count()
}
