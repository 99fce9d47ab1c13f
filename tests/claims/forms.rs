//! Each way to claim against each other way, from shell, Python and Perl.

use std::path::PathBuf;

use libc::{F_OFD_SETLK, F_SETLK, F_WRLCK, LOCK_EX, LOCK_NB};
use nix::errno::Errno;

use crate::common::agent::{Agent, Fd, Script};
use crate::common::{Mount, assert_ok, stdout, wait_for};

/// A way to claim that does not wait.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Form {
    BashCreate,
    DashCreate,
    BashLock,
    Subshell,
    FlockCommand,
    FlockTimeout,
    PerlCreate,
    PerlLock,
    Create,
    Flock,
    Lockf,
    Posix,
    Ofd,
}

const FORMS: [Form; 13] = [
    Form::BashCreate,
    Form::DashCreate,
    Form::BashLock,
    Form::Subshell,
    Form::FlockCommand,
    Form::FlockTimeout,
    Form::PerlCreate,
    Form::PerlLock,
    Form::Create,
    Form::Flock,
    Form::Lockf,
    Form::Posix,
    Form::Ofd,
];

/// A live lease: the process that has it, and the descriptor where the test knows it.
enum Holder {
    Script(Script),
    Agent(Agent, Fd),
}

impl Holder {
    /// Lets it exit.
    fn end(self) {
        match self {
            Holder::Script(script) => assert!(script.finish().success(), "the holder ends well"),
            Holder::Agent(agent, fd) => agent.close(fd),
        }
    }
}

/// Claims without waiting; what refused it otherwise.
fn claim(mount: &Mount, key: &str, form: Form) -> Result<Holder, String> {
    let path = mount.claim(key);
    let script = |text: &str, shell: &str| {
        let script = Script::start_with(mount, &[shell, "-c", &text.replace("KEY", path.to_str().expect("UTF-8"))]);
        match script.line() {
            Some(line) if line == "held" => Ok(Holder::Script(script)),
            Some(line) => Err(line),
            None => Err(format!("exit {}", script.finish().code().expect("an exit code"))),
        }
    };
    let agent = |claim: &dyn Fn(&Agent, &PathBuf) -> Result<Fd, Errno>| {
        let agent = Agent::new();
        match claim(&agent, &path) {
            Ok(fd) => Ok(Holder::Agent(agent, fd)),
            Err(errno) => Err(format!("{errno:?}")),
        }
    };
    match form {
        Form::BashCreate => {
            script("set -C; { exec 9>KEY; } 2>/dev/null || exit 17; echo held; read -r _; exit 0", "bash")
        }
        Form::DashCreate => script("(set -C; exec 9>KEY; echo held; read -r _; exit 0) 2>/dev/null", "sh"),
        Form::BashLock => script("exec 9>KEY; flock -n 9 || exit; echo held; read -r _; exit 0", "bash"),
        Form::Subshell => script("( flock -n -E 33 9 || exit; echo held; read -r _; exit 0 ) 9>KEY", "bash"),
        Form::FlockCommand => script("exec flock -n -E 33 KEY bash -c 'echo held; read -r _; exit 0'", "bash"),
        Form::FlockTimeout => script("exec flock -w 0.2 -E 33 KEY bash -c 'echo held; read -r _; exit 0'", "bash"),
        Form::PerlCreate => script(
            "exec perl -e 'use Fcntl; $| = 1; sysopen(F, \"KEY\", O_RDWR|O_CREAT|O_EXCL) or exit $!+0; print \"held\\n\"; <STDIN>'",
            "bash",
        ),
        Form::PerlLock => script(
            "exec perl -e 'use Fcntl qw(:flock); $| = 1; open(F, \">>\", \"KEY\") or exit 99; \
             flock(F, LOCK_EX|LOCK_NB) or exit $!+0; print \"held\\n\"; <STDIN>'",
            "bash",
        ),
        Form::Create => agent(&|agent, path| agent.create(path)),
        Form::Flock => agent(&|agent, path| {
            let fd = agent.handle(path);
            agent.flock(fd, LOCK_EX | LOCK_NB).map(|()| fd)
        }),
        Form::Lockf => agent(&|agent, path| {
            let fd = agent.handle(path);
            agent.call("lockf", serde_json::json!([fd, LOCK_EX | LOCK_NB])).map(|_| fd)
        }),
        Form::Posix => agent(&|agent, path| {
            let fd = agent.handle(path);
            agent.lock(fd, F_SETLK, F_WRLCK).map(|_| fd)
        }),
        Form::Ofd => agent(&|agent, path| {
            let fd = agent.handle(path);
            agent.lock(fd, F_OFD_SETLK, F_WRLCK).map(|_| fd)
        }),
    }
}

/// How each form says that the key is held.
fn refusal(form: Form) -> &'static str {
    match form {
        Form::BashCreate | Form::PerlCreate => "exit 17",
        Form::DashCreate => "exit 2",
        Form::BashLock => "exit 1",
        Form::Subshell | Form::FlockCommand | Form::FlockTimeout => "exit 33",
        Form::PerlLock => "exit 11",
        Form::Create => "EEXIST",
        Form::Flock | Form::Lockf | Form::Posix | Form::Ofd => "EAGAIN",
    }
}

