//! What this tree does not have: `rename`, `link`, `symlink`, `mknod`, `fallocate`.

use std::fs;

use libc::{O_CREAT, O_DIRECTORY, O_RDWR, O_WRONLY};
use nix::errno::Errno;
use serde_json::json;

use crate::common::Mount;
use crate::common::agent::Agent;

/// A held key, a finished key with its result, and a namespace.
fn furnished() -> (Mount, Agent, i64) {
    let mount = Mount::new();
    let agent = Agent::new();
    fs::create_dir(mount.claim("ns")).expect("mkdir");
    let fd = agent.create(&mount.claim("done")).expect("free key");
    let draft = agent.handle(&mount.result("done", 1));
    agent.write(draft, "result").expect("registered attempt");
    agent.close(draft);
    agent.close(fd);
    let fd = agent.create(&mount.claim("held")).expect("free key");
    (mount, agent, fd)
}

/// All is as [`furnished`] left it.
fn assert_unchanged(mount: &Mount, agent: &Agent, fd: i64) {
    assert_eq!(agent.epoch(fd), Ok(1));
    assert_eq!((mount.state_of("held").as_str(), mount.state_of("done").as_str()), ("held", "finished"));
    assert_eq!(fs::read_to_string(mount.result("done", 1)).expect("committed"), "result");
    let mut names: Vec<_> = fs::read_dir(mount.root().join("claims"))
        .expect("claims")
        .map(|entry| entry.expect("entry").file_name())
        .collect();
    names.sort();
    assert_eq!(names, ["done", "held", "ns"]);
    assert_eq!(fs::read_dir(mount.claim("ns")).expect("namespace").count(), 0);
}

#[test]
fn rename_is_eperm() {
    let (mount, agent, fd) = furnished();
    let claim = |name: &str| mount.claim(name);
    for (from, to) in [
        (claim("held"), claim("new")),
        (claim("held"), claim("done")),
        (claim("done"), claim("held")),
        (claim("done"), claim("ns/done")),
        (claim("ns"), claim("other")),
        (mount.result("done", 1), mount.root().join("results/done/2")),
        (mount.result("done", 1), claim("new")),
        (mount.root().join("results/done"), mount.root().join("results/other")),
        (mount.root().join("status/done"), mount.root().join("status/other")),
        (mount.root().join("claims"), mount.root().join("other")),
    ] {
        assert_eq!(
            agent.call("rename", json!([from, to])),
            Err(Errno::EPERM),
            "{} to {}",
            from.display(),
            to.display()
        );
    }
    let outside = mount.scratch().join("file");
    fs::write(&outside, "").expect("a file");
    assert_eq!(agent.call("rename", json!([outside, claim("new")])), Err(Errno::EXDEV));
    assert_eq!(agent.call("rename", json!([claim("done"), mount.scratch().join("stolen")])), Err(Errno::EXDEV));
    assert!(!mount.bash("mv -f $M/claims/done $M/claims/new 2>/dev/null").status.success());
    assert_unchanged(&mount, &agent, fd);
}

#[test]
fn link_symlink_and_mknod_are_eperm() {
    let (mount, agent, fd) = furnished();
    for subtree in ["claims", "claims/ns", "results/done"] {
        let new = mount.root().join(subtree).join("new");
        assert_eq!(agent.call("link", json!([mount.claim("held"), new])), Err(Errno::EPERM), "{subtree}");
        assert_eq!(agent.call("link", json!([mount.result("done", 1), new])), Err(Errno::EPERM), "{subtree}");
        assert_eq!(agent.call("symlink", json!(["/etc/passwd", new])), Err(Errno::EPERM), "{subtree}");
        for kind in [libc::S_IFIFO, libc::S_IFREG, libc::S_IFSOCK] {
            assert_eq!(agent.call("mknod", json!([new, kind | 0o666])), Err(Errno::EPERM), "{subtree}, {kind:o}");
        }
        assert_eq!(agent.call("mknod", json!([new, libc::S_IFCHR | 0o666, 0x103])), Err(Errno::EPERM), "{subtree}");
        assert!(fs::symlink_metadata(&new).is_err(), "{subtree}");
    }
    let server = "s = socket.socket(socket.AF_UNIX); s.bind(path)";
    assert_eq!(agent.script(server, json!({ "path": mount.claim("sock") })), Err(Errno::EPERM));
    let nameless = agent.open(&mount.root().join("claims"), libc::O_TMPFILE | O_DIRECTORY | O_RDWR);
    assert_eq!(nameless, Err(Errno::EOPNOTSUPP));
    assert_unchanged(&mount, &agent, fd);
}

#[test]
fn fallocate_is_eopnotsupp() {
    let (mount, agent, fd) = furnished();
    let allocate = "if LIBC.fallocate(fd, 0, ctypes.c_long(0), ctypes.c_long(100)): raise OSError(ctypes.get_errno(), 'fallocate')";
    let draft = agent.open(&mount.result("held", 1), O_WRONLY | O_CREAT).expect("registered attempt");
    for handle in [fd, draft] {
        assert_eq!(agent.script(allocate, json!({ "fd": handle })), Err(Errno::EOPNOTSUPP));
    }
    agent.write(draft, "still a draft").expect("registered attempt");
    agent.close(draft);
    assert_eq!(fs::read_to_string(mount.result("held", 1)).expect("committed"), "still a draft");
    assert_eq!(agent.epoch(fd), Ok(1));
}

#[test]
fn nothing_is_made_outside_its_place() {
    let (mount, agent, fd) = furnished();
    for path in ["results/new", "results/ns/new", "status/new", "status/ns/new", "new", ".leasefs/new"] {
        let path = mount.root().join(path);
        assert_eq!(agent.create(&path), Err(Errno::EPERM), "{}", path.display());
        assert_eq!(agent.open(&path, O_WRONLY | O_CREAT), Err(Errno::EPERM), "{}", path.display());
        assert_eq!(agent.call("mkdir", json!([path])), Err(Errno::EPERM), "{}", path.display());
        assert_eq!(agent.call("stat", json!([path])), Err(Errno::ENOENT), "{}", path.display());
    }
    for path in ["results/ns", "status/ns", "results/done", "status/done", "results", "claims"] {
        let path = mount.root().join(path);
        let refusal = if path.ends_with("status/done") { Errno::ENOTDIR } else { Errno::EPERM };
        assert_eq!(agent.call("rmdir", json!([path])), Err(refusal), "{}", path.display());
    }
    assert_unchanged(&mount, &agent, fd);
}

#[test]
fn bad_writes_of_the_holder_and_of_others_change_nothing() {
    let (mount, agent, fd) = furnished();
    agent.write(fd, "the note").expect("holder");
    let before = mount.status("held");
    let other = Agent::new();
    let handle = other.open(&mount.claim("held"), O_RDWR).expect("held key");
    assert_eq!(agent.write(fd, &"x".repeat(4097)), Err(Errno::EFBIG));
    assert_eq!(agent.call("write", json!([fd, { "hex": "fffe" }])), Err(Errno::EINVAL));
    assert_eq!(other.write(handle, "x"), Err(Errno::EACCES));
    assert_eq!(other.open(&mount.result("held", 2), O_WRONLY | O_CREAT), Err(Errno::ENOENT));
    assert_eq!(other.open(&mount.result("done", 1), O_WRONLY | O_CREAT), Err(Errno::EPERM));
    assert_eq!(other.unlink(&mount.claim("held")), Err(Errno::EBUSY));
    assert_eq!(mount.status("held"), before);
    assert_unchanged(&mount, &agent, fd);
    mount.verify();
}
