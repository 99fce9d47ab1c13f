//! `leasefs run`: a command that runs only while its keys are held.
//!
//! This file orders the steps: find the command, take the keys ([`claim`]), run it and keep them ([`child`]), give them
//! back. Nothing is claimed for a command that cannot be started, and the keys outlive the command, never the reverse.

use std::ffi::{OsStr, OsString};
use std::os::fd::AsRawFd;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::Result;
use leasefs::{Key, Ttl};

use super::complain;
use super::holding::AgentArgs;
use super::holding::claim::Claim;
use super::holding::take::{self, Patience, Refusal};
use super::tree::{Tree, TreeArgs};
use guard::Rules;

mod child;
mod family;
mod guard;
mod link;
pub(super) mod program;

/// `run` itself failed, as with `env` and `timeout`.
pub const EXIT_FAILURE: u8 = 125;
/// A lease was lost while the command ran: `EX_TEMPFAIL`.
const EXIT_LOST: u8 = 75;

/// Which keys, how to wait for them, and what to run.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
The keys are taken by lock (the mutex and resume form: a finished key can be taken again) and released when CMD has
ended. Several keys are taken all or none, in one order for everybody, so runs cannot deadlock. A run that waits says who
holds the key and for how long.

While CMD runs, each lease is renewed every third of its TTL. CMD and what it starts in the background do not inherit the
lease (as with `flock -o`), unless --inherit says so.

HUP, INT, QUIT, TERM, USR1, USR2 and TSTP are passed on to CMD. Without a terminal CMD leads a process group, and INT,
QUIT, TERM and TSTP go to all of it; with one it stays in the group of `leasefs run`, so Ctrl-C, Ctrl-Z and `fg` work.

CMD and all its descendants, also those in sessions of their own, are ended (TERM, and KILL after --kill-after):
- when `leasefs run` is killed: a second process (`leasefs-guard`) keeps the lease until they are dead. If the guard is
  killed, CMD is too, and `leasefs run` does the same. With --child-keeps CMD goes on, and keeps the lease until it ends.
- when a lease is not renewed, because `leasefs run` is stopped or the tree does not answer: TERM a fifth of the TTL (at
  most 10 s) before the lease ends, KILL half of that before, so they are dead when the next holder begins.
- when a lease is lost. An evict takes effect at once: the next holder does not wait until CMD is dead.

CMD finds in its environment (one line per key when there are several, in the order given):
  LEASEFS_KEY     the key
  LEASEFS_EPOCH   the epoch of this attempt: the fencing token
  LEASEFS_RESULT  the file that takes this attempt's result, and no other's
  LEASEFS_FD      the number of the holder handle, with --inherit and --child-keeps
  LEASEFS_ROOT    the tree

Exit codes:
  1    a key is held: CMD was not run (-E chooses another code)
  2    bad usage
  75   a lease was lost while CMD ran, or about to run out, and CMD was ended
  125  leasefs run itself failed
  126  CMD cannot be executed
  127  CMD was not found
  N    CMD's own; 128+N when signal N killed it")]
pub struct Args {
    /// Do not wait for a key that is held
    #[arg(short = 'n', long, conflicts_with = "wait")]
    pub nonblock: bool,
    /// Wait at most this long for all keys together; without it, wait as long as it takes
    #[arg(short = 'w', long = "wait", value_name = "SECS", value_parser = super::seconds)]
    pub wait: Option<Duration>,
    /// Time to live of these leases, as in 90s or 1h30m [default: the namespace's or the mount's]
    #[arg(long, value_name = "D")]
    pub ttl: Option<Ttl>,
    /// Whose they are.
    #[command(flatten)]
    pub agent: AgentArgs,
    /// Exit code when a key is held, from 0 to 255
    #[arg(short = 'E', long, value_name = "N", default_value_t = super::EXIT_NO, value_parser = exit_code)]
    pub conflict_exit_code: u8,
    /// From TERM to KILL when CMD has to be ended
    #[arg(short = 'k', long, value_name = "SECS", default_value = "5", value_parser = super::seconds)]
    pub kill_after: Duration,
    /// Let CMD inherit the holder handle: then what it starts keeps the key, too
    #[arg(long)]
    pub inherit: bool,
    /// If this process is killed, let CMD go on and keep the key until it ends; implies --inherit
    #[arg(long)]
    pub child_keeps: bool,
    /// Keys to hold
    #[arg(required = true, value_name = "KEY")]
    pub keys: Vec<String>,
    /// Command to run, with its arguments
    #[arg(last = true, required = true, value_name = "CMD")]
    pub command: Vec<OsString>,
    /// The tree.
    #[command(flatten)]
    pub tree: TreeArgs,
}

