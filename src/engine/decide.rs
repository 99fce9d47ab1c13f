//! What happens under the lock: an input is applied, its effects become writes, answers and announcements.

use std::collections::BTreeSet;
use std::sync::Arc;

use foldhash::HashMap;

use super::survivors::Left;
use super::{Config, Inner, KeyEntry, MAX_CLOSES, Ready, Start};
use crate::batch::{Answer, Batch, Done, Logged, Note, Waiting};
use crate::error::Error;
use crate::events::{Events, Kind, Wait};
use crate::ids::{Epoch, KeyId, NamespaceId};
use crate::key::Key;
use crate::machine::{Change, Context, Input, KeyState, Reply, Room, Step, Waiter};
use crate::metrics::{Detail, Metrics};
use crate::namespaces::{Namespaces, Node};
use crate::registry::{Loaded, LoadedKey, NamespaceRow, Write};
use crate::time::Now;

impl Inner {
    pub(super) fn new(config: Config, loaded: Loaded, start: Start<'_>) -> Inner {
        let Start { now, memory, survivors, .. } = start;
        let mut survivors = survivors.unwrap_or_default();
        let defaults = [0o777, 0o700];
        let root_is_new = !loaded.namespaces.iter().any(|row| row.id == NamespaceId::ROOT);
        let root = config.root.clone();
        let mut inner = Inner {
            namespaces: Namespaces::load(loaded.namespaces, root.clone()),
            config,
            keys: HashMap::default(),
            last_key: loaded.last_key.0,
            deadlines: BTreeSet::new(),
            orphans: BTreeSet::new(),
            waiting: Waiting::default(),
            held_by_uid: HashMap::default(),
            held: 0,
            batch: Batch::new(1),
            spare: Batch::default(),
            settled: 0,
            removes: 0,
            retry_ns: None,
            commits: 0,
            events: Events::starting_at(survivors.next_event),
            metrics: Metrics::default(),
            details: Vec::new(),
            changed: Vec::new(),
            watched: false,
            memory,
            unread: None,
        };
        let stored = inner.namespaces.get(NamespaceId::ROOT).map_or_else(|| root.clone(), |root| root.row.clone());
        // A mode nobody chose follows --allow-other.
        if root_is_new || stored.mode != root.mode && defaults.contains(&stored.mode) {
            let row = NamespaceRow { mode: root.mode, ..stored };
            inner.namespaces.set(row.clone());
            inner.batch.writes.push(Write::Namespace(row));
        }
        for known in loaded.keys {
            let left = survivors.take(KeyId(known.row.id));
            inner.admit(known, left, now);
        }
        inner
    }

    /// Takes in a key from the registry, with what else was left of it. One that was never claimed and is in nobody's use
    /// is forgotten.
    pub(super) fn admit(&mut self, known: LoadedKey, left: Left, now: Now) {
        let id = KeyId(known.row.id);
        let (above, name) = known.row.key.split();
        let Some(namespace) = self.namespaces.find(above) else { return };
        self.namespaces.link(namespace, name.into(), Node::Key(id));
        let mut state = KeyState {
            epoch: Epoch(known.row.epoch),
            attempt: known.attempt.map(Arc::new),
            previous_outcome: known.previous_outcome,
            finished: known.row.finished,
            latest_result: known.latest_result,
            last_request: known.last_request,
            ..KeyState::default()
        };
        let opens = left.claims.len();
        self.adopt(id, &mut state, known.shares, left, now);
        let entry = KeyEntry {
            key: known.row.key,
            namespace,
            state,
            unsettled: 0,
            changed: 0,
            armed_ns: None,
            counted: None,
            opens,
            orphaned_why: None,
        };
        self.keys.insert(id, entry);
        self.refresh(id);
        self.forget_unused(id, now);
    }

    pub(super) fn is_present(&self, node: Node) -> bool {
        match node {
            Node::Namespace(id) => self.namespaces.get(id).is_some_and(|namespace| namespace.row.present),
            Node::Key(_) => true,
        }
    }

