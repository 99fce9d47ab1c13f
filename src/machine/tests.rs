//! Corners of the rules that once were wrong, each by the behaviour the contract asks for. What is usual is covered by
//! the model in `tests/model`.

use std::sync::Arc;

use super::*;

const NOW: Now = Now { boot_ns: 5_000_000_000, wall_ms: 1_700_000_000_000 };
const PROCESS: Owner = Owner(7);

fn claimant() -> Claimant {
    let process = Process { pid: 100, start_time: 1 };
    let (holder, opener, locker) = (process, process, process);
    Claimant { uid: 1000, gid: 1000, holder, opener, locker, command: Arc::from("sh"), request: RequestId(0) }
}

/// A key and a moment.
#[derive(Default)]
struct Bench {
    key: KeyState,
    elapsed_ns: u64,
}

impl Bench {
    fn apply(&mut self, input: Input) -> Step {
        let now = Now { boot_ns: NOW.boot_ns + self.elapsed_ns, ..NOW };
        self.key.apply(input, Context { now, ttl: Ttl::DEFAULT, room: Room::default() })
    }

    fn create(&mut self, handle: u64) -> Result<Reply, Error> {
        self.apply(Input::Create { handle: Handle(handle), claimant: claimant() }).reply
    }

    fn lock(&mut self, handle: u64, owner: Owner, mode: Mode) -> Step {
        self.apply(Input::Lock { handle: Handle(handle), owner, mode, wait: None, claimant: claimant() })
    }

    fn wait(&mut self, waiter: u64, handle: u64, owner: Owner, mode: Mode) {
        let wait = Some(WaiterId(waiter));
        let step = self.apply(Input::Lock { handle: Handle(handle), owner, mode, wait, claimant: claimant() });
        assert_eq!(step.reply, Ok(Reply::Queued));
        assert_eq!(step.grants, []);
    }

    fn unlock(&mut self, handle: u64, owner: Owner) -> Step {
        self.apply(Input::Unlock { handle: Handle(handle), owner })
    }

    fn close(&mut self, handle: u64) -> Step {
        self.apply(Input::Close { handle: Handle(handle), why: Arc::from("closed") })
    }

    /// The connection is lost.
    fn orphan(&mut self) {
        std::sync::Arc::make_mut(self.key.attempt.as_mut().unwrap()).orphaned = true;
    }

    fn expire(&mut self) -> Step {
        self.elapsed_ns += Ttl::DEFAULT.as_nanos();
        self.apply(Input::Tick)
    }
}

fn renewed(waiter: u64) -> Grant {
    (WaiterId(waiter), Ok(Reply::Renewed(Epoch(1))))
}

#[test]
fn an_owner_that_joins_the_lease_does_not_leave_its_other_thread_waiting() {
    let mut bench = Bench::default();
    bench.create(1).unwrap();
    bench.wait(1, 2, PROCESS, Mode::Exclusive);
    let step = bench.lock(1, PROCESS, Mode::Exclusive);
    assert_eq!((step.reply, step.grants), (Ok(Reply::Renewed(Epoch(1))), vec![renewed(1)]));
}

#[test]
fn an_owner_that_joined_from_the_line_can_unlock() {
    let mut bench = Bench::default();
    bench.create(1).unwrap();
    bench.wait(1, 2, Owner(20), Mode::Exclusive);
    bench.wait(2, 2, PROCESS, Mode::Exclusive);
    bench.elapsed_ns = 1_000;
    let grants = bench.close(1).grants;
    let renewed = (WaiterId(2), Ok(Reply::Renewed(Epoch(2))));
    assert_eq!(grants, [(WaiterId(1), Ok(Reply::Claimed(Epoch(2)))), renewed]);
    bench.unlock(2, PROCESS).reply.unwrap();
    assert_eq!(bench.key.state(NOW), State::Free);
}

#[test]
fn a_share_does_not_end_with_another_owners_on_the_same_handle() {
    let mut bench = Bench::default();
    for owner in [Owner(10), PROCESS] {
        assert_eq!(bench.lock(1, owner, Mode::Shared).reply, Ok(Reply::Shared));
    }
    bench.unlock(1, Owner(10)).reply.unwrap();
    assert_eq!(bench.key.state(NOW), State::Shared);
    assert_eq!(bench.create(2), Err(Error::Taken));
    bench.unlock(1, PROCESS).reply.unwrap();
    assert_eq!(bench.key.state(NOW), State::Free);
}

#[test]
fn an_upgrade_is_not_in_its_own_way() {
    let mut bench = Bench::default();
    // A flock on one handle and the process's POSIX lock on another; then the process locks the first.
    bench.lock(1, Owner(10), Mode::Shared).reply.unwrap();
    bench.lock(2, PROCESS, Mode::Shared).reply.unwrap();
    assert_eq!(bench.lock(1, PROCESS, Mode::Exclusive).reply, Ok(Reply::Claimed(Epoch(1))));
    assert!(bench.key.sharers.is_empty());
}

