//! The registry in SQLite: the embedded default.
//!
//! WAL, so that readers (`leasefs verify`, `history`) never wait and never make the server wait. `synchronous` is FULL
//! for a batch that must survive a power cut and NORMAL for the rest, which survives the end of the process all the
//! same. Checkpoints run on a connection of their own and leave the log its size, so that it is written over: syncing a
//! file that grows costs twice as much. Every update names the attempt it is about and must hit exactly one row.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rusqlite::{Connection, OpenFlags, Row, TransactionBehavior, params};

pub use super::sqlite_read::{Reader, can_serve};
use super::sqlite_read::{SqliteCheckpoint, SqliteRead};
use super::{AttemptRow, Checkpoint, KeyRow, Loaded, LoadedKey, NamespaceRow, Read, Registry, Write};
use crate::error::Error;
use crate::ids::{Epoch, Handle, KeyId, NamespaceId, Owner, RequestId};
use crate::key::Key;
use crate::machine::{Attempt, Claimant, Outcome, Process, ResultMeta, Via};
use crate::time::Now;
use crate::ttl::Ttl;

/// File name in the state directory.
pub const FILE: &str = "registry.db";
/// `Leas`: tells the file from other SQLite databases.
const APPLICATION_ID: i32 = 0x4c65_6173;
/// Raised with every change of the schema.
pub const SCHEMA_VERSION: i32 = 2;
/// A claim changes two or three pages, each of which goes to the log whole: small ones make it a third cheaper than
/// SQLite's default of 4096.
const PAGE_BYTES: u32 = 1024;
/// The inline part of a checkpoint runs after this many commits, on what the other connection left over.
const COMMITS_PER_CHECKPOINT: u32 = 2_000;

