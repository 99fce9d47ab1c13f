//! The server in a container of its own and its callers outside, where it cannot see them: their requests come with pid 0.
//!
//! The tree is in a directory that the container shares with the host both ways, so that what is mounted inside appears
//! outside.

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;
use serde_json::json;

use crate::common::agent::{Agent, Fd, Script, count, waits};
use crate::common::{Background, InTime, LEASEFS, Mount, shown_once, stdout, stop, wait_for};
use crate::rig::{FORMS, Podman, Shell};

/// What a signal's effect may take.
const SOON: Duration = Duration::from_secs(1);

/// Whether it took no longer than that.
fn soon(took: Duration) -> Result<(), String> {
    if took < SOON { Ok(()) } else { Err(format!("{took:?}")) }
}

/// A directory that mounts travel out of and into.
struct SharedDir(PathBuf);

impl SharedDir {
    fn new(path: PathBuf) -> SharedDir {
        mount(Some(&path), &path, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("bind mount");
        let dir = SharedDir(path);
        mount(None::<&str>, &dir.0, None::<&str>, MsFlags::MS_SHARED, None::<&str>).expect("a shared mount");
        dir
    }
}

impl Drop for SharedDir {
    fn drop(&mut self) {
        let _ = umount2(&self.0.join("mnt"), MntFlags::MNT_DETACH);
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

/// A tree whose server is in a container, used from outside. Fields are dropped in this order.
struct Served {
    container: Option<Background>,
    podman: Podman,
    _shared: SharedDir,
    tree: Mount,
}

impl Served {
    fn new(options: &[&str]) -> Served {
        let tree = Mount::unserved();
        let dir = tree.root().parent().expect("its directory").to_owned();
        let shared = SharedDir::new(dir.clone());
        // Podman's own directory is beside it, or its mounts would travel, too; and its name begins otherwise, or runc takes
        // the one for the other's parent.
        let name = dir.file_name().and_then(|name| name.to_str()).expect("UTF-8");
        let podman = Podman::new(dir.with_file_name(format!("podman-{name}")));
        podman.empty_image("empty");
        let mut command = podman.run("server");
        command.args(["--privileged", "--pid", "private", "-v"]).arg(format!("{}:/srv:rshared", dir.display()));
        command.arg("-v").arg(format!("{LEASEFS}:/leasefs:ro")).args(["--env", "LEASEFS_TEST_ABORT=/srv/abort"]);
        command.args(["empty", "/leasefs", "mount", "/srv/mnt", "--state", "/srv/state", "--foreground"]);
        command.args(["--allow-other", "--durability", "process"]).args(options);
        let log = fs::File::create(dir.join("log")).expect("a log");
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).spawn().expect("podman runs");
        let mut served = Served { container: Some(Background(child)), podman, _shared: shared, tree };
        let log = dir.join("log");
        wait_for("the tree", || {
            let ended = served.container.as_mut().and_then(|container| container.0.try_wait().expect("podman"));
            assert!(ended.is_none(), "the container ended: {}", fs::read_to_string(&log).unwrap_or_default());
            served.tree.root().join("claims").is_dir()
        });
        served
    }

    /// The keeper, which is the container's first process, and the server, by their numbers outside.
    fn server(&self) -> i32 {
        let output = self.podman.command().args(["inspect", "--format", "{{.State.Pid}}", "server"]).output_in_time();
        let keeper = stdout(&output).trim().to_owned();
        let mut server = 0;
        wait_for("a server", || {
            let children = fs::read_to_string(format!("/proc/{keeper}/task/{keeper}/children")).unwrap_or_default();
            server = children.split_whitespace().next().and_then(|pid| pid.parse().ok()).unwrap_or(0);
            server != 0
        });
        server
    }

    /// Kills the server, and waits until another answers.
    fn kill_server(&self) {
        let old = self.tree.server_pid();
        kill(Pid::from_raw(self.server()), Signal::SIGKILL).expect("the server can be killed");
        wait_for("another server", || self.tree.server_pid().is_some_and(|pid| Some(pid) != old));
    }

    fn holder(&self, key: &str) -> (Agent, Fd) {
        Agent::holding(&self.tree.claim(key))
    }

    fn waits(&self, key: &str, number: u64) {
        self.tree.wait_status(key, "it waits", |status| count(status, "waiters") == number);
    }

    /// An orderly end: the container stops, and all it stored is whole.
    fn end(mut self) {
        self.podman.kill("server", "TERM");
        let mut container = self.container.take().expect("it runs");
        assert!(container.wait().success(), "the keeper's exit");
        self.tree.verify();
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        // Before its podman client, so that the tree is not left without a server while anybody uses it.
        self.podman.command().args(["kill", "server"]).quietly_in_time();
        if std::thread::panicking() {
            eprintln!("{}", fs::read_to_string(self.tree.root().with_file_name("log")).unwrap_or_default());
        }
    }
}

/// `timeout`, `flock -w` and the like: how the command ended and how long that took.
fn run(mount: &Mount, command: &str) -> (Option<i32>, Duration) {
    let start = Instant::now();
    (mount.bash(command).status.code(), start.elapsed())
}

#[test]
fn callers_that_the_server_cannot_see_claim_and_commit_as_any_other() {
    let served = Served::new(&[]);
    let tree = &served.tree;
    let mut host = Shell::host(tree);
    let mut other = served.podman.shell(tree, "other", &[]);
    let mut epochs = 0;
    for form in FORMS {
        let is_shared = form == "shared";
        host.must(&format!("python3 -S $CLAIM hold $M/claims/k {form} & held=$!"));
        let state = if is_shared { "shared" } else { "held" };
        tree.wait_status("k", form, |status| status["state"] == state);
        epochs += u64::from(!is_shared);
        let status = tree.status("k");
        assert_eq!(status["epoch"], epochs, "{form}");
        if !is_shared {
            let holder = json!({"pid": 0, "start_time": 0, "uid": 0, "gid": 0, "command": "(unseen)"});
            assert_eq!(status["holder"], holder, "{form}");
        }
        let refused = if is_shared { "EEXIST EAGAIN EAGAIN EAGAIN ok " } else { "EEXIST EAGAIN EAGAIN EAGAIN EAGAIN " };
        for place in [&mut host, &mut other] {
            assert_eq!(place.try_all("k"), refused, "{form}");
        }
        // The kernel lets go for who is killed, and that needs nobody to be seen.
        host.ask("kill -KILL $held; wait $held");
        assert_eq!(tree.state_of("k"), "free", "{form}");
    }
    // A child keeps what its parent had, and a result is its attempt's.
    let (parent, fd) = served.holder("job");
    let child = parent.fork();
    parent.kill();
    assert_eq!(other.try_all("job"), "EEXIST EAGAIN EAGAIN EAGAIN EAGAIN ");
    assert_eq!((child.epoch(fd), child.write(fd, "half way")), (Ok(1), Ok(8)));
    // What goes by who it is, and not by its handle, is not for somebody who could be anybody.
    assert_eq!((child.touch(fd), child.unlink(&tree.claim("job"))), (Err(Errno::EACCES), Err(Errno::EBUSY)));
    host.must("echo 'all is well' >$M/results/job/1");
    wait_for("the result", || tree.result("job", 1).exists());
    assert_eq!(other.must("cat $M/results/job/latest"), "all is well");
    child.close(fd);
    assert_eq!(tree.state_of("job"), "finished");
    drop((host, other, parent, child));
    served.end();
}

#[test]
fn a_signal_ends_the_wait_of_a_caller_that_the_server_cannot_see() {
    let served = Served::new(&[]);
    let tree = &served.tree;
    let (holder, held) = served.holder("k");
    let second = Duration::from_secs(1);
    for (command, code) in [
        ("exec flock -w 1 -E 42 $M/claims/k true", 42),
        ("exec flock -s -w 1 -E 42 $M/claims/k true", 42),
        ("timeout 1 flock $M/claims/k true", 124),
        ("(timeout -s KILL 1 flock $M/claims/k true); exit $?", 137),
    ] {
        shown_once(command, || {
            let (ended, took) = run(tree, command);
            assert_eq!(ended, Some(code), "{command}");
            assert!(took >= second, "{command}: {took:?}");
            soon(took - second)
        });
    }
    for signal in [Signal::SIGTERM, Signal::SIGKILL, Signal::SIGINT, Signal::SIGHUP] {
        shown_once(signal.as_str(), || {
            let mut waiter = Script::start(tree, "exec flock $M/claims/k true");
            served.waits("k", 1);
            let start = Instant::now();
            waiter.signal(signal);
            let status = waiter.wait();
            let took = start.elapsed();
            assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(signal as i32));
            served.waits("k", 0);
            soon(took)
        });
    }
    // Ctrl-C: to all of a terminal's foreground.
    let wait = "exec 9>$M/claims/k; flock 9; echo granted";
    shown_once("Ctrl-C", || {
        let mut script = Script::start_with(tree, &["env", "--default-signal", "setsid", "bash", "-c", wait]);
        served.waits("k", 1);
        let start = Instant::now();
        killpg(Pid::from_raw(script.pid()), Signal::SIGINT).expect("the group is there");
        assert!(!script.wait().success());
        let took = start.elapsed();
        assert_eq!(script.line(), None);
        served.waits("k", 0);
        soon(took)
    });

