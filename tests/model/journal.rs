//! The journal alone: what it accepted is in the registry in the end, once, wherever the server was killed, whatever the
//! end of its file looks like, and whatever else lies where the file should be.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use leasefs::machine::{Attempt, Outcome, Via};
use leasefs::registry::journal::Journal;
use leasefs::registry::sqlite::{Check, Reader, SqliteRegistry};
use leasefs::registry::{AttemptRow, Backlog, KeyRow, Registry, Write};
use leasefs::{Epoch, Error, Handle, Key, KeyId};
use parking_lot::Mutex;
use proptest::prelude::*;
use rusqlite::Connection;
use rusqlite::types::Value;
use tempfile::TempDir;

use crate::check;
use crate::game::{Game, turn};
use crate::players::{claimant, moment, ttl};
use crate::rig::{image, new_dir};

/// Where the first segment begins, how long one is, and what comes before a record's payload: as in the file's format.
const FIRST_SEGMENT: usize = 4096;
const SEGMENT_BYTES: usize = 2 << 20;
const HEAD_BYTES: usize = 16;

type Rows = Vec<Vec<Value>>;

/// Every row and column of what the registry holds.
fn dump(dir: &Path) -> [Rows; 4] {
    let db = Connection::open(dir.join("registry.db")).expect("registry");
    let shares = "shares ORDER BY key_id, handle, owner";
    ["namespaces ORDER BY id", "keys ORDER BY id", "attempts ORDER BY key_id, epoch", shares].map(|table| {
        let mut query = db.prepare(&format!("SELECT * FROM {table}")).expect("a table");
        let columns = query.column_count();
        let rows = query.query_map([], |row| (0..columns).map(|at| row.get(at)).collect()).expect("a table");
        rows.collect::<Result<_, _>>().expect("rows")
    })
}

type Shown = (Vec<KeyRow>, Vec<AttemptRow>);

fn shown(dir: &Path) -> Shown {
    Reader::open(dir).and_then(|reader| reader.snapshot()).expect("the registry can be read")
}

/// What an engine commits in a random game.
fn commits(turns: &[crate::game::Turn]) -> Vec<Vec<Write>> {
    let game = Arc::new(Mutex::new(Game::new()));
    for turn in turns {
        Game::take(&game, turn);
    }
    Game::settle(&game);
    game.lock().rig().orders.recorded()
}

/// What the registry shows after each of the commits, without a journal.
fn direct(commits: &[Vec<Write>]) -> (TempDir, Vec<Shown>) {
    let dir = new_dir();
    let mut registry = SqliteRegistry::open(dir.path(), Check::Full).expect("registry");
    let mut after = vec![shown(dir.path())];
    for writes in commits {
        registry.commit(writes, false).expect("the engine's writes fit");
        after.push(shown(dir.path()));
    }
    (dir, after)
}

/// What a server is killed with that has only written its journal.
fn journaled(commits: &[Vec<Write>]) -> TempDir {
    let dir = new_dir();
    let mut journal = Journal::open(dir.path(), Check::Full).expect("registry");
    for writes in commits {
        journal.commit(writes, false).expect("there is room");
    }
    image(dir.path())
}

fn open_and_close(dir: &Path) {
    drop(Journal::open(dir, Check::Full).expect("it starts"));
}

#[derive(Clone, Copy, Debug)]
enum Meanwhile {
    Nothing,
    Apply,
    Kill,
    /// The next commit is durable.
    Durable,
}

