//! The fields of every JSON are documented, and what is documented is there (`leasefs help json`).

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use crate::common::agent::Agent;
use crate::common::{InTime, LEASEFS, Mount, assert_ok, read_in_time, stdout, wait_for};

/// The fields a part of `leasefs help json` tells of, and those of them that may be missing.
fn documented(title: &str) -> (BTreeSet<String>, BTreeSet<String>) {
    let output = Command::new(LEASEFS).args(["help", "json"]).env("COLUMNS", "100").output_in_time();
    assert_ok(&output);
    let text = stdout(&output);
    let (mut all, mut optional, mut is_inside) = (BTreeSet::new(), BTreeSet::new(), false);
    let lines: Vec<&str> = text.lines().collect();
    for (at, line) in lines.iter().enumerate() {
        // A heading stands alone and is no sentence.
        let is_heading = !line.is_empty() && !line.starts_with(' ') && !line.ends_with('.');
        if is_heading && lines.get(at + 1).is_none_or(|next| next.is_empty()) {
            is_inside = *line == title;
        } else if let Some(field) = line.strip_prefix("  ").filter(|field| is_inside && !field.starts_with(' ')) {
            let (name, kind) = field.split_once(" (").unwrap_or_else(|| panic!("{line}"));
            all.insert(name.to_owned());
            if kind.starts_with('[') {
                optional.insert(name.to_owned());
            }
        }
    }
    assert!(!all.is_empty(), "{title}: {text}");
    (all, optional)
}

/// The names of all fields of an object, as the help has them.
fn names(value: &Value, prefix: &str, into: &mut BTreeSet<String>) {
    let Value::Object(fields) = value else { return };
    for (name, value) in fields {
        let name = format!("{prefix}{name}");
        match value {
            Value::Object(_) => names(value, &format!("{name}."), into),
            Value::Array(list) => list.iter().for_each(|one| names(one, &format!("{name}[]."), into)),
            _ => {}
        }
        into.insert(name);
    }
}

fn shown<'a>(objects: impl IntoIterator<Item = &'a Value>) -> BTreeSet<String> {
    let mut all = BTreeSet::new();
    objects.into_iter().for_each(|object| names(object, "", &mut all));
    all
}

/// Whether each object has every field that must be there.
fn assert_whole(objects: &[Value], title: &str) {
    let (all, optional) = documented(title);
    for object in objects {
        let has = shown([object]);
        let must = all.iter().filter(|name| !name.contains('.') && !optional.contains(*name));
        let missing: Vec<_> = must.filter(|name| !has.contains(*name)).collect();
        assert!(missing.is_empty(), "{title}: {missing:?} of {object}");
    }
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).expect("text")).expect("JSON")
}