#[test]
fn an_upgrade_in_line_is_not_in_its_own_way() {
    let mut bench = Bench::default();
    bench.create(1).unwrap();
    bench.wait(1, 2, PROCESS, Mode::Shared);
    bench.wait(2, 2, PROCESS, Mode::Exclusive);
    let shared = (WaiterId(1), Ok(Reply::Shared));
    assert_eq!(bench.close(1).grants, [shared, (WaiterId(2), Ok(Reply::Claimed(Epoch(2))))]);
    assert!(bench.key.sharers.is_empty());
}

#[test]
fn a_handle_that_lost_its_lease_gets_nothing_from_the_line() {
    let mut bench = Bench::default();
    bench.create(1).unwrap();
    bench.wait(1, 2, Owner(20), Mode::Exclusive);
    bench.wait(2, 2, Owner(20), Mode::Shared);
    bench.close(1);
    assert_eq!(bench.expire().grants, [(WaiterId(2), Err(Error::Stale))]);
    assert!(bench.key.sharers.is_empty());
}

#[test]
fn the_result_of_a_dead_holder_may_still_be_recorded() {
    let mut bench = Bench::default();
    bench.create(1).unwrap();
    bench.orphan();
    let lose = Input::Lose { epoch: Epoch(1), why: Arc::from("its process is gone") };
    bench.apply(lose).reply.unwrap();
    assert_eq!((bench.key.state(NOW), bench.key.last_outcome()), (State::Free, Some(Outcome::Lost)));
    let draft = Handle(9);
    bench.apply(Input::OpenDraft { handle: draft, epoch: Epoch(1), uid: 1000 }).reply.unwrap();
    assert_eq!(bench.create(2), Err(Error::Taken), "the draft keeps the key");
    bench.apply(Input::Commit { handle: draft, size: 1 }).reply.unwrap();
    bench.apply(Input::CloseDraft { handle: draft }).reply.unwrap();
    assert_eq!(bench.key.state(NOW), State::Finished);
}

#[test]
fn a_draft_keeps_the_attempt_of_a_holder_that_is_found_dead() {
    let mut bench = Bench::default();
    bench.create(1).unwrap();
    let draft = Handle(9);
    bench.apply(Input::OpenDraft { handle: draft, epoch: Epoch(1), uid: 1000 }).reply.unwrap();
    bench.orphan();
    bench.apply(Input::Lose { epoch: Epoch(1), why: Arc::from("its process is gone") }).reply.unwrap();
    assert_eq!(bench.key.state(NOW), State::Reporting);
    let renewed = bench.apply(Input::Renew { handle: Handle(1), note: None }).reply;
    assert_eq!(renewed, Err(Error::Denied), "its handle went with the connection");
    assert_eq!(bench.key.check_draft(draft, NOW), Ok(Epoch(1)));
}

fn stranger() -> Claimant {
    let process = Process { pid: 200, start_time: 1 };
    Claimant { holder: process, opener: process, locker: process, ..claimant() }
}

#[test]
fn an_orphaned_holder_has_its_attempt_back_before_those_in_line() {
    let mut bench = Bench::default();
    bench.create(1).unwrap();
    bench.orphan();
    let wait = Some(WaiterId(1));
    let (handle, owner, mode) = (Handle(2), Owner(20), Mode::Exclusive);
    let step = bench.apply(Input::Lock { handle, owner, mode, wait, claimant: stranger() });
    assert_eq!(step.reply, Ok(Reply::Queued));
    bench.elapsed_ns = 1_000;
    assert_eq!(bench.lock(3, Owner(30), Mode::Exclusive).reply, Ok(Reply::Renewed(Epoch(1))));
    assert_eq!(bench.key.state(NOW), State::Held);
    let attempt = bench.key.attempt.clone().unwrap();
    assert_eq!((attempt.handle, &attempt.owners[..]), (Handle(3), &[Owner(30)][..]));
    assert_eq!(attempt.deadline_ns, NOW.boot_ns + 1_000 + Ttl::DEFAULT.as_nanos());
    // Once: another handle of the process is one like any other now.
    assert_eq!(bench.lock(4, Owner(40), Mode::Exclusive).reply, Err(Error::WouldBlock));
    assert_eq!(bench.unlock(3, Owner(30)).grants, [(WaiterId(1), Ok(Reply::Claimed(Epoch(2))))]);
}

