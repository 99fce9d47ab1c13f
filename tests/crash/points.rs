//! The named places inside the server where it is killed on purpose: whatever was half done, the client's answer is the
//! one it would have had, and the registry says the same.
//!
//! They do not run beside the suites that hold keys in the test's own process (`#[serial]`): what is started here has copies of
//! every handle until it executes its program.
//!
//! A file names the next place (`LEASEFS_TEST_ABORT`); the server that dies of it removes the file.
use std::fs;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use rusqlite::{Connection, OpenFlags};
use serde_json::json;
use serial_test::parallel;

use crate::common::agent::{Agent, Fd, sleeps_in};
use crate::common::{Mount, PATIENCE, assert_ok, shown_once, wait_for};
use crate::killer::{kill_once, kill_twice};

/// A mount whose servers die at the place named in a file.
struct Place {
    mount: Mount,
    orders: PathBuf,
    _dir: tempfile::TempDir,
}

impl Place {
    fn new(options: &[&str]) -> Place {
        let dir = tempfile::tempdir().expect("directory for the orders");
        let orders = dir.path().join("orders");
        let mount = Mount::with_variables(options, &[("LEASEFS_TEST_ABORT", &orders)]);
        Place { mount, orders, _dir: dir }
    }

    /// The next server to reach the point dies there.
    fn arm(&self, point: &str) {
        // Whole at once: it is read while it is written.
        let new = self.orders.with_extension("new");
        fs::write(&new, point).expect("order");
        fs::rename(new, &self.orders).expect("order");
    }

    fn was_reached(&self) -> bool {
        !self.orders.exists()
    }

    /// Waits until a server has died of the order, and the next one answers.
    fn reached(&self, point: &str) {
        wait_for(&format!("a server died at {point}"), || self.was_reached());
        assert!(self.mount.server_pid().is_some(), "another answers");
    }

    /// The epochs of a key and how each attempt ended, as the registry has them.
    fn attempts(&self, key: &str) -> Vec<(u64, Option<String>)> {
        self.mount.wait_applied();
        let flags = OpenFlags::SQLITE_OPEN_READ_ONLY;
        let db = Connection::open_with_flags(self.mount.state().join("registry.db"), flags).expect("registry");
        let sql = "SELECT a.epoch, outcome FROM attempts a JOIN keys ON keys.id = key_id WHERE path = ?1 ORDER BY 1";
        let mut query = db.prepare(sql).expect("SQL");
        let rows = query.query_map([key], |row| Ok((row.get::<_, i64>(0)? as u64, row.get(1)?))).expect("SQL");
        rows.collect::<Result<_, _>>().expect("attempts")
    }

    /// What was told outlives another kill, and the books are right.
    fn settle(self, keys: &[&str]) {
        let before: Vec<serde_json::Value> = keys.iter().map(|key| self.mount.status(key)).collect();
        kill_once(&self.mount.root()).expect("another server answers");
        for (key, before) in keys.iter().zip(before) {
            assert_eq!(self.mount.status(key), before, "{key}");
        }
        self.mount.verify();
    }
}

/// Every way to claim, by the same words.
const FORMS: [&str; 4] = ["create", "flock", "posix", "ofd"];

fn claim(agent: &Agent, path: &Path, form: &str) -> Result<Fd, Errno> {
    if form == "create" {
        return agent.create(path);
    }
    let fd = agent.open(path, libc::O_RDWR | libc::O_CREAT)?;
    match form {
        "flock" => agent.flock(fd, libc::LOCK_EX | libc::LOCK_NB),
        "posix" => agent.lock(fd, libc::F_SETLK, libc::F_WRLCK).map(drop),
        _ => agent.lock(fd, libc::F_OFD_SETLK, libc::F_WRLCK).map(drop),
    }?;
    Ok(fd)
}

/// A claim that was cut off is granted once, and the epoch told is the epoch stored.
fn cut_off_claims(point: &str) {
    for form in FORMS {
        let place = Place::new(&[]);
        let agent = Agent::new();
        for epoch in 1..=3 {
            place.arm(point);
            let fd = claim(&agent, &place.mount.claim("k"), form).unwrap_or_else(|e| panic!("{form}: {e}"));
            place.reached(point);
            assert_eq!(agent.epoch(fd), Ok(epoch), "{form}");
            let attempts = place.attempts("k");
            assert_eq!(attempts.len() as u64, epoch, "{form}: {attempts:?}");
            assert_eq!(attempts[epoch as usize - 1], (epoch, None), "{form}");
            assert_eq!(Agent::new().create(&place.mount.claim("k")), Err(Errno::EEXIST), "{form}: it is held");
            agent.close(fd);
            place.mount.wait_status("k", "free", |status| status["state"] == "free");
        }
        drop(agent);
        place.settle(&["k"]);
    }
}

