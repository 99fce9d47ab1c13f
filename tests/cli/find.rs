//! How commands find the tree and the key that are meant.

use std::fs;

use super::common::{Mount, assert_ok, stdout};
use super::{assert_refused, hold};
use crate::common::InTime;

#[test]
fn the_tree_is_found_by_argument_environment_key_and_working_directory() {
    let mount = Mount::new();
    let other = Mount::new();
    let _held = hold(&mount, "job");
    let root = mount.root();
    let leasefs = |args: &[&str]| {
        let mut command = other.command(super::LEASEFS);
        command.args(args);
        command
    };
    let root_arg = root.to_str().expect("path");
    assert_ok(&leasefs(&["status", "--root", root_arg, "job"]).output_in_time());
    // The environment names the other tree, which has no such key.
    assert_eq!(leasefs(&["status", "job"]).output_in_time().status.code(), Some(1));
    let path = mount.claim("job");
    let by_path = leasefs(&["status", path.to_str().expect("path")]).env_remove("LEASEFS_ROOT").output_in_time();
    assert_ok(&by_path);
    for dir in [root.clone(), root.join("claims"), root.join(".leasefs")] {
        let by_cwd = leasefs(&["status", "job"]).env_remove("LEASEFS_ROOT").current_dir(dir).output_in_time();
        assert_ok(&by_cwd);
    }
    // Two trees at least are mounted, and nothing says which.
    let neither = leasefs(&["status", "job"]).env_remove("LEASEFS_ROOT").current_dir("/").output_in_time();
    assert_refused(&neither, 2, &["several trees are mounted", "--root"]);
}

#[test]
fn a_mountpoint_reached_by_a_symlink_is_the_same() {
    let mount = Mount::new();
    let _held = hold(&mount, "job");
    let link = mount.scratch().join("link");
    std::os::unix::fs::symlink(mount.root(), &link).expect("symlink");
    let args = ["status", "--json", "--root", link.to_str().expect("path")];
    let through = link.join("claims/job");
    for key in ["job", through.to_str().expect("path"), mount.claim("job").to_str().expect("path")] {
        let output = mount.leasefs(&[&args[..], &[key]].concat());
        assert_ok(&output);
        assert!(stdout(&output).contains("\"key\":\"job\""));
    }
}

#[test]
fn what_is_no_tree_is_said_to_be_none() {
    let mount = Mount::new();
    let dir = mount.scratch();
    fs::write(dir.join("file"), "").expect("file");
    for path in [dir.clone(), dir.join("file"), dir.join("missing")] {
        let output = mount.leasefs(&["ls", "--root", path.to_str().expect("path")]);
        assert_refused(&output, 2, &["no leasefs tree is mounted here", "leasefs mount"]);
    }
    assert_refused(&mount.leasefs(&["status", "/etc/passwd"]), 2, &["/etc/passwd: not below"]);
}

#[test]
fn a_reader_that_has_seen_enough_is_no_error() {
    let mount = Mount::new();
    let _held: Vec<_> = (0..400).map(|n| hold(&mount, &format!("a-key-with-a-rather-long-name-{n}"))).collect();
    let output = mount.bash(&format!("set -o pipefail; {0} ls --json | head -n 1 | wc -l", super::LEASEFS));
    assert_ok(&output);
    assert_eq!((stdout(&output).trim(), super::stderr(&output).as_str()), ("1", ""));
}
