//! `--for PID`: held while that process lives, and not a moment longer.

use nix::sys::signal::Signal;

use crate::common::agent::has_ended;
use crate::common::{Background, InTime, assert_ok, stop, wait_for};
use crate::tools::{Tools, assert_refused, epoch, signal};

/// A process to be bound to.
fn sleeper() -> Background {
    Background(std::process::Command::new("sleep").arg("1000").spawn().expect("sleep runs"))
}

#[test]
fn the_lease_ends_with_the_process() {
    let tools = Tools::new();
    for kind in [Signal::SIGKILL, Signal::SIGTERM] {
        let mut process = sleeper();
        let epoch = tools.claim(&format!("job --for {}", process.pid()));
        let holder = tools.holder("job");
        signal(process.pid(), kind);
        // Nobody has taken note of its end yet: it is a zombie.
        tools.wait_free("job", holder);
        process.wait();
        assert_refused(&tools.elsewhere(&format!("leasefs renew job --epoch {epoch}")), 75, &["does not hold it"]);
    }
    let last = tools.history("job").pop().expect("two attempts");
    assert_eq!(last["outcome"], "released");
    assert!(last["reason"].as_str().is_some_and(|why| why.contains("has ended")), "{last}");
}

#[test]
fn it_is_renewed_while_the_process_lives_also_one_that_is_stopped() {
    let tools = Tools::new();
    let mut process = sleeper();
    tools.claim(&format!("job --for {} --ttl 9s", process.pid()));
    let holder = tools.holder("job");
    process.signal("STOP");
    tools.mount.wait_outlived(&["job"], 1);
    process.signal("KILL");
    process.wait();
    tools.wait_free("job", holder);
    assert_eq!(tools.history("job")[0]["outcome"], "released");
}

#[test]
fn a_process_of_the_same_number_is_another() {
    let tools = Tools::new();
    let mut process = sleeper();
    let pid = process.pid();
    tools.claim(&format!("job --for {pid} --ttl 10m"));
    let holder = tools.holder("job");
    // The number is used again before the holder gets to look.
    stop(holder);
    signal(pid, Signal::SIGKILL);
    process.wait();
    let again = Again::with_number(pid);
    signal(holder, Signal::SIGCONT);
    tools.wait_free("job", holder);
    assert!(!has_ended(pid), "while the other lives");
    drop(again);
}

#[test]
fn nothing_is_granted_for_one_who_is_not_there() {
    let tools = Tools::new();
    let mut gone = sleeper();
    let pid = gone.pid();
    signal(pid, Signal::SIGKILL);
    wait_for("its end", || has_ended(pid));
    assert_refused(&tools.step(&format!("leasefs claim job --for {pid}")), 2, &[&format!("--for {pid}: has ended")]);
    gone.wait();
    let none = tools.step(&format!("leasefs claim job --for {pid}"));
    assert_refused(&none, 2, &[&format!("--for {pid}: there is no such process"), "nothing was claimed"]);
    for bad in ["0", "-1"] {
        assert_refused(&tools.step(&format!("leasefs claim job --for {bad}")), 2, &["not a process"]);
    }
    assert_refused(&tools.step("exec leasefs claim job --for $$"), 2, &["is this very command"]);
    assert_eq!(tools.mount.state_of("job"), "free");
    assert!(!tools.mount.root().join("status/job").exists(), "no epoch was used");
}

#[test]
fn the_wait_in_line_ends_with_the_process_too() {
    let tools = Tools::new();
    tools.claim("job --agent first");
    let mut process = sleeper();
    let mut claim = tools.start(&format!("leasefs claim job --for {}", process.pid()));
    tools.mount.wait_status("job", "one waits", |status| status["waiters"] == 1);
    process.signal("KILL");
    process.wait();
    assert_eq!(claim.wait().code(), Some(2));
    tools.mount.wait_status("job", "nobody waits", |status| status["waiters"] == 0);
    tools.wait_one_holder("job");
}

#[test]
fn it_is_bound_once() {
    let tools = Tools::new();
    let (one, other) = (sleeper(), sleeper());
    let claim = |process: &Background| tools.elsewhere(&format!("leasefs claim job --agent a --for {}", process.pid()));
    assert_ok(&claim(&one));
    assert_eq!(epoch(&claim(&one)), 1, "the same again");
    let rebound = claim(&other);
    assert_refused(&rebound, 2, &["this agent holds it already, at epoch 1", &format!("for process {}", one.pid())]);
    let free = "leasefs claim job --agent a";
    assert_eq!(epoch(&tools.elsewhere(free)), 1, "without saying for whom, it is a renewal");
}

/// A process with a number of our choice.
struct Again(i32);

impl Again {
    fn with_number(pid: i32) -> Again {
        #[repr(C)]
        #[derive(Default)]
        struct CloneArgs {
            flags: u64,
            pidfd: u64,
            child_tid: u64,
            parent_tid: u64,
            exit_signal: u64,
            stack: u64,
            stack_size: u64,
            tls: u64,
            set_tid: u64,
            set_tid_size: u64,
        }
        let args = CloneArgs {
            exit_signal: libc::SIGCHLD as u64,
            set_tid: &raw const pid as u64,
            set_tid_size: 1,
            ..CloneArgs::default()
        };
        let mut made = -1;
        // Another process may have the number for a moment.
        wait_for("the number can be had", || {
            // SAFETY: without a stack of its own the child goes on here, as after fork, and makes system calls only.
            made = unsafe { libc::syscall(libc::SYS_clone3, &raw const args, size_of::<CloneArgs>()) };
            if made == 0 {
                loop {
                    // SAFETY: takes nothing.
                    unsafe { libc::pause() };
                }
            }
            made > 0
        });
        assert_eq!(made, i64::from(pid));
        Again(pid)
    }
}

impl Drop for Again {
    fn drop(&mut self) {
        let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(self.0), Signal::SIGKILL);
        // It does nothing but sleep, so it is gone at once.
        let _ = nix::sys::wait::waitpid(nix::unistd::Pid::from_raw(self.0), None);
    }
}

#[test]
fn a_ttl_that_is_shortened_meanwhile_is_kept_as_well() {
    let tools = Tools::new();
    let mut process = sleeper();
    let pid = process.pid();
    tools.claim(&format!("job --for {pid} --agent a"));
    tools.claim(&format!("other --for {pid} --agent a"));
    let holder = tools.holder("job");
    // From a day to seconds, by the agent itself and by xattr.
    assert_eq!(tools.claim(&format!("job --for {pid} --agent a --ttl 9s")), 1);
    let set = "import os, sys; os.setxattr(sys.argv[1], 'user.lease.ttl', b'9s')";
    let path = tools.mount.claim("other");
    assert_ok(&tools.command(&["python3", "-c", set, &path.to_string_lossy()]).output_in_time());
    tools.mount.wait_outlived(&["job", "other"], 1);
    process.signal("KILL");
    process.wait();
    tools.wait_free("job", holder);
}
