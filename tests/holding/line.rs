//! Who waits for a key and who shares it, in `status/KEY`.

use std::fs;

use libc::{LOCK_EX, LOCK_SH};
use serde_json::{Value, json};

use crate::common::Mount;
use crate::common::agent::{Agent, count};
use crate::millis;

#[test]
fn the_line_is_told_in_order_with_who_waits_for_what_and_since_when() {
    let mount = Mount::shared();
    let path = mount.claim("k");
    let holder = Agent::new();
    holder.create(&path).expect("free key");
    assert_eq!(mount.status("k")["line"], json!([]));
    let waiters = [Agent::new(), Agent::user(12_001, 12_001, &[]), Agent::new()];
    let modes = [("exclusive", LOCK_EX), ("shared", LOCK_SH), ("exclusive", LOCK_EX)];
    let mut began = Vec::new();
    for (number, (waiter, (_, operation))) in waiters.iter().zip(modes).enumerate() {
        began.push(jiff::Timestamp::now().as_millisecond());
        let fd = waiter.handle(&path);
        waiter.begin_flock(fd, operation);
        mount.wait_status("k", "one more waiter", |status| count(status, "waiters") == number as u64 + 1);
    }
    let check = |line: &Value| {
        let line = line.as_array().expect("a list");
        assert_eq!(line.len(), 3);
        for (at, waits) in line.iter().enumerate() {
            assert_eq!((&waits["pid"], &waits["mode"]), (&json!(waiters[at].pid()), &json!(modes[at].0)), "{waits}");
            assert_eq!(waits["uid"], if at == 1 { 12_001 } else { 0 });
            assert!(waits["start_time"].as_u64().is_some_and(|start| start > 0), "{waits}");
            assert!(waits["command"].as_str().is_some_and(|command| command.contains("python3")), "{waits}");
        }
    };
    let line = mount.status("k")["line"].clone();
    check(&line);
    for (at, waits) in line.as_array().expect("a list").iter().enumerate() {
        let since = millis(waits, "since");
        let next = began.get(at + 1).copied().unwrap_or(i64::MAX - 1);
        assert!((began[at] - 1..=next + 1).contains(&since), "{since} from {began:?}");
    }
    let shown = crate::common::stdout(&mount.leasefs(&["status", "k"]));
    assert!(shown.contains(&format!("pid {} (python3), uid 12001, shared, for ", waiters[1].pid())), "{shown}");
    crate::wait_until(millis(&line[2], "since") + 300);
    mount.kill_server();
    mount.wait_status("k", "all in line again", |status| count(status, "waiters") == 3);
    let again = mount.status("k")["line"].clone();
    check(&again);
    for at in 0..3 {
        let (before, after) = (millis(&line[at], "since"), millis(&again[at], "since"));
        assert!((before - after).abs() < 50, "it waits since {before}, not since {after}");
    }
    // So does whoever reads the metrics.
    let metrics = fs::read_to_string(mount.root().join(".leasefs/metrics")).expect("metrics");
    let longest = metrics.lines().find_map(|line| line.strip_prefix("leasefs_oldest_wait_seconds ")).expect("a gauge");
    assert!(longest.parse::<f64>().expect("seconds") >= 0.3, "{longest}");
    waiters[0].kill();
    mount.wait_status("k", "one less", |status| count(status, "waiters") == 2);
    assert_eq!(mount.status("k")["line"][0]["pid"], waiters[1].pid());
}

#[test]
fn those_who_share_are_told() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let sharers = [Agent::new(), Agent::new()];
    for sharer in &sharers {
        let fd = sharer.handle(&path);
        sharer.flock(fd, LOCK_SH).expect("free key");
    }
    let sharing = mount.status("k")["sharing"].clone();
    let pids: Vec<Value> = sharing.as_array().expect("a list").iter().map(|who| who["pid"].clone()).collect();
    assert_eq!(pids, sharers.iter().map(|sharer| json!(sharer.pid())).collect::<Vec<_>>());
    assert_eq!((&sharing[0]["uid"], &sharing[0]["command"]), (&json!(0), &json!("python3")));
    sharers[0].kill();
    mount.wait_status("k", "one", |status| count(status, "sharers") == 1);
    assert_eq!(mount.status("k")["sharing"][0]["pid"], sharers[1].pid());
}

/// Locks the key so many times over, each by a thread and a handle of its own; goes on once all have asked.
const MANY: &str = r#"
def ask(fd):
    fcntl.flock(fd, operation)

for _ in range(number):
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    threading.Thread(target=ask, args=(fd,), daemon=True).start()
"#;

#[test]
fn a_status_stays_short_however_many_wait_or_share() {
    let mount = Mount::new();
    let (holder, many) = (Agent::new(), Agent::new());
    let fd = holder.create(&mount.claim("k")).expect("free key");
    let ask = |key: &str, operation: i32| {
        many.script(MANY, json!({ "path": mount.claim(key), "operation": operation, "number": 120 })).expect("threads");
    };
    ask("k", LOCK_SH);
    mount.wait_status("k", "120 wait", |status| count(status, "waiters") == 120);
    assert_eq!(mount.status("k")["line"].as_array().map(Vec::len), Some(100));
    holder.close(fd);
    mount.wait_status("k", "120 share", |status| count(status, "sharers") == 120);
    let status = mount.status("k");
    assert_eq!((status["sharing"].as_array().map(Vec::len), &status["line"]), (Some(100), &json!([])));
    let text = fs::read_to_string(mount.root().join("status/k")).expect("status");
    assert!(text.len() < 20_000, "{} bytes", text.len());
}
