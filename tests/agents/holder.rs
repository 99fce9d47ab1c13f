//! The process that keeps an attempt: what it shows, and what it must not have.

use std::fs;
use std::path::PathBuf;
use std::process::Stdio;

use nix::sys::signal::Signal;

use crate::common::agent::has_ended;
use crate::common::{Background, InTime, assert_ok, read_in_time, stop, wait_for};
use crate::tools::{Tools, assert_refused};

#[test]
fn ps_tells_whose_attempt_it_keeps() {
    let tools = Tools::new();
    let process = std::process::id();
    tools.claim(&format!("job --agent 'planner 7' --for {process}"));
    let holder = tools.holder("job");
    let output = tools.command(&["ps", "-o", "args=", "-p", &holder.to_string()]).output_in_time();
    let shown = crate::common::stdout(&output);
    for part in ["leasefs hold --key=job --epoch=1 --agent=planner 7", &format!("--for={process}:")] {
        assert!(shown.contains(part), "`{part}` is missing in {shown}");
    }
    assert_eq!(tools.mount.status("job")["holder"]["command"], "leasefs");
}

#[test]
fn it_has_nothing_of_its_caller() {
    let tools = Tools::new();
    // A caller that ignores signals, has a lease of its own at 9, and a directory that is to be removed.
    let dir = tools.mount.scratch().join("gone");
    fs::create_dir(&dir).expect("directory");
    let script = format!(
        "trap '' HUP TERM; cd {}; exec 9>\"$M/claims/own\"; flock 9; leasefs claim job; exec 9>&-; cat \"$M/status/own\"",
        dir.display()
    );
    let output = tools.step(&script);
    assert_ok(&output);
    assert!(crate::common::stdout(&output).contains("\"state\":\"free\""), "{output:?}");

    let holder = tools.holder("job");
    let proc = |name: &str| format!("/proc/{holder}/{name}");
    let root = tools.mount.root();
    let of_its_own = |target: &PathBuf| {
        target.starts_with(&root) || target.starts_with("/dev/null") || target.starts_with("anon_inode:[timerfd]")
    };
    let open = || {
        let entries = fs::read_dir(proc("fd")).expect("its descriptors").flatten();
        entries.filter_map(|entry| fs::read_link(entry.path()).ok()).collect::<Vec<_>>()
    };
    // What its claim speaks to it by it closes when it has heard the last word.
    wait_for("it has only its own open", || open().iter().all(of_its_own));
    assert_eq!(fs::read_link(proc("cwd")).expect("link"), std::path::Path::new("/"));
    assert_eq!(fs::read_to_string(proc("environ")).expect("environ"), "");
    let status = fs::read_to_string(proc("status")).expect("status");
    let mask = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name)).expect("a mask");
        u64::from_str_radix(line.trim(), 16).expect("hex")
    };
    // A Rust program ignores SIGPIPE itself; 32 and 33 are the C library's own.
    let others = !(1 << (libc::SIGPIPE - 1) | 3 << 31);
    assert_eq!((mask("SigBlk:"), mask("SigIgn:") & others), (0, 0));
    let own = nix::unistd::getsid(None).expect("session");
    assert_ne!(nix::unistd::getsid(Some(nix::unistd::Pid::from_raw(holder))), Ok(own));
    let parent = status.lines().find_map(|line| line.strip_prefix("PPid:")).expect("a parent").trim();
    assert_ne!(parent, std::process::id().to_string());
}

#[test]
fn nothing_is_kept_for_one_who_was_not_told() {
    let tools = Tools::new();
    let full = tools.step("leasefs claim job >/dev/full");
    assert_refused(&full, 2, &["job: its epoch cannot be printed", "nothing is held"]);
    tools.wait_no_holders();
    tools.mount.wait_status("job", "free", |status| status["state"] == "free");
    // One that reads no more, and has ended before it could be told.
    let broken = tools.step("exec 3> >(exec true); wait $!; leasefs claim job >&3");
    assert_refused(&broken, 2, &["job: its epoch cannot be printed", "nothing is held"]);
    tools.wait_no_holders();
    // Its command line is gone before its files are.
    tools.mount.wait_status("job", "free", |status| status["state"] == "free");
    assert_eq!(tools.mount.status("job")["epoch"], 2, "each was granted, and taken back");
}

