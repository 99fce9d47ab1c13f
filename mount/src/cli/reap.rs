//! `leasefs reap`: has the server look at once for proof that the holders of orphaned keys are dead.
//!
//! It frees nothing by itself: without the proof of the contract's §5 a key stays held, and this says why.

use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Result;
use leasefs::Key;
use leasefs::client::Status;

use super::listing::{self, Listing};
use super::tree::{Tree, TreeArgs, trouble};
use super::{EXIT_NO, complain, order, show};

/// Which tree.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
A key is orphaned while its connection is lost and its holder is not proven dead: its server and keeper were killed, or the
mount was cut off. The server looks for proof by itself, first at once and then every 10 s; this has it look now. A key is
freed only if no process has its old handle open and every process could be looked into; else it stays held, until its
TTL is over or until `leasefs evict`. --dry-run says what the last look found, and has nothing looked for or freed.

Exit codes: 0 no key is orphaned (any more); 1 some still are, or you may not; 2 bad usage or failure.")]
pub struct Args {
    /// Say of each orphaned key why it is held, and free none
    #[arg(long)]
    pub dry_run: bool,
    /// The tree.
    #[command(flatten)]
    pub tree: TreeArgs,
}

/// Carries the command out.
pub fn run(args: Args) -> Result<ExitCode> {
    let tree = Tree::find(&args.tree, &[])?;
    let Listing { found: all, shut } = listing::walk(&tree, "", &mut |_| {})?;
    let orphaned: Vec<Status> = all.into_iter().filter(|status| status.orphaned_why.is_some()).collect();
    if !args.dry_run
        && let Err(error) = order::send_repeatable(&tree, r#"{"op":"reap"}"#)
    {
        return refused(&tree, error);
    }
    let mut out = io::BufWriter::new(io::stdout().lock());
    let mut held = 0;
    for before in &orphaned {
        let now = if args.dry_run { Some(before.clone()) } else { tree.status(&Key::parse(&before.key)?)? };
        let (name, epoch) = (show::plain(&before.key), before.epoch);
        let what = if before.state == "shared" { "shared locks".to_owned() } else { format!("epoch {epoch}") };
        match now.as_ref().and_then(|now| now.orphaned_why.as_deref()) {
            Some(why) => {
                held += 1;
                writeln!(out, "{name}: {what}: held: {}", show::plain(why))?;
            }
            None => writeln!(out, "{name}: {what}: {}", freed(before, now.as_ref()))?,
        }
    }
    if orphaned.is_empty() {
        writeln!(out, "no key is orphaned")?;
    }
    out.flush()?;
    if shut > 0 {
        complain(format_args!("{shut} namespaces may not be read by you: their keys are not listed"));
    }
    Ok(if held > 0 { ExitCode::from(EXIT_NO) } else { ExitCode::SUCCESS })
}

/// What became of a key that was orphaned.
fn freed(before: &Status, now: Option<&Status>) -> String {
    let Some(now) = now else { return "freed".to_owned() };
    let is_same = now.epoch == before.epoch && before.state != "shared";
    match (is_same, now.state.as_str(), now.outcome.as_deref(), now.why.as_deref()) {
        (true, "free" | "shared" | "finished", Some(outcome), Some(why)) => {
            format!("freed: {outcome}: {}", show::plain(why))
        }
        (true, "held", ..) => "its holder has it back".to_owned(),
        (true, "reporting", ..) => "its holder is gone, and a draft of its result keeps it".to_owned(),
        _ => format!("freed: it is {} now, at epoch {}", now.state, now.epoch),
    }
}

fn refused(tree: &Tree, error: io::Error) -> Result<ExitCode> {
    let root = tree.root().display();
    match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => {
            complain(format_args!("{root}: you may not have it looked through: ask root or the mount's owner"));
            Ok(ExitCode::from(EXIT_NO))
        }
        _ => Err(trouble(root, error)),
    }
}
