//! The registry in SQLite: the embedded default.
//!
//! WAL, so that readers (`leasefs verify`, `history`) never wait and never make the server wait. `synchronous` is FULL
//! for a batch that must survive a power cut and NORMAL for the rest, which survives the end of the process all the
//! same. Checkpoints run on a connection of their own and leave the log its size, so that it is written over: syncing a
//! file that grows costs twice as much.

use std::path::{Path, PathBuf};

use rusqlite::{Connection, OpenFlags, TransactionBehavior, params};

use super::coalesce::Op;
use super::prune::{Candidate, Pruned};
use super::seal::Seal;
pub use super::sqlite_fault::REMEDY;
use super::sqlite_fault::{corrupt, fault};
use super::sqlite_keys::{keys, with_shares};
use super::sqlite_prune::{self, FILES};
use super::sqlite_read::{Mark, SqliteCheckpoint, SqliteRead, check_version, mark};
pub use super::sqlite_read::{Reader, can_serve};
use super::sqlite_write::{Failure, replay};
use super::{Checkpoint, Loaded, NamespaceRow, Read, Registry, Which, Write};
use crate::error::Error;
use crate::ids::{Epoch, KeyId, NamespaceId, RequestId};
use crate::time::Now;

/// File name in the state directory.
pub const FILE: &str = "registry.db";
/// `Leas`: tells the file from other SQLite databases.
pub(super) const APPLICATION_ID: i32 = 0x4c65_6173;
/// Raised with every change of the schema.
pub const SCHEMA_VERSION: i32 = 3;
/// A claim changes two or three pages, each of which goes to the log whole: small ones make it a third cheaper than
/// SQLite's default of 4096.
const PAGE_BYTES: u32 = 1024;
/// The inline part of a checkpoint runs after this many commits, on what the other connection left over.
const COMMITS_PER_CHECKPOINT: u32 = 2_000;

/// How long another connection's lock is waited for: they are held for milliseconds.
pub(super) const BUSY: std::time::Duration = std::time::Duration::from_secs(5);

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
    request INTEGER NOT NULL DEFAULT 0, pruned_attempts INTEGER NOT NULL DEFAULT 0);
CREATE TABLE attempts(
    key_id INTEGER NOT NULL, epoch INTEGER NOT NULL,
    pid INTEGER NOT NULL, start_time INTEGER NOT NULL, uid INTEGER NOT NULL, gid INTEGER NOT NULL,
    command TEXT NOT NULL, opener_pid INTEGER NOT NULL, opener_start INTEGER NOT NULL,
    locker_pid INTEGER NOT NULL, locker_start INTEGER NOT NULL,
    via TEXT NOT NULL, since_ms INTEGER NOT NULL, renewed_ms INTEGER NOT NULL, expires_ms INTEGER NOT NULL,
    ttl_ms INTEGER NOT NULL, deadline_ns INTEGER NOT NULL, handle INTEGER NOT NULL, owners BLOB NOT NULL,
    request INTEGER NOT NULL, note TEXT NOT NULL, held INTEGER NOT NULL, registered INTEGER NOT NULL,
    outcome TEXT, reason TEXT, ended_ms INTEGER, result_size INTEGER, result_ms INTEGER,
    result_draft INTEGER, waited_ms INTEGER NOT NULL DEFAULT 0, agent TEXT,
    result_pruned INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY(key_id, epoch)) WITHOUT ROWID;
CREATE INDEX committed ON attempts(key_id, epoch) WHERE result_ms IS NOT NULL;
CREATE INDEX alive ON attempts(key_id) WHERE ended_ms IS NULL;
";

/// Shared locks, so that they outlive the connection as leases do.
const SHARES: &str = "
CREATE TABLE shares(
    key_id INTEGER NOT NULL, handle INTEGER NOT NULL, owner INTEGER NOT NULL,
    pid INTEGER NOT NULL, start_time INTEGER NOT NULL, uid INTEGER NOT NULL, gid INTEGER NOT NULL,
    command TEXT NOT NULL, opener_pid INTEGER NOT NULL, opener_start INTEGER NOT NULL,
    locker_pid INTEGER NOT NULL, locker_start INTEGER NOT NULL, ttl_ms INTEGER NOT NULL, until_ns INTEGER,
    PRIMARY KEY(key_id, handle, owner)) WITHOUT ROWID;
";

/// From schema 1: no lease outlives the server of that version, so what it did not keep is nobody's.
const MIGRATE_1: &str = "
ALTER TABLE namespaces ADD COLUMN request INTEGER NOT NULL DEFAULT 0;
ALTER TABLE keys ADD COLUMN request INTEGER NOT NULL DEFAULT 0;
ALTER TABLE attempts DROP COLUMN owner;
ALTER TABLE attempts ADD COLUMN owners BLOB NOT NULL DEFAULT x'';
ALTER TABLE attempts RENAME COLUMN req_unique TO request;
ALTER TABLE attempts ADD COLUMN result_draft INTEGER;
CREATE INDEX alive ON attempts(key_id) WHERE ended_ms IS NULL;
";

