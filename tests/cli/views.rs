//! `leasefs ls`, `status` and `history`: what they show is what the tree and the registry say.

use std::fs;
use std::io::{BufRead, Write};
use std::process::Stdio;

use serde_json::Value;

use super::common::{Background, Mount, assert_ok, in_time, set_mode, stdout};
use super::{as_stranger, assert_refused, commit, hold, live_through_every_outcome, stderr};

fn json_lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}"))).collect()
}

/// The keys of `leasefs ls --json` with these arguments.
fn listed(mount: &Mount, args: &[&str]) -> Vec<String> {
    let output = mount.leasefs(&[&["ls", "--json"], args].concat());
    assert_ok(&output);
    json_lines(&stdout(&output)).iter().map(|line| line["key"].as_str().expect("key").to_owned()).collect()
}

#[test]
fn ls_shows_a_line_per_key() {
    let mount = Mount::new();
    let mut held = hold(&mount, "b");
    held.write_all("half\tdone\x1b[31m\n".as_bytes()).expect("note");
    let finished = hold(&mount, "a");
    commit(&mount, "a", 1, "42");
    drop(finished);
    mount.wait_status("a", "finished", |status| status["state"] == "finished");
    let text = stdout(&mount.leasefs(&["ls"]));
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["KEY", "STATE", "EPOCH", "HOLDER", "UID", "AGE", "TTL-LEFT", "WAITERS", "NOTE"]);
    assert_eq!(lines[1][..3], ["a", "finished", "1"]);
    let pid = std::process::id().to_string();
    assert_eq!(lines[2][..4], ["b", "held", "1", &pid]);
    assert!(text.contains("23h59m") || text.contains("24h00m"), "{text}");
    assert!(text.contains("half\\tdone\\u{1b}[31m"), "control characters are escaped: {text}");
    assert!(!text.contains('\x1b'));
}

#[test]
fn ls_selects_by_prefix_and_state() {
    let mount = Mount::new();
    fs::create_dir_all(mount.claim("team/deep")).expect("namespaces");
    let _held: Vec<_> = ["team/a", "team/deep/b", "teams", "other"].map(|key| hold(&mount, key)).into();
    drop(hold(&mount, "team/free"));
    mount.wait_status("team/free", "free", |status| status["state"] == "free");
    assert_eq!(listed(&mount, &[]), ["other", "team/a", "team/deep/b", "teams"]);
    assert_eq!(listed(&mount, &["--all"]), ["other", "team/a", "team/deep/b", "team/free", "teams"]);
    assert_eq!(listed(&mount, &["team"]), ["team/a", "team/deep/b", "teams"]);
    assert_eq!(listed(&mount, &["team/"]), ["team/a", "team/deep/b"]);
    assert_eq!(listed(&mount, &["team/d"]), ["team/deep/b"]);
    assert_eq!(listed(&mount, &["team/deep/b"]), ["team/deep/b"]);
    assert_eq!(listed(&mount, &[&format!("{}/", mount.claim("team").display())]), ["team/a", "team/deep/b"]);
    assert_eq!(listed(&mount, &["nothing/like/it"]), [""; 0]);
    assert_eq!(stdout(&mount.leasefs(&["ls", "nothing"])), "");
}

#[test]
fn ls_tells_of_namespaces_it_may_not_read() {
    let mount = Mount::shared();
    fs::create_dir(mount.claim("shut")).expect("namespace");
    set_mode(&mount.claim("shut"), 0o700);
    let _held = [hold(&mount, "shut/secret"), hold(&mount, "open")];
    let output = as_stranger(&mount, &["ls"]);
    assert_ok(&output);
    assert!(stdout(&output).contains("open") && !stdout(&output).contains("secret"), "{}", stdout(&output));
    assert!(stderr(&output).starts_with("leasefs: 1 namespaces may not be read"), "{}", stderr(&output));
}

/// Makes and removes namespaces that have had keys, until its input ends; a line for the first round.
const CHURN: &str = "
import contextlib, fcntl, os, select, sys
claims = os.environ['M'] + '/claims'
number = removed = 0
while not select.select([sys.stdin], [], [], 0)[0]:
    namespace = f'{claims}/n{number % 3}'
    with contextlib.suppress(FileExistsError):
        os.mkdir(namespace)
    with contextlib.suppress(OSError):
        handle = os.open(f'{namespace}/k{number % 50}', os.O_RDWR | os.O_CREAT)
        fcntl.flock(handle, fcntl.LOCK_EX)
        os.close(handle)
    with contextlib.suppress(OSError):
        os.rmdir(namespace)
        removed += 1
    number += 1
    if number == 1:
        print(flush=True)
sys.exit(removed == 0)
";

