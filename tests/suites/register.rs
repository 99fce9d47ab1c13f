//! The lease register: what one key may do, as a model small enough to be believed.
//!
//! [`Act`] is a call by its answer. [`State::reads`] and [`State::after`] are the whole of the rules, written down from the
//! contract and not from the engine; [`linear`](crate::linear) looks for an order of a history's acts that keeps to them.

/// A lease of the history, by number.
pub type LeaseId = u32;

/// What a call did to the register, by its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Act {
    /// An exclusive claim that was granted. `known`: the epoch it was told, 0 if nobody read it.
    Grant {
        /// The lease.
        lease: LeaseId,
        /// The epoch told.
        known: u64,
        /// By exclusive create.
        create: bool,
        /// Its claimer was killed inside the call: granted or not.
        maybe: bool,
    },
    /// A shared lock that was granted.
    Share {
        /// The lease.
        lease: LeaseId,
        /// Granted or not, as above.
        maybe: bool,
    },
    /// A claim that was refused at once.
    Deny {
        /// By exclusive create: a finished key refuses it too.
        create: bool,
        /// Shared: other shares do not refuse it.
        share: bool,
    },
    /// The holder's handle still worked; `epoch` 0 if it told none.
    Own {
        /// The lease.
        lease: LeaseId,
        /// The epoch told.
        epoch: u64,
    },
    /// The holder's handle said that the lease is lost.
    Lost {
        /// The lease.
        lease: LeaseId,
    },
    /// The handle was given up; nothing happens if its lease was lost before.
    Release {
        /// The lease.
        lease: LeaseId,
    },
    /// The TTL ran out; nothing happens if a later attempt is registered.
    Expire {
        /// The lease.
        lease: LeaseId,
    },
    /// Somebody evicted the attempt of this epoch.
    Evict {
        /// The epoch.
        epoch: u64,
    },
    /// An eviction of this epoch missed.
    EvictMissed {
        /// The epoch.
        epoch: u64,
    },
    /// Somebody read the newest epoch.
    Observe {
        /// The epoch.
        epoch: u64,
    },
    /// A draft was opened.
    Draft {
        /// The lease.
        lease: LeaseId,
        /// Opened or not: killed inside the call.
        maybe: bool,
    },
    /// The attempt's result was refused because it exists.
    HasResult {
        /// The lease.
        lease: LeaseId,
    },
    /// A draft's handle worked.
    Registered {
        /// The lease.
        lease: LeaseId,
    },
    /// A result was refused because the attempt is not registered any more.
    NotRegistered {
        /// The lease.
        lease: LeaseId,
    },
    /// The result was committed.
    Commit {
        /// The lease.
        lease: LeaseId,
        /// Committed or not: killed inside the call.
        maybe: bool,
    },
    /// The draft's handle was closed.
    DraftEnd {
        /// The lease.
        lease: LeaseId,
        /// What became of an uncommitted draft.
        commits: Commits,
    },
    /// A finished key was forgotten.
    Forget,
    /// There was nothing to forget.
    ForgetNone,
    /// The key to be forgotten was held.
    ForgetBusy,
}

/// Whether closing a draft commits it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Commits {
    /// Closed in peace.
    Yes,
    /// The writer was killed.
    No,
    /// The writer was killed inside `close`.
    Maybe,
}

/// The register.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct State {
    epoch: u64,
    attempt: Option<LeaseId>,
    holder: bool,
    sharers: Vec<LeaseId>,
    registered: bool,
    result: bool,
    draft: bool,
    finished: bool,
}

impl State {
    fn is(&self, lease: LeaseId) -> bool {
        self.attempt == Some(lease)
    }

    fn kept(&self) -> bool {
        self.holder || self.draft
    }

    fn occupied(&self) -> bool {
        self.kept() || !self.sharers.is_empty()
    }

    /// The last handle of an attempt with a result leaves the key finished.
    fn settled(mut self) -> State {
        self.finished |= self.result && !self.kept();
        self
    }

