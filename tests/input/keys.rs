//! Names that are no keys, names that are, and that no two of those are the same key.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use nix::errno::Errno;
use serde_json::{Value, json};

use crate::common::Mount;
use crate::common::agent::Agent;

/// A path of raw bytes, as agents take it.
fn raw(directory: &Path, name: &[u8]) -> Value {
    let bytes = [directory.as_os_str().as_bytes(), b"/", name].concat();
    json!({ "hex": bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>() })
}

/// Every way to make a key or a namespace is refused with this errno.
fn assert_refused(agent: &Agent, directory: &Path, name: &[u8], errno: Errno) {
    let path = raw(directory, name);
    let shown = String::from_utf8_lossy(name);
    for flags in [
        libc::O_RDWR | libc::O_CREAT | libc::O_EXCL,
        libc::O_RDWR | libc::O_CREAT,
        libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC,
    ] {
        assert_eq!(agent.call("open", json!([path, flags, 0o666])), Err(errno), "open {shown:?}, flags {flags:o}");
    }
    assert_eq!(agent.call("mkdir", json!([path, 0o777])), Err(errno), "mkdir {shown:?}");
    // Each part may be there: it is the whole that is too long.
    let unseen = if errno == Errno::ENAMETOOLONG && name.len() <= 255 { Errno::ENOENT } else { errno };
    assert_eq!(agent.call("stat", json!([path])), Err(unseen), "stat {shown:?}");
}

/// No key and no namespace came of it.
fn assert_nothing_there(mount: &Mount) {
    for subtree in ["claims", "results", "status"] {
        assert_eq!(fs::read_dir(mount.root().join(subtree)).expect(subtree).count(), 0, "{subtree}");
    }
}

#[test]
fn control_characters_are_einval() {
    let mount = Mount::new();
    let agent = Agent::new();
    let claims = mount.root().join("claims");
    for byte in (1..0x20).chain([0x7f]) {
        assert_refused(&agent, &claims, &[b'a', byte, b'b'], Errno::EINVAL);
    }
    for name in ["\n", "a\u{80}", "\u{85}", "a\u{9f}b"] {
        assert_refused(&agent, &claims, name.as_bytes(), Errno::EINVAL);
    }
    assert_nothing_there(&mount);
}

#[test]
fn what_is_not_utf8_is_eilseq() {
    let mount = Mount::new();
    let agent = Agent::new();
    let names: [&[u8]; 7] = [b"\xff", b"a\xc3", b"\xc3(", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf4\x90\x80\x80", b"ok\x80"];
    for name in names {
        assert_refused(&agent, &mount.root().join("claims"), name, Errno::EILSEQ);
    }
    assert_nothing_there(&mount);
}

#[test]
fn a_part_has_at_most_255_bytes() {
    let mount = Mount::new();
    let agent = Agent::new();
    let claims = mount.root().join("claims");
    for name in ["a".repeat(256), "é".repeat(128), "a".repeat(1000)] {
        assert_refused(&agent, &claims, name.as_bytes(), Errno::ENAMETOOLONG);
    }
    assert_nothing_there(&mount);
    for name in ["a".repeat(255), format!("{}x", "é".repeat(127))] {
        let fd = agent.create(&claims.join(&name)).expect("255 bytes are a part");
        assert_eq!(mount.status(&name)["key"], name);
        agent.close(fd);
    }
}

#[test]
fn a_key_has_at_most_1024_bytes() {
    let mount = Mount::new();
    let agent = Agent::new();
    let namespace = vec!["n".repeat(250); 4].join("/");
    let directory = mount.claim(&namespace);
    fs::create_dir_all(&directory).expect("mkdir");
    assert_eq!(namespace.len(), 1003);
    let longest = format!("{namespace}/{}", "k".repeat(20));
    let fd = agent.create(&mount.claim(&longest)).expect("1,024 bytes are a key");
    assert_eq!(mount.status(&longest)["key"], longest);
    agent.close(fd);
    assert_refused(&agent, &directory, &[b'k'; 21], Errno::ENAMETOOLONG);
    assert_eq!(fs::read_dir(&directory).expect("namespace").count(), 0);
}

#[test]
fn what_looks_odd_is_a_key_and_nothing_is_folded() {
    let mount = Mount::new();
    let agent = Agent::new();
    let names = [
        "k",
        "K",
        "k ",
        " k",
        "é",
        "e\u{301}",
        "ﬁ",
        "fi",
        "...",
        "-n",
        "*",
        "%2F",
        "%2f",
        "a:b",
        "a\\b",
        "~",
        "con",
        "nul.txt",
        "🦀",
        "\u{200b}",
        "latest",
        "1",
        "0",
        ".leasefs",
        "status",
        "\"quoted\"",
        "$HOME",
        "a'b",
    ];
    for name in names {
        let fd = agent.create(&mount.claim(name)).unwrap_or_else(|e| panic!("{name:?}: {e}"));
        assert_eq!(agent.epoch(fd), Ok(1), "{name:?} is a key of its own");
        let status = mount.status(name);
        assert_eq!((&status["key"], &status["state"]), (&json!(name), &json!("held")));
    }
    let mut listed: Vec<String> = fs::read_dir(mount.root().join("claims"))
        .expect("claims")
        .map(|entry| entry.expect("entry").file_name().into_string().expect("UTF-8"))
        .collect();
    let mut expected = names.map(str::to_owned);
    listed.sort();
    expected.sort();
    assert_eq!(listed, expected, "each by its own bytes");
    for name in names {
        let draft = agent.handle(&mount.result(name, 1));
        agent.write(draft, name).expect("registered attempt");
        agent.close(draft);
    }
    for name in names {
        assert_eq!(fs::read_to_string(mount.result(name, 1)).expect("committed"), name, "to each its own result");
    }
}

#[test]
fn the_command_refuses_what_is_no_key() {
    let mount = Mount::new();
    for key in ["", "a\nb", "a//b", "../k", "/etc/passwd", "a/./b"] {
        for arguments in [
            vec!["status", key],
            vec!["history", key],
            vec!["run", "-n", key, "--", "true"],
            vec!["evict", key, "--epoch", "1"],
        ] {
            let output = mount.leasefs(&arguments);
            let code = if arguments[0] == "run" { 125 } else { 2 };
            crate::common::assert_refused(
                &output,
                code,
                &[if key.starts_with('/') { "not below" } else { "not a key" }],
            );
        }
    }
    assert_nothing_there(&mount);
}