fn exit_code(text: &str) -> Result<u8, String> {
    text.parse().map_err(|_| "give an exit code from 0 to 255".to_owned())
}

/// Carries the command out.
pub fn run(args: Args) -> Result<ExitCode> {
    let Some((name, arguments)) = args.command.split_first() else {
        anyhow::bail!("no command is given: put it after `--`");
    };
    let program = match program::find_program(name) {
        Ok(program) => program,
        Err(missing) => return Ok(missing.report(name)),
    };
    let tree = Tree::find(&args.tree, &args.keys)?;
    let mut asked: Vec<Key> = Vec::with_capacity(args.keys.len());
    for text in &args.keys {
        let key = tree.key(text)?;
        if !asked.contains(&key) {
            asked.push(key);
        }
    }
    let patience = Patience::of(if args.nonblock { Some(Duration::ZERO) } else { args.wait });
    let mut claims = match take::take_all(&tree, &asked, args.ttl, patience) {
        Ok(claims) => claims,
        Err(Refusal::Held(why)) => {
            complain(format_args!("{why}: nothing was run"));
            return Ok(ExitCode::from(args.conflict_exit_code));
        }
        Err(Refusal::Lost(why)) => {
            complain(why);
            return Ok(ExitCode::from(EXIT_LOST));
        }
        Err(Refusal::Failed(error)) => return Err(error),
    };
    if let Some(name) = args.agent.name() {
        for claim in &claims {
            claim.set_agent(name)?;
        }
    }

    let mut command = Command::new(program);
    command.args(arguments);
    let rules = Rules {
        grace: args.kill_after,
        inherit: args.inherit || args.child_keeps,
        child_keeps: args.child_keeps,
        own_group: child::has_own_group(),
    };
    set_environment(&mut command, &tree, &asked, &claims, rules.inherit);
    let outcome = match child::run(command, name, &tree, &mut claims, rules) {
        Ok(child::End::Code(code)) => Ok(ExitCode::from(code)),
        Ok(child::End::LeaseLost) => Ok(ExitCode::from(EXIT_LOST)),
        Ok(child::End::NotStarted(missing)) => Ok(missing.report(name)),
        Err(error) => Err(error),
    };
    take::give_back(claims);
    outcome
}

/// One line per key, in the order they were asked for.
fn set_environment(command: &mut Command, tree: &Tree, asked: &[Key], claims: &[Claim], inherit: bool) {
    let in_order: Vec<&Claim> = asked.iter().filter_map(|key| claims.iter().find(|claim| claim.key() == key)).collect();
    let lines = |value: &dyn Fn(&Claim) -> OsString| {
        let values: Vec<OsString> = in_order.iter().map(|claim| value(claim)).collect();
        values.join(OsStr::new("\n"))
    };
    command
        .env("LEASEFS_KEY", lines(&|claim| claim.key().as_str().into()))
        .env("LEASEFS_EPOCH", lines(&|claim| claim.epoch().to_string().into()))
        .env("LEASEFS_RESULT", lines(&|claim| tree.files.result_path(claim.key(), claim.epoch()).into()))
        .env("LEASEFS_ROOT", tree.root())
        // One that came from a run around this one means nothing to the command.
        .env_remove("LEASEFS_FD");
    if inherit {
        command.env("LEASEFS_FD", lines(&|claim| claim.file().as_raw_fd().to_string().into()));
    }
}
