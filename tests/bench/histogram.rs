//! Latencies as counts in buckets about 3 % wide, so that any number of samples can be sent and merged cheaply.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Buckets per power of two.
const STEPS: u64 = 32;

/// Counts of nanoseconds; bucket widths grow with the value.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Histogram(BTreeMap<u64, u64>);

impl Histogram {
    /// Counts one sample.
    pub fn record(&mut self, nanos: u64) {
        *self.0.entry(bucket(nanos)).or_default() += 1;
    }

    /// Adds the samples of another.
    pub fn merge(&mut self, other: &Histogram) {
        for (bucket, count) in &other.0 {
            *self.0.entry(*bucket).or_default() += count;
        }
    }

    /// The value, in nanoseconds, that the given share of samples does not exceed; 0 without samples.
    pub fn quantile(&self, share: f64) -> u64 {
        let total: u64 = self.0.values().sum();
        let wanted = (total as f64 * share).ceil() as u64;
        let mut seen = 0;
        for (bucket, count) in &self.0 {
            seen += count;
            if seen >= wanted {
                return lower_end(*bucket);
            }
        }
        0
    }
}

fn bucket(nanos: u64) -> u64 {
    if nanos < STEPS {
        return nanos;
    }
    let power = u64::from(nanos.ilog2());
    // The five bits below the leading one.
    let step = (nanos >> (power - 5)) & (STEPS - 1);
    (power - 4) * STEPS + step
}

fn lower_end(bucket: u64) -> u64 {
    if bucket < STEPS {
        return bucket;
    }
    (STEPS + bucket % STEPS) << (bucket / STEPS - 1)
}
