//! With a terminal: the command stays in the shell's job, so Ctrl-C, Ctrl-Z, `fg` and reading from it work.

use std::fs;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::common::agent::{Script, Stray, has_ended};
use crate::common::luck::{in_peace, shown};
use crate::common::{LEASEFS, Mount, PATIENCE, Stopped, wait_for};
use crate::{is_stopped, lines};

/// An interactive shell in a terminal of its own. The test types what it says.
struct Terminal {
    keyboard: Script,
    dir: PathBuf,
}

impl Terminal {
    fn open(mount: &Mount) -> Terminal {
        // What is typed comes in lines of hex; what the terminal shows goes to a file.
        const PYTHON: &str = "
import os, pty, sys, threading
pid, terminal = pty.fork()
if pid == 0:
    os.execvp('bash', ['bash', '--norc', '--noprofile', '-i'])
def show():
    with open(sys.argv[1] + '/shown', 'wb', buffering=0) as shown:
        while True:
            try: shown.write(os.read(terminal, 4096))
            except OSError: return
threading.Thread(target=show, daemon=True).start()
print('open', flush=True)
for line in sys.stdin:
    os.write(terminal, bytes.fromhex(line.strip()))
os.kill(pid, 9)
";
        let dir = mount.scratch();
        let keyboard = Script::start_with(mount, &["python3", "-c", PYTHON, dir.to_str().expect("path")]);
        assert_eq!(keyboard.line().as_deref(), Some("open"));
        let terminal = Terminal { keyboard, dir };
        // What is typed before the shell has set its terminal up may never get to it.
        wait_for("the shell's prompt", || ["# ", "$ "].iter().any(|prompt| terminal.shown().contains(prompt)));
        terminal
    }

    fn type_in(&mut self, text: &str) {
        let hex: String = text.bytes().map(|byte| format!("{byte:02x}")).collect();
        self.keyboard.say(&hex);
    }

    fn shown(&self) -> String {
        String::from_utf8_lossy(&fs::read(self.dir.join("shown")).unwrap_or_default()).into_owned()
    }

    fn wait_file(&self, name: &str) -> String {
        let path = self.dir.join(name);
        let until = Instant::now() + PATIENCE;
        while !fs::read_to_string(&path).is_ok_and(|text| text.ends_with('\n')) {
            assert!(Instant::now() < until, "never came about: {name}; the terminal shows {:?}", self.shown());
            std::thread::sleep(Duration::from_millis(2));
        }
        fs::read_to_string(path).expect("there").trim().to_owned()
    }
}

/// A command that counts the signals it gets and ends by the second INT; the runner's pid is its guard's parent.
fn start(terminal: &mut Terminal) -> (i32, i32, i32) {
    let dir = terminal.dir.display().to_string();
    let script = format!(
        "n=0; trap 'echo int >>{dir}/ints; n=$((n+1)); [ $n -lt 2 ] || exit 7' INT; \
         trap 'echo cont >>{dir}/conts' CONT; echo $$ >{dir}/pid; while :; do sleep 0.02; done"
    );
    fs::write(terminal.dir.join("command"), script).expect("script");
    terminal.type_in(&format!("{LEASEFS} run job -- bash {dir}/command; echo code=$? >{dir}/code\n"));
    let command: i32 = terminal.wait_file("pid").parse().expect("a pid");
    let parent = |pid: i32| {
        let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("alive");
        status.lines().find_map(|line| line.strip_prefix("PPid:\t")).and_then(|pid| pid.parse().ok()).expect("PPid")
    };
    let guard: i32 = parent(command);
    (parent(guard), guard, command)
}

#[test]
fn ctrl_c_reaches_the_command_once() {
    let mount = Mount::new();
    let mut terminal = Terminal::open(&mount);
    let (runner, _, command) = start(&mut terminal);
    terminal.type_in("\x03");
    wait_for("the first interrupt", || lines(&terminal.dir.join("ints")) == 1);
    assert_eq!(mount.state_of("job"), "held");
    assert!(!has_ended(runner) && !has_ended(command), "it chose to go on");
    terminal.type_in("\x03");
    assert_eq!(terminal.wait_file("code"), "code=7");
    // Passed on as well as sent by the terminal, they would be more.
    assert_eq!(lines(&terminal.dir.join("ints")), 2);
    assert_eq!(mount.state_of("job"), "free");
}

