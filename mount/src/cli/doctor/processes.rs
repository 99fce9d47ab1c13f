//! Whether a server started here could see the processes it serves: what it cannot see it can prove nothing of, and a lease
//! of a dead process then counts as held until its TTL is over.

use std::fs;
use std::path::Path;

use nix::unistd::geteuid;

use super::Check;
use crate::privileges::{CAP_SYS_PTRACE, FIRST_PID_NAMESPACE, Privileges};

/// Looks.
pub fn examine() -> Vec<Check> {
    let namespace = fs::read_link("/proc/self/ns/pid").unwrap_or_default();
    let privileges = Privileges::of_this_process();
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    vec![
        namespaces(&namespace.to_string_lossy(), container()),
        hidden(&mounts, privileges),
        looking(geteuid().is_root(), privileges),
    ]
}

/// What kind of container this is, where it says so.
fn container() -> Option<String> {
    if let Ok(kind) = std::env::var("container").or_else(|_| fs::read_to_string("/run/systemd/container"))
        && !kind.trim().is_empty()
    {
        return Some(kind.trim().to_owned());
    }
    let marks = [("/run/.containerenv", "podman"), ("/.dockerenv", "docker")];
    marks.iter().find(|(mark, _)| Path::new(mark).exists()).map(|(_, kind)| (*kind).to_owned())
}

fn namespaces(namespace: &str, container: Option<String>) -> Check {
    let place = container.map_or_else(|| "this".to_owned(), |kind| format!("a container ({kind}): this"));
    if namespace == FIRST_PID_NAMESPACE {
        return Check::ok("pid-namespace", "the machine's own: every process can be seen");
    }
    Check::warn(
        "pid-namespace",
        format!(
            "{place} is a pid namespace of its own: a server started here does not see processes outside of it. Their \
             leases work, are ended by the kernel like all others, and wake from a wait within a second of a signal; \
             but what they hold when a connection is lost counts as held until its TTL is over"
        ),
        "mount on the host and bind the tree into containers, or start this one with --pid host",
    )
}

fn hidden(mounts: &str, privileges: Privileges) -> Check {
    let proc = mounts.lines().rfind(|line| line.split(' ').nth(1) == Some("/proc"));
    let options = proc.and_then(|line| line.split(' ').nth(3)).unwrap_or_default();
    let hides = options
        .split(',')
        .find(|option| option.starts_with("hidepid=") && !matches!(*option, "hidepid=0" | "hidepid=off"));
    match hides {
        _ if proc.is_none() => Check::fail("proc", "/proc is not mounted", "`mount -t proc proc /proc`"),
        None => Check::ok("proc", "/proc shows all processes"),
        Some(_) if privileges.has(CAP_SYS_PTRACE) => {
            Check::ok("proc", format!("/proc hides processes ({options}), but not from this one"))
        }
        Some(option) => Check::warn(
            "proc",
            format!(
                "/proc hides other users' processes ({option}): what they hold when a connection is lost counts as held until its TTL is over"
            ),
            "mount as root, or mount /proc with gid= of a group of this user",
        ),
    }
}

fn looking(is_root: bool, privileges: Privileges) -> Check {
    match (privileges.has(CAP_SYS_PTRACE), is_root) {
        (true, _) => Check::ok("ptrace", "open files of every process can be looked at (CAP_SYS_PTRACE)"),
        (false, true) => Check::warn(
            "ptrace",
            "root without CAP_SYS_PTRACE: it cannot be told how a writer of another user ended, so what a possibly killed \
             one left is not published; what others hold when a connection is lost counts as held until its TTL is over",
            "start the container with --cap-add SYS_PTRACE",
        ),
        (false, false) => Check::ok("ptrace", "open files of this user's own processes can be looked at"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Verdict::{Fail, Ok as Good, Warn};
    use super::*;

    const ROOT: Privileges = Privileges { effective: 1 << CAP_SYS_PTRACE, no_new: false };
    const NONE: Privileges = Privileges { effective: 0, no_new: false };

    #[test]
    fn another_pid_namespace_is_told_of() {
        assert_eq!(namespaces(FIRST_PID_NAMESPACE, None).verdict, Good);
        let inside = namespaces("pid:[4026532201]", Some("podman".into()));
        assert!(inside.verdict == Warn && inside.found.starts_with("a container (podman)"), "{inside:?}");
    }

    #[test]
    fn hidden_processes_are_told_of_to_whom_they_are_hidden() {
        let with = |options: &str| format!("sysfs /sys sysfs rw 0 0\nproc /proc proc {options} 0 0\n");
        assert_eq!(hidden(&with("rw,nosuid"), NONE).verdict, Good);
        assert_eq!(hidden(&with("rw,hidepid=invisible"), NONE).verdict, Warn);
        assert_eq!(hidden(&with("rw,hidepid=2"), ROOT).verdict, Good);
        assert_eq!(hidden("sysfs /sys sysfs rw 0 0\n", ROOT).verdict, Fail);
    }

    #[test]
    fn root_without_ptrace_is_told_of() {
        assert_eq!(
            [looking(true, ROOT), looking(true, NONE), looking(false, NONE)].map(|check| check.verdict),
            [Good, Warn, Good]
        );
    }
}
