//! Faults of the registry that once broke a promise, each by the behaviour that is promised.

use std::sync::Arc;

use leasefs::machine::{Input, Mode, Outcome, Reply, State};
use leasefs::metrics::Outside;
use leasefs::namespaces::Credentials;
use leasefs::{Epoch, Error, Handle, Key, KeyId, NamespaceId, Now, Owner, RequestId, WaiterId};
use parking_lot::Mutex;

use crate::players::{claimant, moment, process, uid};
use crate::rig::{Fate, Rig, TTL_MS, mkdir, rmdir};

const START_NS: u64 = 1_000_000_000;

type Told = Arc<Mutex<Vec<Result<Reply, Error>>>>;

/// One key, and a way to ask for things in few words.
struct Desk {
    rig: Rig,
    key: KeyId,
    now: Now,
}

impl Desk {
    fn new() -> Arc<Desk> {
        let now = moment(START_NS);
        let rig = Rig::new(now);
        let key = rig.engine.open_name(NamespaceId::ROOT, b"k", now).expect("a key");
        Arc::new(Desk { rig, key, now })
    }

    /// With the key held by the handle.
    fn held() -> (Arc<Desk>, Handle) {
        let desk = Desk::new();
        let handle = desk.open();
        let told = desk.create(handle);
        desk.flush();
        assert_eq!(*told.lock(), [Ok(Reply::Claimed(Epoch(1)))]);
        (desk, handle)
    }

    fn open(&self) -> Handle {
        self.rig.engine.open_key(self.key).expect("it is open already");
        self.rig.engine.new_handle()
    }

    fn ask(&self, input: Input) -> Told {
        let told = Told::default();
        self.ask_into(Arc::clone(&told), input);
        told
    }

    fn ask_into(&self, told: Told, input: Input) {
        self.rig.engine.submit(self.key, input, self.now, Box::new(move |answer| told.lock().push(answer)));
    }

    fn create(&self, handle: Handle) -> Told {
        self.ask(Input::Create { handle, claimant: claimant(1, 1) })
    }

    fn lock(&self, handle: Handle, mode: Mode) -> Told {
        self.ask(lock(handle, mode, None))
    }

    fn wait(&self, handle: Handle, mode: Mode) -> (WaiterId, Told) {
        let waiter = self.rig.engine.new_waiter();
        (waiter, self.ask(lock(handle, mode, Some(waiter))))
    }

    fn unlock(&self, handle: Handle) -> Told {
        self.ask(Input::Unlock { handle, owner: Owner(handle.0) })
    }

    fn renew(&self, handle: Handle) -> Told {
        self.ask(Input::Renew { handle, note: None })
    }

    fn close(&self, handle: Handle) -> Told {
        self.ask(Input::Close { handle, why: Arc::from("closed") })
    }

    fn flush(&self) {
        self.rig.engine.flush(self.now);
    }

    /// The next commit fails.
    fn fail(&self) {
        self.rig.orders.expect([Fate::DiskFull]);
        self.flush();
    }

    /// A commit succeeds, and this is done while it is on its way.
    fn while_recording(self: &Arc<Self>, then: impl FnOnce(&Desk) + Send + 'static) {
        let desk = Arc::clone(self);
        self.rig.orders.meanwhile(move || then(&desk));
        self.flush();
    }

    fn state(&self) -> State {
        self.look(|state| state.state(self.now))
    }

    fn look<R>(&self, look: impl FnOnce(&leasefs::machine::KeyState) -> R) -> R {
        self.rig.engine.view(self.key, |entry, _| look(&entry.state)).expect("the key is known")
    }
}

fn lock(handle: Handle, mode: Mode, wait: Option<WaiterId>) -> Input {
    Input::Lock { handle, owner: Owner(handle.0), mode, wait, claimant: claimant(1, 1) }
}

fn disk_full() -> Error {
    Error::storage(Some(28), "no space left, by order")
}

fn epoch(desk: &Desk) -> u64 {
    desk.look(|state| state.epoch.0)
}

