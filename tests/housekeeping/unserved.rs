//! A state directory that nobody serves: pruned all the same, and checked as strictly as before.

use std::path::Path;
use std::process::{Command, Output};

use rusqlite::Connection;

use crate::common::agent::Agent;
use crate::common::{InTime, LEASEFS, Mount, assert_ok, stdout};
use crate::{complete, history, release, result_files, verify};

fn leasefs(command: &str, state: &Path, args: &[&str]) -> Output {
    Command::new(LEASEFS).arg(command).arg("--state").arg(state).args(args).output_in_time()
}

fn break_it(state: &Path, sql: &str) {
    let changed = Connection::open(state.join("registry.db")).and_then(|db| db.execute(sql, [])).expect("SQL");
    assert!(changed > 0, "{sql}");
}

#[test]
fn an_unmounted_tree_is_pruned_and_goes_on() {
    let mut mount = Mount::new();
    complete(&mount, "k", &[10, 20, 30]);
    release(&mount, "free", 5);
    let served = leasefs("prune", &mount.state(), &["--attempts-over", "1"]);
    assert_eq!(served.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&served.stderr).contains("it is being served: name its tree with --root"));
    // Held when the tree was lost: it stays as it is.
    let holder = Agent::new();
    let fd = holder.create(&mount.claim("held")).expect("free");
    mount.lose_connection();
    holder.close(fd);
    let listed = leasefs("prune", &mount.state(), &["--attempts-over", "2", "--completed-older", "0s", "--dry-run"]);
    assert_ok(&listed);
    let went = leasefs("prune", &mount.state(), &["--attempts-over", "2", "--completed-older", "0s"]);
    assert_ok(&went);
    assert_eq!(stdout(&went), stdout(&listed).replace("would go", "gone"));
    assert!(stdout(&went).ends_with("gone: 5 attempts, 3 results (60 bytes), of 2 keys\n"), "{}", stdout(&went));
    assert_ok(&verify(&mount.state()));
    assert_eq!(result_files(&mount.state()), 0);

    let dest = mount.scratch().join("backup");
    assert_ok(&leasefs("backup", &mount.state(), &[dest.to_str().expect("UTF-8")]));
    assert_ok(&verify(&dest));
    mount.start(&[]);
    assert_eq!((history(&mount, "k"), history(&mount, "free")), (vec![3], vec![4, 5]));
    assert_eq!(history(&mount, "held"), [1]);
    assert_eq!(mount.state_of("k"), "finished");
    complete(&mount, "k", &[1]);
    assert_eq!(history(&mount, "k"), [3, 4]);
    mount.verify();
}

#[test]
fn a_gap_that_is_not_from_pruning_is_found() {
    let mut mount = Mount::new();
    complete(&mount, "k", &[1, 2]);
    release(&mount, "k", 4);
    complete(&mount, "done", &[1]);
    // The completed ones go, of those released the newest three stay.
    assert_ok(&mount.leasefs(&["prune", "--completed-older", "0s", "--attempts-over", "3"]));
    assert_eq!(history(&mount, "k"), [4, 5, 6]);
    mount.unmount();
    let of = |path: &str| format!("key_id = (SELECT id FROM keys WHERE path = '{path}')");
    let (k, done) = (of("k"), of("done"));
    for (at, (broken, sql)) in [
        ("I-EPOCH-UNIQ: k epoch 4: is missing", format!("DELETE FROM attempts WHERE {k} AND epoch = 4")),
        ("I-EPOCH-UNIQ: k epoch 6: is missing", format!("DELETE FROM attempts WHERE {k} AND epoch = 6")),
        ("I-EPOCH-UNIQ: k: of epochs 1 to 2", "UPDATE keys SET pruned = 2 WHERE path = 'k'".into()),
        ("I-EPOCH-UNIQ: k: of epochs 1 to 3", "UPDATE keys SET pruned_attempts = 2 WHERE path = 'k'".into()),
        ("I-NO-GHOST-COMPLETE: done epoch 1", format!("UPDATE attempts SET result_pruned = 0 WHERE {done}")),
        ("I-ONE-RESULT: done epoch 1", format!("UPDATE attempts SET registered = 1 WHERE {done}")),
    ]
    .into_iter()
    .enumerate()
    {
        let copy = mount.scratch().join(format!("copy-{at}"));
        assert_ok(&Command::new("cp").arg("-a").arg(mount.state()).arg(&copy).output_in_time());
        assert_ok(&verify(&copy));
        break_it(&copy, &sql);
        let output = verify(&copy);
        assert_eq!(output.status.code(), Some(1), "{sql}");
        assert!(stdout(&output).contains(broken), "{sql}: {}", stdout(&output));
    }
}

#[test]
fn a_registry_from_before_pruning_is_brought_up_to_date() {
    let mut mount = Mount::new();
    complete(&mount, "k", &[1, 2]);
    mount.unmount();
    let db = Connection::open(mount.state().join("registry.db")).expect("registry");
    db.execute_batch(
        "ALTER TABLE keys DROP COLUMN pruned_attempts; ALTER TABLE attempts DROP COLUMN result_pruned; \
         ALTER TABLE attempts DROP COLUMN waited_ms; ALTER TABLE attempts DROP COLUMN agent; DROP TABLE pruned_files; PRAGMA user_version = 2;",
    )
    .expect("as it was");
    drop(db);
    mount.start(&[]);
    assert_ok(&mount.leasefs(&["prune", "--attempts-over", "1"]));
    assert_eq!(history(&mount, "k"), [2]);
    mount.verify();
}
