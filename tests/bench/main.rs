//! What a claim costs: claim+release cycles per second, beside a FUSE filesystem that does nothing and the local disk.
//!
//! One run measures every variant of a cell one after the other, several rounds over, so that a slow moment of the
//! machine touches all of them. Clients are processes. The program runs itself again as a client or as the do-nothing
//! filesystem; those two ways in are not for people.

mod client;
mod histogram;
mod null;
mod place;
mod report;
mod rows;
mod stage;

use std::io::IsTerminal;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use clap::Parser;

use crate::place::Placement;
use crate::report::{Measured, Report};
use crate::stage::Stage;

/// Claim+release cycles per second of leasefs, a do-nothing FUSE filesystem and the local disk.
#[derive(Parser)]
#[command(name = "bench", args_override_self = true)]
struct Args {
    /// Seconds each cell is measured for, in each round
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Rounds; the table shows their medians
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// What to measure
    #[arg(long, value_enum, value_delimiter = ',', default_value = "null,rows,process,full,local")]
    variants: Vec<Variant>,
    /// Where clients and servers run
    #[arg(long, value_enum, value_delimiter = ',', default_value = "one-cpu,free")]
    placements: Vec<Placement>,
    /// A directory on the disk to measure; state and mountpoints go into a temporary directory in it
    #[arg(long, default_value = env!("CARGO_TARGET_TMPDIR"))]
    dir: PathBuf,
    /// Print one JSON object instead of the table
    #[arg(long)]
    json: bool,
    /// What `cargo bench` passes to every benchmark
    #[arg(long, hide = true)]
    bench: bool,
}

/// One of the things a cell is measured on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Variant {
    /// A FUSE filesystem that answers at once and keeps nothing
    Null,
    /// The same, with a row in SQLite for each claim: the least that a history can cost
    Rows,
    /// `leasefs mount --durability process`
    Process,
    /// `leasefs mount --durability full`
    Full,
    /// Files on the disk the state directories are on
    Local,
}

/// How a key is claimed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Form {
    /// `open(O_CREAT|O_EXCL)`, `close`; on the local disk `unlink` too
    Create,
    /// One `open`, then `flock(LOCK_EX)`, `flock(LOCK_UN)` over and over
    Flock,
}

/// Whether the clients want the same key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Keys {
    /// Each client has a key of its own
    Own,
    /// All clients want one key
    One,
}

/// One line of questions: a form, so many clients, on these keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Cell {
    /// How a key is claimed
    pub form: Form,
    /// Number of client processes
    pub clients: usize,
    /// Whether they want the same key
    pub keys: Keys,
}

const CELLS: [Cell; 6] = [
    Cell { form: Form::Create, clients: 1, keys: Keys::Own },
    Cell { form: Form::Create, clients: 8, keys: Keys::Own },
    Cell { form: Form::Create, clients: 8, keys: Keys::One },
    Cell { form: Form::Flock, clients: 1, keys: Keys::Own },
    Cell { form: Form::Flock, clients: 8, keys: Keys::Own },
    Cell { form: Form::Flock, clients: 8, keys: Keys::One },
];

fn main() -> Result<()> {
    let own: Vec<String> = std::env::args().skip(1).collect();
    match own.first().map(String::as_str) {
        Some(client::WAY_IN) => return client::main(&own[1..]),
        Some(null::WAY_IN) => return null::main(&own[1..]),
        _ => {}
    }
    let args = Args::parse();
    if args.rounds == 0 || !args.seconds.is_finite() || args.seconds <= 0.0 {
        bail!("--rounds and --seconds must be more than 0");
    }
    stage::stop_on_signals();
    std::fs::create_dir_all(&args.dir).with_context(|| format!("cannot create {}", args.dir.display()))?;

    // It takes minutes: say where it is to whoever watches.
    let watched = !args.json && std::io::stderr().is_terminal();
    let mut report = Report::new(&args.dir, args.seconds, args.rounds)?;
    for placement in &args.placements {
        // Servers and clients started from here on inherit the CPUs of this process.
        let _here = placement.enter()?;
        let stage = Stage::set_up(&args.dir, &args.variants)?;
        for round in 0..args.rounds {
            for cell in CELLS {
                for at in 0..args.variants.len() {
                    let variant = args.variants[(at + round) % args.variants.len()];
                    let counted = client::measure(&stage, variant, cell, args.seconds)?;
                    report.add(Measured { placement: *placement, cell, variant, counted });
                }
                if watched {
                    eprint!("\r{placement}, round {} of {} ", round + 1, args.rounds);
                }
            }
        }
        if watched {
            eprintln!();
        }
        stage.tear_down()?;
    }
    if args.json {
        println!("{}", report.json());
    } else {
        print!("{}", report.table());
    }
    Ok(())
}
