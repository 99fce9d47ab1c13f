//! What one key's fault, or a fault that lasts, does to the others: nothing.

use std::sync::Arc;

use leasefs::machine::{Input, Outcome, Reply};
use leasefs::{Epoch, Error, Handle, KeyId, NamespaceId};
use parking_lot::Mutex;

use crate::players::{claimant, moment, uid};
use crate::rig::{Fate, Rig};

const START_NS: u64 = 1_000_000_000;

type Told = Arc<Mutex<Vec<Result<Reply, Error>>>>;

fn ask(rig: &Rig, key: KeyId, input: Input) -> Told {
    let told = Told::default();
    let into = Arc::clone(&told);
    rig.engine.submit(key, input, moment(START_NS), Box::new(move |answer| into.lock().push(answer)));
    told
}

fn open(rig: &Rig, name: &str) -> (KeyId, Handle) {
    let key = rig.engine.open_name(NamespaceId::ROOT, name.as_bytes(), moment(START_NS)).expect("a key");
    (key, rig.engine.new_handle())
}

fn create(rig: &Rig, key: KeyId, handle: Handle) -> Told {
    ask(rig, key, Input::Create { handle, claimant: claimant(1, 1) })
}

/// A key that is held, with a draft that is open, and by then may be gone.
fn with_draft(rig: &Rig, name: &str) -> (KeyId, Handle, Handle) {
    let (key, handle) = open(rig, name);
    create(rig, key, handle);
    rig.engine.flush(moment(START_NS));
    let draft = rig.engine.new_handle();
    drop(rig.engine.results.create_draft(draft).expect("a draft"));
    assert_eq!(
        *ask(rig, key, Input::OpenDraft { handle: draft, epoch: Epoch(1), uid: uid(1) }).lock(),
        [Ok(Reply::Done)]
    );
    (key, handle, draft)
}

fn commit(rig: &Rig, key: KeyId, draft: Handle) -> Told {
    ask(rig, key, Input::Commit { handle: draft, size: 0 })
}

#[test]
fn a_draft_that_cannot_become_a_result_refuses_its_own_commit_and_nothing_beside_it() {
    let rig = Rig::new(moment(START_NS));
    let (broken, holder, gone) = with_draft(&rig, "broken");
    let (sound, _, draft) = with_draft(&rig, "sound");
    let (other, handle) = open(&rig, "other");
    rig.engine.results.discard(gone);
    let told = [create(&rig, other, handle), commit(&rig, broken, gone), commit(&rig, sound, draft)];
    // On top of what fails: given back all the same.
    let closed = ask(&rig, broken, Input::Close { handle: holder, why: Arc::from("closed") });
    ask(&rig, broken, Input::CloseDraft { handle: gone });
    rig.engine.flush(moment(START_NS));
    rig.engine.flush(moment(START_NS));
    assert_eq!(*told[0].lock(), [Ok(Reply::Claimed(Epoch(1)))], "a claim beside it");
    assert!(matches!(*told[1].lock(), ref told if matches!(told[..], [Err(Error::Storage { .. })])), "its own");
    assert_eq!(*told[2].lock(), [Ok(Reply::Done)], "a result beside it");
    assert_eq!(*closed.lock(), [Ok(Reply::Done)]);
    rig.engine.open_key(broken).expect("a key that was");
    let again = create(&rig, broken, rig.engine.new_handle());
    rig.engine.flush(moment(START_NS));
    assert_eq!(*again.lock(), [Ok(Reply::Claimed(Epoch(2)))], "it is free");
    let (_, attempts) = rig.rows();
    let ended = attempts.iter().find(|row| (row.key_id, row.epoch) == (broken.0, 1)).expect("an attempt");
    assert_eq!((ended.outcome.as_deref(), ended.result), (Some(Outcome::Released.to_string().as_str()), None));
    assert_eq!(rig.result(sound, Epoch(1)), Some(Vec::new()));
    assert_eq!(rig.violations(), []);
}

#[test]
fn a_draft_that_fails_while_the_registry_fails_too_takes_nothing_along() {
    let rig = Rig::new(moment(START_NS));
    let (broken, _, gone) = with_draft(&rig, "broken");
    let (sound, _, draft) = with_draft(&rig, "sound");
    let (other, handle) = open(&rig, "other");
    rig.engine.results.discard(gone);
    let told = [create(&rig, other, handle), commit(&rig, broken, gone), commit(&rig, sound, draft)];
    rig.orders.expect([Fate::DiskFull]);
    rig.engine.flush(moment(START_NS));
    assert!(told.iter().all(|told| matches!(told.lock()[..], [Err(Error::Storage { .. })])), "all are refused");
    // Each as it was: the claim can be had, the draft that is there can become the result.
    let told = [create(&rig, other, handle), commit(&rig, sound, draft)];
    rig.engine.flush(moment(START_NS));
    assert_eq!(*told[0].lock(), [Ok(Reply::Claimed(Epoch(1)))]);
    assert_eq!(*told[1].lock(), [Ok(Reply::Done)]);
    assert_eq!(rig.result_files(), 1);
    assert_eq!(rig.violations(), []);
}

#[test]
fn refused_claims_of_new_names_do_not_pile_up() {
    let rig = Rig::new(moment(START_NS));
    let mut most = 0;
    for round in 0..100 {
        rig.orders.expect([Fate::DiskFull]);
        let (key, handle) = open(&rig, &format!("new-{round}"));
        let told = create(&rig, key, handle);
        rig.engine.flush(moment(START_NS));
        assert!(matches!(told.lock()[..], [Err(Error::Storage { .. })]));
        rig.engine.not_opened(key, moment(START_NS));
        most = most.max(rig.orders.writes());
    }
    assert!(most <= 10, "a commit of {most} writes after 100 refusals");
    rig.orders.clear();
    let (key, handle) = open(&rig, "new-7");
    let told = create(&rig, key, handle);
    rig.engine.flush(moment(START_NS));
    assert_eq!(*told.lock(), [Ok(Reply::Claimed(Epoch(1)))]);
    let (keys, _) = rig.rows();
    assert_eq!(keys.iter().map(|row| row.key.as_str()).collect::<Vec<_>>(), ["new-7"]);
    assert_eq!(rig.violations(), []);
}
