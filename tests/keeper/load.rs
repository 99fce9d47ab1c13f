//! Servers killed one after the other under callers that do not pause.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::common::{Mount, wait_for};

/// Looks at names and attributes until it is told to end, and says how often, and which errors it got.
const LOOKER: &str = r#"
import collections, os, sys, threading
root, errors, calls = sys.argv[1], collections.Counter(), 0
ended = threading.Event()
def until_told():
    sys.stdin.read()
    ended.set()
threading.Thread(target=until_told, daemon=True).start()
while not ended.is_set():
    for name in ("claims", "status/none", "results", ".leasefs/config", "claims/none"):
        calls += 1
        try:
            os.stat(os.path.join(root, name))
        except OSError as error:
            if name.endswith("none") and error.errno == 2:
                continue
            errors[os.strerror(error.errno)] += 1
print(calls, dict(errors))
"#;

struct Looker(Child);

impl Looker {
    fn new(mount: &Mount) -> Looker {
        let mut command = Command::new("python3");
        command.args(["-c", LOOKER]).arg(mount.root());
        Looker(command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("python3"))
    }

    /// Its calls, and the errors it got.
    fn end(mut self) -> (u64, String) {
        drop(self.0.stdin.take());
        let mut said = None;
        wait_for("a caller to end: it hangs", || {
            said = said.or_else(|| self.0.try_wait().expect("wait"));
            said.is_some()
        });
        let mut out = String::new();
        self.0.stdout.as_mut().expect("stdout").read_to_string(&mut out).expect("text");
        let (calls, errors) = out.trim().split_once(' ').expect("two words");
        (calls.parse().expect("a number"), errors.to_owned())
    }
}

impl Drop for Looker {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Kills so many servers, each at a random moment, and gives what the callers saw.
fn kill_under_load(options: &[&str], kills: usize) -> Vec<(u64, String)> {
    let mut mount = Mount::with(options);
    let lookers: Vec<Looker> = (0..4).map(|_| Looker::new(&mount)).collect();
    let mut last = 0;
    for _ in 0..kills {
        let mut next = None;
        wait_for("the next server", || {
            next = mount.server_pid().filter(|pid| *pid != last);
            next.is_some()
        });
        last = next.expect("a server");
        // A moment of no particular length, so that it is hit at work.
        std::thread::sleep(Duration::from_micros(rand::random_range(0..20_000)));
        kill(Pid::from_raw(last), Signal::SIGKILL).expect("the server");
    }
    let seen = lookers.into_iter().map(Looker::end).collect();
    mount.unmount();
    seen
}

#[test]
fn nobody_notices() {
    for (calls, errors) in kill_under_load(&[], 60) {
        assert!(calls > 100, "{calls}");
        assert_eq!(errors, "{}", "in {calls} calls");
    }
}

#[test]
fn without_resend_they_see_eintr_and_nothing_else() {
    let seen = kill_under_load(&["--no-resend"], 60);
    for (calls, errors) in &seen {
        assert!(*calls > 100, "{calls}");
        let others = errors.replace("Interrupted system call", "");
        assert!(others.matches('\'').count() <= 2, "{errors} in {calls} calls");
    }
    assert!(seen.iter().any(|(_, errors)| errors.contains("Interrupted")), "a call was cut off: {seen:?}");
}
