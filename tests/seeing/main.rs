//! What a person sees: `ls`, `top`, `who`, `watch`, `timeline`, progress, completion, and warnings of processes that wait
//! for each other. Terminals are real ones, looked at through tmux.

#[path = "../common/mod.rs"]
mod common;
mod screen;

mod completion;
mod ls;
mod rings;
mod timeline;
mod top;
mod watch;
mod who;

use std::path::Path;

use common::{STRANGER, as_stranger, assert_refused, stderr};

/// Whether a process has a file of this name open.
fn has_open(pid: i32, name: &str) -> bool {
    let Ok(entries) = std::fs::read_dir(Path::new("/proc").join(pid.to_string()).join("fd")) else { return false };
    entries.flatten().filter_map(|entry| std::fs::read_link(entry.path()).ok()).any(|link| link.ends_with(name))
}
