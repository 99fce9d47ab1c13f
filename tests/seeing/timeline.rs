//! `leasefs timeline`: what is drawn is what the history says, in an SVG that any program reads.

use std::process::{Command, Stdio};

use libc::LOCK_EX;
use serde_json::{Value, json};

use crate::common::agent::{Agent, count};
use crate::common::{Mount, assert_ok, in_time, stdout, wait_for};
use crate::{as_stranger, assert_refused};

/// What an XML parser finds in a drawing: how many elements there are of each class, and every text and tooltip.
const READ: &str = r#"
import collections, json, sys, xml.etree.ElementTree as tree
root = tree.parse(sys.stdin.buffer).getroot()
name = "{http://www.w3.org/2000/svg}"
assert root.tag == name + "svg", root.tag
width, height = float(root.get("width")), float(root.get("height"))
classes, titles, texts, outside = collections.Counter(), [], [], []
for element in root.iter():
    classes[element.get("class", "")] += 1
    if element.tag == name + "title": titles.append(element.text)
    if element.tag == name + "text": texts.append(element.text)
    if element.tag == name + "rect" and element.get("x"):
        x, y, w, h = (float(element.get(a)) for a in ("x", "y", "width", "height"))
        if x < 0 or y < 0 or w <= 0 or h <= 0 or x + w > width + 0.1 or y + h > height + 0.1: outside.append(dict(element.attrib))
print(json.dumps({"classes": classes, "titles": titles, "texts": texts, "outside": outside}))
"#;

