//! The figures of a run, as a table for people or as JSON.
//!
//! Every figure is a median over the rounds. Ratios are taken within a round, where all variants met the same machine.

use std::fmt::Write;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::{Value, json};

use crate::client::Counted;
use crate::place::Placement;
use crate::{Cell, Form, Keys, Variant};

/// One cell on one variant in one round.
pub struct Measured {
    /// Where clients and servers ran
    pub placement: Placement,
    /// What was asked
    pub cell: Cell,
    /// Of what
    pub variant: Variant,
    /// The answer
    pub counted: Counted,
}

/// All that was measured, and on what.
pub struct Report {
    seconds: f64,
    rounds: usize,
    cpus: usize,
    kernel: String,
    filesystem: String,
    fdatasync_us: f64,
    measured: Vec<Measured>,
}

struct Row {
    rate: f64,
    /// Times the do-nothing FUSE's cycle time; `None` when that was not measured.
    times_null: Option<f64>,
    p50_us: f64,
    p99_us: f64,
    denied_per_cycle: f64,
}

impl Report {
    /// An empty report; looks at the machine and at the disk `dir` is on.
    pub fn new(dir: &Path, seconds: f64, rounds: usize) -> Result<Report> {
        Ok(Report {
            seconds,
            rounds,
            cpus: std::thread::available_parallelism()?.get(),
            kernel: fs::read_to_string("/proc/sys/kernel/osrelease")?.trim().to_owned(),
            filesystem: filesystem_of(dir)?,
            fdatasync_us: fdatasync_us(dir).context("cannot measure fdatasync")?,
            measured: Vec::new(),
        })
    }

    /// Takes one figure in.
    pub fn add(&mut self, measured: Measured) {
        self.measured.push(measured);
    }

    /// Placements, cells and variants in the order they were first measured.
    fn rows(&self) -> Vec<(Placement, Cell, Variant)> {
        let mut rows = Vec::new();
        for Measured { placement, cell, variant, .. } in &self.measured {
            let row = (*placement, *cell, *variant);
            if !rows.contains(&row) {
                rows.push(row);
            }
        }
        rows
    }

    fn of(&self, placement: Placement, cell: Cell, variant: Variant) -> impl Iterator<Item = &Counted> {
        self.measured
            .iter()
            .filter(move |m| (m.placement, m.cell, m.variant) == (placement, cell, variant))
            .map(|m| &m.counted)
    }

    fn row(&self, placement: Placement, cell: Cell, variant: Variant) -> Row {
        let over_rounds = |figure: fn(&Counted) -> f64| {
            median(self.of(placement, cell, variant).map(figure).collect()).unwrap_or(0.0)
        };
        let ratios: Vec<f64> = self
            .of(placement, cell, Variant::Null)
            .zip(self.of(placement, cell, variant))
            .map(|(null, counted)| null.rate / counted.rate)
            .collect();
        Row {
            rate: over_rounds(|c| c.rate),
            times_null: median(ratios),
            p50_us: over_rounds(|c| c.latency.quantile(0.50) as f64 / 1000.0),
            p99_us: over_rounds(|c| c.latency.quantile(0.99) as f64 / 1000.0),
            denied_per_cycle: over_rounds(|c| c.denied as f64 / (c.cycles as f64).max(1.0)),
        }
    }

    /// The table.
    pub fn table(&self) -> String {
        let mut out = String::new();
        // Writing to a String cannot fail.
        let _ = self.write_table(&mut out);
        out
    }

    fn write_table(&self, out: &mut String) -> std::fmt::Result {
        writeln!(
            out,
            "claim+release cycles, medians of {} rounds of {} s\n{} CPUs, Linux {}; state on {}, where fdatasync of 4 KiB takes {:.0} µs",
            self.rounds, self.seconds, self.cpus, self.kernel, self.filesystem, self.fdatasync_us
        )?;
        let mut heading = None;
        for (placement, cell, variant) in self.rows() {
            if heading.map(|(before, _)| before) != Some(placement) {
                writeln!(out, "\n{}", placement.to_string().to_uppercase())?;
            }
            if heading != Some((placement, cell)) {
                writeln!(
                    out,
                    "{:<40} {:>10}  {:>7}  {:>9}  {:>9}",
                    cell_name(cell),
                    "cycles/s",
                    "x null",
                    "p50 µs",
                    "p99 µs"
                )?;
            }
            heading = Some((placement, cell));
            let row = self.row(placement, cell, variant);
            let ratio = row.times_null.map_or("-".to_owned(), |ratio| format!("{ratio:.2}"));
            write!(
                out,
                "  {:<38} {:>10}  {:>7}  {:>9.1}  {:>9.1}",
                variant_name(variant, cell),
                thousands(row.rate),
                ratio,
                row.p50_us,
                row.p99_us
            )?;
            if row.denied_per_cycle >= 0.005 {
                write!(out, "  {:.2} refusals a cycle", row.denied_per_cycle)?;
            }
            writeln!(out)?;
        }
        writeln!(
            out,
            "\nx null: time of a cycle over that of the do-nothing FUSE filesystem in the same round (1.00 = costs nothing).\n\
             The do-nothing FUSE grants every create and lock at once, to any number of clients: on one key it excludes nobody.\n\
             With a row for each, its other thread puts one into SQLite for each claim, many at a time, and makes none durable.\n\
             The local disk neither numbers, stores nor expires anything, and none of its cycles is made durable."
        )
    }

