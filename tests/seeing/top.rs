//! `leasefs top` on a terminal of 80 × 24, and printed once.

use libc::LOCK_EX;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::common::agent::{Agent, count, hold_all};
use crate::common::{Mount, Stopped, assert_ok, stdout, wait_for};
use crate::screen::Screen;
use crate::{assert_refused, stderr};

const SIZE: (u32, u32) = (80, 24);

/// The line of a key in the list, which is above the details.
fn line<'a>(lines: &'a [String], key: &str) -> Option<&'a str> {
    lines
        .iter()
        .map(String::as_str)
        .take_while(|line| !line.starts_with('─'))
        .find(|line| line.split(' ').next() == Some(key))
}

fn wait_key(screen: &Screen, key: &str) -> Vec<String> {
    // The lowest line is drawn last.
    screen.wait(key, |lines| line(lines, key).is_some() && lines.last().is_some_and(|last| !last.is_empty()))
}

#[test]
fn it_shows_who_holds_what_and_follows_what_changes() {
    let mount = Mount::new();
    let (holder, waiter) = (Agent::new(), Agent::new());
    let fd = holder.create(&mount.claim("job")).expect("free");
    holder.write(fd, "half done").expect("holder");
    let screen = Screen::leasefs(&mount, SIZE, "top");
    let lines = wait_key(&screen, "job");
    assert_eq!(lines.len(), 24);
    assert!(lines[0].starts_with("leasefs /") && lines[0].contains("1 held · 0 waiting · 0 orphaned"), "{lines:#?}");
    for head in ["KEY", "STATE", "EPOCH", "PID", "COMMAND", "AGE▾", "LEFT", "LINE", "WAIT"] {
        assert!(lines[1].contains(head), "{head}: {lines:#?}");
    }
    let shown: Vec<&str> = line(&lines, "job").expect("shown").split_whitespace().collect();
    assert_eq!(shown[..5], ["job", "held", "1", &holder.pid().to_string(), "python3"], "{lines:#?}");
    assert!(lines[23].starts_with("q quit"), "{lines:#?}");
    screen.wait("the details", |lines| {
        let has = |words: &[&str]| lines.iter().any(|line| words.iter().all(|word| line.contains(word)));
        has(&["note", "half done"])
            && has(&["who", &holder.pid().to_string(), "claimed"])
            && has(&["state", "by create"])
    });
    // What happens is shown without a key being pressed.
    let handle = waiter.handle(&mount.claim("job"));
    waiter.begin_flock(handle, LOCK_EX);
    screen.wait("the line", |lines| {
        lines[0].contains("1 waiting") && line(lines, "job").is_some_and(|l| l.contains(" 1 "))
    });
    screen.wait("who waits", |lines| {
        lines.iter().any(|line| line.starts_with("line") && line.contains(&waiter.pid().to_string()))
    });
    holder.close(fd);
    screen.wait("the next holder", |lines| line(lines, "job").is_some_and(|l| l.contains(&waiter.pid().to_string())));
    waiter.answer().expect("granted");
    waiter.close(handle);
    screen.wait("nothing held", |lines| line(lines, "job").is_none() && lines[0].contains("0 held"));
    screen.press(&["f"]);
    screen.wait("the free key", |lines| line(lines, "job").is_some_and(|l| l.contains("free")));
    screen.press(&["q"]);
    assert_eq!(screen.ended(), 0);
    assert!(!screen.text().contains("q quit"), "the terminal is as it was: {}", screen.text());
}

