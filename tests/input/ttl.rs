//! TTLs: the forms there are, and that every other is `EINVAL` and changes nothing.

use std::fs;
use std::process::Command;

use nix::errno::Errno;
use serde_json::json;

use crate::common::agent::Agent;
use crate::common::{InTime, LEASEFS, Mount, assert_refused};
use crate::place::{Place, assert_not_mounted};

const TTL: &str = "user.lease.ttl";

const BAD: [&str; 34] = [
    "",
    "0",
    "0s",
    "0ms",
    "0d",
    "-1s",
    "-5m",
    "+5s",
    "90",
    "s",
    "ms",
    "h1",
    "90x",
    "90sec",
    "5min",
    "90S",
    "1.5h",
    "1,5h",
    "1e3s",
    " 90s",
    "90s ",
    "90 s",
    "90s\n",
    "90s\0",
    "1h 30m",
    "1m1h",
    "1s1m",
    "1h1h",
    "366d",
    "365d1ms",
    "8761h",
    "18446744073709551616s",
    "999999999999999999999999d",
    "９０s",
];

const GOOD: [(&str, u64); 10] = [
    ("90s", 90_000),
    ("15m", 900_000),
    ("24h", 86_400_000),
    ("1h30m", 5_400_000),
    ("500ms", 500),
    ("1s500ms", 1_500),
    ("1d12h", 129_600_000),
    ("2h30m15s", 9_015_000),
    ("365d", 31_536_000_000),
    ("8760h", 31_536_000_000),
];

#[test]
fn bad_ttls_are_einval_on_keys_and_namespaces() {
    let mount = Mount::new();
    let (key, namespace) = (mount.claim("k"), mount.claim("ns"));
    let agent = Agent::new();
    agent.create(&key).expect("free key");
    fs::create_dir(&namespace).expect("mkdir");
    agent.set_xattr(&namespace, TTL, "2h").expect("root");
    let status = mount.status("k");
    for value in BAD {
        assert_eq!(agent.set_xattr(&key, TTL, value), Err(Errno::EINVAL), "a key's, {value:?}");
        assert_eq!(agent.set_xattr(&namespace, TTL, value), Err(Errno::EINVAL), "a namespace's, {value:?}");
    }
    for hex in ["ff", "3930ff73", "00"] {
        assert_eq!(agent.call("setxattr", json!([key, TTL, { "hex": hex }])), Err(Errno::EINVAL), "bytes {hex}");
    }
    assert_eq!(mount.status("k"), status, "the deadline stays");
    assert_eq!(agent.call("getxattr", json!([namespace, TTL])), Ok(json!("2h")));
    agent.create(&namespace.join("k")).expect("free key");
    assert_eq!(mount.status("ns/k")["ttl_ms"], 7_200_000);
}

#[test]
fn good_ttls_are_taken_as_they_are_meant() {
    let mount = Mount::new();
    let path = mount.claim("ns");
    fs::create_dir(&path).expect("mkdir");
    let agent = Agent::new();
    for (number, (value, ttl_ms)) in GOOD.into_iter().enumerate() {
        agent.set_xattr(&path, TTL, value).unwrap_or_else(|e| panic!("{value}: {e}"));
        agent.create(&path.join(format!("k{number}"))).expect("free key");
        assert_eq!(mount.status(&format!("ns/k{number}"))["ttl_ms"], ttl_ms, "{value}");
    }
}

/// As `setxattr(2)` has it: the one flag is for an attribute that is not there, the other for one that is.
#[test]
fn attributes_are_created_or_replaced_as_asked() {
    let mount = Mount::new();
    let agent = Agent::new();
    agent.create(&mount.claim("k")).expect("free key");
    fs::create_dir(mount.claim("ns")).expect("mkdir");
    let set = |key: &str, name: &str, flags: i32| {
        let value = json!({ "hex": "393073" });
        agent.call("setxattr", json!([mount.claim(key), name, value, flags])).map(drop)
    };
    const NAME: &str = "user.lease.agent";
    assert_eq!(set("k", TTL, libc::XATTR_CREATE), Err(Errno::EEXIST), "every lease has one");
    assert_eq!(mount.status("k")["ttl_ms"], 86_400_000);
    assert_eq!(set("k", TTL, libc::XATTR_REPLACE), Ok(()));
    assert_eq!(mount.status("k")["ttl_ms"], 90_000);
    for (key, name) in [("k", NAME), ("ns", TTL)] {
        assert_eq!(set(key, name, libc::XATTR_REPLACE), Err(Errno::ENODATA), "{key}");
        assert_eq!(set(key, name, libc::XATTR_CREATE), Ok(()), "{key}");
        assert_eq!(set(key, name, libc::XATTR_CREATE), Err(Errno::EEXIST), "{key}");
        assert_eq!(set(key, name, libc::XATTR_REPLACE), Ok(()), "{key}");
    }
}

#[test]
fn other_attributes_are_refused() {
    let mount = Mount::new();
    let agent = Agent::new();
    agent.create(&mount.claim("k")).expect("free key");
    fs::create_dir(mount.claim("ns")).expect("mkdir");
    for path in
        [mount.claim("k"), mount.claim("ns"), mount.root().join("status/k"), mount.root().join(".leasefs/version")]
    {
        for name in ["user.lease.epoch", "user.lease.tt", "user.note", "security.leasefs", "trusted.leasefs"] {
            let answer = agent.set_xattr(&path, name, "90s");
            assert_eq!(answer, Err(Errno::EOPNOTSUPP), "{name} on {}", path.display());
        }
    }
    let told = agent.set_xattr(&mount.root().join("status/k"), TTL, "90s");
    assert_eq!(told, Err(Errno::EOPNOTSUPP), "status only tells");
    assert_eq!(mount.status("k")["ttl_ms"], 86_400_000);
}

#[test]
fn mount_and_run_refuse_bad_ttls() {
    let place = Place::new();
    for value in ["-5s", "0s", "366d", "90", "soon", ""] {
        let output = place.mount_at(&place.mnt(), &place.state(), &[&format!("--ttl={value}")]);
        assert!(!output.status.success(), "--ttl={value}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("ttl"), "{}", String::from_utf8_lossy(&output.stderr));
        assert_not_mounted(&place.mnt());
    }
    let mount = Mount::new();
    for value in ["-5s", "0s", "366d", "90", "soon", ""] {
        let output = Command::new(LEASEFS)
            .env("LEASEFS_ROOT", mount.root())
            .args(["run", "-n", &format!("--ttl={value}"), "k", "--", "true"])
            .output_in_time();
        assert_refused(&output, 2, &["--ttl"]);
    }
    assert_eq!(mount.state_of("k"), "free", "nothing was granted");
    assert!(!mount.root().join("status/k").exists(), "nor was there ever an attempt");
}
