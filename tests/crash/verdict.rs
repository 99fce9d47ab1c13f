//! What must have held in a run, whatever happened to the server; and the figures of it, for people.
use std::collections::BTreeMap;

use crate::history::{Call, History, Violation};
use crate::killer::Recovery;
use crate::record::{Form, Op, Side};
use crate::sys::errno_name;

/// Longest any call may take that does not wait in line, in nanoseconds.
const SLOWEST: u64 = 1_000_000_000;

/// On a machine that has more to do, everything takes longer: the limit is so many times the median from a kill to the next
/// answer, where that is more. Idle, this is 40 ms, so the limit is the second.
const RECOVERIES: u64 = 10;

/// No call took longer than a second, the times the machine stood still not counted. One that waits in line counts from
/// when the key was free.
pub fn nobody_waits(history: &History) -> Result<(), Violation> {
    let mut outages: Vec<u64> = history.outages.iter().map(|(killed, answered)| answered - killed).collect();
    outages.sort_unstable();
    let limit = SLOWEST.max(RECOVERIES * outages.get(outages.len() / 2).copied().unwrap_or(0));
    for run in &history.runs {
        for call in &run.calls {
            let Some(took) = took(history, call) else { continue };
            if took > limit {
                let what = format!("{:?} took {:.3} s", call.op, took as f64 / 1e9);
                return Err(history.violation("SLOW", &call.key, call.asked, what));
            }
        }
    }
    for (took, key, at) in handovers(history) {
        if took > limit {
            let what = format!("the next in line got the free key after {:.3} s", took as f64 / 1e9);
            return Err(history.violation("SLOW", &key, at, what));
        }
    }
    Ok(())
}

/// How long a call took; none if it may wait in line, or did not return.
fn took(history: &History, call: &Call) -> Option<u64> {
    if let Op::Claim { wait: true, .. } = call.op {
        return None;
    }
    let returned = call.returned?;
    Some((returned - call.asked).saturating_sub(stood_still(history, call.asked, returned)))
}

/// How much of a time the machine stood still.
fn stood_still(history: &History, from: u64, until: u64) -> u64 {
    let inside = |&(begin, end): &(u64, u64)| end.min(until).saturating_sub(begin.max(from));
    history.stalls.iter().map(inside).sum()
}

/// How long each granted wait took from when nobody else had the key; with the key, and when.
fn handovers(history: &History) -> Vec<(u64, String, u64)> {
    let mut busy: BTreeMap<&str, Vec<(u64, u64)>> = BTreeMap::new();
    for lease in &history.leases {
        // A draft keeps the key as the lease does.
        let reported = lease.calls.iter().filter(|call| call.op == Op::Finish).filter_map(|call| call.returned).max();
        let over = lease.over.max(reported.unwrap_or(0));
        busy.entry(&lease.key).or_default().push((lease.granted.unwrap_or(lease.over), over));
    }
    let mut found = Vec::new();
    for run in &history.runs {
        for call in run.calls.iter().filter(|call| call.ok() && matches!(call.op, Op::Claim { wait: true, .. })) {
            let Some(granted) = call.returned else { continue };
            let before = busy[call.key.as_str()].iter().filter(|(from, _)| *from < granted);
            let free = before.map(|(_, over)| *over).max().unwrap_or(0).max(call.asked);
            // Where shares overlap the end of one says nothing.
            let took = granted.saturating_sub(free);
            found.push((
                took.saturating_sub(stood_still(history, free, granted.max(free))),
                call.key.clone(),
                call.asked,
            ));
        }
    }
    found
}

/// The name of a kind of call.
fn kind(op: &Op) -> String {
    match op {
        Op::Claim { form: Form::Create, .. } => "create".into(),
        Op::Claim { form, wait } => format!("{form:?} {}", if *wait { "wait" } else { "try" }).to_lowercase(),
        Op::Renew(how) => format!("renew by {how:?}").to_lowercase(),
        Op::Release(how) => format!("release by {how:?}").to_lowercase(),
        Op::Side(Side::Handle) => "open to lock".into(),
        Op::Side(side) => format!("{side:?}").to_lowercase(),
        Op::Epoch => "own epoch".into(),
        Op::Ttl(_) => "set ttl".into(),
        Op::Observe => "observe".into(),
        Op::Draft(_) => "draft".into(),
        Op::Write => "write draft".into(),
        Op::Commit => "fsync".into(),
        Op::Finish => "close draft".into(),
        Op::Forget => "forget".into(),
        Op::Evict(_) => "evict".into(),
    }
}

