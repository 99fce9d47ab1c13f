//! `leasefs ls` as a table on a terminal and off one; progress of what takes long.

use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::common::agent::{Agent, count};
use crate::common::{Background, LEASEFS, Mount, Stopped, assert_ok, read_in_time, stdout, wait_for};
use crate::screen::Screen;

fn heads(text: &str) -> Vec<&str> {
    text.lines().next().unwrap_or_default().split_whitespace().collect()
}

#[test]
fn agents_and_the_longest_wait_are_columns_where_there_are_any() {
    let mount = Mount::new();
    let (holder, waiter) = (Agent::new(), Agent::new());
    let _fd = holder.create(&mount.claim("job")).expect("free");
    let bare = stdout(&mount.leasefs(&["ls"]));
    assert_eq!(heads(&bare), ["KEY", "STATE", "EPOCH", "HOLDER", "UID", "AGE", "TTL-LEFT", "WAITERS", "NOTE"]);
    holder.set_xattr(&mount.claim("job"), "user.lease.agent", "planner 7").expect("the holder's user");
    let handle = waiter.handle(&mount.claim("job"));
    waiter.begin_flock(handle, libc::LOCK_EX);
    mount.wait_status("job", "waited for", |status| count(status, "waiters") == 1);
    let text = stdout(&mount.leasefs(&["ls"]));
    assert_eq!(
        heads(&text),
        ["KEY", "STATE", "EPOCH", "HOLDER", "UID", "AGENT", "AGE", "TTL-LEFT", "WAITERS", "LONGEST", "NOTE"]
    );
    assert!(text.contains("planner 7"), "{text}");
    assert!(!text.contains('\x1b'), "no colours in a pipe");
}

#[test]
fn all_that_is_not_free_is_listed_and_with_all_the_rest() {
    let mount = Mount::new();
    let (holder, reader, waiter) = (Agent::new(), Agent::new(), Agent::new());
    std::fs::create_dir(mount.claim("team")).expect("a namespace");
    assert_ok(&mount.leasefs(&["run", "team/free", "free", "--", "true"]));
    assert_ok(&mount.leasefs(&["run", "team/done", "--", "sh", "-c", ": >$LEASEFS_RESULT"]));
    holder.create(&mount.claim("team/held")).expect("free");
    let listed = |args: &[&str]| {
        let text = stdout(&mount.leasefs(args));
        let mut keys: Vec<_> =
            text.lines().map(|line| json_of(line)["key"].as_str().expect("a key").to_owned()).collect();
        keys.sort();
        keys
    };
    assert_eq!(listed(&["ls", "--json"]), ["team/done", "team/held"]);
    // What is shared alone has no file in claims/, also where somebody waits for it.
    let handle = reader.handle(&mount.claim("team/shared"));
    reader.flock(handle, libc::LOCK_SH).expect("free");
    waiter.begin_flock(waiter.handle(&mount.claim("team/shared")), libc::LOCK_EX);
    mount.wait_status("team/shared", "waited for", |status| count(status, "waiters") == 1);
    assert_eq!(listed(&["ls", "--json"]), ["team/done", "team/held", "team/shared"]);
    assert_eq!(listed(&["ls", "--json", "team/s"]), ["team/shared"]);
    assert_eq!(listed(&["ls", "--json", "--all", "team/f"]), ["team/free"]);
    let all = ["free", "team/done", "team/free", "team/held", "team/shared"];
    assert_eq!(listed(&["ls", "--json", "--all"]), all);
    reader.close(handle);
    waiter.answer().expect("granted");
    assert_eq!(listed(&["ls", "--json"]), ["team/done", "team/held", "team/shared"]);
}

fn json_of(line: &str) -> serde_json::Value {
    serde_json::from_str(line).expect("JSON")
}

#[test]
fn a_table_fits_the_terminal_and_is_coloured_there() {
    let mount = Mount::new();
    let holder = Agent::new();
    let long = format!("team{}", "-and-so-on".repeat(20));
    let fd = holder.create(&mount.claim(&long)).expect("free");
    holder.write(fd, &"a long note. ".repeat(20)).expect("holder");
    for columns in [80, 120] {
        let screen = Screen::leasefs(&mount, (columns, 24), "ls");
        assert_eq!(screen.ended(), 0);
        let lines = screen.lines();
        assert!(lines[1].contains('…') && lines[1].contains("held"), "{lines:#?}");
        assert!(lines[2].starts_with("ended with"), "one line for a key: {lines:#?}");
        assert!(lines[1].chars().count() <= columns as usize);
        assert!(screen.coloured().contains("\x1b[32mheld"), "{:?}", screen.coloured());
    }
    let plain = Screen::run(&mount, (80, 24), &format!("NO_COLOR=1 {} ls", crate::common::LEASEFS));
    assert_eq!(plain.ended(), 0);
    assert!(!plain.coloured().contains("\x1b[32m"));
    // A pipe gets everything.
    let text = stdout(&mount.leasefs(&["ls"]));
    assert!(text.contains(&long), "{text}");
}