#[test]
fn the_registry_holds_the_same_as_without_a_journal() {
    let meanwhile = || {
        prop_oneof![
            6 => Just(Meanwhile::Nothing), 1 => Just(Meanwhile::Apply),
            1 => Just(Meanwhile::Kill), 1 => Just(Meanwhile::Durable)
        ]
    };
    let inputs = (prop::collection::vec(turn(true), 1..=60), prop::collection::vec(meanwhile(), 1..=20));
    check(300, inputs, |(turns, meanwhile)| {
        let commits = commits(&turns);
        let (plain, after) = direct(&commits);
        let mut dir = new_dir();
        let mut journal = Journal::open(dir.path(), Check::Full).expect("registry");
        for ((writes, meanwhile), expected) in commits.iter().zip(meanwhile.iter().cycle()).zip(&after[1..]) {
            journal.commit(writes, matches!(meanwhile, Meanwhile::Durable)).expect("there is room");
            match meanwhile {
                Meanwhile::Nothing => {}
                Meanwhile::Durable => prop_assert_eq!(journal.backlog(), Backlog::None),
                Meanwhile::Apply => journal.checkpointer().and_then(|mut side| side.apply()).expect("applied"),
                Meanwhile::Kill => {
                    let next = image(dir.path());
                    journal = Journal::open(next.path(), Check::Full).expect("it starts");
                    dir = next;
                }
            }
            prop_assert_eq!(&shown(dir.path()), expected, "as others read it");
        }
        drop(journal);
        prop_assert_eq!(dump(dir.path()), dump(plain.path()));
        Ok(())
    });
}

/// The offset after each record of the first segment.
fn ends(journal: &[u8]) -> Vec<usize> {
    let mut at = FIRST_SEGMENT;
    let mut ends = Vec::new();
    loop {
        let length = u32::from_le_bytes(*journal[at..].first_chunk().expect("inside the file"));
        if length == 0 {
            return ends;
        }
        at += HEAD_BYTES + length as usize;
        ends.push(at);
    }
}

#[derive(Clone, Copy, Debug)]
enum Damage {
    /// Nothing of it and after it reached the disk.
    Cut,
    /// The file ends there.
    Short,
    /// It is another bit than was written.
    Flip(u8),
}

fn damage(journal: &[u8], at: usize, damage: Damage) -> Vec<u8> {
    let mut bytes = journal.to_vec();
    match damage {
        Damage::Cut => bytes[at..].fill(0),
        Damage::Short => bytes.truncate(at),
        Damage::Flip(bit) => bytes[at] ^= 1 << bit,
    }
    bytes
}

#[test]
fn a_journal_that_is_damaged_counts_up_to_there() {
    let kind = prop_oneof![Just(Damage::Cut), Just(Damage::Short), (0..8u8).prop_map(Damage::Flip)];
    let inputs = (prop::collection::vec(turn(true), 1..=30), any::<prop::sample::Index>(), kind);
    check(300, inputs, |(turns, place, kind)| {
        let commits = commits(&turns);
        let (_plain, after) = direct(&commits);
        let dir = journaled(&commits);
        let path = dir.path().join("journal");
        let whole = fs::read(&path).expect("journal");
        let ends = ends(&whole);
        prop_assert_eq!(ends.len(), commits.len(), "a record for each");
        let Some(last) = ends.last() else { return Ok(()) };
        let at = FIRST_SEGMENT + place.index(last - FIRST_SEGMENT);
        let damaged = damage(&whole, at, kind);
        // Zeroes that are cut off a record may be what was written.
        let sound = ends.iter().filter(|end| damaged.get(..**end) == Some(&whole[..**end])).count();
        fs::write(&path, damaged).expect("journal");
        prop_assert_eq!(&shown(dir.path()), &after[sound], "{} sound records, damaged at {}", sound, at);
        open_and_close(dir.path());
        prop_assert_eq!(&shown(dir.path()), &after[sound], "after a start");
        Ok(())
    });
}

fn attempt(epoch: u64) -> Arc<Attempt> {
    let now = moment(1_000_000_000);
    Arc::new(Attempt {
        epoch: Epoch(epoch),
        via: Via::Create,
        claimant: claimant(1, 1),
        handle: Handle(epoch),
        owners: Vec::new(),
        ttl: ttl(1_000),
        since: now,
        renewed: now,
        deadline_ns: 2_000_000_000,
        waited_ms: 3,
        note: Arc::from(""),
        agent: None,
        held: true,
        registered: true,
        orphaned: false,
        why: None,
        outcome: None,
        ended: None,
        result: None,
    })
}

fn noted(epoch: u64, note: String) -> Arc<Attempt> {
    let agent = Some(Arc::from(&note[..note.len().min(9)]));
    Arc::new(Attempt { note: note.into(), agent, ..(*attempt(epoch)).clone() })
}

