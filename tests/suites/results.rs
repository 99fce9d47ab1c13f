//! Results: what each attempt writes, and whether what is found below `results/` is that, whole, and nothing else.
use std::collections::BTreeMap;
use std::fs;

use crate::common::Mount;
use crate::history::{History, Lease, Violation};
use crate::record::Op;

/// What an attempt writes: it says whose it is and how long it is.
pub fn payload(key: &str, epoch: u64, pid: u32, filler: usize) -> String {
    format!("key={key} epoch={epoch} pid={pid} filler={filler}\n{}end\n", "x".repeat(filler))
}

/// Whether a payload is whole, and that of this attempt.
fn is_payload(text: &str, key: &str, epoch: u64, pid: i32) -> bool {
    let filler = text.lines().next().and_then(|line| line.rsplit_once("filler=")?.1.parse().ok());
    filler.is_some_and(|filler| text == payload(key, epoch, pid as u32, filler))
}

/// What was found below `results/`: text of each epoch's result, by key.
pub type Results = BTreeMap<String, BTreeMap<u64, String>>;

pub fn read(mount: &Mount, keys: &[String]) -> Results {
    let mut results = Results::new();
    for key in keys {
        let found = results.entry(key.clone()).or_default();
        let dir = mount.root().join("results").join(key);
        let Ok(entries) = fs::read_dir(&dir) else {
            continue;
        };
        for entry in entries {
            let name = entry.expect("entry of a result directory").file_name().into_string().expect("UTF-8");
            if let Ok(epoch) = name.parse() {
                found.insert(epoch, fs::read_to_string(dir.join(name)).expect("a committed result can be read"));
            }
        }
        let latest = fs::read_link(dir.join("latest")).ok().map(|target| target.to_string_lossy().into_owned());
        let newest = found.keys().next_back().map(|epoch| epoch.to_string());
        assert_eq!(latest, newest, "VIOLATED I-ONE-RESULT: results/{key}/latest");
    }
    results
}

/// Every result is whole and its own attempt's; every commit that was told is there, and none that was refused or cut short.
pub fn are_their_own(history: &History, results: &Results) -> Result<usize, Violation> {
    let mut checked = 0;
    for (key, found) in results {
        let leases = history.leases.iter().filter(|lease| lease.key == *key);
        let told: BTreeMap<u64, &Lease> = leases.filter_map(|lease| Some((lease.epoch?, lease))).collect();
        let broken = |lease: Option<&&Lease>, what: String| {
            let at = lease.map_or(0, |lease| lease.end);
            Err(history.violation("I-ONE-RESULT", key, at, what))
        };
        for (epoch, text) in found {
            let lease = told.get(epoch);
            if !lease.is_some_and(|lease| is_payload(text, key, *epoch, lease.pid)) {
                let start: String = text.chars().take(80).collect();
                return broken(lease, format!("the result of epoch {epoch} is torn or another's: {start:?}"));
            }
            checked += 1;
        }
        for (epoch, lease) in &told {
            let there = found.contains_key(epoch);
            match fate(history, lease) {
                Fate::Committed if !there => {
                    return broken(Some(lease), format!("the committed result of epoch {epoch} is not there"));
                }
                Fate::Nothing if there => {
                    return broken(Some(lease), format!("epoch {epoch} has a result nobody committed"));
                }
                _ => {}
            }
        }
    }
    Ok(checked)
}

enum Fate {
    Committed,
    Nothing,
    Unknown,
}

/// What the writer knows of its result. A commit by `close` has no answer: the register check judges those.
fn fate(history: &History, lease: &Lease) -> Fate {
    let calls = || lease.calls.iter();
    let opened = calls().any(|call| matches!(call.op, Op::Draft(_)) && (call.ok() || call.answer.is_none()));
    let closed = calls().any(|call| call.op == Op::Finish);
    let in_commit = calls().any(|call| call.op == Op::Commit && call.answer.is_none());
    let refused = calls().any(|call| call.op == Op::Commit && call.lost());
    if calls().any(|call| call.op == Op::Commit && call.ok()) {
        Fate::Committed
    } else if !opened || refused || (history.runs[lease.run].killed && !closed && !in_commit) {
        Fate::Nothing
    } else {
        Fate::Unknown
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::testing::{call, with};

    fn results(texts: &[(u64, &str)]) -> Results {
        let texts = texts.iter().map(|&(epoch, text)| (epoch, text.to_owned())).collect();
        BTreeMap::from([("n/k".to_owned(), texts)])
    }

    #[test]
    fn rejects_results_that_are_torn_foreign_lost_or_never_committed() {
        let committed =
            with(&[call(Op::Draft(1), 200, Ok(0)), call(Op::Commit, 210, Ok(0)), call(Op::Finish, 220, Ok(0))]);
        let own = payload("n/k", 1, 10, 3);
        assert_eq!(are_their_own(&committed, &results(&[(1, &own)])).expect("right"), 1);
        let wrong = [
            results(&[]),
            results(&[(1, &own[..own.len() - 2])]),
            results(&[(1, "")]),
            results(&[(1, &payload("n/k", 2, 10, 3))]),
            results(&[(1, &payload("n/k", 1, 11, 3))]),
            results(&[(1, &payload("n/other", 1, 10, 3))]),
            results(&[(1, &own), (2, &payload("n/k", 2, 10, 3))]),
        ];
        for results in wrong {
            are_their_own(&committed, &results).expect_err("wrong");
        }
        let refused = with(&[call(Op::Draft(1), 200, Err(libc::ESTALE))]);
        are_their_own(&refused, &results(&[])).expect("right");
        are_their_own(&refused, &results(&[(1, &own)])).expect_err("nobody wrote it");
        let mut killed = with(&[call(Op::Draft(1), 200, Ok(0)), call(Op::Write, 210, Ok(5))]);
        killed.runs[0].killed = true;
        are_their_own(&killed, &results(&[(1, &own)])).expect_err("the writer was killed before its commit");
    }

    #[test]
    fn a_payload_is_only_that_of_its_attempt() {
        let text = payload("n/k", 7, 10, 100);
        assert!(is_payload(&text, "n/k", 7, 10));
        assert!(
            !is_payload(&text, "n/k", 8, 10) && !is_payload(&text[1..], "n/k", 7, 10) && !is_payload("", "n/k", 7, 10)
        );
    }
}
