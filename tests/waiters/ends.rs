//! A wait ends in time: by `flock -w`, by `timeout`, by any signal that is not blocked or ignored.

use std::time::{Duration, Instant};

use libc::LOCK_EX;
use nix::errno::Errno;
use nix::sys::signal::Signal;
use serde_json::json;

use crate::common::agent::{Agent, Fd, Script, count, waits};
use crate::common::{InTime, Mount, wait_for};

/// A generous bound on what the contract gives 100 ms: a loaded machine, or one that stands still for seconds. Whoever is
/// deaf is so for ever.
const SOON: Duration = Duration::from_secs(20);

fn held(mount: &Mount) -> (Agent, Fd) {
    Agent::holding(&mount.claim("k"))
}

/// Nobody is in line, the holder is undisturbed, and the next epoch is the second.
fn assert_no_phantom(mount: &Mount, holder: &Agent, fd: Fd) {
    mount.wait_status("k", "an empty line", |status| count(status, "waiters") == 0);
    assert_eq!(holder.epoch(fd), Ok(1));
    assert_eq!(mount.status("k")["epoch"], 1, "an interrupted wait takes no epoch");
    holder.close(fd);
    assert_eq!(mount.state_of("k"), "free", "no phantom was granted the key");
    let next = Agent::new();
    let fd = next.create(&mount.claim("k")).expect("free");
    assert_eq!(next.epoch(fd), Ok(2));
}

#[test]
fn flock_w_ends_on_time() {
    let mount = Mount::new();
    let (holder, fd) = held(&mount);
    for (option, seconds) in [("-w 1", 1.0), ("-w 0.2", 0.2), ("-x -w 0.3", 0.3), ("-s -w 0.3", 0.3)] {
        let start = Instant::now();
        let output = mount.bash(&format!("exec flock {option} -E 42 $M/claims/k true"));
        let took = start.elapsed();
        assert_eq!(output.status.code(), Some(42), "flock {option}");
        assert!(
            took >= Duration::from_secs_f64(seconds) && took < Duration::from_secs_f64(seconds) + SOON,
            "flock {option}: {took:?}"
        );
    }
    assert_no_phantom(&mount, &holder, fd);
}

#[test]
fn timeout_ends_a_blocked_flock_on_time() {
    let mount = Mount::new();
    let (holder, fd) = held(&mount);
    // With -s KILL timeout(1) ends by its own signal, so a shell of its own tells how.
    for (command, code) in
        [("timeout 1 flock $M/claims/k true", 124), ("(timeout -s KILL 1 flock $M/claims/k true); exit $?", 137)]
    {
        let start = Instant::now();
        let output = mount.bash(command);
        let took = start.elapsed();
        assert_eq!(output.status.code(), Some(code), "{command}");
        assert!(took >= Duration::from_secs(1) && took < Duration::from_secs(1) + SOON, "{command}: {took:?}");
    }
    assert_no_phantom(&mount, &holder, fd);
}

#[test]
fn a_deadly_signal_ends_a_waiter_at_once() {
    let mount = Mount::new();
    let (holder, fd) = held(&mount);
    for signal in [Signal::SIGTERM, Signal::SIGKILL, Signal::SIGINT, Signal::SIGHUP, Signal::SIGQUIT, Signal::SIGSEGV] {
        let mut waiter = Script::start(&mount, "exec flock $M/claims/k true");
        mount.wait_status("k", "it waits", |status| count(status, "waiters") == 1);
        let start = Instant::now();
        waiter.signal(signal);
        let status = waiter.wait();
        assert!(start.elapsed() < SOON, "{signal}: {:?}", start.elapsed());
        assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(signal as i32));
        mount.wait_status("k", "its place is gone", |status| count(status, "waiters") == 0);
    }
    assert_no_phantom(&mount, &holder, fd);
}

#[test]
fn control_c_ends_a_script_that_waits() {
    let mount = Mount::new();
    let (holder, fd) = held(&mount);
    // A session of its own, as a terminal's; the signal goes to the whole group.
    let wait = "exec 9>$M/claims/k; flock 9; echo granted";
    let mut script = Script::start_with(&mount, &["env", "--default-signal", "setsid", "bash", "-c", wait]);
    mount.wait_status("k", "it waits", |status| count(status, "waiters") == 1);
    nix::sys::signal::killpg(nix::unistd::Pid::from_raw(script.pid()), Signal::SIGINT).expect("the group is there");
    assert!(!script.wait().success());
    assert_eq!(script.line(), None);
    assert_no_phantom(&mount, &holder, fd);
}