#[test]
#[parallel]
fn a_claim_cut_off_before_its_commit_is_granted_once() {
    cut_off_claims("before-commit");
}

#[test]
#[parallel]
fn a_claim_cut_off_after_its_commit_is_granted_once() {
    cut_off_claims("after-commit");
}

/// Without resend the last request that the server read is made again. The others of its batch are told `EINTR`, and
/// nobody has what was granted to them: whoever tries again gets an epoch of its own.
#[test]
#[parallel]
fn without_resend_a_claim_that_was_cut_off_is_nobodys() {
    let place = Place::new(&["--no-resend", "--durability", "full"]);
    let agents: Vec<Agent> = (0..8).map(|_| Agent::new()).collect();
    // In directories of their own: the kernel lets one exclusive create into a directory at a time.
    let key = |at: usize| format!("n{at}/k");
    for at in 0..agents.len() {
        std::fs::create_dir(place.mount.claim(&format!("n{at}"))).expect("a namespace");
    }
    let mut rounds = 0;
    let mut given_back = 0;
    while given_back == 0 {
        rounds += 1;
        assert!(rounds < 500, "no batch had two claims in it");
        // A server gathers once it knows that recording takes a while.
        for _ in 0..8 {
            agents[0].close(agents[0].create(&place.mount.claim("warm")).expect("free"));
        }
        place.arm("after-commit");
        for (at, agent) in agents.iter().enumerate() {
            // Python tries again by itself where a call is interrupted.
            let path = place.mount.claim(&key(at));
            agent.begin("open", json!([path, libc::O_RDWR | libc::O_CREAT | libc::O_EXCL, 0o666]));
        }
        let mut epochs = 0;
        for (at, agent) in agents.iter().enumerate() {
            let fd = agent.answer().unwrap_or_else(|e| panic!("k{at} is free: {e}")).as_i64().expect("a descriptor");
            let attempts = place.attempts(&key(at));
            assert_eq!(agent.epoch(fd), Ok(attempts.len() as u64), "k{at}: {attempts:?}");
            epochs += attempts.len();
            agent.close(fd);
        }
        place.reached("after-commit");
        given_back = epochs - rounds * agents.len();
    }
    drop(agents);
    place.settle(&["n0/k", "n7/k"]);
}

#[test]
#[parallel]
fn without_resend_a_single_claim_cut_off_is_made_again() {
    for point in ["before-commit", "after-commit"] {
        for form in FORMS {
            let place = Place::new(&["--no-resend"]);
            let agent = Agent::new();
            place.arm(point);
            let fd = claim(&agent, &place.mount.claim("k"), form).unwrap_or_else(|e| panic!("{point}, {form}: {e}"));
            place.reached(point);
            assert_eq!(agent.epoch(fd), Ok(1), "{point}, {form}");
            agent.close(fd);
            place.mount.wait_status("k", "free", |status| status["state"] == "free");
            assert_eq!(place.attempts("k").len(), 1, "{point}, {form}");
            drop(agent);
            place.settle(&["k"]);
        }
    }
}

/// Whoever gave an order cannot know whether it was carried out, and does not have to: the command finds out.
#[test]
#[parallel]
fn without_resend_an_order_that_was_cut_off_is_given_again() {
    for point in ["before-commit", "after-commit"] {
        for (order, outcome) in [(&["release", "k"][..], "released"), (&["evict", "k"], "evicted")] {
            let place = Place::new(&["--no-resend"]);
            let (holder, next) = (Agent::new(), Agent::new());
            holder.create(&place.mount.claim("k")).expect("free key");
            let handle = next.handle(&place.mount.claim("k"));
            next.begin_flock(handle, libc::LOCK_EX);
            place.mount.wait_status("k", "in line", |status| status["waiters"] == 1);
            place.arm(point);
            assert_ok(&place.mount.leasefs(&[order, &["--epoch", "1"]].concat()));
            place.reached(point);
            next.answer().expect("granted");
            assert_eq!(next.epoch(handle), Ok(2), "{point}, {order:?}");
            let ended = (1, Some(outcome.to_owned()));
            assert_eq!(place.attempts("k"), [ended, (2, None)], "{point}, {order:?}");
            drop((holder, next));
            place.settle(&["k"]);
        }
    }
}