fn ended(epoch: u64) -> Arc<Attempt> {
    let (outcome, now) = (Some(Outcome::Released), moment(1_500_000_000));
    Arc::new(Attempt { outcome, ended: Some(now), held: false, ..(*attempt(epoch)).clone() })
}

const KEY: KeyId = KeyId(1);

fn key() -> Write {
    Write::Key(KEY, Key::parse("k").expect("a key"))
}

/// A claim and its end, each a commit.
fn cycle(epoch: u64) -> [Vec<Write>; 2] {
    [vec![Write::Claim(KEY, attempt(epoch))], vec![Write::End(KEY, ended(epoch))]]
}

/// A registry whose key has had this many attempts, all in the journal.
fn cycles(dir: &Path, count: u64) -> Journal {
    let mut journal = Journal::open(dir, Check::Full).expect("registry");
    journal.commit(&[key()], false).expect("room");
    for writes in (1..=count).flat_map(cycle) {
        journal.commit(&writes, false).expect("room");
    }
    journal
}

fn epochs(dir: &Path) -> Vec<u64> {
    shown(dir).1.iter().map(|attempt| attempt.epoch).collect()
}

#[test]
fn no_byte_of_the_last_record_can_be_missing_or_wrong() {
    let dir = new_dir();
    let journal = cycles(dir.path(), 2);
    let dir = image(dir.path());
    drop(journal);
    let path = dir.path().join("journal");
    let whole = fs::read(&path).expect("journal");
    let ends = ends(&whole);
    let [.., before, last] = ends[..] else { panic!("{ends:?}") };
    let live = || shown(dir.path()).1.iter().filter(|attempt| attempt.ended_ms.is_none()).count();
    assert_eq!(live(), 0);
    for at in before..last {
        for kind in [Damage::Cut, Damage::Short, Damage::Flip(at as u8 % 8)] {
            let bytes = damage(&whole, at, kind);
            // Zeroes at the end of a record may be what was written.
            if bytes != whole {
                fs::write(&path, bytes).expect("journal");
                assert_eq!((epochs(dir.path()), live()), (vec![1, 2], 1), "{kind:?} at {at} of {before}..{last}");
            }
        }
    }
}

#[test]
fn a_kill_between_the_registrys_commit_and_the_journals_new_beginning_applies_nothing_twice() {
    let dir = new_dir();
    let mut journal = cycles(dir.path(), 3);
    let before = image(dir.path());
    journal.checkpointer().and_then(|mut side| side.apply()).expect("applied");
    // The records are still in the file, and in the database.
    let after = image(dir.path());
    assert_eq!(ends(&fs::read(after.path().join("journal")).expect("journal")).len(), 7);
    open_and_close(after.path());
    assert_eq!(epochs(after.path()), [1, 2, 3]);
    for writes in cycle(4) {
        journal.commit(&writes, false).expect("room");
    }
    assert_eq!(epochs(image(dir.path()).path()), [1, 2, 3, 4]);
    // Killed while it starts: the database is so far, the file is still the old one.
    let started = image(before.path());
    open_and_close(started.path());
    fs::copy(before.path().join("journal"), started.path().join("journal")).expect("journal");
    open_and_close(started.path());
    assert_eq!(epochs(started.path()), [1, 2, 3]);
}

#[test]
fn a_journal_of_another_registry_or_of_another_time_counts_for_nothing() {
    let (one, other) = (new_dir(), new_dir());
    let (mut journal, _other) = (cycles(one.path(), 2), cycles(other.path(), 5));
    let foreign = image(one.path());
    fs::copy(other.path().join("journal"), foreign.path().join("journal")).expect("journal");
    assert_eq!(epochs(foreign.path()), [0; 0], "nothing was applied");
    open_and_close(foreign.path());
    // A database from a backup, with a journal that went on since and was written over.
    let backup = image(one.path());
    journal.checkpointer().and_then(|mut side| side.apply()).expect("applied");
    for writes in cycle(3) {
        journal.commit(&writes, false).expect("room");
    }
    let mut late = fs::read(one.path().join("journal")).expect("journal");
    late[FIRST_SEGMENT..FIRST_SEGMENT + 4].fill(0);
    fs::write(backup.path().join("journal"), late).expect("journal");
    assert_eq!(epochs(backup.path()), [0; 0], "there is a gap");
    open_and_close(backup.path());
    for bytes in [&b""[..], b"not ours", &[0xff; 5000]] {
        fs::write(backup.path().join("journal"), bytes).expect("journal");
        open_and_close(backup.path());
    }
    drop(cycles(backup.path(), 1));
    assert_eq!(epochs(backup.path()), [1]);
}