    pub(super) fn intern(&mut self, parent: NamespaceId, name: &[u8], now: Now) -> Result<KeyId, Error> {
        let above = self.namespaces.get(parent).filter(|namespace| namespace.row.present).ok_or(Error::NotFound)?;
        let key = Key::join(&above.row.path, name)?;
        let (_, name) = key.split();
        match self.namespaces.child(parent, name) {
            Some(Node::Key(id)) => return Ok(id),
            // A removed namespace that has had keys keeps its name: they would be found nowhere. So does one that may
            // come back because its removal is not recorded yet.
            Some(Node::Namespace(id))
                if self.is_present(Node::Namespace(id))
                    || self.namespaces.has_children(id)
                    || self.removes > self.settled =>
            {
                return Err(Error::Exists);
            }
            Some(Node::Namespace(_)) | None => {}
        }
        if self.last_key >= KeyId::MAX.0 {
            return Err(Error::Limit("no number is left for a new key"));
        }
        self.last_key += 1;
        let id = KeyId(self.last_key);
        self.namespaces.link(parent, name.into(), Node::Key(id));
        self.touch_batch(now);
        self.batch.writes.push(Write::Key(id, key.clone()));
        let entry = KeyEntry {
            key,
            namespace: parent,
            state: KeyState::default(),
            unsettled: 0,
            changed: 0,
            armed_ns: None,
            counted: None,
            opens: 0,
            orphaned_why: None,
        };
        self.keys.insert(id, entry);
        Ok(id)
    }

    pub(super) fn opened(&mut self, id: KeyId) -> bool {
        let entry = self.keys.get_mut(&id);
        entry.map(|entry| entry.opens += 1).is_some()
    }

    /// A handle of a key is gone. A key that was opened, never claimed, and is in nobody's use is forgotten.
    pub(super) fn closed(&mut self, id: KeyId, now: Now) {
        if let Some(entry) = self.keys.get_mut(&id) {
            entry.opens = entry.opens.saturating_sub(1);
        }
        self.forget_unused(id, now);
    }

    pub(super) fn forget_unused(&mut self, id: KeyId, now: Now) {
        let Some(entry) = self.keys.get(&id) else { return };
        let in_use = entry.opens > 0 || !entry.state.sharers.is_empty();
        if in_use || entry.state.epoch != Epoch(0) || entry.unsettled > self.settled {
            return;
        }
        let (namespace, name) = (entry.namespace, entry.key.split().1.to_owned());
        self.keys.remove(&id);
        self.unlearn(id);
        self.namespaces.unlink(namespace, &name, Node::Key(id));
        self.touch_batch(now);
        self.batch.writes.push(Write::Forget(id));
    }

    /// Whether anybody shares or waits for a key of a namespace: it has no file, but it is in use.
    pub(super) fn is_in_use(&self, id: NamespaceId) -> bool {
        self.namespaces.list(id, 0).any(|node| match node {
            Node::Key(key) => self.keys.get(&key).is_some_and(|entry| !entry.state.sharers.is_empty()),
            Node::Namespace(_) => false,
        })
    }

    pub(super) fn touch_batch(&mut self, now: Now) {
        if self.batch.is_empty() {
            self.batch.since_ns = now.boot_ns;
        }
    }

    pub(super) fn set_namespace(&mut self, row: NamespaceRow, now: Now, done: Done) {
        self.touch_batch(now);
        let id = row.id;
        self.batch.writes.push(Write::Namespace(row.clone()));
        let before = self.namespaces.set(row);
        self.batch.remember_namespace(id, before);
        self.batch.answers.push(Answer { done, reply: Ok(Reply::Done), key: None, fact: false, waited: None });
        self.batch.urgent = true;
    }

    pub(super) fn touch_mtime(&mut self, id: NamespaceId, now: Now) {
        if let Some(mut row) = self.namespaces.get(id).map(|namespace| namespace.row.clone()) {
            row.mtime_ns = now.wall_ms * 1_000_000;
            row.ctime_ns = row.mtime_ns;
            self.batch.writes.push(Write::Namespace(row.clone()));
            let before = self.namespaces.set(row);
            self.batch.remember_namespace(id, before);
        }
    }

    pub(super) fn submit(&mut self, id: KeyId, input: Input, now: Now, done: Done, ready: &mut Ready) {
        let input = match self.check_waiters(id, input, now) {
            Ok(input) => input,
            Err(error) => return ready.push((done, Err(error))),
        };
        let waiter = match &input {
            Input::Lock { wait: Some(waiter), claimant, .. } => Some((*waiter, Wait::of(claimant))),
            _ => None,
        };
        let cancels = matches!(input, Input::Cancel(_));
        let (closes, fact) = (matches!(input, Input::Close { .. }), input.is_fact());
        let Some(step) = self.apply(id, input, now) else {
            return ready.push((done, Err(Error::NotFound)));
        };
        let reply = step.reply.clone();
        let changed = !step.changes.is_empty();
        let mut done = Some(done);
        if reply == Ok(Reply::Queued)
            && let Some((waiter, who)) = waiter
            && let Some(done) = done.take()
        {
            self.waiting.insert(waiter, id, who, now, done);
        }
        self.absorb(id, step, now, ready);
        if closes {
            self.closed(id, now);
        }
        let Some(done) = done else { return };
        if let Err(error) = &reply {
            self.note_refusal(id, error, now);
        }
        let unsettled = self.is_unsettled(id);
        // A closed handle is forgotten once what its key was before is recorded; and whoever left the line may have given a
        // share back to get into it.
        let recorded = !(cancels || closes) || self.is_recorded(id);
        if !unsettled && (reply.is_err() || !changed) && recorded {
            return ready.push((done, reply));
        }
        // Nobody waits for the answer to a close, so it does not hurry the batch. But the kernel sends no more of them
        // than it was told to while they are unanswered, and a close it keeps back ends no lease.
        self.batch.closes += usize::from(closes);
        if !(closes && changed) || self.batch.closes >= MAX_CLOSES {
            self.touch_batch(now);
            self.batch.urgent = true;
        }
        self.batch.answers.push(Answer { done, reply, key: Some(id), fact, waited: None });
    }

