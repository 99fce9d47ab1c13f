//! `.leasefs/events`: whole JSON lines, from the moment of the open, by blocking reads.

use std::collections::VecDeque;
use std::time::Duration;

use libc::{LOCK_EX, LOCK_NB, O_NONBLOCK, O_RDONLY, POLLIN};
use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use crate::common::agent::{Agent, Fd, sleeps_in};
use crate::common::luck::in_luck;
use crate::common::{LEASEFS, Mount, assert_ok, wait_for};
use crate::millis;

/// A reader of the stream.
struct Stream {
    agent: Agent,
    fd: Fd,
    lines: VecDeque<Value>,
    last: Option<u64>,
}

impl Stream {
    fn open(mount: &Mount) -> Stream {
        let agent = Agent::new();
        let fd = agent.open(&mount.root().join(".leasefs/events"), O_RDONLY).expect("events");
        Stream { agent, fd, lines: VecDeque::new(), last: None }
    }

    /// The next event, waited for in read(2).
    fn next(&mut self) -> Value {
        while self.lines.is_empty() {
            let text = self.agent.call("os_read", json!([self.fd, 65_536])).expect("read");
            let text = text.as_str().expect("text");
            assert!(text.ends_with('\n'), "a read gives whole lines: {text:?}");
            for line in text.lines() {
                self.lines.push_back(serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line:?}")));
            }
        }
        let event = self.lines.pop_front().expect("just read");
        let seq = event["seq"].as_u64().expect("seq");
        assert!(Some(seq) > self.last, "seq grows: {event} after {:?}", self.last);
        self.last = Some(seq);
        event["time"].as_str().expect("time").parse::<jiff::Timestamp>().expect("RFC 3339");
        event
    }

    /// Goes on to the next event of this kind about this key.
    fn find(&mut self, kind: &str, key: &str) -> Value {
        loop {
            let event = self.next();
            if event["event"] == kind && event["key"] == key {
                return event;
            }
        }
    }

    /// Goes on to the next wait in vain for this key; that event, and when the wait had begun.
    fn end_of_wait(&mut self, key: &str) -> (Value, i64) {
        let mut began = None;
        loop {
            let event = self.next();
            match event["event"].as_str().filter(|_| event["key"] == key) {
                Some("waiting") => began = Some(millis(&event, "time")),
                Some("interrupted") => return (event, began.expect("it began to wait")),
                _ => {}
            }
        }
    }
}

#[test]
fn the_stream_tells_the_life_of_a_key_in_order() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (agent, other) = (Agent::new(), Agent::new());
    let before = agent.create(&mount.claim("before")).expect("free key");
    let mut stream = Stream::open(&mount);
    agent.close(before);
    let fd = agent.create(&path).expect("free key");
    assert_eq!(other.create(&path), Err(Errno::EEXIST));
    let handle = other.handle(&path);
    other.begin_flock(handle, LOCK_EX);
    mount.wait_status("k", "one waiter", |status| crate::common::agent::count(status, "waiters") == 1);
    agent.write(fd, "beat").expect("holder");
    agent.close(fd);
    other.answer().expect("granted");
    assert_ok(&mount.leasefs(&["evict", "k", "--epoch", "2", "--reason", "test"]));
    let fd = agent.create(&path).expect("free key");
    let draft = agent.handle(&mount.result("k", 3));
    agent.close(draft);
    agent.close(fd);
    let first = stream.next();
    assert_eq!((&first["event"], &first["key"]), (&json!("released"), &json!("before")), "from the open on: {first}");
    for (kind, epoch) in
        [("granted", 1), ("released", 1), ("granted", 2), ("evicted", 2), ("granted", 3), ("completed", 3)]
    {
        assert_eq!(stream.find(kind, "k")["epoch"], epoch, "{kind}");
    }
}

#[test]
fn denials_waits_renewals_and_expiries_are_told() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (agent, other) = (Agent::new(), Agent::new());
    let mut stream = Stream::open(&mount);
    let fd = agent.create(&path).expect("free key");
    let handle = other.handle(&path);
    assert_eq!(other.flock(handle, LOCK_EX | LOCK_NB), Err(Errno::EAGAIN));
    stream.find("denied", "k");
    agent.write(fd, "beat").expect("holder");
    assert_eq!(stream.find("renewed", "k")["epoch"], 1);
    other.begin_flock(handle, LOCK_EX);
    stream.find("waiting", "k");
    agent.set_xattr(&path, "user.lease.ttl", "50ms").expect("holder's user");
    assert_eq!(stream.find("expired", "k")["epoch"], 1);
    assert_eq!(stream.find("granted", "k")["epoch"], 2);
    other.answer().expect("granted");
    assert_eq!(agent.write(fd, "late"), Err(Errno::ESTALE));
}

