//! The writes as statements, one by one and in bulk. Every update names the attempt it is about and must hit exactly one
//! row.

use rusqlite::{Connection, ToSql, params, params_from_iter};

use super::Write;
use super::coalesce::Op;
use super::sqlite_fault::fault;
use super::sqlite_read::Mark;
use crate::error::Error;
use crate::ids::{Epoch, Handle, KeyId, Owner};
use crate::machine::{Attempt, Claimant, Outcome, ResultMeta, Share};

/// What attempts and shares keep of a claimant. Which request it was, only attempts do.
macro_rules! claimant_columns {
    () => {
        "pid, start_time, uid, gid, command, opener_pid, opener_start, locker_pid, locker_start"
    };
}

/// Applies it all, in a transaction if the caller began one.
pub(super) fn replay(connection: &Connection, ops: &[Op<'_>], mark: Option<Mark>) -> Result<(), Failure> {
    ops.iter().try_for_each(|op| match op {
        Op::One(write) => apply(connection, write),
        Op::Count { key, before, after, finished } => count(connection, *key, *before, *after, *finished),
        Op::Insert(key, attempt) => insert(connection, *key, attempt),
    })?;
    if let Some(Mark { id, record }) = mark {
        let mut put = connection.prepare_cached("INSERT OR REPLACE INTO meta(name, value) VALUES ('journal', ?1)")?;
        put.execute([format!("{id} {record}")])?;
    }
    Ok(())
}

/// A commit that did not happen: SQLite's fault, or a write that did not fit what is stored.
pub(super) enum Failure {
    Sqlite(rusqlite::Error),
    Mismatch(String),
}

impl Failure {
    pub(super) fn into_error(self) -> Error {
        match self {
            Failure::Sqlite(error) => fault(&error),
            Failure::Mismatch(message) => Error::storage(None, message),
        }
    }
}

impl From<rusqlite::Error> for Failure {
    fn from(error: rusqlite::Error) -> Failure {
        Failure::Sqlite(error)
    }
}

fn apply(tx: &Connection, write: &Write) -> Result<(), Failure> {
    match write {
        Write::Key(id, key) => {
            let mut insert = tx.prepare_cached("INSERT INTO keys(id, path) VALUES (?1, ?2)")?;
            insert.execute(params![id.0, key.as_str()])?;
            Ok(())
        }
        Write::Forget(id) => {
            tx.prepare_cached("DELETE FROM keys WHERE id = ?1 AND epoch = 0")?.execute(params![id.0])?;
            Ok(())
        }
        Write::Claim(id, a) => {
            count(tx, *id, Epoch(a.epoch.0.saturating_sub(1)), a.epoch, false)?;
            insert(tx, *id, a)
        }
        Write::Renew(id, a) => one_row(
            tx.prepare_cached(
                "UPDATE attempts SET renewed_ms = ?3, expires_ms = ?4, deadline_ns = ?5, ttl_ms = ?6, note = ?7, \
                 held = ?8, reason = ?9, handle = ?10, owners = ?11, via = ?12, agent = ?13 \
                 WHERE key_id = ?1 AND epoch = ?2 AND ended_ms IS NULL",
            )?
            .execute(params![
                id.0,
                a.epoch.0,
                a.renewed.wall_ms,
                a.expires_ms(),
                a.deadline_ns,
                a.ttl.as_millis(),
                a.note,
                a.held,
                a.why,
                a.handle.0,
                owners_bytes(&a.owners),
                a.via.word(),
                a.agent
            ])?,
            "renew",
            *id,
            a.epoch,
        ),
        Write::End(id, a) => {
            let ended = tx
                .prepare_cached(
                    "UPDATE attempts SET outcome = ?3, reason = ?4, ended_ms = ?5, registered = ?6, held = 0 \
                     WHERE key_id = ?1 AND epoch = ?2 AND ended_ms IS NULL",
                )?
                .execute(params![
                    id.0,
                    a.epoch.0,
                    a.outcome.map(Outcome::word),
                    a.why,
                    a.ended.map(|at| at.wall_ms),
                    a.registered
                ])?;
            one_row(ended, "end", *id, a.epoch)?;
            if a.outcome == Some(Outcome::Completed) { set_finished(tx, *id, true) } else { Ok(()) }
        }
        Write::Revive(id, a) => one_row(
            tx.prepare_cached(
                "UPDATE attempts SET outcome = NULL, ended_ms = NULL WHERE key_id = ?1 AND epoch = ?2 \
                 AND ended_ms IS NOT NULL AND result_ms IS NULL AND epoch = (SELECT epoch FROM keys WHERE id = ?1)",
            )?
            .execute(params![id.0, a.epoch.0])?,
            "revive",
            *id,
            a.epoch,
        ),
        Write::Commit(id, a, _) => {
            let result = a.result.unwrap_or(ResultMeta { size: 0, committed_ms: 0, draft: Handle(0) });
            let done = tx
                .prepare_cached(
                    "UPDATE attempts SET result_size = ?3, result_ms = ?4, result_draft = ?5, outcome = 'completed' \
                     WHERE key_id = ?1 AND epoch = ?2 AND result_ms IS NULL AND ended_ms IS NULL \
                     AND epoch = (SELECT epoch FROM keys WHERE id = ?1)",
                )?
                .execute(params![id.0, a.epoch.0, result.size, result.committed_ms, result.draft.0])?;
            one_row(done, "commit a result of", *id, a.epoch)
        }
        Write::Finished(id, finished) => set_finished(tx, *id, *finished),
        Write::Answered(id, request) => {
            let mut put = tx.prepare_cached("UPDATE keys SET request = ?2 WHERE id = ?1")?;
            put.execute(params![id.0, bits(request.0)])?;
            Ok(())
        }
        Write::Share(id, share) => insert_share(tx, *id, share),
        Write::Unshare(id, handle, owner) => {
            let mut delete =
                tx.prepare_cached("DELETE FROM shares WHERE key_id = ?1 AND handle = ?2 AND owner = ?3")?;
            delete.execute(params![id.0, handle.0, bits(owner.0)])?;
            Ok(())
        }
        Write::Namespace(row) => {
            let mut put = tx.prepare_cached(
                "INSERT OR REPLACE INTO namespaces(id, path, present, mode, uid, gid, atime_ns, mtime_ns, ctime_ns, \
                 ttl_ms, made, request) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12)",
            )?;
            put.execute(params![
                row.id.0,
                row.path,
                row.present,
                row.mode,
                row.uid,
                row.gid,
                row.atime_ns,
                row.mtime_ns,
                row.ctime_ns,
                row.ttl_ms,
                row.made,
                bits(row.request.0)
            ])?;
            Ok(())
        }
    }
}

fn count(tx: &Connection, id: KeyId, before: Epoch, after: Epoch, finished: bool) -> Result<(), Failure> {
    let counted = tx
        .prepare_cached("UPDATE keys SET epoch = ?3, finished = ?4 WHERE id = ?1 AND epoch = ?2")?
        .execute(params![id.0, before.0, after.0, finished])?;
    one_row(counted, "claim", id, after)
}

fn insert(tx: &Connection, id: KeyId, a: &Attempt) -> Result<(), Failure> {
    let mut insert = tx.prepare_cached(
        concat!(
            "INSERT INTO attempts(key_id, epoch, ",
            claimant_columns!(),
            ", via, since_ms, renewed_ms, expires_ms, ttl_ms, deadline_ns, handle, owners, request, note, held, registered, \
             outcome, reason, ended_ms, result_size, result_ms, result_draft, waited_ms, agent) VALUES (?1, ?2, ?3, ?4, ?5, \
             ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, ?19, ?20, ?21, ?22, ?23, ?24, ?25, ?26, ?27, ?28, \
             ?29, ?30, ?31)"
        ),
    )?;
    let rest = params![
        a.via.word(),
        a.since.wall_ms,
        a.renewed.wall_ms,
        a.expires_ms(),
        a.ttl.as_millis(),
        a.deadline_ns,
        a.handle.0,
        owners_bytes(&a.owners),
        bits(a.claimant.request.0),
        a.note,
        a.held,
        a.registered,
        a.outcome.map(Outcome::word),
        a.why,
        a.ended.map(|at| at.wall_ms),
        a.result.map(|result| result.size),
        a.result.map(|result| result.committed_ms),
        a.result.map(|result| result.draft.0),
        a.waited_ms,
        a.agent
    ];
    insert.execute(params_from_iter(params![id.0, a.epoch.0].iter().chain(&claimant(&a.claimant)).chain(rest)))?;
    Ok(())
}

fn insert_share(tx: &Connection, id: KeyId, share: &Share) -> Result<(), Failure> {
    let mut put = tx.prepare_cached(concat!(
        "INSERT OR REPLACE INTO shares(key_id, handle, owner, ",
        claimant_columns!(),
        ", ttl_ms, until_ns) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14)"
    ))?;
    let (first, rest) =
        (params![id.0, share.handle.0, bits(share.owner.0)], params![share.ttl.as_millis(), share.until_ns]);
    put.execute(params_from_iter(first.iter().chain(&claimant(&share.claimant)).chain(rest)))?;
    Ok(())
}

/// The values of [`claimant_columns`].
fn claimant(who: &Claimant) -> [&dyn ToSql; 9] {
    [
        &who.holder.pid,
        &who.holder.start_time,
        &who.uid,
        &who.gid,
        &who.command,
        &who.opener.pid,
        &who.opener.start_time,
        &who.locker.pid,
        &who.locker.start_time,
    ]
}

fn set_finished(tx: &Connection, id: KeyId, finished: bool) -> Result<(), Failure> {
    tx.prepare_cached("UPDATE keys SET finished = ?2 WHERE id = ?1")?.execute(params![id.0, finished])?;
    Ok(())
}

fn one_row(rows: usize, what: &'static str, id: KeyId, epoch: Epoch) -> Result<(), Failure> {
    if rows == 1 { Ok(()) } else { Err(Failure::Mismatch(misfit(what, id, epoch))) }
}

/// A write that does not fit what is there, in words.
pub(super) fn misfit(what: &'static str, id: KeyId, epoch: Epoch) -> String {
    format!("the registry does not fit: cannot {what} attempt {epoch} of key {id}; run `leasefs verify`")
}

/// Lock owners as they are stored: eight bytes each, lowest first.
fn owners_bytes(owners: &[Owner]) -> Vec<u8> {
    owners.iter().flat_map(|owner| owner.0.to_le_bytes()).collect()
}

/// SQLite's integers are signed; the kernel's numbers use all 64 bits.
fn bits(number: u64) -> i64 {
    number.cast_signed()
}
