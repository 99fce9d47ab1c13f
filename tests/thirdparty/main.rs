//! Foreign programs on a mounted tree: those that `scripts/test` installs anyway, each as holder against each other.
//!
//! The rest, with their own suites, is for `scripts/thirdparty`: it fetches them. README.md has what they showed.
#[path = "../common/mod.rs"]
mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;

use serde_json::Value;

use common::{InTime, LEASEFS, Mount, stdout};

/// Every one takes a lease, so each keeps each other out.
const LEASES: [&str; 9] =
    ["flock -x", "py flock", "py lockf", "py OFD", "perl flock", "set -C", "py open x", "leasefs run", "flock -s"];

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// `scripts/thirdparty`, with a cache of its own that nothing is fetched into.
fn thirdparty(mount: &Mount, arguments: &[&str], directory: &Path) -> Output {
    let script = repository().join("scripts/thirdparty");
    let mut command = mount.command(script.to_str().expect("a path in UTF-8"));
    command.env("LEASEFS_BIN", LEASEFS).arg("--cache").arg(mount.scratch().join("cache"));
    command.args(arguments).arg(directory).output_in_time()
}

#[test]
fn every_holder_keeps_every_contender_out_and_leaves_nothing_behind() {
    let mount = Mount::new();
    let namespace = mount.claim("matrix");
    fs::create_dir(&namespace).expect("a namespace");
    let names = LEASES.join(",");
    let output =
        thirdparty(&mount, &["--matrix", "--json", "--only", &names, "--only", "mkdir,ln -s,create+close"], &namespace);
    let said = stdout(&output);
    let matrix: Value = serde_json::from_str(&said).unwrap_or_else(|e| {
        panic!("{e}: {said}{}", String::from_utf8_lossy(&output.stderr));
    });
    assert!(output.status.success(), "{said}");
    for holder in LEASES {
        for contender in LEASES {
            let both_shared = holder == "flock -s" && contender == "flock -s";
            let expected = if both_shared { "IN" } else { "out" };
            assert_eq!(matrix["cells"][holder][contender], expected, "{holder} holds, {contender} comes: {said}");
        }
        assert_eq!(matrix["cells"][holder]["mkdir"], "out", "a held key becomes no namespace: {said}");
        // The guard of a killed run ends its command first, and then lets go; nobody waits for it.
        let expected = if holder == "leasefs run" { "free " } else { "free at once" };
        assert!(
            matrix["after_kill"][holder].as_str().is_some_and(|left| left.starts_with(expected)),
            "{holder}: {said}"
        );
    }
    assert_eq!(matrix["cells"]["create+close"]["set -C"], "IN", "closing is letting go: {said}");
    assert!(matrix["refused"]["ln -s"].as_str().is_some_and(|why| why.contains("not permitted")), "{said}");
    assert_eq!(matrix["after_kill"]["mkdir"], "stuck", "a plain directory, no lease: {said}");
    mount.verify();
}

#[test]
fn perl_holds_keeps_out_and_lets_go_on_the_tree_and_beside_it() {
    let mount = Mount::new();
    let namespace = mount.claim("perl");
    fs::create_dir(&namespace).expect("a namespace");
    for directory in [namespace, mount.scratch()] {
        let output = thirdparty(&mount, &["--only", "perl"], &directory);
        assert!(output.status.success(), "{}{}", stdout(&output), String::from_utf8_lossy(&output.stderr));
        assert!(stdout(&output).contains("perl: 4 passed, 0 failed, 0 skipped"), "{}", stdout(&output));
    }
}

/// A table that judged nothing would let everything pass.
#[test]
fn the_table_of_expected_failures_tells_both_ways() {
    let mount = Mount::new();
    let output = mount
        .command("python3")
        .current_dir(repository().join("tests/thirdparty"))
        .env("PYTHONDONTWRITEBYTECODE", "1")
        .arg("selftest.py")
        .output_in_time();
    assert!(output.status.success(), "{}{}", stdout(&output), String::from_utf8_lossy(&output.stderr));
}
