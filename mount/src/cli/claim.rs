//! `leasefs claim`: holds a key for callers who cannot keep a file open, because each of their steps is a new process.
//!
//! A holder process keeps the attempt (`leasefs hold`); this command comes back with its epoch, or with the refusal. With
//! `--handoff` there is no such process: the command that is executed has the holder handle itself.

use std::ffi::{CString, OsString};
use std::io::{self, Write};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, ExitCode};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, bail};
use leasefs::client::handle;
use leasefs::{Key, Ttl};
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::sys::prctl;
use serde_json::json;

use super::holding::AgentArgs;
use super::holding::attempt::{self, EXIT_OVER, Kept};
use super::holding::binding::Bound;
use super::holding::holder::{self, Report};
use super::holding::identity;
use super::holding::take::{self, Patience, Refusal};
use super::run::program;
use super::tree::{Tree, TreeArgs, trouble};
use super::{EXIT_NO, complain, hold, order};

/// How long another command of the same agent may take to tell its epoch.
const SETTLES_WITHIN: Duration = Duration::from_secs(10);
/// From the claim until a sentinel has to be seen.
const GRACE: Duration = Duration::from_secs(120);

/// Which key, for whom, and for how long.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Prints the epoch on the first line, the path that takes this attempt's result on the second, and ends; a small process
(`leasefs hold`) goes on holding the key until
- the process given with --for has ended, however it ended; or
- no process has TEXT of --sentinel in its command line, after --grace; or
- `leasefs release`, `complete` or `abandon`; or
- the TTL is over. Only with --for or --sentinel is the lease renewed meanwhile; without, `leasefs renew` does.

Later steps name the attempt by its epoch: `leasefs complete KEY --epoch N <result`. Claiming again as the same agent
(same uid and --agent) while it holds renews, with the same epoch: agents that must exclude each other need names of
their own. Without a name, that is for who is proven to have claimed: see `leasefs help release`.

With --handoff, CMD is executed in the place of this command and has the holder handle itself, as descriptor LEASEFS_FD:
the lease begins before CMD and ends with the last copy of the handle, with no moment between. It is not renewed for CMD,
which can do so (`leasefs renew KEY`). CMD finds LEASEFS_KEY, LEASEFS_EPOCH, LEASEFS_RESULT and LEASEFS_ROOT, too.

Exit codes:
  0    held
  1    refused: held by another, or with --once finished
  2    bad usage or failure: nothing is held (with --handoff: 125)
  N    with --handoff CMD's own; 126 it cannot be executed, 127 it was not found")]
pub struct Args {
    /// Key to hold
    #[arg(value_name = "KEY")]
    pub key: String,
    /// Whose it is.
    #[command(flatten)]
    pub agent: AgentArgs,
    /// Hold it while this process lives; one that is stopped lives
    #[arg(long = "for", value_name = "PID", conflicts_with = "sentinel", allow_negative_numbers = true)]
    pub bound: Option<i32>,
    /// Hold it while a process has this text in its command line
    #[arg(long, value_name = "TEXT", value_parser = sentinel)]
    pub sentinel: Option<String>,
    /// How long the sentinel's process may take to come up [default: 2m]
    #[arg(long, value_name = "D", requires = "sentinel", value_parser = grace)]
    pub grace: Option<Duration>,
    /// Time to live, as in 90s or 1h30m [default: the namespace's or the mount's]
    #[arg(long, value_name = "D")]
    pub ttl: Option<Ttl>,
    /// Do not wait for a key that is held
    #[arg(short = 'n', long, conflicts_with = "wait")]
    pub nonblock: bool,
    /// Wait at most this long; without it, wait as long as it takes
    #[arg(short = 'w', long = "wait", value_name = "SECS", value_parser = super::seconds)]
    pub wait: Option<Duration>,
    /// Only if it is not finished, and without waiting: what has a result is not done again
    #[arg(long, conflicts_with = "wait")]
    pub once: bool,
    /// Print one JSON object: key, epoch, result, holder_pid, agent, expires
    #[arg(long, conflicts_with = "handoff")]
    pub json: bool,
    /// Pass the holder handle to CMD, which is executed in the place of this command
    #[arg(long, requires = "command", conflicts_with_all = ["bound", "sentinel"])]
    pub handoff: bool,
    /// Command of --handoff, with its arguments
    #[arg(last = true, requires = "handoff", value_name = "CMD")]
    pub command: Vec<OsString>,
    /// The tree.
    #[command(flatten)]
    pub tree: TreeArgs,
}

impl Args {
    /// How long to wait in line: zero is not at all, none is as long as it takes.
    fn patience(&self) -> Option<Duration> {
        if self.nonblock { Some(Duration::ZERO) } else { self.wait }
    }
}

