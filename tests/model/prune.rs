//! Pruning the engine's registry: what goes is what a plain reading of the rule says, and nothing else changes.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use leasefs::engine::Prune;
use leasefs::machine::{Input, Mode, Outcome, Reply, State};
use leasefs::registry::prune::Bounds;
use leasefs::registry::{AttemptRow, KeyRow};
use leasefs::{Epoch, Error, Handle, KeyId, NamespaceId, Now, Owner};
use parking_lot::Mutex;
use proptest::prelude::*;

use crate::check;
use crate::players::{claimant, moment};
use crate::rig::{Fate, Rig, Storage, storage};

/// Some keys, and a clock.
struct Desk {
    rig: Rig,
    now: Now,
}

impl Desk {
    fn on(storage: Storage) -> Desk {
        let now = moment(1_000_000_000);
        Desk { rig: Rig::on(storage, now), now }
    }

    fn key(&self, name: &str) -> KeyId {
        self.rig.engine.open_name(NamespaceId::ROOT, name.as_bytes(), self.now).expect("a key")
    }

    fn pass_ms(&mut self, ms: u64) {
        self.now = Now {
            boot_ns: self.now.boot_ns + ms * 1_000_000,
            wall_ms: self.now.wall_ms + i64::try_from(ms).expect("small"),
        };
    }

    fn ask(&self, key: KeyId, input: Input) -> Arc<Mutex<Option<Result<Reply, Error>>>> {
        let told = Arc::new(Mutex::new(None));
        let tell = Arc::clone(&told);
        self.rig.engine.submit(key, input, self.now, Box::new(move |answer| *tell.lock() = Some(answer)));
        told
    }

    fn done(&self, key: KeyId, input: Input) -> Reply {
        let told = self.ask(key, input);
        self.rig.engine.flush(self.now);
        let answer = told.lock().take().expect("answered");
        answer.expect("granted")
    }

    fn lock(&self, key: KeyId) -> (Handle, Input) {
        self.rig.engine.open_key(key).expect("known");
        let handle = self.rig.engine.new_handle();
        let (owner, mode, claimant) = (Owner(handle.0), Mode::Exclusive, claimant(1, 1));
        (handle, Input::Lock { handle, owner, mode, wait: None, claimant })
    }

    /// The next attempt of a key, which is held; its number.
    fn claim(&self, key: KeyId) -> (Handle, Epoch) {
        let (handle, lock) = self.lock(key);
        match self.done(key, lock) {
            Reply::Claimed(epoch) => (handle, epoch),
            other => panic!("not claimed but {other:?}"),
        }
    }

    fn commit(&self, key: KeyId, epoch: Epoch, size: u64) {
        let handle = self.rig.engine.new_handle();
        let file = self.rig.engine.results.create_draft(handle).expect("a draft");
        file.set_len(size).expect("its size");
        self.done(key, Input::OpenDraft { handle, epoch, uid: 0 });
        self.done(key, Input::Commit { handle, size });
        self.done(key, Input::CloseDraft { handle });
    }

    fn close(&self, key: KeyId, handle: Handle) {
        self.done(key, Input::Close { handle, why: Arc::from("closed") });
    }

    fn begin(&self, bounds: Bounds) -> Prune {
        self.rig.engine.begin_prune(bounds, self.now).expect("nobody else is at it")
    }

    fn prune(&self, bounds: Bounds) {
        let mut prune = self.begin(bounds);
        while self.rig.engine.prune_step(&mut prune, HashSet::new, self.now).expect("it can be written") {}
    }

    fn look<R>(&self, key: KeyId, look: impl FnOnce(&leasefs::machine::KeyState) -> R) -> R {
        self.rig.engine.view(key, |entry, _| look(&entry.state)).expect("known")
    }
}

/// The rows of each key, by epoch.
fn by_key((keys, attempts): (Vec<KeyRow>, Vec<AttemptRow>)) -> BTreeMap<u64, (KeyRow, BTreeMap<u64, AttemptRow>)> {
    let mut all: BTreeMap<_, _> = keys.into_iter().map(|key| (key.id, (key, BTreeMap::new()))).collect();
    for row in attempts {
        all.get_mut(&row.key_id).expect("it has a key").1.insert(row.epoch, row);
    }
    all
}

