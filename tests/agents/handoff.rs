//! `--handoff`: the command has the holder handle itself.

use crate::common::agent::{Script, Stray};
use crate::common::{assert_ok, stdout};
use crate::tools::{Tools, assert_refused};

#[test]
fn the_worker_has_the_handle_and_the_lease_ends_with_its_last_copy() {
    let tools = Tools::new();
    let worker = r#"read -r epoch <&"$LEASEFS_FD"
        echo "$epoch $LEASEFS_EPOCH $LEASEFS_KEY $LEASEFS_RESULT $$"
        sleep 1000 >/dev/null & echo $!
        read -r _"#;
    let setting = tools.path();
    let options = ["--agent", "planner", "--ttl", "10m", "--handoff", "--", "bash", "-c", worker];
    let argv = [&["env", &setting, "leasefs", "claim", "job"][..], &options].concat();
    let worker = Script::start_with(&tools.mount, &argv);
    let pid = worker.pid();
    let told = worker.line().expect("it runs");
    assert_eq!(told, format!("1 1 job {} {pid}", tools.mount.result("job", 1).display()));
    let child = Stray(worker.line().and_then(|line| line.parse().ok()).expect("a pid"));
    let status = tools.mount.status("job");
    let holder = &status["holder"];
    assert_eq!((holder["pid"].as_i64(), holder["command"].as_str()), (Some(i64::from(pid)), Some("bash")));
    assert_eq!((status["agent"].as_str(), status["ttl_ms"].as_u64()), (Some("planner"), Some(600_000)));
    assert!(tools.mount.holders().is_empty(), "there is no other process");
    worker.finish();
    assert_eq!(tools.mount.state_of("job"), "held", "its child has a copy");
    child.kill();
    tools.mount.wait_status("job", "free", |status| status["state"] == "free");
}

#[test]
fn its_exit_code_is_the_commands() {
    let tools = Tools::new();
    assert_eq!(tools.step("leasefs claim job --handoff -- sh -c 'exit 7'").status.code(), Some(7));
    let steps = "leasefs claim job --handoff -- sh -c 'leasefs renew job && echo done | leasefs complete job'";
    assert_ok(&tools.step(steps));
    assert_eq!(tools.mount.state_of("job"), "finished");
    assert_refused(&tools.step("leasefs claim --once job --handoff -- true"), 1, &["job: finished", "nothing was run"]);
    assert_eq!(tools.mount.status("job")["epoch"], 2);
}

#[test]
fn nothing_is_claimed_for_what_cannot_run_and_nothing_is_run_without_the_key() {
    let tools = Tools::new();
    assert_refused(&tools.step("leasefs claim job --handoff -- no-such-program"), 127, &["no-such-program"]);
    assert_refused(&tools.step("leasefs claim job --handoff -- /etc/passwd"), 126, &["/etc/passwd"]);
    assert!(!tools.mount.root().join("status/job").exists());
    tools.claim("job --agent planner");
    assert_refused(
        &tools.step("leasefs claim job -n --handoff -- echo ran"),
        1,
        &["job: held by pid", "nothing was run"],
    );
    let own = tools.elsewhere("leasefs claim job --agent planner --handoff -- echo ran");
    assert_refused(&own, 1, &["this agent holds it already, at epoch 1"]);
    for bad in ["job --handoff", "job -- true", "job --handoff --for 1 -- true", "job --handoff --json -- true"] {
        let output = tools.step(&format!("leasefs claim {bad}"));
        assert_eq!((output.status.code(), stdout(&output).as_str()), (Some(2), ""), "{bad}");
    }
}
