//! From the holders' logs to the history of a lease register, one key at a time.
//!
//! What is not sure is given room, never more than needed: a call its caller was killed in may have had its effect or
//! not; a killed holder's lease ends between its last sign of life and the end of its processes; a TTL runs out between the
//! earliest and the latest deadline its holder's time stamps allow, plus the 100 ms of the contract.
use crate::history::{Call, History, Lease, Violation};
use crate::linear::{self, Checked, Timed};
use crate::record::{Ending, Form, Op, describe};
use crate::register::{Act, Commits};

/// A call of the register, and how to tell it to people.
struct Told {
    timed: Timed,
    words: String,
}

/// What the check of a whole history looked at.
#[derive(Clone, Copy, Debug, Default)]
pub struct Report {
    /// The calls, and the widest search of all keys.
    pub checked: Checked,
    /// Denials that had to be explained by a holder.
    pub denials: usize,
    /// Denials left alone: a waiter may have been promised the key just then.
    pub excused: usize,
}

/// Checks every key of the history.
pub fn check(history: &History) -> Result<Report, Violation> {
    let mut report = Report::default();
    for key in history.keys() {
        let told = of_key(history, &key, &mut report);
        let calls: Vec<Timed> = told.iter().map(|told| told.timed.clone()).collect();
        match linear::check(&calls) {
            Ok(checked) => {
                report.checked.calls += checked.calls;
                report.checked.widest = report.checked.widest.max(checked.widest);
                report.checked.quiescent += checked.quiescent;
            }
            Err(error) => {
                let call = &told[error.call];
                let (from, to) = (call.timed.from, call.timed.to);
                let within = format!("in the {:.3} ms before {}", (to - from) as f64 / 1e6, error.at);
                let what = format!("no order explains {} ({:?}) {within}: {error}", call.words, call.timed.act);
                return Err(history.violation("LINEARIZABLE", &key, from, what));
            }
        }
    }
    Ok(report)
}

/// The register's history of one key.
fn of_key(history: &History, key: &str, report: &mut Report) -> Vec<Told> {
    let mut told = Vec::new();
    for lease in history.leases.iter().filter(|lease| lease.key == key) {
        of_lease(history, lease, &mut told);
    }
    let waits = waits(history, key);
    for run in &history.runs {
        for call in run.calls.iter().filter(|call| call.key == key) {
            let (Some(to), Some(answer)) = (call.returned, call.answer) else {
                continue;
            };
            let act = match (call.op, answer) {
                (Op::Claim { form, .. }, Err(libc::EEXIST | libc::EAGAIN)) => {
                    let share = form == Form::Share;
                    let promised = |wait: &&Wait| (share || !wait.granted) && wait.from <= to && wait.to >= call.asked;
                    if waits.iter().any(|wait| promised(&wait)) {
                        report.excused += 1;
                        continue;
                    }
                    report.denials += 1;
                    Act::Deny { create: form == Form::Create, share }
                }
                (Op::Observe, Ok(epoch)) => Act::Observe { epoch },
                (Op::Forget, Ok(_)) => Act::Forget,
                (Op::Forget, Err(libc::ENOENT)) => Act::ForgetNone,
                (Op::Forget, Err(libc::EBUSY)) => Act::ForgetBusy,
                (Op::Evict(epoch), Ok(_)) => Act::Evict { epoch },
                (Op::Evict(epoch), Err(libc::ESTALE)) => Act::EvictMissed { epoch },
                _ => continue,
            };
            push(&mut told, call.asked, to, act, None, words(run.pid, call));
        }
    }
    told
}

/// A claim that waited in line.
struct Wait {
    from: u64,
    to: u64,
    granted: bool,
}

fn waits(history: &History, key: &str) -> Vec<Wait> {
    let mut waits = Vec::new();
    for run in &history.runs {
        for call in run.calls.iter().filter(|call| call.key == key) {
            if let Op::Claim { wait: true, .. } = call.op {
                waits.push(Wait { from: call.asked, to: call.returned.unwrap_or(run.gone), granted: call.ok() });
            }
        }
    }
    waits
}