#[test]
fn a_wait_in_vain_is_told_with_who_waited_and_for_how_long() {
    let mount = Mount::new();
    let (holder, other) = (Agent::new(), Agent::new());
    let path = mount.claim("k");
    let mut stream = Stream::open(&mount);
    let fd = holder.create(&path).expect("free key");
    let in_line = |count: u64| mount.wait_status("k", "in line", |status| status["waiters"] == count);
    // Killed while it waits.
    let killed = Agent::new();
    killed.begin_flock(killed.handle(&path), LOCK_EX);
    in_line(1);
    killed.signal(Signal::SIGKILL);
    let event = stream.find("interrupted", "k");
    let who = (&event["pid"], &event["uid"], &event["command"]);
    assert_eq!(who, (&json!(killed.pid()), &json!(0), &json!("python3")), "{event}");
    assert_eq!(event["epoch"], 1, "{event}");
    // Out of time: by flock(1) itself, of which its shell has the handle, and by a run, which waits by several calls.
    for (command, name) in [("flock -w 0.3 9; exit $?", "bash"), ("$LEASEFS run -w 0.3 k -- true", "leasefs")] {
        let waited = in_luck("the server heard of the wait when it was nearly over", |_| {
            let output = mount.bash(&format!("LEASEFS={LEASEFS}; exec 9>$M/claims/k; {command}"));
            assert_eq!(output.status.code(), Some(1), "{command}");
            let (event, began) = stream.end_of_wait("k");
            assert_eq!(event["command"], name, "{command}: {event}");
            let (waited, lasted) = (event["waited_ms"].as_i64().expect("a number"), millis(&event, "time") - began);
            assert!((waited - lasted).abs() < 50, "{command}: {lasted} ms: {event}");
            (waited >= 250).then_some(waited)
        });
        assert!(waited < 30_000, "{command}: {waited}");
    }
    // Nobody who was granted the key, or did not wait for it, is told of.
    let handle = other.handle(&path);
    assert_eq!(other.flock(handle, LOCK_EX | LOCK_NB), Err(Errno::EAGAIN));
    other.begin_flock(handle, LOCK_EX);
    in_line(1);
    holder.close(fd);
    other.answer().expect("granted");
    loop {
        let event = stream.next();
        assert!(event["event"] != "interrupted" && event["event"] != "refused", "{event}");
        if event["event"] == "granted" && event["epoch"] == 2 {
            assert!(event["pid"].is_null() && event["waited_ms"].is_null(), "of vain waits alone: {event}");
            break;
        }
    }
}

#[test]
fn a_wait_in_vain_is_told_once_however_many_servers_it_outlasts() {
    let mount = Mount::new();
    let (holder, waiter, end) = (Agent::new(), Agent::new(), Agent::new());
    let path = mount.claim("k");
    let mut stream = Stream::open(&mount);
    holder.create(&path).expect("free key");
    waiter.begin_flock(waiter.handle(&path), LOCK_EX);
    mount.wait_status("k", "in line", |status| status["waiters"] == 1);
    let since = millis(&mount.status("k")["line"][0], "since");
    // What was not read when a server is killed would be a gap.
    stream.find("waiting", "k");
    for _ in 0..3 {
        let server = mount.server_pid().expect("a server");
        kill(Pid::from_raw(server), Signal::SIGKILL).expect("it is there");
        wait_for("another server has it in line", || {
            mount.server_pid().is_some_and(|pid| pid != server) && mount.status("k")["waiters"] == 1
        });
        stream.find("waiting", "k");
    }
    // Signalled while nobody serves, or while it is put in line again: that is not forgotten either.
    let server = mount.server_pid().expect("a server");
    kill(Pid::from_raw(server), Signal::SIGKILL).expect("it is there");
    waiter.signal(Signal::SIGKILL);
    end.create(&mount.claim("end")).expect("free key");
    mount.wait_status("k", "nobody waits", |status| status["waiters"] == 0);
    end.create(&mount.claim("last")).expect("free key");
    let mut told = Vec::new();
    loop {
        let event = stream.next();
        match (event["event"].as_str(), event["key"].as_str()) {
            (Some("interrupted"), _) => told.push(event),
            (_, Some("last")) => break,
            _ => {}
        }
    }
    assert_eq!(told.len(), 1, "{told:?}");
    assert_eq!(told[0]["pid"], waiter.pid());
    let (waited, lasted) = (told[0]["waited_ms"].as_i64().expect("a number"), millis(&told[0], "time") - since);
    assert!((waited - lasted).abs() < 50, "{waited} of {lasted} ms: since it asked the first server");
}

#[test]
fn two_readers_see_the_same() {
    let mount = Mount::new();
    let mut streams = [Stream::open(&mount), Stream::open(&mount)];
    let agent = Agent::new();
    for round in 1..=50 {
        let fd = agent.create(&mount.claim("k")).expect("free key");
        agent.close(fd);
        if round % 10 == 0 {
            let seen = streams.each_mut().map(|stream| {
                loop {
                    let event = stream.find("released", "k");
                    if event["epoch"] == round {
                        return event;
                    }
                }
            });
            assert_eq!(seen[0], seen[1]);
        }
    }
}

