//! The connections beside the writing one: lookups while mounted, whole reads for commands, checkpoints.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rusqlite::backup::Backup;
use rusqlite::{Connection, OpenFlags, OptionalExtension, params};

use super::journal::{self, Left, plan};
use super::prune::{Bounds, Candidate, Limits, Place, Portion};
use super::seal::Seal;
use super::sqlite::{APPLICATION_ID, BUSY, FILE, SCHEMA_VERSION, bad_value, pragma, reading_flags};
use super::sqlite_fault::{corrupt, fault};
use super::sqlite_keys::{ATTEMPT_COLUMNS, attempt_row, key_row, keys};
use super::sqlite_prune;
use super::sqlite_write::{Failure, replay};
use super::{AttemptRow, Checkpoint, KeyRow, LoadedKey, Read, StoredResult, Which};
use crate::error::Error;
use crate::ids::{Epoch, KeyId};
use crate::key::Key;

/// How far a journal's records are in the registry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    /// The number of the journal's file.
    pub id: i64,
    /// The number of its newest record that is in the registry.
    pub record: u64,
}

pub(super) fn mark(connection: &Connection) -> Result<Option<Mark>, rusqlite::Error> {
    let mut query = connection.prepare_cached("SELECT value FROM meta WHERE name = 'journal'")?;
    let text: Option<String> = query.query([])?.next()?.map(|row| row.get(0)).transpose()?;
    let parse = |text: &str| {
        let (id, record) = text.split_once(' ')?;
        Some(Mark { id: id.parse().ok()?, record: record.parse().ok()? })
    };
    text.map(|text| parse(&text).ok_or_else(|| bad_value(0, format!("meta journal {text:?}")))).transpose()
}

/// Lookups of idle keys and ended attempts by the server.
pub(super) struct SqliteRead(Connection);

impl SqliteRead {
    pub(super) fn open(path: &Path) -> Result<SqliteRead, Error> {
        let connection = Connection::open_with_flags(path, reading_flags()).map_err(|e| fault(&e))?;
        connection.busy_timeout(BUSY).map_err(|e| fault(&e))?;
        Ok(SqliteRead(connection))
    }
}

impl Read for SqliteRead {
    fn result(&mut self, key: KeyId, epoch: Epoch) -> Result<Option<StoredResult>, Error> {
        let sql = "SELECT result_size, result_ms, uid FROM attempts \
                   WHERE key_id = ?1 AND epoch = ?2 AND result_ms IS NOT NULL";
        one(&self.0, sql, params![key.0, epoch.0], |row| {
            Ok(StoredResult { size: row.get(0)?, committed_ms: row.get(1)?, uid: row.get(2)? })
        })
    }

    fn results(&mut self, key: KeyId, after: Epoch, limit: usize) -> Result<Vec<Epoch>, Error> {
        let read = || {
            self.0
                .prepare_cached(
                    "SELECT epoch FROM attempts WHERE key_id = ?1 AND epoch > ?2 AND result_ms IS NOT NULL \
                     ORDER BY epoch LIMIT ?3",
                )?
                .query_map(params![key.0, after.0, limit], |row| row.get(0).map(Epoch))?
                .collect::<Result<Vec<_>, _>>()
        };
        read().map_err(|e: rusqlite::Error| fault(&e))
    }

    fn keys(&mut self, which: Which<'_>) -> Result<Vec<LoadedKey>, Error> {
        keys(&self.0, which).map_err(|e| fault(&e))
    }

    fn prunable(&mut self, after: Place, bounds: &Bounds, limits: Limits) -> Result<Portion, Error> {
        sqlite_prune::prunable(&self.0, after, bounds, limits).map_err(|e| fault(&e))
    }

    fn pruned_files(&mut self) -> Result<Vec<(KeyId, Epoch)>, Error> {
        sqlite_prune::pruned_files(&self.0).map_err(|e| fault(&e))
    }
}

