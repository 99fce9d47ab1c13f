//! The command line: which commands there are, and how each ends.
//!
//! A command's arguments, help and `run` are in the file of its name. `run` returns the exit code; an error it returns
//! becomes one line on stderr, `leasefs: what is wrong with what: what to do`, and the command's code for failure.

use std::io::{self, Write};
use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, Subcommand};
use leasefs::Ttl;
use nix::sys::signal::{SigHandler, Signal, signal};

pub mod abandon;
pub mod backup;
pub mod claim;
pub mod complete;
pub mod completion;
pub mod deadlock;
pub mod doctor;
pub mod events;
pub mod evict;
pub mod generate;
pub mod help;
pub mod history;
pub mod hold;
pub mod holding;
pub mod listing;
pub mod ls;
pub mod mount;
pub mod mount_helper;
pub mod order;
pub mod probe;
pub mod proc;
pub mod progress;
pub mod prune;
pub mod reap;
pub mod release;
pub mod renew;
pub mod run;
pub mod serve;
pub mod show;
pub mod status;
pub mod table;
pub mod timeline;
pub mod top;
pub mod tree;
pub mod unmount;
pub mod upgrade;
pub mod usage;
pub mod verify;
pub mod wait;
pub mod watch;
pub mod who;

/// The command could be carried out, and its answer is no: not free in time, never held, refused, an invariant broken.
pub const EXIT_NO: u8 = 1;
/// The command could not be carried out: bad usage, no mount, a fault.
pub const EXIT_FAILURE: u8 = 2;

/// A tree in which a key is a file, and holding the file open exclusively is holding the lease.
#[derive(Parser)]
#[command(
    name = "leasefs",
    version,
    arg_required_else_help = true,
    disable_help_subcommand = true,
    subcommand_value_name = "COMMAND"
)]
#[command(after_help = "\
Commands about keys find the tree by --root or LEASEFS_ROOT, else by the working directory, else as the only leasefs
mount there is. A KEY is a path below claims/ (`team/job`), or its absolute path.

`leasefs help exit-codes`, `errors`, `json`, `metrics`, `files` and `environment` tell what all commands have in common.")]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The commands.
#[derive(Subcommand)]
pub enum Command {
    /// Mount a lease tree
    Mount(mount::Args),
    /// Unmount a lease tree and wait until its server has ended
    Unmount(unmount::Args),
    /// Have the program on disk take over from the one that serves
    Upgrade(upgrade::Args),
    /// Run a command while holding one or more keys
    Run(run::Args),
    /// Hold a key for steps that are processes of their own
    Claim(claim::Args),
    /// Renew the lease of one's own attempt
    Renew(renew::Args),
    /// Record the result of one's own attempt, from standard input, and give the key back
    Complete(complete::Args),
    /// Give a key back
    Release(release::Args),
    /// Give a key back without a result, and say why
    Abandon(abandon::Args),
    /// List keys: who holds them, for how long, and how many wait
    Ls(ls::Args),
    /// Watch the keys live, on a terminal
    Top(top::Args),
    /// Show which processes have a key's handle, and who waits for it
    Who(who::Args),
    /// Show what happens, as it happens
    Watch(watch::Args),
    /// Draw the attempts of keys over time, as SVG
    Timeline(timeline::Args),
    /// Show everything about one key
    Status(status::Args),
    /// Show every attempt of a key: epoch, holder, outcome and why, result
    History(history::Args),
    /// Wait until a key is not held, or until its result is there
    Wait(wait::Args),
    /// Take a lease away from an attempt
    Evict(evict::Args),
    /// Check the registry against the invariants, read-only
    Verify(verify::Args),
    /// Copy the state directory to a place it can be served from, mounted or not
    Backup(backup::Args),
    /// Take ended attempts and their results away, by age or number
    Prune(prune::Args),
    /// Look now for proof that the holders of orphaned keys are dead
    Reap(reap::Args),
    /// Keep an attempt, for `leasefs claim`
    #[command(hide = true)]
    Hold(hold::Args),
    /// Look for what is wrong with this machine, its mounts and a state directory, and say what to do
    Doctor(doctor::Args),
    /// Show the help of a command, or a page on exit codes, errors, JSON, files and the like
    Help(help::Args),
    /// Write man pages and shell completions
    #[command(hide = true)]
    Generate(generate::Args),
    /// Serve a connection that the keeper holds
    #[command(hide = true)]
    Serve(serve::Args),
    /// Look at a directory, to see whether a mount answers
    #[command(hide = true)]
    Probe(probe::Args),
}

/// Children that end are to be waited for. Where whoever started this program ignores `SIGCHLD`, and so does it, the kernel
/// reaps them unseen: a keeper would never hear of its server's end.
fn heed_children() {
    // SAFETY: the default action runs no code of ours.
    let _ = unsafe { signal(Signal::SIGCHLD, SigHandler::SigDfl) };
}