/// The rule in plain words, row by row.
fn expected((key, rows): &(KeyRow, BTreeMap<u64, AttemptRow>), bounds: &Bounds) -> (KeyRow, BTreeMap<u64, AttemptRow>) {
    let ended: BTreeSet<u64> = rows.values().filter(|row| row.ended_ms.is_some()).map(|row| row.epoch).collect();
    let (mut key, mut left) = (key.clone(), rows.clone());
    for (at, epoch) in ended.iter().rev().enumerate() {
        let row = &rows[epoch];
        let is_old = row.outcome.as_deref() == Some("completed")
            && bounds.completed_by_ms.is_some_and(|by_ms| row.ended_ms <= Some(by_ms));
        let is_over = bounds.keep.is_some_and(|keep| at as u64 >= keep);
        if at == 0 && is_old && row.result.is_some() {
            let row = AttemptRow { result: None, result_pruned: true, registered: false, ..row.clone() };
            left.insert(*epoch, row);
        } else if at > 0 && (is_old || is_over) {
            left.remove(epoch);
            key.pruned = key.pruned.max(*epoch);
            key.pruned_attempts += 1;
        }
    }
    (key, left)
}

#[derive(Clone, Debug)]
enum Turn {
    /// An attempt of a key, with a result of so many bytes or none.
    Attempt(usize, Option<u64>),
    Pass(u64),
    Prune {
        age_ms: Option<u64>,
        keep: Option<u64>,
    },
    Restart,
}

fn turn() -> impl Strategy<Value = Turn> {
    prop_oneof![
        8 => (0..3_usize, prop::option::of(0..50_u64)).prop_map(|(key, result)| Turn::Attempt(key, result)),
        2 => (1..200_u64).prop_map(Turn::Pass),
        2 => (prop::option::of(0..600_u64), prop::option::of(1..5_u64))
            .prop_map(|(age_ms, keep)| Turn::Prune { age_ms, keep }),
        1 => Just(Turn::Restart),
    ]
}

#[test]
fn what_goes_is_what_the_rule_says() {
    let turns = prop::collection::vec(turn(), 1..=40);
    check(200, (storage(), turns, any::<bool>()), |(storage, turns, holds)| {
        let mut desk = Desk::on(storage);
        let keys = ["a", "b", "c"].map(|name| desk.key(name));
        let mut epochs = [0_u64; 3];
        let mut held = None;
        if holds {
            let (handle, epoch) = desk.claim(keys[2]);
            desk.commit(keys[2], epoch, 7);
            (held, epochs[2]) = (Some(handle), 1);
        }
        for turn in turns {
            match turn {
                Turn::Attempt(2, _) if held.is_some() => {}
                Turn::Attempt(at, result) => {
                    let (handle, epoch) = desk.claim(keys[at]);
                    epochs[at] += 1;
                    prop_assert_eq!(epoch, Epoch(epochs[at]), "the numbers go on");
                    result.inspect(|size| desk.commit(keys[at], epoch, *size));
                    desk.close(keys[at], handle);
                }
                Turn::Pass(ms) => desk.pass_ms(ms),
                Turn::Prune { age_ms, keep } => {
                    let completed_by_ms = age_ms.map(|ms| desk.now.wall_ms.saturating_sub_unsigned(ms));
                    let bounds = Bounds { completed_by_ms, keep };
                    desk.rig.engine.flush(desk.now);
                    desk.rig.engine.apply(desk.now).expect("it can be written");
                    let before = by_key(desk.rig.rows());
                    let states =
                        keys.map(|key| desk.look(key, |state| (state.epoch, state.finished, state.last_outcome())));
                    desk.prune(bounds);
                    let after = by_key(desk.rig.rows());
                    let wanted: BTreeMap<_, _> = before.iter().map(|(id, key)| (*id, expected(key, &bounds))).collect();
                    prop_assert_eq!(&after, &wanted);
                    prop_assert_eq!(
                        keys.map(|key| desk.look(key, |state| (state.epoch, state.finished, state.last_outcome()))),
                        states
                    );
                    let results = after.values().flat_map(|(_, rows)| rows.values()).filter(|row| row.result.is_some());
                    prop_assert_eq!(desk.rig.result_files(), results.count());
                }
                Turn::Restart if held.is_some() => {}
                Turn::Restart => {
                    let shown = |desk: &Desk| {
                        keys.map(|key| {
                            desk.rig.engine.view(key, |entry, _| {
                                let state = &entry.state;
                                (state.epoch, state.finished, state.last_outcome(), state.latest_result)
                            })
                        })
                    };
                    let before = shown(&desk);
                    let Desk { rig, now } = desk;
                    desk = Desk { rig: rig.restart("boot-1", now), now };
                    // A key that was never claimed is forgotten, and named anew.
                    for (key, before) in
                        keys.iter().zip(before).filter(|(_, before)| before.is_some_and(|b| b.0 > Epoch(0)))
                    {
                        let state = desk.look(*key, |s| (s.epoch, s.finished, s.last_outcome(), s.latest_result));
                        prop_assert_eq!(Some(state), before);
                    }
                    if keys.iter().any(|key| desk.rig.engine.view(*key, |_, _| ()).is_none()) {
                        return Ok(());
                    }
                }
            }
            let found = desk.rig.violations();
            prop_assert!(found.is_empty(), "leasefs verify finds {:?}", found);
        }
        Ok(())
    });
}

