//! The result race: every ordering of worker exit, draft open, new claim, draft write, commit and TTL, on a real mount.
//!
//! The worker is a process of its own that claims and exits. The parent, another process, opens the draft, writes and
//! commits. A third one claims. What each step must answer comes from [`Model`], a dozen lines of §6.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::time::Duration;

use libc::{LOCK_EX, LOCK_NB};
use nix::errno::Errno;

use crate::common::agent::{Agent, Fd};
use crate::common::{Mount, PATIENCE, wait_within};

#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    WorkerExits,
    DraftOpens,
    NewClaim,
    DraftWrites,
    Commit,
    /// The TTL runs out, or in its place an operator evicts.
    Ends,
}
use Step::*;

/// In how many ways the same ordering is played.
#[derive(Clone, Copy, Debug)]
struct Play {
    by_fsync: bool,
    by_lock: bool,
    killed: bool,
    evict: bool,
}

/// §6 for one attempt: what is still possible.
#[derive(Default)]
struct Model {
    /// The worker's handle holds the lease.
    worker: bool,
    /// A draft was opened, and whether it keeps the attempt alive.
    draft: Option<bool>,
    registered: bool,
    committed: bool,
    newer: bool,
}

/// What a step must answer: done, refused, or that there is nothing to do it with.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Expect {
    Done,
    Refused(Errno),
    Nothing,
}

impl Model {
    fn new() -> Model {
        Model { worker: true, registered: true, ..Model::default() }
    }

    /// A handle keeps the attempt alive.
    fn live(&self) -> bool {
        self.worker || self.draft == Some(true)
    }

    fn step(&mut self, step: Step, play: Play) -> Expect {
        match step {
            WorkerExits => {
                self.worker = false;
                Expect::Done
            }
            Ends if play.evict && !self.live() => Expect::Refused(Errno::ESTALE),
            Ends => {
                self.worker = false;
                self.registered = false;
                self.draft = self.draft.map(|_| false);
                Expect::Done
            }
            DraftOpens if !self.registered => Expect::Refused(Errno::ESTALE),
            DraftOpens => {
                self.draft = Some(true);
                Expect::Done
            }
            NewClaim if self.live() => Expect::Refused(if play.by_lock { Errno::EAGAIN } else { Errno::EEXIST }),
            NewClaim if self.committed && !play.by_lock => Expect::Refused(Errno::EEXIST),
            NewClaim => {
                self.newer = true;
                self.registered = false;
                Expect::Done
            }
            DraftWrites | Commit if self.draft.is_none() => Expect::Nothing,
            DraftWrites if self.registered => Expect::Done,
            DraftWrites => Expect::Refused(Errno::ESTALE),
            Commit => {
                self.draft = Some(false);
                if self.registered {
                    self.committed = true;
                    Expect::Done
                } else if play.by_fsync {
                    Expect::Refused(Errno::ESTALE)
                } else {
                    // close(2) tells nothing; that nothing was published is looked at in the end.
                    Expect::Done
                }
            }
        }
    }
}

/// All orderings in which a draft is opened before it is written, and written before it is committed.
fn orderings() -> Vec<Vec<Step>> {
    fn extend(done: &mut Vec<Step>, left: &[Step], all: &mut Vec<Vec<Step>>) {
        if left.is_empty() {
            all.push(done.clone());
        }
        for (index, step) in left.iter().enumerate() {
            let needs = match step {
                DraftWrites => Some(DraftOpens),
                Commit => Some(DraftWrites),
                _ => None,
            };
            if needs.is_some_and(|needed| !done.contains(&needed)) {
                continue;
            }
            let mut rest = left.to_vec();
            rest.remove(index);
            done.push(*step);
            extend(done, &rest, all);
            done.pop();
        }
    }
    let mut all = Vec::new();
    extend(&mut Vec::new(), &[WorkerExits, DraftOpens, NewClaim, DraftWrites, Commit, Ends], &mut all);
    all
}

/// The processes that the cases of a batch share. None of them forks while it has handles.
struct Cast {
    parent: Agent,
    claimer: Agent,
    operator: Agent,
}

/// One ordering under way on a key of its own.
struct Case {
    key: String,
    order: Vec<Step>,
    play: Play,
    worker: Agent,
    lease: Fd,
    exited: bool,
    model: Model,
    draft: Option<Fd>,
    claim: Option<Fd>,
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {:?} played {:?}", self.key, self.order, self.play)
    }
}

const PAYLOAD: &str = "the first attempt's result";