/// Reads the command line and carries it out.
pub fn main() -> ExitCode {
    heed_children();
    if mount_helper::is_called() {
        return mount_helper::main();
    }
    completion::answer();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return usage::refuse(&error),
    };
    let (outcome, failure) = match cli.command {
        Command::Mount(args) => (mount::run(args), EXIT_NO),
        Command::Unmount(args) => (unmount::run(args), EXIT_NO),
        Command::Upgrade(args) => (upgrade::run(args), EXIT_NO),
        Command::Run(args) => (run::run(args), run::EXIT_FAILURE),
        Command::Claim(args) => (claim::run(args), EXIT_FAILURE),
        Command::Renew(args) => (renew::run(args), EXIT_FAILURE),
        Command::Complete(args) => (complete::run(args), EXIT_FAILURE),
        Command::Release(args) => (release::run(args), EXIT_FAILURE),
        Command::Abandon(args) => (abandon::run(args), EXIT_FAILURE),
        Command::Ls(args) => (ls::run(args), EXIT_FAILURE),
        Command::Top(args) => (top::run(args), EXIT_FAILURE),
        Command::Who(args) => (who::run(args), EXIT_FAILURE),
        Command::Watch(args) => (watch::run(args), EXIT_FAILURE),
        Command::Timeline(args) => (timeline::run(args), EXIT_FAILURE),
        Command::Status(args) => (status::run(args), EXIT_FAILURE),
        Command::History(args) => (history::run(args), EXIT_FAILURE),
        Command::Wait(args) => (wait::run(args), EXIT_FAILURE),
        Command::Evict(args) => (evict::run(args), EXIT_FAILURE),
        Command::Verify(args) => (verify::run(args), EXIT_FAILURE),
        Command::Backup(args) => (backup::run(args), EXIT_FAILURE),
        Command::Prune(args) => (prune::run(args), EXIT_FAILURE),
        Command::Reap(args) => (reap::run(args), EXIT_FAILURE),
        Command::Hold(args) => (hold::run(args), EXIT_FAILURE),
        Command::Doctor(args) => (doctor::run(args), EXIT_FAILURE),
        Command::Help(args) => (help::run(args), EXIT_FAILURE),
        Command::Generate(args) => (generate::run(args), EXIT_FAILURE),
        Command::Serve(args) => (serve::run(args), EXIT_NO),
        Command::Probe(args) => (probe::run(args), EXIT_NO),
    };
    match outcome {
        Ok(code) => code,
        // `leasefs ls | head`: the reader has seen enough.
        Err(error) if is_broken_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            complain(format_args!("{error:#}"));
            ExitCode::from(failure)
        }
    }
}

/// Says on stderr what is wrong, in one write, so that lines of several processes do not mix. Unlike `eprintln!` it
/// survives a closed stderr.
pub fn complain(message: impl std::fmt::Display) {
    let _ = io::stderr().write_all(format!("leasefs: {message}\n").as_bytes());
}

/// Reads how far back or how long: a TTL's forms, for what is none.
pub fn time_span(text: &str) -> Result<Ttl, String> {
    text.parse().map_err(|_| "give a time as in 90s, 15m or 1h30m, more than 0 and at most 365d".to_owned())
}

/// Reads SECS: seconds, a fraction allowed, as `flock -w` has them.
pub fn seconds(text: &str) -> Result<Duration, String> {
    text.parse::<f64>()
        .ok()
        .filter(|secs| (0.0..=366.0 * 86_400.0).contains(secs))
        .map(Duration::from_secs_f64)
        .ok_or_else(|| "give seconds from 0 to a year, as in 5 or 0.5".to_owned())
}

fn is_broken_pipe(error: &anyhow::Error) -> bool {
    error.downcast_ref::<io::Error>().is_some_and(|error| error.kind() == io::ErrorKind::BrokenPipe)
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    /// One name for one thing, with the same letter and the same kind of value in every command.
    #[test]
    fn options_are_named_alike() {
        let root = Cli::command();
        let mut seen = std::collections::BTreeMap::new();
        for command in help::visible(&root) {
            for option in command.get_arguments().filter(|option| !option.is_positional()) {
                let name = option.get_long().unwrap_or_default().to_owned();
                let value = option.get_value_names().map(|names| names.join(" "));
                let takes = option.get_action().takes_values().then_some(value);
                let (first, said) = seen
                    .entry(name.clone())
                    .or_insert_with(|| (command.get_name().to_owned(), (option.get_short(), takes.clone())));
                assert_eq!(*said, (option.get_short(), takes), "--{name} of {first} and of {}", command.get_name());
            }
        }
        assert!(seen.len() > 20, "{seen:?}");
    }

    #[test]
    fn seconds_may_have_a_fraction_and_nothing_else() {
        assert_eq!(seconds("0"), Ok(Duration::ZERO));
        assert_eq!(seconds("1.5"), Ok(Duration::from_millis(1500)));
        for text in ["", "-1", "5s", "nan", "inf", "1e9"] {
            assert!(seconds(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn everything_after_the_dashes_belongs_to_the_command() {
        let cli =
            Cli::try_parse_from(["leasefs", "run", "-w", "2", "a", "b", "--", "sh", "-c", "exit 3"]).expect("parses");
        let Command::Run(args) = cli.command else { panic!("not run") };
        assert_eq!(args.keys, ["a", "b"]);
        assert_eq!(args.command, ["sh", "-c", "exit 3"]);
        assert!(Cli::try_parse_from(["leasefs", "run", "a"]).is_err());
        assert!(Cli::try_parse_from(["leasefs", "run", "--", "true"]).is_err());
        assert!(Cli::try_parse_from(["leasefs", "run", "-n", "-w", "1", "a", "--", "true"]).is_err());
    }
}