    /// The same as one JSON object.
    pub fn json(&self) -> Value {
        let rows: Vec<Value> = self
            .rows()
            .into_iter()
            .map(|(placement, cell, variant)| {
                let row = self.row(placement, cell, variant);
                let rates: Vec<f64> = self.of(placement, cell, variant).map(|c| c.rate).collect();
                json!({
                    "placement": placement, "form": cell.form, "clients": cell.clients, "keys": cell.keys, "variant": variant,
                    "cycles_per_s": row.rate, "times_null": row.times_null, "p50_us": row.p50_us, "p99_us": row.p99_us,
                    "denied_per_cycle": row.denied_per_cycle, "rounds_cycles_per_s": rates,
                })
            })
            .collect();
        json!({
            "cpus": self.cpus, "kernel": self.kernel, "filesystem": self.filesystem, "fdatasync_us": self.fdatasync_us,
            "seconds": self.seconds, "rounds": self.rounds, "cells": rows,
        })
    }
}

fn cell_name(cell: Cell) -> String {
    let form = match cell.form {
        Form::Create => "exclusive create + close",
        Form::Flock => "flock + unlock",
    };
    match (cell.clients, cell.keys) {
        (1, _) => format!("{form}, 1 client"),
        (clients, Keys::Own) => format!("{form}, {clients} on own keys"),
        (clients, Keys::One) => format!("{form}, {clients} on one key"),
    }
}

fn variant_name(variant: Variant, cell: Cell) -> &'static str {
    match (variant, cell.form, cell.keys) {
        (Variant::Null, _, Keys::One) => "do-nothing FUSE (excludes nobody)",
        (Variant::Null, ..) => "do-nothing FUSE",
        (Variant::Rows, ..) => "do-nothing FUSE and a row for each",
        (Variant::Process, ..) => "leasefs --durability process",
        (Variant::Full, ..) => "leasefs --durability full",
        (Variant::Local, Form::Create, _) => "local disk (and unlink)",
        (Variant::Local, Form::Flock, _) => "local disk",
    }
}

fn median(mut values: Vec<f64>) -> Option<f64> {
    values.sort_by(f64::total_cmp);
    let middle = values.len() / 2;
    if values.is_empty() {
        None
    } else if values.len() % 2 == 1 {
        Some(values[middle])
    } else {
        Some(f64::midpoint(values[middle - 1], values[middle]))
    }
}

fn thousands(rate: f64) -> String {
    let digits = format!("{rate:.0}");
    let mut out = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            out.push(',');
        }
        out.push(digit);
    }
    out
}

/// The type of the filesystem a directory is on: that of the deepest mountpoint above it.
fn filesystem_of(dir: &Path) -> Result<String> {
    let dir = dir.canonicalize()?;
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let mut best = (0, "unknown");
    for line in mounts.lines() {
        let Some((mount, source)) = line.split_once(" - ") else {
            continue;
        };
        let (Some(point), Some(kind)) = (mount.split(' ').nth(4), source.split(' ').next()) else {
            continue;
        };
        // Later lines lie over earlier ones.
        if dir.starts_with(point) && point.len() >= best.0 {
            best = (point.len(), kind);
        }
    }
    Ok(best.1.to_owned())
}

/// What one `fdatasync` over an existing 4 KiB block costs there: the floor under `--durability full`.
fn fdatasync_us(dir: &Path) -> Result<f64> {
    let path = tempfile::Builder::new().prefix("leasefs-bench-").tempfile_in(dir)?.into_temp_path();
    let file = File::options().write(true).open(&path)?;
    file.write_all_at(&[0; 4096], 0)?;
    file.sync_all()?;
    let mut times = Vec::new();
    for round in 0..200_u8 {
        let start = Instant::now();
        file.write_all_at(&[round; 4096], 0)?;
        file.sync_data()?;
        times.push(start.elapsed().as_nanos() as f64 / 1000.0);
    }
    median(times).context("no samples")
}
