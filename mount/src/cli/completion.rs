//! Completion of command lines: commands and options from their own definitions, keys and namespaces from the tree.
//!
//! A shell asks by running `leasefs` with [`VARIABLE`] set to its name, as the scripts that `leasefs generate` writes have
//! it do at each Tab. So it
//! - is quick, however many keys there are: one directory is listed, no key is looked at, and only so many are offered;
//! - never waits for a tree that does not answer: a child lists it, and is left behind;
//! - offers only what a shell takes as one plain word. Shells put into the line what they are given, and the names of keys
//!   may be another user's.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, PipeReader, Read, Write};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::{Command, CommandFactory};
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate};
use clap_complete::env::{Bash, CompleteEnv, EnvCompleter, Fish, Zsh};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{ForkResult, Pid, dup2_stderr, dup2_stdout, fork};

use super::Cli;
use super::tree::{Tree, TreeArgs};

/// Names the shell that asks.
pub const VARIABLE: &str = "LEASEFS_COMPLETE";
/// Most names offered for one word.
const MOST: usize = 500;
/// How long a person is kept waiting, at most.
const PATIENCE: Duration = Duration::from_millis(1_500);
/// How long a directory is read.
const READING: Duration = Duration::from_millis(1_200);
/// Commands about keys that are held, or finished: the others are not offered to them.
const ABOUT_HELD: [&str; 5] = ["renew", "complete", "release", "abandon", "evict"];

/// Answers a shell that asks, and ends the process. Otherwise nothing happens.
pub fn answer() {
    CompleteEnv::with_factory(offered).var(VARIABLE).complete();
}

