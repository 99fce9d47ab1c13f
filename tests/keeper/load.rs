//! Servers killed one after the other under callers that do not pause.

use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::common::{Mount, PATIENCE, end, read_in_time, wait_for};

/// Looks at names and attributes until it is told to end, and says how often, and which errors it got. It makes a file
/// once it has done much.
const LOOKER: &str = r#"
import collections, os, sys, threading
root, errors, calls = sys.argv[1], collections.Counter(), 0
ended = threading.Event()
def until_told():
    sys.stdin.read()
    ended.set()
threading.Thread(target=until_told, daemon=True).start()
while not ended.is_set():
    if calls == 200:
        open(sys.argv[2], "w").close()
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

/// Takes one of two keys, again and again, and says which epochs it was given of each, and which errors. It makes a file
/// once it has had some.
const LOCKER: &str = r#"
import collections, fcntl, os, sys, threading
root, errors, epochs = sys.argv[1], collections.Counter(), []
ended = threading.Event()
def until_told():
    sys.stdin.read()
    ended.set()
threading.Thread(target=until_told, daemon=True).start()
turn = 0
while not ended.is_set():
    if len(epochs) == 5:
        open(sys.argv[2], "w").close()
    turn += 1
    try:
        key = "ab"[turn % 2]
        fd = os.open(os.path.join(root, "claims", key), os.O_RDWR | os.O_CREAT)
        fcntl.flock(fd, fcntl.LOCK_EX)
        epochs.append(key + os.read(fd, 4096).split()[0].decode())
        os.close(fd)
    except OSError as error:
        errors[f"{error.errno} in turn {turn}"] += 1
        break
print(",".join(epochs) or "none", dict(errors))
"#;

struct Looker {
    child: Child,
    has_done_much: PathBuf,
}

impl Looker {
    fn new(mount: &Mount, script: &str, number: usize) -> Looker {
        let has_done_much = mount.scratch().join(format!("busy-{number}"));
        let mut command = Command::new("python3");
        command.args(["-c", script]).arg(mount.root()).arg(&has_done_much);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("python3");
        Looker { child, has_done_much }
    }

    fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("wait").is_some()
    }

    /// What it did, and the errors it got.
    fn end(mut self) -> (String, String) {
        drop(self.child.stdin.take());
        let mut said = None;
        wait_for("a caller to end: it hangs", || {
            said = said.or_else(|| self.child.try_wait().expect("wait"));
            said.is_some()
        });
        let out = read_in_time(self.child.stdout.take());
        let (calls, errors) = out.trim().split_once(' ').expect("two words");
        (calls.to_owned(), errors.to_owned())
    }
}

impl Drop for Looker {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

/// Kills so many servers, each at a random moment, and more until every caller has done much meanwhile; gives what the
/// callers saw.
fn kill_under_load(options: &[&str], script: &str, kills: usize) -> Vec<(String, String)> {
    let mut mount = Mount::with(options);
    let mut lookers: Vec<Looker> = (0..4).map(|number| Looker::new(&mount, script, number)).collect();
    let (mut last, until) = (0, Instant::now() + PATIENCE);
    for kill_number in 0.. {
        let are_done = lookers.iter_mut().all(|looker| looker.has_done_much.exists() || looker.has_ended());
        if kill_number >= kills && (are_done || Instant::now() > until) {
            break;
        }
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
    mount.verify();
    seen
}

#[test]
fn nobody_notices() {
    for (calls, errors) in kill_under_load(&[], LOOKER, 60) {
        assert!(calls.parse::<u64>().expect("a number") > 100, "{calls}");
        assert_eq!(errors, "{}", "in {calls} calls");
    }
}

#[test]
fn without_resend_they_see_eintr_and_nothing_else() {
    let seen = kill_under_load(&["--no-resend"], LOOKER, 60);
    for (calls, errors) in &seen {
        assert!(calls.parse::<u64>().expect("a number") > 100, "{calls}");
        let others = errors.replace("Interrupted system call", "");
        assert!(others.matches('\'').count() <= 2, "{errors} in {calls} calls");
    }
}

#[test]
fn every_epoch_is_given_once() {
    for options in [&[][..], &["--no-resend"]] {
        let mut epochs = Vec::new();
        for (given, errors) in kill_under_load(options, LOCKER, 60) {
            assert_eq!(errors, "{}", "{options:?}");
            let given =
                given.split(',').map(|epoch| (epoch[..1].to_owned(), epoch[1..].parse::<u64>().expect("epoch")));
            epochs.extend(given);
        }
        epochs.sort_unstable();
        for key in ["a", "b"] {
            let of_key: Vec<u64> = epochs.iter().filter(|(of, _)| of == key).map(|(_, epoch)| *epoch).collect();
            let each: Vec<u64> = (1..=of_key.len() as u64).collect();
            assert_eq!(of_key, each, "{options:?}, {key}");
        }
    }
}