#[test]
fn ls_goes_on_while_namespaces_are_removed_and_made_again() {
    let mount = Mount::new();
    let mut churn = mount.command("python3");
    let churn = churn.args(["-c", CHURN]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("python3 runs");
    let mut churn = Background(churn);
    let output = churn.0.stdout.take().expect("piped");
    in_time("the first round", || std::io::BufReader::new(output).read_line(&mut String::new()).expect("a line"));
    for _ in 0..20 {
        for args in [&["ls"][..], &["ls", "--all"]] {
            assert_ok(&mount.leasefs(args));
        }
    }
    drop(churn.0.stdin.take());
    assert!(churn.wait().success());
}

#[test]
fn ls_in_json_is_what_status_says() {
    let mount = Mount::new();
    let _held = hold(&mount, "job");
    let text = stdout(&mount.leasefs(&["ls", "--json"]));
    assert_eq!(text, fs::read_to_string(mount.root().join("status/job")).expect("status"));
    assert_eq!(text, stdout(&mount.leasefs(&["status", "job", "--json"])));
}

#[test]
fn status_shows_everything_about_a_key() {
    let mount = Mount::new();
    fs::create_dir(mount.claim("team")).expect("namespace");
    let mut held = hold(&mount, "team/job");
    held.write_all(b"step 3").expect("note");
    commit(&mount, "team/job", 1, "four");
    let text = stdout(&mount.leasefs(&["status", "team/job"]));
    let value = |name: &str| {
        let line = text.lines().find(|line| line.split_whitespace().next() == Some(name));
        line.unwrap_or_else(|| panic!("no {name} in:\n{text}"))[name.len()..].trim().to_owned()
    };
    assert_eq!(value("key"), "team/job");
    assert_eq!(value("epoch"), "1");
    assert_eq!(value("via"), "create");
    assert_eq!(value("note"), "step 3");
    assert_eq!(value("ttl"), "24h");
    assert!(value("holder").starts_with(&format!("pid {} (", std::process::id())), "{text}");
    assert!(value("expires").ends_with("(in 23h59m)") || value("expires").ends_with("(in 24h00m)"), "{text}");
    assert!(value("result").starts_with(&format!("{} (4 bytes, ", mount.result("team/job", 1).display())), "{text}");
}

#[test]
fn a_key_that_never_was_has_no_status_and_no_history() {
    let mount = Mount::new();
    fs::create_dir(mount.claim("team")).expect("namespace");
    for command in ["status", "history"] {
        assert_refused(&mount.leasefs(&[command, "job"]), 1, &["job: was never held"]);
        assert_refused(&mount.leasefs(&[command, "a//b"]), 2, &["a//b: not a key"]);
    }
    assert_refused(&mount.leasefs(&["status", "team"]), 2, &["team: a namespace, not a key"]);
    assert_eq!(listed(&mount, &["--all"]), [""; 0], "looking makes no key");
}

#[test]
fn history_has_every_attempt_and_why_it_ended() {
    let mut mount = Mount::new();
    live_through_every_outcome(&mount);
    let _held = hold(&mount, "job");

    let attempts = json_lines(&stdout(&mount.leasefs(&["history", "--json", "job"])));
    let outcomes: Vec<_> =
        attempts.iter().map(|attempt| (attempt["epoch"].as_u64(), attempt["outcome"].as_str())).collect();
    let expected = [Some("released"), Some("evicted"), Some("completed"), Some("released"), None];
    assert_eq!(outcomes, (1..).map(Some).zip(expected).collect::<Vec<_>>());
    assert_eq!((attempts[2]["result"]["size"].as_u64(), attempts[3]["via"].as_str()), (Some(4), Some("lock")));
    assert!(attempts[1]["reason"].as_str().is_some_and(|why| why.contains("test")), "{}", attempts[1]);
    assert_eq!(attempts[0]["holder"]["pid"], std::process::id());
    assert!(attempts[4]["ended"].is_null() && attempts[0]["ended"].is_string());

    let table = stdout(&mount.leasefs(&["history", "job"]));
    let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["EPOCH", "OUTCOME", "WHY", "HOLDER", "UID", "SINCE", "ENDED", "RESULT", "NOTE"]);
    assert_eq!(lines.len(), 6);
    assert_eq!((lines[2][1], lines[3][1]), ("evicted", "completed"));

    // Also when the tree is not mounted.
    drop(_held);
    mount.wait_status("job", "free", |status| status["state"] == "free");
    mount.unmount();
    let state = mount.state();
    let offline = mount.leasefs(&["history", "--json", "--state", state.to_str().expect("path"), "job"]);
    assert_eq!(json_lines(&stdout(&offline)).len(), 5);
}

#[test]
fn history_is_for_those_who_may_read_the_state() {
    let mount = Mount::shared();
    drop(hold(&mount, "job"));
    assert_refused(&as_stranger(&mount, &["history", "job"]), 2, &["permission denied"]);
}
