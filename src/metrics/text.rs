//! The metrics in Prometheus' text format, version 0.0.4: each family with its help and type, then its samples.

use std::fmt::{Display, Write};
use std::time::Duration;

use super::{Gauges, Histogram, Metrics, Outside};

/// The text as it grows. Writing to a string does not fail.
#[derive(Default)]
struct Text(String);

impl Text {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP leasefs_{name} {help}\n# TYPE leasefs_{name} {kind}");
    }

    fn sample(&mut self, name: &str, labels: &str, value: impl Display) {
        let _ = match labels {
            "" => writeln!(self.0, "leasefs_{name} {value}"),
            labels => writeln!(self.0, "leasefs_{name}{{{labels}}} {value}"),
        };
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.family(name, "counter", &format!("{help}, since this server started."));
        self.sample(name, "", value);
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl Display) {
        self.family(name, "gauge", help);
        self.sample(name, "", value);
    }

    /// One histogram for each value of a label; an empty label for the only one.
    fn histograms(&mut self, name: &str, help: &str, all: &[(&str, &Histogram)]) {
        self.family(name, "histogram", &format!("{help}, since this server started."));
        for (label, histogram) in all {
            for (bound, count) in histogram.buckets() {
                let comma = if label.is_empty() { "" } else { "," };
                self.sample(&format!("{name}_bucket"), &format!("{label}{comma}le=\"{bound}\""), count);
            }
            self.sample(&format!("{name}_sum"), label, seconds(histogram.sum()));
            self.sample(&format!("{name}_count"), label, histogram.count());
        }
    }
}

fn seconds(duration: Duration) -> String {
    format!("{:.6}", duration.as_secs_f64())
}

impl Metrics {
    /// In Prometheus' text format.
    pub fn render(&self, gauges: &Gauges, outside: &Outside) -> String {
        let mut text = Text::default();
        self.counters(&mut text);
        let [granted, interrupted, refused] = &self.waited;
        text.histograms(
            "wait_seconds",
            "Time in line of lock requests that had to wait, by how that ended",
            &[
                ("outcome=\"granted\"", granted),
                ("outcome=\"interrupted\"", interrupted),
                ("outcome=\"refused\"", refused),
            ],
        );
        text.histograms(
            "hold_seconds",
            "Time from an attempt's grant to its end (twice where it ended and lived on by a draft)",
            &[("", &self.held)],
        );
        let [unsynced, synced] = &self.committed;
        text.histograms(
            "commit_duration_seconds",
            "Time of registry transactions, by whether they were synced to the disk",
            &[("synced=\"no\"", unsynced), ("synced=\"yes\"", synced)],
        );
        text.family("server_restarts_total", "counter", "Servers of this mount that took over from another.");
        text.sample("server_restarts_total", "", outside.restarts);
        text.gauge("held", "Keys held, kept by a draft, or orphaned.", gauges.held);
        text.gauge("orphaned", "Keys held or shared by whoever lost its connection.", gauges.orphaned);
        text.gauge("shared", "Keys that shared locks are on.", gauges.shared);
        text.gauge("reporting", "Keys that only a draft of a result keeps.", gauges.reporting);
        text.gauge("drafts", "Results that are open for writing.", outside.drafts);
        text.gauge("waiting", "Lock requests in line.", gauges.waiting);
        let oldest = seconds(gauges.oldest_wait);
        text.gauge(
            "oldest_wait_seconds",
            "How long the lock request that waits longest has waited; 0 for none.",
            oldest,
        );
        text.gauge("keys", "Keys that ever were.", gauges.keys);
        if let Some(bytes) = gauges.free_bytes {
            text.gauge("state_free_bytes", "Bytes that may still be written in the state directory.", bytes);
        }
        text.0
    }

    fn counters(&self, text: &mut Text) {
        text.family("grants_total", "counter", "Attempts begun, by form of claim, since this server started.");
        text.sample("grants_total", "via=\"create\"", self.creates);
        text.sample("grants_total", "via=\"lock\"", self.locks);
        for (name, help, value) in [
            ("denials_total", "Requests refused because the key was not free", self.denials),
            ("waits_total", "Lock requests that had to wait", self.waits),
            ("interrupted_waits_total", "Waits that ended without a grant", self.ended_waits()),
            ("renewals_total", "Leases renewed", self.renewals),
            ("releases_total", "Attempts ended by their holder", self.releases),
            ("expiries_total", "Attempts whose TTL ran out", self.expiries),
            ("evictions_total", "Attempts ended by an operator", self.evictions),
            ("losses_total", "Attempts lost with their connection", self.losses),
            ("completions_total", "Results committed", self.completions),
            ("result_bytes_total", "Bytes of results committed", self.result_bytes),
            ("stale_refusals_total", "Requests of superseded or expired handles refused", self.stale),
            ("pruned_attempts_total", "Attempts pruned from the history", self.pruned_attempts),
            ("pruned_results_total", "Results pruned", self.pruned_results),
            ("commits_total", "Registry transactions", self.commits),
            ("commit_failures_total", "Registry transactions that failed", self.commit_failures),
        ] {
            text.counter(name, help, value);
        }
        let help = "Time spent in registry transactions, since this server started.";
        text.family("commit_seconds_total", "counter", help);
        let spent = self.committed.iter().map(Histogram::sum).sum();
        text.sample("commit_seconds_total", "", seconds(spent));
    }

    fn ended_waits(&self) -> u64 {
        self.waited[1..].iter().map(Histogram::count).sum()
    }
}
