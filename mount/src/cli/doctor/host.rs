//! The machine: what its kernel can do, and whether this user may mount.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use nix::unistd::geteuid;

use super::Check;
use super::processes::Privileges;
use crate::failure::Failure;
use crate::kernel_mount;

/// The first kernel that sends again what a server left unanswered.
const RESEND: (u32, u32) = (6, 9);
/// `CAP_SYS_ADMIN`.
const CAP_SYS_ADMIN: u32 = 21;

/// Looks at the machine.
pub fn examine() -> Vec<Check> {
    let is_root = geteuid().is_root();
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let device = OpenOptions::new().read(true).write(true).open("/dev/fuse").map(drop);
    let privileges = Privileges::of_this_process();
    let configuration = fs::read_to_string("/etc/fuse.conf").unwrap_or_default();
    vec![
        kernel(release.trim()),
        self::device(device),
        mounting(is_root, &privileges, fusermount().as_ref()),
        allow_other(is_root, &configuration),
        request_timeout(kernel_mount::request_timeout().as_ref()),
    ]
}

/// What the kernel can do for a server that ends.
fn kernel(release: &str) -> Check {
    let mut numbers = release.split(['.', '-']).map_while(|part| part.parse().ok());
    let (Some(major), Some(minor)) = (numbers.next(), numbers.next()) else {
        return Check::warn("kernel", format!("Linux of an unknown version ({release:?})"), "see `uname -r`");
    };
    if (major, minor) >= RESEND {
        return Check::ok(
            "kernel",
            format!("Linux {release}: a server that ends is replaced and no call fails (resend)"),
        );
    }
    Check::warn(
        "kernel",
        format!(
            "Linux {release}: when a server ends, locks keep their place, other calls under way end with EINTR (no resend)"
        ),
        "Linux 6.9 or newer; nothing that is held is lost without it",
    )
}

/// Whether the device can be opened.
fn device(opened: io::Result<()>) -> Check {
    match opened {
        Ok(()) => Check::ok("device", "/dev/fuse can be opened"),
        Err(error) if matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ENODEV | libc::ENXIO)) => {
            Check::failure("device", &Failure::NoDevice)
        }
        Err(error) => Check::failure("device", &Failure::of_device(&error)),
    }
}

/// The helper that mounts for other users than root.
struct Fusermount {
    path: PathBuf,
    /// It runs as root.
    is_setuid: bool,
}

fn fusermount() -> Option<Fusermount> {
    let paths = std::env::var_os("PATH")?;
    std::env::split_paths(&paths).map(|dir| dir.join("fusermount3")).find_map(|path| {
        let found = fs::metadata(&path).ok().filter(fs::Metadata::is_file)?;
        Some(Fusermount { is_setuid: found.uid() == 0 && found.mode() & libc::S_ISUID != 0, path })
    })
}

/// Whether this process may mount.
fn mounting(is_root: bool, privileges: &Privileges, fusermount: Option<&Fusermount>) -> Check {
    const NAME: &str = "mounting";
    let path = || fusermount.map_or_else(String::new, |found| found.path.display().to_string());
    match (is_root, fusermount) {
        (true, _) if privileges.has(CAP_SYS_ADMIN) => Check::ok(NAME, "root with CAP_SYS_ADMIN mounts by itself"),
        (true, _) => Check::fail(
            NAME,
            "root without CAP_SYS_ADMIN may not mount",
            "start the container with --cap-add SYS_ADMIN, or mount on the host and bind the tree into the container",
        ),
        (false, None) => Check::failure(NAME, &Failure::NoFusermount),
        (false, Some(found)) if !found.is_setuid => Check::fail(
            NAME,
            format!("{} is not setuid root", path()),
            "install the package fuse3 anew (`apt-get install --reinstall fuse3`), or mount as root",
        ),
        (false, Some(_)) if privileges.no_new => Check::fail(
            NAME,
            format!("{} gains no rights in this process (no_new_privs)", path()),
            "mount from outside the sandbox; in a unit: NoNewPrivileges=no",
        ),
        (false, Some(_)) => Check::ok(NAME, format!("{} mounts for this user", path())),
    }
}

