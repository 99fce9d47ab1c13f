//! What happened, as the workers wrote it down: the runs, their calls, and the leases they held.
//!
//! Nothing here comes from the server. What a worker could not write down any more (it was killed) stays unknown and
//! bounded: after its last line, before its group was seen to be gone.
use std::collections::HashMap;
use std::fmt;

use crate::fleet::Gone;
use crate::record::{Ending, Form, Line, Op, Renewal, allowed, describe};

/// A call of a worker.
#[derive(Clone, Debug)]
pub struct Call {
    /// The key.
    pub key: String,
    /// The call.
    pub op: Op,
    /// Before it.
    pub asked: u64,
    /// After it returned, if it did.
    pub returned: Option<u64>,
    /// Its answer, if it came.
    pub answer: Option<Result<u64, i32>>,
}

impl Call {
    /// Whether it answered with success.
    pub fn ok(&self) -> bool {
        matches!(self.answer, Some(Ok(_)))
    }

    /// Whether it said that the lease is lost.
    pub fn lost(&self) -> bool {
        match self.answer {
            Some(Err(libc::ESTALE)) => true,
            Some(Err(_)) => matches!(self.op, Op::Renew(Renewal::Touch) | Op::Ttl(_) | Op::Release(Ending::Unlink)),
            _ => false,
        }
    }
}

/// One incarnation of a worker, from its first line to its end.
#[derive(Clone, Debug)]
pub struct Run {
    /// The worker it is an incarnation of.
    pub slot: usize,
    /// Its pid as the server sees it; 0 if it was killed before it could tell.
    pub pid: i32,
    /// Its calls, in order.
    pub calls: Vec<Call>,
    /// Its own last sign of life.
    pub last: u64,
    /// When it was seen to be gone, with all that it forked.
    pub gone: u64,
    /// Whether a signal ended it.
    pub killed: bool,
    /// Its notes, for histories.
    pub notes: Vec<(u64, String)>,
}

/// A lease, exclusive or shared, as its holder knows it.
#[derive(Clone, Debug)]
pub struct Lease {
    /// Its place in [`History::leases`].
    pub id: usize,
    /// The key.
    pub key: String,
    /// The run that claimed it.
    pub run: usize,
    /// That run's pid.
    pub pid: i32,
    /// How it was claimed.
    pub form: Form,
    /// Before the claim.
    pub asked: u64,
    /// After the claim returned; none if its claimer was killed inside the call, and may have got it or not.
    pub granted: Option<u64>,
    /// The epoch the holder read from its own handle.
    pub epoch: Option<u64>,
    /// The holder's later calls on this key, in order.
    pub calls: Vec<Call>,
    /// Before the release began; the holder's last sign of life if it was killed before.
    pub end: u64,
    /// By then the kernel has closed the handle.
    pub over: u64,
}

/// The whole of a round.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// All incarnations.
    pub runs: Vec<Run>,
    /// All leases, in no order.
    pub leases: Vec<Lease>,
    /// The TTL of a lease nobody set another for, in nanoseconds.
    pub ttl: u64,
    /// Times the machine stood still.
    pub stalls: Vec<(u64, u64)>,
    /// Times in which there was no server: what is due then comes later, but a call may not take longer for it.
    pub outages: Vec<(u64, u64)>,
    /// Whether a call may have been answered `EINTR` because the server died: then it was done, or it was not.
    pub interrupted: bool,
    /// When the evictions that hit were asked for, by key and epoch.
    evictions: HashMap<(String, u64), u64>,
}

/// A broken invariant, and what happened around it.
pub struct Violation {
    /// Which one.
    pub invariant: &'static str,
    /// The key.
    pub key: String,
    /// What is wrong.
    pub what: String,
    /// The events of the key around it.
    pub history: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "VIOLATED {} on key {}: {}", self.invariant, self.key, self.what)?;
        write!(f, "{}", self.history)
    }
}

