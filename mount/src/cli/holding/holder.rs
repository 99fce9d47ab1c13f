//! The process that keeps an attempt (`leasefs hold`): starting it, and knowing it again.

use std::ffi::CStr;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::{env, fs};

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
    Ok(Started { report: serde_json::from_str(&line)?, channel: reader.into_inner() })
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

/// Whether it keeps its attempt: before it hears that its epoch was told, it has another name.
pub fn is_kept(pid: u32) -> bool {
    fs::read(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim_ascii_end() == NAME.to_bytes())
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
    let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let words =
        line.strip_suffix(b"\0")?.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned());
    match Cli::try_parse_from(words) {
        Ok(Cli { command: cli::Command::Hold(args) }) => Some(args),
        _ => None,
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