/// Whether `--allow-other` is allowed.
fn allow_other(is_root: bool, configuration: &str) -> Check {
    let is_there = configuration.lines().any(|line| line.trim() == "user_allow_other");
    match (is_root, is_there) {
        (true, _) => Check::ok("allow-other", "root may mount for all users (--allow-other)"),
        (false, true) => Check::ok("allow-other", "/etc/fuse.conf has user_allow_other: --allow-other works"),
        (false, false) => Check::warn(
            "allow-other",
            "a tree that this user mounts is for this user alone: /etc/fuse.conf has no user_allow_other",
            "add the line `user_allow_other` to /etc/fuse.conf if others are to use it, or mount as root",
        ),
    }
}

/// Whether the kernel ends a connection on which one call waits.
fn request_timeout(set: Option<&Failure>) -> Check {
    const NAME: &str = "request-timeout";
    set.map_or_else(
        || Check::ok(NAME, "the kernel lets calls wait as long as they have to"),
        |failure| Check::failure(NAME, failure),
    )
}

#[cfg(test)]
mod tests {
    use super::super::Verdict::{Fail, Ok as Good, Warn};
    use super::*;

    #[test]
    fn resend_came_with_6_9() {
        for (release, verdict) in [
            ("6.9.0", Good),
            ("6.18.44-fc", Good),
            ("7.0-rc1", Good),
            ("6.8.12-arch1-1", Warn),
            ("5.10.0-28", Warn),
            ("x", Warn),
        ] {
            assert_eq!(kernel(release).verdict, verdict, "{release}");
        }
    }

    #[test]
    fn a_device_that_is_missing_and_ones_that_are_shut_have_other_cures() {
        let of = |errno| device(Err(io::Error::from_raw_os_error(errno)));
        assert!(of(libc::ENOENT).cure.expect("a cure").contains("modprobe"));
        assert!(of(libc::EACCES).cure.expect("a cure").contains("chmod 666 /dev/fuse"));
        let shut = of(libc::EPERM);
        assert!(shut.verdict == Fail && shut.cure.expect("a cure").contains("DeviceAllow"));
        assert_eq!(device(Ok(())).verdict, Good);
    }

    #[test]
    fn who_may_mount() {
        let with = |effective, no_new| Privileges { effective, no_new };
        let helper = |is_setuid| Fusermount { path: "/usr/bin/fusermount3".into(), is_setuid };
        let of = |is_root, privileges: Privileges, fusermount: Option<Fusermount>| {
            mounting(is_root, &privileges, fusermount.as_ref()).verdict
        };
        assert_eq!(of(true, with(1 << CAP_SYS_ADMIN, true), None), Good);
        assert_eq!(of(true, with(0, false), None), Fail);
        assert_eq!(of(false, with(0, false), None), Fail);
        assert_eq!(of(false, with(0, false), Some(helper(false))), Fail);
        assert_eq!(of(false, with(0, true), Some(helper(true))), Fail);
        assert_eq!(of(false, with(0, false), Some(helper(true))), Good);
    }

    #[test]
    fn a_commented_line_allows_nothing() {
        assert_eq!(allow_other(false, "#user_allow_other\n").verdict, Warn);
        assert_eq!(allow_other(false, "mount_max = 1\nuser_allow_other\n").verdict, Good);
        assert_eq!(allow_other(true, "").verdict, Good);
    }

    #[test]
    fn any_request_timeout_fails_and_the_cure_names_it() {
        assert_eq!(request_timeout(None).verdict, Good);
        let setting = "fs.fuse.default_request_timeout".to_owned();
        let found = request_timeout(Some(&Failure::RequestTimeout { setting, seconds: "60".into() }));
        assert!(found.verdict == Fail && found.found.starts_with("fs.fuse.default_request_timeout is 60 s"));
        assert!(found.cure.expect("a cure").contains("sysctl fs.fuse.default_request_timeout=0"));
    }
}
