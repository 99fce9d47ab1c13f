//! `.leasefs/metrics`: well-formed to the letter, and each value driven through the mount.

use std::collections::BTreeMap;
use std::fs;
use std::process::Command;

use libc::{LOCK_EX, LOCK_NB, LOCK_SH};
use nix::errno::Errno;

use crate::common::agent::Agent;
use crate::common::{InTime, LEASEFS, Mount, assert_ok, stdout, wait_for};
use crate::{complete, release};

/// All samples, by name with labels.
struct Metrics(BTreeMap<String, f64>);

impl Metrics {
    /// Reads them and checks every line: the text format 0.0.4 as it is written, and not as a parser forgives it.
    fn of(mount: &Mount) -> Metrics {
        let text = fs::read_to_string(mount.root().join(".leasefs/metrics")).expect("metrics");
        assert!(text.ends_with('\n') && !text.contains("\n\n") && !text.contains('\r'));
        let mut samples = BTreeMap::new();
        let mut families: BTreeMap<&str, &str> = BTreeMap::new();
        let mut help: Option<&str> = None;
        let mut family = ("", "");
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# HELP ") {
                let (name, says) = rest.split_once(' ').expect("a help text");
                assert!(says.ends_with('.') && says.starts_with(char::is_uppercase), "{line}");
                assert!(!families.contains_key(name) && help.is_none(), "{line}");
                help = Some(name);
            } else if let Some(rest) = line.strip_prefix("# TYPE ") {
                family = rest.split_once(' ').expect("a type");
                assert_eq!(help.take(), Some(family.0), "TYPE follows HELP: {line}");
                assert!(matches!(family.1, "counter" | "gauge" | "histogram"), "{line}");
                assert_eq!(family.1 == "counter", family.0.ends_with("_total"), "{line}");
                assert!(family.0.starts_with("leasefs_"), "{line}");
                assert!(family.0.bytes().all(|b| b.is_ascii_lowercase() || b == b'_'), "{line}");
                families.insert(family.0, family.1);
            } else {
                assert_eq!(help, None, "HELP without TYPE before {line}");
                let (name, value) = line.rsplit_once(' ').expect("a sample");
                let bare = name.split('{').next().expect("a name");
                let known = match family.1 {
                    "histogram" => ["_bucket", "_sum", "_count"].map(|suffix| format!("{}{suffix}", family.0)),
                    _ => [family.0, family.0, family.0].map(str::to_owned),
                };
                assert!(known.iter().any(|known| known == bare), "{line} is no sample of {}", family.0);
                check_labels(&name[bare.len()..]);
                let value: f64 = value.parse().unwrap_or_else(|e| panic!("{e}: {line}"));
                assert!(value.is_finite() && value >= 0.0, "{line}");
                assert!(samples.insert(name.to_owned(), value).is_none(), "twice: {line}");
            }
        }
        let metrics = Metrics(samples);
        for (name, _) in families.iter().filter(|(_, kind)| **kind == "histogram") {
            metrics.check_histogram(name);
        }
        metrics
    }

    /// Buckets are cumulative by rising bounds, and the last is the count.
    fn check_histogram(&self, name: &str) {
        let mut series: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
        for (sample, count) in self.0.iter().filter(|(sample, _)| sample.starts_with(&format!("{name}_bucket{{"))) {
            let (before, bound) = sample.split_once("le=\"").expect("a bound");
            let bound = bound.strip_suffix("\"}").expect("the bound comes last");
            let labels = before[name.len() + "_bucket{".len()..].trim_end_matches(',');
            let bound = if bound == "+Inf" { f64::INFINITY } else { bound.parse().expect("a number") };
            series.entry(labels.to_owned()).or_default().push((bound, *count));
        }
        assert!(!series.is_empty(), "{name} has buckets");
        for (labels, mut buckets) in series {
            buckets.sort_by(|one, next| one.0.total_cmp(&next.0));
            assert!(
                buckets.is_sorted_by(|one, next| one.0 < next.0 && one.1 <= next.1),
                "{name} {labels}: {buckets:?}"
            );
            let whole = if labels.is_empty() { String::new() } else { format!("{{{labels}}}") };
            let last = buckets.last().expect("a bucket");
            assert_eq!(*last, (f64::INFINITY, self.get(&format!("{name}_count{whole}"))), "{name} {labels}");
            self.get(&format!("{name}_sum{whole}"));
        }
    }

    /// Whether there is a sample of this family.
    fn has(&self, family: &str) -> bool {
        self.0.keys().any(|sample| {
            let bare = sample.split('{').next().expect("a name");
            ["", "_bucket"].iter().any(|suffix| bare.strip_suffix(suffix) == Some(family))
        })
    }

    #[track_caller]
    fn get(&self, name: &str) -> f64 {
        *self.0.get(name).unwrap_or_else(|| panic!("no {name} in {:?}", self.0.keys()))
    }
}

