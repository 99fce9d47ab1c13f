//! Judges of a history: holding times do not overlap, and epochs grow with time.
//!
//! They know nothing of the server; [`trace`](crate::trace) and [`registry`](crate::registry) judge the rest.
use crate::history::{History, Lease, Violation};
use crate::record::Form;

/// No two holding times of a key overlap, unless both are shared.
pub fn no_overlap(history: &History) -> Result<usize, Violation> {
    let mut checked = 0;
    for key in history.keys() {
        let leases = history.leases.iter().filter(|lease| lease.key == key);
        let mut held: Vec<(u64, u64, &Lease)> =
            leases.filter_map(|lease| history.held(lease).map(|(from, until)| (from, until, lease))).collect();
        held.sort_by_key(|&(from, ..)| from);
        // The latest end so far, of the exclusive leases and of the shared ones.
        let (mut exclusive, mut shared) = (None::<(u64, &Lease)>, None::<(u64, &Lease)>);
        for (from, until, lease) in held {
            let is_shared = lease.form == Form::Share;
            let against = [exclusive, shared.filter(|_| !is_shared)];
            if let Some((end, other)) = against.into_iter().flatten().find(|(end, _)| *end >= from) {
                let what = format!(
                    "pid {} (epoch {:?}) held from {from}, while pid {} (epoch {:?}) held until {end}",
                    lease.pid, lease.epoch, other.pid, other.epoch
                );
                return Err(history.violation("I-MUTEX", &key, from, what));
            }
            let latest = if is_shared { &mut shared } else { &mut exclusive };
            if latest.is_none_or(|(end, _)| end < until) {
                *latest = Some((until, lease));
            }
            checked += 1;
        }
    }
    Ok(checked)
}

/// Every (key, epoch) has one winner, and a later claim a greater epoch.
pub fn epochs_grow(history: &History) -> Result<(), Violation> {
    for key in history.keys() {
        let leases = history.leases.iter().filter(|lease| lease.key == key);
        let mut told: Vec<(u64, u64, u64, &Lease)> =
            leases.filter_map(|lease| Some((lease.epoch?, lease.asked, lease.granted?, lease))).collect();
        told.sort_by_key(|&(epoch, ..)| epoch);
        // The latest claim call so far that began, going up the epochs.
        let mut latest: Option<(u64, &Lease)> = None;
        for pair in told.windows(2) {
            if pair[0].0 == pair[1].0 {
                let what =
                    format!("epoch {} has two winners: pid {} and pid {}", pair[0].0, pair[0].3.pid, pair[1].3.pid);
                return Err(history.violation("I-EPOCH-UNIQ", &key, pair[1].2, what));
            }
        }
        for (epoch, asked, granted, lease) in told {
            if let Some((begun, other)) = latest
                && granted < begun
            {
                let what = format!(
                    "epoch {epoch} (pid {}) was granted before pid {} asked for what became epoch {:?}",
                    lease.pid, other.pid, other.epoch
                );
                return Err(history.violation("I-EPOCH-UNIQ", &key, granted, what));
            }
            if latest.is_none_or(|(begun, _)| begun < asked) {
                latest = Some((asked, lease));
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::history::testing::made;
    use crate::trace;

    #[test]
    fn accepts_holding_times_that_only_touch_the_calls_of_others() {
        // The second asked while the first held, and was granted after the first began its release.
        let history = made(&[(10, 1, 100, 110, 150), (11, 2, 120, 152, 170), (12, 3, 180, 190, 200)]);
        assert_eq!(no_overlap(&history).expect("right"), 3);
        epochs_grow(&history).expect("right");
        trace::check(&history).expect("right");
    }

    #[test]
    fn rejects_overlapping_holding_times() {
        let history = made(&[(10, 1, 100, 110, 150), (11, 2, 120, 140, 170)]);
        let violation = no_overlap(&history).expect_err("both held at 140");
        assert_eq!(violation.invariant, "I-MUTEX");
        assert!(violation.history.contains("pid 10") && violation.history.contains("pid 11"), "{violation}");
        trace::check(&history).expect_err("no order explains it");
        // An overlap with a lease further back than the one before.
        let history = made(&[(10, 1, 100, 110, 900), (11, 2, 120, 950, 960), (12, 3, 130, 500, 510)]);
        no_overlap(&history).expect_err("12 held inside 10");
    }

    #[test]
    fn a_killed_holder_held_until_its_last_sign_of_life_and_no_longer() {
        let mut history = made(&[(10, 1, 100, 110, 0), (11, 2, 120, 140, 170)]);
        history.runs[0].calls.truncate(2);
        history.runs[0].killed = true;
        history.runs[0].gone = 135;
        for (last, right) in [(130, true), (139, true), (141, false)] {
            history.runs[0].last = last;
            history.find_leases();
            assert_eq!(no_overlap(&history).is_ok(), right, "last sign at {last}");
        }
    }

    #[test]
    fn shares_overlap_each_other_and_nothing_else() {
        let mut history = made(&[(10, 1, 100, 110, 150), (11, 1, 120, 140, 170), (12, 1, 160, 180, 190)]);
        for lease in &mut history.leases[..2] {
            lease.form = Form::Share;
        }
        no_overlap(&history).expect("shares may overlap");
        history.leases[0].form = Form::Flock;
        no_overlap(&history).expect_err("a share beside an exclusive lease");
        history.leases[0].form = Form::Share;
        history.leases[2].granted = Some(165);
        no_overlap(&history).expect_err("an exclusive lease beside a share");
    }

    #[test]
    fn rejects_two_winners_of_an_epoch_and_epochs_that_fall() {
        let twice = made(&[(10, 1, 100, 110, 150), (11, 1, 160, 170, 180)]);
        assert_eq!(epochs_grow(&twice).expect_err("epoch 1 twice").invariant, "I-EPOCH-UNIQ");
        let falls = made(&[(10, 2, 100, 110, 150), (11, 1, 160, 170, 180)]);
        epochs_grow(&falls).expect_err("epoch 2 before epoch 1");
        let distant = made(&[(10, 3, 100, 110, 150), (11, 1, 160, 170, 180), (12, 2, 190, 200, 210)]);
        epochs_grow(&distant).expect_err("epoch 3 came first");
        trace::check(&twice).expect_err("no order explains it");
        trace::check(&falls).expect_err("no order explains it");
    }
}