/// Polls until it is told of something. Without resend a `poll` that is interrupted is told of an error.
const POLLER: &str = r"
result = select.POLLERR
while result == select.POLLERR:
    result = poll(fd, 0, 600_000)
";

/// Whoever sleeps in `poll(2)` while servers die is woken by the one that lives: also where one died before it had woken
/// anybody.
#[test]
#[parallel]
fn a_poll_sleeps_through_no_expiry_however_many_servers_die() {
    for options in [&[][..], &["--no-resend"]] {
        let mount = Mount::with(options);
        let holder = Agent::new();
        let fd = holder.create(&mount.claim("k")).expect("a free key");
        holder.begin("script", json!([POLLER, { "fd": fd }]));
        wait_for("it sleeps", || sleeps_in(holder.pid()).contains("poll"));
        for early_us in [0, 500, 1_000, 2_000, 4_000, 6_000, 8_000, 10_000, 12_000, 16_000] {
            kill_twice(&mount.root(), early_us).expect("another server answers");
        }
        let owner = Agent::new();
        owner.set_xattr(&mount.claim("k"), "user.lease.ttl", "100ms").expect("a TTL");
        // One that sleeps through it looks again when its own time is over, and finds the lease lost.
        let events = holder.answer_within(PATIENCE).unwrap_or_else(|| panic!("{options:?}: not woken"));
        let events = events.expect("a poll").as_u64().expect("events");
        assert_ne!(events & libc::POLLHUP as u64, 0, "{options:?}: {events:#x}");
    }
}

#[test]
#[parallel]
fn of_a_batch_cut_off_between_two_answers_each_is_told_its_own_epoch() {
    let place = Place::new(&[]);
    let agents: Vec<Agent> = (0..8).map(|_| Agent::new()).collect();
    place.arm("between-answers");
    let mut rounds = 0;
    while !place.was_reached() {
        rounds += 1;
        assert!(rounds < 2_000, "no batch had two answers");
        // All at once, so that several are gathered.
        for (at, agent) in agents.iter().enumerate() {
            let path = place.mount.claim(&format!("k{at}"));
            agent.begin("open", json!([path, libc::O_RDWR | libc::O_CREAT | libc::O_EXCL, 0o666]));
        }
        for agent in &agents {
            let fd = agent.answer().expect("a free key").as_i64().expect("a descriptor");
            assert_eq!(agent.epoch(fd), Ok(rounds));
            agent.close(fd);
        }
    }
    place.reached("between-answers");
    for at in 0..agents.len() {
        let key = format!("k{at}");
        place.mount.wait_status(&key, "free", |status| status["state"] == "free");
        let epochs: Vec<u64> = place.attempts(&key).into_iter().map(|(epoch, _)| epoch).collect();
        assert_eq!(epochs, (1..=rounds).collect::<Vec<_>>(), "{key}");
    }
    drop(agents);
    place.settle(&["k0", "k7"]);
}

#[test]
#[parallel]
fn a_result_cut_off_during_its_commit_is_there_whole_and_once() {
    for point in ["publish", "before-commit", "after-commit"] {
        for by_close in [false, true] {
            let place = Place::new(&[]);
            let agent = Agent::new();
            let fd = agent.create(&place.mount.claim("k")).expect("a free key");
            let path = place.mount.result("k", 1);
            let draft = agent.open(&path, libc::O_WRONLY | libc::O_CREAT).expect("a draft");
            for piece in ["one\n", "two\n", "three\n"] {
                assert_eq!(agent.write(draft, piece), Ok(piece.len() as u64));
            }
            place.arm(point);
            if !by_close {
                assert_eq!(agent.fsync(draft), Ok(()), "{point}");
                assert_eq!(fs::read_to_string(&path).expect("told is done"), "one\ntwo\nthree\n", "{point}");
            }
            agent.close(draft);
            place.reached(point);
            assert_eq!(fs::read_to_string(&path).expect("the result"), "one\ntwo\nthree\n", "{point}, {by_close}");
            let latest = fs::read_link(path.with_file_name("latest")).expect("the latest");
            assert_eq!(latest, Path::new("1"), "{point}, {by_close}");
            assert_eq!(agent.epoch(fd), Ok(1), "{point}, {by_close}: it is held still");
            agent.close(fd);
            place.mount.wait_status("k", "finished", |status| status["state"] == "finished");
            assert_eq!(place.attempts("k"), [(1, Some("completed".into()))], "{point}, {by_close}");
            drop(agent);
            place.settle(&["k"]);
        }
    }
}