    fn ended(&self) -> State {
        State { registered: false, holder: false, draft: false, ..self.clone() }.settled()
    }

    /// Whether an act that changes nothing may happen here; none if the act changes something.
    pub fn reads(&self, act: &Act) -> Option<bool> {
        Some(match *act {
            Act::Deny { create, share } => self.kept() || !share && !self.sharers.is_empty() || create && self.finished,
            Act::Own { lease, epoch } => self.is(lease) && self.holder && (epoch == 0 || epoch == self.epoch),
            Act::Lost { lease } => !(self.is(lease) && self.holder),
            Act::EvictMissed { epoch } => !(self.epoch == epoch && self.kept()),
            Act::Observe { epoch } => self.epoch == epoch,
            Act::HasResult { lease } => self.is(lease) && self.result,
            Act::Registered { lease } => self.is(lease) && self.registered,
            Act::NotRegistered { lease } => !(self.is(lease) && self.registered),
            // A shared lock holds nothing exclusively: it has no file, and the finished key's is not its.
            Act::ForgetNone => !self.kept() && !self.finished,
            Act::ForgetBusy => self.kept(),
            _ => return None,
        })
    }

    /// Whether an act changes nothing here, and never will again: what it ends, which did begin, has ended for good.
    pub fn is_over(&self, act: &Act) -> bool {
        match *act {
            Act::Release { lease } => !(self.sharers.contains(&lease) || self.is(lease) && self.holder),
            Act::Expire { lease } => !(self.is(lease) && self.registered),
            Act::DraftEnd { lease, .. } => !self.is(lease),
            _ => false,
        }
    }

    /// The states an act that changes something may lead to.
    pub fn after(&self, act: &Act) -> Vec<State> {
        let next = self.clone();
        let (maybe, changed) = match *act {
            Act::Grant { lease, known, create, maybe } => {
                let free = !(self.occupied() || create && self.finished);
                let epoch = self.epoch + 1;
                let sharers = Vec::new();
                let granted =
                    State { epoch, attempt: Some(lease), holder: true, registered: true, sharers, ..State::default() };
                (maybe, (free && (known == 0 || known == epoch)).then_some(granted))
            }
            Act::Share { lease, maybe } => {
                let mut shared = next;
                shared.sharers.push(lease);
                shared.sharers.sort_unstable();
                (maybe, (!self.kept()).then_some(shared))
            }
            Act::Release { lease } => {
                let mut released = next;
                released.sharers.retain(|&sharer| sharer != lease);
                if self.is(lease) && self.holder {
                    released.holder = false;
                    released = released.settled();
                }
                (false, Some(released))
            }
            Act::Expire { lease } => (false, Some(if self.is(lease) && self.registered { self.ended() } else { next })),
            Act::Evict { epoch } => (false, (self.epoch == epoch && self.kept()).then(|| self.ended())),
            Act::Draft { lease, maybe } => {
                let open = self.is(lease) && self.registered && !self.result;
                (maybe, open.then_some(State { draft: true, ..next }))
            }
            Act::Commit { lease, maybe } => {
                let open = self.is(lease) && self.registered && !self.result;
                (maybe, open.then_some(State { result: true, ..next }))
            }
            Act::DraftEnd { lease, commits } => {
                if !(self.is(lease) && self.draft) {
                    return vec![next];
                }
                let dropped = State { draft: false, ..next.clone() }.settled();
                let stored = State { draft: false, result: true, ..next }.settled();
                return match commits {
                    Commits::Yes => vec![stored],
                    Commits::No => vec![dropped],
                    Commits::Maybe => vec![stored, dropped],
                };
            }
            Act::Forget => {
                let there = self.finished && !self.kept();
                (false, there.then_some(State { finished: false, ..next }))
            }
            _ => return vec![],
        };
        changed.into_iter().chain(maybe.then(|| self.clone())).collect()
    }
}