const SCHEMA: &str = "
CREATE TABLE meta(name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE namespaces(
    id INTEGER PRIMARY KEY, path TEXT NOT NULL UNIQUE, present INTEGER NOT NULL, made INTEGER NOT NULL,
    mode INTEGER NOT NULL,
    uid INTEGER NOT NULL, gid INTEGER NOT NULL, atime_ns INTEGER NOT NULL, mtime_ns INTEGER NOT NULL,
    ctime_ns INTEGER NOT NULL, ttl_ms INTEGER, request INTEGER NOT NULL DEFAULT 0);
CREATE TABLE keys(
    id INTEGER PRIMARY KEY, path TEXT NOT NULL UNIQUE, epoch INTEGER NOT NULL DEFAULT 0,
    finished INTEGER NOT NULL DEFAULT 0, pruned INTEGER NOT NULL DEFAULT 0,
    request INTEGER NOT NULL DEFAULT 0);
CREATE TABLE attempts(
    key_id INTEGER NOT NULL, epoch INTEGER NOT NULL,
    pid INTEGER NOT NULL, start_time INTEGER NOT NULL, uid INTEGER NOT NULL, gid INTEGER NOT NULL,
    command TEXT NOT NULL, opener_pid INTEGER NOT NULL, opener_start INTEGER NOT NULL,
    locker_pid INTEGER NOT NULL, locker_start INTEGER NOT NULL,
    via TEXT NOT NULL, since_ms INTEGER NOT NULL, renewed_ms INTEGER NOT NULL, expires_ms INTEGER NOT NULL,
    ttl_ms INTEGER NOT NULL, deadline_ns INTEGER NOT NULL, handle INTEGER NOT NULL, owners BLOB NOT NULL,
    request INTEGER NOT NULL, note TEXT NOT NULL, held INTEGER NOT NULL, registered INTEGER NOT NULL,
    outcome TEXT, reason TEXT, ended_ms INTEGER, result_size INTEGER, result_ms INTEGER,
    result_draft INTEGER,
    PRIMARY KEY(key_id, epoch)) WITHOUT ROWID;
CREATE INDEX committed ON attempts(key_id, epoch) WHERE result_ms IS NOT NULL;
";

/// From schema 1: no lease outlives the server of that version, so what it did not keep is nobody's.
const MIGRATE_1: &str = "
ALTER TABLE namespaces ADD COLUMN request INTEGER NOT NULL DEFAULT 0;
ALTER TABLE keys ADD COLUMN request INTEGER NOT NULL DEFAULT 0;
ALTER TABLE attempts DROP COLUMN owner;
ALTER TABLE attempts ADD COLUMN owners BLOB NOT NULL DEFAULT x'';
ALTER TABLE attempts RENAME COLUMN req_unique TO request;
ALTER TABLE attempts ADD COLUMN result_draft INTEGER;
";

/// The columns of an attempt, in the order [`attempt_row`] and [`attempt`] read them.
pub(super) const ATTEMPT_COLUMNS: &str = "a.key_id, a.epoch, a.pid, a.start_time, a.uid, a.gid, a.command, a.via, \
     a.since_ms, a.renewed_ms, a.expires_ms, a.ttl_ms, a.note, a.outcome, a.reason, a.ended_ms, a.registered, \
     a.result_size, a.result_ms, a.opener_pid, a.opener_start, a.locker_pid, a.locker_start, a.deadline_ns, a.handle, \
     a.owners, a.request, a.held, a.result_draft";

/// The writing connection.
pub struct SqliteRegistry {
    connection: Connection,
    path: PathBuf,
    full_sync: bool,
    commits: u32,
}

impl SqliteRegistry {
    /// Opens the registry in a state directory, or makes one, and reads it whole to see that it is sound.
    ///
    /// # Errors
    /// [`Error::Storage`] with what to do: a newer version, another program's file, a corrupt file, a disk fault.
    pub fn open(state_dir: &Path) -> Result<SqliteRegistry, Error> {
        let registry = SqliteRegistry::reopen(state_dir)?;
        let problems = super::sqlite_read::problems(&registry.connection, "quick_check").map_err(|e| fault(&e))?;
        match problems.first() {
            Some(first) => Err(corrupt(&registry.path, first)),
            None => Ok(registry),
        }
    }

    /// The same, unchecked: for a server that goes on where another was killed a moment ago, with callers waiting. The end of
    /// a process tears nothing, and reading everything would take longer than all the rest.
    ///
    /// # Errors
    /// As [`SqliteRegistry::open`], but for a corrupt file that can still be opened.
    pub fn reopen(state_dir: &Path) -> Result<SqliteRegistry, Error> {
        let path = state_dir.join(FILE);
        let mut connection = Connection::open(&path).map_err(|e| fault(&e))?;
        let setup = |connection: &mut Connection| -> Result<(), rusqlite::Error> {
            connection.pragma_update(None, "page_size", PAGE_BYTES)?;
            connection.pragma_update(None, "journal_mode", "wal")?;
            connection.pragma_update(None, "wal_autocheckpoint", 0)?;
            connection.pragma_update(None, "synchronous", "NORMAL")?;
            connection.busy_timeout(std::time::Duration::from_secs(5))?;
            connection.set_prepared_statement_cache_capacity(64);
            Ok(())
        };
        check_version(&connection, &path)?;
        setup(&mut connection).map_err(|e| fault(&e))?;
        let version: i32 = pragma(&connection, "user_version")?;
        if version < SCHEMA_VERSION {
            let steps = if version == 0 { SCHEMA } else { MIGRATE_1 };
            let migrate = connection.transaction_with_behavior(TransactionBehavior::Immediate).and_then(|tx| {
                tx.execute_batch(steps)?;
                crate::probe::at(crate::probe::MIGRATION);
                tx.pragma_update(None, "application_id", APPLICATION_ID)?;
                tx.pragma_update(None, "user_version", SCHEMA_VERSION)?;
                tx.commit()
            });
            migrate.map_err(|e| fault(&e))?;
        }
        Ok(SqliteRegistry { connection, path, full_sync: false, commits: 0 })
    }

    fn set_sync(&mut self, full: bool) -> Result<(), rusqlite::Error> {
        if self.full_sync != full {
            self.connection.pragma_update(None, "synchronous", if full { "FULL" } else { "NORMAL" })?;
            self.full_sync = full;
        }
        Ok(())
    }

    fn try_commit(&mut self, writes: &[Write], durable: bool) -> Result<(), Failure> {
        self.set_sync(durable)?;
        // Where taking the last one back failed too, it is taken back now.
        if !self.connection.is_autocommit() {
            self.connection.execute_batch("ROLLBACK")?;
        }
        // A transaction object would have these two parsed anew every time.
        self.connection.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        let written = writes.iter().try_for_each(|write| apply(&self.connection, write));
        let committed = written.and_then(|()| {
            self.connection.prepare_cached("COMMIT")?.execute([])?;
            Ok(())
        });
        if let Err(failure) = committed {
            if !self.connection.is_autocommit() {
                self.connection.execute_batch("ROLLBACK")?;
            }
            return Err(failure);
        }
        self.commits += 1;
        if self.commits >= COMMITS_PER_CHECKPOINT {
            self.commits = 0;
            // What the other connection left over; a failure costs only log space.
            let _ = self.connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()));
        }
        Ok(())
    }
}

