//! `leasefs mount`: starts a keeper, in the background unless told otherwise, and returns when the tree answers.

use std::io::{Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode, Stdio};

use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use leasefs::Ttl;
use leasefs::engine::Durability;

use crate::keeper::{self, Manner};
use crate::kernel_mount::Options;
use crate::server::{self, Plan};
use crate::{logfile, mountinfo};

/// Names the descriptor on which a background server says that it is ready or why it is not.
const READY_FD: &str = "LEASEFS_READY_FD";
/// How what it says begins when it is ready; there follows what there is to say of it.
const READY: &str = "ready: ";

/// Arguments of `leasefs mount`.
#[derive(clap::Args)]
#[command(after_help = "\
In the background, the log is leasefs.log in the state directory; with --foreground it goes to stderr, and a service
manager is told of readiness, upgrades and the end (sd_notify). SIGTERM to the keeper unmounts: where files are open, it
serves them until the last one is closed. A second SIGTERM does not wait. SIGHUP is `leasefs upgrade`.

Exit codes: 0 mounted, or with --foreground unmounted again; 1 not mounted: stderr says why and what to do; 2 bad usage.")]
pub struct Args {
    /// The directory to mount on; it must be empty
    mountpoint: PathBuf,
    /// Where epochs, leases and results are kept [default: $XDG_STATE_HOME/leasefs or ~/.local/state/leasefs]
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// Stay in the foreground and log to stderr
    #[arg(long, short)]
    foreground: bool,
    /// Let every uid use the tree; without it, only the uid that mounts
    #[arg(long)]
    allow_other: bool,
    /// How long a lease lasts without renewal: 90s, 15m, 24h, 1h30m
    #[arg(long, value_name = "D", default_value = "24h")]
    ttl: Ttl,
    /// What a grant survives: `full` the machine's power cut, `process` the server's end
    #[arg(long, value_enum, default_value = "full")]
    durability: DurabilityArg,
    /// The largest result, in bytes, or with a unit as in 64MiB
    #[arg(long, value_name = "SIZE", default_value = "64MiB", value_parser = bytes)]
    max_result: u64,
    /// The most keys one uid may hold
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    max_keys: usize,
    /// The most lock requests of one uid that may wait
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    max_waiters: usize,
    /// Do not have the kernel send unanswered calls again to a new server, as before Linux 6.9: locks keep their place, other calls under way end with EINTR
    #[arg(long)]
    no_resend: bool,
    /// The most servers in a row that may fail to get ready, before the keeper gives up
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..))]
    max_starts: u32,
    /// Mount options: ro, noexec, noatime, sync, dirsync, dev, suid, max_read=BYTES, context=LABEL, fsname=NAME, allow_other
    #[arg(short = 'o', value_name = "OPT[,OPT…]", value_delimiter = ',')]
    options: Vec<String>,
}

#[derive(Clone, Copy, ValueEnum)]
enum DurabilityArg {
    Full,
    Process,
}

/// Reads a size in bytes, with or without KiB, MiB or GiB.
fn bytes(text: &str) -> Result<u64, String> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let scale = match unit {
        "" | "B" => 1,
        "K" | "KiB" => 1 << 10,
        "M" | "MiB" => 1 << 20,
        "G" | "GiB" => 1 << 30,
        _ => 0,
    };
    let size = number.parse::<u64>().ok().and_then(|number| number.checked_mul(scale));
    size.filter(|size| *size > 0).ok_or_else(|| "give a size such as 1048576, 512KiB, 64MiB or 1GiB".to_owned())
}

impl Args {
    /// Adds options as `-o` has them, but each whole: a comma in one is part of it.
    pub(super) fn add_options(&mut self, options: Vec<String>) {
        self.options.extend(options);
    }

    fn plan(self) -> Result<Plan> {
        let state_dir = match self.state {
            Some(dir) => dir,
            None => server::default_state_dir()?,
        };
        let mut extra = self.options;
        let asked = extra.iter().any(|option| option == "allow_other");
        let source = extra.iter().rev().find_map(|option| option.strip_prefix("fsname=")).map(str::to_owned);
        extra.retain(|option| option != "allow_other" && !option.is_empty() && !option.starts_with("fsname="));
        Ok(Plan {
            mountpoint: self.mountpoint,
            state_dir,
            options: Options { allow_other: self.allow_other || asked, source, extra },
            ttl: self.ttl,
            durability: match self.durability {
                DurabilityArg::Full => Durability::Full,
                DurabilityArg::Process => Durability::Process,
            },
            max_result: self.max_result,
            max_keys: self.max_keys,
            max_waiters: self.max_waiters,
        })
    }
}

