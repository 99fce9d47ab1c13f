//! The process that keeps an attempt (`leasefs hold`): starting it, and knowing it again.

use std::ffi::CStr;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};
use std::{env, fs, thread};

use anyhow::{Context, Result, bail};
use clap::Parser;
use leasefs::client::Status;
use serde::{Deserialize, Serialize};

use super::binding::Bound;
use crate::cli::hold;
use crate::cli::proc::Pid;
use crate::cli::{self, Cli};

/// What `ps` calls it.
pub const NAME: &CStr = c"leasefs";
/// How long a holder process may take to execute itself anew.
const EXECUTES_WITHIN: Duration = Duration::from_secs(5);

/// How the taking went.
#[derive(Debug, Deserialize, Serialize)]
pub enum Report {
    /// The key is held.
    Held {
        /// The attempt.
        epoch: u64,
        /// The process that holds it.
        pid: u32,
        /// End of its TTL, RFC 3339.
        expires: Option<String>,
    },
    /// It is not.
    Refused {
        /// Exit code.
        code: u8,
        /// Why.
        message: String,
    },
}

impl Report {
    /// Says it to the one who waits for it.
    ///
    /// # Errors
    /// Nobody does any more.
    pub fn send(&self, channel: &mut UnixStream) -> io::Result<()> {
        let mut line = serde_json::to_vec(self)?;
        line.push(b'\n');
        channel.write_all(&line)
    }
}

/// A holder process that has reported, and gives back what it holds unless it is told to keep it.
pub struct Started {
    channel: UnixStream,
    /// How it went.
    pub report: Report,
}

impl Started {
    /// Lets it keep the key: whoever wanted it knows the epoch.
    ///
    /// # Errors
    /// It has ended.
    pub fn keep(mut self) -> io::Result<()> {
        self.channel.write_all(b"k")
    }
}

/// Starts a holder process and waits for its report. It waits in line no longer than this process lives.
///
/// # Errors
/// It cannot be started, or ended without a report.
pub fn start(mut args: hold::Args, bound: Option<&Bound>) -> Result<Started> {
    let (ours, theirs) = UnixStream::pair()?;
    args.channel = theirs.as_raw_fd();
    args.pidfd = bound.map(Bound::raw);
    let kept = [Some(args.channel), args.pidfd];
    let mut command = Command::new("/proc/self/exe");
    command.arg0("leasefs").args(args.command_line());
    command.env_clear().current_dir("/").stdin(Stdio::null()).stdout(Stdio::null());
    // SAFETY: between fork and exec it only makes system calls; it allocates nothing and takes no lock.
    unsafe { command.pre_exec(move || detach(kept)) };
    // What is waited for here is the process between, which ends at once.
    let between = command.spawn().and_then(|mut child| child.wait());
    between.context("the holder process cannot be started")?;
    drop(theirs);
    let mut line = String::new();
    let mut reader = BufReader::new(ours);
    reader.read_line(&mut line).context("the holder process")?;
    if line.is_empty() {
        bail!("{}: the holder process ended without a word: nothing is held", args.key);
    }
    let report = serde_json::from_str(&line)?;
    if matches!(report, Report::Refused { .. }) {
        // It ends, and with it its end of the channel: whoever is refused leaves no process behind.
        let _ = reader.read_to_end(&mut Vec::new());
    }
    Ok(Started { report, channel: reader.into_inner() })
}

/// In the child: a session of its own, another parent, no descriptors but these, and no signal ignored.
fn detach(kept: [Option<i32>; 2]) -> io::Result<()> {
    let check = |result: i64| if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) };
    // SAFETY: these calls take integers and touch no memory of ours; the process between ends without running any
    // code of ours, and the one that goes on is as single as the one it comes from.
    unsafe {
        check(libc::setsid().into())?;
        match libc::fork() {
            0 => {}
            -1 => return Err(io::Error::last_os_error()),
            _ => libc::_exit(0),
        }
        for signal in 1..=64 {
            // Some numbers cannot be set, and need not be.
            libc::signal(signal, libc::SIG_DFL);
        }
        check(libc::syscall(libc::SYS_close_range, 3, u32::MAX, libc::CLOSE_RANGE_CLOEXEC))?;
        for fd in kept.into_iter().flatten() {
            check(libc::fcntl(fd, libc::F_SETFD, 0).into())?;
        }
    }
    Ok(())
}

/// Whether a holder process with these arguments keeps its attempt: it has executed itself anew with the epoch, and has
/// heard that this was told, since when it has its name again.
pub fn is_kept(pid: u32, args: &hold::Args) -> bool {
    args.epoch.is_some()
        && fs::read(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim_ascii_end() == NAME.to_bytes())
}

/// Who has the key, as far as this process can see.
pub enum Keeper {
    /// A holder process of ours: its arguments tell whose attempt it is.
    Ours(Box<hold::Args>),
    /// Another program.
    Other,
    /// A process that cannot be seen from here, as in another pid namespace.
    Unseen,
}

/// Looks at the process that the server names as the holder. Pid and start time are those the server gives, so it is the
/// very process that took the key. None where nobody holds it.
pub fn of(status: &Status) -> Option<Keeper> {
    let holder = status.holder.as_ref().filter(|_| status.state == "held")?;
    let pid = i32::try_from(holder.pid).ok()?;
    if Pid::of(holder.pid) != Some(Pid { pid: holder.pid, start_time: holder.start_time }) {
        return Some(Keeper::Unseen);
    }
    let args = arguments(pid).filter(|args| {
        // Before it has executed itself anew, its epoch is not among its arguments.
        args.key == status.key && args.epoch.is_none_or(|epoch| epoch == status.epoch)
    });
    Some(args.map_or(Keeper::Other, |args| Keeper::Ours(Box::new(args))))
}