fn check_labels(labels: &str) {
    if labels.is_empty() {
        return;
    }
    let inside = labels.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')).expect("labels in braces");
    for label in inside.split(',') {
        let (name, value) = label.split_once('=').expect("a label");
        assert!(!name.is_empty() && name.bytes().all(|b| b.is_ascii_lowercase()), "{labels}");
        assert!(value.len() > 2 && value.starts_with('"') && value.ends_with('"'), "{labels}");
    }
}

/// Does something, and checks by how much each of these has grown.
#[track_caller]
fn grows(mount: &Mount, expected: &[(&str, f64)], act: impl FnOnce()) {
    let before = Metrics::of(mount);
    act();
    let after = Metrics::of(mount);
    for (name, by) in expected {
        assert_eq!(after.get(name) - before.get(name), *by, "{name}");
    }
}

#[test]
fn a_tree_that_was_never_used_has_them_all() {
    let metrics = Metrics::of(&Mount::new());
    for (name, value) in &metrics.0 {
        let is_ours = ["state_free_bytes", "commit"].iter().any(|part| name.contains(part));
        assert!(is_ours || *value == 0.0, "{name} is {value}");
    }
    assert!(metrics.get("leasefs_state_free_bytes") > 1e6);
    let help = Command::new(LEASEFS).args(["help", "metrics"]).output_in_time();
    assert_ok(&help);
    let text = stdout(&help);
    let told = text.lines().filter_map(|line| line.strip_prefix("  ").filter(|name| name.starts_with("leasefs_")));
    let missing: Vec<&str> = told.clone().filter(|name| !metrics.has(name)).collect();
    assert!(told.count() > 10 && missing.is_empty(), "{missing:?}");
}

#[test]
fn grants_denials_and_endings_are_counted() {
    let mount = Mount::new();
    let (agent, other) = (Agent::new(), Agent::new());
    let path = mount.claim("k");
    let handle = other.handle(&path);
    grows(
        &mount,
        &[("leasefs_grants_total{via=\"create\"}", 1.0), ("leasefs_grants_total{via=\"lock\"}", 0.0)],
        || {
            agent.create(&path).expect("free");
        },
    );
    grows(&mount, &[("leasefs_denials_total", 3.0), ("leasefs_wait_seconds_count{outcome=\"granted\"}", 0.0)], || {
        (0..3).for_each(|_| assert_eq!(other.flock(handle, LOCK_EX | LOCK_NB), Err(Errno::EAGAIN)));
    });
    let evicted = [("leasefs_evictions_total", 1.0), ("leasefs_hold_seconds_count", 1.0)];
    grows(&mount, &evicted, || assert_ok(&mount.leasefs(&["evict", "k", "--epoch", "1"])));
    let locked = [("leasefs_grants_total{via=\"lock\"}", 1.0), ("leasefs_releases_total", 1.0)];
    grows(&mount, &locked, || {
        other.flock(handle, LOCK_EX).expect("free");
        other.close(handle);
        mount.wait_status("k", "free", |status| status["state"] == "free");
    });
    let fd = agent.create(&mount.claim("short")).expect("free");
    grows(&mount, &[("leasefs_expiries_total", 1.0), ("leasefs_hold_seconds_count", 1.0)], || {
        agent.set_xattr(&mount.claim("short"), "user.lease.ttl", "20ms").expect("its own");
        mount.wait_status("short", "expired", |status| status["outcome"] == "expired");
    });
    grows(&mount, &[("leasefs_stale_refusals_total", 2.0)], || {
        (0..2).for_each(|_| assert_eq!(agent.write(fd, "late"), Err(Errno::ESTALE)));
    });
    let renewed = agent.create(&mount.claim("renewed")).expect("free");
    grows(&mount, &[("leasefs_renewals_total", 2.0)], || {
        agent.write(renewed, "beat").expect("held");
        agent.touch(renewed).expect("held");
    });
}