#[test]
#[parallel]
fn an_expiry_cut_off_passes_the_key_on_once() {
    for point in ["expiry", "before-commit", "after-commit"] {
        let mut ttl_ms = 150;
        shown_once(&format!("the order comes before the expiry: {point}"), || {
            let ended = cut_off_expiry(point, ttl_ms);
            ttl_ms *= 2;
            ended
        });
    }
}

/// Lets a lease run out so soon, in milliseconds, and a server die of it, unless the order for that came too late.
fn cut_off_expiry(point: &str, ttl_ms: u64) -> Result<(), String> {
    let place = Place::new(&[]);
    let (first, next) = (Agent::new(), Agent::new());
    let fd = first.create(&place.mount.claim("k")).expect("a free key");
    let handle = next.handle(&place.mount.claim("k"));
    next.begin_flock(handle, libc::LOCK_EX);
    place.mount.wait_status("k", "one in line", |status| status["waiters"] == 1);
    // Not armed before: this is recorded, too.
    first.set_xattr(&place.mount.claim("k"), "user.lease.ttl", &format!("{ttl_ms}ms")).expect("a TTL");
    place.arm(point);
    next.answer().expect("the line moves at the deadline");
    let reached = place.was_reached();
    assert_eq!(next.epoch(handle), Ok(2), "{point}");
    assert_eq!(first.read(fd), Err(Errno::ESTALE), "{point}");
    assert_eq!(first.write(fd, "late"), Err(Errno::ESTALE), "{point}");
    first.close(fd);
    assert_eq!(next.epoch(handle), Ok(2), "{point}: the old handle frees nothing");
    assert_eq!(place.attempts("k"), [(1, Some("expired".into())), (2, None)], "{point}");
    if !reached {
        return Err(format!("it ran out after {ttl_ms} ms, and no server died of it"));
    }
    place.settle(&["k"]);
    Ok(())
}

#[test]
#[parallel]
fn what_a_holder_does_is_done_once_wherever_it_is_cut_off() {
    for point in ["before-commit", "after-commit"] {
        let place = Place::new(&[]);
        let mount = &place.mount;
        let agent = Agent::new();
        let fd = agent.create(&mount.claim("k")).expect("a free key");
        let cut = |what: &str, answer: Result<(), Errno>| {
            assert_eq!(answer, Ok(()), "{what} at {point}");
            place.reached(point);
            assert_eq!(agent.epoch(fd), Ok(1), "{what} at {point}");
        };
        place.arm(point);
        cut("note", agent.write(fd, "where I am").map(drop));
        assert_eq!(mount.status("k")["note"], "where I am");
        place.arm(point);
        cut("renewal", agent.touch(fd));
        place.arm(point);
        cut("TTL", agent.set_xattr(&mount.claim("k"), "user.lease.ttl", "2h"));
        assert_eq!(mount.status("k")["ttl_ms"], 7_200_000);
        place.arm(point);
        cut("agent", agent.set_xattr(&mount.claim("k"), "user.lease.agent", "a"));
        assert_eq!(mount.status("k")["agent"], "a");
        place.arm(point);
        cut("no agent", agent.call("removexattr", json!([mount.claim("k"), "user.lease.agent"])).map(drop));
        assert_eq!(mount.status("k")["agent"], serde_json::Value::Null);
        let call = |name: &str, arguments: serde_json::Value| agent.call(name, arguments).map(drop);
        place.arm(point);
        cut("mkdir", call("mkdir", json!([mount.claim("n"), 0o755])));
        place.arm(point);
        cut("chmod", call("chmod", json!([mount.claim("n"), 0o700])));
        let mode = std::os::unix::fs::MetadataExt::mode(&fs::metadata(mount.claim("n")).expect("the namespace"));
        assert_eq!(mode & 0o7777, 0o700, "{point}");
        place.arm(point);
        cut("rmdir", call("rmdir", json!([mount.claim("n")])));
        assert!(!mount.claim("n").exists());

        place.arm(point);
        assert_eq!(agent.unlink(&mount.claim("k")), Ok(()), "unlink at {point}");
        place.reached(point);
        mount.wait_status("k", "free", |status| status["state"] == "free");
        agent.close(fd);
        assert_eq!(place.attempts("k"), [(1, Some("released".into()))], "{point}");
        drop(agent);
        place.settle(&["k"]);
    }
}

