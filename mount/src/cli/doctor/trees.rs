//! The trees that are mounted, a place to mount one, and keepers whose tree is not to be seen.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use serde::Deserialize;

use super::Check;
use super::look::{self, PATIENCE, Seen};
use crate::failure::Failure;
use crate::failure::shown;
use crate::kernel_mount;
use crate::mountinfo::{FS_TYPE, Mounted, mounts};

/// What keepers are called.
const KEEPER: &str = "leasefs-keeper";

/// What was found.
#[derive(Default)]
pub struct Found {
    /// The checks.
    pub checks: Vec<Check>,
    /// The trees that answer and are this user's, with their state directories.
    pub states: Vec<(Mounted, PathBuf)>,
    /// There is a tree that this user can use.
    pub can_be_used: bool,
    /// Keepers of those.
    keepers: HashSet<u32>,
}

/// `.leasefs/config`, as far as it is needed here. All may be missing: it may be of another version.
#[derive(Deserialize)]
struct Config {
    #[serde(default)]
    version: String,
    #[serde(default)]
    pid: u32,
    #[serde(default)]
    keeper_pid: u32,
    state_dir: Option<PathBuf>,
    #[serde(default)]
    mount_owner: u32,
}

/// Looks at one tree, or at all.
///
/// # Errors
/// Where `/proc` cannot be read.
pub fn examine(asked: Option<&Path>) -> Result<Found> {
    let mounts = mounts().context("/proc/self/mountinfo")?;
    let mut found = Found::default();
    let asked = asked.map(absolute);
    let trees = on_top(&mounts);
    for tree in trees.iter().filter(|tree| asked.as_ref().is_none_or(|asked| tree.path == *asked)) {
        let seen = look::at(&tree.path);
        // Of one that was unmounted meanwhile there is nothing to say.
        if matches!(seen, Seen::Config(_)) || is_mounted(tree) {
            found.tree(tree, seen);
            found.checks.push(propagation(&shown(&tree.path), tree));
        }
    }
    match &asked {
        Some(asked) if found.checks.is_empty() => {
            found.checks.push(mountpoint(asked));
            if let Some(around) = around(&mounts, asked) {
                found.checks.push(propagation(&shown(asked), around));
            }
        }
        None if found.checks.is_empty() => found.checks.push(Check::ok("mount", "no tree is mounted")),
        _ => {}
    }
    // Of a tree that was not asked for, nobody looked whose keeper is whose.
    if asked.is_none() {
        let seen = found.keepers.clone();
        found.checks.extend(lone_keepers(&keepers(), &seen, trees.iter().any(|tree| tree.whole)));
    }
    Ok(found)
}

/// Whether a mount that was listed is still there.
pub fn is_mounted(mount: &Mounted) -> bool {
    mounts().is_ok_and(|mounts| mounts.contains(mount))
}

/// The path without a look at its last part, which may hang.
fn absolute(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    match (path.parent().and_then(|parent| parent.canonicalize().ok()), path.file_name()) {
        (Some(parent), Some(name)) => parent.join(name),
        _ => path,
    }
}

/// Trees, and parts of trees, that no later mount hides.
fn on_top(mounts: &[Mounted]) -> Vec<&Mounted> {
    let is_hidden = |at: usize| mounts[at + 1..].iter().any(|later| later.path == mounts[at].path);
    let trees = mounts.iter().enumerate().filter(|(at, mount)| mount.fs_type == FS_TYPE && !is_hidden(*at));
    trees.map(|(_, mount)| mount).collect()
}

/// The mount a path is on.
fn around<'a>(mounts: &'a [Mounted], path: &Path) -> Option<&'a Mounted> {
    // The longest path; of equal ones the last, which is on top.
    mounts.iter().filter(|mount| path.starts_with(&mount.path)).max_by_key(|mount| mount.path.as_os_str().len())
}

