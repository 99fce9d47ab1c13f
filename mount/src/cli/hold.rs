//! `leasefs hold`: the process that keeps an attempt for callers who cannot. Started by `leasefs claim`, not by hand.
//!
//! It takes the key itself, so that it is the holder that others see, and then executes itself anew with the epoch among
//! its arguments, so that `ps` shows whose attempt it keeps. Whoever started it hears how that went over a channel, and
//! has to say that it has told the epoch on; if it is gone before, the key is given back.

use std::convert::Infallible;
use std::ffi::{CStr, OsString};
use std::fs::OpenOptions;
use std::io::{Read, Write};
use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use leasefs::Ttl;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::prctl;

use super::holding::binding::{Bound, Sentinel, inherit};
use super::holding::claim::Claim;
use super::holding::holder::{self, Report};
use super::holding::keep::{self, Liveness};
use super::holding::take::{self, Patience, Refusal};
use super::proc::Pid;
use super::tree::{Tree, TreeArgs, trouble};
use super::{EXIT_FAILURE, EXIT_NO};

/// What `ps` calls it from when it has told the epoch until it hears that this was passed on.
const NAME_UNSETTLED: &CStr = c"leasefs-new";

/// Whose attempt is kept, and for how long. Read by later commands as well, from the process table.
#[derive(clap::Args, Clone, Debug)]
pub struct Args {
    /// The key
    #[arg(long)]
    pub key: String,
    /// The attempt; without it the key is still to be taken
    #[arg(long)]
    pub epoch: Option<u64>,
    /// The agent's name
    #[arg(long)]
    pub agent: Option<String>,
    /// Process it ends with
    #[arg(long = "for", value_name = "PID:START")]
    pub bound: Option<Pid>,
    /// Text it ends with the absence of
    #[arg(long)]
    pub sentinel: Option<String>,
    /// How long the text need not be there yet
    #[arg(long, value_parser = humantime::parse_duration)]
    pub grace: Option<Duration>,
    /// Leader of the session it was claimed from
    #[arg(long, value_name = "PID:START")]
    pub session: Option<Pid>,
    /// Who ran the command that claimed it
    #[arg(long, value_name = "PID:START")]
    pub parent: Option<Pid>,
    /// The tree
    #[arg(long)]
    pub root: PathBuf,
    /// Time to live
    #[arg(long)]
    pub ttl: Option<Ttl>,
    /// Take it by exclusive create
    #[arg(long)]
    pub once: bool,
    /// Wait at most so many seconds in line
    #[arg(long, value_parser = super::seconds)]
    pub wait: Option<Duration>,
    /// Descriptor of the channel to who started it
    #[arg(long)]
    pub channel: RawFd,
    /// Descriptor of the process it ends with
    #[arg(long)]
    pub pidfd: Option<RawFd>,
    /// Descriptor of the holder handle
    #[arg(long)]
    pub handle: Option<RawFd>,
}

impl Args {
    /// The command line that means this, without the program.
    pub fn command_line(&self) -> Vec<OsString> {
        let mut line: Vec<OsString> = vec!["hold".into(), format!("--key={}", self.key).into()];
        let mut add = |name: &str, value: Option<String>| {
            if let Some(value) = value {
                line.push(format!("--{name}={value}").into());
            }
        };
        add("epoch", self.epoch.map(|epoch| epoch.to_string()));
        add("agent", self.agent.clone());
        add("for", self.bound.map(|bound| bound.to_string()));
        add("sentinel", self.sentinel.clone());
        add("grace", self.grace.map(|grace| humantime::format_duration(grace).to_string()));
        add("session", self.session.map(|session| session.to_string()));
        add("parent", self.parent.map(|parent| parent.to_string()));
        add("ttl", self.ttl.map(|ttl| ttl.to_string()));
        add("wait", self.wait.map(|wait| wait.as_secs_f64().to_string()));
        add("channel", Some(self.channel.to_string()));
        add("pidfd", self.pidfd.map(|fd| fd.to_string()));
        add("handle", self.handle.map(|fd| fd.to_string()));
        if self.once {
            line.push("--once".into());
        }
        let mut root = OsString::from("--root=");
        root.push(&self.root);
        line.push(root);
        line
    }
}

/// Carries the command out.
pub fn run(args: Args) -> Result<ExitCode> {
    // Executed by way of `/proc` it would be called `exe`.
    prctl::set_name(if args.handle.is_none() { holder::NAME } else { NAME_UNSETTLED })?;
    let mut channel = UnixStream::from(inherit(args.channel)?);
    let got = match args.handle {
        None => take(&args, &channel).map(|never| match never {}),
        Some(handle) => adopt(&args, handle, &mut channel),
    };
    match got {
        Ok(None) => Ok(ExitCode::SUCCESS),
        Ok(Some(Kept { tree, claim, liveness })) => {
            drop(channel);
            keep::until_over(&tree, claim, &liveness)?;
            Ok(ExitCode::SUCCESS)
        }
        Err(refused) => {
            let code = refused.0;
            // Nobody else listens; if that one is gone, nobody has to be told.
            let _ = Report::Refused { code, message: refused.1 }.send(&mut channel);
            Ok(ExitCode::from(code))
        }
    }
}

