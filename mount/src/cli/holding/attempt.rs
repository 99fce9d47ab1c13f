//! Which attempt a later command means, and orders about it.
//!
//! Always a number: given, from the environment, or that of the process that keeps the key for the caller, where it is
//! proven that the caller is who claimed. A name alone proves nothing: an old attempt under the same name must not end
//! or complete a newer one. The server compares the number once more.

use std::env;
use std::process::ExitCode;

use anyhow::{Result, anyhow, bail};
use leasefs::Key;
use leasefs::client::Status;

use super::AgentArgs;
use super::holder::{self, Keeper};
use super::identity;
use crate::cli::proc::Pid;
use crate::cli::tree::{Tree, TreeArgs, never_held, trouble};
use crate::cli::{complain, hold, order, show};

/// The attempt is over, and nothing was changed: `EX_TEMPFAIL`, as when `leasefs run` loses its lease.
pub const EXIT_OVER: u8 = 75;

/// Help on which attempt is meant, for every command that acts on one's own.
pub const WHICH: &str = "\
Which attempt: that of --epoch, else of LEASEFS_EPOCH (where LEASEFS_KEY is this key, or not set). Else the one that
`leasefs claim` keeps for you: of your uid and agent name, and you are, or come from, the process it is bound to or the
one that ran `leasefs claim`, or you are in the session it was claimed from. A name alone is not enough. An attempt that
is over is never mistaken for a newer one when its epoch is given, so give it where several work in one session.";

/// One's own attempt at a key.
#[derive(clap::Args, Debug)]
pub struct OwnArgs {
    /// Key of the attempt
    #[arg(value_name = "KEY")]
    pub key: String,
    /// Epoch of the attempt, as `leasefs claim` printed it
    #[arg(long, value_name = "N")]
    pub epoch: Option<u64>,
    /// Whose it is.
    #[command(flatten)]
    pub agent: AgentArgs,
    /// The tree.
    #[command(flatten)]
    pub tree: TreeArgs,
}

/// An attempt, by key and number.
pub struct Attempt {
    /// Where.
    pub tree: Tree,
    /// The key.
    pub key: Key,
    /// The number; none if no attempt of the caller's is there any more, which has been said.
    pub epoch: Option<u64>,
}

impl OwnArgs {
    /// Decides which attempt is meant.
    ///
    /// # Errors
    /// Bad usage, no tree, or an attempt that is not proven to be the caller's: then its number is to be given.
    pub fn find(&self) -> Result<Attempt> {
        let (tree, key) = Tree::find_with_key(&self.tree, &self.key)?;
        let given = self.epoch.map_or_else(|| from_environment(&key), |epoch| Ok(Some(epoch)))?;
        let epoch = match given {
            Some(epoch) => Some(epoch),
            None => kept_for_caller(&tree, &key, self.agent.name())?,
        };
        Ok(Attempt { tree, key, epoch })
    }
}

impl Attempt {
    /// Gives an order about it, and the exit code for how that went.
    ///
    /// # Errors
    /// It cannot be given.
    pub fn order(&self, op: &'static str, reason: Option<&str>) -> Result<ExitCode> {
        let Some(epoch) = self.epoch else { return Ok(ExitCode::from(EXIT_OVER)) };
        let Err(error) = order::send(&self.tree, op, &self.key, epoch, reason) else { return Ok(ExitCode::SUCCESS) };
        match error.raw_os_error() {
            Some(libc::ESTALE) => {
                complain(format_args!("{}; nothing was changed", order::not_holding(&self.tree, &self.key, epoch)));
                Ok(ExitCode::from(EXIT_OVER))
            }
            Some(libc::ENOENT) => bail!(never_held(&self.key)),
            Some(libc::EACCES | libc::EPERM) => {
                bail!("{}: epoch {epoch} is another user's: only its own uid or root may {op} it", self.key)
            }
            _ => Err(trouble(&self.key, error)),
        }
    }
}

/// `LEASEFS_EPOCH`, where it is of this key. `leasefs run` with several keys gives a line for each.
fn from_environment(key: &Key) -> Result<Option<u64>> {
    let Ok(epochs) = env::var("LEASEFS_EPOCH") else { return Ok(None) };
    epoch_among(env::var("LEASEFS_KEY").ok().as_deref(), &epochs, key)
}

