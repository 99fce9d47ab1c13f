//! Exit codes and options: what is refused, and how a run tells how its command ended.

use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::json;

use crate::Run;
use crate::common::agent::Agent;
use crate::common::luck::{in_peace, shown};
use crate::common::{Background, InTime, LEASEFS, Mount, Stopped, assert_ok, stdout, wait_for};

#[test]
fn the_exit_code_tells_how_the_command_ended() {
    let mount = Mount::new();
    let table: [(&[&str], i32); 10] = [
        (&["true"], 0),
        (&["false"], 1),
        (&["sh", "-c", "exit 75"], 75),
        (&["sh", "-c", "exit 255"], 255),
        (&["sh", "-c", "kill -HUP $$"], 129),
        (&["sh", "-c", "kill -KILL $$"], 137),
        (&["sh", "-c", "kill -SEGV $$"], 139),
        (&["bash", "-c", "kill -s SIGRTMIN $$"], 128 + 34),
        (&["/etc/passwd"], 126),
        (&["no-such-command"], 127),
    ];
    for (command, code) in table {
        let output = mount.leasefs(&[&["run", "job", "--"], command].concat());
        assert_eq!(output.status.code(), Some(code), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(mount.state_of("job"), "free", "{command:?}");
    }
}

#[test]
fn a_command_that_cannot_be_executed_after_all_is_told_as_such() {
    use std::os::unix::fs::PermissionsExt;
    let mount = Mount::new();
    // It passes every look: only the kernel knows that there is no such interpreter.
    let script = mount.scratch().join("script");
    // Not written by this process: a neighbour's child would have it open for writing until it executes its own program.
    assert_ok(&mount.command("sh").args(["-c", "echo '#!/no/such/interpreter' >\"$0\""]).arg(&script).output_in_time());
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).expect("chmod");
    let output = mount.leasefs(&["run", "job", "--", script.to_str().expect("path")]);
    assert_eq!(output.status.code(), Some(127));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.ends_with("script: command not found: check its name and PATH\n"), "{said}");
    assert_eq!(mount.state_of("job"), "free");
}

#[test]
fn the_kernels_reason_is_told_where_it_is_not_permissions() {
    use std::os::unix::fs::PermissionsExt;
    let mount = Mount::new();
    let script = mount.scratch().join("script");
    std::fs::write(&script, "#!/bin/sh\n").expect("script");
    std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755)).expect("chmod");
    // Nothing is executed that somebody is writing.
    let writing = std::fs::OpenOptions::new().append(true).open(&script).expect("script");
    let script = script.to_str().expect("path");
    for command in [&["run", "job", "--", script][..], &["claim", "job", "--handoff", "--", script]] {
        let output = mount.leasefs(command);
        assert_eq!(output.status.code(), Some(126));
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(said.ends_with("script: cannot be executed: Text file busy\n"), "{said}");
        assert_eq!(mount.state_of("job"), "free");
    }
    drop(writing);
}