/// Any text a process can be known by.
fn sentinel(text: &str) -> Result<String, String> {
    if text.trim().is_empty() { Err("empty: every process has that".to_owned()) } else { Ok(text.to_owned()) }
}

fn grace(text: &str) -> Result<Duration, String> {
    let grace = humantime::parse_duration(text).map_err(|error| format!("{error}: give it as in 90s or 2m"))?;
    if grace > Ttl::MAX.as_duration() { Err("give at most 365 days".to_owned()) } else { Ok(grace) }
}

/// Carries the command out.
pub fn run(args: Args) -> Result<ExitCode> {
    if args.handoff {
        return hand_off(&args).or_else(|error| {
            complain(format_args!("{error:#}"));
            Ok(ExitCode::from(super::run::EXIT_FAILURE))
        });
    }
    let (tree, key) = Tree::find_with_key(&args.tree, &args.key)?;
    let bound = args.bound.map(bind).transpose()?;
    let wanted = wanted(&args, &tree, &key, bound.as_ref());
    if let Some(code) = claim_again(&args, &tree, &key, &wanted)? {
        return Ok(code);
    }
    // Not waiting first: whoever has it may be the same agent, which has just come by another way.
    let at_once = hold::Args { wait: Some(Duration::ZERO), ..wanted.clone() };
    let mut started = holder::start(at_once, bound.as_ref())?;
    let is_patient = wanted.wait != Some(Duration::ZERO) && !wanted.once;
    if matches!(started.report, Report::Refused { code: EXIT_NO, .. }) {
        if let Some(code) = claim_again(&args, &tree, &key, &wanted)? {
            return Ok(code);
        }
        if is_patient {
            started = holder::start(wanted, bound.as_ref())?;
        }
    }
    match &started.report {
        Report::Refused { code, message } => {
            complain(message);
            Ok(ExitCode::from(*code))
        }
        Report::Held { epoch, pid, expires } => {
            print(&args, &tree, &key, *epoch, Some(*pid), expires.as_deref())
                .map_err(|error| anyhow!("{key}: its epoch cannot be printed: {error}: nothing is held"))?;
            started.keep().map_err(|error| anyhow!("{key}: its holder has ended: {error}: nothing is held"))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

fn bind(pid: i32) -> Result<Bound> {
    if u32::try_from(pid).is_ok_and(|pid| pid == std::process::id()) {
        bail!("--for {pid}: is this very command: bind to a process that goes on");
    }
    Bound::open(pid)
}

/// What a holder process is to do.
fn wanted(args: &Args, tree: &Tree, key: &Key, bound: Option<&Bound>) -> hold::Args {
    hold::Args {
        key: key.as_str().to_owned(),
        epoch: None,
        agent: args.agent.name().map(str::to_owned),
        bound: bound.map(|bound| bound.process),
        sentinel: args.sentinel.clone(),
        grace: args.sentinel.as_ref().map(|_| args.grace.unwrap_or(GRACE)),
        session: identity::session_leader(),
        parent: identity::telling_parent(args.agent.name().is_some()),
        root: tree.root().to_owned(),
        ttl: args.ttl,
        once: args.once,
        wait: args.patience(),
        channel: -1,
        pidfd: None,
        handle: None,
    }
}

/// Renews, where the same agent holds the key already; none where it does not.
fn claim_again(args: &Args, tree: &Tree, key: &Key, wanted: &hold::Args) -> Result<Option<ExitCode>> {
    let Some(Kept { status, how }) = settled(tree, key, args.agent.name())? else { return Ok(None) };
    let binds = wanted.bound.is_some() || wanted.sentinel.is_some();
    let is_bound_so = |held: &hold::Args| (wanted.bound, &wanted.sentinel) == (held.bound, &held.sentinel);
    if binds && !how.as_deref().is_some_and(is_bound_so) {
        let to = match how.map(|held| (held.bound, held.sentinel)) {
            Some((Some(process), _)) => format!(", for process {}", process.pid),
            Some((None, Some(text))) => format!(", for the sentinel {text}"),
            Some((None, None)) => ", until its TTL".to_owned(),
            None => String::new(),
        };
        bail!("{key}: this agent holds it already, at epoch {}{to}: release it first to bind it anew", status.epoch);
    }
    match order::send(tree, "renew", key, status.epoch, None) {
        Ok(()) => {}
        // It has just ended: this is a new claim.
        Err(error) if error.raw_os_error() == Some(libc::ESTALE) => return Ok(None),
        Err(error) => return Err(trouble(key, error)),
    }
    // Only now: it is set by the key's name, and the attempt may have been over since it was looked at.
    if let Some(ttl) = args.ttl {
        set_ttl(tree, key, ttl)?;
    }
    let renewed = tree.status(key)?.filter(|now| now.epoch == status.epoch).unwrap_or(status);
    let pid = renewed.holder.as_ref().map(|holder| holder.pid);
    print(args, tree, key, renewed.epoch, pid, renewed.expires.as_deref())
        .map_err(|error| anyhow!("{key}: its epoch cannot be printed: {error}"))?;
    Ok(Some(ExitCode::SUCCESS))
}

/// The attempt that is kept for the same agent, once whoever claimed it has told its epoch: until then it may still be
/// given back, and nobody may build on it.
fn settled(tree: &Tree, key: &Key, agent: Option<&str>) -> Result<Option<Kept>> {
    let until = Instant::now() + SETTLES_WITHIN;
    loop {
        let Some(kept) = attempt::kept_for_agent(tree, key, agent)? else { return Ok(None) };
        let is_kept = |how| kept.status.holder.as_ref().is_some_and(|holder| holder::is_kept(holder.pid, how));
        if kept.how.as_deref().is_none_or(is_kept) {
            return Ok(Some(kept));
        }
        if Instant::now() >= until {
            bail!(
                "{key}: another command of this agent is claiming it, at epoch {}, and has not ended: end that, or try later",
                kept.status.epoch
            );
        }
        thread::sleep(Duration::from_millis(10));
    }
}

fn set_ttl(tree: &Tree, key: &Key, ttl: Ttl) -> Result<()> {
    let set = std::fs::File::open(tree.files.claim_path(key)).and_then(|file| handle::set_ttl(&file, ttl));
    match set {
        // It has just ended, all the same.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(trouble(format_args!("{key}: its TTL cannot be set to {ttl}"), error)),
        Ok(()) => Ok(()),
    }
}

fn print(args: &Args, tree: &Tree, key: &Key, epoch: u64, pid: Option<u32>, expires: Option<&str>) -> io::Result<()> {
    let result = tree.files.result_path(key, epoch);
    let text = if args.json {
        let agent = args.agent.name();
        let object = json!({
            "key": key.as_str(),
            "epoch": epoch,
            "result": result.to_string_lossy(),
            "holder_pid": pid,
            "agent": agent,
            "expires": expires,
        });
        format!("{object}\n")
    } else {
        format!("{epoch}\n{}\n", result.display())
    };
    // At once: a reader that has had the first line may be gone by the second, and must not cost the claim.
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

/// Takes the key in this process and becomes the command; comes back only if that failed.
fn hand_off(args: &Args) -> Result<ExitCode> {
    let Some((name, arguments)) = args.command.split_first() else {
        bail!("no command is given: put it after `--`");
    };
    let file = match program::find_program(name) {
        Ok(file) => file,
        Err(missing) => return Ok(missing.report(name)),
    };
    // The holder is shown as what it is about to be.
    if let Some(name) = Path::new(name).file_name().and_then(|name| CString::new(name.as_bytes()).ok()) {
        prctl::set_name(&name)?;
    }
    let (tree, key) = Tree::find_with_key(&args.tree, &args.key)?;
    if let Some(kept) = attempt::kept_for_agent(&tree, &key, args.agent.name())? {
        complain(format_args!(
            "{key}: this agent holds it already, at epoch {}: release it first to hand it to a command",
            kept.status.epoch
        ));
        return Ok(ExitCode::from(EXIT_NO));
    }
    let taken = match args.once {
        true => take::create(&tree, key.clone(), args.ttl),
        false => take::take_one(&tree, key.clone(), args.ttl, Patience::of(args.patience()), &[]),
    };
    let claim = match taken {
        Ok(claim) => claim,
        Err(Refusal::Held(why)) => {
            complain(format_args!("{why}: nothing was run"));
            return Ok(ExitCode::from(EXIT_NO));
        }
        Err(Refusal::Lost(why)) => {
            complain(why);
            return Ok(ExitCode::from(EXIT_OVER));
        }
        Err(Refusal::Failed(error)) => return Err(error),
    };
    if let Some(agent) = args.agent.name() {
        claim.set_agent(agent)?;
    }
    let epoch = claim.epoch();
    let handle = claim.into_file();
    fcntl(&handle, FcntlArg::F_SETFD(FdFlag::empty()))?;
    let error = Command::new(file)
        .arg0(name)
        .args(arguments)
        .env("LEASEFS_FD", handle.as_raw_fd().to_string())
        .env("LEASEFS_KEY", key.as_str())
        .env("LEASEFS_EPOCH", epoch.to_string())
        .env("LEASEFS_RESULT", tree.files.result_path(&key, epoch))
        .env("LEASEFS_ROOT", tree.root())
        .exec();
    Ok(program::Missing::of(&error).report(name))
}