/// Mounts.
///
/// # Errors
/// What is wrong and what to do; then nothing is mounted.
pub fn run(args: Args) -> Result<ExitCode> {
    run_quietly(args, false)
}

/// Mounts; where `quiet`, without a word on what to expect of the tree.
///
/// # Errors
/// As [`run`].
pub fn run_quietly(args: Args, quiet: bool) -> Result<ExitCode> {
    let foreground = args.foreground;
    let ready = ready_fd();
    let manner = Manner { log_there: ready.is_some(), no_resend: args.no_resend, max_starts: args.max_starts };
    let plan = args.plan()?;
    match (foreground, ready) {
        (_, Some(ready)) => keep_in_background(&plan, manner, ready),
        (true, None) => {
            logfile::start();
            keeper::run(&plan, manner, |_| ())?;
            Ok(ExitCode::SUCCESS)
        }
        (false, None) => start(&plan, quiet),
    }
}

/// The descriptor a parent waits on, if this process was started by [`start`].
fn ready_fd() -> Option<OwnedFd> {
    let number: i32 = std::env::var(READY_FD).ok()?.parse().ok()?;
    // SAFETY: the parent made this descriptor for us alone and named it in our environment; nothing else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    // SAFETY: no other thread of this process exists yet, so nobody reads the environment meanwhile.
    unsafe { std::env::remove_var(READY_FD) };
    nix::fcntl::fcntl(&fd, nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC)).ok()?;
    Some(fd)
}

/// The background keeper: its first message goes to whoever started it, the rest to its log.
fn keep_in_background(plan: &Plan, manner: Manner, ready: OwnedFd) -> Result<ExitCode> {
    logfile::start();
    let mut ready = Some(std::fs::File::from(ready));
    let outcome = keeper::run(plan, manner, |how| {
        if let Some(mut pipe) = ready.take() {
            let _ = pipe.write_all(format!("{READY}{how}").as_bytes());
        }
    });
    match (outcome, ready) {
        (Ok(()), _) => Ok(ExitCode::SUCCESS),
        (Err(error), Some(mut pipe)) => {
            let _ = pipe.write_all(format!("{error:#}").as_bytes());
            Ok(ExitCode::FAILURE)
        }
        (Err(error), None) => {
            tracing::error!("{error:#}");
            Ok(ExitCode::FAILURE)
        }
    }
}

/// Starts the same command again as a session of its own, and waits until it says that it is ready, or why not.
fn start(plan: &Plan, quiet: bool) -> Result<ExitCode> {
    // Mounted on demand, by a process of the one group that does not wait for that: there it stays, and has no terminal.
    let stays = plan.mountpoint.canonicalize().and_then(|path| mountinfo::is_automount(&path)).unwrap_or(false);
    let (ours, theirs) = nix::unistd::pipe2(nix::fcntl::OFlag::O_CLOEXEC).context("pipe")?;
    let number = theirs.as_raw_fd();
    let mut command = Command::new("/proc/self/exe");
    command.arg0(std::env::args_os().next().unwrap_or_else(|| "leasefs".into()));
    command.args(std::env::args_os().skip(1)).env(READY_FD, number.to_string());
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    // SAFETY: between fork and exec only setsid(2), signal(2) and fcntl(2) are called, which are async-signal-safe.
    unsafe {
        command.pre_exec(move || {
            if !stays {
                nix::unistd::setsid()?;
            }
            // What the caller ignores, as scripts do for what they start in the background, is an order to the keeper.
            for signal in [libc::SIGTERM, libc::SIGINT, libc::SIGHUP] {
                libc::signal(signal, libc::SIG_DFL);
            }
            if libc::fcntl(number, libc::F_SETFD, 0) < 0 {
                return Err(std::io::Error::last_os_error());
            }
            Ok(())
        });
    }
    let mut child = command.spawn().context("cannot start the server")?;
    drop(theirs);
    let mut said = String::new();
    std::fs::File::from(ours).read_to_string(&mut said).context("the keeper's first word")?;
    if let Some(how) = said.strip_prefix(READY) {
        if !quiet {
            let _ = writeln!(std::io::stdout(), "{how}");
        }
        return Ok(ExitCode::SUCCESS);
    }
    let status = child.wait().context("the server")?;
    if said.is_empty() {
        bail!("the server ended before it was ready ({status}): see {}", plan.state_dir.join(logfile::LOG).display());
    }
    bail!("{said}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        assert_eq!(bytes("64MiB"), Ok(64 << 20));
        assert_eq!(bytes("4096"), Ok(4096));
        assert_eq!(bytes("1G"), Ok(1 << 30));
        for text in ["", "0", "-1", "1TB", "MiB", "1.5M", "99999999999GiB"] {
            assert!(bytes(text).is_err(), "{text:?}");
        }
    }
}
