//! The books at the end: every epoch the registry knows, against every epoch a claimer was told.
//!
//! An epoch nobody was told is only right when its claimer was killed (or lost the lease) before it could read it: each
//! such claimer accounts for one.
use std::collections::{BTreeMap, HashMap};
use std::path::Path;
use std::time::{Duration, Instant};

use rusqlite::{Connection, OpenFlags};

use crate::common::PATIENCE;
use crate::history::{History, Lease, Violation};
use crate::record::Form;

/// An attempt as the registry has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// The key.
    pub key: String,
    /// Its epoch.
    pub epoch: u64,
    /// The holder.
    pub pid: i32,
    /// How it ended; none while it lives.
    pub outcome: Option<String>,
    /// Size of its result, if it has one.
    pub result: Option<u64>,
}

/// As [`read`], once every attempt has ended in the registry too: what nobody waits for is written a moment later.
pub fn read_settled(state: &Path, namespace: &str) -> (Vec<Row>, BTreeMap<String, u64>) {
    let until = Instant::now() + PATIENCE;
    loop {
        let found = read(state, namespace);
        let live = |row: &Row| row.outcome.is_none() && !row.key.ends_with("/anchor");
        if !found.0.iter().any(live) || Instant::now() > until {
            return found;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// The attempts of the keys below a namespace, and what the key itself says is its newest epoch.
fn read(state: &Path, namespace: &str) -> (Vec<Row>, BTreeMap<String, u64>) {
    let flags = OpenFlags::SQLITE_OPEN_READ_ONLY;
    let db = Connection::open_with_flags(state.join("registry.db"), flags).expect("the registry can be read");
    let below = format!("{namespace}/%");
    let mut query = db
        .prepare(
            "SELECT path, attempts.epoch, pid, outcome, result_size FROM attempts JOIN keys ON keys.id = key_id \
             WHERE path LIKE ?1 ORDER BY path, attempts.epoch",
        )
        .expect("attempts can be queried");
    let rows = query
        .query_map([&below], |row| {
            Ok(Row {
                key: row.get(0)?,
                epoch: row.get::<_, i64>(1)? as u64,
                pid: row.get(2)?,
                outcome: row.get(3)?,
                result: row.get::<_, Option<i64>>(4)?.map(|size| size as u64),
            })
        })
        .expect("attempts can be queried");
    let rows = rows.collect::<Result<_, _>>().expect("attempts can be read");
    let mut query = db.prepare("SELECT path, epoch FROM keys WHERE path LIKE ?1").expect("keys can be queried");
    let keys =
        query.query_map([&below], |row| Ok((row.get(0)?, row.get::<_, i64>(1)? as u64))).expect("keys can be queried");
    (rows, keys.collect::<Result<_, _>>().expect("keys can be read"))
}

/// What the books say.
#[derive(Clone, Copy, Debug, Default)]
pub struct Books {
    /// Epochs.
    pub epochs: usize,
    /// Epochs nobody was told.
    pub untold: usize,
    /// Attempts whose TTL ran out.
    pub expired: usize,
    /// Attempts with a result.
    pub completed: usize,
}

/// Every key's epochs are 1..n, each told to exactly one claimer, who is the one in the registry; none is still live.
pub fn balance(history: &History, rows: &[Row], keys: &BTreeMap<String, u64>) -> Result<Books, Violation> {
    let mut books = Books::default();
    let at = |lease: &Lease| lease.granted.unwrap_or(lease.asked);
    let late = history.runs.iter().map(|run| run.gone).max().unwrap_or(0);
    let broken = |key: &str, when: u64, what: String| Err(history.violation("I-EPOCH-UNIQ", key, when, what));
    for key in history.keys() {
        let rows: Vec<&Row> = rows.iter().filter(|row| row.key == key).collect();
        for (row, expected) in rows.iter().zip(1..) {
            if row.epoch != expected {
                return broken(&key, late, format!("epoch {expected} is missing: the next one is {}", row.epoch));
            }
        }
        let newest = keys.get(&key).copied().unwrap_or(0);
        if newest != rows.len() as u64 {
            return broken(&key, late, format!("the key says epoch {newest}, its attempts end at {}", rows.len()));
        }
        let mut told: HashMap<u64, &Lease> = HashMap::new();
        let mut silent: HashMap<i32, usize> = HashMap::new();
        for lease in history.leases.iter().filter(|lease| lease.key == key && lease.form != Form::Share) {
            let Some(epoch) = lease.epoch else {
                *silent.entry(lease.pid).or_default() += 1;
                continue;
            };
            if let Some(other) = told.insert(epoch, lease) {
                let what = format!("epoch {epoch} was told to pid {} and to pid {}", other.pid, lease.pid);
                return broken(&key, at(lease), what);
            }
            match rows.get(epoch as usize - 1) {
                None => {
                    return broken(&key, at(lease), format!("epoch {epoch} was told and is not in the registry"));
                }
                Some(row) if row.pid != lease.pid => {
                    let what = format!("epoch {epoch} was told to pid {}; the registry has pid {}", lease.pid, row.pid);
                    return broken(&key, at(lease), what);
                }
                Some(_) => {}
            }
        }
        for row in &rows {
            if row.outcome.is_none() {
                return broken(&key, late, format!("epoch {} lives on after all its processes are gone", row.epoch));
            }
            books.expired += usize::from(row.outcome.as_deref() == Some("expired"));
            books.completed += usize::from(row.result.is_some());
            if !told.contains_key(&row.epoch) {
                books.untold += 1;
                match silent.get_mut(&row.pid) {
                    Some(left) if *left > 0 => *left -= 1,
                    _ => {
                        return broken(&key, late, format!("epoch {} (pid {}) was told to nobody", row.epoch, row.pid));
                    }
                }
            }
        }
        books.epochs += rows.len();
    }
    Ok(books)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::testing::{History as Made, made};

    fn rows(pids: &[i32]) -> Vec<Row> {
        let row = |(epoch, &pid)| {
            let outcome = Some("released".into());
            Row { key: "n/k".into(), epoch, pid, outcome, result: None }
        };
        (1..).zip(pids).map(row).collect()
    }

    fn judge(history: Made, rows: &[Row]) -> Result<Books, Violation> {
        balance(&history, rows, &BTreeMap::from([("n/k".to_owned(), rows.len() as u64)]))
    }

    fn broken(history: Made, rows: &[Row], what: &str) {
        let violation = judge(history, rows).expect_err("these books do not balance");
        assert!(violation.what.contains(what), "{violation}");
    }

    /// Three leases told 1, 2, 3, and one claimer killed inside its claim.
    fn four() -> Made {
        let mut history =
            made(&[(10, 1, 100, 110, 150), (11, 2, 200, 210, 250), (12, 3, 300, 310, 350), (13, 0, 400, 0, 0)]);
        history.leases[3].granted = None;
        history
    }

    #[test]
    fn accepts_books_with_and_without_the_killed_claimers_epoch() {
        assert_eq!(judge(four(), &rows(&[10, 11, 12, 13])).expect("balanced").untold, 1);
        assert_eq!(judge(four(), &rows(&[10, 11, 12])).expect("balanced").untold, 0);
    }

    #[test]
    fn rejects_gaps_repeats_and_epochs_of_nobody() {
        let mut gap = rows(&[10, 11, 12]);
        gap[1].epoch = 3;
        broken(four(), &gap, "epoch 2 is missing");
        broken(four(), &rows(&[10, 11]), "epoch 3 was told and is not in the registry");
        broken(four(), &rows(&[10, 11, 12, 14]), "epoch 4 (pid 14) was told to nobody");
        broken(four(), &rows(&[10, 11, 12, 13, 13]), "epoch 5 (pid 13) was told to nobody");
        broken(four(), &rows(&[10, 12, 12]), "the registry has pid 12");
        let mut twice = four();
        twice.leases[1].epoch = Some(1);
        broken(twice, &rows(&[10, 11, 12]), "epoch 1 was told to pid 10 and to pid 11");
        let mut live = rows(&[10, 11, 12]);
        live[2].outcome = None;
        broken(four(), &live, "lives on");
        let keys = BTreeMap::from([("n/k".to_owned(), 9)]);
        assert!(balance(&four(), &rows(&[10, 11, 12]), &keys).is_err());
    }
}
