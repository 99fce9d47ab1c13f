//! Counters for `.leasefs/metrics`, as Prometheus text.

use std::fmt::Write;
use std::time::Duration;

use crate::events::Kind;

/// Everything counted since the server started.
#[derive(Clone, Debug, Default)]
pub struct Metrics {
    /// Attempts begun.
    pub grants: u64,
    /// Requests refused because the key was not free.
    pub denials: u64,
    /// Lock requests that had to wait.
    pub waits: u64,
    /// Leases renewed.
    pub renewals: u64,
    /// Attempts ended by their holder.
    pub releases: u64,
    /// Attempts whose TTL ran out.
    pub expiries: u64,
    /// Attempts ended by an operator.
    pub evictions: u64,
    /// Attempts lost with their connection.
    pub losses: u64,
    /// Results committed.
    pub completions: u64,
    /// Requests of superseded or expired handles refused.
    pub stale: u64,
    /// Transactions committed.
    pub commits: u64,
    /// Transactions that failed.
    pub commit_failures: u64,
    /// Time spent in them.
    pub commit_time: Duration,
}

/// What is so now, beside what was counted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Gauges {
    /// Keys held, kept by a draft, or orphaned.
    pub held: usize,
    /// Lock requests in line.
    pub waiting: usize,
    /// Keys that ever were.
    pub keys: usize,
}

impl Metrics {
    /// Counts an event.
    pub fn count(&mut self, kind: Kind) {
        let counter = match kind {
            Kind::Granted => &mut self.grants,
            Kind::Denied => &mut self.denials,
            Kind::Waiting => &mut self.waits,
            Kind::Renewed => &mut self.renewals,
            Kind::Released => &mut self.releases,
            Kind::Expired => &mut self.expiries,
            Kind::Evicted => &mut self.evictions,
            Kind::Lost => &mut self.losses,
            Kind::Completed => &mut self.completions,
            Kind::Stale => &mut self.stale,
            Kind::Finished | Kind::Shared | Kind::Unshared | Kind::Forgotten => return,
        };
        *counter += 1;
    }

    /// In Prometheus' text format.
    pub fn render(&self, gauges: Gauges) -> String {
        let mut text = String::new();
        let mut put = |name: &str, kind: &str, help: &str, value: String| {
            let _ =
                writeln!(text, "# HELP leasefs_{name} {help}\n# TYPE leasefs_{name} {kind}\nleasefs_{name} {value}");
        };
        for (name, help, value) in [
            ("grants_total", "Attempts begun.", self.grants),
            ("denials_total", "Requests refused because the key was not free.", self.denials),
            ("waits_total", "Lock requests that had to wait.", self.waits),
            ("renewals_total", "Leases renewed.", self.renewals),
            ("releases_total", "Attempts ended by their holder.", self.releases),
            ("expiries_total", "Attempts whose TTL ran out.", self.expiries),
            ("evictions_total", "Attempts ended by an operator.", self.evictions),
            ("losses_total", "Attempts lost with their connection.", self.losses),
            ("completions_total", "Results committed.", self.completions),
            ("stale_refusals_total", "Requests of superseded or expired handles refused.", self.stale),
            ("commits_total", "Registry transactions.", self.commits),
            ("commit_failures_total", "Registry transactions that failed.", self.commit_failures),
        ] {
            put(name, "counter", help, value.to_string());
        }
        let seconds = format!("{:.6}", self.commit_time.as_secs_f64());
        put("commit_seconds_total", "counter", "Time spent in registry transactions.", seconds);
        for (name, help, value) in [
            ("held", "Keys held, kept by a draft, or orphaned.", gauges.held),
            ("waiting", "Lock requests in line.", gauges.waiting),
            ("keys", "Keys that ever were.", gauges.keys),
        ] {
            put(name, "gauge", help, value.to_string());
        }
        text
    }
}
