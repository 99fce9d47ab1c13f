//! `leasefs verify`: the contract's invariants over a registry, mounted or not, without changing it.
//!
//! The rules are in [`leasefs::verify`]; here they are given rows and result files, and what they find is printed.

use std::fs;
use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use anyhow::{Context, Result};
use leasefs::registry::AttemptRow;
use leasefs::results::Results;
use leasefs::verify::{Violation, check};
use serde_json::json;

use super::EXIT_NO;
use super::progress::Progress;
use super::show;
use super::tree::{self, StateArgs};

/// What to verify.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
Times in the registry are of the wall clock. What only they show is a remark, since a step of the clock shows the same;
--strict counts remarks as violations.

Exit codes: 0 all invariants hold; 1 some do not; 2 bad usage or failure.")]
pub struct Args {
    /// Count as a violation also what a step of the wall clock could explain
    #[arg(long)]
    pub strict: bool,
    /// One JSON object
    #[arg(long)]
    pub json: bool,
    /// The state directory.
    #[command(flatten)]
    pub place: StateArgs,
}

/// What was looked at, and what was found.
struct Report {
    keys: usize,
    attempts: usize,
    results: usize,
    /// The database's own complaints.
    damage: Vec<String>,
    violations: Vec<Violation>,
}

/// Carries the command out.
pub fn run(args: Args) -> Result<ExitCode> {
    let dir = args.place.dir()?;
    let report = examine(&dir)?;
    let is_broken =
        !report.damage.is_empty() || report.violations.iter().any(|violation| args.strict || !violation.by_clock);
    let mut out = io::BufWriter::new(io::stdout().lock());
    if args.json {
        writeln!(out, "{}", object(&report, !is_broken))?;
    } else {
        for damage in &report.damage {
            writeln!(out, "registry: {}", show::plain(damage))?;
        }
        for violation in &report.violations {
            let remark = if violation.by_clock && !args.strict { "remark: " } else { "" };
            writeln!(out, "{remark}{}", show::plain(&violation.to_string()))?;
        }
        if !is_broken {
            let Report { keys, attempts, results, .. } = report;
            writeln!(out, "ok: {keys} keys, {attempts} attempts, {results} results")?;
        }
    }
    out.flush()?;
    Ok(if is_broken { ExitCode::from(EXIT_NO) } else { ExitCode::SUCCESS })
}

fn examine(dir: &Path) -> Result<Report> {
    let progress = Progress::new("opening the registry", None);
    // Rows first and then their files: no prune may come in between.
    let _still = Results::at(dir).lock_shared();
    let reader = tree::open_registry(dir)?;
    let context = || dir.join("registry.db").display().to_string();
    progress.next("checking the database", None);
    let damage = reader.integrity().with_context(context)?;
    progress.next("reading the registry", None);
    let (keys, attempts) = reader.snapshot().with_context(context)?;
    let results_dir = dir.join("results");
    progress.next("checking attempts and results", Some(attempts.len() as u64));
    let violations = check(&keys, &attempts, |attempt| {
        progress.add(1);
        result_size(&results_dir, attempt)
    });
    drop(progress);
    Ok(Report {
        keys: keys.len(),
        attempts: attempts.len(),
        results: attempts.iter().filter(|attempt| attempt.result.is_some()).count(),
        damage,
        violations,
    })
}

/// The bytes of an attempt's result file, if there is one.
fn result_size(results_dir: &Path, attempt: &AttemptRow) -> Option<u64> {
    let path = results_dir.join(format!("{}-{}", attempt.key_id, attempt.epoch));
    fs::symlink_metadata(path).ok().filter(fs::Metadata::is_file).map(|meta| meta.len())
}

fn object(report: &Report, ok: bool) -> serde_json::Value {
    let violations: Vec<_> = report
        .violations
        .iter()
        .map(|violation| {
            json!({
                "invariant": violation.invariant.name(),
                "key": violation.key,
                "epoch": violation.epoch,
                "problem": violation.problem,
                "by_clock": violation.by_clock,
            })
        })
        .collect();
    json!({
        "ok": ok,
        "keys": report.keys,
        "attempts": report.attempts,
        "results": report.results,
        "damage": report.damage,
        "violations": violations,
    })
}
