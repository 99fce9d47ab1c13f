//! What a person sees: `ls`, `top`, `who`, `watch`, `timeline`, progress, and warnings of processes that wait for each
//! other. Terminals are real ones, looked at through tmux.

#[path = "../common/mod.rs"]
mod common;
mod screen;

mod ls;
mod rings;
mod timeline;
mod top;
mod watch;
mod who;

use std::path::Path;
use std::process::Output;

use common::{LEASEFS, Mount};

/// A uid that is neither root nor the mount's owner.
const STRANGER: u32 = 65_534;

/// Runs `leasefs` as a stranger.
fn as_stranger(mount: &Mount, args: &[&str]) -> Output {
    use std::os::unix::process::CommandExt;
    mount.command(LEASEFS).args(args).uid(STRANGER).gid(STRANGER).output().expect("leasefs runs")
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Asserts the exit code and that stderr is one line `leasefs: …` that has the words in it.
#[track_caller]
fn assert_refused(output: &Output, code: i32, words: &[&str]) {
    let said = stderr(output);
    assert_eq!(output.status.code(), Some(code), "stderr: {said}");
    assert!(said.starts_with("leasefs: ") && said.trim_end().lines().count() == 1, "not one line: {said}");
    for word in words {
        assert!(said.contains(word), "`{word}` is missing in: {said}");
    }
}

/// Whether a process has a file of this name open.
fn has_open(pid: i32, name: &str) -> bool {
    let Ok(entries) = std::fs::read_dir(Path::new("/proc").join(pid.to_string()).join("fd")) else { return false };
    entries.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok()).any(|link| link.ends_with(name))
}