#[test]
fn records_of_another_version_are_refused_only_where_they_are_needed() {
    let dir = new_dir();
    let journal = cycles(dir.path(), 1);
    let another = |dir: &TempDir| {
        let path = dir.path().join("journal");
        let mut bytes = fs::read(&path).expect("journal");
        bytes[8] ^= 0x40;
        let sum = crc32fast::hash(&bytes[..20]);
        bytes[20..24].copy_from_slice(&sum.to_le_bytes());
        fs::write(&path, bytes).expect("journal");
    };
    let needed = image(dir.path());
    journal.checkpointer().and_then(|mut side| side.apply()).expect("applied");
    let applied = image(dir.path());
    another(&needed);
    another(&applied);
    let refused = Journal::open(needed.path(), Check::Full).err().expect("refused").to_string();
    assert!(refused.contains("another version"), "{refused}");
    assert!(Reader::open(needed.path()).is_err(), "and not shown as if it were all");
    open_and_close(applied.path());
    assert_eq!(epochs(applied.path()), [1]);
}

/// Has the database refuse new attempts until it is called again.
fn refuse(dir: &Path, yes: bool) {
    let sql = if yes {
        "CREATE TRIGGER refuse BEFORE INSERT ON attempts BEGIN SELECT RAISE(ABORT, 'by order'); END"
    } else {
        "DROP TRIGGER refuse"
    };
    Connection::open(dir.join("registry.db")).and_then(|db| db.execute_batch(sql)).expect("registry");
}

#[test]
fn nothing_is_granted_while_what_was_granted_cannot_be_applied() {
    let dir = new_dir();
    let mut journal = cycles(dir.path(), 1);
    let [claim, end] = cycle(2);
    journal.commit(&claim, false).expect("room");
    refuse(dir.path(), true);
    let mut side = journal.checkpointer().expect("registry");
    assert!(side.apply().is_err());
    assert_eq!(journal.backlog(), Backlog::Some, "it is kept");
    let [next, next_end] = cycle(3);
    let refused = journal.commit(&next, false);
    assert!(matches!(&refused, Err(Error::Storage { message, .. }) if message.contains("by order")), "{refused:?}");
    assert!(journal.commit(&[Write::Renew(KEY, noted(2, "still here".into()))], false).is_err());
    journal.commit(&end, false).expect("what has happened is accepted");
    assert!(journal.commit(&next, true).is_err());
    let killed = image(dir.path());
    assert!(Journal::open(killed.path(), Check::Full).is_err(), "it cannot start as if that had never been");
    refuse(killed.path(), false);
    assert_eq!(epochs(killed.path()), [1, 2], "it is in the journal still");
    open_and_close(killed.path());
    assert_eq!(epochs(killed.path()), [1, 2]);
    refuse(dir.path(), false);
    journal.commit(&next, false).expect("it works again by itself");
    journal.commit(&next_end, false).expect("room");
    drop(journal);
    let (keys, attempts) = shown(dir.path());
    assert_eq!((keys[0].epoch, epochs(dir.path())), (3, vec![1, 2, 3]));
    assert!(attempts.iter().all(|attempt| attempt.outcome.as_deref() == Some("released")), "{attempts:?}");
}