#[test]
fn keys_sort_filter_and_choose() {
    let mount = Mount::new();
    std::fs::create_dir(mount.claim("team")).expect("a namespace");
    let agents: Vec<Agent> = (0..3).map(|_| Agent::new()).collect();
    let names = ["b", "team/x", "a"];
    for (agent, key) in agents.iter().zip(names) {
        agent.create(&mount.claim(key)).expect("free");
        // One after the other, also by the millisecond.
        let since = mount.status(key)["since"].as_str().expect("a time").to_owned();
        wait_for("the next millisecond", || {
            jiff::Timestamp::now()
                > since.parse::<jiff::Timestamp>().expect("a time") + jiff::SignedDuration::from_millis(2)
        });
    }
    let screen = Screen::leasefs(&mount, SIZE, "top");
    let order = |expected: [&str; 3]| {
        screen.wait(&format!("the order {expected:?}"), |lines| {
            let shown: Vec<&str> = lines[2..5].iter().filter_map(|line| line.split(' ').next()).collect();
            shown == expected
        });
    };
    order(names);
    screen.press(&["k"]);
    order(["a", "b", "team/x"]);
    screen.press(&["r"]);
    order(["team/x", "b", "a"]);
    screen.press(&["a"]);
    order(names);
    screen.press(&["Down", "Down"]);
    screen.wait("the third is chosen", |lines| lines.iter().any(|line| line.starts_with("─ a ")));
    screen.press(&["Enter"]);
    screen.wait("no details", |lines| !lines.iter().any(|line| line.starts_with('─')));
    screen.press(&["/", "t", "e", "a", "m", "/"]);
    screen.wait("what is typed", |lines| lines[23].starts_with("keys that begin with: team/"));
    screen.press(&["Enter"]);
    screen.wait("the namespace", |lines| {
        line(lines, "team/x").is_some() && line(lines, "a").is_none() && lines[0].contains("1 held")
    });
    screen.press(&["Escape"]);
    screen.wait("all of them", |lines| line(lines, "a").is_some());
    screen.press(&["C-c"]);
    assert_eq!(screen.ended(), 0);
}

#[test]
fn a_wider_terminal_shows_more() {
    let mount = Mount::new();
    let holder = Agent::new();
    let long = format!("a{}", "-long-name".repeat(9));
    holder.create(&mount.claim(&long)).expect("free");
    holder.set_xattr(&mount.claim(&long), "user.lease.agent", "planner").expect("the holder's user");
    let screen = Screen::leasefs(&mount, SIZE, "top");
    let lines = screen.wait("the agent", |lines| lines.len() == 24 && lines[2].contains("planner"));
    assert!(lines[2].contains('…') && lines[2].contains(&holder.pid().to_string()), "{lines:#?}");
    screen.resize(200, 40);
    screen.wait("the whole key", |lines| {
        lines.len() == 40 && lines[2].starts_with(&long) && lines[39].contains("w wait")
    });
    screen.resize(40, 8);
    screen.wait("a small one", |lines| lines.len() == 8 && lines[2].contains("held"));
    screen.press(&["q"]);
    assert_eq!(screen.ended(), 0);
}

#[test]
fn a_ring_is_a_line_in_red() {
    let mount = Mount::new();
    let (one, other) = (Agent::new(), Agent::new());
    one.create(&mount.claim("a")).expect("free");
    other.create(&mount.claim("b")).expect("free");
    let screen = Screen::leasefs(&mount, SIZE, "top");
    wait_key(&screen, "b");
    for (agent, key) in [(&one, "b"), (&other, "a")] {
        let handle = agent.handle(&mount.claim(key));
        agent.begin_flock(handle, LOCK_EX);
        mount.wait_status(key, "waited for", |status| count(status, "waiters") == 1);
    }
    screen.wait("the ring", |lines| lines[1].starts_with("deadlock: pid "));
    // The terminal's red, by either of its names.
    let coloured = screen.coloured();
    assert!(["\x1b[31mdeadlock", "\x1b[38;5;1mdeadlock"].iter().any(|red| coloured.contains(red)), "{coloured:?}");
    one.kill();
    screen.wait("no ring", |lines| lines[1].starts_with("KEY"));
}