#[test]
#[parallel]
fn an_eviction_cut_off_hits_its_epoch_once() {
    for point in ["before-commit", "after-commit"] {
        let place = Place::new(&[]);
        let (holder, operator) = (Agent::new(), Agent::new());
        let fd = holder.create(&place.mount.claim("k")).expect("a free key");
        let control = operator.open(&place.mount.root().join(".leasefs/control"), libc::O_WRONLY).expect("control");
        let order = json!({"op": "evict", "key": "k", "epoch": 1, "reason": "it hung"}).to_string();
        place.arm(point);
        assert_eq!(operator.write(control, &order), Ok(order.len() as u64), "{point}");
        place.reached(point);
        assert_eq!(holder.read(fd), Err(Errno::ESTALE), "{point}");
        assert_eq!(place.attempts("k"), [(1, Some("evicted".into()))], "{point}");
        assert_eq!(operator.write(control, &order), Err(Errno::ESTALE), "{point}: it is done");
        drop((holder, operator));
        place.settle(&["k"]);
    }
}

#[test]
#[parallel]
fn an_order_cut_off_is_carried_out_once() {
    for point in ["before-commit", "after-commit"] {
        let place = Place::new(&["--ttl", "1h"]);
        let (holder, waiter, operator) = (Agent::new(), Agent::new(), Agent::new());
        let fd = holder.create(&place.mount.claim("k")).expect("a free key");
        let handle = waiter.handle(&place.mount.claim("k"));
        waiter.begin_flock(handle, libc::LOCK_EX);
        place.mount.wait_status("k", "one in line", |status| status["waiters"] == 1);
        let control = operator.open(&place.mount.root().join(".leasefs/control"), libc::O_WRONLY).expect("control");
        let order = |op: &str| json!({"op": op, "key": "k", "epoch": 1}).to_string();
        let (renew, release) = (order("renew"), order("release"));
        place.arm(point);
        assert_eq!(operator.write(control, &renew), Ok(renew.len() as u64), "{point}");
        place.reached(point);
        assert_eq!(holder.epoch(fd), Ok(1), "{point}");
        place.arm(point);
        assert_eq!(operator.write(control, &release), Ok(release.len() as u64), "{point}");
        place.reached(point);
        waiter.answer().expect("the next in line has it");
        assert_eq!((holder.read(fd), waiter.epoch(handle)), (Err(Errno::ESTALE), Ok(2)), "{point}");
        assert_eq!(place.attempts("k"), [(1, Some("released".into())), (2, None)], "{point}");
        assert_eq!(operator.write(control, &release), Err(Errno::ESTALE), "{point}: it is done");
        kill_once(&place.mount.root()).expect("another server answers");
        assert_eq!((holder.read(fd), waiter.epoch(handle)), (Err(Errno::ESTALE), Ok(2)), "{point}: it stays so");
        drop((holder, operator));
        place.settle(&["k"]);
    }
}

/// A registry as the first version made it, with a key of five epochs, the last of them with a result.
const SCHEMA_1: &str = include_str!("schema1.sql");

#[test]
#[parallel]
fn a_migration_cut_off_is_done_by_the_next_server() {
    let dir = tempfile::tempdir().expect("directory");
    let orders = dir.path().join("orders");
    let mut mount = Mount::with_variables(&[], &[("LEASEFS_TEST_ABORT", &orders)]);
    mount.unmount();
    // A state directory as the first version left it: with a registry, and nothing that came later.
    for entry in fs::read_dir(mount.state()).expect("the state directory").flatten() {
        if entry.path().is_file() {
            fs::remove_file(entry.path()).expect("a file of ours");
        }
    }
    let old = Connection::open(mount.state().join("registry.db")).expect("a registry");
    old.execute_batch(SCHEMA_1).expect("SQL");
    drop(old);
    fs::write(&orders, "migration").expect("order");
    mount.start(&[]);
    assert!(!orders.exists(), "a server died in the migration");
    let status = mount.status("old");
    assert_eq!((status["epoch"].as_u64(), status["state"].as_str()), (Some(5), Some("free")), "{status}");
    let agent = Agent::new();
    let fd = agent.create(&mount.claim("old")).expect("a free key");
    assert_eq!(agent.epoch(fd), Ok(6), "the epochs go on");
    drop(agent);
    mount.verify();
}
