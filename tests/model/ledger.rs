//! A registry on paper: takes what a key wants recorded by the same compare-and-set rules, and looks for what is wrong.

use std::collections::BTreeSet;

use leasefs::machine::{Attempt, Change, KeyState};
use leasefs::registry::{AttemptRow, KeyRow};
use leasefs::{Handle, Key, Owner, verify};

/// The rows of one key.
#[derive(Default)]
pub struct Ledger {
    epoch: u64,
    finished: bool,
    rows: Vec<AttemptRow>,
    shares: BTreeSet<(Handle, Owner)>,
}

fn row(a: &Attempt) -> AttemptRow {
    AttemptRow {
        key_id: 1,
        epoch: a.epoch.0,
        pid: a.claimant.holder.pid,
        start_time: a.claimant.holder.start_time,
        uid: a.claimant.uid,
        gid: a.claimant.gid,
        command: a.claimant.command.to_string(),
        via: a.via.to_string(),
        since_ms: a.since.wall_ms,
        renewed_ms: a.renewed.wall_ms,
        expires_ms: a.renewed.wall_at(a.deadline_ns),
        ttl_ms: a.ttl.as_millis(),
        waited_ms: a.waited_ms,
        note: a.note.to_string(),
        agent: a.agent.as_deref().map(str::to_owned),
        outcome: a.outcome.map(|outcome| outcome.to_string()),
        reason: a.why.as_deref().map(str::to_owned),
        ended_ms: a.ended.map(|at| at.wall_ms),
        registered: a.registered,
        result: a.result.map(|result| (result.size, result.committed_ms)),
        result_pruned: false,
    }
}

impl Ledger {
    /// Takes a step's changes.
    pub fn write(&mut self, changes: &[Change]) -> Result<(), String> {
        for change in changes {
            self.change(change).map_err(|problem| format!("{problem}: {change:?}"))?;
        }
        Ok(())
    }

    fn change(&mut self, change: &Change) -> Result<(), &'static str> {
        let attempt = match change {
            Change::Finished(finished) => {
                self.finished = *finished;
                return Ok(());
            }
            Change::Answered(_) => return Ok(()),
            Change::Shared(share) => {
                let new = self.shares.insert((share.handle, share.owner));
                return new.then_some(()).ok_or("it is shared by this one already");
            }
            Change::Unshared(handle, owner) => {
                let there = self.shares.remove(&(*handle, *owner));
                return there.then_some(()).ok_or("it is not shared by this one");
            }
            Change::Claimed(attempt) => {
                if attempt.epoch.0 != self.epoch + 1 || self.rows.iter().any(|row| row.ended_ms.is_none()) {
                    return Err("no claim fits here");
                }
                (self.epoch, self.finished) = (attempt.epoch.0, false);
                self.rows.push(row(attempt));
                return Ok(());
            }
            Change::Renewed(a) | Change::Ended(a) | Change::Revived(a) | Change::Committed(a, _) => a,
        };
        let newest = self.rows.last_mut().filter(|row| row.epoch == attempt.epoch.0).ok_or("not the newest attempt")?;
        let fits = match change {
            Change::Renewed(_) => newest.ended_ms.is_none() && newest.outcome == row(attempt).outcome,
            Change::Ended(a) => newest.ended_ms.is_none() && a.ended.is_some() && a.outcome.is_some(),
            Change::Revived(a) => newest.ended_ms.is_some() && newest.result.is_none() && a.ended.is_none(),
            Change::Committed(a, _) => newest.ended_ms.is_none() && newest.result.is_none() && a.result.is_some(),
            _ => true,
        };
        if !fits {
            return Err("the attempt is not in the state for this");
        }
        if matches!(change, Change::Ended(_)) {
            self.finished = attempt.result.is_some();
        }
        *newest = row(attempt);
        Ok(())
    }

    /// Whether the rows say what the key is, and keep §7.
    pub fn check(&self, key: &KeyState) -> Result<(), String> {
        let newest = key.attempt.as_deref().map(row);
        if (self.epoch, self.finished, self.rows.last()) != (key.epoch.0, key.finished, newest.as_ref()) {
            return Err(format!("recorded {:?}, but the key is {key:?}", self.rows.last()));
        }
        let shares: BTreeSet<_> = key.sharers.iter().map(|share| (share.handle, share.owner)).collect();
        if shares != self.shares {
            return Err(format!("recorded as shared by {:?}, but it is by {shares:?}", self.shares));
        }
        let name = Key::parse("k").map_err(|e| e.to_string())?;
        let keys =
            [KeyRow { id: 1, key: name, epoch: self.epoch, finished: self.finished, pruned: 0, pruned_attempts: 0 }];
        let size = |row: &AttemptRow| row.result.map(|(size, _)| size);
        let found = verify::check(&keys, &self.rows, size);
        if found.is_empty() { Ok(()) } else { Err(format!("{found:?}")) }
    }
}