/// From schema 2: nobody had an agent, and nothing was pruned yet.
const MIGRATE_2: &str = "
ALTER TABLE attempts ADD COLUMN waited_ms INTEGER NOT NULL DEFAULT 0;
ALTER TABLE attempts ADD COLUMN agent TEXT;
ALTER TABLE keys ADD COLUMN pruned_attempts INTEGER NOT NULL DEFAULT 0;
ALTER TABLE attempts ADD COLUMN result_pruned INTEGER NOT NULL DEFAULT 0;
";

/// The writing connection.
pub struct SqliteRegistry {
    connection: Connection,
    path: PathBuf,
    seal: Seal,
    full_sync: bool,
    commits: u32,
    /// The kernel reported a fault of the device. What it had not written yet it may have given up, so the log on disk
    /// may have a hole that no later sync fills.
    sync_failed: bool,
}

/// How closely a registry is looked at before it is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// All of it, for a mount: as long as it takes to read it.
    Full,
    /// Its header and its log's, for a server that takes over from one that had it open a moment ago.
    Quick,
}

impl SqliteRegistry {
    /// Opens the registry in a state directory, or makes one where there never was any.
    ///
    /// # Errors
    /// [`Error::Storage`] with what to do: a newer version, another program's file, a lost or corrupt file, a disk fault.
    pub fn open(state_dir: &Path, check: Check) -> Result<SqliteRegistry, Error> {
        let path = state_dir.join(FILE);
        let seal = Seal::of(state_dir);
        seal.check_files(&path)?;
        let mut connection = Connection::open(&path).map_err(|e| fault(&e))?;
        let setup = |connection: &mut Connection| -> Result<(), rusqlite::Error> {
            connection.pragma_update(None, "page_size", PAGE_BYTES)?;
            connection.pragma_update(None, "journal_mode", "wal")?;
            connection.pragma_update(None, "wal_autocheckpoint", 0)?;
            connection.pragma_update(None, "synchronous", "NORMAL")?;
            connection.busy_timeout(BUSY)?;
            connection.set_prepared_statement_cache_capacity(64);
            Ok(())
        };
        check_version(&connection, &path)?;
        let version: i32 = pragma(&connection, "user_version")?;
        if version == 0 {
            // A file without tables is as good as none.
            seal.check_new(&path)?;
        } else {
            seal.check(&connection, &path)?;
        }
        setup(&mut connection).map_err(|e| fault(&e))?;
        if version < SCHEMA_VERSION {
            let steps: &[&str] = match version {
                0 => &[SCHEMA, SHARES, FILES],
                1 => &[MIGRATE_1, SHARES, MIGRATE_2, FILES],
                _ => &[MIGRATE_2, FILES],
            };
            let migrate = connection.transaction_with_behavior(TransactionBehavior::Immediate).and_then(|tx| {
                steps.iter().try_for_each(|step| tx.execute_batch(step))?;
                crate::probe::at(crate::probe::MIGRATION);
                tx.pragma_update(None, "application_id", APPLICATION_ID)?;
                tx.pragma_update(None, "user_version", SCHEMA_VERSION)?;
                tx.commit()
            });
            migrate.map_err(|e| fault(&e))?;
        }
        if check == Check::Full {
            let problems = super::sqlite_read::problems(&connection, "integrity_check").map_err(|e| fault(&e))?;
            if let Some(first) =
                problems.first().or(super::sqlite_read::miscounted(&connection).map_err(|e| fault(&e))?.as_ref())
            {
                return Err(corrupt(&path, first));
            }
        }
        Ok(SqliteRegistry { connection, path, seal, full_sync: false, commits: 0, sync_failed: false })
    }

    fn set_sync(&mut self, full: bool) -> Result<(), rusqlite::Error> {
        if self.full_sync != full {
            self.connection.pragma_update(None, "synchronous", if full { "FULL" } else { "NORMAL" })?;
            self.full_sync = full;
        }
        Ok(())
    }