/// What each shell is to be told, by the name of the file that it reads.
///
/// # Errors
/// None in practice: they are written to memory.
pub fn scripts() -> io::Result<[(&'static str, Vec<u8>); 3]> {
    let script = |shell: &dyn EnvCompleter| {
        let mut text = Vec::new();
        shell.write_registration(VARIABLE, "leasefs", "leasefs", "leasefs", &mut text).map(|()| text)
    };
    let mut zsh = script(&Zsh)?;
    // Read as the function `_leasefs` at the first Tab, which is to be answered already.
    zsh.extend(b"[[ ${funcstack[1]} != _leasefs ]] || _clap_dynamic_completer_leasefs \"$@\"\n");
    Ok([("leasefs.bash", script(&Bash)?), ("_leasefs", zsh), ("leasefs.fish", script(&Fish)?)])
}

/// The command line without what is not for people, whose keys are completed.
pub fn offered() -> Command {
    let root = Cli::command();
    let mut shown = Command::new("leasefs").version(env!("CARGO_PKG_VERSION")).disable_help_subcommand(true);
    if let Some(about) = root.get_about() {
        shown = shown.about(about.clone());
    }
    shown.subcommands(root.get_subcommands().filter(|command| !command.is_hide_set()).cloned().map(with_keys))
}

/// A command that completes the keys and prefixes it takes.
fn with_keys(command: Command) -> Command {
    let subtree = if ABOUT_HELD.contains(&command.get_name()) { "claims" } else { "status" };
    command.mut_args(|arg| {
        let names = arg.get_value_names().unwrap_or_default();
        match names.iter().any(|name| *name == "KEY" || *name == "PREFIX") {
            true => arg.add(ArgValueCompleter::new(move |typed: &OsStr| candidates(subtree, typed))),
            false => arg,
        }
    })
}

fn candidates(subtree: &'static str, typed: &OsStr) -> Vec<CompletionCandidate> {
    let Some(typed) = typed.to_str().filter(|typed| !typed.starts_with('/')) else { return Vec::new() };
    let root = given_root(std::env::args_os());
    let found = beside(|out| list(out, subtree, root, typed)).unwrap_or_default();
    let names: Vec<&str> = found.lines().collect();
    // What all that is offered begins with is put into the line. Of what was not read to its end that is not known.
    let unfinished = (!found.is_empty() && !found.ends_with("\n\n")).then_some(typed);
    names.into_iter().filter(|name| !name.is_empty()).chain(unfinished).map(CompletionCandidate::new).collect()
}

/// The value of `--root` in the command line that is being completed.
fn given_root(args: impl Iterator<Item = OsString>) -> Option<PathBuf> {
    let mut words = args.skip_while(|arg| arg != "--").skip(1);
    let mut root = None;
    while let Some(word) = words.next() {
        if word == "--root" {
            root = words.next();
        } else if let Some(value) = word.to_str().and_then(|word| word.strip_prefix("--root=")) {
            root = Some(value.into());
        } else if word == "--" {
            break;
        }
    }
    let root = root.or_else(|| std::env::var_os("LEASEFS_ROOT"));
    root.filter(|root| !root.is_empty()).map(PathBuf::from)
}

/// Has a child write something, and gives what came in time. It is not waited for: it may hang in a system call for as long
/// as the server of a tree does.
fn beside(write: impl FnOnce(&mut dyn Write) -> anyhow::Result<()>) -> Option<String> {
    let (mut reads, mut writes) = io::pipe().ok()?;
    // SAFETY: this process has no other thread.
    match unsafe { fork() }.ok()? {
        ForkResult::Parent { child } => {
            drop(writes);
            Some(read_in_time(&mut reads, child))
        }
        ForkResult::Child => {
            drop(reads);
            // The shell reads to the end of the output, which is not to be this process's end.
            let written = fs::OpenOptions::new().write(true).open("/dev/null").map(|null| {
                dup2_stdout(&null)?;
                dup2_stderr(&null)
            });
            if let Ok(Ok(())) = written {
                let _ = write(&mut writes);
            }
            // SAFETY: ends the process at once; what its parent would do on its way out is not its own.
            unsafe { libc::_exit(0) }
        }
    }
}

fn read_in_time(reads: &mut PipeReader, child: Pid) -> String {
    let deadline = Instant::now() + PATIENCE;
    let (mut text, mut buffer) = (Vec::new(), [0; 1 << 16]);
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::ZERO);
        match poll(&mut [PollFd::new(reads.as_fd(), PollFlags::POLLIN)], timeout) {
            Ok(1..) => match reads.read(&mut buffer) {
                Ok(length @ 1..) => text.extend_from_slice(&buffer[..length]),
                _ => break,
            },
            _ => {
                // Not reaped, so the number is its own.
                let _ = kill(child, Signal::SIGKILL);
                break;
            }
        }
    }
    // A name that did not come whole is none.
    let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
    text.truncate(whole);
    String::from_utf8(text).unwrap_or_default()
}

/// Writes the keys and namespaces that begin with what was typed, a line each, and an empty line once that is all of them.
fn list(out: &mut dyn Write, subtree: &str, root: Option<PathBuf>, typed: &str) -> anyhow::Result<()> {
    let tree = Tree::find(&TreeArgs { root }, &[])?;
    let namespace = typed.rsplit_once('/').map_or("", |(namespace, _)| namespace);
    let (names, is_all) = begin_with(&tree.root().join(subtree).join(namespace), namespace, typed)?;
    let mut text: String = names.iter().map(|name| format!("{name}\n")).collect();
    if is_all && !text.is_empty() {
        text.push('\n');
    }
    out.write_all(text.as_bytes())?;
    Ok(())
}

