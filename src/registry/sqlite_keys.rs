//! Keys and attempts as they are read from their rows.

use std::collections::HashMap;
use std::sync::Arc;

use rusqlite::{Connection, Params, Row, params};

use super::sqlite::bad_value;
use super::{AttemptRow, KeyRow, LoadedKey, Which};
use crate::ids::{Epoch, Handle, Owner, RequestId};
use crate::key::Key;
use crate::machine::{Attempt, Claimant, Outcome, Process, ResultMeta, Share};
use crate::time::Now;
use crate::ttl::Ttl;

/// The columns of an attempt, in the order [`attempt_row`] and [`attempt`] read them.
pub(super) const ATTEMPT_COLUMNS: &str = "a.key_id, a.epoch, a.pid, a.start_time, a.uid, a.gid, a.command, a.via, \
     a.since_ms, a.renewed_ms, a.expires_ms, a.ttl_ms, a.note, a.outcome, a.reason, a.ended_ms, a.registered, \
     a.result_size, a.result_ms, a.opener_pid, a.opener_start, a.locker_pid, a.locker_start, a.deadline_ns, a.handle, \
     a.owners, a.request, a.held, a.result_draft, a.waited_ms, a.agent, a.result_pruned";

/// Reads keys with all that the engine keeps of them, in no order but where `which` gives one.
pub(super) fn keys(connection: &Connection, which: Which<'_>) -> Result<Vec<LoadedKey>, rusqlite::Error> {
    // '0' is what comes after '/'.
    match which {
        Which::Alive => {
            let alive = "SELECT key_id FROM attempts WHERE ended_ms IS NULL UNION SELECT key_id FROM shares";
            select(connection, &format!("k.id IN ({alive})"), [])
        }
        Which::Number(id) => select(connection, "k.id = ?1", [id.0]),
        Which::Named(path) => select(connection, "k.path = ?1", [path]),
        Which::Below("") => select(connection, "true", []),
        Which::Below(path) => select(connection, "k.path >= ?1 || '/' AND k.path < ?1 || '0'", [path]),
        Which::After(id, limit) => select(connection, "k.id > ?1 ORDER BY k.id LIMIT ?2", params![id.0, limit]),
    }
}

fn select(connection: &Connection, which: &str, params: impl Params) -> Result<Vec<LoadedKey>, rusqlite::Error> {
    connection
        .prepare_cached(&format!(
            "SELECT {ATTEMPT_COLUMNS}, k.id, k.path, k.epoch, k.finished, k.pruned, k.pruned_attempts, p.outcome, k.request, \
             r.epoch, r.result_size, r.result_ms, r.result_draft FROM keys k \
             LEFT JOIN attempts a ON a.key_id = k.id AND a.epoch = k.epoch \
             LEFT JOIN attempts p ON p.key_id = k.id AND p.epoch = k.epoch - 1 \
             LEFT JOIN attempts r ON r.key_id = k.id AND r.epoch = \
             (SELECT max(epoch) FROM attempts WHERE key_id = k.id AND result_ms IS NOT NULL) WHERE {which}"
        ))?
        .query_map(params, loaded_key)?
        .collect()
}

/// Gives keys the shared locks they have.
pub(super) fn with_shares(
    connection: &Connection,
    mut keys: Vec<LoadedKey>,
) -> Result<Vec<LoadedKey>, rusqlite::Error> {
    let mut shares: HashMap<u64, Vec<Share>> = HashMap::new();
    let mut query = connection.prepare(
        "SELECT key_id, handle, owner, pid, start_time, uid, gid, command, opener_pid, opener_start, locker_pid, \
         locker_start, ttl_ms, until_ns FROM shares ORDER BY key_id, handle, owner",
    )?;
    let mut rows = query.query([])?;
    while let Some(row) = rows.next()? {
        shares.entry(row.get(0)?).or_default().push(share(row)?);
    }
    for known in &mut keys {
        known.shares = shares.remove(&known.row.id).unwrap_or_default();
    }
    Ok(keys)
}

fn share(row: &Row<'_>) -> Result<Share, rusqlite::Error> {
    let process = |pid: usize| Ok::<_, rusqlite::Error>(Process { pid: row.get(pid)?, start_time: row.get(pid + 1)? });
    Ok(Share {
        handle: Handle(row.get(1)?),
        owner: Owner(row.get::<_, i64>(2)?.cast_unsigned()),
        claimant: Claimant {
            uid: row.get(5)?,
            gid: row.get(6)?,
            holder: process(3)?,
            opener: process(8)?,
            locker: process(10)?,
            command: row.get::<_, String>(7)?.into(),
            request: RequestId(0),
        },
        ttl: Ttl::from_millis(row.get(12)?).map_err(|e| bad_value(12, e.to_string()))?,
        until_ns: row.get(13)?,
    })
}