#[test]
fn a_reader_that_may_not_block_is_told_eagain_and_poll_wakes_it() {
    let mount = Mount::new();
    let (agent, reader) = (Agent::new(), Agent::new());
    let fd = reader.open(&mount.root().join(".leasefs/events"), O_RDONLY | O_NONBLOCK).expect("events");
    assert_eq!(reader.call("os_read", json!([fd, 65_536])), Err(Errno::EAGAIN));
    assert_eq!(reader.poll(fd, POLLIN, 50), 0, "nothing to read");
    reader.begin("poll", json!([fd, POLLIN, 30_000]));
    assert_eq!(reader.answer_within(Duration::from_millis(50)), None);
    agent.create(&mount.claim("k")).expect("free key");
    let events = reader.answer_within(Duration::from_secs(25)).expect("woken").expect("poll");
    assert_ne!(events.as_i64().expect("events") as i16 & POLLIN, 0);
    let text = reader.call("os_read", json!([fd, 65_536])).expect("read");
    let line: Value = serde_json::from_str(text.as_str().expect("text").lines().next().expect("a line")).expect("JSON");
    assert_eq!((&line["event"], &line["key"]), (&json!("granted"), &json!("k")));
    assert_eq!(reader.call("os_read", json!([fd, 65_536])), Err(Errno::EAGAIN), "read to the end");
}

#[test]
fn a_blocked_reader_ends_with_a_signal() {
    let mount = Mount::new();
    let (killed, caught) = (Stream::open(&mount), Stream::open(&mount));
    killed.agent.begin("os_read", json!([killed.fd, 65_536]));
    caught.agent.call("on_signal", json!([libc::SIGUSR1, "raise"])).expect("sigaction");
    caught.agent.begin("os_read", json!([caught.fd, 65_536]));
    assert_eq!(caught.agent.answer_within(Duration::from_millis(100)), None, "it waits");
    // By now it does, except on a slow machine.
    wait_for("it is in its read", || sleeps_in(caught.agent.pid()).contains("request_wait"));
    caught.agent.signal(Signal::SIGUSR1);
    let answer =
        caught.agent.answer_within(Duration::from_secs(30)).expect("within 100 ms, and a loaded machine's patience");
    assert_eq!(answer, Err(Errno::EINTR));
    killed.agent.kill();
}

#[test]
fn a_reader_that_sleeps_holds_nobody_up() {
    let mount = Mount::new();
    // It has the stream open and never reads, while much happens.
    let mut asleep = Stream::open(&mount);
    let agent = Agent::new();
    agent
        .script(
            "for n in range(3000): os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL))",
            json!({ "path": mount.claim("k") }),
        )
        .expect("claims go on");
    assert_eq!(mount.status("k")["epoch"], 3000);
    // Then it reads on: what it missed, if anything, is said to be missing.
    let mut expected = 1;
    while expected <= 3000 {
        let event = asleep.next();
        match event["event"].as_str() {
            Some("gap") => expected = 0,
            Some("granted") if expected == 0 => expected = event["epoch"].as_u64().expect("epoch") + 1,
            Some("granted") => {
                assert_eq!(event["epoch"], expected, "an event was lost without a word");
                expected += 1;
            }
            _ => {}
        }
    }
}

#[test]
fn a_small_read_gets_the_line_in_pieces() {
    let mount = Mount::new();
    let output = mount.bash(
        "exec 8<$M/.leasefs/events; (set -C; : >$M/claims/k); \
         read -r first <&8; read -r second <&8; printf '%s\\n%s\\n' \"$first\" \"$second\"",
    );
    assert_ok(&output);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let events: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).expect("a whole line")).collect();
    assert_eq!((&events[0]["event"], &events[1]["event"]), (&json!("granted"), &json!("released")));
}

#[test]
fn events_of_a_namespace_are_for_those_who_may_list_it() {
    let mount = Mount::shared();
    std::fs::create_dir(mount.claim("priv")).expect("mkdir");
    crate::common::set_mode(&mount.claim("priv"), 0o700);
    let other = Agent::user(12_001, 12_001, &[]);
    let fd = other.open(&mount.root().join(".leasefs/events"), O_RDONLY | O_NONBLOCK).expect("events");
    assert_ok(&mount.bash("(set -C; : >$M/claims/priv/secret); (set -C; : >$M/claims/open)"));
    let text = other.call("os_read", json!([fd, 65_536])).expect("events of the open key");
    let text = text.as_str().expect("text");
    assert!(text.contains("\"open\"") && !text.contains("secret"), "{text}");
}
