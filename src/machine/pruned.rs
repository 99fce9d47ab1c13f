//! What is left of a key's state when results of its ended attempts are pruned: everything but them.

use std::sync::Arc;

use super::attempt::ResultMeta;
use super::state::KeyState;
use crate::ids::Epoch;

impl KeyState {
    /// Whether an attempt is in use, so that neither it nor its result may be pruned: alive, or with an open draft.
    pub fn is_in_use(&self, epoch: Epoch) -> bool {
        let unended = self.attempt.as_ref().is_some_and(|attempt| attempt.epoch == epoch && attempt.ended.is_none());
        unended || self.drafts.values().any(|draft| *draft == epoch)
    }

    /// The results of these attempts are gone; `latest` is the newest that is left. The key's epoch and whether it is
    /// finished stay, and how its newest attempt ended. No other result can be committed in place of one that is gone.
    pub fn forget_results(&mut self, gone: &[(Epoch, u64)], latest: Option<(Epoch, ResultMeta)>) {
        let is_gone = |epoch: Epoch| gone.iter().any(|(of, _)| *of == epoch);
        if let Some(attempt) = self.attempt.as_mut().filter(|attempt| is_gone(attempt.epoch)) {
            let attempt = Arc::make_mut(attempt);
            (attempt.result, attempt.registered) = (None, false);
        }
        if self.latest_result.is_some_and(|(epoch, _)| is_gone(epoch)) {
            self.latest_result = latest;
            self.changes += 1;
        }
    }
}