impl Case {
    fn start(mount: &Mount, number: usize, order: Vec<Step>, play: Play) -> Case {
        let key = format!("case{number}");
        let worker = Agent::new();
        let fd = worker.create(&mount.claim(&key)).expect("free key");
        assert_eq!(worker.epoch(fd), Ok(1));
        Case { key, order, play, worker, lease: fd, exited: false, model: Model::new(), draft: None, claim: None }
    }

    /// Does one step and compares.
    fn step(&mut self, mount: &Mount, cast: &Cast, step: Step) {
        let expected = self.model.step(step, self.play);
        let answer = match step {
            WorkerExits => {
                if self.play.killed {
                    self.worker.kill()
                } else {
                    self.worker.exit()
                }
                self.exited = true;
                Ok(())
            }
            DraftOpens => {
                let opened =
                    cast.parent.open(&mount.result(&self.key, 1), libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC);
                self.draft = opened.ok();
                opened.map(drop)
            }
            NewClaim if self.play.by_lock => {
                let fd = cast.claimer.handle(&mount.claim(&self.key));
                let answer = cast.claimer.flock(fd, LOCK_EX | LOCK_NB);
                if answer.is_ok() {
                    self.claim = Some(fd)
                } else {
                    cast.claimer.close(fd)
                }
                answer
            }
            NewClaim => {
                let claimed = cast.claimer.create(&mount.claim(&self.key));
                self.claim = claimed.ok();
                claimed.map(drop)
            }
            DraftWrites | Commit if self.draft.is_none() => {
                assert_eq!(expected, Expect::Nothing, "{self}: at {step:?}");
                return;
            }
            DraftWrites => cast.parent.write(self.draft.expect("opened"), PAYLOAD).map(drop),
            Commit => {
                let draft = self.draft.expect("opened");
                let answer = if self.play.by_fsync { cast.parent.fsync(draft) } else { Ok(()) };
                cast.parent.close(draft);
                answer
            }
            Ends if self.play.evict => {
                let control =
                    cast.operator.open(&mount.root().join(".leasefs/control"), libc::O_WRONLY).expect("control");
                let command = serde_json::json!({ "op": "evict", "key": self.key, "epoch": 1, "reason": "race" });
                let answer = cast.operator.write(control, &command.to_string()).map(drop);
                cast.operator.close(control);
                answer
            }
            // The clock does it.
            Ends => Ok(()),
        };
        let expected = match expected {
            Expect::Done => Ok(()),
            Expect::Refused(errno) => Err(errno),
            Expect::Nothing => unreachable!("handled above"),
        };
        assert_eq!(answer, expected, "{self}: at {step:?}");
        if step == Ends && !self.exited {
            assert_eq!(
                self.worker.epoch(self.lease),
                Err(Errno::ESTALE),
                "{self}: the worker's own handle after the end"
            );
        }
        if !self.model.committed {
            assert!(!mount.result(&self.key, 1).exists(), "{self}: after {step:?} readers see what is not committed");
        }
    }

    /// What must hold when all is over.
    fn check(&self, mount: &Mount, cast: &Cast) {
        let result = std::fs::read_to_string(mount.result(&self.key, 1));
        let status = mount.status(&self.key);
        if self.model.committed {
            // A write that was refused leaves an empty draft, which no model commits.
            assert_eq!(result.as_deref().expect("committed"), PAYLOAD, "{self}");
            assert_eq!(
                (status["result"]["epoch"].as_u64(), status["result"]["size"].as_u64()),
                (Some(1), Some(PAYLOAD.len() as u64))
            );
            let latest =
                std::fs::read_link(mount.root().join("results").join(&self.key).join("latest")).expect("latest");
            assert_eq!(latest.as_os_str(), "1", "{self}");
        } else {
            assert_eq!(result.map_err(|e| e.raw_os_error()), Err(Some(libc::ENOENT)), "{self}");
            assert!(status["result"].is_null(), "{self}: {status}");
        }
        let epoch = if self.model.newer { 2 } else { 1 };
        assert_eq!(status["epoch"], epoch, "{self}: a denial takes no epoch");
        if let Some(fd) = self.claim {
            assert_eq!(cast.claimer.epoch(fd), Ok(2), "{self}: the new claimer has its lease");
            assert!(!mount.result(&self.key, 2).exists(), "{self}: a result was stamped on another attempt");
        }
    }
}

/// Plays the cases, half of them at a time, with a longer TTL where the machine is too slow for this one.
fn play(cases: &[(Vec<Step>, Play)], ttl_ms: i64) {
    let longer = |factor| ttl_ms * factor;
    for cases in cases.chunks(cases.len().div_ceil(2)) {
        let played = [1, 2, 4, 8, 16].map(longer).into_iter().any(|ttl_ms| play_in_time(cases.to_vec(), ttl_ms));
        assert!(played, "this machine is too slow for a TTL of {} ms", longer(16));
    }
}