    pub(super) fn is_unsettled(&self, id: KeyId) -> bool {
        self.keys.get(&id).is_some_and(|entry| entry.unsettled > self.settled)
    }

    /// Whether all that has changed is recorded, also what cannot be taken back.
    fn is_recorded(&self, id: KeyId) -> bool {
        self.keys.get(&id).is_none_or(|entry| entry.changed <= self.settled)
    }

    /// Applies an input; keeps the way back where the step can be taken back, and what to repeat where one before can.
    pub(super) fn apply(&mut self, id: KeyId, input: Input, now: Now) -> Option<Step> {
        let unsettled = self.is_unsettled(id);
        let entry = self.keys.get_mut(&id)?;
        let ttl = self.namespaces.ttl(entry.namespace).unwrap_or(self.config.ttl);
        let before = (entry.unsettled != self.batch.number).then(|| entry.state.clone());
        let changes = entry.state.changes;
        let fact = input.is_fact();
        let repeat = (fact || matches!(input, Input::Lock { wait: Some(_), .. })).then(|| input.clone());
        let room = Room::of(&self.held_by_uid, entry.counted, self.config.max_keys);
        let step = entry.state.apply(input, Context { now, ttl, room });
        if self.watched && entry.state.changes != changes {
            self.changed.push(id);
        }
        let refusable = step.changes.iter().any(Change::is_refusable);
        if refusable && let Some(before) = before {
            entry.unsettled = self.batch.number;
            self.batch.remember(id, before);
        }
        let stays = fact || step.reply == Ok(Reply::Queued);
        if stays
            && (unsettled || refusable)
            && let Some(input) = repeat
        {
            self.batch.log.push(Logged { key: id, input, now });
        }
        Some(step)
    }

    /// The limit on waiters: whoever may not stand in line as well is not put there. The one on keys is judged where a key
    /// is granted.
    fn check_waiters(&self, id: KeyId, input: Input, now: Now) -> Result<Input, Error> {
        let Input::Lock { handle, owner, mode, wait: Some(number), claimant } = input else { return Ok(input) };
        // What it has, it may have back.
        let state = self.keys.get(&id).map(|entry| &entry.state);
        let full = self.waiting.of_uid(claimant.uid) >= self.config.max_waiters;
        if !full || state.is_some_and(|state| state.is_return(&claimant)) {
            return Ok(Input::Lock { handle, owner, mode, wait: Some(number), claimant });
        }
        let waiter = Waiter { id: number, handle, owner, mode, claimant, since: now };
        if state.is_some_and(|state| state.would_wait(&waiter)) {
            return Err(Error::Limit("this uid has as many lock requests waiting as --max-waiters allows"));
        }
        let claimant = waiter.claimant;
        Ok(Input::Lock { handle, owner, mode, wait: None, claimant })
    }