fn epoch_among(keys: Option<&str>, epochs: &str, key: &Key) -> Result<Option<u64>> {
    let keys = keys.filter(|keys| !keys.is_empty());
    let text = match keys {
        None => Some(epochs),
        Some(keys) => keys.lines().zip(epochs.lines()).find(|(name, _)| *name == key.as_str()).map(|(_, epoch)| epoch),
    };
    let Some(text) = text.filter(|text| !text.is_empty()) else { return Ok(None) };
    let epoch = text.parse().map_err(|_| anyhow!("LEASEFS_EPOCH={}: not an epoch: unset it", show::plain(text)))?;
    Ok(Some(epoch))
}

/// The number of the attempt that a holder process keeps for the caller. None, said, if the key is not held.
fn kept_for_caller(tree: &Tree, key: &Key, agent: Option<&str>) -> Result<Option<u64>> {
    let Some((status, keeper)) = look(tree, key)?.filter(|(status, _)| status.epoch > 0) else {
        bail!(never_held(key))
    };
    if status.is_open() {
        let outcome = status.outcome.as_deref().unwrap_or("over");
        complain(format_args!("{key}: nobody holds it: epoch {} is {outcome}; nothing was changed", status.epoch));
        return Ok(None);
    }
    if let Some(Keeper::Ours(held)) = keeper
        && is_callers(&status, &held, agent)
    {
        return Ok(Some(status.epoch));
    }
    bail!(
        "{key}: epoch {} is {}: not proven to be yours: give --epoch {} if that is the attempt you were told",
        status.epoch,
        show::in_the_way(&status),
        status.epoch
    )
}

/// What the tree says of a key, and who holds it then; none if there never was such a key. A holder that ends between the two
/// looks is none that cannot be seen, nor another program: its key is looked at once more, and was let go of before it went.
fn look(tree: &Tree, key: &Key) -> Result<Option<(Status, Option<Keeper>)>> {
    let mut status = tree.status(key)?;
    while let Some(seen) = status {
        let keeper = holder::of(&seen);
        if let None | Some(Keeper::Ours(_)) = keeper {
            return Ok(Some((seen, keeper)));
        }
        status = tree.status(key)?;
        let is_same = |now: &Status| now.epoch == seen.epoch && now.state == seen.state;
        if status.as_ref().is_some_and(is_same) {
            return Ok(Some((seen, keeper)));
        }
    }
    Ok(None)
}

/// Whether the attempt is proven to be one that the caller claimed.
fn is_callers(status: &Status, held: &hold::Args, agent: Option<&str>) -> bool {
    if !is_own_uid(status) || held.agent.as_deref() != agent {
        return false;
    }
    let ancestors = identity::ancestors();
    let comes_from = |process: Option<Pid>| process.is_some_and(|process| ancestors.contains(&process));
    comes_from(held.bound)
        || comes_from(held.parent)
        || held.session.is_some_and(|session| identity::session_leader() == Some(session))
}

fn is_own_uid(status: &Status) -> bool {
    let own_uid = nix::unistd::geteuid().as_raw();
    status.holder.as_ref().is_some_and(|holder| holder.uid == own_uid)
}

/// An attempt that the caller may go on with.
pub struct Kept {
    /// What the tree says of it.
    pub status: Status,
    /// How it is kept; none where that cannot be seen.
    pub how: Option<Box<hold::Args>>,
}

/// The attempt, if it is kept by a holder process for the same agent: of its uid and name, or without names, if that is
/// proven.
///
/// # Errors
/// Those of the tree.
pub fn kept_for_agent(tree: &Tree, key: &Key, agent: Option<&str>) -> Result<Option<Kept>> {
    let Some((status, Some(keeper))) = look(tree, key)? else { return Ok(None) };
    let (is_same, how) = match (keeper, agent) {
        (Keeper::Ours(held), Some(_)) => (is_own_uid(&status) && held.agent.as_deref() == agent, Some(held)),
        (Keeper::Ours(held), None) => (is_callers(&status, &held, None), Some(held)),
        (Keeper::Unseen, Some(_)) => (is_own_uid(&status) && status.agent.as_deref() == agent, None),
        (Keeper::Unseen, None) | (Keeper::Other, _) => (false, None),
    };
    Ok(is_same.then_some(Kept { status, how }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_environment_speaks_of_its_own_keys() {
        let key = Key::parse("a/b").expect("key");
        let found = |keys, epochs| epoch_among(keys, epochs, &key).ok().flatten();
        assert_eq!(found(None, "7"), Some(7));
        assert_eq!(found(Some("a/b"), "7"), Some(7));
        assert_eq!(found(Some("c\na/b"), "1\n7"), Some(7));
        assert_eq!(found(Some("c"), "7"), None);
        assert_eq!(found(None, ""), None);
        assert!(epoch_among(None, "seven", &key).is_err());
    }
}