/// Why nothing is held: exit code and message for the one who wanted it.
struct Refused(u8, String);

impl From<anyhow::Error> for Refused {
    fn from(error: anyhow::Error) -> Refused {
        Refused(EXIT_FAILURE, format!("{error:#}"))
    }
}

/// Takes the key; comes back only if it could not be taken.
fn take(args: &Args, channel: &UnixStream) -> Result<Infallible, Refused> {
    let tree = Tree::find(&TreeArgs { root: Some(args.root.clone()) }, &[])?;
    let key = tree.key(&args.key)?;
    let bound = bound(args)?;
    let until: Vec<_> = std::iter::once(channel.as_fd()).chain(bound.as_ref().map(AsFd::as_fd)).collect();
    let taken = match args.once {
        true => take::create(&tree, key, args.ttl),
        false => take::take_one(&tree, key, args.ttl, Patience::of(args.wait), &until),
    };
    let claim = match (taken, args.bound) {
        (Ok(claim), _) => claim,
        (Err(Refusal::Lost(_)), Some(process)) if bound.as_ref().is_some_and(|bound| is_ready(bound.as_fd())) => {
            return Err(anyhow!("{}: process {} has ended: nothing was claimed", args.key, process.pid).into());
        }
        (Err(Refusal::Held(why)), _) => return Err(Refused(EXIT_NO, format!("{why}: nothing was claimed"))),
        (Err(Refusal::Lost(why)), _) => return Err(Refused(EXIT_FAILURE, why)),
        (Err(Refusal::Failed(error)), _) => return Err(error.into()),
    };
    if let Some(name) = &args.agent {
        claim.set_agent(name)?;
    }
    let args = Args { epoch: Some(claim.epoch()), handle: Some(claim.file().as_raw_fd()), ..args.clone() };
    for fd in [Some(claim.file().as_fd()), Some(channel.as_fd()), bound.as_ref().map(AsFd::as_fd)].into_iter().flatten()
    {
        fcntl(fd, FcntlArg::F_SETFD(FdFlag::empty())).map_err(anyhow::Error::from)?;
    }
    let error = Command::new("/proc/self/exe").arg0("leasefs").args(args.command_line()).exec();
    Err(anyhow!("{}: its holder cannot be started: {error}", args.key).into())
}

/// What is kept, and for whom.
struct Kept {
    tree: Tree,
    claim: Claim,
    liveness: Liveness,
}

/// Takes over what was taken. It is kept once the one who wanted it has it; nothing is, if that one is gone.
fn adopt(args: &Args, handle: RawFd, channel: &mut UnixStream) -> Result<Option<Kept>, Refused> {
    let file = std::fs::File::from(inherit(handle)?);
    let tree = Tree::find(&TreeArgs { root: Some(args.root.clone()) }, &[])?;
    let key = tree.key(&args.key)?;
    let claim = Claim::adopt(&tree, key, file).map_err(|error| match error.raw_os_error() {
        Some(libc::ESTALE) => {
            Refused(EXIT_FAILURE, format!("{}: lost its lease at once: claim it again, with a longer TTL", args.key))
        }
        _ => trouble(&args.key, error).into(),
    })?;
    let liveness = match (bound(args)?, &args.sentinel) {
        (Some(bound), _) => Liveness::Process(bound),
        (None, Some(text)) => {
            let watched = Sentinel::watch(text, args.grace.unwrap_or_default(), claim.ttl());
            Liveness::Sentinel(text.clone(), watched.map_err(anyhow::Error::from)?)
        }
        (None, None) => Liveness::Unbound,
    };
    let expires = tree.status(claim.key()).ok().flatten().and_then(|status| status.expires);
    // Whatever is said until here, the caller reads; what comes later must not keep its pipes open.
    close_stderr().context("/dev/null")?;
    let report = Report::Held { epoch: claim.epoch(), pid: std::process::id(), expires };
    if report.send(channel).is_err() || channel.read_exact(&mut [0]).is_err() {
        return Ok(None);
    }
    prctl::set_name(holder::NAME).map_err(anyhow::Error::from)?;
    Ok(Some(Kept { tree, claim, liveness }))
}

fn bound(args: &Args) -> Result<Option<Bound>> {
    match (args.bound, args.pidfd) {
        (Some(process), Some(fd)) => Ok(Some(Bound::inherited(process, inherit(fd)?))),
        _ => Ok(None),
    }
}

fn is_ready(fd: std::os::fd::BorrowedFd<'_>) -> bool {
    poll(&mut [PollFd::new(fd, PollFlags::POLLIN)], PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
}

fn close_stderr() -> Result<()> {
    let null = OpenOptions::new().write(true).open("/dev/null")?;
    std::io::stderr().flush()?;
    nix::unistd::dup2_stderr(&null)?;
    Ok(())
}