    /// Does all of it as one transaction, and notes how far a journal is in the registry with it.
    pub(super) fn record(&mut self, ops: &[Op<'_>], mark: Option<Mark>, durable: bool) -> Result<(), Error> {
        self.in_one(durable, |connection| replay(connection, ops, mark))
    }

    /// Does all of it as one transaction, or nothing.
    fn in_one<T>(&mut self, durable: bool, write: impl FnOnce(&Connection) -> Result<T, Failure>) -> Result<T, Error> {
        self.try_in_one(durable, write).map_err(|failure| {
            if let Failure::Sqlite(error) = &failure {
                self.sync_failed |= error.sqlite_error_code() == Some(rusqlite::ErrorCode::SystemIoFailure);
            }
            failure.into_error()
        })
    }

    /// How far the journal is in the registry; none where there never was one.
    pub(super) fn mark(&self) -> Result<Option<Mark>, Error> {
        mark(&self.connection).map_err(|e| fault(&e))
    }

    /// A number that no other call gives.
    pub(super) fn random(&self) -> Result<i64, Error> {
        self.connection.query_row("SELECT random()", [], |row| row.get(0)).map_err(|e| fault(&e))
    }

    /// After a fault of the device: moves the log into the main file, synced, and begins a new one. Nothing is recorded
    /// before that succeeds, for it would be behind a hole in the old one.
    fn renew_log(&mut self) -> Result<(), Failure> {
        self.set_sync(true)?;
        // Whoever reads the log now is not waited for: the next commit tries again.
        self.connection.busy_timeout(std::time::Duration::ZERO)?;
        let busy = self.connection.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| row.get::<_, bool>(0));
        self.connection.busy_timeout(BUSY)?;
        if busy? {
            return Err(Failure::Mismatch(
                "the log cannot be renewed after a fault of the disk: somebody reads it".into(),
            ));
        }
        self.sync_failed = false;
        Ok(())
    }

    fn try_in_one<T>(
        &mut self,
        durable: bool,
        write: impl FnOnce(&Connection) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        if self.sync_failed {
            self.renew_log()?;
        }
        self.set_sync(durable)?;
        // Where taking the last one back failed too, it is taken back now.
        if !self.connection.is_autocommit() {
            self.connection.execute_batch("ROLLBACK")?;
        }
        // A transaction object would have these two parsed anew every time.
        self.connection.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        let written = write(&self.connection);
        let committed = written.and_then(|written| {
            self.connection.prepare_cached("COMMIT")?.execute([])?;
            Ok(written)
        });
        let written = match committed {
            Ok(written) => written,
            Err(failure) => {
                if !self.connection.is_autocommit() {
                    self.connection.execute_batch("ROLLBACK")?;
                }
                return Err(failure);
            }
        };
        self.commits += 1;
        if self.commits >= COMMITS_PER_CHECKPOINT {
            self.commits = 0;
            // What the other connection left over; a failure costs only log space.
            let _ = self.connection.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(()));
        }
        Ok(written)
    }
}

impl Registry for SqliteRegistry {
    fn load(&mut self, boot_id: &str, now: Now) -> Result<Loaded, Error> {
        let loaded = load(&mut self.connection, boot_id, now).map_err(|e| fault(&e))?;
        // From here on a start with less than this is refused.
        self.seal.advance(&self.connection)?;
        Ok(loaded)
    }

    fn commit(&mut self, writes: &[Write], durable: bool) -> Result<(), Error> {
        let ops: Vec<_> = writes.iter().map(Op::One).collect();
        self.record(&ops, None, durable)
    }

    fn prune(&mut self, candidates: &[Candidate], files_gone: &[(KeyId, Epoch)]) -> Result<Vec<Pruned>, Error> {
        // Synced in any case: a row that came back with the power would have no file.
        self.in_one(true, |tx| {
            sqlite_prune::forget_files(tx, files_gone)?;
            sqlite_prune::prune(tx, candidates)
        })
    }

    fn reader(&self) -> Result<Box<dyn Read>, Error> {
        Ok(Box::new(SqliteRead::open(&self.path)?))
    }

    fn checkpointer(&self) -> Result<Box<dyn Checkpoint>, Error> {
        Ok(Box::new(SqliteCheckpoint::open(&self.path, self.seal.clone())?))
    }
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
        tx.execute("DELETE FROM shares", [])?;
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
    let keys = with_shares(&tx, keys(&tx, Which::Alive)?)?;
    let last_key = tx.query_row("SELECT coalesce(max(id), 0) FROM keys", [], |row| row.get(0)).map(KeyId)?;
    tx.commit()?;
    Ok(Loaded { generation, namespaces, keys, last_key })
}

pub(super) fn bad_value(column: usize, what: String) -> rusqlite::Error {
    rusqlite::Error::FromSqlConversionFailure(column, rusqlite::types::Type::Text, what.into())
}

pub(super) fn pragma(connection: &Connection, name: &str) -> Result<i32, Error> {
    connection.pragma_query_value(None, name, |row| row.get(0)).map_err(|e| fault(&e))
}

/// How a second connection is opened: never creating, never taking part in a transaction of ours.
pub(super) fn reading_flags() -> OpenFlags {
    OpenFlags::SQLITE_OPEN_READ_ONLY | OpenFlags::SQLITE_OPEN_NO_MUTEX
}