fn arguments(pid: i32) -> Option<hold::Args> {
    if !is_our_program(pid) {
        return None;
    }
    let line = command_line(pid)?;
    let words =
        line.strip_suffix(b"\0")?.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned());
    match Cli::try_parse_from(words) {
        Ok(Cli { command: cli::Command::Hold(args) }) => Some(args),
        _ => None,
    }
}

/// Its command line. While it executes itself anew, it has none for an instant; and as it is read in parts, the first may be
/// of what it was and the next of what it is, so it is read until it is the same twice.
fn command_line(pid: i32) -> Option<Vec<u8>> {
    let until = Instant::now() + EXECUTES_WITHIN;
    let read = || fs::read(format!("/proc/{pid}/cmdline")).ok();
    let mut line = read()?;
    loop {
        let again = read()?;
        let is_over = || Instant::now() >= until || fs::read_link(format!("/proc/{pid}/exe")).is_err();
        if (!again.is_empty() && again == line) || is_over() {
            return Some(again);
        }
        if again.is_empty() {
            thread::sleep(Duration::from_millis(1));
        }
        line = again;
    }
}

/// Whether it runs this program, perhaps as it was before an upgrade; what cannot be seen does not speak against it.
fn is_our_program(pid: i32) -> bool {
    let theirs = format!("/proc/{pid}/exe");
    let same_file = |a: &fs::Metadata, b: &fs::Metadata| (a.dev(), a.ino()) == (b.dev(), b.ino());
    match (fs::metadata(&theirs), fs::metadata("/proc/self/exe")) {
        (Ok(a), Ok(b)) if same_file(&a, &b) => return true,
        _ => {}
    }
    let name = |path: PathBuf| Some(path.file_name()?.to_str()?.trim_end_matches(" (deleted)").to_owned());
    match (fs::read_link(theirs), env::current_exe()) {
        (Ok(a), Ok(b)) => name(a) == name(b),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process of that name, which ends with its input.
    fn process(dir: &tempfile::TempDir, name: &str) -> std::process::Child {
        let program = dir.path().join(name);
        std::os::unix::fs::symlink("/bin/bash", &program).expect("a link");
        let child = Command::new(program).args(["-c", "read"]).stdin(Stdio::piped()).spawn().expect("bash runs");
        let comm = format!("/proc/{}/comm", child.id());
        while !fs::read_to_string(&comm).is_ok_and(|found| found.trim_end() == name) {
            thread::sleep(Duration::from_millis(1));
        }
        child
    }

    fn end(mut child: std::process::Child) {
        drop(child.stdin.take());
        child.wait().expect("it ends");
    }

    fn args(line: &[&str]) -> hold::Args {
        let Ok(Cli { command: cli::Command::Hold(args) }) = Cli::try_parse_from(line) else { panic!("{line:?}") };
        args
    }

    #[test]
    fn an_attempt_whose_epoch_is_not_among_the_arguments_yet_was_told_to_nobody() {
        let dir = tempfile::tempdir().expect("directory");
        let taking = args(&["leasefs", "hold", "--key=k", "--root=/", "--channel=3"]);
        let taken = hold::Args { epoch: Some(1), ..taking.clone() };
        let child = process(&dir, "leasefs");
        assert!(!is_kept(child.id(), &taking) && is_kept(child.id(), &taken));
        end(child);
        let child = process(&dir, "leasefs-new");
        assert!(!is_kept(child.id(), &taken), "it has not heard that it was told");
        end(child);
    }

    #[test]
    fn a_command_line_is_never_put_together_of_two() {
        const NAMES: [&str; 2] = ["short", "as-long-as-no-first-part-of-what-is-read-can-be-of-it-alone"];
        // It executes itself anew until its input ends, under one name and the other.
        let script = format!(
            "read -t 0 && exit; case $0 in s*) exec -a {} bash -c \"$IT\";; esac; exec -a {} bash -c \"$IT\"",
            NAMES[1], NAMES[0]
        );
        let child = Command::new("bash")
            .arg0("short")
            .args(["-c", &script])
            .env("IT", &script)
            .stdin(Stdio::piped())
            .spawn()
            .expect("bash runs");
        let pid = i32::try_from(child.id()).expect("a pid");
        let lines = NAMES.map(|name| format!("{name}\0-c\0{script}\0").into_bytes());
        // Before it is bash, it is a copy of this process.
        let until = Instant::now() + Duration::from_secs(60);
        while command_line(pid).is_none_or(|line| !lines.contains(&line)) {
            assert!(Instant::now() < until, "bash never came up");
        }
        let mut seen = [0, 0];
        let mut others = Vec::new();
        while others.is_empty() && (seen.iter().sum::<u32>() < 20_000 || seen.contains(&0)) {
            let line = command_line(pid).expect("it is there");
            match lines.iter().position(|known| *known == line) {
                Some(which) => seen[which] += 1,
                None => others.push(String::from_utf8_lossy(&line).into_owned()),
            }
        }
        end(child);
        assert!(others.is_empty(), "{others:?}");
    }

    #[test]
    fn one_that_has_no_command_line_any_more_is_not_waited_for() {
        let dir = tempfile::tempdir().expect("directory");
        let mut child = process(&dir, "reader");
        let pid = i32::try_from(child.id()).expect("a pid");
        assert!(command_line(pid).is_some_and(|line| line.ends_with(b"\0-c\0read\0")));
        child.kill().expect("kill");
        let began = Instant::now();
        // Until it is reaped, its number is there.
        while command_line(pid).is_some_and(|line| !line.is_empty()) {}
        assert!(began.elapsed() < EXECUTES_WITHIN);
        end(child);
        assert_eq!(command_line(pid), None);
    }
}
