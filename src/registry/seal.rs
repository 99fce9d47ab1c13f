//! The mark of what a state directory has had, so that a lost or older registry is not taken for the present one.
//!
//! SQLite makes a database where there is none, and reads one whose log is gone or unreadable as it was before that log.
//! Both would give epochs out again. So a number in the registry goes up with every start and every checkpoint, and a
//! file of its own says how far it has come. The file follows the registry: it is written once the log with that number
//! is synced, so no crash makes it ask for too much. A number that a checkpoint has moved into the main file is followed
//! at once by the next, so that the newest is in the log alone.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rusqlite::{Connection, OptionalExtension};

use super::sqlite_fault::{corrupt, fault, lost};
use crate::error::Error;

/// File name in the state directory.
const FILE: &str = "seal";
const SELECT: &str = "SELECT value FROM meta WHERE name = 'seal'";

/// The mark of one state directory.
#[derive(Clone)]
pub(super) struct Seal {
    dir: PathBuf,
}

impl Seal {
    pub fn of(state_dir: &Path) -> Seal {
        Seal { dir: state_dir.to_owned() }
    }

    /// Raises the number: in the registry, synced, then in the file.
    pub fn advance(&self, connection: &Connection) -> Result<(), Error> {
        let raise = || -> Result<u64, rusqlite::Error> {
            let before: String =
                connection.pragma_query_value(None, "synchronous", |row| Ok(row.get::<_, i64>(0)?.to_string()))?;
            connection.pragma_update(None, "synchronous", "FULL")?;
            let raised = raise_in(connection);
            connection.execute_batch(&format!("PRAGMA synchronous = {before}"))?;
            raised
        };
        let number = raise().map_err(|e| fault(&e))?;
        self.write(number).map_err(|error| self.trouble(&error))
    }

    /// Written over in place, always as long: a crash leaves one or the other, and it needs no space.
    fn write(&self, number: u64) -> io::Result<()> {
        let path = self.dir.join(FILE);
        let is_new = !path.exists();
        let mut file = OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(path)?;
        file.write_all(format!("{number:020}\n").as_bytes())?;
        file.sync_all()?;
        if is_new { File::open(&self.dir)?.sync_all() } else { Ok(()) }
    }

    /// Refuses a missing registry, and a log that is none.
    pub fn check_files(&self, registry: &Path) -> Result<(), Error> {
        if fs::metadata(registry).map_or(0, |meta| meta.len()) == 0 {
            return self.check_new(registry);
        }
        if !self.is_set() {
            // A first start that was cut off may leave anything, and nobody was told of anything.
            return Ok(());
        }
        let log = log_of(registry);
        match is_log(&log) {
            Ok(true) => Ok(()),
            Ok(false) => Err(corrupt(&log, "its header is not that of a log")),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(Error::storage(error.raw_os_error(), format!("{}: {error}", log.display()))),
        }
    }

    /// Refuses to make a registry where there was one.
    pub fn check_new(&self, registry: &Path) -> Result<(), Error> {
        let has_results = fs::read_dir(self.dir.join("results")).is_ok_and(|mut files| files.next().is_some());
        if self.is_set() || has_results {
            return Err(lost(registry, "it is missing or empty, and this state directory has been in use"));
        }
        Ok(())
    }

    /// Refuses a registry that is older than the one this directory had: put in its place, or without its log.
    pub fn check(&self, connection: &Connection, registry: &Path) -> Result<(), Error> {
        let had = fs::read_to_string(self.dir.join(FILE)).ok().and_then(|text| text.trim().parse::<u64>().ok());
        let has: Option<u64> = connection.query_row(SELECT, [], |row| row.get(0)).optional().map_err(|e| fault(&e))?;
        if has.unwrap_or(0) < had.unwrap_or(0) {
            return Err(lost(registry, "it is older than the one this state directory had, or its log is missing"));
        }
        Ok(())
    }

    fn is_set(&self) -> bool {
        self.dir.join(FILE).exists()
    }

    fn trouble(&self, error: &io::Error) -> Error {
        Error::storage(error.raw_os_error(), format!("{}: {error}", self.dir.join(FILE).display()))
    }
}

/// The number after this one, once it is in the registry. It is told before that: only the end of the statement commits, and
/// on a full disk it fails.
fn raise_in(connection: &Connection) -> Result<u64, rusqlite::Error> {
    let mut raise = connection.prepare(
        "INSERT INTO meta(name, value) VALUES ('seal', 1) ON CONFLICT(name) DO UPDATE SET value = value + 1 \
         RETURNING value",
    )?;
    let mut rows = raise.query([])?;
    let number = rows.next()?.ok_or(rusqlite::Error::QueryReturnedNoRows)?.get(0)?;
    while rows.next()?.is_some() {}
    Ok(number)
}

fn log_of(registry: &Path) -> PathBuf {
    let mut path = registry.as_os_str().to_owned();
    path.push("-wal");
    PathBuf::from(path)
}

/// Whether a file begins as SQLite's logs do (its file format, 4.1). The header is synced before anything follows it, so
/// no crash leaves another; SQLite would ignore such a log, and with it all that it holds.
fn is_log(path: &Path) -> io::Result<bool> {
    const HEADER_BYTES: usize = 32;
    let mut header = [0; HEADER_BYTES];
    let mut file = File::open(path)?;
    if file.metadata()?.len() <= HEADER_BYTES as u64 {
        // Nothing follows it yet.
        return Ok(true);
    }
    file.read_exact(&mut header)?;
    let word = |at: usize, big: bool| {
        let bytes = [header[at], header[at + 1], header[at + 2], header[at + 3]];
        if big { u32::from_be_bytes(bytes) } else { u32::from_le_bytes(bytes) }
    };
    let magic = word(0, true);
    if magic & !1 != 0x377f_0682 {
        return Ok(false);
    }
    let big = magic & 1 == 1;
    let (mut first, mut second) = (0_u32, 0_u32);
    for at in (0..24).step_by(8) {
        first = first.wrapping_add(word(at, big)).wrapping_add(second);
        second = second.wrapping_add(word(at + 4, big)).wrapping_add(first);
    }
    Ok((first, second) == (word(24, true), word(28, true)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_whose_commit_fails_is_not_in_the_file() {
        let dir = tempfile::tempdir().expect("a directory");
        let (seal, path) = (Seal::of(dir.path()), dir.path().join("registry.db"));
        let db = Connection::open(&path).expect("a database");
        db.execute_batch("CREATE TABLE meta(name TEXT PRIMARY KEY, value) WITHOUT ROWID").expect("SQL");
        seal.advance(&db).expect("it can be written");
        // What refuses the commit and not the statement before it, as a full disk does.
        db.execute_batch(
            "PRAGMA foreign_keys = ON; CREATE TABLE parent(id INTEGER PRIMARY KEY); \
             CREATE TABLE child(id REFERENCES parent DEFERRABLE INITIALLY DEFERRED); \
             CREATE TRIGGER fails AFTER UPDATE ON meta BEGIN INSERT INTO child VALUES (7); END",
        )
        .expect("SQL");
        seal.advance(&db).expect_err("the commit fails");
        seal.check(&db, &path).expect("the registry is as new as the file says");
        db.execute_batch("DROP TRIGGER fails").expect("SQL");
        seal.advance(&db).expect("it can be written again");
        assert_eq!(fs::read_to_string(dir.path().join(FILE)).expect("a number").trim(), format!("{:020}", 2));
    }
}