#[test]
fn a_result_that_went_does_not_come_back_with_a_claim_that_is_taken_back() {
    let desk = Desk::on(Storage::Plain);
    let key = desk.key("k");
    let (handle, epoch) = desk.claim(key);
    desk.commit(key, epoch, 3);
    desk.close(key, handle);
    assert_eq!(desk.look(key, |state| (state.state(desk.now), state.latest_result.is_some())), (State::Finished, true));
    let mut prune = desk.begin(Bounds { completed_by_ms: Some(desk.now.wall_ms), keep: None });
    // The next attempt has begun and is not recorded yet when the result goes.
    let (_, lock) = desk.lock(key);
    let told = desk.ask(key, lock);
    while desk.rig.engine.prune_step(&mut prune, HashSet::new, desk.now).expect("it can be written") {}
    desk.rig.orders.expect([Fate::DiskFull]);
    desk.rig.engine.flush(desk.now);
    assert!(matches!(*told.lock(), Some(Err(Error::Storage { .. }))), "{told:?}");
    desk.look(key, |state| {
        assert_eq!((state.epoch, state.state(desk.now)), (Epoch(1), State::Finished));
        assert_eq!((state.latest_result, state.last_outcome()), (None, Some(Outcome::Completed)));
    });
    let late = desk.rig.engine.new_handle();
    let draft = desk.ask(key, Input::OpenDraft { handle: late, epoch: Epoch(1), uid: 0 });
    desk.rig.engine.flush(desk.now);
    assert_eq!(*draft.lock(), Some(Err(Error::Stale)), "no other in its place");
    assert_eq!(desk.claim(key).1, Epoch(2));
    assert_eq!(desk.rig.violations(), []);
}

#[test]
fn a_prune_that_the_disk_refuses_takes_nothing() {
    let desk = Desk::on(Storage::Full);
    let key = desk.key("k");
    for _ in 0..3 {
        let (handle, epoch) = desk.claim(key);
        desk.commit(key, epoch, 3);
        desk.close(key, handle);
    }
    let before = desk.rig.rows();
    desk.rig.orders.refuse_prunes(true);
    let mut prune = desk.begin(Bounds { completed_by_ms: None, keep: Some(1) });
    let refused = desk.rig.engine.prune_step(&mut prune, HashSet::new, desk.now);
    assert!(matches!(refused, Err(Error::Storage { .. })), "{refused:?}");
    drop(prune);
    assert_eq!(desk.rig.rows(), before);
    assert_eq!((desk.rig.result_files(), desk.rig.violations()), (3, vec![]));
    desk.rig.orders.refuse_prunes(false);
    desk.prune(Bounds { completed_by_ms: None, keep: Some(1) });
    assert_eq!((desk.rig.result_files(), desk.rig.violations()), (1, vec![]));
}
