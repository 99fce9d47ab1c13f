//! A row in SQLite for each claim, as cheaply as SQLite can: the least that a history of claims can cost.
//!
//! A thread of its own puts rows in, many at a time, and is never woken by who hands one over. Nothing is made durable.

use std::collections::HashMap;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use rusqlite::{Connection, params};

/// Between two batches.
const INTERVAL: Duration = Duration::from_millis(20);

/// A claim.
pub struct Row {
    /// Of which file
    pub key: i64,
    /// By which process
    pub pid: u32,
    /// Of which user
    pub uid: u32,
}

/// The table, and the thread that fills it.
pub struct Rows {
    sender: Sender<Row>,
    writer: JoinHandle<Result<()>>,
}

impl Rows {
    /// A new database.
    pub fn open(path: &Path) -> Result<Rows> {
        let db = Connection::open(path).with_context(|| path.display().to_string())?;
        db.execute_batch(
            "PRAGMA page_size = 4096; PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF;
            CREATE TABLE claims (key INTEGER, epoch INTEGER, pid INTEGER, uid INTEGER, PRIMARY KEY (key, epoch))
                WITHOUT ROWID;",
        )?;
        let (sender, claims) = channel();
        Ok(Rows { sender, writer: thread::spawn(move || write(db, &claims)) })
    }

    /// Where claims are handed over.
    pub fn sender(&self) -> Sender<Row> {
        self.sender.clone()
    }

    /// Ends with the last sender, and says what went wrong.
    pub fn close(self) -> Result<()> {
        drop(self.sender);
        self.writer.join().map_err(|_| anyhow!("the thread that writes rows panicked"))?
    }
}

fn write(mut db: Connection, claims: &Receiver<Row>) -> Result<()> {
    let mut epochs: HashMap<i64, u64> = HashMap::new();
    loop {
        thread::sleep(INTERVAL);
        let transaction = db.transaction()?;
        let mut insert = transaction.prepare_cached("INSERT INTO claims VALUES (?1, ?2, ?3, ?4)")?;
        let ended = loop {
            let Row { key, pid, uid } = match claims.try_recv() {
                Ok(claim) => claim,
                Err(why) => break why == TryRecvError::Disconnected,
            };
            let epoch = epochs.entry(key).or_default();
            *epoch += 1;
            insert.execute(params![key, *epoch, pid, uid])?;
        };
        drop(insert);
        transaction.commit()?;
        if ended {
            return Ok(());
        }
    }
}