#[test]
fn an_orphaned_holder_has_its_attempt_back_by_creating_it_again_and_can_unlock() {
    let mut bench = Bench::default();
    bench.lock(1, Owner(10), Mode::Exclusive).reply.unwrap();
    bench.orphan();
    let claimant = stranger();
    assert_eq!(bench.apply(Input::Create { handle: Handle(2), claimant }).reply, Err(Error::Taken));
    assert_eq!(bench.create(3), Ok(Reply::Renewed(Epoch(1))));
    bench.unlock(3, Owner(30)).reply.unwrap();
    assert_eq!(bench.key.state(NOW), State::Free);
}

#[test]
fn an_orphaned_holder_that_comes_back_as_a_reader_lets_readers_in() {
    let mut bench = Bench::default();
    bench.create(1).unwrap();
    bench.orphan();
    assert_eq!(bench.lock(2, Owner(20), Mode::Shared).reply, Ok(Reply::Shared));
    assert_eq!((bench.key.state(NOW), bench.key.last_outcome()), (State::Shared, Some(Outcome::Released)));
}

#[test]
fn a_process_that_cannot_be_seen_does_not_come_back() {
    let mut bench = Bench::default();
    let unseen = Process::default();
    let claimant = Claimant { holder: unseen, opener: unseen, locker: unseen, ..claimant() };
    bench.apply(Input::Create { handle: Handle(1), claimant: claimant.clone() }).reply.unwrap();
    bench.orphan();
    assert_eq!(bench.apply(Input::Create { handle: Handle(2), claimant }).reply, Err(Error::Taken));
}

#[test]
fn a_proof_of_death_does_not_reach_a_holder_that_came_back() {
    let mut bench = Bench::default();
    bench.create(1).unwrap();
    bench.orphan();
    bench.create(2).unwrap();
    let lose = Input::Lose { epoch: Epoch(1), why: Arc::from("no process has its handle open") };
    assert_eq!(bench.apply(lose).reply, Err(Error::Stale));
    assert_eq!(bench.key.state(NOW), State::Held);
}

fn give_back(epoch: u64, uid: u32) -> Input {
    Input::GiveBack { epoch: Epoch(epoch), uid, why: Arc::from("by pid 1"), request: RequestId(0) }
}

fn renew_attempt(epoch: u64, uid: u32) -> Input {
    Input::RenewAttempt { epoch: Epoch(epoch), uid }
}

#[test]
fn an_order_to_give_back_reaches_exactly_its_epoch_and_is_for_its_user() {
    let mut bench = Bench::default();
    bench.create(1).unwrap();
    for (epoch, uid, refusal) in [(1, 1001, Error::Denied), (0, 1000, Error::Stale), (2, 0, Error::Stale)] {
        assert_eq!(bench.apply(give_back(epoch, uid)).reply, Err(refusal.clone()));
        assert_eq!(bench.apply(renew_attempt(epoch, uid)).reply, Err(refusal));
    }
    assert_eq!(bench.key.state(NOW), State::Held);
    bench.wait(1, 2, Owner(20), Mode::Exclusive);
    let step = bench.apply(give_back(1, 1000));
    assert_eq!((step.reply, step.grants), (Ok(Reply::Done), vec![(WaiterId(1), Ok(Reply::Claimed(Epoch(2))))]));
    assert_eq!(step.lost, [(Handle(1), Epoch(1))]);
    assert_eq!(bench.apply(give_back(1, 1000)).reply, Err(Error::Stale), "once");
    assert_eq!(bench.apply(renew_attempt(1, 1000)).reply, Err(Error::Stale));
    assert_eq!(bench.apply(Input::Renew { handle: Handle(1), note: None }).reply, Err(Error::Stale));
    assert_eq!(bench.unlock(1, PROCESS).reply, Err(Error::Stale), "it cannot free what the next one holds");
    assert_eq!(bench.key.held_by(Handle(2)).map(|attempt| attempt.epoch), Some(Epoch(2)));
}

#[test]
fn a_handle_whose_lease_was_given_back_by_order_gets_nothing_from_the_line() {
    let mut bench = Bench::default();
    bench.create(1).unwrap();
    bench.wait(1, 2, Owner(20), Mode::Exclusive);
    bench.wait(2, 2, Owner(20), Mode::Shared);
    bench.wait(3, 3, Owner(30), Mode::Exclusive);
    bench.close(1);
    let grants = bench.apply(give_back(2, 1000)).grants;
    assert_eq!(grants, [(WaiterId(2), Err(Error::Stale)), (WaiterId(3), Ok(Reply::Claimed(Epoch(3))))]);
}

