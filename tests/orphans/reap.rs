//! `leasefs reap`: proof is looked for at once, and nothing is freed without it.

use serde_json::json;

use crate::common::agent::Agent;
use crate::common::luck::in_luck;
use crate::common::{assert_ok, stdout};
use crate::lost::{Lost, ON_ITS_WAY, can_see_everybody};

#[test]
fn what_is_proven_dead_is_freed_at_once_and_the_rest_is_explained() {
    let _none = ON_ITS_WAY.read();
    in_luck("the server had looked by itself before the order, or somebody's file was on its way", |_| reap());
}

/// Whether an order came to these keys too late, or to a moment when nothing can be proven.
fn is_ill_timed(tree: &Lost, said: &str, keys: &[&str]) -> bool {
    let is_missing = |key: &&str| !said.lines().any(|line| line.starts_with(&format!("{key}: ")));
    said.contains("is on its way through") || keys.iter().any(|key| is_missing(key) && tree.state_of(key) == "free")
}

fn reap() -> Option<()> {
    let mut tree = Lost::new();
    let (alive, dying, sharing) = (Agent::new(), Agent::new(), Agent::new());
    alive.create(&tree.claim("alive")).expect("free");
    let fd = dying.create(&tree.claim("dying")).expect("free");
    let shared = sharing.handle(&tree.claim("shared"));
    sharing.flock(shared, libc::LOCK_SH).expect("free");
    tree.lose_and_mount();
    let gauge = |tree: &Lost| {
        let text = std::fs::read_to_string(tree.root().join(".leasefs/metrics")).expect("metrics");
        text.lines().find_map(|line| line.strip_prefix("leasefs_orphaned ")).expect("a gauge").to_owned()
    };
    assert_eq!(gauge(&tree), "3");
    for key in ["alive", "dying"] {
        tree.wait_why(key, "still has it open");
    }
    let dry = tree.leasefs(&["reap", "--dry-run"]);
    assert_eq!(dry.status.code(), Some(1), "some are orphaned");
    let alive_line = format!("alive: epoch 1: held: pid {} ", alive.pid());
    assert!(stdout(&dry).contains(&alive_line), "{}", stdout(&dry));

    if !can_see_everybody() {
        assert_eq!(tree.leasefs(&["reap"]).status.code(), Some(1));
        tree.assert_refused("dying");
        return Some(());
    }
    // By now the server looks seldom by itself; whoever lets go right before the order is found by it.
    dying.close(fd);
    sharing.kill();
    let output = tree.leasefs(&["reap"]);
    let said = stdout(&output);
    if is_ill_timed(&tree, &said, &["dying", "shared"]) {
        return None;
    }
    assert_eq!(output.status.code(), Some(1), "one is alive: {said}");
    assert!(said.contains(&alive_line), "{said}");
    assert!(said.contains("dying: epoch 1: freed: lost: no process has its handle open"), "{said}");
    assert!(said.contains("shared: shared locks: freed"), "{said}");
    assert_eq!(said.lines().count(), 3, "{said}");
    tree.assert_refused("alive");
    assert_eq!(tree.wait_lost("dying"), 2);
    assert_eq!(gauge(&tree), "1");

    alive.kill();
    let output = tree.leasefs(&["reap"]);
    if is_ill_timed(&tree, &stdout(&output), &["alive"]) {
        return None;
    }
    assert_ok(&output);
    assert_eq!(stdout(&output), "alive: epoch 1: freed: lost: no process has its handle open\n");
    for _ in 0..2 {
        let output = tree.leasefs(&["reap"]);
        assert_ok(&output);
        assert_eq!(stdout(&output), "no key is orphaned\n");
    }
    assert_eq!(gauge(&tree), "0");
    let text = std::fs::read_to_string(tree.root().join(".leasefs/metrics")).expect("metrics");
    assert!(text.contains("\nleasefs_losses_total 2\n"), "{text}");
    tree.verify();
    Some(())
}

#[test]
fn only_the_operator_may_order_it() {
    let tree = Lost::with(&["--allow-other"]);
    let script = "fd = os.open(path, os.O_WRONLY)\nos.write(fd, b'{\"op\":\"reap\"}')";
    let names = json!({ "path": tree.root().join(".leasefs/control") });
    let refused = Agent::user(1234, 1234, &[]).script(script, names.clone());
    assert_eq!(refused.map(drop), Err(nix::errno::Errno::EACCES));
    Agent::new().script(script, names).expect("root may");
}