    // A caught one is EINTR in every form that waits, and never 512.
    let agent = Agent::new();
    agent.call("on_signal", json!([libc::SIGUSR1, "raise"])).expect("sigaction");
    agent.call("on_signal", json!([libc::SIGUSR2, "ignore"])).expect("sigaction");
    let fd = agent.handle(&tree.claim("k"));
    let interrupted = || {
        assert_eq!(agent.answer_within(Duration::from_millis(200)), None, "an ignored signal is none");
        let start = Instant::now();
        agent.signal(Signal::SIGUSR1);
        assert_eq!(agent.answer(), Err(Errno::EINTR));
        soon(start.elapsed())
    };
    for (function, arguments) in waits(fd) {
        shown_once(&format!("{function} {arguments}"), || {
            agent.begin(function, arguments.clone());
            served.waits("k", 1);
            agent.signal(Signal::SIGUSR2);
            let ended = interrupted();
            served.waits("k", 0);
            ended
        });
    }
    // A read of events, too.
    let events = agent.open(&tree.root().join(".leasefs/events"), libc::O_RDONLY).expect("events");
    shown_once("a read of events", || {
        agent.begin("os_read", json!([events, 4096]));
        interrupted()
    });

    assert_eq!((holder.epoch(held), tree.status("k")["epoch"].as_u64()), (Ok(1), Some(1)), "none took a number");
    holder.close(held);
    assert_eq!(tree.state_of("k"), "free", "no phantom was granted the key");
    drop((agent, holder));
    served.end();
}

#[test]
fn signals_without_end_leave_the_line_and_its_callers_whole() {
    let served = Served::new(&[]);
    let tree = &served.tree;
    let (holder, held) = served.holder("k");
    // Whoever has a handler that lets calls go on has its call made again by the kernel, at the end of the line.
    let source = "
import random
signal.signal(signal.SIGALRM, lambda *_: None)
seen, granted = set(), 0
path = os.open(path, os.O_RDWR)
for round in range(150):
    goes_on = round % 3 == 0
    signal.siginterrupt(signal.SIGALRM, not goes_on)
    # Again and again: one that comes before the call has begun ends no wait.
    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.0001, 0.003), 0.001 if goes_on else 0.003)
    if goes_on:
        time.sleep(0)
        signal.setitimer(signal.ITIMER_REAL, 0.002, 0)
        operation = fcntl.LOCK_EX | fcntl.LOCK_NB
    else:
        operation = fcntl.LOCK_EX
    failed = LIBC.flock(path, operation)
    seen.add(ctypes.get_errno() if failed else 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
result = sorted(seen)";
    let agent = Agent::new();
    let seen = agent.script(source, json!({ "path": tree.claim("k") })).expect("python");
    assert_eq!(seen, json!([libc::EINTR, libc::EAGAIN]), "no other errno, above all not 512");
    let restarts = "
signal.signal(signal.SIGALRM, lambda *_: None)
signal.siginterrupt(signal.SIGALRM, False)
signal.setitimer(signal.ITIMER_REAL, 0.002, 0.002)
fd = os.open(path, os.O_RDWR)
result = ctypes.get_errno() if LIBC.flock(fd, fcntl.LOCK_EX) else 'granted'
signal.setitimer(signal.ITIMER_REAL, 0)
os.close(fd)";
    agent.begin("script", json!([restarts, { "path": tree.claim("k") }]));
    assert_eq!(agent.answer_within(Duration::from_millis(300)), None, "it goes on waiting");

    // Stopped, a waiter is out of the line; continued, it is in it again, by the kernel.
    let (neighbour, other) = served.holder("other");
    let mut stopped = Script::start(tree, "exec flock $M/claims/other true");
    served.waits("other", 1);
    stopped.signal(Signal::SIGSTOP);
    served.waits("other", 0);
    stopped.signal(Signal::SIGCONT);
    served.waits("other", 1);
    neighbour.close(other);
    assert!(stopped.wait().success(), "it gets the key in the end");

    holder.close(held);
    assert_eq!(agent.answer().expect("python"), "granted");
    drop((agent, holder, neighbour));
    served.end();
}

