//! The verdict: what everybody was told, and what is left, against what the contract's model says of the same requests.

use leasefs::metrics::Outside;

use super::*;
use crate::rig::is_by_order;

impl Game {
    /// Ends all faults, and judges.
    pub fn verdict(game: &Arc<Mutex<Game>>) -> Result<(), TestCaseError> {
        // A key that nobody uses is forgotten when it is read, and that is recorded by the next flush.
        while game.lock().rig().engine.read_on().expect("keys can be read") {}
        Game::settle(game);
        let game = game.lock();
        let rig = game.rig();
        game.check_derived()?;
        let mut committed = 0;
        for (at, seat) in game.seats.iter().enumerate() {
            game.explain(at)?;
            committed += game.check_results(seat)?;
        }
        prop_assert_eq!(rig.result_files(), committed, "a result file for each commit");
        let drafts: usize = game.seats.iter().map(|seat| seat.players.drafts.len()).sum();
        prop_assert!(rig.draft_files() <= drafts, "drafts are left over");
        let found = rig.violations();
        prop_assert!(found.is_empty(), "leasefs verify finds {:?}", found);
        Ok(())
    }

    /// What the engine derives from its keys goes with them: files, counts, the time to wake up at.
    fn check_derived(&self) -> Result<(), TestCaseError> {
        let engine = &self.rig().engine;
        let (mut held, mut waiting, mut wake_ns) = (0, 0, u64::MAX);
        for (at, seat) in self.seats.iter().enumerate() {
            let Some(id) = self.id(at) else { continue };
            let listed = engine
                .look_into(seat.parent, |tree, _| tree.list_files(seat.parent, 0).any(|node| node == Node::Key(id)));
            let listed = listed.expect("keys can be read");
            prop_assert_eq!(self.look(at, |entry| entry.state.has_file()), Some(listed), "the listing of {}", seat.key);
            held += self.look(at, |entry| usize::from(entry.state.live().is_some())).unwrap_or(0);
            waiting += self.look(at, |entry| entry.state.line.len()).unwrap_or(0);
            wake_ns = wake_ns.min(self.look(at, |entry| entry.state.deadline_ns()).flatten().unwrap_or(u64::MAX));
        }
        let metrics = engine.metrics(&Outside::default(), self.now()).expect("keys can be read");
        for (name, value) in [("held", held), ("waiting", waiting)] {
            prop_assert!(metrics.contains(&format!("\nleasefs_{name} {value}\n")), "{} {}: {}", name, value, metrics);
        }
        prop_assert_eq!(engine.wake_ns(), wake_ns, "when the engine wakes up");
        Ok(())
    }

    /// Every result that was committed is there with its own bytes; how many there are.
    fn check_results(&self, seat: &Seat) -> Result<usize, TestCaseError> {
        let Some(id) = self.rig().engine.find(&seat.key).expect("keys can be read") else { return Ok(0) };
        let mut epochs: HashMap<Handle, Epoch> = HashMap::new();
        let mut committed = HashSet::new();
        for entry in seat.history.lock().iter() {
            let Entry::Asked { input, told, .. } = entry else { continue };
            match input {
                Input::OpenDraft { handle, epoch, .. } => drop(epochs.insert(*handle, *epoch)),
                Input::Commit { handle, .. } if told.first().is_some_and(Result::is_ok) => {
                    let epoch = epochs[handle];
                    prop_assert_eq!(self.rig().result(id, epoch), Some(content(*handle)), "I-ONE-RESULT of {}", epoch);
                    let stored = self.rig().engine.result_of(id, epoch).ok().flatten();
                    prop_assert_eq!(stored.map(|result| result.size), Some(content(*handle).len() as u64));
                    committed.insert(*handle);
                }
                _ => {}
            }
        }
        Ok(committed.len())
    }

    /// Finds out whether the model explains a key's history. Where a commit was refused, a waiter that got nothing may
    /// have left before it got into line, or out of it: both are right.
    fn explain(&self, at: usize) -> Result<(), TestCaseError> {
        let seat = &self.seats[at];
        let history = seat.history.lock();
        let told = || history.iter().filter_map(Entry::told);
        let faulty = told().any(|(_, told)| is_by_order(told));
        let left = |(input, told): (&Input, &Told)| match (input, told) {
            (Input::Lock { wait, .. }, Err(_)) if faulty => *wait,
            _ => None,
        };
        let doomed: Vec<WaiterId> = told().filter_map(left).collect();
        let mut first = Ok(());
        for choice in 0..1u32 << doomed.len().min(MAX_EXPLAINED) {
            let never_in_line = |waiter: WaiterId| {
                doomed
                    .iter()
                    .position(|other| *other == waiter)
                    .is_some_and(|at| at < MAX_EXPLAINED && choice >> at & 1 == 1)
            };
            let model = Contract::new(doomed.iter().copied().collect());
            match self.replay(at, &history, model, faulty, never_in_line) {
                Ok(()) => return Ok(()),
                Err(problem) if choice == 0 => first = Err(problem),
                Err(_) => {}
            }
        }
        first
    }