impl Found {
    fn tree(&mut self, tree: &Mounted, seen: Seen) {
        let path = shown(&tree.path);
        match seen {
            Seen::Config(text) => match serde_json::from_str::<Config>(&text) {
                Ok(config) => {
                    self.checks.push(Check::ok("mount", format!("{path} answers (server {}, keeper {})", config.pid, config.keeper_pid)));
                    let program = fs::read_link(format!("/proc/{}/exe", config.pid)).ok();
                    self.checks.push(version(&path, &config.version, program.as_deref()));
                    self.keepers.insert(config.keeper_pid);
                    self.can_be_used = true;
                    // Of others' state directories nothing can be seen, and it is not this user's to mend them.
                    let is_ours = nix::unistd::geteuid().is_root() || nix::unistd::geteuid().as_raw() == config.mount_owner;
                    self.states.extend(config.state_dir.filter(|_| is_ours).map(|dir| (tree.clone(), dir)));
                }
                Err(error) => self.checks.push(Check::warn(
                    "mount",
                    format!("{path} answers, but its .leasefs/config is not understood: {error}"),
                    "use the version of this program that serves it",
                )),
            },
            Seen::Dead => self.checks.push(Check::fail(
                "mount",
                format!("{path} is dead: its keeper and server are gone, and all in it answers ENOTCONN"),
                format!("`leasefs mount {path}` over the same state, which keeps what is held; or `leasefs unmount {path}`"),
            )),
            Seen::Shut => self.checks.push(Check::warn(
                "mount",
                format!("{path} is not open to this user"),
                "mount it with --allow-other, or look as the user who mounted it",
            )),
            Seen::Hangs => self.checks.push(Check::fail(
                "mount",
                format!("{path} does not answer within {} s", PATIENCE.as_secs()),
                "see the last lines of leasefs.log in its state directory, and whether its disk is there; `kill -KILL` the \
                 process `leasefs` that serves it: its keeper starts another, and nothing is lost",
            )),
            // Part of a tree has no .leasefs, but answers.
            Seen::Odd(_) if !tree.whole => self.checks.push(Check::ok("mount", format!("{path} answers: it is part of a tree"))),
            Seen::Odd(why) => self.checks.push(Check::fail(
                "mount",
                format!("{path}: {why}"),
                "see the last lines of leasefs.log in its state directory",
            )),
        }
    }
}

/// Whether the program that serves is this one.
fn version(path: &str, serves: &str, program: Option<&Path>) -> Check {
    const NAME: &str = "version";
    let this = env!("CARGO_PKG_VERSION");
    let cure = format!("`leasefs upgrade {path}`: no client notices");
    if serves != this {
        return Check::warn(NAME, format!("{path} is served by {serves}, and this program is {this}"), cure);
    }
    if program.is_some_and(|program| program.to_string_lossy().ends_with(" (deleted)")) {
        return Check::warn(NAME, format!("{path} is served by a program that was replaced on the disk since"), cure);
    }
    Check::ok(NAME, format!("{path} is served by {serves}, as this program is"))
}

/// Whether a tree here is seen by containers and services that have mounts of their own.
fn propagation(path: &str, mount: &Mounted) -> Check {
    const NAME: &str = "propagation";
    if mount.shared {
        return Check::ok(
            NAME,
            format!("{path} is on a shared mount: containers that bind a directory above it see it too (rslave)"),
        );
    }
    let kind = if mount.slave { "slave" } else { "private" };
    Check::warn(
        NAME,
        format!(
            "{path} is on a {kind} mount: containers and services that were started before it was mounted, or mounted \
             again, do not see it"
        ),
        "start them after it, or make the mount above it shared before: `mount --make-rshared /`",
    )
}

/// Whether a directory can be mounted on.
fn mountpoint(path: &Path) -> Check {
    const NAME: &str = "mountpoint";
    match kernel_mount::check_mountpoint(path) {
        Ok(path) => Check::ok(NAME, format!("{} can be mounted on", shown(&path))),
        Err(error) => match error.downcast_ref::<Failure>() {
            Some(failure) => Check::failure(NAME, failure),
            None => Check::fail(NAME, format!("{error:#}"), "give another directory"),
        },
    }
}