#[test]
fn what_does_not_fit_the_registry_is_refused_as_without_a_journal() {
    let twice = [Write::End(KEY, ended(1)), Write::End(KEY, ended(1))];
    let renewed_late = [Write::End(KEY, ended(1)), Write::Renew(KEY, attempt(1))];
    let skipped = [Write::End(KEY, ended(1)), Write::Claim(KEY, attempt(3))];
    let skipped_later = [Write::Claim(KEY, attempt(2)), Write::Claim(KEY, attempt(4))];
    let committed_late = [Write::End(KEY, ended(1)), Write::Commit(KEY, attempt(1), Handle(9))];
    for (at, writes) in [twice, renewed_late, skipped, skipped_later, committed_late].iter().enumerate() {
        for pending in [false, true] {
            let dir = new_dir();
            let mut journal = Journal::open(dir.path(), Check::Full).expect("registry");
            let before = [key(), Write::Claim(KEY, attempt(1))];
            journal.commit(&before, !pending).expect("it fits");
            let refused = journal.commit(writes, true).expect_err("it does not fit").to_string();
            assert!(refused.contains("does not fit"), "case {at}: {refused}");
            drop(journal);
            let (keys, attempts) = shown(dir.path());
            assert_eq!((keys[0].epoch, attempts.len()), (1, 1), "case {at}: as it was");
            assert_eq!(attempts[0].ended_ms, None, "case {at}: as it was");
        }
    }
}

#[test]
fn nothing_is_lost_when_the_journal_is_full() {
    const RENEWALS: usize = 1_500;
    let note = |number: usize| format!("{number:05} {}", "n".repeat(4_000));
    for applied_each in [usize::MAX, 700, 90] {
        let mut dir = new_dir();
        let mut journal = Journal::open(dir.path(), Check::Full).expect("registry");
        let mut side = journal.checkpointer().expect("registry");
        journal.commit(&[key(), Write::Claim(KEY, attempt(1))], false).expect("room");
        let mut much = false;
        for number in 1..=RENEWALS {
            journal.commit(&[Write::Renew(KEY, noted(1, note(number)))], false).expect("it makes room");
            much |= journal.backlog() == Backlog::Much;
            if number % applied_each == 0 {
                side.apply().expect("applied");
            }
        }
        const { assert!(RENEWALS * 4_000 > 2 * SEGMENT_BYTES, "it has to be full once") };
        assert_eq!(much, applied_each > 300, "it says so in time");
        let killed = image(dir.path());
        drop((side, journal));
        open_and_close(killed.path());
        dir = killed;
        let (_, attempts) = shown(dir.path());
        assert_eq!(attempts.iter().map(|attempt| &attempt.note).collect::<Vec<_>>(), [&note(RENEWALS)]);
        // More at once than there is room for.
        let mut journal = Journal::open(dir.path(), Check::Full).expect("registry");
        let many: Vec<_> = (0..RENEWALS).map(|number| Write::Renew(KEY, noted(1, note(number)))).collect();
        journal.commit(&many, false).expect("it goes past the journal");
        assert_eq!(journal.backlog(), Backlog::None);
    }
}

#[test]
fn a_result_is_found_while_it_is_in_the_journal_only() {
    let dir = new_dir();
    let mut journal = cycles(dir.path(), 1);
    let mut reader = journal.reader().expect("registry");
    assert_eq!(reader.results(KEY, Epoch(0), 10), Ok(vec![]));
    let result = Some(leasefs::machine::ResultMeta { size: 7, committed_ms: 11, draft: Handle(9) });
    for epoch in 2..=4 {
        let [claim, end] = cycle(epoch);
        let committed = Arc::new(Attempt { result, outcome: Some(Outcome::Completed), ..(*attempt(epoch)).clone() });
        journal.commit(&claim, false).expect("room");
        journal.commit(&[Write::Commit(KEY, committed, Handle(9))], false).expect("room");
        journal.commit(&end, false).expect("room");
        if epoch == 2 {
            journal.checkpointer().and_then(|mut side| side.apply()).expect("applied");
        }
        let found = reader.result(KEY, Epoch(epoch)).expect("registry").expect("a result");
        assert_eq!((found.size, found.committed_ms, found.uid), (7, 11, claimant(1, 1).uid));
    }
    let epochs = |after, limit| reader.results(KEY, Epoch(after), limit);
    let mut epochs = epochs;
    assert_eq!(epochs(0, 10), Ok(vec![Epoch(2), Epoch(3), Epoch(4)]));
    assert_eq!(epochs(0, 2), Ok(vec![Epoch(2), Epoch(3)]));
    assert_eq!(epochs(3, 10), Ok(vec![Epoch(4)]));
}