fn one<T>(
    connection: &Connection,
    sql: &str,
    params: impl rusqlite::Params,
    read: impl FnOnce(&rusqlite::Row<'_>) -> Result<T, rusqlite::Error>,
) -> Result<Option<T>, Error> {
    let mut query = connection.prepare_cached(sql).map_err(|e| fault(&e))?;
    let mut rows = query.query(params).map_err(|e| fault(&e))?;
    rows.next().and_then(|row| row.map(read).transpose()).map_err(|e| fault(&e))
}

/// Checkpoints off the claim path.
pub(super) struct SqliteCheckpoint(Connection, Seal);

impl SqliteCheckpoint {
    pub(super) fn open(path: &Path, seal: Seal) -> Result<SqliteCheckpoint, Error> {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(path, flags).map_err(|e| fault(&e))?;
        connection.pragma_update(None, "wal_autocheckpoint", 0).map_err(|e| fault(&e))?;
        connection.pragma_update(None, "synchronous", "NORMAL").map_err(|e| fault(&e))?;
        connection.busy_timeout(BUSY).map_err(|e| fault(&e))?;
        Ok(SqliteCheckpoint(connection, seal))
    }
}

impl Checkpoint for SqliteCheckpoint {
    fn run(&mut self) -> Result<(), Error> {
        self.0.query_row("PRAGMA wal_checkpoint(PASSIVE)", [], |_| Ok(())).map_err(|e| fault(&e))?;
        // What the main file has now would pass for everything, were the log lost.
        self.1.advance(&self.0)
    }
}

fn open_read_only(path: &Path) -> Result<Connection, Error> {
    if let Err(error) = std::fs::metadata(path) {
        return Err(Error::storage(error.raw_os_error(), format!("{}: {error}", path.display())));
    }
    let connection = Connection::open_with_flags(path, reading_flags()).map_err(|e| fault(&e))?;
    connection.busy_timeout(BUSY).map_err(|e| fault(&e))?;
    check_version(&connection, path)?;
    Ok(connection)
}

/// Whether this program could serve the registry of a state directory, be it by bringing it up to date first.
///
/// # Errors
/// [`Error::Storage`] with why not.
pub fn can_serve(state_dir: &Path) -> Result<(), Error> {
    open_read_only(&state_dir.join(FILE)).map(drop)
}

/// Reads a whole registry, also while it is served, and never writes to it.
///
/// What is in the journal only is shown too: then it reads a copy in memory, to which that was applied.
pub struct Reader {
    file: Connection,
    copy: Option<Connection>,
    path: PathBuf,
}

impl Reader {
    /// Opens the registry of a state directory.
    ///
    /// # Errors
    /// [`Error::Storage`] where there is none, it cannot be read, or it is not of a version this program knows.
    pub fn open(state_dir: &Path) -> Result<Reader, Error> {
        let path = state_dir.join(FILE);
        // Read before the database: what is applied in between counts as applied.
        let left = journal::read(state_dir)?;
        let file = open_read_only(&path)?;
        let version = pragma(&file, "user_version")?;
        if version < SCHEMA_VERSION {
            let path = path.display();
            let message = format!(
                "{path} was written by an older leasefs (schema {version}): mount it once, which brings it up to date"
            );
            return Err(Error::storage(None, message));
        }
        let mut copy = None;
        if let Some(left) = left
            && !left.is_in(mark(&file).map_err(|e| fault(&e))?)
        {
            copy = Some(with_journal(&file, left)?);
        }
        Ok(Reader { file, copy, path })
    }

    fn view(&self) -> &Connection {
        self.copy.as_ref().unwrap_or(&self.file)
    }

    /// Reads keys and attempts as of one moment.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub fn snapshot(&self) -> Result<(Vec<KeyRow>, Vec<AttemptRow>), Error> {
        let read = || {
            let tx = self.view().unchecked_transaction()?;
            let keys = tx
                .prepare("SELECT id, path, epoch, finished, pruned, pruned_attempts FROM keys ORDER BY path")?
                .query_map([], |row| key_row(row, 0))?
                .collect::<Result<_, _>>()?;
            let attempts = tx
                .prepare(&format!("SELECT {ATTEMPT_COLUMNS} FROM attempts a ORDER BY a.key_id, a.epoch"))?
                .query_map([], attempt_row)?
                .collect::<Result<_, _>>()?;
            Ok((keys, attempts))
        };
        read().map_err(|e: rusqlite::Error| fault(&e))
    }

    /// Every key.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub fn keys(&self) -> Result<Vec<KeyRow>, Error> {
        self.snapshot().map(|(keys, _)| keys)
    }

    /// Every attempt.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub fn attempts(&self) -> Result<Vec<AttemptRow>, Error> {
        self.snapshot().map(|(_, attempts)| attempts)
    }

    /// The attempts of a key, oldest first; empty for a key that never was.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub fn history(&self, key: &Key) -> Result<Vec<AttemptRow>, Error> {
        let read = || {
            self.view()
                .prepare(&format!(
                    "SELECT {ATTEMPT_COLUMNS} FROM attempts a JOIN keys k ON k.id = a.key_id WHERE k.path = ?1 \
                     ORDER BY a.epoch"
                ))?
                .query_map([key.as_str()], attempt_row)?
                .collect::<Result<Vec<_>, _>>()
        };
        read().map_err(|e: rusqlite::Error| fault(&e))
    }

    /// A key's row; none for a key that never was.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub fn key(&self, key: &Key) -> Result<Option<KeyRow>, Error> {
        let sql = "SELECT id, path, epoch, finished, pruned, pruned_attempts FROM keys WHERE path = ?1";
        one(self.view(), sql, [key.as_str()], |row| key_row(row, 0))
    }

    /// All that may be pruned, as of one moment, in the order of key numbers and epochs.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub fn prunable(&self, bounds: &Bounds) -> Result<Vec<Candidate>, Error> {
        let everything = Limits { candidates: i64::MAX as usize, keys: i64::MAX as usize };
        let read = || {
            let tx = self.view().unchecked_transaction()?;
            sqlite_prune::prunable(&tx, Place::default(), bounds, everything)
        };
        read().map(|portion| portion.candidates).map_err(|e: rusqlite::Error| fault(&e))
    }

    /// Copies the registry as of one moment to a file that is not there yet, also while it is served.
    ///
    /// # Errors
    /// [`Error::Storage`], also where the registry is damaged: a copy of that would be no backup.
    pub fn copy_to(&self, path: &Path) -> Result<(), Error> {
        self.check_seal()?;
        let mut copy = Connection::open(path).map_err(|e| fault(&e))?;
        // All of it in one step, which is one read transaction: in WAL mode nobody waits for it.
        Backup::new(self.view(), &mut copy).and_then(|backup| backup.step(-1)).map_err(|e| fault(&e))?;
        // Put over a registry that went on, it is found to be older.
        copy.execute("DELETE FROM meta WHERE name = 'seal'", []).map_err(|e| fault(&e))?;
        // A single file, with nothing beside it to be forgotten.
        copy.pragma_update(None, "journal_mode", "delete").map_err(|e| fault(&e))?;
        match problems(&copy, "integrity_check").map_err(|e| fault(&e))?.first() {
            Some(first) => Err(corrupt(&self.path, first)),
            None => Ok(()),
        }
    }

    /// What SQLite's own integrity check finds wrong with the file, and whether it is older than the directory's newest.
    ///
    /// # Errors
    /// [`Error::Storage`] where it is too damaged to be checked.
    pub fn integrity(&self) -> Result<Vec<String>, Error> {
        let mut found = problems(&self.file, "integrity_check").map_err(|e| fault(&e))?;
        found.extend(self.check_seal().err().map(|error| error.to_string()));
        Ok(found)
    }

    /// Whether it is all that this state directory has had.
    fn check_seal(&self) -> Result<(), Error> {
        Seal::of(self.path.parent().unwrap_or(Path::new("."))).check(&self.file, &self.path)
    }
}

