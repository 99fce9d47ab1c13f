//! The state machine that serves the mount against the contract's model, one request after another.

use leasefs::machine::{Change, Context, KeyState, Room};
use leasefs::{Epoch, Handle, WaiterId};
use proptest::prelude::*;

use crate::check;
use crate::contract::Contract;
use crate::ledger::Ledger;
use crate::players::{Move, Numbers, Players, after, moment, moves};

#[derive(Default)]
struct Counter(u64);

impl Numbers for Counter {
    fn handle(&mut self) -> Handle {
        self.0 += 1;
        Handle(self.0)
    }

    fn waiter(&mut self) -> WaiterId {
        self.0 += 1;
        WaiterId(self.0)
    }
}

/// Both sides after the same step.
pub fn compare(key: &KeyState, model: &Contract, now_ns: u64) -> Result<(), TestCaseError> {
    let now = moment(now_ns);
    prop_assert_eq!(key.epoch, Epoch(model.epoch), "the newest epoch");
    prop_assert_eq!(key.state(now).to_string(), model.state(), "the state's name");
    prop_assert_eq!(key.has_file(), model.has_file(), "whether there is a file");
    let holder = key.live().filter(|attempt| attempt.held).map(|attempt| attempt.handle);
    prop_assert_eq!(holder, model.holder(), "who holds it");
    prop_assert_eq!(key.deadline_ns(), model.deadline_ns(), "the deadline");
    let agent = key.attempt.as_ref().map(|attempt| attempt.agent.as_ref());
    prop_assert_eq!(agent, model.attempt.as_ref().map(|attempt| attempt.agent.as_ref()), "whose agent holds it");
    prop_assert_eq!(key.last_outcome(), model.outcome(), "the last outcome");
    prop_assert_eq!(key.finished, model.finished, "whether it is finished");
    prop_assert_eq!(&key.lost, &model.lost, "the handles that lost it");
    for (orphaned, expected) in [(false, &model.sharers), (true, &model.orphans)] {
        let shares = key.sharers.iter().filter(|share| share.is_orphaned() == orphaned);
        let mut shares: Vec<_> = shares.map(|share| (share.handle, share.owner)).collect();
        shares.sort_unstable();
        let expected: Vec<_> = expected.keys().copied().collect();
        prop_assert_eq!(shares, expected, "the shared locks, orphaned: {}", orphaned);
    }
    let line: Vec<_> = key.line.iter().map(|waiter| waiter.id).collect();
    prop_assert_eq!(line, model.line.iter().map(|waiter| waiter.id).collect::<Vec<_>>(), "the line");
    prop_assert_eq!(key.latest_result.map(|(epoch, _)| epoch.0), model.latest_result, "the newest result");
    prop_assert_eq!(key.drafts.keys().collect::<Vec<_>>(), model.drafts.keys().collect::<Vec<_>>(), "the drafts");
    for draft in model.drafts.keys() {
        prop_assert_eq!(key.check_draft(*draft, now).map(drop), model.accepts(*draft, now_ns), "what a draft may do");
    }
    Ok(())
}

/// What has to be so between any two steps, without knowing what happened.
fn invariants(before: &KeyState, after: &KeyState, changes: &[Change], now_ns: u64) -> Result<(), TestCaseError> {
    let now = moment(now_ns);
    let live = after.live();
    if live.is_some_and(|attempt| attempt.held) {
        prop_assert!(after.sharers.is_empty(), "I-MUTEX: held and shared");
    }
    let claims = changes.iter().filter(|change| matches!(change, Change::Claimed(_))).count() as u64;
    prop_assert_eq!(after.epoch.0, before.epoch.0 + claims, "I-EPOCH-UNIQ: an epoch for each claim");
    prop_assert!(live.is_none_or(|attempt| attempt.deadline_ns > now_ns), "I-TTL-BOUND: alive after its deadline");
    if let Some(front) = after.line.front() {
        let others = after.sharers.iter().any(|share| share.handle != front.handle && share.owner != front.owner);
        let blocked = live.is_some() || others && front.mode == leasefs::machine::Mode::Exclusive;
        prop_assert!(blocked, "somebody waits for a key that could be granted");
    }
    let registered = after.registered(now);
    prop_assert!(registered.is_none_or(|attempt| attempt.epoch == after.epoch), "only the newest is registered");
    for change in changes {
        let Change::Committed(attempt, _) = change else { continue };
        prop_assert!(attempt.is_registered(now), "I-NO-GHOST-COMPLETE");
        let earlier = before.attempt.as_ref().filter(|a| a.epoch == attempt.epoch).and_then(|a| a.result);
        prop_assert_eq!(earlier, None, "I-ONE-RESULT");
    }
    for handle in &before.lost {
        prop_assert!(
            live.is_none_or(|attempt| !attempt.held || attempt.handle != *handle),
            "a lost handle has it again"
        );
        prop_assert!(after.sharers.iter().all(|share| share.handle != *handle), "a lost handle shares it");
        prop_assert!(after.line.iter().all(|waiter| waiter.handle != *handle), "a lost handle waits");
    }
    Ok(())
}

fn play(moves: &[Move]) -> Result<(), TestCaseError> {
    let (mut key, mut model) = (KeyState::default(), Contract::default());
    let (mut players, mut numbers, mut ledger) = (Players::default(), Counter::default(), Ledger::default());
    let mut now_ns = 1_000_000_000;
    for Move { pause, act, ttl } in moves {
        now_ns = after(now_ns, *pause, model.deadline_ns());
        let Some(input) = players.input(*act, key.epoch, &mut numbers) else { continue };
        let before = key.clone();
        let step = key.apply(input.clone(), Context { now: moment(now_ns), ttl: *ttl, room: Room::default() });
        let (reply, grants) = model.step(&input, now_ns, *ttl);
        prop_assert_eq!(&step.reply, &reply, "the answer to {:?}", input);
        prop_assert_eq!(step.grants, grants, "who is granted by {:?}", input);
        if step.reply.is_ok() {
            players.granted(&input);
        }
        ledger.write(&step.changes).map_err(TestCaseError::fail)?;
        compare(&key, &model, now_ns)?;
        let waited_ms = key.attempt.as_ref().map(|attempt| attempt.waited_ms);
        prop_assert_eq!(waited_ms, model.attempt.as_ref().map(|a| a.waited_ns / 1_000_000), "how long it waited");
        invariants(&before, &key, &step.changes, now_ns)?;
        let due = before.live().is_some_and(|attempt| attempt.deadline_ns <= now_ns);
        if step.reply.is_err() && !due {
            prop_assert!(step.changes.is_empty(), "a refusal of {:?} changed {:?}", input, step.changes);
        }
    }
    ledger.check(&key).map_err(TestCaseError::fail)
}

#[test]
fn the_machine_does_what_the_contract_says() {
    check(8_000, prop::collection::vec(moves(), 1..=60), |moves| play(&moves.concat()));
}
