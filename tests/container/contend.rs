//! Two containers and the host contend for keys, wait for each other, pass leases on to children, are killed, and commit.

use std::fs;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::common::agent::{count, has_ended};
use crate::common::{Mount, wait_for};
use crate::rig::{FORMS, Podman, Shell};

/// What a contender is told in each of [`FORMS`] while somebody holds the key.
const REFUSED: &str = "EEXIST EAGAIN EAGAIN EAGAIN EAGAIN ";
/// The same, while somebody shares it.
const SHARED: &str = "EEXIST EAGAIN EAGAIN EAGAIN ok ";

fn two_containers_and_the_host(mount: &Mount, podman: &Podman) -> [Shell; 3] {
    podman.empty_image("empty");
    [podman.shell(mount, "one", &[]), podman.shell(mount, "two", &[]), Shell::host(mount)]
}

fn podman_of(mount: &Mount) -> Podman {
    Podman::new(mount.scratch().join("podman"))
}

fn holder(mount: &Mount, key: &str) -> i32 {
    mount.status(key)["holder"]["pid"].as_i64().expect("a holder") as i32
}

#[test]
fn every_form_excludes_every_other_between_containers_and_the_host() {
    let mount = Mount::shared();
    let podman = podman_of(&mount);
    let mut places = two_containers_and_the_host(&mount, &podman);
    let mut epochs = 0;
    for at in 0..places.len() {
        for form in FORMS {
            let is_shared = form == "shared";
            places[at].must(&format!("python3 -S $CLAIM hold $M/claims/k {form} & held=$!"));
            let state = if is_shared { "shared" } else { "held" };
            mount.wait_status("k", form, |status| status["state"] == state);
            epochs += u64::from(!is_shared);
            assert_eq!(count(&mount.status("k"), "epoch"), epochs, "{form}");
            for place in &mut places {
                assert_eq!(place.try_all("k"), if is_shared { SHARED } else { REFUSED }, "{form}");
            }
            // Killed where it runs; whoever comes after that finds the key free.
            places[at].ask("kill -KILL $held; wait $held");
            assert_eq!(mount.state_of("k"), "free", "{form}");
        }
    }
    assert_eq!(count(&mount.status("k"), "epoch"), epochs, "who was refused took no number");
    mount.verify();
}

#[test]
fn the_line_goes_through_containers_and_the_host_while_they_are_killed() {
    let mount = Mount::shared();
    let podman = podman_of(&mount);
    let [mut one, mut two, mut host] = two_containers_and_the_host(&mount, &podman);
    let sync = mount.scratch();
    one.must("exec 9<>$M/claims/k; flock -n 9");
    let waits = |number| mount.wait_status("k", "one more waits", |status| count(status, "waiters") == number);
    two.begin("flock $M/claims/k sleep 1000");
    waits(1);
    // Two that give up in time, and one that is killed, while they wait.
    assert_eq!(host.ask("flock -w 0.2 -E 42 $M/claims/k true").0, 42);
    assert_eq!(two.ask("timeout 0.2 flock $M/claims/k true").0, 124);
    two.must("flock $M/claims/k true & waiter=$!");
    waits(2);
    two.ask("kill -KILL $waiter; wait $waiter");
    waits(1);
    host.must(&format!(
        "flock $M/claims/k bash -c 'read -r epoch <$M/claims/k; echo $epoch >{}/host' & disown",
        sync.display()
    ));
    waits(2);

    // The container that holds the key is killed, and the next in line is in the other one.
    podman.kill("one", "KILL");
    one.wait();
    mount.wait_status("k", "the second container has it", |status| status["epoch"] == 2 && status["state"] == "held");
    assert_eq!(count(&mount.status("k"), "waiters"), 1);
    podman.kill("two", "KILL");
    two.wait();
    wait_for("the host has it", || fs::read_to_string(sync.join("host")).is_ok_and(|said| said == "3\n"));
    mount.wait_status("k", "all are done", |status| status["state"] == "free");
    let said = String::from_utf8_lossy(&mount.leasefs(&["history", "k"]).stdout).into_owned();
    assert_eq!((said.matches("released").count(), said.matches("expired").count()), (3, 0), "{said}");
    mount.verify();
}

#[test]
fn a_child_in_a_container_keeps_what_its_parent_had_and_commits() {
    let mount = Mount::shared();
    let podman = podman_of(&mount);
    let [mut one, mut two, mut host] = two_containers_and_the_host(&mount, &podman);
    one.must("bash -c 'exec 9<>$M/claims/k; flock -n 9; sleep 1000 & wait' & disown");
    mount.wait_status("k", "held", |status| status["state"] == "held");
    let parent = holder(&mount, "k");
    let children = || fs::read_to_string(format!("/proc/{parent}/task/{parent}/children")).unwrap_or_default();
    // Not the flock before it, which is its child as well for a moment.
    let name_of = |pid: &str| fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    wait_for("its child", || name_of(children().trim()) == "sleep\n");
    let child: i32 = children().trim().parse().expect("one child");
    // From the host, which sees it by another number than the container does.
    kill(Pid::from_raw(parent), Signal::SIGKILL).expect("kill");
    wait_for("its end", || has_ended(parent));
    for place in [&mut one, &mut two, &mut host] {
        assert_eq!(place.try_all("k"), REFUSED, "the child has it");
    }
    // Whoever has the number and the user commits, wherever it runs: here the other container.
    two.must("echo 'all is well' >$M/results/k/1");
    wait_for("the result", || mount.result("k", 1).exists());
    for place in [&mut one, &mut two, &mut host] {
        assert_eq!(place.must("cat $M/results/k/latest"), "all is well");
        assert_ne!(place.ask("echo again >$M/results/k/1").0, 0, "a result is not written twice");
    }
    assert_eq!(host.try_all("k"), REFUSED, "the child has it still");
    kill(Pid::from_raw(child), Signal::SIGKILL).expect("kill");
    mount.wait_status("k", "done", |status| status["state"] == "finished");
    // A writer in a container that is killed leaves nothing.
    one.must("exec 9<>$M/claims/other; flock -n 9; exec 9>&-");
    let killed = two.ask("bash -c 'exec 7>$M/results/other/1; echo half >&7; kill -KILL $$'");
    assert_eq!(killed.0, 137, "it had its result open: {}", killed.1);
    assert!(!mount.result("other", 1).exists(), "it was killed");
    assert_eq!(mount.status("other")["outcome"], "released");
    mount.verify();
}