    /// Takes over a step's effects: what to record, whom to answer, what to announce.
    pub(super) fn absorb(&mut self, id: KeyId, step: Step, now: Now, ready: &mut Ready) {
        let unshares = step.changes.iter().any(|change| matches!(change, Change::Unshared(..)));
        let Step { changes, grants, notices, lost, .. } = step;
        if !changes.is_empty() {
            self.touch_batch(now);
            if let Some(entry) = self.keys.get_mut(&id) {
                entry.changed = self.batch.number;
            }
        }
        for (handle, epoch) in lost {
            self.memory.lost(handle, epoch);
        }
        let mut details = std::mem::take(&mut self.details);
        for change in changes {
            details.extend(Detail::of(&change));
            self.batch.durable |= change.is_durable();
            if let Change::Committed(attempt, _) = &change {
                self.batch.draft_bytes += attempt.result.map_or(0, |result| result.size);
            }
            self.batch.writes.push(match change {
                Change::Claimed(attempt) => Write::Claim(id, attempt),
                Change::Renewed(attempt) => Write::Renew(id, attempt),
                Change::Ended(attempt) => Write::End(id, attempt),
                Change::Revived(attempt) => Write::Revive(id, attempt),
                Change::Committed(attempt, draft) => Write::Commit(id, attempt, draft),
                Change::Finished(finished) => Write::Finished(id, finished),
                Change::Answered(request) => Write::Answered(id, request),
                Change::Shared(share) => Write::Share(id, share),
                Change::Unshared(handle, owner) => Write::Unshare(id, handle, owner),
            });
        }
        let (unsettled, recorded) = (self.is_unsettled(id), self.is_recorded(id));
        for (waiter, reply) in grants {
            let Some((done, waited)) = self.waiting.remove(waiter, now) else { continue };
            // It may have given a share back to get into line.
            let interrupted = reply == Err(Error::Interrupted);
            if interrupted && recorded || reply.is_err() && !interrupted && !unsettled {
                self.metrics.waited(&reply, waited.ns);
                let epoch = self.keys.get(&id).map_or(Epoch(0), |entry| entry.state.epoch);
                if let Some(Note { kind, detail, .. }) = waited.note(id, epoch, &reply) {
                    self.note(now, kind, id, epoch, detail);
                }
                ready.push((done, reply));
                continue;
            }
            self.touch_batch(now);
            let waited = Some(waited);
            self.batch.answers.push(Answer { done, reply, key: Some(id), fact: interrupted, waited });
            self.batch.urgent = true;
        }
        let newest = self.keys.get(&id).map_or(Epoch(0), |entry| entry.state.epoch);
        for notice in notices {
            let (kind, epoch) = Kind::of(notice, newest);
            let detail = details.iter().find(|(about, detail)| *about == epoch && detail.is_for(kind));
            self.note(now, kind, id, epoch, detail.map_or(Detail::None, |(_, detail)| detail.clone()));
        }
        details.clear();
        self.details = details;
        self.refresh(id);
        if !self.orphans.contains(&id) && unshares {
            self.forget_unused(id, now);
        }
    }

    /// Brings what is derived from a key's state up to date: its deadline, its file, whom it counts against.
    pub(super) fn refresh(&mut self, id: KeyId) {
        let Some(entry) = self.keys.get_mut(&id) else { return };
        let deadline = entry.state.deadline_ns();
        if deadline != entry.armed_ns {
            if let Some(at) = entry.armed_ns {
                self.deadlines.remove(&(at, id));
            }
            if let Some(at) = deadline {
                self.deadlines.insert((at, id));
            }
            entry.armed_ns = deadline;
        }
        if entry.state.is_orphaned() || entry.state.has_orphaned_share() {
            self.orphans.insert(id);
        } else if self.orphans.remove(&id) {
            entry.orphaned_why = None;
        }
        let uid = entry.state.live().map(|attempt| attempt.claimant.uid);
        if uid != entry.counted {
            if let Some(before) = entry.counted
                && let Some(count) = self.held_by_uid.get_mut(&before)
            {
                *count -= 1;
                self.held -= 1;
            }
            if let Some(uid) = uid {
                *self.held_by_uid.entry(uid).or_default() += 1;
                self.held += 1;
            }
            entry.counted = uid;
        }
        self.namespaces.set_file(entry.namespace, id, entry.state.has_file());
    }

    /// Announces an event, after what it rests on was recorded and after those before it.
    pub(super) fn note(&mut self, now: Now, kind: Kind, id: KeyId, epoch: Epoch, detail: Detail) {
        if self.is_unsettled(id) || !self.batch.notes.is_empty() {
            self.touch_batch(now);
            self.batch.notes.push(Note { key: id, kind, epoch, detail, now });
        } else {
            self.announce(now, kind, id, epoch, detail);
        }
    }

    pub(super) fn announce(&mut self, now: Now, kind: Kind, id: KeyId, epoch: Epoch, detail: Detail) {
        let Some(entry) = self.keys.get(&id) else { return };
        self.metrics.count(kind, &detail);
        self.events.push(now, kind, &entry.key, epoch, detail.told());
        self.memory.next_event(self.events.next());
        if self.watched {
            self.changed.push(id);
        }
    }

    pub(super) fn note_refusal(&mut self, id: KeyId, error: &Error, now: Now) {
        let epoch = self.keys.get(&id).map_or(Epoch(0), |entry| entry.state.epoch);
        match error {
            Error::Taken | Error::WouldBlock => self.note(now, Kind::Denied, id, epoch, Detail::None),
            Error::Stale => self.note(now, Kind::Stale, id, epoch, Detail::None),
            _ => {}
        }
    }
}