#[test]
fn status_history_and_events_have_the_documented_fields_and_no_others() {
    let mut mount = Mount::new();
    // Open before anything happens: a reader is told of what comes after.
    let opened = mount.scratch().join("opened");
    let events = mount.spawn_bash(&format!("exec <$M/.leasefs/events; : >{}; exec timeout 280 cat", opened.display()));
    wait_for("the events are open", || opened.exists());
    let mut seen: Vec<Value> = Vec::new();
    let mut look = |mount: &Mount, key: &str, state: &str| {
        let status = mount.status(key);
        assert_eq!(status["state"], state, "{status}");
        seen.push(status);
    };
    let agent = Agent::new();
    let lock = |key: &str| agent.open(&mount.claim(key), libc::O_RDWR | libc::O_CREAT).expect("a handle");

    // Held, named and with a line of both kinds; then taken away, with why.
    let held = agent.create(&mount.claim("held")).expect("free key");
    agent.write(held, "a note").expect("holder");
    let name = format!("setfattr -n user.lease.agent -v builder {}", mount.claim("held").display());
    assert_ok(&mount.bash(&name));
    let waiting = mount.spawn_bash("exec flock $M/claims/held true");
    let sharing = mount.spawn_bash("exec flock -s $M/claims/held true");
    mount.wait_status("held", "two wait", |status| status["waiters"] == 2);
    look(&mount, "held", "held");
    let who = mount.leasefs(&["who", "held", "--json"]);
    assert_ok(&who);
    let who: Value = serde_json::from_slice(&who.stdout).expect("JSON");
    assert_eq!(shown([&who]), documented("leasefs who --json").0, "{who}");
    drop((waiting, sharing));
    mount.wait_status("held", "nobody waits", |status| status["waiters"] == 0);
    assert_ok(&mount.leasefs(&["evict", "held", "--epoch", "1", "--reason", "test"]));
    look(&mount, "held", "free");
    // Shared.
    let shared = lock("shared");
    agent.flock(shared, libc::LOCK_SH | libc::LOCK_NB).expect("free key");
    look(&mount, "shared", "shared");
    // Finished, with a result.
    let done = agent.create(&mount.claim("done")).expect("free key");
    assert_ok(&mount.bash("echo result >$M/results/done/1"));
    agent.close(done);
    mount.wait_status("done", "finished", |status| status["state"] == "finished");
    look(&mount, "done", "finished");
    // Pruned.
    assert_ok(&mount.bash("for i in 1 2 3; do flock $M/claims/old true; done"));
    mount.wait_status("old", "free", |status| status["state"] == "free");
    let pruned = mount.leasefs(&["prune", "--attempts-over", "1", "--json"]);
    assert_ok(&pruned);
    let pruned: Value = serde_json::from_slice(&pruned.stdout).expect("JSON");
    assert_eq!(shown([&pruned]), documented("leasefs prune --json").0, "{pruned}");
    // Orphaned.
    let kept = agent.create(&mount.claim("kept")).expect("free key");
    mount.lose_connection();
    mount.start(&[]);
    look(&mount, "kept", "orphaned");
    let _ = kept;

    let title = "status/KEY, leasefs status --json, leasefs ls --json";
    assert_eq!(shown(&seen), documented(title).0, "status");
    assert_whole(&seen, title);
    assert!(seen[0]["line"].as_array().is_some_and(|line| line.len() == 2), "{}", seen[0]);

    let title = "leasefs history --json";
    let mut attempts = Vec::new();
    for key in ["held", "done", "kept"] {
        let output = mount.leasefs(&["history", "--json", key]);
        assert_ok(&output);
        attempts.extend(stdout(&output).lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON")));
    }
    assert_eq!(shown(&attempts), documented(title).0, "history");
    assert_whole(&attempts, title);

    // The connection was lost: the reader of events has ended.
    let mut events = events;
    let text = read_in_time(events.0.stdout.take());
    let events: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect();
    let (mut all, _) = documented(".leasefs/events, leasefs watch --json");
    assert!(all.remove("missed"), "only a gap has it");
    assert_eq!(shown(&events), all, "events");
    let help = stdout(&Command::new(LEASEFS).args(["help", "json"]).output_in_time());
    for event in &events {
        let kind = event["event"].as_str().expect("a kind");
        assert!(help.contains(&format!("`{kind}`")), "{kind} is not told of");
    }
    drop(agent);
}

#[test]
fn the_settings_and_the_reports_of_commands_have_the_documented_fields_and_no_others() {
    let mount = Mount::new();
    let config = json(&mount.root().join(".leasefs/config"));
    assert_eq!(shown([&config]), documented(".leasefs/config").0, "config");

    let doctor = mount.leasefs(&["doctor", "--json", mount.root().to_str().expect("UTF-8")]);
    assert_ok(&doctor);
    let doctor: Value = serde_json::from_slice(&doctor.stdout).expect("JSON");
    assert_eq!(shown([&doctor]), documented("leasefs doctor --json").0, "doctor");

    let agent = Agent::new();
    let fd = agent.create(&mount.claim("k")).expect("free key");
    for (words, title) in
        [("who k --json", "leasefs who --json"), ("claim other --ttl 1h --json", "leasefs claim --json")]
    {
        let output = mount.leasefs(&words.split(' ').collect::<Vec<_>>());
        assert_ok(&output);
        let told: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{words}: {e}: {output:?}"));
        assert_eq!(shown([&told]), documented(title).0, "{words}");
    }
    assert_ok(&mount.leasefs(&["release", "other"]));
    mount.wait_status("other", "given back", |status| status["state"] == "free");
    agent.close(fd);
    drop(agent);
    let verify = || {
        let output = mount.leasefs(&["verify", "--json", "--state", mount.state().to_str().expect("UTF-8")]);
        serde_json::from_slice::<Value>(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"))
    };
    let good = verify();
    let mut mount = mount;
    mount.unmount();
    // An attempt that is not there any more is a gap in the numbers.
    let registry = rusqlite::Connection::open(mount.state().join("registry.db")).expect("registry");
    registry.execute_batch("UPDATE keys SET epoch = 7").expect("SQL");
    drop(registry);
    let output = Command::new(LEASEFS).args(["verify", "--json", "--state"]).arg(mount.state()).output_in_time();
    let bad: Value = serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"));
    assert_eq!((good["ok"].as_bool(), bad["ok"].as_bool()), (Some(true), Some(false)), "{good} {bad}");
    assert_eq!(shown([&good, &bad]), documented("leasefs verify --json").0, "verify");
}