/// The first of the names in a directory that begin so, and the last, so that they have in common what all have; whether
/// it was read to its end.
fn begin_with(directory: &Path, namespace: &str, typed: &str) -> io::Result<(BTreeSet<String>, bool)> {
    let began = Instant::now();
    let mut names = BTreeSet::new();
    let mut last = String::new();
    let mut is_all = true;
    for entry in fs::read_dir(directory)? {
        if began.elapsed() > READING {
            is_all = false;
            break;
        }
        let entry = entry?;
        let Ok(name) = entry.file_name().into_string() else { continue };
        let mut path = if namespace.is_empty() { name } else { format!("{namespace}/{name}") };
        if !path.starts_with(typed) || !is_plain(&path) {
            continue;
        }
        if entry.file_type()?.is_dir() {
            path.push('/');
        }
        if path > last {
            last.clone_from(&path);
        }
        names.insert(path);
        if names.len() > MOST {
            names.pop_last();
        }
    }
    names.extend(Some(last).filter(|last| !last.is_empty()));
    Ok((names, is_all))
}

/// Whether every shell takes it as one word that stands for itself, wherever the word is taken apart.
fn is_plain(name: &str) -> bool {
    let is_plain = |c: char| c.is_alphanumeric() || matches!(c, '.' | '_' | '-' | '/' | '+' | ',' | '%');
    !name.starts_with('-') && name.chars().all(is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_for_people_is_offered_to_nobody() {
        let offered = offered();
        assert!(offered.find_subcommand("run").is_some() && offered.find_subcommand("serve").is_none());
        for command in offered.get_subcommands() {
            let keys = command.get_positionals().filter(|arg| {
                let names = arg.get_value_names().unwrap_or_default();
                names.iter().any(|name| *name == "KEY" || *name == "PREFIX")
            });
            for arg in keys {
                assert!(arg.get::<ArgValueCompleter>().is_some(), "{} {arg}", command.get_name());
            }
        }
        assert!(ABOUT_HELD.iter().all(|name| offered.find_subcommand(name).is_some()));
    }

    #[test]
    fn the_root_is_the_one_on_the_line() {
        let root = |words: &[&str]| given_root(words.iter().map(OsString::from));
        let line = ["leasefs", "--", "leasefs", "status"];
        assert_eq!(root(&[&line[..], &["--root", "/a", "k"]].concat()), Some("/a".into()));
        assert_eq!(root(&[&line[..], &["--root=/b", "k"]].concat()), Some("/b".into()));
        assert_eq!(root(&[&line[..], &["k", "--", "ls", "--root", "/c"]].concat()), None);
    }

    #[test]
    fn the_first_are_offered_and_what_all_have_in_common_is_kept() {
        let dir = tempfile::tempdir().expect("a directory");
        for number in 0..MOST + 100 {
            fs::write(dir.path().join(format!("job-{number:04}")), "").expect("a file");
        }
        for name in ["other", "$(touch x)", "a b", "-rf", "a:b", "x;y", "it's", "~"] {
            fs::write(dir.path().join(name), "").expect("a file");
        }
        fs::create_dir(dir.path().join("team")).expect("a directory");
        let (names, is_all) = begin_with(dir.path(), "", "job").expect("it can be read");
        assert_eq!((names.len(), is_all), (MOST + 1, true));
        assert!(names.contains("job-0000") && names.contains("job-0599"), "{names:?}");
        let rest = |typed| begin_with(dir.path(), "ns", typed).expect("it can be read").0;
        assert_eq!(rest("ns/o"), BTreeSet::from(["ns/other".to_owned()]));
        assert_eq!(rest("ns/t"), BTreeSet::from(["ns/team/".to_owned()]));
        for odd in ["ns/$", "ns/a", "ns/x", "ns/i", "ns/~"] {
            assert_eq!(rest(odd), BTreeSet::new(), "{odd}");
        }
    }

    #[test]
    fn a_child_that_hangs_is_left_behind() {
        let began = Instant::now();
        let text = beside(|out| {
            out.write_all(b"one\ntwo\nhal")?;
            std::thread::sleep(Duration::from_secs(3_600));
            Ok(())
        });
        assert_eq!(text.as_deref(), Some("one\ntwo\n"));
        assert!(began.elapsed() < PATIENCE * 10);
    }
}