/// A commit that did not happen: SQLite's fault, or a write that did not fit what is stored.
enum Failure {
    Sqlite(rusqlite::Error),
    Mismatch(String),
}

impl From<rusqlite::Error> for Failure {
    fn from(error: rusqlite::Error) -> Failure {
        Failure::Sqlite(error)
    }
}

impl Registry for SqliteRegistry {
    fn load(&mut self, boot_id: &str, now: Now) -> Result<Loaded, Error> {
        load(&mut self.connection, boot_id, now).map_err(|e| fault(&e))
    }

    fn commit(&mut self, writes: &[Write], durable: bool) -> Result<(), Error> {
        self.try_commit(writes, durable).map_err(|failure| match failure {
            Failure::Sqlite(error) => fault(&error),
            Failure::Mismatch(message) => Error::storage(None, message),
        })
    }

    fn reader(&self) -> Result<Box<dyn Read>, Error> {
        Ok(Box::new(SqliteRead::open(&self.path)?))
    }

    fn checkpointer(&self) -> Result<Box<dyn Checkpoint>, Error> {
        Ok(Box::new(SqliteCheckpoint::open(&self.path)?))
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
        Write::Claim(id, attempt) => claim(tx, *id, attempt),
        Write::Renew(id, a) => one_row(
            tx.prepare_cached(
                "UPDATE attempts SET renewed_ms = ?3, expires_ms = ?4, deadline_ns = ?5, ttl_ms = ?6, note = ?7, \
                 held = ?8, reason = ?9, handle = ?10, owners = ?11, via = ?12 \
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
                word(a.via)
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
                    a.outcome.map(|outcome| outcome.to_string()),
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

fn claim(tx: &Connection, id: KeyId, a: &Attempt) -> Result<(), Failure> {
    let counted = tx
        .prepare_cached("UPDATE keys SET epoch = ?2, finished = 0 WHERE id = ?1 AND epoch = ?2 - 1")?
        .execute(params![id.0, a.epoch.0])?;
    one_row(counted, "claim", id, a.epoch)?;
    let mut insert = tx.prepare_cached(
        "INSERT INTO attempts(key_id, epoch, pid, start_time, uid, gid, command, opener_pid, opener_start, locker_pid, \
         locker_start, via, since_ms, renewed_ms, expires_ms, ttl_ms, deadline_ns, handle, owners, request, note, \
         held, registered) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16, ?17, ?18, \
         ?19, ?20, ?21, ?22, ?23)",
    )?;
    let who = &a.claimant;
    insert.execute(params![
        id.0,
        a.epoch.0,
        who.holder.pid,
        who.holder.start_time,
        who.uid,
        who.gid,
        who.command,
        who.opener.pid,
        who.opener.start_time,
        who.locker.pid,
        who.locker.start_time,
        word(a.via),
        a.since.wall_ms,
        a.renewed.wall_ms,
        a.expires_ms(),
        a.ttl.as_millis(),
        a.deadline_ns,
        a.handle.0,
        owners_bytes(&a.owners),
        bits(who.request.0),
        a.note,
        a.held,
        a.registered
    ])?;
    Ok(())
}

fn set_finished(tx: &Connection, id: KeyId, finished: bool) -> Result<(), Failure> {
    tx.prepare_cached("UPDATE keys SET finished = ?2 WHERE id = ?1")?.execute(params![id.0, finished])?;
    Ok(())
}

fn one_row(rows: usize, what: &str, id: KeyId, epoch: Epoch) -> Result<(), Failure> {
    if rows == 1 {
        return Ok(());
    }
    Err(Failure::Mismatch(format!(
        "the registry does not fit: cannot {what} attempt {epoch} of key {id}; run `leasefs verify`"
    )))
}

/// Lock owners as they are stored: eight bytes each, lowest first.
fn owners_bytes(owners: &[Owner]) -> Vec<u8> {
    owners.iter().flat_map(|owner| owner.0.to_le_bytes()).collect()
}

fn owners(bytes: &[u8]) -> Vec<Owner> {
    let (numbers, _) = bytes.as_chunks::<8>();
    numbers.iter().map(|number| Owner(u64::from_le_bytes(*number))).collect()
}

fn result_meta(size: u64, committed_ms: i64, draft: Option<u64>) -> ResultMeta {
    ResultMeta { size, committed_ms, draft: Handle(draft.unwrap_or(0)) }
}

fn word(via: Via) -> &'static str {
    match via {
        Via::Create => "create",
        Via::Lock => "lock",
    }
}

/// SQLite's integers are signed; the kernel's numbers use all 64 bits.
fn bits(number: u64) -> i64 {
    number.cast_signed()
}

fn load(connection: &mut Connection, boot_id: &str, now: Now) -> Result<Loaded, rusqlite::Error> {
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    let meta = |name: &str| -> Result<Option<String>, rusqlite::Error> {
        let mut query = tx.prepare("SELECT CAST(value AS TEXT) FROM meta WHERE name = ?1")?;
        let mut rows = query.query([name])?;
        rows.next()?.map(|row| row.get(0)).transpose()
    };
    let generation = meta("generation")?.and_then(|text| text.parse::<u64>().ok()).unwrap_or(0) + 1;
    let rebooted = meta("boot_id")?.is_some_and(|before| before != boot_id);
    for (name, value) in [("generation", generation.to_string()), ("boot_id", boot_id.to_owned())] {
        tx.execute("INSERT OR REPLACE INTO meta(name, value) VALUES (?1, ?2)", params![name, value])?;
    }
    if rebooted {
        // No handle survives a reboot, and CLOCK_BOOTTIME began anew: nothing of before can be renewed or committed.
        tx.execute(
            "UPDATE keys SET finished = 1 WHERE EXISTS (SELECT 1 FROM attempts a WHERE a.key_id = keys.id \
             AND a.epoch = keys.epoch AND a.ended_ms IS NULL AND a.result_ms IS NOT NULL)",
            [],
        )?;
        tx.execute(
            "UPDATE attempts SET ended_ms = ?1, reason = 'the machine was rebooted', held = 0, \
             outcome = CASE WHEN result_ms IS NULL THEN 'lost' ELSE 'completed' END WHERE ended_ms IS NULL",
            [now.wall_ms],
        )?;
        tx.execute("UPDATE attempts SET registered = 0 WHERE registered = 1", [])?;
    }
    let namespaces = tx
        .prepare(
            "SELECT id, path, present, mode, uid, gid, atime_ns, mtime_ns, ctime_ns, ttl_ms, made, request \
             FROM namespaces",
        )?
        .query_map([], |row| {
            Ok(NamespaceRow {
                id: NamespaceId(row.get(0)?),
                path: row.get(1)?,
                present: row.get(2)?,
                mode: row.get(3)?,
                uid: row.get(4)?,
                gid: row.get(5)?,
                atime_ns: row.get(6)?,
                mtime_ns: row.get(7)?,
                ctime_ns: row.get(8)?,
                ttl_ms: row.get(9)?,
                made: row.get(10)?,
                request: RequestId(row.get::<_, i64>(11)?.cast_unsigned()),
            })
        })?
        .collect::<Result<Vec<_>, _>>()?;
    let sql = format!(
        "SELECT {ATTEMPT_COLUMNS}, k.id, k.path, k.epoch, k.finished, k.pruned, p.outcome, k.request FROM keys k \
         LEFT JOIN attempts a ON a.key_id = k.id AND a.epoch = k.epoch \
         LEFT JOIN attempts p ON p.key_id = k.id AND p.epoch = k.epoch - 1 ORDER BY k.id"
    );
    let latest: HashMap<u64, (Epoch, ResultMeta)> = tx
        .prepare(
            "SELECT key_id, max(epoch), result_size, result_ms, result_draft FROM attempts WHERE result_ms IS NOT NULL GROUP BY key_id",
        )?
        .query_map([], |row| {
            Ok((row.get(0)?, (Epoch(row.get(1)?), result_meta(row.get(2)?, row.get(3)?, row.get(4)?))))
        })?
        .collect::<Result<_, _>>()?;
    let keys = tx
        .prepare(&sql)?
        .query_map([], |row| {
            let row_of_key = key_row(row, 29)?;
            Ok(LoadedKey {
                latest_result: latest.get(&row_of_key.id).copied(),
                row: row_of_key,
                attempt: row.get::<_, Option<u64>>(0)?.map(|_| attempt(row)).transpose()?,
                previous_outcome: outcome(row.get(34)?),
                last_request: RequestId(row.get::<_, i64>(35)?.cast_unsigned()),
            })
        })?
        .collect::<Result<Vec<_>, _>>()?;
    tx.commit()?;
    Ok(Loaded { generation, namespaces, keys })
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
        note: row.get(12)?,
        outcome: row.get(13)?,
        reason: row.get(14)?,
        ended_ms: row.get(15)?,
        registered: row.get(16)?,
        result,
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
        note: Arc::from(stored.note.as_str()),
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

fn bad_value(column: usize, what: String) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(column, rusqlite::types::Type::Text, what.into())
}

pub(super) fn pragma(connection: &Connection, name: &str) -> Result<i32, Error> {
    connection.pragma_query_value(None, name, |row| row.get(0)).map_err(|e| fault(&e))
}

/// Refuses another program's file and a newer schema, before anything is written to it.
pub(super) fn check_version(connection: &Connection, path: &Path) -> Result<(), Error> {
    let version = pragma(connection, "user_version")?;
    let application = pragma(connection, "application_id")?;
    let tables: i64 =
        connection.query_row("SELECT count(*) FROM sqlite_master", [], |row| row.get(0)).map_err(|e| fault(&e))?;
    if version > SCHEMA_VERSION && application == APPLICATION_ID {
        return Err(Error::storage(
            None,
            format!(
                "{} was written by a newer leasefs (schema {version}, this one knows {SCHEMA_VERSION}): install that \
                 version, or use another --state",
                path.display()
            ),
        ));
    }
    if application != APPLICATION_ID && tables > 0 {
        return Err(Error::storage(None, format!("{} is not a leasefs registry: use another --state", path.display())));
    }
    Ok(())
}

pub(super) fn corrupt(path: &Path, what: &str) -> Error {
    Error::storage(
        None,
        format!(
            "{} is damaged ({what}): keep the file, restore a backup of the state directory, or start with another \
             --state",
            path.display()
        ),
    )
}

/// SQLite's error with the errno a client should see: a full disk is `ENOSPC`, the rest is `EIO`.
pub(super) fn fault(error: &rusqlite::Error) -> Error {
    const ENOSPC: i32 = 28;
    let errno = match error.sqlite_error_code() {
        Some(rusqlite::ErrorCode::DiskFull) => Some(ENOSPC),
        _ => None,
    };
    let message = match error.sqlite_error_code() {
        Some(rusqlite::ErrorCode::DatabaseCorrupt | rusqlite::ErrorCode::NotADatabase) => format!(
            "the registry is damaged ({error}): keep the file, restore a backup of the state directory, or start with \
             another --state"
        ),
        _ => format!("registry: {error}"),
    };
    Error::storage(errno, message)
}

/// How a second connection is opened: never creating, never taking part in a transaction of ours.
pub(super) fn reading_flags() -> OpenFlags {
    OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX
}
