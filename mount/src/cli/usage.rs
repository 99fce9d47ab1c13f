//! Bad usage: what clap says over several lines, told in the one line that every failure has.
//!
//! The program's own checks say what is wrong and what would be right; here the command it is about is put before, and
//! where its help is, behind. What clap adds (usage lines, hidden commands as a suggestion) would only hide that.

use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Command, CommandFactory, Error};

use super::{Cli, EXIT_FAILURE, complain, help, show};

/// Says what is wrong with the command line of this process. What was asked for is shown as clap shows it: help, the
/// version, and all commands where none is given.
pub fn refuse(error: &Error) -> ExitCode {
    if !error.use_stderr() || error.kind() == ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        error.exit();
    }
    let word = std::env::args_os().nth(1);
    complain(line(error, &Cli::command(), word.as_deref().and_then(std::ffi::OsStr::to_str)));
    ExitCode::from(EXIT_FAILURE)
}

/// The line, for a command line that begins with this word.
fn line(error: &Error, root: &Command, word: Option<&str>) -> String {
    let wrong = wrong(error);
    match root.get_subcommands().find(|command| Some(command.get_name()) == word) {
        Some(command) => {
            let name = command.get_name();
            let meant = meant(error, ContextKind::SuggestedArg, |_| true);
            format!("{name}: {wrong}: {meant}see `leasefs {name} --help`")
        }
        None => {
            let meant = meant(error, ContextKind::SuggestedSubcommand, |name| {
                help::visible(root).any(|c| c.get_name() == name)
            });
            format!("{wrong}: {meant}`leasefs help` lists the commands")
        }
    }
}

/// What is wrong: the first paragraph of what clap says, which goes over several lines where it lists something.
fn wrong(error: &Error) -> String {
    let text = error.to_string();
    let first = text.split("\n\n").next().unwrap_or_default();
    let joined = first.split_whitespace().collect::<Vec<_>>().join(" ");
    let bare = joined.strip_prefix("error: ").unwrap_or(&joined);
    show::plain(&bare.replace("subcommand", "command")).trim_end_matches('.').to_owned()
}

/// What was perhaps meant.
fn meant(error: &Error, kind: ContextKind, may: impl Fn(&str) -> bool) -> String {
    let names = match error.get(kind) {
        Some(ContextValue::String(name)) => std::slice::from_ref(name),
        Some(ContextValue::Strings(names)) => names.as_slice(),
        _ => &[],
    };
    names.iter().find(|name| may(name)).map(|name| format!("did you mean `{name}`? ")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    fn told(words: &[&str]) -> String {
        let error = Cli::try_parse_from(["leasefs"].iter().chain(words)).err().expect("bad usage");
        line(&error, &Cli::command(), words.first().copied())
    }

    #[test]
    fn each_wrong_use_is_one_line_with_what_to_do() {
        for (words, said) in [
            (
                &["wait", "-w", "x", "job"][..],
                "wait: invalid value 'x' for '--wait <SECS>': give seconds from 0 to a year, as in 5 or 0.5: \
                 see `leasefs wait --help`",
            ),
            (
                &["evict", "job"],
                "evict: the following required arguments were not provided: --epoch <N>: see `leasefs evict --help`",
            ),
            (
                &["run", "-n", "-w", "1", "job", "--", "true"],
                "run: the argument '--nonblock' cannot be used with '--wait <SECS>': see `leasefs run --help`",
            ),
            (
                &["ls", "--jsno"],
                "ls: unexpected argument '--jsno' found: did you mean `--json`? see `leasefs ls --help`",
            ),
            (&["statsu"], "unrecognized command 'statsu': did you mean `status`? `leasefs help` lists the commands"),
            // `probe` is nobody's to call.
            (&["prob"], "unrecognized command 'prob': `leasefs help` lists the commands"),
            (
                &["timeline", "--since", "x"],
                "timeline: invalid value 'x' for '--since <D>': give a time as in 90s, 15m or 1h30m, more than 0 and at \
                 most 365d: see `leasefs timeline --help`",
            ),
        ] {
            assert_eq!(told(words), said);
        }
        let all = told(&["top", "--sort", "x"]);
        assert!(all.starts_with("top: invalid value 'x' for '--sort <COLUMN>' [possible values: key, "), "{all}");
        assert!(!told(&["claim", "job", "--agent", "a\n\x1b[2Jb"]).contains(['\n', '\x1b']));
    }
}
