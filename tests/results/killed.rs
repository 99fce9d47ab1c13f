//! A writer killed by a signal publishes nothing; one that ends in any other way publishes what it wrote.

use std::fs;

use nix::errno::Errno;
use nix::sys::signal::Signal;
use serde_json::json;

use crate::common::agent::{Agent, Script, has_ended};
use crate::common::{Mount, wait_for};

#[test]
fn a_killed_writer_commits_nothing_and_the_attempt_can_still_be_reported() {
    let mount = Mount::new();
    for signal in [Signal::SIGKILL, Signal::SIGTERM, Signal::SIGSEGV, Signal::SIGINT, Signal::SIGABRT] {
        let key = signal.to_string();
        let path = mount.result(&key, 1);
        let (worker, parent) = (Agent::new(), Agent::new());
        worker.create(&mount.claim(&key)).expect("free key");
        let draft = worker.handle(&path);
        worker.write(draft, "half of it, and then").expect("registered attempt");
        worker.end_by(signal);
        assert!(!path.exists(), "{signal}: a half-written result was published");
        let status = mount.status(&key);
        assert_eq!(status["state"], "free", "{signal}: nothing holds it any more");
        assert_eq!(status["outcome"], "released", "{signal}");
        // It is still the registered attempt: who looks after the worker may record how it ended.
        let draft = parent.handle(&path);
        parent.write(draft, "killed").expect("registered attempt");
        parent.close(draft);
        assert_eq!(fs::read_to_string(&path).expect("committed"), "killed");
    }
    mount.verify();
}

#[test]
fn a_program_killed_by_itself_commits_nothing() {
    let mount = Mount::new();
    for number in [libc::SIGKILL, libc::SIGSEGV, libc::SIGABRT] {
        let key = format!("k{number}");
        let worker = Agent::new();
        worker.create(&mount.claim(&key)).expect("free key");
        let draft = worker.handle(&mount.result(&key, 1));
        worker.write(draft, "half").expect("registered attempt");
        worker.begin("die", json!([number]));
        worker.wait_end();
        assert!(!mount.result(&key, 1).exists(), "signal {number}");
    }
}

#[test]
fn a_writer_that_exits_without_closing_commits() {
    let mount = Mount::new();
    let worker = Agent::new();
    worker.create(&mount.claim("k")).expect("free key");
    let draft = worker.handle(&mount.result("k", 1));
    worker.write(draft, "all of it").expect("registered attempt");
    worker.exit();
    assert_eq!(fs::read_to_string(mount.result("k", 1)).expect("committed"), "all of it");
    assert_eq!(mount.state_of("k"), "finished");
}

#[test]
fn a_program_with_many_threads_that_exits_commits() {
    let mount = Mount::new();
    // exit(3) kills the other threads, and any of them may be the one that closes the files.
    for round in 0..25 {
        let key = format!("k{round}");
        let worker = Agent::new();
        worker.create(&mount.claim(&key)).expect("free key");
        let draft = worker.handle(&mount.result(&key, 1));
        worker.write(draft, "all of it").expect("registered attempt");
        worker.begin("threaded_exit", json!([8, round % 2]));
        worker.wait_end();
        assert_eq!(fs::read_to_string(mount.result(&key, 1)).ok().as_deref(), Some("all of it"), "round {round}");
    }
}

#[test]
fn a_program_with_many_threads_that_is_killed_commits_nothing() {
    let mount = Mount::new();
    for (round, signal) in [Signal::SIGKILL, Signal::SIGTERM, Signal::SIGSEGV].into_iter().cycle().take(12).enumerate()
    {
        let key = format!("k{round}");
        let worker = Agent::new();
        worker.create(&mount.claim(&key)).expect("free key");
        let draft = worker.handle(&mount.result(&key, 1));
        worker.write(draft, "half").expect("registered attempt");
        worker
            .script("for _ in range(6): threading.Thread(target=spin, args=(3600,), daemon=True).start()", json!({}))
            .expect("threads");
        worker.end_by(signal);
        assert!(!mount.result(&key, 1).exists(), "round {round}, {signal}");
    }
}

#[test]
fn a_copy_in_the_parent_does_not_publish_what_a_killed_child_wrote() {
    let mount = Mount::new();
    let path = mount.result("k", 1);
    let parent = Agent::new();
    let fd = parent.create(&mount.claim("k")).expect("free key");
    let draft = parent.handle(&path);
    let child = parent.fork();
    child.write(draft, "half of it").expect("registered attempt");
    child.kill();
    assert!(!path.exists());
    parent.close(draft);
    assert!(!path.exists(), "the parent's close is not the killed writer's commit");
    // The parent can say what happened, by a draft of its own.
    let draft = parent.handle(&path);
    parent.write(draft, "the child was killed").expect("registered attempt");
    parent.close(draft);
    assert_eq!(fs::read_to_string(&path).expect("committed"), "the child was killed");
    parent.close(fd);
}

#[test]
fn a_killed_helper_that_only_inherited_the_descriptor_does_no_harm() {
    let mount = Mount::new();
    let path = mount.result("k", 1);
    let parent = Agent::new();
    let fd = parent.create(&mount.claim("k")).expect("free key");
    let draft = parent.handle(&path);
    let helper = parent.fork();
    parent.write(draft, "all of ").expect("registered attempt");
    helper.kill();
    parent.write(draft, "it").expect("registered attempt");
    parent.close(draft);
    assert_eq!(fs::read_to_string(&path).expect("the writer was not killed"), "all of it");
    parent.close(fd);
}

