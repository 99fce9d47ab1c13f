//! The limit on keys: no user ever holds more, whether they are granted at once or from the line, and whatever fails.

use std::collections::BTreeMap;
use std::sync::Arc;

use leasefs::machine::{Input, Mode, Reply};
use leasefs::{Epoch, Error, Handle, KeyId, NamespaceId, Now, Owner, WaiterId};
use parking_lot::Mutex;
use proptest::prelude::*;

use crate::check;
use crate::players::{PROCESSES, claimant, moment, uid};
use crate::rig::{Fate, Rig};

const START_NS: u64 = 1_000_000_000;
const KEYS: usize = 4;
const MOST: usize = 2;

type Told = Arc<Mutex<Vec<Result<Reply, Error>>>>;

#[derive(Clone, Copy, Debug)]
enum Act {
    Create { key: usize, process: u8 },
    Lock { key: usize, process: u8, wait: bool },
    Close { open: usize },
    Interrupt { open: usize },
    Flush,
    Fail,
}

/// An open handle, and what its one request came to.
struct Open {
    key: KeyId,
    handle: Handle,
    waiter: Option<WaiterId>,
    told: Told,
}

struct Game {
    rig: Rig,
    keys: Vec<KeyId>,
    open: Vec<Open>,
    now: Now,
}

impl Game {
    fn new() -> Game {
        let now = moment(START_NS);
        let rig = Rig::with_max_keys(MOST, now);
        let name = |number: usize| format!("k{number}");
        let keys = (0..KEYS)
            .map(|number| {
                let key = rig.engine.open_name(NamespaceId::ROOT, name(number).as_bytes(), now).expect("a key");
                // One handle stays open, so that no key is forgotten.
                rig.engine.open_key(key).expect("it is there");
                key
            })
            .collect();
        Game { rig, keys, open: Vec::new(), now }
    }

    fn ask(&mut self, key: usize, waits: bool, input: impl FnOnce(Handle, Option<WaiterId>) -> Input) {
        let key = self.keys[key];
        self.rig.engine.open_key(key).expect("it is there");
        let handle = self.rig.engine.new_handle();
        let waiter = waits.then(|| self.rig.engine.new_waiter());
        let told = Told::default();
        let into = Arc::clone(&told);
        let input = input(handle, waiter);
        self.rig.engine.submit(key, input, self.now, Box::new(move |answer| into.lock().push(answer)));
        self.open.push(Open { key, handle, waiter, told });
    }

    fn act(&mut self, act: Act) {
        match act {
            Act::Create { key, process } => self.ask(key, false, |handle, _| {
                let claimant = claimant(process, process);
                Input::Create { handle, claimant }
            }),
            Act::Lock { key, process, wait } => self.ask(key, wait, |handle, wait| {
                let claimant = claimant(process, process);
                Input::Lock { handle, owner: Owner(handle.0), mode: Mode::Exclusive, wait, claimant }
            }),
            Act::Close { open } => {
                // The kernel keeps a file open for as long as a request is under way with it.
                let done: Vec<usize> =
                    (0..self.open.len()).filter(|at| !self.open[*at].told.lock().is_empty()).collect();
                if let Some(at) = done.get(open % done.len().max(1)) {
                    let Open { key, handle, .. } = self.open.remove(*at);
                    let why = Arc::from("closed");
                    self.rig.engine.submit(key, Input::Close { handle, why }, self.now, Box::new(|_| ()));
                }
            }
            Act::Interrupt { open } => {
                let waiters: Vec<WaiterId> = self.open.iter().filter_map(|open| open.waiter).collect();
                if let Some(waiter) = waiters.get(open % waiters.len().max(1)) {
                    self.rig.engine.interrupt(*waiter, self.now);
                }
            }
            Act::Flush => self.rig.engine.flush(self.now),
            Act::Fail => {
                self.rig.orders.expect([Fate::DiskFull]);
                self.rig.engine.flush(self.now);
                self.rig.orders.clear();
            }
        }
    }

    fn check(&self) -> Result<(), TestCaseError> {
        let mut held: BTreeMap<u32, usize> = BTreeMap::new();
        for key in &self.keys {
            let seen = self.rig.engine.view(*key, |entry, _| {
                (entry.state.live().map(|attempt| attempt.claimant.uid), entry.state.line.len())
            });
            let (holder, line) = seen.expect("the key is known");
            prop_assert!(holder.is_some() || line == 0, "{} wait for a free key", line);
            if let Some(uid) = holder {
                *held.entry(uid).or_default() += 1;
            }
        }
        prop_assert!(held.values().all(|count| *count <= MOST), "{:?}", held);
        prop_assert!(self.open.iter().all(|open| open.told.lock().len() <= 1), "answered twice");
        Ok(())
    }
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let (key, process) = (0..KEYS, 1..=PROCESSES);
    let act = prop_oneof![
        3 => (key.clone(), process.clone()).prop_map(|(key, process)| Act::Create { key, process }),
        6 => (key, process, prop::bool::weighted(0.8))
            .prop_map(|(key, process, wait)| Act::Lock { key, process, wait }),
        6 => (0..8_usize).prop_map(|open| Act::Close { open }),
        1 => (0..8_usize).prop_map(|open| Act::Interrupt { open }),
        4 => Just(Act::Flush),
        1 => Just(Act::Fail),
    ];
    prop::collection::vec(act, 1..60)
}

#[test]
fn nobody_ever_holds_more_keys_than_allowed() {
    check(300, acts(), |acts| {
        let mut game = Game::new();
        for act in acts {
            game.act(act);
            game.check()?;
        }
        // Everybody is answered in the end, and the limit is on what is held alone.
        loop {
            game.rig.engine.flush(game.now);
            let before = game.open.len();
            game.act(Act::Close { open: 0 });
            game.check()?;
            if game.open.len() == before {
                break;
            }
        }
        prop_assert!(game.open.is_empty(), "{} were never answered", game.open.len());
        Ok(())
    });
}

#[test]
fn one_that_waited_is_refused_at_its_turn_and_takes_no_epoch() {
    let mut game = Game::new();
    let lock = |key, process, wait| Act::Lock { key, process, wait };
    // Processes 1 and 3 are of one user.
    assert_eq!(uid(1), uid(3));
    for act in [lock(0, 2, false), lock(0, 1, true), lock(0, 2, true), lock(1, 1, false), lock(2, 3, false)] {
        game.act(act);
    }
    game.act(Act::Flush);
    game.act(Act::Close { open: 0 });
    game.act(Act::Flush);
    let answers: Vec<_> = game.open.iter().map(|open| open.told.lock().clone()).collect();
    assert!(matches!(answers[0][..], [Err(Error::Limit(_))]), "{answers:?}");
    assert_eq!(answers[1], [Ok(Reply::Claimed(Epoch(2)))], "the next in line");
    // Its own user's key is none more: who waits for that is granted it.
    game.act(lock(1, 3, true));
    let at = game.open.iter().position(|open| open.key == game.keys[1]).expect("it is held");
    let Open { key, handle, .. } = game.open.remove(at);
    game.rig.engine.submit(key, Input::Unlock { handle, owner: Owner(handle.0) }, game.now, Box::new(|_| ()));
    game.act(Act::Flush);
    let last = game.open.last().expect("it waits").told.lock().clone();
    assert_eq!(last, [Ok(Reply::Claimed(Epoch(2)))]);
}
