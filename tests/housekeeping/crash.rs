//! The server is killed in the middle of a prune: nothing half done is left, and whoever gave the order does not notice.

use std::fs;

use crate::common::{Mount, Stopped, assert_ok, stdout, stop, wait_for};
use crate::{complete, history, result_files};

/// A prune whose server dies after rows went and before their files did, at the first step and at a later one.
fn cut_off(options: &[&str], point: &str) {
    let dir = tempfile::tempdir().expect("directory for the orders");
    let orders = dir.path().join("orders");
    let mount = Mount::with_variables(options, &[("LEASEFS_TEST_ABORT", &orders)]);
    for key in ["a", "b"] {
        complete(&mount, key, &[10; 100]);
    }
    fs::write(&orders, point).expect("order");
    let output = mount.leasefs(&["prune", "--attempts-over", "1", "--completed-older", "0s"]);
    assert_ok(&output);
    assert!(!orders.exists(), "a server died of it");
    assert!(
        stdout(&output).ends_with("gone: 198 attempts, 200 results (2000 bytes), of 2 keys\n"),
        "{}",
        stdout(&output)
    );
    for key in ["a", "b"] {
        assert_eq!(history(&mount, key), [100]);
        assert_eq!(mount.state_of(key), "finished");
    }
    mount.verify();
    // The next server deletes what the one before it had noted and not deleted.
    wait_for("no file is left", || result_files(&mount.state()) == 0);
}

#[test]
fn a_prune_that_is_cut_off_is_gone_on_with() {
    cut_off(&[], "pruned");
}

#[test]
fn without_resend_the_order_is_given_again() {
    cut_off(&["--no-resend"], "pruned");
}

/// A backup that waited for the prune comes first when its server is killed; whoever gave the order does not notice.
#[test]
fn a_prune_that_is_cut_off_waits_for_whoever_came_in_between() {
    let dir = tempfile::tempdir().expect("directory for the orders");
    let orders = dir.path().join("orders");
    let mount = Mount::with_variables(&[], &[("LEASEFS_TEST_ABORT", &orders)]);
    complete(&mount, "k", &[10; 100]);
    let keeper = Stopped::these(&[mount.keeper_pid().expect("a keeper")]);
    let server = mount.server_pid().expect("a server");
    fs::write(&orders, "pruned").expect("order");
    let mut prune = crate::common::Background(
        mount.command(crate::common::LEASEFS).args(["prune", "--attempts-over", "1"]).spawn().expect("leasefs runs"),
    );
    wait_for("the server died of it", || crate::common::agent::has_ended(server));
    let results = fs::File::open(mount.state().join("results")).expect("results");
    let backup = nix::fcntl::Flock::lock(results, nix::fcntl::FlockArg::LockSharedNonblock).expect("nobody has it");
    drop(keeper);
    wait_for("another answers", || mount.server_pid().is_some_and(|pid| pid != server));
    // The order came again before any of these.
    for _ in 0..20 {
        assert_eq!(mount.state_of("k"), "finished");
    }
    assert!(prune.0.try_wait().expect("a child").is_none(), "it was not told of the backup");
    drop(backup);
    assert!(prune.wait().success());
    assert_eq!(history(&mount, "k"), [100]);
    mount.verify();
}

#[test]
fn the_files_of_what_went_are_deleted_at_the_next_mount_at_the_latest() {
    let dir = tempfile::tempdir().expect("directory for the orders");
    let orders = dir.path().join("orders");
    let mut mount = Mount::with_variables(&[], &[("LEASEFS_TEST_ABORT", &orders)]);
    complete(&mount, "k", &[10; 5]);
    // The keeper is gone too: nobody goes on with the order.
    let keeper = mount.keeper_pid().expect("a keeper");
    stop(keeper);
    let server = mount.server_pid().expect("a server");
    fs::write(&orders, "pruned").expect("order");
    let mut order = crate::common::Background(
        mount.command(crate::common::LEASEFS).args(["prune", "--attempts-over", "1"]).spawn().expect("leasefs runs"),
    );
    wait_for("the server died of it", || crate::common::agent::has_ended(server));
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(keeper), nix::sys::signal::Signal::SIGKILL).expect("there");
    wait_for("its keeper's end", || crate::common::agent::has_ended(keeper));
    assert!(!order.wait().success(), "nobody carried it out");
    assert_eq!(result_files(&mount.state()), 5, "rows went, their files did not");
    mount.start(&[]);
    wait_for("the files are gone", || result_files(&mount.state()) == 1);
    assert_eq!(history(&mount, "k"), [5]);
    mount.verify();
}