#[test]
fn every_form_excludes_every_other_and_a_denial_takes_no_epoch() {
    let mount = Mount::new();
    for (number, first) in FORMS.into_iter().enumerate() {
        let key = format!("key{number}");
        for (round, second) in FORMS.into_iter().enumerate() {
            let epoch = 2 * round as u64 + 1;
            let holder = claim(&mount, &key, first).unwrap_or_else(|e| panic!("{first:?} on a free key: {e}"));
            let status = mount.status(&key);
            assert_eq!((status["state"].as_str(), status["epoch"].as_u64()), (Some("held"), Some(epoch)), "{first:?}");
            match claim(&mount, &key, second) {
                Ok(_) => panic!("{second:?} was granted while {first:?} held the key"),
                Err(said) => assert_eq!(said, refusal(second), "{second:?} against {first:?}"),
            }
            assert_eq!(mount.status(&key)["epoch"], epoch, "a denial took an epoch");
            holder.end();
            let holder =
                claim(&mount, &key, second).unwrap_or_else(|e| panic!("{second:?} after {first:?} ended: {e}"));
            assert_eq!(mount.status(&key)["epoch"], epoch + 1, "{second:?} after {first:?}");
            holder.end();
            assert!(!mount.claim(&key).exists(), "a free key has no file");
        }
    }
    mount.verify();
}

#[test]
fn status_says_by_which_form_the_lease_was_taken() {
    let mount = Mount::new();
    for (number, form) in FORMS.into_iter().enumerate() {
        let key = format!("key{number}");
        let _holder = claim(&mount, &key, form).expect("free key");
        let via = match form {
            Form::BashCreate | Form::DashCreate | Form::PerlCreate | Form::Create => "create",
            _ => "lock",
        };
        assert_eq!(mount.status(&key)["via"], via, "{form:?}");
    }
}

#[test]
fn the_epoch_is_read_from_ones_own_handle_in_a_shell() {
    let mount = Mount::new();
    for epoch in 1..=3 {
        let output = mount.bash("exec 9<>$M/claims/build; flock -n 9 && read -r epoch <&9 && echo $epoch");
        assert_ok(&output);
        assert_eq!(stdout(&output), format!("{epoch}\n"));
    }
}

#[test]
fn the_subshell_recipe_runs_one_at_a_time() {
    let mount = Mount::new();
    let scratch = mount.scratch();
    // Each adds one to a counter that is lost when two of them overlap.
    let add = format!(
        "for i in $(seq 25); do ( flock 9; read -r n <{0}/n; echo $((n + 1)) >{0}/n ) 9>$M/claims/counter; done",
        scratch.display()
    );
    std::fs::write(scratch.join("n"), "0\n").expect("counter");
    let mut adders: Vec<Script> = (0..4).map(|_| Script::start(&mount, &add)).collect();
    for adder in &mut adders {
        assert!(adder.wait().success());
    }
    assert_eq!(std::fs::read_to_string(scratch.join("n")).expect("counter"), "100\n");
    assert_eq!(mount.status("counter")["epoch"], 100);
}

#[test]
fn flock_u_gives_the_key_back_before_the_shell_ends() {
    let mount = Mount::new();
    let mut script = Script::start(
        &mount,
        "exec 9<>$M/claims/k; flock 9; echo held; read -r _; flock -u 9; echo free; read -r _; exit 0",
    );
    assert_eq!(script.line().as_deref(), Some("held"));
    assert_eq!(mount.bash("flock -n $M/claims/k true").status.code(), Some(1));
    script.say("");
    assert_eq!(script.line().as_deref(), Some("free"));
    assert_eq!(mount.state_of("k"), "free");
    assert_ok(&mount.bash("flock -n $M/claims/k true"));
}

#[test]
fn a_key_handed_to_a_waiter_is_never_free_in_between() {
    let mount = Mount::new();
    let path = mount.claim("k");
    let (mut holder, mut waiter, intruder) = (Agent::new(), Agent::new(), Agent::new());
    let mut held = holder.create(&path).expect("free key");
    for round in 1..=200 {
        let fd = waiter.handle(&path);
        waiter.begin_flock(fd, LOCK_EX);
        mount.wait_status("k", "one waiter", |status| crate::common::agent::count(status, "waiters") == 1);
        holder.close(held);
        assert_eq!(intruder.create(&path), Err(Errno::EEXIST), "round {round}: the key was promised to the waiter");
        waiter.answer().expect("the waiter is granted");
        assert_eq!(waiter.epoch(fd), Ok(round + 1));
        std::mem::swap(&mut holder, &mut waiter);
        held = fd;
    }
}

#[test]
fn of_many_shells_that_start_at_once_one_wins() {
    let mount = Mount::new();
    let gate = mount.scratch().join("gate");
    let script = format!(
        "until [ -e {} ]; do :; done; set -C; {{ exec 9>$M/claims/k; }} 2>/dev/null || exit 17; echo held; read -r _",
        gate.display()
    );
    let racers: Vec<Script> = (0..12).map(|_| Script::start(&mount, &script)).collect();
    std::fs::write(&gate, "").expect("gate");
    let winners = racers.iter().filter(|racer| racer.line().is_some()).count();
    assert_eq!(winners, 1);
    assert_eq!(mount.status("k")["epoch"], 1);
    drop(racers);
    wait_for("the winner's release", || mount.state_of("k") == "free");
}