/// A reader that takes the first line and goes (`leasefs claim KEY | head -1`) has been told.
#[test]
fn the_epoch_and_the_path_are_told_at_once() {
    let tools = Tools::new();
    for options in ["", "--json"] {
        // Each read of such a pipe gives what one write had.
        let (read, write) =
            nix::unistd::pipe2(nix::fcntl::OFlag::O_DIRECT | nix::fcntl::OFlag::O_CLOEXEC).expect("a pipe");
        let script = format!("leasefs claim job --agent planner {options}");
        let claimed = tools.command(&["bash", "-c", &script]).stdout(write).spawn().expect("bash runs");
        assert!(Background(claimed).wait().success());
        let mut told = [0; 4_096];
        // The end of the pipe, if nothing was told.
        let length = nix::unistd::read(&read, &mut told).expect("it was told");
        let told = String::from_utf8_lossy(&told[..length]);
        assert!(told.ends_with('\n') && told.contains("/results/job/1"), "in pieces: {told:?}");
    }
}

#[test]
fn it_is_not_started_by_hand() {
    let tools = Tools::new();
    let output = tools.step("leasefs hold --key=job --root=\"$M\" --channel=77");
    assert_refused(&output, 2, &["descriptor 77 was not passed on", "leasefs claim"]);
    assert_eq!(tools.mount.state_of("job"), "free");
}

#[test]
fn killed_or_stopped_it_is_like_any_holder() {
    let tools = Tools::new();
    tools.claim("job --ttl 10m");
    let holder = tools.holder("job");
    crate::tools::signal(holder, nix::sys::signal::Signal::SIGKILL);
    tools.wait_free("job", holder);
    assert_eq!(tools.history("job")[0]["reason"], "killed by signal 9");
    assert_refused(&tools.elsewhere("leasefs renew job --epoch 1"), 75, &["job: epoch 1 does not hold it: it is free"]);

    let process = std::process::id();
    assert_eq!(tools.claim(&format!("job --for {process}")), 2);
    let holder = tools.holder("job");
    stop(holder);
    tools.mount.shorten("job");
    tools.mount.wait_status("job", "expired", |status| status["outcome"] == "expired");
    assert_eq!(tools.claim("job"), 3, "the key is free for others");
    crate::tools::signal(holder, nix::sys::signal::Signal::SIGCONT);
    wait_for("its end", || has_ended(holder));
    assert_eq!((tools.mount.state_of("job"), tools.mount.status("job")["epoch"].as_u64()), ("held".into(), Some(3)));
}

/// Whether a process has ended, or is in a call that only lets time pass.
fn is_waiting_or_over(pid: i32) -> bool {
    let call = fs::read_to_string(format!("/proc/{pid}/syscall")).unwrap_or_default();
    let number = call.split(' ').next().and_then(|number| number.parse().ok());
    has_ended(pid) || matches!(number, Some(libc::SYS_clock_nanosleep | libc::SYS_nanosleep))
}

/// The same agent, claiming twice at once: what the first was not told yet may still be given back.
#[test]
fn nobody_is_told_of_an_attempt_before_the_one_who_claimed_it() {
    let tools = Tools::new();
    let claim = |key: &str| {
        let mut command = tools.command(&["leasefs", "claim", key, "--agent", "planner"]);
        Background(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("leasefs runs"))
    };
    let signal = crate::tools::signal;
    for round in 0..100 {
        let key = format!("job{round}");
        let mut first = claim(&key);
        tools.mount.wait_status(&key, "held", |status| status["state"] == "held");
        let holder = tools.holder(&key);
        stop(holder);
        let arguments = fs::read_to_string(format!("/proc/{holder}/cmdline")).expect("it is there");
        if arguments.contains("--epoch=") || arguments.is_empty() {
            // It was faster, and may have told.
            signal(holder, Signal::SIGCONT);
            first.wait();
            continue;
        }
        let mut second = claim(&key);
        wait_for("the second claim's look", || is_waiting_or_over(second.pid()));
        let was_told = second.0.try_wait().expect("wait").is_some();
        signal(first.pid(), Signal::SIGKILL);
        first.wait();
        signal(holder, Signal::SIGCONT);
        assert!(!was_told, "{:?}", read_in_time(second.0.stdout.take()));
        assert!(second.wait().success(), "{:?}", read_in_time(second.0.stderr.take()));
        let told = read_in_time(second.0.stdout.take());
        assert_eq!(told.lines().next(), Some("2"), "the first attempt was given back");
        assert_eq!(tools.mount.state_of(&key), "held");
        return;
    }
    panic!("no holder process was stopped before it had executed itself anew");
}