fn parsed(svg: &str) -> Value {
    use std::io::Write;
    let mut python = Command::new("python3")
        .args(["-c", READ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .expect("python3 runs");
    python.stdin.take().expect("piped").write_all(svg.as_bytes()).expect("it reads");
    let output = in_time("the end of the parser", || python.wait_with_output().expect("it ends"));
    assert!(output.status.success(), "no XML:\n{svg}");
    let found: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(found["outside"], json!([]), "all is within the drawing");
    found
}

/// The drawing with these arguments, parsed.
fn timeline(mount: &Mount, args: &[&str]) -> Value {
    let output = mount.leasefs(&[&["timeline"], args].concat());
    assert_ok(&output);
    parsed(&stdout(&output))
}

fn number(found: &Value, class: &str) -> u64 {
    found["classes"][class].as_u64().unwrap_or(0)
}

fn has_title(found: &Value, words: &[&str]) -> bool {
    let titles = found["titles"].as_array().expect("a list");
    titles.iter().filter_map(Value::as_str).any(|title| words.iter().all(|word| title.contains(word)))
}

#[test]
fn every_attempt_is_a_bar_coloured_by_how_it_ended() {
    let mut mount = Mount::new();
    let (agent, other) = (Agent::new(), Agent::new());
    let path = mount.claim("job");
    let free = || wait_for("free", || matches!(mount.state_of("job").as_str(), "free" | "finished"));
    // Released, evicted, completed, expired; then held while one waits, who gets it and is waited for.
    let fd = agent.create(&path).expect("free");
    agent.close(fd);
    free();
    let fd = agent.create(&path).expect("free");
    assert_ok(&mount.leasefs(&["evict", "job", "--epoch", "2", "--reason", "too <slow> & old"]));
    agent.close(fd);
    let fd = agent.create(&path).expect("free");
    agent.set_xattr(&path, "user.lease.agent", "planner <7>").expect("the holder's user");
    std::fs::write(mount.result("job", 3), "42").expect("the registered attempt");
    agent.close(fd);
    free();
    let fd = agent.handle(&path);
    agent.flock(fd, LOCK_EX).expect("finished");
    agent.set_xattr(&path, "user.lease.ttl", "50ms").expect("the holder's user");
    mount.wait_status("job", "expired", |status| status["outcome"] == "expired");
    agent.close(fd);
    let fd = agent.create(&path).expect("free");
    let handle = other.handle(&path);
    other.begin_flock(handle, LOCK_EX);
    mount.wait_status("job", "waited for", |status| count(status, "waiters") == 1);
    agent.close(fd);
    other.answer().expect("granted");
    let handle = agent.handle(&path);
    agent.begin_flock(handle, LOCK_EX);
    mount.wait_status("job", "waited for", |status| count(status, "waiters") == 1);

    let found = timeline(&mount, &[]);
    for (class, bars) in [
        ("attempt released", 2),
        ("attempt evicted", 1),
        ("attempt completed", 1),
        ("attempt expired", 1),
        ("attempt holding", 1),
        ("waiting", 1),
        ("key", 1),
        ("now", 1),
        // And one each in the legend.
        ("mark commit", 2),
        ("mark expiry", 2),
        ("mark eviction", 2),
        ("mark loss", 1),
    ] {
        assert_eq!(number(&found, class), bars, "{class}: {found}");
    }
    let pid = format!("pid {}", agent.pid());
    assert!(has_title(&found, &["epoch 1", &pid, "released after"]), "{found}");
    assert!(has_title(&found, &["epoch 2", "evicted after", "too <slow> & old"]), "{found}");
    assert!(has_title(&found, &["epoch 3", "agent planner <7>", "completed after", "result committed"]), "{found}");
    assert!(has_title(&found, &["epoch 6", "lasts for"]), "{found}");
    assert!(has_title(&found, &[&pid, "waits since"]), "{found}");

    // Without the tree the history is there, and who waits is not.
    drop((agent, other));
    mount.unmount();
    let state = mount.state();
    let found = timeline(&mount, &["--state", state.to_str().expect("a path"), "job"]);
    assert_eq!((number(&found, "attempt expired"), number(&found, "waiting")), (1, 0), "{found}");
}

#[test]
fn a_wait_before_the_grant_is_a_thin_bar() {
    let mount = Mount::new();
    let (agent, other) = (Agent::new(), Agent::new());
    let fd = agent.create(&mount.claim("job")).expect("free");
    let handle = other.handle(&mount.claim("job"));
    other.begin_flock(handle, LOCK_EX);
    mount.wait_status("job", "a wait that lasted", |status| {
        let since = status["line"][0]["since"].as_str().and_then(|since| since.parse::<jiff::Timestamp>().ok());
        since.is_some_and(|since| jiff::Timestamp::now().as_millisecond() - since.as_millisecond() > 30)
    });
    agent.close(fd);
    other.answer().expect("granted");
    let found = timeline(&mount, &[]);
    assert_eq!((number(&found, "wait"), number(&found, "waiting")), (1, 0), "{found}");
    assert!(has_title(&found, &["epoch 2 waited"]), "{found}");
}

#[test]
fn keys_are_chosen_by_name_and_namespace_and_written_as_text() {
    let mount = Mount::new();
    std::fs::create_dir(mount.claim("team")).expect("a namespace");
    let agent = Agent::new();
    let evil = "a<b>&\"c' --]]>";
    let long = format!("team/{}-end", "long".repeat(50));
    for key in [evil, "team/a", &long, "teams"] {
        let fd = agent.create(&mount.claim(key)).expect("free");
        agent.close(fd);
        wait_for("free", || mount.state_of(key) == "free");
    }
    let keys = |args: &[&str]| number(&timeline(&mount, args), "key");
    assert_eq!((keys(&[]), keys(&["team/"]), keys(&["team/a", "teams"])), (4, 2, 2));
    assert_eq!(keys(&[mount.claim("teams").to_str().expect("a path")]), 1);
    let found = timeline(&mount, &[]);
    let texts: Vec<&str> = found["texts"].as_array().expect("a list").iter().filter_map(Value::as_str).collect();
    assert!(texts.contains(&evil), "{texts:?}");
    assert!(texts.iter().any(|text| text.starts_with("team/long") && text.ends_with("long-end") && text.contains('…')));
    assert!(has_title(&found, &[&long]), "whole when pointed at");
}

#[test]
fn hundreds_of_attempts_are_drawn_too() {
    let mount = Mount::new();
    let agent = Agent::new();
    let cycles = "
for _ in range(400):
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.close(fd)
";
    agent.script(cycles, json!({ "path": mount.claim("busy") })).expect("done");
    let found = timeline(&mount, &["busy"]);
    assert_eq!(number(&found, "attempt released"), 400);
}

#[test]
fn what_cannot_be_drawn_is_said() {
    let mount = Mount::shared();
    assert_refused(&mount.leasefs(&["timeline"]), 1, &["no key was ever held"]);
    let agent = Agent::new();
    let fd = agent.create(&mount.claim("job")).expect("free");
    agent.close(fd);
    wait_for("free", || mount.state_of("job") == "free");
    assert_refused(&mount.leasefs(&["timeline", "other"]), 1, &["other: none of these was ever held"]);
    assert_refused(&mount.leasefs(&["timeline", "a//b"]), 2, &["a//b: not a key"]);
    assert_refused(&as_stranger(&mount, &["timeline"]), 2, &["permission denied"]);
    assert_refused(&mount.leasefs(&["timeline", "--since", "tomorrow"]), 2, &["tomorrow"]);
    let screen = crate::screen::Screen::leasefs(&mount, (100, 12), "timeline");
    assert_eq!(screen.ended(), 2);
    assert!(screen.text().contains("send it to a file"), "{}", screen.text());
}
