//! `leasefs wait`: it returns when the state is there, not before, and claims nothing.

use std::fs::OpenOptions;
use std::io::Write;
use std::time::Instant;

use super::common::{Mount, assert_ok, shown_once, stdout};
use super::{assert_refused, commit, hold, rest_of_stdout, start};

#[test]
fn a_key_that_is_not_held_is_not_waited_for() {
    let mount = Mount::new();
    assert_ok(&mount.leasefs(&["wait", "never"]));
    drop(hold(&mount, "free"));
    mount.wait_status("free", "free", |status| status["state"] == "free");
    assert_ok(&mount.leasefs(&["wait", "free"]));
    let held = hold(&mount, "finished");
    commit(&mount, "finished", 1, "");
    drop(held);
    mount.wait_status("finished", "finished", |status| status["state"] == "finished");
    assert_ok(&mount.leasefs(&["wait", "finished"]));
}

#[test]
fn the_wait_ends_with_the_lease() {
    let mount = Mount::new();
    for round in 1..=5 {
        let held = hold(&mount, "job");
        let mut wait = start(&mount, &["wait", "job"]);
        if round % 2 == 0 {
            // In one round the waiter sleeps already, in the next it may not have looked yet.
            std::thread::sleep(std::time::Duration::from_millis(100));
            assert!(wait.0.try_wait().expect("wait").is_none(), "returned while the key was held");
        }
        drop(held);
        assert_eq!(wait.wait().code(), Some(0));
        assert_eq!(mount.status("job")["epoch"], round, "waiting takes no epoch");
    }
}

#[test]
fn an_expiry_ends_the_wait() {
    let mount = Mount::with(&["--ttl", "700ms"]);
    let _held = hold(&mount, "job");
    assert_ok(&mount.leasefs(&["wait", "-w", "30", "job"]));
    assert_eq!(mount.status("job")["outcome"], "expired");
}

#[test]
fn a_draft_that_keeps_the_key_is_waited_for() {
    let mount = Mount::new();
    let held = hold(&mount, "job");
    let mut draft =
        OpenOptions::new().write(true).create(true).truncate(true).open(mount.result("job", 1)).expect("draft");
    drop(held);
    mount.wait_status("job", "reporting", |status| status["state"] == "reporting");
    assert_refused(&mount.leasefs(&["wait", "-w", "0.2", "job"]), 1, &["job: reporting"]);
    let mut wait = start(&mount, &["wait", "job"]);
    draft.write_all(b"42").expect("write");
    drop(draft);
    assert_eq!(wait.wait().code(), Some(0));
    assert_eq!(mount.state_of("job"), "finished");
}

#[test]
fn a_wait_ends_on_time() {
    let mount = Mount::new();
    let _held = hold(&mount, "job");
    for secs in ["0", "0.5"] {
        for args in [&["wait", "-w", secs, "job"][..], &["wait", "--result", "-w", secs, "job"]] {
            let limit: f64 = secs.parse().expect("number");
            shown_once(&format!("-w {secs} is kept"), || {
                let began = Instant::now();
                assert_refused(&mount.leasefs(args), 1, &["job: ", "held by pid", "waited"]);
                let took = began.elapsed().as_secs_f64();
                assert!(took >= limit, "-w {secs} took {took} s");
                if took < limit + 2.0 { Ok(()) } else { Err(format!("{took} s")) }
            });
        }
    }
    assert_refused(
        &mount.leasefs(&["wait", "--result", "-w", "0.3", "never"]),
        1,
        &["never: no result yet", "never held"],
    );
}

#[test]
fn a_result_is_waited_for_before_its_key_is_known() {
    let mount = Mount::new();
    let mut wait = start(&mount, &["wait", "--result", "job"]);
    // Events of other keys go by.
    for _ in 0..20 {
        drop(hold(&mount, "other"));
        mount.wait_status("other", "free", |status| status["state"] == "free");
    }
    assert!(wait.0.try_wait().expect("wait").is_none());
    let held = hold(&mount, "job");
    assert!(wait.0.try_wait().expect("wait").is_none());
    commit(&mount, "job", 1, "42");
    assert_eq!(wait.wait().code(), Some(0));
    assert_eq!(rest_of_stdout(&mut wait).trim_end(), mount.result("job", 1).to_str().expect("path"));
    drop(held);
}

#[test]
fn the_result_of_an_older_attempt_is_not_the_newest_s() {
    let mount = Mount::new();
    let held = hold(&mount, "job");
    commit(&mount, "job", 1, "old");
    drop(held);
    mount.wait_status("job", "finished", |status| status["state"] == "finished");
    assert_eq!(
        stdout(&mount.leasefs(&["wait", "--result", "job"])).trim_end(),
        mount.result("job", 1).display().to_string()
    );
    std::fs::remove_file(mount.claim("job")).expect("forget");
    let _again = hold(&mount, "job");
    assert_refused(&mount.leasefs(&["wait", "--result", "-w", "0.3", "job"]), 1, &["no result yet"]);
    let mut wait = start(&mount, &["wait", "--result", "job"]);
    commit(&mount, "job", 2, "new");
    assert_eq!(wait.wait().code(), Some(0));
    assert_eq!(rest_of_stdout(&mut wait).trim_end(), mount.result("job", 2).display().to_string());
}

#[test]
fn a_namespace_cannot_be_waited_for() {
    let mount = Mount::new();
    std::fs::create_dir(mount.claim("team")).expect("namespace");
    assert_refused(&mount.leasefs(&["wait", "team"]), 2, &["a namespace, not a key"]);
}