#[test]
fn waits_are_measured_until_they_end_one_way_or_the_other() {
    let mount = Mount::new();
    let (holder, next, killed) = (Agent::new(), Agent::new(), Agent::new());
    let path = mount.claim("k");
    let fd = holder.create(&path).expect("free");
    let waits = |agent: &Agent| agent.begin_flock(agent.handle(&path), LOCK_EX);
    let in_line = |count: u64| mount.wait_status("k", "in line", |status| status["waiters"] == count);
    waits(&next);
    in_line(1);
    waits(&killed);
    in_line(2);
    let metrics = Metrics::of(&mount);
    assert_eq!((metrics.get("leasefs_waiting"), metrics.get("leasefs_waits_total")), (2.0, 2.0));
    assert!(metrics.get("leasefs_oldest_wait_seconds") > 0.0);
    let grew = |by| wait_for("the wait grows", || Metrics::of(&mount).get("leasefs_oldest_wait_seconds") > by);
    grew(0.1);
    let interrupted = [
        ("leasefs_interrupted_waits_total", 1.0),
        ("leasefs_wait_seconds_count{outcome=\"interrupted\"}", 1.0),
        ("leasefs_wait_seconds_count{outcome=\"granted\"}", 0.0),
    ];
    grows(&mount, &interrupted, || {
        killed.kill();
        in_line(1);
    });
    grows(&mount, &[("leasefs_wait_seconds_count{outcome=\"granted\"}", 1.0)], || {
        holder.close(fd);
        next.answer().expect("granted");
    });
    let metrics = Metrics::of(&mount);
    assert_eq!((metrics.get("leasefs_waiting"), metrics.get("leasefs_oldest_wait_seconds")), (0.0, 0.0));
    // It waited for longer than the gauge said a while ago, and holders are measured by the same clock.
    assert!(metrics.get("leasefs_wait_seconds_sum{outcome=\"granted\"}") > 0.1);
    assert_eq!(metrics.get("leasefs_wait_seconds_bucket{outcome=\"granted\",le=\"0.1\"}"), 0.0);
    assert!(metrics.get("leasefs_hold_seconds_sum") > 0.1);
    assert_eq!(metrics.get("leasefs_wait_seconds_count{outcome=\"refused\"}"), 0.0);
}

#[test]
fn results_drafts_and_what_they_keep_are_counted() {
    let mount = Mount::new();
    let agent = Agent::new();
    let fd = agent.create(&mount.claim("k")).expect("free");
    let drafts: Vec<_> = (0..3).map(|_| agent.handle(&mount.result("k", 1))).collect();
    agent.close(fd);
    mount.wait_status("k", "reporting", |status| status["state"] == "reporting");
    let metrics = Metrics::of(&mount);
    let gauges = ["held", "reporting", "drafts", "orphaned"].map(|name| metrics.get(&format!("leasefs_{name}")));
    assert_eq!(gauges, [1.0, 1.0, 3.0, 0.0]);
    grows(&mount, &[("leasefs_completions_total", 1.0), ("leasefs_result_bytes_total", 5.0)], || {
        agent.write(drafts[0], "12345").expect("registered");
        agent.fsync(drafts[0]).expect("commits");
    });
    drafts.into_iter().for_each(|draft| agent.close(draft));
    mount.wait_status("k", "finished", |status| status["state"] == "finished");
    let metrics = Metrics::of(&mount);
    let gauges = ["held", "reporting", "drafts"].map(|name| metrics.get(&format!("leasefs_{name}")));
    assert_eq!(gauges, [0.0, 0.0, 0.0]);
}