impl fmt::Debug for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl History {
    /// Reads the logs of a round. A line no worker may write is the first violation.
    pub fn load(gone: &[Gone], ttl_ms: u64, stalls: Vec<(u64, u64)>, interrupted: bool) -> Result<History, Violation> {
        let mut history = History { ttl: ttl_ms * 1_000_000, stalls, interrupted, ..History::default() };
        let mut wrong = None;
        for end in gone {
            let text = std::fs::read_to_string(&end.log).unwrap_or_default();
            history.runs.push(parse(&text, end, &mut wrong));
        }
        history.find_leases();
        if let Some((t, key, what)) = wrong {
            return Err(history.violation("CONTRACT", &key, t, what));
        }
        for call in history.runs.iter().flat_map(|run| &run.calls) {
            if let Some(Err(errno)) = call.answer
                && !allowed(&call.op, errno)
                && !(interrupted && errno == libc::EINTR)
            {
                let what = format!("{:?} may never answer {}", call.op, describe(&call.answer));
                return Err(history.violation("ERRNO", &call.key, call.asked, what));
            }
        }
        Ok(history)
    }

    /// Works out the leases of the runs.
    pub fn find_leases(&mut self) {
        self.leases.clear();
        self.evictions.clear();
        for (at, run) in self.runs.iter().enumerate() {
            let mut current: Option<usize> = None;
            for call in &run.calls {
                match call.op {
                    Op::Claim { form, .. } => {
                        // Interrupted by the server's end, a claim may have been granted for that moment.
                        let unsure = self.interrupted && call.answer == Some(Err(libc::EINTR));
                        let refused = matches!(call.answer, Some(Err(_))) && !unsure;
                        let over = if unsure && form == Form::Create { call.returned } else { None };
                        current = (!refused).then(|| {
                            self.leases.push(Lease {
                                id: self.leases.len(),
                                key: call.key.clone(),
                                run: at,
                                pid: run.pid,
                                form,
                                asked: call.asked,
                                granted: call.returned.filter(|_| !unsure),
                                epoch: None,
                                calls: Vec::new(),
                                end: if unsure { call.asked } else { run.last },
                                over: over.unwrap_or(run.gone),
                            });
                            self.leases.len() - 1
                        });
                    }
                    Op::Evict(epoch) if call.ok() => {
                        let first = self.evictions.entry((call.key.clone(), epoch)).or_insert(call.asked);
                        *first = call.asked.min(*first);
                    }
                    Op::Observe | Op::Forget | Op::Evict(_) | Op::Side(_) => {}
                    _ => {
                        if let Some(lease) = current.and_then(|id| self.leases.get_mut(id)) {
                            note_call(lease, call, run);
                        }
                    }
                }
            }
        }
    }

    /// The keys, sorted.
    pub fn keys(&self) -> Vec<String> {
        let mut keys: Vec<String> = self.runs.iter().flat_map(|run| &run.calls).map(|call| call.key.clone()).collect();
        keys.sort();
        keys.dedup();
        keys
    }

    /// How many calls there were of which this holds.
    pub fn count(&self, which: impl Fn(&Call) -> bool) -> usize {
        self.runs.iter().flat_map(|run| &run.calls).filter(|call| which(call)).count()
    }

    /// Until when the clients may have to wait for what is due at `from`: 100 ms, and as long again as the machine stood still.
    pub fn grace(&self, from: u64) -> u64 {
        let mut until = from + 100_000_000;
        for &(begin, end) in self.outages.iter().chain(&self.stalls) {
            if begin < until && end > from {
                until += end - begin.max(from);
            }
        }
        until
    }

