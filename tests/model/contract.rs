//! One key by the contract's §3 to §6, written down a second time: as few words as the rules have, no thought of speed.
//!
//! From the contract and not from the engine, with which it shares only the vocabulary of requests and answers.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use leasefs::machine::{Claimant, Input, Mode, Outcome, Process, Reply};
use leasefs::{Epoch, Error, Handle, Owner, Ttl, WaiterId};

/// What a request is told.
pub type Told = Result<Reply, Error>;

/// The newest attempt.
#[derive(Clone, Debug)]
pub struct Attempt {
    pub who: Claimant,
    pub handle: Handle,
    owners: BTreeSet<Owner>,
    created: bool,
    ttl_ns: u64,
    pub deadline_ns: u64,
    /// How long it was waited for.
    pub waited_ns: u64,
    pub agent: Option<Arc<str>>,
    /// Its handle has the lease.
    pub holding: bool,
    /// It held the lease when its connection was lost (§5).
    orphaned: bool,
    registered: bool,
    pub result: Option<u64>,
    /// The draft it was: asked to commit again, what is asked for is so.
    result_of: Option<Handle>,
    pub outcome: Option<Outcome>,
}

/// A shared lock.
#[derive(Clone, Debug)]
pub struct Share {
    who: Claimant,
    ttl_ns: u64,
    /// When it ends, once its connection is lost.
    until_ns: u64,
}

/// A request in line.
#[derive(Clone, Debug)]
pub struct Waiter {
    pub id: WaiterId,
    handle: Handle,
    owner: Owner,
    mode: Mode,
    who: Claimant,
    since_ns: u64,
}

/// One key.
#[derive(Clone, Debug, Default)]
pub struct Contract {
    pub epoch: u64,
    pub attempt: Option<Attempt>,
    /// Outcome of the newest attempt before this one.
    before: Option<Outcome>,
    pub sharers: BTreeMap<(Handle, Owner), Share>,
    /// Shared locks whose connection was lost (§5).
    pub orphans: BTreeMap<(Handle, Owner), Share>,
    pub line: Vec<Waiter>,
    pub lost: BTreeSet<Handle>,
    pub drafts: BTreeMap<Handle, u64>,
    pub finished: bool,
    pub latest_result: Option<u64>,
    /// Requests that the registry will refuse when their turn comes, so that nothing is granted to them.
    doomed: BTreeSet<WaiterId>,
    answers: Vec<(WaiterId, Told)>,
    now_ns: u64,
    ttl_ns: u64,
}

impl Contract {
    /// A key that never was, and the requests the registry will refuse.
    pub fn new(doomed: BTreeSet<WaiterId>) -> Contract {
        Contract { doomed, ..Contract::default() }
    }

    pub fn is_doomed(&self, waiter: WaiterId) -> bool {
        self.doomed.contains(&waiter)
    }

    /// Somebody has it exclusively: the holder handle, or a write handle on the registered attempt's result (§6).
    pub fn is_kept(&self) -> bool {
        let draft = |a: &Attempt| a.registered && self.drafts.values().any(|epoch| *epoch == self.epoch);
        self.attempt.as_ref().is_some_and(|a| a.holding || draft(a))
    }

