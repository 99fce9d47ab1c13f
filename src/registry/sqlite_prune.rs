//! Pruning in SQLite: what may go, and taking it away.
//!
//! Everything is judged again by the statement that takes it away: whoever looked did so a moment ago. The names of the
//! files that go with the rows are written down in the same transaction ([`FILES`]), so that none is left behind
//! by a crash, and none is deleted whose row is still there.

use rusqlite::{Connection, OptionalExtension, params};

use super::prune::{Bounds, Candidate, Limits, Place, Portion, Pruned};
use super::sqlite::bad_value;
use super::sqlite_keys::result_meta;
use super::sqlite_write::Failure;
use crate::ids::{Epoch, KeyId};
use crate::key::Key;

/// Result files whose rows are gone and that may still be there.
pub(super) const FILES: &str = "
CREATE TABLE pruned_files(key_id INTEGER NOT NULL, epoch INTEGER NOT NULL, PRIMARY KEY(key_id, epoch)) WITHOUT ROWID;
";

/// What may go, behind a place.
pub(super) fn prunable(
    connection: &Connection,
    after: Place,
    bounds: &Bounds,
    limits: Limits,
) -> Result<Portion, rusqlite::Error> {
    let mut portion = Portion::default();
    let mut keys =
        connection.prepare_cached("SELECT id, path FROM keys WHERE id >= ?1 AND epoch > 0 ORDER BY id LIMIT ?2")?;
    let mut rows = keys.query(params![after.key.0, limits.keys])?;
    let mut looked_at = 0;
    let mut place = after;
    while let Some(row) = rows.next()? {
        looked_at += 1;
        let id = KeyId(row.get(0)?);
        let path: String = row.get(1)?;
        let key = Key::parse(&path).map_err(|e| bad_value(1, format!("key {path:?}: {e}")))?;
        let from = if id == after.key { after.epoch } else { Epoch(0) };
        let room = limits.candidates - portion.candidates.len();
        let found = of_key(connection, (id, &key), from, bounds, room)?;
        let is_full = found.len() == room;
        let last = found.last().map(|candidate| candidate.epoch);
        portion.candidates.extend(found);
        if is_full {
            portion.next = Some(Place { key: id, epoch: last.unwrap_or(from) });
            return Ok(portion);
        }
        place = Place { key: id, epoch: Epoch::MAX };
    }
    portion.next = (looked_at == limits.keys).then_some(place);
    Ok(portion)
}

fn of_key(
    connection: &Connection,
    (id, key): (KeyId, &Key),
    after: Epoch,
    bounds: &Bounds,
    limit: usize,
) -> Result<Vec<Candidate>, rusqlite::Error> {
    let nth_newest = |skip: u64| {
        let sql = "SELECT epoch FROM attempts WHERE key_id = ?1 AND ended_ms IS NOT NULL \
                   ORDER BY epoch DESC LIMIT 1 OFFSET ?2";
        connection.prepare_cached(sql)?.query_row(params![id.0, skip], |row| row.get::<_, u64>(0)).optional()
    };
    let Some(newest) = nth_newest(0)? else { return Ok(Vec::new()) };
    // Where there are not so many, none is older than that one.
    let oldest_kept = match bounds.keep {
        Some(keep) => nth_newest(keep.saturating_sub(1).min(i64::MAX.unsigned_abs()))?.unwrap_or(0),
        None => 0,
    };
    if bounds.completed_by_ms.is_none() && oldest_kept == 0 {
        return Ok(Vec::new());
    }
    let sql = "SELECT epoch, result_size FROM attempts \
               WHERE key_id = ?1 AND epoch > ?2 AND epoch <= ?3 AND ended_ms IS NOT NULL \
               AND (epoch < ?4 OR outcome = 'completed' AND ended_ms <= ?5) \
               AND (epoch < ?3 OR result_ms IS NOT NULL) ORDER BY epoch LIMIT ?6";
    // A bound that is not given lets nothing go: NULL compares with nothing.
    connection
        .prepare_cached(sql)?
        .query_map(params![id.0, after.0, newest, oldest_kept, bounds.completed_by_ms, limit], |row| {
            let epoch: u64 = row.get(0)?;
            let (key_id, keeps_row) = (id, epoch == newest);
            Ok(Candidate { key_id, key: key.clone(), epoch: Epoch(epoch), keeps_row, result: row.get(1)? })
        })?
        .collect()
}