/// With agents and waiters there are more columns than a small terminal has room for.
#[test]
fn ls_and_history_fit_a_narrow_terminal_with_all_there_is_to_tell() {
    let mount = Mount::new();
    let (holder, waiter) = (Agent::new(), Agent::new());
    let fd = holder.create(&mount.claim("job-with-a-name-that-is-long")).expect("free");
    holder.write(fd, "a note that goes on and on").expect("holder");
    holder
        .set_xattr(&mount.claim("job-with-a-name-that-is-long"), "user.lease.agent", "an agent of a long name, too")
        .expect("the holder's user");
    let handle = waiter.handle(&mount.claim("job-with-a-name-that-is-long"));
    waiter.begin_flock(handle, libc::LOCK_EX);
    mount.wait_status("job-with-a-name-that-is-long", "waited for", |status| count(status, "waiters") == 1);
    for columns in [60, 80] {
        for (command, told) in [("ls", "held"), ("history job-with-a-name-that-is-long", "1  ")] {
            let screen = Screen::leasefs(&mount, (columns, 24), command);
            assert_eq!(screen.ended(), 0);
            let lines = screen.lines();
            assert!(lines[1].contains(told), "{command}: {lines:#?}");
            assert!(lines[2].starts_with("ended with"), "one line for a key or an attempt: {lines:#?}");
        }
    }
    let all = stdout(&mount.leasefs(&["history", "job-with-a-name-that-is-long"]));
    assert!(all.contains("an agent of a long name, too") && all.contains("a note that goes on and on"), "{all}");
}

#[test]
fn what_takes_over_a_second_says_so_on_a_terminal() {
    let mount = Mount::new();
    let holder = Agent::new();
    let _fd = holder.create(&mount.claim("job")).expect("free");
    let screen = Screen::leasefs(&mount, (80, 24), "ls; true");
    assert_eq!(screen.ended(), 0);
    assert!(!screen.text().contains("waiting for the tree"), "what is quick says nothing");
    drop(screen);
    let gate = mount.scratch().join("gate");
    let script = format!("until [ -e {} ]; do sleep 0.01; done; {} ls", gate.display(), crate::common::LEASEFS);
    let screen = Screen::run(&mount, (80, 24), &script);
    let stopped = Stopped::these(&[mount.server_pid().expect("a server")]);
    std::fs::write(&gate, "").expect("the gate");
    screen.wait("progress", |lines| lines.iter().any(|line| line.contains("waiting for the tree: ")));
    drop(stopped);
    assert_eq!(screen.ended(), 0);
    let text = screen.text();
    assert!(!text.contains("waiting for the tree") && text.contains("job"), "gone with the work: {text}");
}

#[test]
fn nothing_is_said_of_progress_in_a_pipe() {
    let mount = Mount::new();
    let agent = Agent::new();
    let fd = agent.create(&mount.claim("job")).expect("free");
    agent.close(fd);
    wait_for("free", || mount.state_of("job") == "free");
    let dest = mount.scratch().join("backup");
    for args in [vec!["verify"], vec!["backup", dest.to_str().expect("a path")]] {
        let output = mount.leasefs(&args);
        assert_ok(&output);
        assert_eq!(crate::stderr(&output), "", "{args:?}");
    }
    // Nor where it takes so long that a terminal would be told.
    let stopped = Stopped::these(&[mount.server_pid().expect("a server")]);
    let mut ls = mount.command(LEASEFS);
    let mut ls = Background(ls.arg("ls").stderr(Stdio::piped()).spawn().expect("leasefs runs"));
    let began = Instant::now();
    wait_for("it has taken over a second", || began.elapsed() > Duration::from_millis(1_500));
    assert!(ls.0.try_wait().expect("a child").is_none(), "it waits for the tree");
    drop(stopped);
    assert!(ls.wait().success());
    assert_eq!(read_in_time(ls.0.stderr.take()), "");
}