    pub fn state(&self) -> &'static str {
        match self.attempt.as_ref().filter(|_| self.is_kept()) {
            Some(a) if a.holding && a.orphaned => "orphaned",
            Some(a) if a.holding => "held",
            Some(_) => "reporting",
            None if self.is_shared() => "shared",
            None if self.finished => "finished",
            None => "free",
        }
    }

    fn is_shared(&self) -> bool {
        !self.sharers.is_empty() || !self.orphans.is_empty()
    }

    pub fn has_file(&self) -> bool {
        self.is_kept() || self.finished
    }

    pub fn holder(&self) -> Option<Handle> {
        self.attempt.as_ref().filter(|a| a.holding).map(|a| a.handle)
    }

    pub fn outcome(&self) -> Option<Outcome> {
        self.attempt.as_ref().and_then(|a| a.outcome).or(self.before)
    }

    /// When time alone will change something.
    pub fn deadline_ns(&self) -> Option<u64> {
        self.orphans.values().map(|share| share.until_ns).chain(self.attempt_until_ns()).min()
    }

    fn attempt_until_ns(&self) -> Option<u64> {
        self.attempt.as_ref().filter(|_| self.is_kept()).map(|a| a.deadline_ns)
    }

    /// Whether a draft's bytes would be accepted now.
    pub fn accepts(&self, draft: Handle, now_ns: u64) -> Result<(), Error> {
        let epoch = self.drafts.get(&draft).ok_or(Error::Stale)?;
        match &self.attempt {
            Some(a) if *epoch == self.epoch && a.result.is_some() => Err(Error::NotPermitted),
            Some(a) if *epoch == self.epoch && a.registered && now_ns < a.deadline_ns => Ok(()),
            _ => Err(Error::Stale),
        }
    }

    /// A request happens: its answer, and those of the waiters whose wait it ended.
    pub fn step(&mut self, input: &Input, now_ns: u64, ttl: Ttl) -> (Told, Vec<(WaiterId, Told)>) {
        (self.now_ns, self.ttl_ns) = (now_ns, ttl.as_nanos());
        self.orphans.retain(|_, share| share.until_ns > now_ns);
        if self.attempt_until_ns().is_some_and(|at| at <= now_ns) {
            self.cut(Outcome::Expired);
        }
        self.serve();
        let told = self.request(input);
        self.serve();
        (told, std::mem::take(&mut self.answers))
    }

    /// A waiter the registry refused is gone.
    pub fn refuse(&mut self, waiter: WaiterId, now_ns: u64, ttl: Ttl) -> Vec<(WaiterId, Told)> {
        self.line.retain(|w| w.id != waiter);
        self.step(&Input::Tick, now_ns, ttl).1
    }

    /// The server was replaced without a keeper: every connection is lost. After a reboot every holder is dead (§5).
    pub fn restart(&mut self, rebooted: bool, now_ns: u64) {
        let kept = self.is_kept();
        self.line.clear();
        for (key, share) in std::mem::take(&mut self.sharers) {
            self.orphans.insert(key, Share { until_ns: now_ns + share.ttl_ns, ..share });
        }
        if rebooted {
            self.orphans.clear();
        }
        self.drafts.clear();
        self.lost.clear();
        let Some(attempt) = &mut self.attempt else { return };
        attempt.registered &= !rebooted;
        attempt.holding &= !rebooted;
        attempt.orphaned = attempt.holding;
        if kept && !attempt.holding {
            self.end(if rebooted { Outcome::Lost } else { Outcome::Released });
        }
    }

    fn request(&mut self, input: &Input) -> Told {
        match input {
            Input::Tick => {}
            Input::Create { handle, claimant } => {
                if self.comes_back(claimant) {
                    return Ok(self.come_back(*handle, None));
                }
                let others =
                    !self.sharers.is_empty() || self.orphans.values().any(|share| !is_known(&share.who, claimant));
                if self.is_kept() || others || self.finished || !self.line.is_empty() {
                    return Err(Error::Taken);
                }
                self.orphans.clear();
                return Ok(self.claim(*handle, None, claimant, self.now_ns));
            }
            Input::Lock { handle, owner, mode, wait, claimant } => {
                return self.lock(*handle, *owner, *mode, *wait, claimant);
            }
            Input::Unlock { handle, owner } => {
                if self.lost.contains(handle) {
                    return Err(Error::Stale);
                }
                let ours = |a: &Attempt| a.owners.contains(owner) || a.created && a.handle == *handle;
                if self.attempt.as_ref().is_some_and(|a| a.holding && ours(a)) {
                    self.give_back();
                }
                self.sharers.retain(|(_, other), _| other != owner);
            }
            Input::Cancel(waiter) => {
                if !self.line.iter().any(|w| w.id == *waiter) {
                    return Err(Error::NotFound);
                }
                self.interrupt(|w| w.id == *waiter);
            }
            Input::Close { handle, .. } => {
                self.lost.remove(handle);
                self.sharers.retain(|(other, _), _| other != handle);
                self.interrupt(|w| w.handle == *handle);
                if self.holder() == Some(*handle) {
                    self.give_back();
                }
            }
            Input::Unlink { process, may_forget, uid, .. } => return self.unlink(*process, *may_forget, *uid),
            Input::Renew { handle, .. } => {
                if self.lost.contains(handle) {
                    return Err(Error::Stale);
                }
                if self.holder() != Some(*handle) {
                    return Err(Error::Denied);
                }
                return Ok(self.renew());
            }
            Input::SetAgent { uid, agent } => self.of_user(*uid)?.agent = agent.clone(),
            Input::SetTtl { uid, ttl } => {
                let now_ns = self.now_ns;
                let attempt = self.of_user(*uid)?;
                attempt.ttl_ns = ttl.as_nanos();
                attempt.deadline_ns = now_ns + attempt.ttl_ns;
            }
            Input::GiveBack { epoch, uid, .. } => {
                self.ordered(*epoch, *uid)?;
                let lost = self.open_holder();
                self.give_back();
                self.forsake(lost);
            }
            Input::RenewAttempt { epoch, uid, .. } => {
                self.ordered(*epoch, *uid)?;
                return Ok(self.renew());
            }
            Input::Evict { epoch, .. } => {
                if !self.is_kept() || epoch.0 != self.epoch {
                    return Err(Error::Stale);
                }
                self.cut(Outcome::Evicted);
            }
            Input::Lose { epoch, .. } => {
                if epoch.0 != self.epoch || self.state() != "orphaned" {
                    return Err(Error::Stale);
                }
                self.lose();
            }
            Input::LoseShares => {
                if self.orphans.is_empty() {
                    return Err(Error::Stale);
                }
                self.orphans.clear();
            }
            Input::OpenDraft { handle, epoch, uid } => return self.open_draft(*handle, *epoch, *uid),
            Input::Commit { handle, .. } if self.attempt.as_ref().is_some_and(|a| a.result_of == Some(*handle)) => {}
            Input::Commit { handle, size } => {
                self.accepts(*handle, self.now_ns)?;
                if let Some(attempt) = &mut self.attempt {
                    (attempt.result, attempt.result_of) = (Some(*size), Some(*handle));
                    attempt.outcome = Some(Outcome::Completed);
                }
                self.latest_result = Some(self.epoch);
            }
            Input::CloseDraft { handle } => {
                let kept = self.is_kept();
                self.drafts.remove(handle);
                if kept && !self.is_kept() {
                    self.end(Outcome::Released);
                }
            }
        }
        Ok(Reply::Done)
    }

    /// What its user may set, while it is kept.
    fn of_user(&mut self, uid: u32) -> Result<&mut Attempt, Error> {
        let kept = self.is_kept();
        let attempt = self.attempt.as_mut().filter(|_| kept).ok_or(Error::Stale)?;
        if uid == 0 || uid == attempt.who.uid { Ok(attempt) } else { Err(Error::NotPermitted) }
    }

    /// What its user may order, by exactly the epoch that is held.
    fn ordered(&self, epoch: Epoch, uid: u32) -> Result<(), Error> {
        let attempt = self.attempt.as_ref().filter(|a| a.holding && epoch.0 == self.epoch).ok_or(Error::Stale)?;
        if uid == 0 || uid == attempt.who.uid { Ok(()) } else { Err(Error::Denied) }
    }

    fn lock(&mut self, handle: Handle, owner: Owner, mode: Mode, wait: Option<WaiterId>, who: &Claimant) -> Told {
        if self.lost.contains(&handle) {
            return Err(Error::Stale);
        }
        if wait.is_some_and(|id| self.doomed.contains(&id)) {
            let told = Contract { doomed: BTreeSet::new(), ..self.clone() }.lock(handle, owner, mode, wait, who);
            if told != Ok(Reply::Queued) {
                return told;
            }
        }
        if self.comes_back(who) {
            let renewed = self.come_back(handle, Some(owner));
            if mode == Mode::Exclusive {
                return Ok(renewed);
            }
        }
        let shares_already = self.sharers.keys().any(|share| is_own(*share, handle, owner))
            || self.orphans.values().any(|share| is_known(&share.who, who));
        match mode {
            Mode::Exclusive if self.is_mine(handle, owner) => return Ok(self.join(owner)),
            Mode::Exclusive if self.line.is_empty() && self.is_free_for(handle, owner, who) => {
                return Ok(self.claim(handle, Some(owner), who, self.now_ns));
            }
            // A downgrade: nobody else comes in between.
            Mode::Shared if self.is_mine(handle, owner) => {
                self.give_back();
                return Ok(self.share(handle, owner, who));
            }
            Mode::Shared if shares_already || self.line.is_empty() && !self.is_kept() => {
                return Ok(self.share(handle, owner, who));
            }
            _ => {}
        }
        let id = wait.ok_or(Error::WouldBlock)?;
        if mode == Mode::Exclusive {
            self.give_up_shares(handle, owner, who);
        }
        self.line.push(Waiter { id, handle, owner, mode, who: who.clone(), since_ns: self.now_ns });
        Ok(Reply::Queued)
    }

    fn unlink(&mut self, process: Process, may_forget: bool, uid: u32) -> Told {
        let who = self.attempt.as_ref().map(|a| &a.who);
        if self.is_kept() {
            let ours = who.is_some_and(|who| process.pid != 0 && (who.opener == process || who.locker == process));
            if self.holder().is_none() || !ours {
                return Err(Error::Busy);
            }
            self.give_back();
        } else if !self.finished {
            return Err(Error::NotFound);
        } else if !may_forget && who.is_none_or(|who| who.uid != uid) {
            return Err(Error::Denied);
        } else {
            self.finished = false;
        }
        Ok(Reply::Done)
    }

    fn open_draft(&mut self, handle: Handle, epoch: Epoch, uid: u32) -> Told {
        if epoch.0 == 0 || epoch.0 > self.epoch {
            return Err(Error::NotFound);
        }
        let (kept, now_ns) = (self.is_kept(), self.now_ns);
        let attempt = self.attempt.as_mut().filter(|_| epoch.0 == self.epoch).ok_or(Error::Stale)?;
        if attempt.result.is_some() {
            return Err(Error::NotPermitted);
        }
        if !attempt.registered || attempt.deadline_ns <= now_ns {
            return Err(Error::Stale);
        }
        if uid != 0 && uid != attempt.who.uid {
            return Err(Error::Denied);
        }
        if !kept {
            attempt.outcome = None;
        }
        self.drafts.insert(handle, epoch.0);
        Ok(Reply::Done)
    }

    /// Locks of all kinds and exclusive create are one lease; an owner is a lock owner, or the handle (§3).
    fn is_mine(&self, handle: Handle, owner: Owner) -> bool {
        self.attempt.as_ref().is_some_and(|a| a.holding && (a.handle == handle || a.owners.contains(&owner)))
    }

    /// The holder of an orphaned attempt opens or locks the key again (§5). One that cannot be seen is not known again.
    fn comes_back(&self, who: &Claimant) -> bool {
        self.state() == "orphaned" && self.attempt.as_ref().is_some_and(|a| is_known(&a.who, who))
    }

    /// The same attempt, held by another handle.
    fn come_back(&mut self, handle: Handle, owner: Option<Owner>) -> Reply {
        if let Some(attempt) = &mut self.attempt {
            attempt.handle = handle;
            attempt.created = owner.is_none();
            attempt.owners = owner.into_iter().collect();
            attempt.orphaned = false;
        }
        self.renew()
    }

    /// Nobody's own shared lock is in its way, nor one that its process had before the connection was lost.
    fn is_free_for(&self, handle: Handle, owner: Owner, who: &Claimant) -> bool {
        !self.is_kept()
            && self.sharers.keys().all(|share| is_own(*share, handle, owner))
            && self.orphans.values().all(|share| is_known(&share.who, who))
    }

    fn give_up_shares(&mut self, handle: Handle, owner: Owner, who: &Claimant) {
        self.sharers.retain(|share, _| !is_own(*share, handle, owner));
        self.orphans.retain(|_, share| !is_known(&share.who, who));
    }

    fn claim(&mut self, handle: Handle, owner: Option<Owner>, who: &Claimant, since_ns: u64) -> Reply {
        if let Some(owner) = owner {
            self.give_up_shares(handle, owner, who);
        }
        assert!(!self.is_kept() && !self.is_shared(), "the model grants twice");
        self.before = self.outcome();
        self.epoch += 1;
        self.finished = false;
        self.attempt = Some(Attempt {
            who: who.clone(),
            handle,
            owners: owner.into_iter().collect(),
            created: owner.is_none(),
            ttl_ns: self.ttl_ns,
            deadline_ns: self.now_ns + self.ttl_ns,
            waited_ns: self.now_ns - since_ns,
            agent: None,
            holding: true,
            orphaned: false,
            registered: true,
            result: None,
            result_of: None,
            outcome: None,
        });
        Reply::Claimed(Epoch(self.epoch))
    }

    /// A new handle stands for the oldest one that its process had before the connection was lost.
    fn share(&mut self, handle: Handle, owner: Owner, who: &Claimant) -> Reply {
        if self.sharers.contains_key(&(handle, owner)) {
            return Reply::Shared;
        }
        let known = self.orphans.iter().find(|(_, share)| is_known(&share.who, who)).map(|((old, _), _)| *old);
        self.orphans.retain(|(old, _), _| Some(*old) != known);
        self.sharers.insert((handle, owner), Share { who: who.clone(), ttl_ns: self.ttl_ns, until_ns: u64::MAX });
        Reply::Shared
    }

    fn join(&mut self, owner: Owner) -> Reply {
        if let Some(attempt) = &mut self.attempt {
            attempt.owners.insert(owner);
        }
        self.renew()
    }

    fn renew(&mut self) -> Reply {
        if let Some(attempt) = &mut self.attempt {
            attempt.deadline_ns = self.now_ns + attempt.ttl_ns;
        }
        Reply::Renewed(Epoch(self.epoch))
    }

    /// The holder gives the lease up; a write handle keeps the attempt.
    fn give_back(&mut self) {
        if let Some(attempt) = &mut self.attempt {
            attempt.holding = false;
        }
        if !self.is_kept() {
            self.end(Outcome::Released);
        }
    }

    /// The attempt is over, whatever is still open.
    fn cut(&mut self, outcome: Outcome) {
        let lost = self.open_holder();
        if let Some(attempt) = &mut self.attempt {
            attempt.holding = false;
            attempt.registered = false;
        }
        self.end(outcome);
        self.forsake(lost);
    }

    /// The holder is dead. As after its exit, the result may still come (§1, §6).
    fn lose(&mut self) {
        let lost = self.open_holder();
        if let Some(attempt) = &mut self.attempt {
            attempt.holding = false;
        }
        if !self.is_kept() {
            self.end(Outcome::Lost);
        }
        self.forsake(lost);
    }

    /// The holder's handle; none where its connection is gone, and the handle with it.
    fn open_holder(&self) -> Option<Handle> {
        self.attempt.as_ref().filter(|attempt| attempt.holding && !attempt.orphaned).map(|attempt| attempt.handle)
    }

    /// A handle that lost its lease gets `ESTALE` for as long as it lives, in line too.
    fn forsake(&mut self, lost: Option<Handle>) {
        let Some(lost) = lost else { return };
        self.lost.insert(lost);
        self.answer(Err(Error::Stale), |w| w.handle == lost);
    }

    fn end(&mut self, outcome: Outcome) {
        let Some(attempt) = &mut self.attempt else { return };
        self.finished = attempt.result.is_some();
        attempt.outcome = Some(if self.finished { Outcome::Completed } else { outcome });
    }

    fn interrupt(&mut self, whom: impl Fn(&Waiter) -> bool) {
        self.answer(Err(Error::Interrupted), whom);
    }

    fn answer(&mut self, told: Told, whom: impl Fn(&Waiter) -> bool) {
        self.answers.extend(self.line.iter().filter(|w| whom(w)).map(|w| (w.id, told.clone())));
        self.line.retain(|w| !whom(w));
    }

    /// Nobody waits for what could be granted. First come, first served.
    fn serve(&mut self) {
        while let Some(front) = self.line.first() {
            let free = match front.mode {
                Mode::Exclusive => self.is_free_for(front.handle, front.owner, &front.who),
                Mode::Shared => !self.is_kept(),
            };
            if !free {
                break;
            }
            let Waiter { id, handle, owner, mode, who, since_ns } = self.line.remove(0);
            if self.doomed.contains(&id) {
                continue;
            }
            let reply = match mode {
                Mode::Exclusive => self.claim(handle, Some(owner), &who, since_ns),
                Mode::Shared => self.share(handle, owner, &who),
            };
            self.answers.push((id, Ok(reply)));
        }
        // A thread that waits with the handle or as the owner that got the lease would wait for itself.
        while let Some(at) = self.line.iter().position(|w| w.mode == Mode::Exclusive && self.is_mine(w.handle, w.owner))
        {
            let waiter = self.line.remove(at);
            if !self.doomed.contains(&waiter.id) {
                let reply = self.join(waiter.owner);
                self.answers.push((waiter.id, Ok(reply)));
            }
        }
    }
}

/// Whether the processes of a claim that was cut off ask for this one. One that cannot be seen is not known again.
fn is_known(before: &Claimant, now: &Claimant) -> bool {
    let processes = [before.holder, before.opener, before.locker];
    [now.opener, now.locker].iter().any(|process| process.pid != 0 && processes.contains(process))
}

fn is_own(share: (Handle, Owner), handle: Handle, owner: Owner) -> bool {
    share.0 == handle || share.1 == owner
}
