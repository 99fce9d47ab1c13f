//! `leasefs help`: a command's help, or a page on what all commands have in common.
//!
//! The pages are what the man pages are made of ([`super::generate`]), so each thing is said in one place:
//!
//! | file | what it is about |
//! |---|---|
//! | [`page`] | a page: its parts, as text for a terminal and as roff |
//! | [`topics`] | which pages there are |
//! | [`exits`] | exit codes, gathered from the commands' own help |
//! | [`json`] | every field of every JSON that is read or written |

pub mod exits;
pub mod json;
pub mod page;
pub mod topics;

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::{Result, bail};
use clap::error::ErrorKind;
use clap::{Command, CommandFactory};

use super::Cli;

/// The widest line of a page in a terminal.
const WIDTH: usize = 100;

/// What to tell of.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Topics: exit-codes, errors, json, metrics, files, environment.

Exit codes: 0 shown; 2 there is no such command or topic.")]
pub struct Args {
    /// A command, as in `leasefs help run`, or a topic: exit-codes, errors, json, metrics, files, environment
    #[arg(value_name = "COMMAND|TOPIC")]
    pub about: Vec<String>,
}

/// Carries the command out.
pub fn run(args: Args) -> Result<ExitCode> {
    let mut root = Cli::command();
    root.build();
    let text = match topics::find(&args.about.join(" "), &root) {
        Some(page) => Some(page::render(&page, width())),
        None => help_of(&args.about),
    };
    let Some(text) = text else {
        let topics: Vec<&str> = topics::TOPICS.iter().map(|(name, _)| *name).collect();
        bail!(
            "{}: no such command or topic: `leasefs help` lists the commands; topics are {}",
            super::show::plain(&args.about.join(" ")),
            topics.join(", ")
        );
    };
    io::stdout().lock().write_all(text.as_bytes())?;
    Ok(ExitCode::SUCCESS)
}

/// What `leasefs COMMAND --help` shows; none where there is no such command.
fn help_of(words: &[String]) -> Option<String> {
    let words = ["leasefs"].into_iter().chain(words.iter().map(String::as_str)).chain(["--help"]);
    let shown = Cli::command().try_get_matches_from(words).err()?;
    (shown.kind() == ErrorKind::DisplayHelp).then(|| shown.to_string())
}

/// The terminal's width, where there is one, within reason.
fn width() -> usize {
    let columns = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok());
    columns.unwrap_or(80).clamp(40, WIDTH)
}

/// The commands a person is told of.
pub fn visible(root: &Command) -> impl Iterator<Item = &Command> {
    root.get_subcommands().filter(|command| !command.is_hide_set())
}
