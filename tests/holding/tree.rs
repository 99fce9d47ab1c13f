//! `.leasefs/`: version, config, metrics; and what `statfs` and `ls` say of the tree.

use std::collections::BTreeMap;
use std::fs;

use libc::{LOCK_EX, LOCK_NB};
use nix::errno::Errno;
use serde_json::{Value, json};

use crate::common::agent::Agent;
use crate::common::{InTime, LEASEFS, Mount, assert_ok, stdout};

fn names(path: &std::path::Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(path)
        .expect("directory")
        .map(|e| e.expect("entry").file_name().into_string().expect("UTF-8"))
        .collect();
    names.sort();
    names
}

#[test]
fn the_root_lists_its_four_parts() {
    let mount = Mount::new();
    assert_eq!(names(&mount.root()), [".leasefs", "claims", "results", "status"]);
    let own = names(&mount.root().join(".leasefs"));
    for file in ["config", "control", "events", "metrics", "version"] {
        assert!(own.contains(&file.to_owned()), "{file} in {own:?}");
    }
}

#[test]
fn version_is_that_of_the_command() {
    let mount = Mount::new();
    let version = fs::read_to_string(mount.root().join(".leasefs/version")).expect("version");
    assert!(version.contains(env!("CARGO_PKG_VERSION")), "{version}");
    let output = std::process::Command::new(LEASEFS).arg("--version").output_in_time();
    assert!(stdout(&output).contains(env!("CARGO_PKG_VERSION")));
}

#[test]
fn config_tells_how_the_tree_was_mounted() {
    let mount = Mount::with(&["--ttl", "90s", "--max-result", "1MiB", "--max-keys", "7", "--max-waiters", "9"]);
    let text = fs::read_to_string(mount.root().join(".leasefs/config")).expect("config");
    let config: Value = serde_json::from_str(&text).expect("one JSON object");
    assert_eq!(config["ttl_ms"], 90_000);
    assert_eq!(config["max_result"], 1 << 20);
    assert_eq!(config["max_keys"], 7);
    assert_eq!(config["max_waiters"], 9);
    assert_eq!(config["durability"], "process");
    assert_eq!(config["state_dir"], mount.state().to_str().expect("UTF-8"));
    let pid = config["pid"].as_i64().expect("pid");
    assert!(fs::read_link(format!("/proc/{pid}/exe")).expect("the server").ends_with("leasefs"));
}

/// Samples by name and labels; every family has a `# TYPE`.
fn metrics(mount: &Mount) -> BTreeMap<String, f64> {
    let text = fs::read_to_string(mount.root().join(".leasefs/metrics")).expect("metrics");
    let mut samples = BTreeMap::new();
    let mut types = Vec::new();
    for line in text.lines() {
        if let Some(rest) = line.strip_prefix("# TYPE ") {
            types.push(rest.split(' ').next().expect("a name").to_owned());
        } else if !line.starts_with('#') && !line.is_empty() {
            let (name, value) =
                line.rsplit_once(' ').unwrap_or_else(|| panic!("a sample is a name and a value: {line}"));
            let family = name.split('{').next().expect("a name");
            assert!(family.starts_with("leasefs_"), "{line}");
            let known = |family: &str| types.iter().any(|name| name == family);
            let base = ["_bucket", "_sum", "_count"].iter().find_map(|suffix| family.strip_suffix(suffix));
            assert!(known(family) || base.is_some_and(known), "no TYPE before {line}");
            let old = samples.insert(name.to_owned(), value.parse().unwrap_or_else(|e| panic!("{e}: {line}")));
            assert!(old.is_none(), "twice: {line}");
        }
    }
    samples
}

#[test]
fn metrics_are_prometheus_text_and_count() {
    let mount = Mount::new();
    let agent = Agent::new();
    let path = mount.claim("k");
    agent.close(agent.create(&path).expect("free key"));
    let before = metrics(&mount);
    for _ in 0..17 {
        let fd = agent.create(&path).expect("free key");
        agent.close(fd);
    }
    let fd = agent.create(&path).expect("free key");
    let other = Agent::new();
    let handle = other.handle(&path);
    for _ in 0..5 {
        // (An exclusive create of a held key is refused by the kernel itself, which sees the file.)
        assert_eq!(other.flock(handle, LOCK_EX | LOCK_NB), Err(Errno::EAGAIN));
    }
    let after = metrics(&mount);
    for (name, amount) in [
        ("leasefs_grants_total{via=\"create\"}", 18.0),
        ("leasefs_releases_total", 17.0),
        ("leasefs_denials_total", 5.0),
        ("leasefs_held", 1.0),
    ] {
        assert_eq!(after[name] - before[name], amount, "{name}");
    }
    agent.close(fd);
}

#[test]
fn the_trees_own_files_cannot_be_changed() {
    let mount = Mount::new();
    let agent = Agent::new();
    let root = mount.root();
    for file in ["version", "config", "metrics", "events"] {
        let path = root.join(".leasefs").join(file);
        assert_eq!(agent.open(&path, libc::O_WRONLY), Err(Errno::EACCES), "{file}");
        assert_eq!(agent.unlink(&path), Err(Errno::EPERM), "{file}");
    }
    for path in [".leasefs/new", "new", "status/new"] {
        assert_eq!(agent.create(&root.join(path)), Err(Errno::EPERM), "{path}");
        assert_eq!(agent.call("mkdir", json!([root.join(path)])), Err(Errno::EPERM), "{path}");
    }
    for path in ["claims", "results", "status", ".leasefs"] {
        assert_eq!(agent.call("rmdir", json!([root.join(path)])), Err(Errno::EPERM), "{path}");
    }
    assert_eq!(names(&root), [".leasefs", "claims", "results", "status"]);
}

#[test]
fn statfs_and_df_answer() {
    let mount = Mount::new();
    let agent = Agent::new();
    for path in ["", "claims", "results", "status", ".leasefs"] {
        let stat = agent.call("statvfs", json!([mount.root().join(path)])).expect("statfs");
        assert_eq!(stat["f_namemax"], 255, "{path}");
        assert!(stat["f_bsize"].as_u64() > Some(0), "{stat}");
        assert!(stat["f_blocks"].as_u64() > Some(0), "the room of the state directory: {stat}");
        assert!(stat["f_bavail"].as_u64() <= stat["f_blocks"].as_u64());
    }
    let output = mount.bash("df $M && stat -f $M && grep -q \" $M fuse.leasefs \" /proc/self/mounts");
    assert_ok(&output);
}