#[test]
fn a_caught_signal_ends_the_wait_with_eintr() {
    let mount = Mount::new();
    let (holder, held) = held(&mount);
    let agent = Agent::new();
    agent.call("on_signal", json!([libc::SIGUSR1, "raise"])).expect("sigaction");
    let fd = agent.handle(&mount.claim("k"));
    for (function, arguments) in waits(fd) {
        agent.begin(function, arguments.clone());
        mount.wait_status("k", "it waits", |status| count(status, "waiters") == 1);
        agent.signal(Signal::SIGUSR1);
        let answer = agent.answer_within(SOON).unwrap_or_else(|| panic!("{function} {arguments}: deaf to the signal"));
        assert_eq!(answer, Err(Errno::EINTR), "{function} {arguments}");
        mount.wait_status("k", "its place is gone", |status| count(status, "waiters") == 0);
    }
    // The handle is none the worse for it.
    agent.begin_flock(fd, LOCK_EX);
    mount.wait_status("k", "it waits again", |status| count(status, "waiters") == 1);
    holder.close(held);
    agent.answer().expect("granted");
    assert_eq!(agent.epoch(fd), Ok(2));
}

#[test]
fn a_wait_that_goes_on_for_long_still_ends_soon_after_a_signal() {
    let mount = Mount::new();
    let (_holder, _fd) = held(&mount);
    let agent = Agent::new();
    agent.call("on_signal", json!([libc::SIGUSR1, "raise"])).expect("sigaction");
    let fd = agent.handle(&mount.claim("k"));
    // Once is enough: the machine may stand still just when it is to hear.
    let mut took = [Duration::MAX; 3];
    for took in &mut took {
        agent.begin_flock(fd, LOCK_EX);
        assert_eq!(agent.answer_within(Duration::from_secs(4)), None, "it waits, and is looked at less and less often");
        let start = Instant::now();
        agent.signal(Signal::SIGUSR1);
        assert_eq!(agent.answer_within(SOON), Some(Err(Errno::EINTR)));
        *took = start.elapsed();
        if *took < Duration::from_secs(1) {
            return;
        }
    }
    panic!("it heard the signal after {took:?}");
}

#[test]
fn blocked_and_ignored_signals_do_not_end_a_wait() {
    let mount = Mount::new();
    let (holder, held) = held(&mount);
    let agent = Agent::new();
    agent.call("on_signal", json!([libc::SIGUSR1, "block"])).expect("sigprocmask");
    agent.call("on_signal", json!([libc::SIGUSR2, "ignore"])).expect("sigaction");
    let fd = agent.handle(&mount.claim("k"));
    agent.begin_flock(fd, LOCK_EX);
    mount.wait_status("k", "it waits", |status| count(status, "waiters") == 1);
    // SIGCHLD and SIGWINCH are ignored by default.
    for signal in [Signal::SIGUSR1, Signal::SIGUSR2, Signal::SIGCHLD, Signal::SIGWINCH] {
        agent.signal(signal);
        assert_eq!(agent.answer_within(Duration::from_millis(300)), None, "{signal}");
        assert_eq!(count(&mount.status("k"), "waiters"), 1, "{signal}");
    }
    holder.close(held);
    agent.answer().expect("granted");
    assert_eq!(agent.epoch(fd), Ok(2));
}

/// Has a thread of its own wait for the key; `threads_wait` gives how that ended.
fn wait_in_a_thread(mount: &Mount, agent: &Agent, fd: Fd) {
    let source = "
def wait():
    failed = LIBC.flock(fd, fcntl.LOCK_EX)
    sys.said = str(ctypes.get_errno()) if failed else 'granted'
sys.said = ''
threading.Thread(target=wait, daemon=True).start()";
    agent.script(source, json!({ "fd": fd })).expect("a thread");
    mount.wait_status("k", "the thread waits", |status| count(status, "waiters") == 1);
}

fn threads_wait(agent: &Agent) -> String {
    let said = agent.script("result = sys.said", json!({})).expect("python");
    said.as_str().expect("text").to_owned()
}

#[test]
fn a_signal_that_another_thread_takes_does_not_end_a_wait() {
    let mount = Mount::new();
    let (holder, held) = held(&mount);
    holder.create(&mount.claim("other")).expect("free key");
    let agent = Agent::new();
    agent.call("on_signal", json!([libc::SIGUSR1, "raise"])).expect("sigaction");
    let (fd, other) = (agent.handle(&mount.claim("k")), agent.handle(&mount.claim("other")));
    wait_in_a_thread(&mount, &agent, fd);
    for _ in 0..5 {
        // The first thread waits as well, so the signal can be seen by whoever looks at either.
        agent.begin_flock(other, LOCK_EX);
        mount.wait_status("other", "it waits", |status| count(status, "waiters") == 1);
        agent.signal(Signal::SIGUSR1);
        assert_eq!(agent.answer_within(SOON), Some(Err(Errno::EINTR)));
        assert_eq!((threads_wait(&agent).as_str(), count(&mount.status("k"), "waiters")), ("", 1));
    }
    holder.close(held);
    wait_for("the thread is granted the key", || threads_wait(&agent) == "granted");
}