/// Two wait; one is granted the key, by a commit that fails, and the other is interrupted. What each was told.
fn a_refused_grant_and_an_interrupted_wait() -> (Arc<Desk>, Told, Told) {
    let (desk, holder) = Desk::held();
    let (second, third) = (desk.open(), desk.open());
    let (_, granted) = desk.wait(second, Mode::Exclusive);
    let (waiter, interrupted) = desk.wait(third, Mode::Exclusive);
    desk.close(holder);
    desk.rig.engine.interrupt(waiter, desk.now);
    desk.fail();
    desk.flush();
    (desk, granted, interrupted)
}

#[test]
fn the_next_in_line_gets_the_key_of_a_claim_that_was_refused() {
    let desk = Desk::new();
    let (first, second) = (desk.open(), desk.open());
    let claim = desk.create(first);
    let (_, wait) = desk.wait(second, Mode::Exclusive);
    desk.fail();
    assert_eq!(*claim.lock(), [Err(disk_full())]);
    desk.flush();
    assert_eq!(*wait.lock(), [Ok(Reply::Claimed(Epoch(1)))], "and is told");
}

#[test]
fn an_interrupted_waiter_takes_no_epoch_when_a_commit_fails() {
    let (desk, granted, interrupted) = a_refused_grant_and_an_interrupted_wait();
    assert_eq!(*granted.lock(), [Err(disk_full())]);
    assert_eq!(*interrupted.lock(), [Err(Error::Interrupted)]);
    assert_eq!((epoch(&desk), desk.state()), (1, State::Free));
}

#[test]
fn nobody_is_in_line_twice_after_a_commit_fails() {
    let (desk, holder) = Desk::held();
    let second = desk.open();
    desk.renew(holder);
    let waiting = Arc::new(Mutex::new(None));
    let slot = Arc::clone(&waiting);
    desk.while_recording(move |desk| *slot.lock() = Some(desk.wait(second, Mode::Exclusive)));
    desk.renew(holder);
    desk.fail();
    assert_eq!(desk.look(|state| state.line.len()), 1);
    let (waiter, told) = waiting.lock().take().expect("it waits");
    desk.rig.engine.interrupt(waiter, desk.now);
    desk.close(holder);
    desk.flush();
    assert_eq!(*told.lock(), [Err(Error::Interrupted)]);
    assert_eq!((epoch(&desk), desk.state()), (1, State::Free), "a phantom has it");
}

#[test]
fn a_share_that_cannot_be_recorded_is_refused_and_the_close_before_it_stands() {
    let desk = Desk::new();
    let (first, second) = (desk.open(), desk.open());
    desk.create(first);
    let share = Told::default();
    let slot = Arc::clone(&share);
    desk.rig.orders.expect([Fate::Done, Fate::DiskFull]);
    desk.while_recording(move |desk| {
        desk.close(first);
        desk.ask_into(slot, lock(second, Mode::Shared, None));
    });
    assert_eq!(*share.lock(), [Err(disk_full())]);
    assert_eq!((epoch(&desk), desk.state()), (1, State::Free));
}

#[test]
fn a_share_is_told_once_it_is_recorded() {
    let desk = Desk::new();
    let (first, second) = (desk.open(), desk.open());
    let told = [desk.lock(first, Mode::Shared), desk.lock(second, Mode::Shared), desk.lock(first, Mode::Shared)];
    assert!(told.iter().all(|told| told.lock().is_empty()), "told before it is recorded");
    desk.flush();
    assert!(told.iter().all(|told| *told.lock() == [Ok(Reply::Shared)]));
    assert_eq!(*desk.lock(first, Mode::Shared).lock(), [Ok(Reply::Shared)], "it is recorded");
    let unlocked = desk.unlock(first);
    assert!(unlocked.lock().is_empty(), "told before it is recorded");
    desk.flush();
    assert_eq!(*unlocked.lock(), [Ok(Reply::Done)]);
}

#[test]
fn a_share_outlives_its_upgrade_that_was_refused() {
    let desk = Desk::new();
    let first = desk.open();
    let share = desk.lock(first, Mode::Shared);
    desk.flush();
    let upgrade = desk.lock(first, Mode::Exclusive);
    desk.fail();
    assert_eq!(*share.lock(), [Ok(Reply::Shared)]);
    assert_eq!(*upgrade.lock(), [Err(disk_full())]);
    assert_eq!((epoch(&desk), desk.state()), (0, State::Shared));
}

