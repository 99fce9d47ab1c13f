//! `leasefs complete`: the whole result of that attempt, or nothing.

use std::fs;

use crate::common::{assert_ok, wait_for};
use crate::tools::{Tools, assert_refused, signal};

use nix::sys::signal::Signal;

#[test]
fn only_the_attempt_itself_has_a_result() {
    let tools = Tools::new();
    tools.claim("job --agent planner");
    assert_refused(&tools.elsewhere("echo x | leasefs complete job --epoch 2"), 2, &["never an epoch 2"]);
    assert_refused(&tools.elsewhere("echo x | leasefs complete nothing --epoch 1"), 2, &["nothing", "epoch 1"]);
    assert_ok(&tools.elsewhere("leasefs complete job --epoch 1 </dev/null"));
    assert_eq!(fs::read(tools.mount.result("job", 1)).expect("an empty result counts"), b"");
    let second = tools.elsewhere("echo late | leasefs complete job --epoch 1");
    assert_refused(&second, 75, &["job: epoch 1 has a result already", "results/job/1"]);
    assert_eq!(fs::read(tools.mount.result("job", 1)).expect("the first counts"), b"");
    assert_eq!(tools.history("job")[0]["outcome"], "completed");
    tools.mount.verify();
}

#[test]
fn an_old_attempt_stamps_nothing_on_a_newer_one() {
    let tools = Tools::new();
    tools.claim("job --agent planner");
    tools.mount.shorten("job");
    tools.mount.wait_status("job", "expired", |status| status["outcome"] == "expired");
    let expired = tools.elsewhere("echo old | leasefs complete job --epoch 1");
    assert_refused(&expired, 75, &["job: epoch 1 does not hold it: it is free", "nothing was recorded"]);
    assert_eq!(tools.claim("job --agent planner"), 2);
    let superseded = tools.elsewhere("echo old | leasefs complete job --epoch 1");
    assert_refused(&superseded, 75, &["job: epoch 1 does not hold it: epoch 2 is held by pid"]);
    assert!(!tools.mount.result("job", 1).exists() && !tools.mount.result("job", 2).exists());
    assert_eq!(tools.mount.state_of("job"), "held");
    assert_ok(&tools.elsewhere("echo new | leasefs complete job --epoch 2"));
    assert_eq!(fs::read_to_string(tools.mount.result("job", 2)).expect("a result"), "new\n");
}

#[test]
fn a_result_comes_after_the_release_too() {
    let tools = Tools::new();
    tools.claim("job");
    assert_ok(&tools.elsewhere("leasefs release job --epoch 1"));
    assert_ok(&tools.elsewhere("echo done | leasefs complete job --epoch 1"));
    assert_eq!(tools.mount.state_of("job"), "finished");
}

#[test]
fn what_is_too_large_is_not_recorded_at_all() {
    let mut tools = Tools::new();
    tools.mount.unmount();
    tools.mount.start(&["--max-result", "100000"]);
    tools.claim("job");
    let output = tools.elsewhere("head -c 100001 /dev/zero | leasefs complete job --epoch 1");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_refused(&output, 2, &["nothing was recorded", "more than 100000 bytes", "--max-result"]);
    assert!(!tools.mount.result("job", 1).exists(), "{said}");
    assert_eq!(tools.mount.state_of("job"), "held", "to be tried again");
    assert_ok(&tools.elsewhere("head -c 100000 /dev/zero | leasefs complete job --epoch 1"));
    assert_eq!(fs::metadata(tools.mount.result("job", 1)).expect("a result").len(), 100_000);
}

#[test]
fn what_is_interrupted_or_cannot_be_read_is_not_recorded() {
    let tools = Tools::new();
    tools.claim("job");
    assert_refused(
        &tools.elsewhere("leasefs complete job --epoch 1 </"),
        2,
        &["nothing was recorded", "standard input"],
    );
    let fifo = tools.mount.scratch().join("fifo");
    assert_ok(&tools.step(&format!("mkfifo {}", fifo.display())));
    for kind in [Signal::SIGTERM, Signal::SIGKILL, Signal::SIGINT] {
        let mut complete = tools.command(&["leasefs", "complete", "job", "--epoch", "1"]);
        // Both ends: it opens at once, and has no end.
        let both = fs::OpenOptions::new().read(true).write(true).open(&fifo).expect("fifo");
        std::io::Write::write_all(&mut &both, b"half").expect("room in the pipe");
        let child = complete.stdin(both.try_clone().expect("copy")).spawn().expect("leasefs runs");
        let mut complete = crate::common::Background(child);
        let pid = complete.pid();
        // It has read what there is, and sleeps.
        wait_for("it has read", || {
            use std::os::fd::AsRawFd;
            let mut left: libc::c_int = 0;
            // SAFETY: FIONREAD stores one integer where it is told to.
            let asked = unsafe { libc::ioctl(both.as_raw_fd(), libc::FIONREAD, &raw mut left) };
            asked == 0 && left == 0
        });
        signal(pid, kind);
        assert!(!complete.wait().success());
        assert!(!tools.mount.result("job", 1).exists(), "{kind}");
        assert_eq!(tools.mount.state_of("job"), "held");
    }
    assert_ok(&tools.elsewhere("echo whole | leasefs complete job --epoch 1"));
}

#[test]
fn a_draft_that_was_refused_is_not_published_by_its_close() {
    // What `leasefs complete` does where fsync fails, so that its answer stays true.
    let tools = Tools::new();
    tools.claim("job");
    let script = "python3 - <<'END'
import errno, os
fd = os.open(os.environ['M'] + '/results/job/1', os.O_WRONLY | os.O_CREAT)
os.write(fd, b'refused')
try:
    os.pwrite(fd, b'-', 1 << 62)
except OSError as error:
    print(errno.errorcode[error.errno])
os.close(fd)
END";
    let output = tools.step(script);
    assert_ok(&output);
    assert_eq!(crate::common::stdout(&output), "EFBIG\n");
    assert_ok(&tools.step("leasefs release job --epoch 1"));
    assert!(!tools.mount.result("job", 1).exists());
    assert_eq!(tools.mount.state_of("job"), "free");
}