#[test]
fn the_conflict_code_is_an_exit_code() {
    let mount = Mount::new();
    let run = Run::script(&mount, &[], r#"echo $$ >>"$SEEN"; exec sleep 1000"#, 1);
    for code in ["0", "1", "42", "255"] {
        let output = mount.leasefs(&["run", "-n", "-E", code, "job", "--", "true"]);
        assert_eq!(output.status.code().map(|code| code.to_string()).as_deref(), Some(code));
    }
    for bad in ["256", "-1", "1.5", "", "one", "99999999999999999999"] {
        let output = mount.leasefs(&["run", "-n", &format!("-E{bad}"), "job", "--", "true"]);
        assert_eq!(output.status.code(), Some(2), "-E {bad}");
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(bad.is_empty() || said.contains("give an exit code from 0 to 255"), "-E {bad}: {said}");
    }
    drop(run);
}

#[test]
fn input_and_output_are_the_commands() {
    let mount = Mount::new();
    let script = format!(
        "seq 20000 | {LEASEFS} run job -- sort -rn | head -n 2; {LEASEFS} run job -- head -c 3 </dev/zero | wc -c"
    );
    let output = mount.bash(&script);
    assert_ok(&output);
    assert_eq!(stdout(&output), "20000\n19999\n3\n");
}

#[test]
fn a_wait_is_mentioned_once_a_second_has_passed() {
    let mount = Mount::new();
    let run = Run::script(&mount, &[], r#"echo $$ >>"$SEEN"; exec sleep 1000"#, 1);
    // The next time is after ten seconds.
    let output = mount.leasefs(&["run", "-w", "7", "job", "--", "true"]);
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    let holder = format!("leasefs: job: held by pid {} (leasefs), uid 0, for ", run.runner.pid());
    assert_eq!(said.lines().count(), 2, "{said}");
    assert!(said.lines().all(|line| line.starts_with(&holder)), "{said}");
    assert!(said.contains("s: waiting, 1st of 1 in line\n"), "{said}");
}

#[test]
fn the_status_names_the_agent_that_the_command_works_for() {
    let mount = Mount::new();
    let script = r#"grep -o '"agent":[^,]*' "$LEASEFS_ROOT/status/job""#;
    for (options, variable, agent) in [
        (&["--agent", "planner 7"][..], "", r#""planner 7""#),
        (&[][..], "builder", r#""builder""#),
        (&["--agent", "planner"][..], "builder", r#""planner""#),
        (&[][..], "", "null"),
    ] {
        let mut command = mount.command(LEASEFS);
        command.env("LEASEFS_AGENT", variable).arg("run").args(options).args(["job", "--", "sh", "-c", script]);
        let output = command.output_in_time();
        assert_eq!(stdout(&output), format!("\"agent\":{agent}\n"), "{options:?} {variable:?}");
    }
    let long = "x".repeat(256);
    for bad in ["two\nlines", &long] {
        let output = mount.leasefs(&["run", "--agent", bad, "other", "--", "true"]);
        assert_eq!(output.status.code(), Some(2), "{bad:?}");
    }
    assert_eq!(mount.state_of("other"), "free");
}

#[test]
fn keys_already_taken_stay_alive_although_a_holder_cannot_be_looked_at() {
    in_peace(Duration::from_secs(1), stay_alive);
}

fn stay_alive(time: Duration) {
    let (mount, other) = (Mount::new(), Mount::new());
    let holder = Agent::new();
    holder.create(&other.claim("other")).expect("free key");
    holder.handle(&other.result("other", 1));
    holder.create(&mount.claim("b")).expect("free key");
    let ttl = shown(time);
    let args = ["run", "--ttl", &ttl, "a", "b", "--", "true"];
    // Declared before, so that on any way out they are waited for when the server goes on.
    let mut looks: Vec<Background> = Vec::new();
    let mut run: Background;
    let stopped = Stopped::these(&[other.server_pid().expect("a server")]);
    // Inside execve(2) it closes the draft and waits for an answer; who reads its `stat` waits with it.
    holder.begin("execvp", json!(["sleep", ["sleep", "1000"]]));
    let stat = format!("/proc/{}/stat", holder.pid());
    wait_for("whoever looks at the holder waits", || {
        let mut look = Background(mount.command("cat").arg(&stat).stdout(Stdio::null()).spawn().expect("cat runs"));
        let until = Instant::now() + Duration::from_millis(200);
        while look.0.try_wait().expect("a child").is_none() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(2));
        }
        let waits = look.0.try_wait().expect("a child").is_none();
        looks.push(look);
        waits
    });
    run = Background(mount.command(LEASEFS).args(args).spawn().expect("leasefs runs"));
    mount.wait_status("b", "one waits", |status| status["waiters"] == 1);
    let until = Instant::now() + 3 * time;
    wait_for("three TTLs pass with the key held", || {
        let status = mount.status("a");
        assert_eq!((status["state"].as_str(), status["epoch"].as_u64()), (Some("held"), Some(1)), "{status}");
        Instant::now() > until
    });
    drop(stopped);
    // Its program begins, and its handles are closed.
    assert_eq!(run.wait().code(), Some(0));
}