/// Plays the cases: every step before `Ends` in time, then the end for all, then the rest. False if the first TTL was
/// over too early, and what came of it says nothing.
fn play_in_time(cases: Vec<(Vec<Step>, Play)>, ttl_ms: i64) -> bool {
    let ttl = format!("{ttl_ms}ms");
    let mount = Mount::with(&["--ttl", &ttl]);
    let cast = Cast { parent: Agent::new(), claimer: Agent::new(), operator: Agent::new() };
    let mut cases: Vec<Case> =
        cases.into_iter().enumerate().map(|(number, (order, play))| Case::start(&mount, number, order, play)).collect();
    let [first, last] = [0, cases.len() - 1].map(|at| deadline(&mount, &cases[at].key));
    let (Some(first), Some(last)) = (first, last) else {
        eprintln!("this machine is too slow for a TTL of {ttl}: it was over before all had begun");
        return false;
    };
    let cut = |case: &Case| case.order.iter().position(|step| *step == Ends).expect("every ordering has its end");
    let play_first = AssertUnwindSafe(|| {
        for case in &mut cases {
            let before: Vec<Step> = case.order[..cut(case)].to_vec();
            for step in before {
                case.step(&mount, &cast, step);
                keep(&cast, case);
            }
        }
    });
    let played = catch_unwind(play_first);
    let late = jiff::Timestamp::now().as_millisecond() - first;
    if late >= 0 {
        eprintln!("this machine is too slow for a TTL of {ttl}: {late} ms late");
        return false;
    }
    played.unwrap_or_else(|failure| resume_unwind(failure));
    let evicts = cases[0].play.evict;
    if !evicts {
        wait_within(Duration::from_millis(ttl_ms.unsigned_abs()) + PATIENCE, "every deadline", || {
            jiff::Timestamp::now().as_millisecond() > last + 100
        });
    }
    for case in &mut cases {
        let after: Vec<Step> = case.order[cut(case)..].to_vec();
        for step in after {
            case.step(&mount, &cast, step);
            keep(&cast, case);
        }
        case.check(&mount, &cast);
    }
    drop(cases);
    drop(cast);
    mount.verify();
    true
}

/// A new claim gets a TTL of a day at once: the race is about the first attempt.
fn keep(cast: &Cast, case: &Case) {
    if let Some(fd) = case.claim {
        let names = serde_json::json!({ "fd": fd });
        cast.claimer.script("os.setxattr(fd, 'user.lease.ttl', b'24h')", names).expect("the holder's user");
    }
}

/// When the lease of a key ends; none if it has.
fn deadline(mount: &Mount, key: &str) -> Option<i64> {
    let status = mount.status(key);
    let expires: jiff::Timestamp = status["expires"].as_str()?.parse().expect("RFC 3339");
    Some(expires.as_millisecond())
}

/// Each ordering with a form of commit and of claim, the worker's end by exit and by kill in turn.
fn batch(by_fsync: bool, by_lock: bool, evict: bool) -> Vec<(Vec<Step>, Play)> {
    let play = |index| Play { by_fsync, by_lock, killed: index % 2 == usize::from(by_lock), evict };
    orderings().into_iter().enumerate().map(|(index, order)| (order, play(index))).collect()
}

#[test]
fn there_are_120_orderings() {
    let orderings = orderings();
    assert_eq!(orderings.len(), 120, "6! / 3!");
    assert!(orderings.iter().all(|order| order.len() == 6));
    assert!(orderings.iter().enumerate().all(|(index, order)| !orderings[..index].contains(order)), "all different");
}

#[test]
fn every_ordering_with_a_commit_by_fsync_gives_what_section_6_says() {
    play(&batch(true, true, false), 6_000);
    play(&batch(true, false, false), 6_000);
}

#[test]
fn every_ordering_with_a_commit_by_close_gives_what_section_6_says() {
    play(&batch(false, true, false), 6_000);
    play(&batch(false, false, false), 6_000);
}

#[test]
fn every_ordering_with_an_eviction_in_place_of_the_ttl_gives_what_section_6_says() {
    for (by_fsync, by_lock) in [(true, true), (true, false), (false, true), (false, false)] {
        // What it means to evict a holder that has its result already, §6 does not say.
        let clear = batch(by_fsync, by_lock, true).into_iter().filter(|(order, _)| {
            let place = |step: Step| order.iter().position(|s| *s == step).expect("every step is there");
            !(place(Commit) < place(Ends) && place(Ends) < place(WorkerExits))
        });
        play(&clear.collect::<Vec<_>>(), 3_600_000);
    }
}