#[test]
fn shared_keys_are_counted_and_not_their_locks() {
    let mount = Mount::new();
    let (one, other) = (Agent::new(), Agent::new());
    let shared = || Metrics::of(&mount).get("leasefs_shared");
    let [first, second] = [&one, &other].map(|agent| {
        let handle = agent.handle(&mount.claim("k"));
        agent.flock(handle, LOCK_SH).expect("free");
        handle
    });
    assert_eq!(shared(), 1.0);
    mount.kill_server();
    assert_eq!(shared(), 1.0);
    one.close(first);
    assert_eq!(shared(), 1.0);
    other.flock(second, LOCK_EX | LOCK_NB).expect("its own share is not in its way");
    assert_eq!((shared(), Metrics::of(&mount).get("leasefs_held")), (0.0, 1.0));
    other.flock(second, LOCK_SH).expect("a downgrade");
    assert_eq!((shared(), Metrics::of(&mount).get("leasefs_held")), (1.0, 0.0));
    other.close(second);
    wait_for("nobody shares it", || shared() == 0.0);
}

#[test]
fn what_is_pruned_is_counted() {
    let mount = Mount::new();
    complete(&mount, "done", &[3, 3]);
    release(&mount, "free", 10);
    grows(&mount, &[("leasefs_pruned_attempts_total", 6.0), ("leasefs_pruned_results_total", 2.0)], || {
        assert_ok(&mount.leasefs(&["prune", "--attempts-over", "5", "--completed-older", "0s"]));
    });
}

#[test]
fn commits_are_measured_by_whether_they_wait_for_the_disk() {
    for (durability, synced) in [("full", "yes"), ("process", "no")] {
        let mount = Mount::with(&["--durability", durability]);
        let before = Metrics::of(&mount);
        release(&mount, "k", 20);
        let after = Metrics::of(&mount);
        let grew = |name: &str| after.get(name) - before.get(name);
        let of = |what: &str| format!("leasefs_commit_duration_seconds_{what}{{synced=\"{synced}\"}}");
        assert!(grew(&of("count")) >= 20.0, "{durability}");
        assert!(grew(&of("sum")) > 0.0 && grew("leasefs_commit_seconds_total") > 0.0, "{durability}");
        assert!(grew("leasefs_commits_total") >= 20.0, "{durability}");
    }
}

/// An alert on the longest wait must not be put off by a server that is replaced.
#[test]
fn whoever_waits_has_waited_since_before_the_server_took_over() {
    let mount = Mount::new();
    let (holder, waiter) = (Agent::new(), Agent::new());
    holder.create(&mount.claim("k")).expect("free");
    waiter.begin_flock(waiter.handle(&mount.claim("k")), LOCK_EX);
    mount.wait_status("k", "in line", |status| status["waiters"] == 1);
    let oldest = || Metrics::of(&mount).get("leasefs_oldest_wait_seconds");
    wait_for("the wait grows", || oldest() > 2.0);
    mount.kill_server();
    mount.wait_status("k", "in line still", |status| status["waiters"] == 1);
    assert!(oldest() > 2.0, "{}", oldest());
    drop(holder);
    waiter.answer().expect("granted");
    let sum = Metrics::of(&mount).get("leasefs_wait_seconds_sum{outcome=\"granted\"}");
    assert!(sum > 2.0, "{sum}");
}

#[test]
fn a_server_that_took_over_says_so_and_counts_anew() {
    let mount = Mount::new();
    release(&mount, "k", 3);
    for restarts in 1..=2 {
        mount.kill_server();
        let metrics = Metrics::of(&mount);
        assert_eq!(metrics.get("leasefs_server_restarts_total"), f64::from(restarts));
        assert_eq!(metrics.get("leasefs_grants_total{via=\"lock\"}"), 0.0, "as its help says");
        assert_eq!(metrics.get("leasefs_keys"), 1.0);
    }
}
