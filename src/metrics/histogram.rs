//! Histograms with fixed bounds: one look for the bucket and one increment for each value.

use std::time::Duration;

/// How many values fell below each bound, and their sum.
#[derive(Clone, Debug)]
pub struct Histogram {
    /// Upper bounds in nanoseconds, lowest first; what is above the last is counted behind it.
    bounds_ns: &'static [u64],
    counts: [u64; MAX_BOUNDS + 1],
    sum: Duration,
}

/// Most bounds that any has.
const MAX_BOUNDS: usize = 16;

const US: u64 = 1_000;
const MS: u64 = 1_000 * US;
const S: u64 = 1_000 * MS;
const MINUTE: u64 = 60 * S;
const HOUR: u64 = 60 * MINUTE;

/// For what people and programs wait for, and hold: from a millisecond to a week.
pub const SPANS: &[u64] = &[
    MS,
    10 * MS,
    50 * MS,
    100 * MS,
    500 * MS,
    S,
    5 * S,
    10 * S,
    30 * S,
    MINUTE,
    5 * MINUTE,
    30 * MINUTE,
    HOUR,
    6 * HOUR,
    24 * HOUR,
    7 * 24 * HOUR,
];

/// For transactions: from the time of a write to memory to that of a disk in trouble.
pub const COMMITS: &[u64] = &[
    10 * US,
    20 * US,
    50 * US,
    100 * US,
    200 * US,
    500 * US,
    MS,
    2 * MS,
    5 * MS,
    10 * MS,
    20 * MS,
    50 * MS,
    100 * MS,
    500 * MS,
    S,
    5 * S,
];

impl Histogram {
    /// With nothing in it.
    pub const fn new(bounds_ns: &'static [u64]) -> Histogram {
        assert!(bounds_ns.len() <= MAX_BOUNDS);
        Histogram { bounds_ns, counts: [0; MAX_BOUNDS + 1], sum: Duration::ZERO }
    }

    /// Counts a value, in nanoseconds. One that is a bound is not above it.
    pub fn observe(&mut self, ns: u64) {
        self.counts[self.bounds_ns.partition_point(|bound| *bound < ns)] += 1;
        self.sum = self.sum.saturating_add(Duration::from_nanos(ns));
    }

    /// How many values were counted.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The sum of all values.
    pub fn sum(&self) -> Duration {
        self.sum
    }

    /// The bounds as Prometheus has them (`le`, in seconds), each with how many values are not above it.
    pub fn buckets(&self) -> impl Iterator<Item = (String, u64)> {
        let bounds = self.bounds_ns.iter().map(|ns| (*ns as f64 / S as f64).to_string());
        let mut total = 0;
        bounds.chain(["+Inf".to_owned()]).zip(self.counts).map(move |(bound, count)| {
            total += count;
            (bound, total)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_counted_by_the_first_bound_it_is_not_above() {
        let mut histogram = Histogram::new(&[MS, S]);
        for ns in [0, MS, MS + 1, S, S + 1, u64::MAX] {
            histogram.observe(ns);
        }
        let buckets: Vec<_> = histogram.buckets().collect();
        let expected = [("0.001", 2), ("1", 4), ("+Inf", 6)].map(|(bound, count)| (bound.to_owned(), count));
        assert_eq!(buckets, expected);
        assert_eq!(histogram.count(), 6);
        assert!(histogram.sum() > Duration::from_nanos(u64::MAX));
    }

    #[test]
    fn bounds_rise_and_are_written_without_an_exponent() {
        for bounds in [SPANS, COMMITS] {
            assert!(bounds.is_sorted_by(|one, next| one < next));
            assert!(Histogram::new(bounds).buckets().all(|(bound, _)| !bound.contains('e')));
        }
    }
}