/// Takes candidates away, in a transaction that the caller began. What is not as it was when it was found stays.
pub(super) fn prune(tx: &Connection, candidates: &[Candidate]) -> Result<Vec<Pruned>, Failure> {
    let mut all: Vec<Pruned> = Vec::new();
    for of_key in candidates.chunk_by(|one, next| one.key_id == next.key_id) {
        let Some(key) = of_key.first().map(|candidate| candidate.key_id) else { continue };
        let mut pruned = Pruned { key, attempts: 0, results: Vec::new(), latest: None };
        let mut through = Epoch(0);
        for candidate in of_key {
            let goes = if candidate.keeps_row { take_result(tx, candidate)? } else { take_row(tx, candidate)? };
            if !goes {
                continue;
            }
            if !candidate.keeps_row {
                pruned.attempts += 1;
                through = through.max(candidate.epoch);
            }
            if let Some(bytes) = candidate.result {
                pruned.results.push((candidate.epoch, bytes));
                let mut note =
                    tx.prepare_cached("INSERT OR IGNORE INTO pruned_files(key_id, epoch) VALUES (?1, ?2)")?;
                note.execute(params![key.0, candidate.epoch.0])?;
            }
        }
        if pruned.attempts > 0 {
            let sql = "UPDATE keys SET pruned = max(pruned, ?2), pruned_attempts = pruned_attempts + ?3 WHERE id = ?1";
            tx.prepare_cached(sql)?.execute(params![key.0, through.0, pruned.attempts])?;
        }
        let sql = "SELECT epoch, result_size, result_ms, result_draft FROM attempts \
                   WHERE key_id = ?1 AND result_ms IS NOT NULL ORDER BY epoch DESC LIMIT 1";
        let latest = tx
            .prepare_cached(sql)?
            .query_row([key.0], |row| Ok((Epoch(row.get(0)?), result_meta(row.get(1)?, row.get(2)?, row.get(3)?))));
        pruned.latest = latest.optional()?;
        all.push(pruned);
    }
    Ok(all)
}

fn take_row(tx: &Connection, candidate: &Candidate) -> Result<bool, Failure> {
    let sql = "DELETE FROM attempts WHERE key_id = ?1 AND epoch = ?2 AND ended_ms IS NOT NULL AND result_size IS ?3 \
               AND EXISTS (SELECT 1 FROM attempts n WHERE n.key_id = ?1 AND n.epoch > ?2 AND n.ended_ms IS NOT NULL)";
    let gone = tx.prepare_cached(sql)?.execute(params![candidate.key_id.0, candidate.epoch.0, candidate.result])?;
    Ok(gone == 1)
}

/// Its attempt is struck off the register: what is missing now must not be committed a second time.
fn take_result(tx: &Connection, candidate: &Candidate) -> Result<bool, Failure> {
    let sql = "UPDATE attempts SET result_size = NULL, result_ms = NULL, result_draft = NULL, registered = 0, \
               result_pruned = 1 \
               WHERE key_id = ?1 AND epoch = ?2 AND ended_ms IS NOT NULL AND result_ms IS NOT NULL \
               AND result_size IS ?3";
    let gone = tx.prepare_cached(sql)?.execute(params![candidate.key_id.0, candidate.epoch.0, candidate.result])?;
    Ok(gone == 1)
}

/// The files that may still be there.
pub(super) fn pruned_files(connection: &Connection) -> Result<Vec<(KeyId, Epoch)>, rusqlite::Error> {
    connection
        .prepare_cached("SELECT key_id, epoch FROM pruned_files ORDER BY key_id, epoch")?
        .query_map([], |row| Ok((KeyId(row.get(0)?), Epoch(row.get(1)?))))?
        .collect()
}

/// Notes that files are gone.
pub(super) fn forget_files(tx: &Connection, gone: &[(KeyId, Epoch)]) -> Result<(), Failure> {
    for (key, epoch) in gone {
        tx.prepare_cached("DELETE FROM pruned_files WHERE key_id = ?1 AND epoch = ?2")?
            .execute(params![key.0, epoch.0])?;
    }
    Ok(())
}