#[test]
fn nobody_is_refused_because_of_a_claim_that_never_was() {
    let desk = Desk::new();
    let (first, second, third) = (desk.open(), desk.open(), desk.open());
    let told = [desk.create(first), desk.create(second), desk.lock(third, Mode::Shared)];
    assert!(told.iter().all(|told| told.lock().is_empty()), "told before it is recorded");
    desk.fail();
    assert!(told.iter().all(|told| *told.lock() == [Err(disk_full())]));
    let told = [desk.create(first), desk.create(second), desk.lock(third, Mode::Shared)];
    desk.flush();
    let expected = [Ok(Reply::Claimed(Epoch(1))), Err(Error::Taken), Err(Error::WouldBlock)];
    assert_eq!(told.map(|told| told.lock().clone()), expected.map(|told| vec![told]));
}

#[test]
fn a_whole_line_is_told_that_the_disk_is_full() {
    let (desk, holder) = Desk::held();
    let waits: Vec<_> = (0..3).map(|_| desk.wait(desk.open(), Mode::Exclusive).1).collect();
    desk.close(holder);
    desk.rig.orders.expect([Fate::DiskFull; 3]);
    desk.flush();
    assert!(waits.iter().all(|told| *told.lock() == [Err(disk_full())]), "{waits:?}");
    desk.flush();
    assert_eq!((epoch(&desk), desk.state()), (1, State::Free));
    let told = desk.create(desk.open());
    desk.flush();
    assert_eq!(*told.lock(), [Ok(Reply::Claimed(Epoch(2)))]);
    assert_eq!(desk.rig.violations(), vec![]);
}

#[test]
fn a_close_counts_from_when_it_was() {
    let (desk, holder) = Desk::held();
    desk.renew(holder);
    desk.close(holder);
    let late = moment(START_NS + 2 * TTL_MS * 1_000_000);
    desk.rig.orders.expect([Fate::DiskFull]);
    desk.rig.engine.flush(late);
    assert_eq!(desk.look(|state| state.last_outcome()), Some(Outcome::Released), "it was closed inside its TTL");
}

#[test]
fn a_key_that_could_not_be_forgotten_is_finished() {
    let (desk, holder) = Desk::held();
    commit(&desk, holder);
    desk.close(holder);
    desk.flush();
    assert_eq!(desk.state(), State::Finished);
    let unlink = Input::Unlink { process: process(0), may_forget: true, uid: 0, request: RequestId(0) };
    let told = desk.ask(unlink.clone());
    desk.fail();
    assert_eq!(*told.lock(), [Err(disk_full())]);
    assert_eq!(desk.state(), State::Finished);
    let told = desk.ask(unlink);
    desk.flush();
    assert_eq!(*told.lock(), [Ok(Reply::Done)]);
    assert_eq!(desk.state(), State::Free);
}

/// Opens a draft, commits it, closes it; what the commit was told.
fn commit(desk: &Desk, draft: Handle) -> Told {
    let draft = Handle(draft.0 + 1_000_000);
    drop(desk.rig.engine.results.create_draft(draft).expect("a draft"));
    desk.ask(Input::OpenDraft { handle: draft, epoch: Epoch(epoch(desk)), uid: uid(1) });
    let told = desk.ask(Input::Commit { handle: draft, size: 0 });
    desk.ask(Input::CloseDraft { handle: draft });
    told
}

#[test]
fn a_result_that_was_refused_can_be_committed_again() {
    let (desk, _holder) = Desk::held();
    let draft = desk.rig.engine.new_handle();
    std::io::Write::write_all(&mut desk.rig.engine.results.create_draft(draft).expect("a draft"), b"42")
        .expect("written");
    desk.ask(Input::OpenDraft { handle: draft, epoch: Epoch(1), uid: uid(1) });
    let told = desk.ask(Input::Commit { handle: draft, size: 2 });
    desk.fail();
    assert_eq!(*told.lock(), [Err(disk_full())]);
    assert_eq!((desk.rig.result(desk.key, Epoch(1)), desk.rig.draft_files()), (None, 1));
    let told = desk.ask(Input::Commit { handle: draft, size: 2 });
    desk.flush();
    assert_eq!(*told.lock(), [Ok(Reply::Done)]);
    assert_eq!(desk.rig.result(desk.key, Epoch(1)).as_deref(), Some(&b"42"[..]));
}