#[test]
fn it_goes_on_when_the_server_is_killed_or_hangs() {
    let mount = Mount::new();
    let holder = Agent::new();
    holder.create(&mount.claim("first")).expect("free");
    let screen = Screen::leasefs(&mount, SIZE, "top");
    wait_key(&screen, "first");
    mount.kill_server();
    holder.create(&mount.claim("second")).expect("free");
    wait_key(&screen, "second");
    // Keys are answered while the tree does not.
    let _stopped = Stopped::these(&[mount.server_pid().expect("a server")]);
    screen.press(&["k"]);
    screen.wait("sorted by key", |lines| lines[1].contains("KEY▾"));
    screen.press(&["q"]);
    assert_eq!(screen.ended(), 0);
}

#[test]
fn a_signal_gives_the_terminal_back() {
    let mount = Mount::new();
    let screen = Screen::leasefs(&mount, SIZE, "top");
    screen.wait("an empty tree", |lines| lines.len() == 24 && lines[2].contains("nothing is held"));
    let children = std::fs::read_to_string(format!("/proc/{0}/task/{0}/children", screen.shell())).expect("children");
    let top: i32 = children.split_whitespace().next().expect("top runs").parse().expect("a pid");
    kill(Pid::from_raw(top), Signal::SIGTERM).expect("top");
    assert_eq!(screen.ended(), 0);
    assert!(!screen.text().contains("nothing is held"), "{}", screen.text());
}

#[test]
fn thousands_of_keys_scroll() {
    let mount = Mount::new();
    let keys: Vec<_> = (0..2000).map(|number| mount.claim(&format!("k{number:04}"))).collect();
    let _held = hold_all(&keys);
    let screen = Screen::leasefs(&mount, SIZE, "top --sort key");
    screen.wait("all of them", |lines| lines[0].contains("2000 held") && lines[2].starts_with("k0000"));
    screen.press(&["End"]);
    screen.wait("the last", |lines| {
        line(lines, "k1999").is_some() && lines.iter().any(|line| line.starts_with("─ k1999"))
    });
    screen.press(&["PageUp"]);
    screen.wait("a page up", |lines| {
        line(lines, "k1999").is_none() || !lines.iter().any(|line| line.starts_with("─ k1999"))
    });
    screen.press(&["Home"]);
    screen.wait("the first", |lines| line(lines, "k0000").is_some());
}

#[test]
fn once_prints_a_plain_table() {
    let mount = Mount::new();
    let (holder, waiter) = (Agent::new(), Agent::new());
    std::fs::create_dir(mount.claim("team")).expect("a namespace");
    holder.create(&mount.claim("team/job")).expect("free");
    holder.create(&mount.claim("b")).expect("free");
    let handle = waiter.handle(&mount.claim("b"));
    waiter.begin_flock(handle, LOCK_EX);
    mount.wait_status("b", "waited for", |status| count(status, "waiters") == 1);
    let once = |args: &[&str]| {
        let output = mount.leasefs(&[&["top", "--batch"], args].concat());
        assert_ok(&output);
        stdout(&output)
    };
    let text = once(&["--sort", "wait"]);
    let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["KEY", "STATE", "EPOCH", "PID", "COMMAND", "AGE", "LEFT", "LINE", "WAIT"], "{text}");
    assert_eq!((lines[1][0], lines[2][0], lines.len()), ("b", "team/job", 3), "{text}");
    assert_eq!((lines[1][7], lines[2][7..9].to_vec()), ("1", vec!["0", "-"]), "{text}");
    assert_eq!(
        once(&["--sort", "wait", "--reverse"]).lines().nth(1).and_then(|line| line.split(' ').next()),
        Some("team/job")
    );
    assert_eq!(once(&["team/"]).lines().count(), 2);
    let output = mount.leasefs(&["top"]);
    assert_refused(&output, 2, &["have to be a terminal", "leasefs top --batch"]);
    let bad = mount.leasefs(&["top", "--sort", "size"]);
    assert_eq!(bad.status.code(), Some(2), "{}", stderr(&bad));
}