    /// When this lease runs out, at the earliest and the latest, by its holder's own time stamps.
    pub fn deadline(&self, lease: &Lease) -> (u64, u64) {
        let mut ttl = self.ttl;
        let mut earliest = lease.asked + ttl;
        let mut latest = lease.granted.unwrap_or(lease.over) + ttl;
        for call in &lease.calls {
            let renews = matches!(call.op, Op::Ttl(_) | Op::Renew(_));
            if renews && call.ok() && call.asked > self.grace(latest) {
                // Granted long after the deadline: no renewal, but a violation for the register check to find.
                break;
            }
            if let Op::Ttl(ms) = call.op {
                if call.ok() {
                    ttl = ms * 1_000_000;
                } else {
                    // It may have been done, and have run out before the answer.
                    earliest = earliest.min(call.asked + ms * 1_000_000);
                }
            }
            if renews && call.ok() {
                earliest = call.asked + ttl;
                latest = call.returned.unwrap_or(lease.over) + ttl;
            } else if renews && call.answer.is_none() {
                latest = lease.over + ttl.max(self.ttl);
            }
        }
        (earliest, latest)
    }

    /// Whether the deadline may have come before the server heard of a close that returned at `closed`: it has no answer to
    /// wait for.
    pub fn may_expire_first(&self, lease: &Lease, closed: u64) -> bool {
        self.grace(closed) >= self.deadline(lease).0
    }

    /// From when to when the holder surely held: claim returned, to the earliest of release begun, TTL, eviction asked.
    /// None where it was not sure at any time: a claim may return to a process that was frozen past its TTL in line.
    pub fn held(&self, lease: &Lease) -> Option<(u64, u64)> {
        let from = lease.granted?;
        let (earliest, _) = self.deadline(lease);
        let proven = lease.calls.iter().filter(|call| call.ok() && matches!(call.op, Op::Epoch | Op::Renew(_)));
        let proven = proven.map(|call| call.asked).max().unwrap_or(0);
        let mut until = lease.end.min(earliest.max(proven));
        if let Some(evicted) = self.evicted(lease) {
            until = until.min(evicted);
        }
        (from <= until).then_some((from, until))
    }

    /// When somebody asked to evict this lease, and was told that it is done.
    pub fn evicted(&self, lease: &Lease) -> Option<u64> {
        self.evictions.get(&(lease.key.clone(), lease.epoch?)).copied()
    }

    /// A violation, with the events of its key around this time.
    pub fn violation(&self, invariant: &'static str, key: &str, around: u64, what: String) -> Violation {
        Violation { invariant, key: key.into(), what, history: self.around(key, around) }
    }

    /// The events of a key around a time, one a line; times in milliseconds from there.
    pub fn around(&self, key: &str, around: u64) -> String {
        let mut events: Vec<(u64, String)> = Vec::new();
        for run in &self.runs {
            let who = format!("worker {} pid {}", run.slot, run.pid);
            let calls = run.calls.iter().filter(|call| call.key == key);
            for call in calls {
                let took = call.returned.map(|at| format!(" after {} us", at.saturating_sub(call.asked) / 1000));
                let answer = describe(&call.answer);
                let line = format!("{who}: {:?} -> {answer}{}", call.op, took.unwrap_or_default());
                events.push((call.asked, line));
            }
            events.extend(run.notes.iter().map(|(t, text)| (*t, format!("{who}: {text}"))));
            if run.killed {
                events.push((run.gone, format!("{who}: killed, gone")));
            }
        }
        events.sort();
        let at = events.partition_point(|(t, _)| *t <= around);
        let window = &events[at.saturating_sub(40)..(at + 15).min(events.len())];
        let base = around as i64;
        window.iter().map(|(t, line)| format!("  {:+12.3} ms  {line}\n", (*t as i64 - base) as f64 / 1e6)).collect()
    }
}