#[test]
fn a_draft_that_was_taken_away_refuses_its_own_commit_alone() {
    let (desk, _holder) = Desk::held();
    let (there, gone) = (desk.rig.engine.new_handle(), desk.rig.engine.new_handle());
    let other = desk.rig.engine.open_name(NamespaceId::ROOT, b"other", desk.now).expect("a key");
    let create = Input::Create { handle: desk.rig.engine.new_handle(), claimant: claimant(1, 1) };
    desk.rig.engine.submit(other, create, desk.now, Box::new(|told| assert!(told.is_ok())));
    desk.flush();
    let told = Told::default();
    for (key, draft) in [(desk.key, there), (other, gone)] {
        drop(desk.rig.engine.results.create_draft(draft).expect("a draft"));
        let desk = Desk { rig: desk.rig.clone(), key, now: desk.now };
        desk.ask(Input::OpenDraft { handle: draft, epoch: Epoch(1), uid: uid(1) });
        desk.ask_into(Arc::clone(&told), Input::Commit { handle: draft, size: 0 });
    }
    desk.rig.engine.results.discard(gone);
    desk.flush();
    assert!(matches!(told.lock()[..], [Err(Error::Storage { errno: 5, .. }), Ok(Reply::Done)]), "{told:?}");
    assert_eq!((desk.rig.result_files(), desk.rig.draft_files()), (1, 0));
    // Its attempt goes on: another draft can become the result.
    let again = desk.rig.engine.new_handle();
    drop(desk.rig.engine.results.create_draft(again).expect("a draft"));
    let desk = Desk { rig: desk.rig.clone(), key: other, now: desk.now };
    desk.ask(Input::OpenDraft { handle: again, epoch: Epoch(1), uid: uid(1) });
    let told = desk.ask(Input::Commit { handle: again, size: 0 });
    desk.flush();
    assert_eq!(*told.lock(), [Ok(Reply::Done)]);
}

#[test]
fn readers_are_answered_while_nothing_can_be_recorded() {
    let desk = Desk::new();
    desk.create(desk.open());
    let read = Arc::new(Mutex::new(false));
    let slot = Arc::clone(&read);
    desk.rig.orders.expect([Fate::DiskFull; 2]);
    desk.while_recording(move |desk| {
        let then = Box::new(move || *slot.lock() = true);
        desk.rig.engine.when_settled(desk.key, desk.now, then);
    });
    assert!(*read.lock(), "a reader waits for the disk");
}

#[test]
fn the_count_of_changes_does_not_go_back() {
    let desk = Desk::new();
    desk.create(desk.open());
    let seen = desk.look(|state| state.changes);
    desk.fail();
    desk.create(desk.open());
    desk.flush();
    assert!(desk.look(|state| state.changes) > seen, "who polls would not wake up");
}

#[test]
fn a_name_is_forgotten_when_its_only_claim_was_refused() {
    let desk = Desk::new();
    let handle = desk.open();
    desk.rig.engine.not_opened(desk.key, desk.now);
    desk.lock(handle, Mode::Exclusive);
    desk.close(handle);
    desk.fail();
    desk.flush();
    assert_eq!(desk.rig.engine.find(&Key::parse("k").expect("a key")), Ok(None));
    assert_eq!(desk.rig.rows().0, vec![]);
}

#[test]
fn names_below_a_namespace_that_could_not_be_made_stop_nothing() {
    let desk = Desk::new();
    let now = desk.now;
    let made = mkdir(&desk.rig.engine, b"n", now);
    let early = desk.rig.engine.open_name(made, b"x", now).expect("it looks as if it were there");
    desk.fail();
    assert_eq!(desk.rig.engine.child(NamespaceId::ROOT, b"n"), Ok(None));
    let again = mkdir(&desk.rig.engine, b"n", now);
    let late = desk.rig.engine.open_name(again, b"x", now).expect("a key");
    let told = desk.create(desk.open());
    desk.flush();
    assert_eq!(*told.lock(), [Ok(Reply::Claimed(Epoch(1)))], "the registry takes nothing any more");
    assert_eq!(early, late, "one path, one key");
}