fn push(told: &mut Vec<Told>, from: u64, to: u64, act: Act, after: Option<usize>, words: String) {
    told.push(Told { timed: Timed { from, to, act, after }, words });
}

fn words(pid: i32, call: &Call) -> String {
    format!("pid {pid}: {:?} -> {}", call.op, describe(&call.answer))
}

fn of_lease(history: &History, held: &Lease, told: &mut Vec<Told>) {
    let gone = history.runs[held.run].gone;
    let lease = held.id as u32;
    let claim = told.len();
    let maybe = held.granted.is_none();
    let act = match held.form {
        Form::Share => Act::Share { lease, maybe },
        form => Act::Grant { lease, known: held.epoch.unwrap_or(0), create: form == Form::Create, maybe },
    };
    let name = format!("pid {}: {:?} claim, epoch {:?}", held.pid, held.form, held.epoch);
    push(told, held.asked, held.granted.unwrap_or(held.over), act, None, name);

    let mut released = false;
    let mut draft = None;
    // A first draft may have become the result, and then it stays one whatever comes later.
    let mut reported = false;
    for call in &held.calls {
        let (from, to) = (call.asked, call.returned.unwrap_or(gone));
        let words = words(held.pid, call);
        let act = match (call.op, call.answer) {
            (Op::Release(ending), answer) => {
                let done = !matches!(answer, Some(Err(_)));
                released |= done;
                let to = if ending == Ending::ChildsClose { to.max(held.over) } else { to };
                let act = if done { Act::Release { lease } } else { Act::Lost { lease } };
                push(told, from, to, act, Some(claim), words);
                continue;
            }
            (Op::Draft(_), None) => Act::Draft { lease, maybe: true },
            (Op::Draft(_), Some(Ok(_))) => Act::Draft { lease, maybe: false },
            (Op::Commit, None) => Act::Commit { lease, maybe: true },
            (Op::Commit, Some(Ok(_))) => Act::Commit { lease, maybe: false },
            (Op::Draft(_) | Op::Commit, Some(Err(libc::EPERM | libc::EACCES))) if reported => {
                continue;
            }
            (Op::Draft(_) | Op::Commit, Some(Err(libc::EPERM | libc::EACCES))) => Act::HasResult { lease },
            (Op::Draft(_) | Op::Commit | Op::Write, Some(Err(_))) => Act::NotRegistered { lease },
            (Op::Write, Some(Ok(_))) => Act::Registered { lease },
            (Op::Finish, answer) => {
                let is_sure = answer.is_some() && !history.may_expire_first(held, to);
                let commits = if is_sure { Commits::Yes } else { Commits::Maybe };
                push(told, from, to, Act::DraftEnd { lease, commits }, draft.take(), words);
                reported = true;
                continue;
            }
            (Op::Epoch, Some(Ok(epoch))) => Act::Own { lease, epoch },
            (Op::Renew(_) | Op::Ttl(_), Some(Ok(_))) => Act::Own { lease, epoch: 0 },
            (_, Some(Err(_))) if call.lost() => Act::Lost { lease },
            _ => continue,
        };
        if let Act::Draft { .. } = act {
            draft = Some(told.len());
        }
        push(told, from, to, act, Some(claim), words);
    }
    let last = history.runs[held.run].last;
    if !released {
        push(told, held.end, held.over, Act::Release { lease }, Some(claim), format!("end of pid {}", held.pid));
    }
    if draft.is_some() {
        // The writer was killed with the draft open: nothing more is committed.
        let act = Act::DraftEnd { lease, commits: Commits::No };
        push(told, last, gone, act, draft, format!("draft of killed pid {}", held.pid));
    }
    if held.form != Form::Share {
        let (earliest, latest) = history.deadline(held);
        let touched = held.calls.iter().map(|call| call.returned.unwrap_or(gone)).max().unwrap_or(gone);
        let touched = if released { touched } else { gone };
        if touched >= earliest {
            let words = format!("TTL of pid {}, epoch {:?}", held.pid, held.epoch);
            push(told, earliest, history.grace(latest), Act::Expire { lease }, Some(claim), words);
        }
    }
}