#[test]
fn waiters_keep_their_order_while_some_are_killed_and_servers_are() {
    for options in [&[][..], &["--no-resend"]] {
        shown_once("each hears of its signal soon", || kill_waiters_and_servers(options));
    }
}

/// Whether each waiter that a signal came for ended soon.
fn kill_waiters_and_servers(options: &[&str]) -> Result<(), String> {
    let served = Served::new(options);
    let tree = &served.tree;
    let (holder, held) = served.holder("k");
    let mut waiters: Vec<Script> = Vec::new();
    for place in 1..=6 {
        let script = format!("exec flock $M/claims/k bash -c 'read -r e <$M/claims/k; echo {place} $e'");
        waiters.push(Script::start(tree, &script));
        served.waits("k", place);
    }
    let mut ended = Ok(());
    let mut end_one = |place: usize, left: u64| {
        let start = Instant::now();
        waiters[place].signal(Signal::SIGKILL);
        waiters[place].wait();
        ended = ended.clone().and(soon(start.elapsed()));
        served.waits("k", left);
    };
    end_one(4, 5);
    served.kill_server();
    served.waits("k", 5);
    // The new server hears of signals as well, also of this one, which kills it before it has done anything about it.
    end_one(0, 4);
    let abort = tree.root().with_file_name("abort");
    fs::write(abort.with_extension("new"), "interrupted").expect("a kill point");
    fs::rename(abort.with_extension("new"), &abort).expect("a kill point");
    end_one(2, 3);
    assert!(!abort.exists(), "it was passed");
    // And of one that came while there was no server to hear of it.
    let server = Pid::from_raw(served.server());
    stop(server.as_raw());
    waiters[3].signal(Signal::SIGTERM);
    kill(server, Signal::SIGKILL).expect("the server can be killed");
    let start = Instant::now();
    waiters[3].wait();
    ended = ended.and(soon(start.elapsed() / 2));
    served.waits("k", 2);
    // The holder has what it had; killed, it lets go at once, and the line goes on.
    assert_eq!(holder.epoch(held), Ok(1));
    holder.kill();
    let said: Vec<Option<String>> = waiters.iter().map(Script::line).collect();
    assert_eq!(said, [None, Some("2 2".into()), None, None, None, Some("6 3".into())], "{options:?}");
    drop((waiters, holder));
    served.end();
    ended
}