fn note_call(lease: &mut Lease, call: &Call, run: &Run) {
    if call.key != lease.key {
        return;
    }
    if call.op == Op::Epoch && lease.epoch.is_none() {
        lease.epoch = call.answer.and_then(Result::ok).filter(|&epoch| epoch > 0);
    }
    let released = lease.calls.iter().any(|call| matches!(call.op, Op::Release(_)));
    if let Op::Release(_) = call.op
        && !released
    {
        lease.end = call.asked;
    }
    lease.calls.push(call.clone());
    let exact = match call.op {
        Op::Release(Ending::Close) => true,
        Op::Release(Ending::ChildsClose) => !run.killed,
        Op::Release(Ending::Unlock | Ending::Unlink) => call.ok(),
        _ => false,
    };
    if let (true, Some(at)) = (exact, call.returned) {
        lease.over = lease.over.min(at);
    }
}

fn parse(text: &str, end: &Gone, wrong: &mut Option<(u64, String, String)>) -> Run {
    let mut run =
        Run { slot: end.slot, pid: 0, calls: Vec::new(), last: 0, gone: end.at, killed: end.killed, notes: Vec::new() };
    // A last line without its end was cut short by a kill: it was never written.
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    for line in whole.lines() {
        let line: Line = serde_json::from_str(line).unwrap_or_else(|e| panic!("{}: {e}: {line}", end.log.display()));
        run.last = line.time();
        match line {
            Line::Start { pid, .. } => run.pid = pid,
            Line::Ask { t, key, op } => {
                run.calls.push(Call { key, op, asked: t, returned: None, answer: None });
            }
            Line::Got { t, answer } => {
                let call = run.calls.last_mut().expect("an answer follows its call");
                call.returned = Some(t);
                call.answer = Some(answer);
            }
            Line::Beat { .. } => {}
            Line::Note { t, text } => run.notes.push((t, text)),
            Line::Wrong { t, text } => {
                let key = run.calls.last().map(|call| call.key.clone()).unwrap_or_default();
                if wrong.as_ref().is_none_or(|(first, ..)| t < *first) {
                    *wrong = Some((t, key, text.clone()));
                }
                run.notes.push((t, text));
            }
        }
    }
    run
}

/// Histories made by hand, for the tests of the checkers.
#[cfg(test)]
pub mod testing {
    pub use super::History;
    use super::{Call, Run};
    use crate::record::{Ending, Form, Op};

    /// The history of key `n/k` with one run per `(pid, epoch, asked, granted, release asked)`; every release takes 5, and
    /// the default TTL is an hour.
    pub fn made(leases: &[(i32, u64, u64, u64, u64)]) -> History {
        let run = |(slot, &(pid, epoch, asked, granted, end)): (usize, &(i32, u64, u64, u64, u64))| {
            let call = |op, asked, returned, value| Call {
                key: "n/k".into(),
                op,
                asked,
                returned: Some(returned),
                answer: Some(Ok(value)),
            };
            let mut calls = vec![call(Op::Claim { form: Form::Flock, wait: false }, asked, granted, 0)];
            if epoch > 0 {
                calls.push(call(Op::Epoch, granted + 1, granted + 2, epoch));
                calls.push(call(Op::Release(Ending::Close), end, end + 5, 0));
            }
            let last = end.max(granted) + 5;
            Run { slot, pid, calls, last, gone: last + 1, killed: false, notes: Vec::new() }
        };
        let runs = leases.iter().enumerate().map(run).collect();
        let mut history = History { runs, ttl: 3_600_000_000_000, ..History::default() };
        history.find_leases();
        history
    }

    /// A call on `n/k` that took 2.
    pub fn call(op: Op, asked: u64, answer: Result<u64, i32>) -> Call {
        Call { key: "n/k".into(), op, asked, returned: Some(asked + 2), answer: Some(answer) }
    }

    /// One lease of pid 10, epoch 1, held for 900 ms, with more calls before its release.
    pub fn with(calls: &[Call]) -> History {
        let mut history = made(&[(10, 1, 100, 110, 900_000_000)]);
        let at = history.runs[0].calls.len() - 1;
        history.runs[0].calls.splice(at..at, calls.iter().cloned());
        history.find_leases();
        history
    }
}