#[test]
fn an_order_to_give_back_leaves_the_result_time_to_arrive() {
    let mut bench = Bench::default();
    bench.create(1).unwrap();
    let draft = Handle(9);
    bench.apply(Input::OpenDraft { handle: draft, epoch: Epoch(1), uid: 1000 }).reply.unwrap();
    bench.apply(give_back(1, 1000)).reply.unwrap();
    assert_eq!(bench.key.state(NOW), State::Reporting);
    assert_eq!(bench.apply(give_back(1, 1000)).reply, Err(Error::Stale), "its handle holds it no more");
    assert_eq!(bench.apply(renew_attempt(1, 1000)).reply, Err(Error::Stale));
    assert_eq!(bench.key.check_draft(draft, NOW), Ok(Epoch(1)));
    bench.apply(Input::CloseDraft { handle: draft }).reply.unwrap();
    assert_eq!((bench.key.state(NOW), bench.key.last_outcome()), (State::Free, Some(Outcome::Released)));
}

#[test]
fn an_order_that_comes_again_is_answered_again_and_hits_nobody_else() {
    let mut bench = Bench::default();
    bench.create(1).unwrap();
    let order = Input::GiveBack { epoch: Epoch(1), uid: 0, why: Arc::from("by pid 1"), request: RequestId(7) };
    bench.apply(order.clone()).reply.unwrap();
    bench.create(2).unwrap();
    let again = bench.apply(order);
    assert_eq!((again.reply, again.changes.len()), (Ok(Reply::Done), 0));
    assert_eq!(bench.key.state(NOW), State::Held);
}

#[test]
fn the_user_of_an_orphaned_attempt_may_order_and_nobody_comes_back_to_it() {
    let mut bench = Bench::default();
    bench.create(1).unwrap();
    bench.orphan();
    bench.elapsed_ns = 1_000;
    assert_eq!(bench.apply(renew_attempt(1, 1000)).reply, Ok(Reply::Renewed(Epoch(1))));
    assert_eq!(bench.key.state(NOW), State::Orphaned, "a renewal is no handle");
    assert_eq!(bench.apply(give_back(1, 1000)).lost, [], "its handle went with the connection");
    assert_eq!((bench.key.state(NOW), bench.key.last_outcome()), (State::Free, Some(Outcome::Released)));
    assert_eq!(bench.create(2), Ok(Reply::Claimed(Epoch(2))));
}

#[test]
fn an_order_to_renew_moves_the_deadline_and_comes_too_late_after_it() {
    let mut bench = Bench::default();
    bench.create(1).unwrap();
    bench.elapsed_ns = Ttl::DEFAULT.as_nanos() - 1;
    assert_eq!(bench.apply(renew_attempt(1, 1000)).reply, Ok(Reply::Renewed(Epoch(1))));
    assert_eq!(bench.key.deadline_ns(), Some(NOW.boot_ns + bench.elapsed_ns + Ttl::DEFAULT.as_nanos()));
    bench.elapsed_ns += Ttl::DEFAULT.as_nanos();
    assert_eq!(bench.apply(renew_attempt(1, 1000)).reply, Err(Error::Stale));
    assert_eq!(bench.key.last_outcome(), Some(Outcome::Expired));
}

#[test]
fn an_agents_name_is_its_attempts_and_renews_nothing() {
    let mut bench = Bench::default();
    let agent = |uid, name: Option<&str>| Input::SetAgent { uid, agent: name.map(Arc::from) };
    assert_eq!(bench.apply(agent(0, Some("a"))).reply, Err(Error::Stale), "nobody holds it");
    bench.create(1).unwrap();
    let deadline = bench.key.deadline_ns();
    bench.elapsed_ns = 1_000;
    assert_eq!(bench.apply(agent(1001, Some("b"))).reply, Err(Error::NotPermitted));
    let step = bench.apply(agent(1000, Some("a")));
    assert_eq!((step.reply, step.notices.len()), (Ok(Reply::Done), 0));
    assert_eq!(bench.key.deadline_ns(), deadline);
    let named =
        |bench: &Bench| bench.key.attempt.as_ref().and_then(|attempt| attempt.agent.as_deref().map(str::to_owned));
    assert_eq!(named(&bench).as_deref(), Some("a"));
    bench.apply(agent(0, None)).reply.unwrap();
    assert_eq!(named(&bench), None);
    bench.apply(agent(0, Some("a"))).reply.unwrap();
    bench.close(1);
    assert_eq!(named(&bench).as_deref(), Some("a"), "kept for its history");
    bench.create(2).unwrap();
    assert_eq!(named(&bench), None, "the next attempt has none");
}

#[test]
fn a_grant_says_how_long_it_was_waited_for() {
    let mut bench = Bench::default();
    bench.create(1).unwrap();
    assert_eq!(bench.key.attempt.as_ref().map(|attempt| attempt.waited_ms), Some(0));
    bench.wait(1, 2, Owner(20), Mode::Exclusive);
    bench.elapsed_ns = 2_500_000_000;
    bench.close(1);
    assert_eq!(bench.key.attempt.as_ref().map(|attempt| attempt.waited_ms), Some(2_500));
}