#[test]
fn a_signal_that_only_the_waiting_thread_takes_ends_its_wait() {
    let mount = Mount::new();
    let (holder, held) = held(&mount);
    let agent = Agent::new();
    agent.script("signal.signal(signal.SIGUSR1, lambda *_: None)", json!({})).expect("sigaction");
    let fd = agent.handle(&mount.claim("k"));
    wait_in_a_thread(&mount, &agent, fd);
    agent.call("on_signal", json!([libc::SIGUSR1, "block"])).expect("sigprocmask");
    agent.signal(Signal::SIGUSR1);
    wait_for("the wait ends", || !threads_wait(&agent).is_empty());
    assert_eq!(threads_wait(&agent), libc::EINTR.to_string());
    assert_no_phantom(&mount, &holder, held);
}

#[test]
fn a_waiter_killed_while_others_wait_leaves_their_order() {
    let mount = Mount::new();
    let (holder, held) = held(&mount);
    let mut scripts: Vec<Script> = Vec::new();
    for place in 1..=5u64 {
        scripts.push(Script::start(
            &mount,
            &format!("exec flock $M/claims/k bash -c 'read -r e <$M/claims/k; echo {place} $e'"),
        ));
        mount.wait_status("k", "its place", |status| count(status, "waiters") == place);
    }
    for place in [4, 1] {
        scripts[place].signal(Signal::SIGKILL);
        scripts[place].wait();
    }
    mount.wait_status("k", "three are left", |status| count(status, "waiters") == 3);
    holder.close(held);
    let said: Vec<Option<String>> = scripts.iter().map(Script::line).collect();
    assert_eq!(said, [Some("1 2".into()), None, Some("3 3".into()), Some("4 4".into()), None]);
}

#[test]
fn a_waiter_with_many_groups_is_not_deaf() {
    let mount = Mount::shared();
    let (holder, fd) = held(&mount);
    let groups: Vec<String> = (0..400).map(|n| (1_000_000_000 + n).to_string()).collect();
    let start = Instant::now();
    let command = format!("setpriv --groups {} timeout 1 flock $M/claims/k true", groups.join(","));
    assert_eq!(mount.bash(&command).status.code(), Some(124));
    assert!(start.elapsed() < Duration::from_secs(1) + SOON, "{:?}", start.elapsed());
    assert_no_phantom(&mount, &holder, fd);
}

#[test]
fn a_waiter_that_the_server_may_not_see_waits_on_and_hears_a_signal() {
    // A /proc that hides the processes of others from a server that may not trace them.
    let script = r#"
        # Copies of the neighbours' mounts would keep those alive.
        while read -r _ _ _ _ path _; do
            case $path in */leasefs-test-*/mnt) umount -l "$path" || true ;; esac
        done </proc/self/mountinfo
        mount -t proc -o hidepid=2,gid=12345 proc /proc && mkdir mnt || exit
        setpriv --bounding-set -sys_ptrace "$LEASEFS" mount mnt --state state --allow-other --durability process >&2 || exit
        setpriv --bounding-set -sys_ptrace cat /proc/1/status >unhidden 2>/dev/null
        exec 9<>mnt/claims/k; flock 9
        wait='open($f, "<", "mnt/claims/k"); print(flock($f, 2) ? "locked" : $! + 0)'
        setpriv --reuid 1000 --regid 1000 --clear-groups perl -e "$wait" >said & waiter=$!
        until grep -q '"waiters":1' mnt/status/k; do sleep 0.01; done
        for i in {1..30}; do sleep 0.01; grep -o '"waiters":.' mnt/status/k; done | sort -u
        kill -TERM $waiter; SECONDS=0; wait $waiter; echo "ended: $?, after $SECONDS s"
        exec 9>&-; "$LEASEFS" unmount mnt"#;
    let dir = tempfile::tempdir().expect("a directory");
    crate::common::set_mode(dir.path(), 0o755);
    let mut command = std::process::Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "bash", "-c", script]).current_dir(dir.path());
    let output = command.env("LEASEFS", crate::common::LEASEFS).output_in_time();
    let file = |name: &str| std::fs::read_to_string(dir.path().join(name)).expect("a file");
    assert_eq!((file("unhidden"), file("said")), (String::new(), String::new()));
    let said = crate::common::stdout(&output);
    let ended = |seconds| format!("\"waiters\":1\nended: 143, after {seconds} s\n");
    assert!((0..=SOON.as_secs()).any(|seconds| said == ended(seconds)), "{said}{output:?}");
}
