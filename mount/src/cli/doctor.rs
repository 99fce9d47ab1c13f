//! `leasefs doctor`: what on this machine, in its mounts and in a state directory is in the way of a lease tree, or will be
//! one day; each with the cure.
//!
//! Nothing is changed, and nothing that may hang is waited for: a mount is looked at by a child that is left behind
//! ([`look`]), a state directory by a thread. What is seen is judged by functions that see nothing themselves:
//!
//! | file | what it judges |
//! |---|---|
//! | [`host`] | kernel, `/dev/fuse`, the right to mount, settings of FUSE |
//! | [`processes`] | whether processes can be seen: namespaces, `hidepid`, capabilities |
//! | [`state`] | the state directory: its filesystem, space, owner, registry |
//! | [`trees`] | mounts: dead, hanging, of another version, not seen elsewhere; keepers without a mount |

mod host;
mod look;
mod processes;
mod state;
mod trees;

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Result;
use serde::Serialize;

use super::help::page::fill;
use super::table::Look;
use super::{EXIT_NO, show};
use crate::failure::Failure;
use crate::server;

/// The widest line, and the narrowest that is cared for.
const WIDTH: usize = 100;
const MIN_WIDTH: usize = 60;
/// Where what was found begins.
const INDENT: usize = 24;

/// What to look at.
#[derive(clap::Args)]
#[command(after_help = "\
Each line is ok, warn or FAIL: what was found, and below it what to do. Nothing is changed. Without arguments it looks at
every tree that is mounted, and at their state directories, or at the default one where none is.

Exit codes: 0 nothing failed, though there may be warnings; 1 something failed; 2 bad usage or failure.")]
pub struct Args {
    /// A tree, or a directory to mount one on
    mountpoint: Option<PathBuf>,
    /// A state directory
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// How a check ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    /// As it should be.
    Ok,
    /// It works, but not all of it, or not for ever.
    Warn,
    /// It does not work.
    Fail,
}

/// One line of the report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Check {
    check: &'static str,
    verdict: Verdict,
    found: String,
    cure: Option<String>,
}

impl Check {
    fn ok(check: &'static str, found: impl Into<String>) -> Check {
        Check { check, verdict: Verdict::Ok, found: found.into(), cure: None }
    }

    fn warn(check: &'static str, found: impl Into<String>, cure: impl Into<String>) -> Check {
        Check { check, verdict: Verdict::Warn, found: found.into(), cure: Some(cure.into()) }
    }

    fn fail(check: &'static str, found: impl Into<String>, cure: impl Into<String>) -> Check {
        Check { check, verdict: Verdict::Fail, found: found.into(), cure: Some(cure.into()) }
    }

    /// A failure that other commands meet, too.
    fn failure(check: &'static str, failure: &Failure) -> Check {
        Check::fail(check, failure.what(), failure.cure())
    }
}

/// The report.
#[derive(Serialize)]
struct Report {
    ok: bool,
    checks: Vec<Check>,
}

/// Looks.
///
/// # Errors
/// Where `/proc` cannot be read.
pub fn run(args: Args) -> Result<ExitCode> {
    let mut checks = host::examine();
    checks.extend(processes::examine());
    let found = trees::examine(args.mountpoint.as_deref())?;
    if found.can_be_used {
        spare_users(&mut checks);
    }
    checks.extend(found.checks);
    let mut states: Vec<PathBuf> = args.state.iter().cloned().collect();
    if states.is_empty() {
        states.extend(found.states.iter().map(|(_, dir)| dir.clone()));
    }
    if states.is_empty() && !found.can_be_used {
        match server::default_state_dir() {
            Ok(dir) => states.push(dir),
            Err(error) => checks.push(Check::warn("state", format!("{error:#}"), "give --state DIR")),
        }
    }
    states.sort();
    states.dedup();
    for dir in &states {
        let of_state = state::examine(dir, args.state.is_none());
        // The directory of a tree that was unmounted meanwhile may have gone with it.
        let trees = || found.states.iter().filter(|(_, of)| of == dir).map(|(tree, _)| tree);
        let has_failed = of_state.iter().any(|check| check.verdict == Verdict::Fail);
        if args.state.is_some() || !has_failed || trees().next().is_none() || trees().any(trees::is_mounted) {
            checks.extend(of_state);
        }
    }
    let ok = checks.iter().all(|check| check.verdict != Verdict::Fail);
    let report = Report { ok, checks };
    let mut out = io::BufWriter::new(io::stdout().lock());
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&report)?)?;
    } else {
        // As wide as is good to read, or as the terminal is.
        let width = Look::of_stdout().width.map_or(WIDTH, |width| width.clamp(MIN_WIDTH, WIDTH));
        out.write_all(lines(&report, width).as_bytes())?;
    }
    out.flush()?;
    Ok(if ok { ExitCode::SUCCESS } else { ExitCode::from(EXIT_NO) })
}

/// Who has a tree to use need not be able to mount one.
fn spare_users(checks: &mut [Check]) {
    for check in checks.iter_mut().filter(|check| check.verdict == Verdict::Fail) {
        if matches!(check.check, "device" | "mounting" | "request-timeout") {
            check.verdict = Verdict::Warn;
        }
    }
}

/// The report for a person.
fn lines(report: &Report, width: usize) -> String {
    let mut text = String::new();
    let mut write = |lead: &str, what: &str| {
        let mut body = String::new();
        fill(&mut body, &show::plain(what), INDENT, width);
        text.push_str(lead);
        text.push_str(&body[lead.len().min(INDENT)..]);
    };
    for check in &report.checks {
        let verdict = match check.verdict {
            Verdict::Ok => "ok",
            Verdict::Warn => "warn",
            Verdict::Fail => "FAIL",
        };
        write(&format!("{verdict:<5} {:<18}", check.check), &check.found);
        if let Some(cure) = &check.cure {
            write(&format!("{:<INDENT$}", ""), &format!("-> {cure}"));
        }
    }
    let count = |verdict| report.checks.iter().filter(|check| check.verdict == verdict).count();
    let counted = |count: usize, one: &str, many: &str| match count {
        0 => format!("no {many}"),
        1 => format!("1 {one}"),
        n => format!("{n} {many}"),
    };
    let (failed, warned) = (count(Verdict::Fail), count(Verdict::Warn));
    text += &format!("{}, {}\n", counted(failed, "failure", "failures"), counted(warned, "warning", "warnings"));
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_report_is_in_columns_and_counts() {
        let checks = vec![
            Check::ok("kernel", "Linux 6.18"),
            Check::warn("propagation", "private ".repeat(20), "make it shared"),
            Check::failure("device", &Failure::NoDevice),
        ];
        let report = Report { ok: false, checks };
        assert!(lines(&report, 60).lines().all(|line| line.len() <= 60));
        let text = lines(&report, WIDTH);
        let found: Vec<&str> = text.lines().collect();
        assert_eq!(found[0], "ok    kernel            Linux 6.18");
        assert!(found[1].starts_with("warn  propagation       private"), "{text}");
        assert!(text.contains("\n                        -> make it shared\n"), "{text}");
        assert!(text.contains("FAIL  device            /dev/fuse does not exist\n"), "{text}");
        assert!(text.ends_with("1 failure, 1 warning\n") && found.iter().all(|line| line.len() <= 100), "{text}");
    }
}