fn loaded_key(row: &Row<'_>) -> Result<LoadedKey, rusqlite::Error> {
    let latest_result = match row.get::<_, Option<u64>>(40)? {
        Some(epoch) => Some((Epoch(epoch), result_meta(row.get(41)?, row.get(42)?, row.get(43)?))),
        None => None,
    };
    Ok(LoadedKey {
        row: key_row(row, 32)?,
        attempt: row.get::<_, Option<u64>>(0)?.map(|_| attempt(row)).transpose()?,
        previous_outcome: outcome(row.get(38)?),
        latest_result,
        last_request: RequestId(row.get::<_, i64>(39)?.cast_unsigned()),
        shares: Vec::new(),
    })
}

pub(super) fn key_row(row: &Row<'_>, first: usize) -> Result<KeyRow, rusqlite::Error> {
    let path: String = row.get(first + 1)?;
    let key = Key::parse(&path).map_err(|e| bad_value(first + 1, format!("key {path:?}: {e}")))?;
    Ok(KeyRow {
        id: row.get(first)?,
        key,
        epoch: row.get(first + 2)?,
        finished: row.get(first + 3)?,
        pruned: row.get(first + 4)?,
        pruned_attempts: row.get(first + 5)?,
    })
}

pub(super) fn attempt_row(row: &Row<'_>) -> Result<AttemptRow, rusqlite::Error> {
    let result = match (row.get::<_, Option<u64>>(17)?, row.get::<_, Option<i64>>(18)?) {
        (Some(size), Some(at)) => Some((size, at)),
        _ => None,
    };
    Ok(AttemptRow {
        key_id: row.get(0)?,
        epoch: row.get(1)?,
        pid: row.get(2)?,
        start_time: row.get(3)?,
        uid: row.get(4)?,
        gid: row.get(5)?,
        command: row.get(6)?,
        via: row.get(7)?,
        since_ms: row.get(8)?,
        renewed_ms: row.get(9)?,
        expires_ms: row.get(10)?,
        ttl_ms: row.get(11)?,
        waited_ms: row.get(29)?,
        note: row.get(12)?,
        agent: row.get(30)?,
        outcome: row.get(13)?,
        reason: row.get(14)?,
        ended_ms: row.get(15)?,
        registered: row.get(16)?,
        result,
        result_pruned: row.get(31)?,
    })
}

fn attempt(row: &Row<'_>) -> Result<Attempt, rusqlite::Error> {
    let stored = attempt_row(row)?;
    let deadline_ns: u64 = row.get(23)?;
    // Only the deadline is measured by CLOCK_BOOTTIME; the other times are shown, not compared.
    let at = |wall_ms: i64| Now {
        boot_ns: deadline_ns.saturating_add_signed((wall_ms - stored.expires_ms).saturating_mul(1_000_000)),
        wall_ms,
    };
    let process = |pid: usize| Ok::<_, rusqlite::Error>(Process { pid: row.get(pid)?, start_time: row.get(pid + 1)? });
    Ok(Attempt {
        epoch: Epoch(stored.epoch),
        via: stored.via.parse().map_err(|()| bad_value(7, format!("via {:?}", stored.via)))?,
        claimant: Claimant {
            uid: stored.uid,
            gid: stored.gid,
            holder: Process { pid: stored.pid, start_time: stored.start_time },
            opener: process(19)?,
            locker: process(21)?,
            command: Arc::from(stored.command.as_str()),
            request: RequestId(row.get::<_, i64>(26)?.cast_unsigned()),
        },
        handle: Handle(row.get(24)?),
        owners: owners(row.get_ref(25)?.as_blob()?),
        ttl: Ttl::from_millis(stored.ttl_ms).map_err(|e| bad_value(11, e.to_string()))?,
        since: at(stored.since_ms),
        renewed: at(stored.renewed_ms),
        deadline_ns,
        waited_ms: stored.waited_ms,
        note: Arc::from(stored.note.as_str()),
        agent: stored.agent.as_deref().map(Arc::from),
        held: row.get(27)?,
        registered: stored.registered,
        orphaned: false,
        why: stored.reason.as_deref().map(Arc::from),
        outcome: outcome(stored.outcome.clone()),
        ended: stored.ended_ms.map(at),
        result: match stored.result {
            Some((size, committed_ms)) => Some(result_meta(size, committed_ms, row.get(28)?)),
            None => None,
        },
    })
}

fn outcome(word: Option<String>) -> Option<Outcome> {
    word.and_then(|word| word.parse().ok())
}

/// Lock owners from eight bytes each.
fn owners(bytes: &[u8]) -> Vec<Owner> {
    let (numbers, _) = bytes.as_chunks::<8>();
    numbers.iter().map(|number| Owner(u64::from_le_bytes(*number))).collect()
}

pub(super) fn result_meta(size: u64, committed_ms: i64, draft: Option<u64>) -> ResultMeta {
    ResultMeta { size, committed_ms, draft: Handle(draft.unwrap_or(0)) }
}