#[test]
fn a_command_killed_while_a_shell_redirects_it_publishes_nothing() {
    let mount = Mount::new();
    let mut worker = Agent::new();
    worker.create(&mount.claim("k")).expect("free key");
    // It tells its pid when it has written.
    let mut script = Script::start(
        &mount,
        "perl -e '$| = 1; print \"half\\n\"; print STDERR \"$$\\n\"; sleep 1000' 2>$M/../pid >$M/results/k/1; echo $?",
    );
    let pid_file = mount.root().parent().expect("its directory").join("pid");
    let told = || fs::read_to_string(&pid_file).ok().filter(|text| text.ends_with('\n'));
    wait_for("the command's pid", || told().is_some());
    let pid: i32 = told().expect("it was there").trim().parse().expect("a pid");
    assert_eq!(mount.state_of("k"), "held");
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), Signal::SIGKILL).expect("it sleeps");
    assert_eq!(script.line().as_deref(), Some("137"));
    assert!(script.wait().success());
    assert!(has_ended(pid));
    assert!(!mount.result("k", 1).exists());
    worker.kill();
    worker = Agent::new();
    let fd = worker.create(&mount.claim("k")).expect("free again");
    assert_eq!(worker.epoch(fd), Ok(2));
    assert_eq!(worker.open(&mount.result("k", 1), libc::O_WRONLY | libc::O_CREAT), Err(Errno::ESTALE));
}

#[test]
fn what_a_killed_writer_had_synced_stays() {
    let mount = Mount::new();
    let worker = Agent::new();
    worker.create(&mount.claim("k")).expect("free key");
    let draft = worker.handle(&mount.result("k", 1));
    worker.write(draft, "synced").expect("registered attempt");
    assert_eq!(worker.fsync(draft), Ok(()));
    worker.kill();
    assert_eq!(fs::read_to_string(mount.result("k", 1)).expect("committed"), "synced");
    assert_eq!(mount.state_of("k"), "finished");
}

#[test]
fn a_program_started_while_a_draft_is_open_stops_nobody() {
    let mount = Mount::new();
    let path = mount.result("k", 1);
    let parent = Agent::new();
    let fd = parent.create(&mount.claim("k")).expect("free key");
    let draft = parent.handle(&path);
    parent.write(draft, "all of it").expect("registered attempt");
    // execve(2) closes the close-on-exec copy, and until that is answered nobody can look at the process in /proc.
    for _ in 0..20 {
        let child = parent.fork();
        child.begin("execvp", json!(["true", ["true"]]));
        child.wait_end();
    }
    assert!(!path.exists(), "the parent has it open");
    let child = parent.fork();
    child.write(draft, ", or more").expect("registered attempt");
    child.begin("execvp", json!(["true", ["true"]]));
    child.wait_end();
    assert!(!path.exists(), "the parent has it open");
    parent.close(draft);
    assert_eq!(fs::read_to_string(&path).expect("committed"), "all of it, or more");
    parent.close(fd);
}

#[test]
fn a_writer_killed_while_it_opens_its_result_commits_nothing() {
    let mount = Mount::new();
    let agent = Agent::new();
    // Killed a little later in each round: before the call, in the middle of it, after it.
    let source = "
result = []
for round in range(150):
    key = f'k{round}'
    holder = os.open(f'{root}/claims/{key}', os.O_RDWR | os.O_CREAT | os.O_EXCL)
    started, start = os.pipe()
    writer = os.fork()
    if writer == 0:
        os.close(holder)
        os.write(start, b'x')
        os.open(f'{root}/results/{key}/1', os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        time.sleep(60)
    os.read(started, 1)
    spin(round * 10e-6)
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    if os.path.exists(f'{root}/results/{key}/1'): result.append(round)
    for fd in (holder, started, start): os.close(fd)";
    let published = agent.script(source, json!({ "root": mount.root() }));
    assert_eq!(published, Ok(json!([])), "rounds in which an empty result was published");
    assert_eq!(mount.state_of("k149"), "free");
}

#[test]
fn a_killed_opener_publishes_nothing_of_what_its_children_wrote() {
    let mount = Mount::new();
    // What the shell leaves behind has copies of both handles until it is told to end, which it does in good order.
    let mut script = Script::start(
        &mount,
        "set -C; exec 9>$M/claims/k; exec 8>$M/results/k/1; sh -c 'echo part 1' >&8; (read -r _) <&0 & echo written; wait",
    );
    assert_eq!(script.line().as_deref(), Some("written"));
    script.signal(Signal::SIGKILL);
    wait_for("the end of the shell", || has_ended(script.pid()));
    assert_eq!(mount.state_of("k"), "held", "by the copies");
    assert!(!mount.result("k", 1).exists(), "half a result is none");
    script.say("go");
    mount.wait_status("k", "free with the last copy", |status| status["state"] == "free");
    assert!(!mount.result("k", 1).exists(), "half a result is none, whoever closes it last");
}