    fn replay(
        &self,
        at: usize,
        history: &[Entry],
        mut model: Contract,
        faulty: bool,
        never_in_line: impl Fn(WaiterId) -> bool,
    ) -> Result<(), TestCaseError> {
        let seat = &self.seats[at];
        let mut waiting: HashMap<WaiterId, (usize, bool, &Vec<Told>)> = HashMap::new();
        for (number, entry) in history.iter().enumerate() {
            let grants = match entry {
                Entry::Refused(waiter, now_ns) => {
                    waiting.remove(waiter);
                    model.refuse(*waiter, *now_ns, seat.ttl)
                }
                Entry::Restarted { rebooted, now_ns } => {
                    model.restart(*rebooted, *now_ns);
                    waiting.clear();
                    Vec::new()
                }
                Entry::Asked { input, now_ns, told, again, .. } => {
                    prop_assert!(told.len() <= 1, "request {} was answered {:?}", number, told);
                    let waiter = match input {
                        Input::Lock { wait, .. } => *wait,
                        _ => None,
                    };
                    let refused = told.first().is_some_and(is_by_order);
                    prop_assert!(!(refused && input.is_fact()), "{:?} happened, and was refused", input);
                    if refused && waiter.is_none() || waiter.is_some_and(&never_in_line) {
                        continue;
                    }
                    let superseded = *again && told.first() == Some(&Err(leasefs::Error::Stale));
                    if superseded && matches!(input, Input::OpenDraft { .. }) {
                        // The lease was taken away before it could be told of.
                        continue;
                    }
                    let refused = refused || waiter.is_some_and(|waiter| model.is_doomed(waiter));
                    let (reply, grants) = model.step(input, *now_ns, seat.ttl);
                    match (reply, waiter) {
                        (Ok(leasefs::machine::Reply::Queued), Some(waiter)) => {
                            waiting.insert(waiter, (number, *again, told));
                        }
                        _ if refused => {}
                        // What was on top of a refused request may have been told of it, and happened all the same.
                        (reply, _) if faulty && input.is_fact() => {
                            prop_assert_eq!(told.len(), 1, "{:?}: {:?}", input, reply)
                        }
                        // No client asks for these: what was done once is not there to be done again.
                        _ if *again && matches!(input, Input::Lose { .. } | Input::LoseShares | Input::Cancel(_)) => {}
                        _ if superseded
                            && matches!(
                                input,
                                Input::Renew { .. }
                                    | Input::RenewAttempt { .. }
                                    | Input::SetTtl { .. }
                                    | Input::SetAgent { .. }
                                    | Input::Lock { .. }
                            ) => {}
                        // What was on its way at the same time may have come first.
                        (Err(_), _) if *again && told.first().is_some_and(Result::is_err) => {}
                        (Ok(_), _) if *again => {
                            prop_assert!(told.first().is_some_and(Result::is_ok), "{:?} again: {:?}", input, told);
                        }
                        (reply, _) => prop_assert_eq!(told, &[reply], "the answer to request {}: {:?}", number, input),
                    }
                    grants
                }
            };
            for (waiter, reply) in grants {
                let (number, again, told) = waiting.remove(&waiter).expect("granted in line");
                prop_assert!(
                    told.as_slice() == std::slice::from_ref(&reply)
                        || again && told.first().is_some_and(|told| told.is_ok() && reply.is_ok())
                        || told.first().is_some_and(is_by_order),
                    "waiter {} (request {}) was told {:?} and not {:?}",
                    waiter,
                    number,
                    told,
                    reply
                );
            }
        }
        for (number, _, told) in waiting.iter().filter(|(waiter, _)| !model.is_doomed(**waiter)).map(|(_, asked)| asked)
        {
            prop_assert!(told.is_empty(), "request {} still waits by the contract, but was told {:?}", number, told);
        }
        match self.look(at, |entry| compare(&entry.state, &model, self.now_ns)) {
            Some(compared) => compared,
            None => {
                prop_assert_eq!(
                    (model.epoch, model.sharers.len(), model.orphans.len(), model.line.len()),
                    (0, 0, 0, 0),
                    "the key was forgotten"
                );
                Ok(())
            }
        }
    }
}