#[test]
fn a_name_is_taken_until_the_removal_of_its_namespace_is_recorded() {
    let desk = Desk::new();
    let (now, engine) = (desk.now, &desk.rig.engine);
    let made = mkdir(engine, b"n", now);
    desk.flush();
    rmdir(engine, b"n", now);
    assert_eq!(engine.open_name(NamespaceId::ROOT, b"n", now), Err(Error::Exists));
    desk.fail();
    assert_eq!(engine.child(NamespaceId::ROOT, b"n"), Ok(Some(leasefs::namespaces::Node::Namespace(made))));
    rmdir(engine, b"n", now);
    desk.flush();
    assert!(engine.open_name(NamespaceId::ROOT, b"n", now).is_ok());
}

/// The kinds of the events so far.
fn heard(desk: &Desk) -> Vec<String> {
    let text = desk.rig.engine.events(0, 1 << 20, &Credentials::default()).0;
    let kind = |line: &str| -> serde_json::Value { serde_json::from_str(line).expect("JSON") };
    text.lines().map(|line| kind(line)["event"].as_str().expect("a kind").to_owned()).collect()
}

#[test]
fn a_wait_that_ends_with_an_error_is_told_of_once() {
    let (desk, granted, interrupted) = a_refused_grant_and_an_interrupted_wait();
    assert_eq!((granted.lock().len(), interrupted.lock().len()), (1, 1));
    let mut kinds = heard(&desk);
    kinds.sort();
    // Nothing is told of the grant that never was.
    assert_eq!(kinds, ["granted", "interrupted", "refused", "released", "waiting", "waiting"]);
    let text = desk.rig.engine.events(0, 1 << 20, &Credentials::default()).0;
    let refused = text.lines().find(|line| line.contains("refused")).expect("it is there");
    let refused: serde_json::Value = serde_json::from_str(refused).expect("JSON");
    assert_eq!((&refused["uid"], &refused["waited_ms"]), (&uid(1).into(), &0.into()), "{refused}");
    let metrics = desk.rig.engine.metrics(&Outside::default(), desk.now).expect("it can be read");
    assert!(metrics.contains("interrupted_waits_total 2\n"), "{metrics}");
}

#[test]
fn a_wait_that_ends_while_others_are_recorded_is_told_of_all_the_same() {
    let (desk, _) = Desk::held();
    let second = desk.open();
    let (waiter, told) = desk.wait(second, Mode::Exclusive);
    // Another key's grant is on its way, and fails.
    let other = desk.rig.engine.open_name(NamespaceId::ROOT, b"other", desk.now).expect("a key");
    let handle = desk.rig.engine.new_handle();
    let create = Input::Create { handle, claimant: claimant(1, 1) };
    desk.rig.engine.submit(other, create, desk.now, Box::new(|_| ()));
    desk.rig.engine.interrupt(waiter, desk.now);
    assert_eq!(*told.lock(), [Err(Error::Interrupted)], "at once");
    desk.fail();
    assert_eq!(heard(&desk), ["granted", "waiting", "interrupted"]);
}

#[test]
fn nobody_hears_of_a_grant_that_was_refused() {
    let desk = Desk::new();
    let heard = || desk.rig.engine.events(0, 1 << 20, &Credentials::default()).0;
    desk.create(desk.open());
    assert_eq!(heard(), "", "announced before it is recorded");
    desk.fail();
    assert_eq!(heard(), "");
    desk.create(desk.open());
    desk.create(desk.open());
    desk.flush();
    let kinds = ["granted", "denied"];
    assert_eq!(heard().lines().count(), kinds.len(), "{}", heard());
    assert!(kinds.iter().zip(heard().lines()).all(|(kind, line)| line.contains(kind)), "{}", heard());
    let metrics = desk.rig.engine.metrics(&Outside::default(), desk.now).expect("it can be read");
    assert!(metrics.contains("grants_total{via=\"create\"} 1\n"), "{metrics}");
}
