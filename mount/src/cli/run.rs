//! `leasefs run`: a command that runs only while its keys are held.
//!
//! This file orders the steps: find the command, take the keys ([`claim`]), run it and keep them ([`child`]), give them
//! back. Nothing is claimed for a command that cannot be started, and the keys outlive the command, never the reverse.

use std::ffi::OsString;
use std::process::{Command, ExitCode};
use std::time::Duration;

use anyhow::Result;
use leasefs::{Key, Ttl};

use super::complain;
use super::holding::claim::{self, Claim, Patience, Refusal};
use super::tree::{Tree, TreeArgs};

pub(super) mod child;

/// `run` itself failed, as with `env` and `timeout`.
pub const EXIT_FAILURE: u8 = 125;
/// A lease was lost while the command ran: `EX_TEMPFAIL`.
const EXIT_LOST: u8 = 75;

/// Which keys, how to wait for them, and what to run.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
The keys are taken by lock (the mutex and resume form: a finished key can be taken again) and released when CMD has
ended. Several keys are taken all or none, in one order for everybody, so runs cannot deadlock.

While CMD runs, each lease is renewed every third of its TTL. CMD does not inherit the lease. HUP, INT, QUIT, TERM, USR1
and USR2 are passed on to it; if `leasefs run` itself is killed, CMD is killed too. When a lease is lost (evicted, or
expired while this process was stopped), CMD gets TERM and, 5 s later, KILL.

CMD finds in its environment (one line per key when there are several, in the order given):
  LEASEFS_KEY     the key
  LEASEFS_EPOCH   the epoch of this attempt: the fencing token
  LEASEFS_RESULT  the file that takes this attempt's result, and no other's
  LEASEFS_ROOT    the tree

Exit codes:
  1    a key is held: CMD was not run (-E chooses another code)
  2    bad usage
  75   a lease was lost while CMD ran, and CMD was ended
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
    /// Exit code when a key is held
    #[arg(short = 'E', long, value_name = "N", default_value_t = super::EXIT_NO)]
    pub conflict_exit_code: u8,
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

/// Carries the command out.
pub fn run(args: Args) -> Result<ExitCode> {
    let Some((name, arguments)) = args.command.split_first() else {
        anyhow::bail!("no command is given: put it after `--`");
    };
    let program = match child::find_program(name) {
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
    let patience = match args.wait {
        _ if args.nonblock => Patience::None,
        Some(Duration::ZERO) => Patience::None,
        Some(limit) => Patience::limited(limit),
        None => Patience::Endless,
    };
    let mut claims = match claim::take_all(&tree, &asked, args.ttl, patience) {
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

    let mut command = Command::new(program);
    command.args(arguments);
    set_environment(&mut command, &tree, &asked, &claims);
    let outcome = match child::run(command, name, &tree, &mut claims) {
        Ok(child::End::Code(code)) => Ok(ExitCode::from(code)),
        Ok(child::End::LeaseLost) => Ok(ExitCode::from(EXIT_LOST)),
        Ok(child::End::NotStarted(missing)) => Ok(missing.report(name)),
        Err(error) => Err(error),
    };
    claim::give_back(claims);
    outcome
}

/// One line per key, in the order they were asked for.
fn set_environment(command: &mut Command, tree: &Tree, asked: &[Key], claims: &[Claim]) {
    let (mut keys, mut epochs, mut results) = (OsString::new(), OsString::new(), OsString::new());
    for claim in asked.iter().filter_map(|key| claims.iter().find(|claim| claim.key() == key)) {
        let separator = if keys.is_empty() { "" } else { "\n" };
        for (list, value) in [
            (&mut keys, claim.key().as_str().into()),
            (&mut epochs, claim.epoch().to_string().into()),
            (&mut results, tree.result(claim.key(), claim.epoch()).into_os_string()),
        ] as [(&mut OsString, OsString); 3]
        {
            list.push(separator);
            list.push(value);
        }
    }
    command
        .env("LEASEFS_KEY", keys)
        .env("LEASEFS_EPOCH", epochs)
        .env("LEASEFS_RESULT", results)
        .env("LEASEFS_ROOT", tree.root());
}