#[derive(Default)]
struct Line {
    calls: u64,
    ok: u64,
    errors: BTreeMap<String, u64>,
    unknown: u64,
    slowest: u64,
}

/// Prints one line for each kind of call: how many, what they answered, the slowest.
pub fn print(history: &History) {
    let mut lines: BTreeMap<String, Line> = BTreeMap::new();
    for call in history.runs.iter().flat_map(|run| &run.calls) {
        let line = lines.entry(kind(&call.op)).or_default();
        line.calls += 1;
        match call.answer {
            Some(Ok(_)) => line.ok += 1,
            Some(Err(errno)) => *line.errors.entry(errno_name(errno)).or_default() += 1,
            None => line.unknown += 1,
        }
        line.slowest = line.slowest.max(took(history, call).unwrap_or(0));
    }
    println!("  {:<22} {:>8} {:>8} {:>9}  errors", "call", "times", "ok", "slowest");
    for (name, line) in &lines {
        let mut errors: Vec<String> = line.errors.iter().map(|(errno, times)| format!("{errno} {times}")).collect();
        if line.unknown > 0 {
            errors.push(format!("its caller was killed {}", line.unknown));
        }
        let slowest = format!("{:.1} ms", line.slowest as f64 / 1e6);
        let slowest = if line.slowest == 0 { "in line".to_owned() } else { slowest };
        println!("  {name:<22} {:>8} {:>8} {slowest:>9}  {}", line.calls, line.ok, errors.join(", "));
    }
    let mut waits: Vec<u64> = handovers(history).into_iter().map(|(took, ..)| took).collect();
    waits.sort_unstable();
    if let (Some(slowest), Some(median)) = (waits.last(), waits.get(waits.len() / 2)) {
        let (slowest, median) = (*slowest as f64 / 1e6, *median as f64 / 1e6);
        println!(
            "  {} waits granted; from the key's being free: median {median:.1} ms, slowest {slowest:.1} ms",
            waits.len()
        );
    }
}

/// Prints how long it took until somebody was answered again.
pub fn print_recoveries(recoveries: &[Recovery]) {
    let mut times: Vec<f64> = recoveries.iter().map(Recovery::ms).collect();
    times.sort_by(f64::total_cmp);
    let kills: u32 = recoveries.iter().map(|recovery| recovery.kills).sum();
    if let (Some(slowest), Some(median)) = (times.last(), times.get(times.len() / 2)) {
        println!("  {kills} kills; from a kill to the next answer: median {median:.1} ms, slowest {slowest:.1} ms");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::testing::{call, made, with};

    const MS: u64 = 1_000_000;

    #[test]
    fn rejects_a_call_of_more_than_a_second() {
        let mut slow = call(Op::Epoch, 200, Ok(1));
        slow.returned = Some(200 + 999 * MS);
        nobody_waits(&with(&[slow.clone()])).expect("just in time");
        slow.returned = Some(200 + 1_001 * MS);
        let history = with(&[slow]);
        assert_eq!(nobody_waits(&history).expect_err("too slow").invariant, "SLOW");
        // The machine itself stood still.
        let mut history = history;
        history.stalls = vec![(100 * MS, 900 * MS)];
        nobody_waits(&history).expect("not the server's fault");
    }

    #[test]
    fn a_busy_machine_has_as_much_more_time_as_its_servers_take_to_start() {
        let mut slow = call(Op::Epoch, 200, Ok(1));
        slow.returned = Some(200 + 1_900 * MS);
        let mut history = with(&[slow]);
        // One that was slow says nothing of the others.
        history.outages = vec![(0, 40 * MS), (100 * MS, 140 * MS), (200 * MS, 1_200 * MS)];
        nobody_waits(&history).expect_err("the machine is idle");
        history.outages = vec![(0, 200 * MS), (300 * MS, 500 * MS), (600 * MS, 640 * MS)];
        nobody_waits(&history).expect("within two seconds");
    }

    #[test]
    fn a_wait_counts_from_when_the_key_was_free() {
        let wait = |granted| {
            let mut history = made(&[(10, 1, 100, 110, 5_000 * MS), (11, 2, 200, granted, granted + 10)]);
            history.runs[1].calls[0].op = Op::Claim { form: Form::Flock, wait: true };
            history.find_leases();
            history
        };
        nobody_waits(&wait(5_300 * MS)).expect("300 ms after the release");
        nobody_waits(&wait(6_300 * MS)).expect_err("1.3 s after the release");
    }
}
