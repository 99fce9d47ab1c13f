//! The history of a key: what was asked and what was told, in the order in which the engine heard and said it.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

use leasefs::machine::Input;
use leasefs::{Engine, Handle, KeyId, Now, Owner, RequestId, WaiterId};
use parking_lot::Mutex;

use crate::contract::Told;
use crate::rig::is_by_order;

/// One entry of a key's history.
pub enum Entry {
    /// A request.
    Asked {
        input: Input,
        now_ns: u64,
        told: Vec<Told>,
        seen: bool,
        /// Asked again after a take-over: it may have taken effect before, so that it is a renewal now.
        again: bool,
    },
    /// A waiter was told that the registry refused.
    Refused(WaiterId, u64),
    /// The server ended, and another was started.
    Restarted { rebooted: bool, now_ns: u64 },
}

impl Entry {
    /// A request that does not wait, and was told nothing.
    pub fn is_unanswered_request(&self) -> bool {
        let Entry::Asked { input, told, .. } = self else { return false };
        told.is_empty()
            && !matches!(input, Input::Lock { wait: Some(_), .. } | Input::Close { .. } | Input::CloseDraft { .. })
    }

    /// A lock request that may wait and was told nothing.
    pub fn unanswered_wait(&self) -> Option<(WaiterId, RequestId)> {
        match self {
            Entry::Asked { input: Input::Lock { wait: Some(waiter), claimant, .. }, told, .. } if told.is_empty() => {
                Some((*waiter, claimant.request))
            }
            _ => None,
        }
    }

    /// The opening of a draft that was told nothing.
    pub fn is_unanswered_opening(&self) -> bool {
        matches!(self, Entry::Asked { input: Input::OpenDraft { .. }, told, .. } if told.is_empty())
    }

    /// A lock or an unlock of this owner that was told nothing.
    pub fn is_unanswered_lock(&self, of: Owner) -> bool {
        let Entry::Asked { input: Input::Lock { owner, .. } | Input::Unlock { owner, .. }, told, .. } = self else {
            return false;
        };
        told.is_empty() && *owner == of
    }

    /// A request about this handle that was told nothing.
    pub fn is_unanswered(&self, on: Handle) -> bool {
        let Entry::Asked { input, told, .. } = self else { return false };
        let of_request = match input {
            Input::Create { handle, .. }
            | Input::Lock { handle, .. }
            | Input::Unlock { handle, .. }
            | Input::Renew { handle, .. }
            | Input::OpenDraft { handle, .. }
            | Input::Commit { handle, .. } => *handle,
            _ => return false,
        };
        told.is_empty() && of_request == on
    }

    /// A request, and what it was told first.
    pub fn told(&self) -> Option<(&Input, &Told)> {
        match self {
            Entry::Asked { input, told, .. } => told.first().map(|told| (input, told)),
            _ => None,
        }
    }
}

/// Notes the answer to a request, unless the server was killed before it got out.
pub struct Teller {
    pub history: Arc<Mutex<Vec<Entry>>>,
    pub number: usize,
    pub engine: Weak<Engine>,
    pub silenced: Arc<AtomicBool>,
}

impl Teller {
    /// As an answer's callback, which also does what the mount does on it.
    pub fn of(self, key: KeyId, input: Input, now: Now) -> impl FnOnce(Told) + Send {
        let Teller { history, number, engine, silenced } = self;
        move |answer| {
            if silenced.load(Ordering::SeqCst) {
                return;
            }
            if let Some(engine) = engine.upgrade() {
                match &input {
                    Input::Create { .. } if answer.is_err() => engine.not_opened(key, now),
                    Input::OpenDraft { handle, .. } if answer.is_err() => engine.results.discard(*handle),
                    Input::CloseDraft { handle } => engine.results.discard(*handle),
                    _ => {}
                }
            }
            let mut history = history.lock();
            if let Input::Lock { wait: Some(waiter), .. } = &input
                && is_by_order(&answer)
            {
                history.push(Entry::Refused(*waiter, now.boot_ns));
            }
            if let Entry::Asked { told, .. } = &mut history[number] {
                told.push(answer);
            }
        }
    }
}