/// The keepers that can be seen.
fn keepers() -> Vec<u32> {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let mut keepers: Vec<u32> = pids
        .filter(|pid| fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim_end() == KEEPER))
        .collect();
    keepers.sort_unstable();
    keepers
}

/// Keepers of trees that are not mounted here.
fn lone_keepers(keepers: &[u32], seen: &HashSet<u32>, trees: bool) -> Vec<Check> {
    let lone: Vec<String> = keepers.iter().filter(|pid| !seen.contains(pid)).map(u32::to_string).collect();
    if lone.is_empty() {
        return if trees { vec![Check::ok("keepers", "every keeper has its tree")] } else { Vec::new() };
    }
    let list = lone.join(", ");
    vec![Check::warn(
        "keepers",
        format!(
            "keepers of trees that are not to be seen here (pid {list}): unmounted while files were open, or mounted in \
             another mount namespace, or not open to this user"
        ),
        format!(
            "they end with the last open file; to end one at once, `kill -TERM` it again: what is held then counts as held \
             until its holder is gone or its TTL is over; `nsenter -t {} -m leasefs doctor` looks from there",
            lone[0]
        ),
    )]
}

#[cfg(test)]
mod tests {
    use super::super::Verdict::{Ok as Good, Warn};
    use super::*;

    fn mount(path: &str, fs_type: &str, shared: bool, slave: bool) -> Mounted {
        let (fs_type, path) = (fs_type.to_owned(), path.into());
        Mounted { id: 1, device: "0:1".into(), path, fs_type, whole: true, shared, slave }
    }

    #[test]
    fn only_what_is_on_top_is_looked_at() {
        let mounts = [
            mount("/", "ext4", true, false),
            mount("/a", FS_TYPE, false, false),
            mount("/b", FS_TYPE, false, false),
            mount("/b", "tmpfs", false, false),
        ];
        let found: Vec<&Path> = on_top(&mounts).iter().map(|mount| mount.path.as_path()).collect();
        assert_eq!(found, [Path::new("/a")]);
        assert_eq!(around(&mounts, Path::new("/b/c")).map(|mount| mount.fs_type.as_str()), Some("tmpfs"));
        assert_eq!(around(&mounts, Path::new("/ab")).map(|mount| mount.fs_type.as_str()), Some("ext4"));
    }

    #[test]
    fn a_mount_that_others_do_not_see_is_warned_of() {
        let of = |shared, slave| propagation("/m", &mount("/m", FS_TYPE, shared, slave));
        assert_eq!(of(true, false).verdict, Good);
        assert_eq!(of(true, true).verdict, Good);
        assert!(of(false, true).found.contains("slave") && of(false, false).found.contains("private"));
    }

    #[test]
    fn another_version_and_a_program_that_was_replaced_can_be_upgraded() {
        let this = env!("CARGO_PKG_VERSION");
        assert_eq!(version("/m", this, Some(Path::new("/usr/bin/leasefs"))).verdict, Good);
        for (serves, program) in [("0.0.1", "/usr/bin/leasefs"), (this, "/usr/bin/leasefs (deleted)")] {
            let found = version("/m", serves, Some(Path::new(program)));
            assert!(found.verdict == Warn && found.cure.expect("a cure").contains("leasefs upgrade /m"));
        }
    }

    #[test]
    fn keepers_without_a_tree_are_named() {
        let seen = HashSet::from([7]);
        assert_eq!(lone_keepers(&[7], &seen, true)[0].verdict, Good);
        let found = lone_keepers(&[7, 8, 9], &seen, true);
        assert!(found[0].verdict == Warn && found[0].found.contains("pid 8, 9"), "{found:?}");
    }
}