#[test]
fn ctrl_z_stops_all_but_the_guard_and_fg_goes_on() {
    let mount = Mount::new();
    let mut terminal = Terminal::open(&mount);
    let (runner, guard, command) = start(&mut terminal);
    for round in 1..=2 {
        terminal.type_in("\x1a");
        wait_for("runner and command are stopped", || is_stopped(runner) && is_stopped(command));
        assert!(!is_stopped(guard));
        assert_eq!(mount.state_of("job"), "held");
        terminal.type_in(&format!("echo back-{round} >{}/shell-{round}\n", terminal.dir.display()));
        terminal.wait_file(&format!("shell-{round}"));
        terminal.type_in("fg\n");
        wait_for("both go on", || !is_stopped(runner) && !is_stopped(command));
    }
    // `code` of the interrupted list is that of the stop; the job itself goes on to its end.
    terminal.type_in("\x03");
    wait_for("the first interrupt", || lines(&terminal.dir.join("ints")) == 1);
    terminal.type_in("\x03");
    wait_for("both have ended", || has_ended(runner) && has_ended(command) && has_ended(guard));
    mount.wait_status("job", "free", |status| status["state"] == "free");
}

#[test]
fn a_job_that_is_stopped_again_at_once_stays_stopped() {
    let mount = Mount::new();
    let mut terminal = Terminal::open(&mount);
    let (runner, guard, command) = start(&mut terminal);
    let both_are = |stopped| is_stopped(runner) == stopped && is_stopped(command) == stopped;
    terminal.type_in("\x1a");
    wait_for("runner and command are stopped", || both_are(true));
    // Whatever the guard is told comes late.
    let late = Stopped::these(&[guard]);
    terminal.type_in("fg\n");
    wait_for("both go on", || both_are(false));
    terminal.type_in("\x1a");
    wait_for("both are stopped again", || both_are(true));
    drop(late);
    let until = Instant::now() + Duration::from_millis(300);
    wait_for("the guard has heard everything", || {
        assert!(both_are(true), "one goes on");
        Instant::now() > until
    });
    terminal.type_in("fg\n");
    wait_for("both go on again", || both_are(false));
    [runner, command].into_iter().for_each(|pid| Stray(pid).kill());
    wait_for("the guard has ended", || has_ended(guard));
}

#[test]
fn a_job_stopped_past_its_ttl_is_dead_before_the_next_begins() {
    in_peace(Duration::from_secs(2), |time| {
        let mount = Mount::with(&["--ttl", &shown(time)]);
        let mut terminal = Terminal::open(&mount);
        let (runner, _, command) = start(&mut terminal);
        let next = crate::Next::in_line(&mount, "job", &[command]);
        terminal.type_in("\x1a");
        wait_for("the runner is stopped", || is_stopped(runner));
        assert_eq!(next.found_alive(), [0; 0]);
        assert_eq!(mount.status("job")["outcome"], "expired");
    });
}

#[test]
fn the_command_reads_from_the_terminal() {
    let mount = Mount::new();
    let mut terminal = Terminal::open(&mount);
    let dir = terminal.dir.display().to_string();
    // Also where its input is another: a question is asked and answered on the terminal itself.
    for (number, input) in ["", "</dev/null"].into_iter().enumerate() {
        let script =
            format!("echo asked >{dir}/asked-{number}; read -r word </dev/tty; echo $word >{dir}/word-{number}");
        terminal.type_in(&format!("{LEASEFS} run job -- bash -c '{script}' {input}\n"));
        terminal.wait_file(&format!("asked-{number}"));
        terminal.type_in("swordfish\n");
        assert_eq!(terminal.wait_file(&format!("word-{number}")), "swordfish");
    }
}

#[test]
fn a_wait_is_shown_in_one_line_that_goes_away() {
    in_peace(Duration::from_millis(3_500), shown_in_one_line);
}

fn shown_in_one_line(time: Duration) {
    let mount = Mount::new();
    let holder = crate::Run::script(&mount, &[], r#"echo $$ >>"$SEEN"; exec sleep 1000"#, 1);
    let mut terminal = Terminal::open(&mount);
    let (secs, dir) = (time.as_secs_f64(), terminal.dir.display());
    let typed = format!("{LEASEFS} run -w {secs} job -- true; echo code=$? >{dir}/code\n");
    terminal.type_in(&typed);
    assert_eq!(terminal.wait_file("code"), "code=1");
    wait_for("all is shown", || terminal.shown().contains("nothing was run"));
    let shown = terminal.shown();
    let updates: Vec<&str> = shown.split("\x1b[K").collect();
    let line = format!("\rjob: held by pid {} (leasefs), uid 0, for ", holder.runner.pid());
    let lines: Vec<usize> = (0..updates.len()).filter(|index| updates[*index].contains(&line)).collect();
    assert!(lines.len() >= 2, "kept up to date: {shown:?}");
    for index in &lines {
        assert!(updates[*index].ends_with(": waiting, 1st of 1 in line"), "{shown:?}");
    }
    assert!(updates[lines[1]].starts_with(&line), "in its place: {shown:?}");
    assert_eq!(updates[lines[lines.len() - 1] + 1], "\r", "cleared: {shown:?}");
}