/// A copy in memory of all that is in the database and the journal.
fn with_journal(file: &Connection, left: Left) -> Result<Connection, Error> {
    let copy = || {
        let mut copy = Connection::open_in_memory()?;
        Backup::new(file, &mut copy)?.run_to_completion(i32::MAX, Duration::ZERO, None)?;
        Ok(copy)
    };
    let copy = copy().map_err(|e: rusqlite::Error| fault(&e))?;
    let writes = left.after(mark(&copy).map_err(|e| fault(&e))?)?;
    replay(&copy, &plan(writes.iter())?, None).map_err(Failure::into_error)?;
    Ok(copy)
}

/// Runs `quick_check` or `integrity_check`; empty when the file is sound.
pub(super) fn problems(connection: &Connection, check: &str) -> Result<Vec<String>, rusqlite::Error> {
    let mut found = Vec::new();
    connection.pragma_query(None, check, |row| {
        found.push(row.get::<_, String>(0)?);
        Ok(())
    })?;
    found.retain(|line| line != "ok");
    Ok(found)
}

/// What no check of the file's form can see: a key whose count is not that of its attempts. It would skip or repeat
/// epochs.
pub(super) fn miscounted(connection: &Connection) -> Result<Option<String>, rusqlite::Error> {
    connection
        .query_row(
            "SELECT path FROM keys k WHERE epoch <> coalesce( \
             (SELECT max(epoch) FROM attempts a WHERE a.key_id = k.id), 0) LIMIT 1",
            [],
            |row| Ok(format!("the epoch of key {:?} is not that of its newest attempt", row.get::<_, String>(0)?)),
        )
        .optional()
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
