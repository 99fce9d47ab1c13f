//! A registry that is lost, torn or damaged is refused with what to do, and left as it is: served, it could give epochs
//! out again.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use leasefs::Now;
use leasefs::registry::sqlite::{Check, SqliteRegistry};
use leasefs::registry::{Registry, Which};
use rand::rngs::StdRng;
use rand::{Rng, RngCore, SeedableRng};
use tempfile::TempDir;

use crate::common::agent::Agent;
use crate::common::{Mount, assert_ok, wait_for};
use crate::place::{Place, assert_not_mounted, assert_refused};

/// The remedies that every such refusal names.
const REMEDIES: [&str; 2] = ["leasefs verify", "leasefs backup"];
const PAGE_BYTES: usize = 1024;

/// A copy of a state directory as it is at this moment: what the server's end by SIGKILL would leave.
fn copy(state: &Path, to: &Path) {
    fs::create_dir_all(to).expect("directory");
    for entry in fs::read_dir(state).expect("state directory") {
        let entry = entry.expect("entry");
        let target = to.join(entry.file_name());
        let kind = entry.file_type().expect("type");
        if kind.is_dir() {
            copy(&entry.path(), &target);
        } else if kind.is_file() {
            fs::copy(entry.path(), target).expect("copy");
        }
    }
}

/// What starting a server on it would make of each key's epoch, or the refusal.
fn start(state: &Path) -> Result<BTreeMap<String, u64>, String> {
    let now = Now { boot_ns: 1, wall_ms: jiff::Timestamp::now().as_millisecond() };
    SqliteRegistry::open(state, Check::Full)
        .and_then(|mut registry| {
            registry.load("another boot", now)?;
            registry.reader()?.keys(Which::Below(""))
        })
        .map(|keys| keys.into_iter().map(|key| (key.row.key.to_string(), key.row.epoch)).collect())
        .map_err(|error| error.to_string())
}

/// Refused, or every key goes on from where it was.
fn assert_no_epoch_again(what: &str, state: &Path, known: &BTreeMap<String, u64>) -> bool {
    match start(state) {
        Ok(found) => {
            for (key, epoch) in known {
                let now = found.get(key).copied().unwrap_or(0);
                assert!(now >= *epoch, "{what}: {key} was at epoch {epoch}, and would be served at {now}");
            }
            false
        }
        Err(_) => true,
    }
}

fn assert_refused_by_start(what: &str, state: &Path) {
    match start(state) {
        Ok(keys) => panic!("{what}: it would be served, with {} keys", keys.len()),
        Err(said) => REMEDIES.iter().for_each(|word| assert!(said.contains(word), "{what}: no `{word}` in: {said}")),
    }
}

/// A tree with some history of every kind; its keys' epochs.
fn used() -> (Mount, BTreeMap<String, u64>) {
    let mount = Mount::new();
    let agent = Agent::new();
    fs::create_dir(mount.claim("team")).expect("namespace");
    let mut epochs = BTreeMap::new();
    for number in 0..12_u64 {
        let key = if number % 3 == 0 { format!("team/k{number}") } else { format!("k{number}") };
        for epoch in 1..=number + 1 {
            let fd = agent.handle(&mount.claim(&key));
            agent.flock(fd, libc::LOCK_EX).expect("free");
            agent.write(fd, "a note").expect("holder");
            if epoch == 2 {
                let draft = agent.handle(&mount.result(&key, 2));
                agent.write(draft, "result").expect("registered");
                agent.fsync(draft).expect("commits");
                agent.close(draft);
            }
            agent.close(fd);
        }
        epochs.insert(key, number + 1);
    }
    drop(agent);
    // What was told is in the registry's files, not only on its way there.
    assert_ok(&mount.leasefs(&["history", "k1"]));
    (mount, epochs)
}

fn log_of(state: &Path) -> PathBuf {
    state.join("registry.db-wal")
}

fn seal_of(state: &Path) -> u64 {
    fs::read_to_string(state.join("seal")).expect("seal").trim().parse().expect("a number")
}

/// Everything in the main file, and no log.
fn fold(state: &Path) {
    let registry = rusqlite::Connection::open(state.join("registry.db")).expect("registry");
    registry.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).expect("checkpoint");
    drop(registry);
}

/// Copies to spoil, each in a directory of its own.
struct Copies {
    dir: TempDir,
    original: PathBuf,
    made: usize,
}

impl Copies {
    fn of(state: &Path) -> Copies {
        let dir = tempfile::tempdir().expect("a directory");
        let original = dir.path().join("original");
        copy(state, &original);
        Copies { dir, original, made: 0 }
    }

    fn next(&mut self) -> PathBuf {
        self.made += 1;
        let path = self.dir.path().join(self.made.to_string());
        copy(&self.original, &path);
        path
    }
}

#[test]
fn bytes_flipped_in_any_page_never_give_an_epoch_again() {
    let (mount, known) = used();
    let mut copies = Copies::of(&mount.state());
    fold(&copies.original);
    assert_eq!(start(&copies.next()).expect("it is sound"), known);
    let seed = std::env::var("LEASEFS_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(rand::random);
    println!("LEASEFS_SEED={seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let sound = fs::read(copies.original.join("registry.db")).expect("registry");
    let state = copies.next();
    let (mut cases, mut refused) = (0, 0);
    for page in 0..sound.len() / PAGE_BYTES {
        for _ in 0..8 {
            let mut bytes = sound.clone();
            let length = random.random_range(1..=16);
            let at = page * PAGE_BYTES + random.random_range(0..PAGE_BYTES - length);
            bytes[at..at + length].iter_mut().for_each(|byte| *byte ^= random.random_range(1..=255));
            let _ = fs::remove_file(log_of(&state));
            fs::copy(copies.original.join("seal"), state.join("seal")).expect("seal");
            fs::write(state.join("registry.db"), &bytes).expect("registry");
            let what = format!("{length} bytes flipped at {at}");
            refused += usize::from(assert_no_epoch_again(&what, &state, &known));
            cases += 1;
        }
    }
    println!("{cases} cases, {refused} refused");
    assert!(refused > cases / 4, "{refused} of {cases} were noticed");
}

#[test]
fn whole_pages_lost_or_garbage_and_a_truncated_file_are_refused() {
    let (mount, known) = used();
    let mut copies = Copies::of(&mount.state());
    fold(&copies.original);
    let sound = fs::read(copies.original.join("registry.db")).expect("registry");
    let mut random = StdRng::seed_from_u64(7);
    for page in 0..sound.len() / PAGE_BYTES {
        for filling in ["zeros", "garbage"] {
            let mut bytes = sound.clone();
            let spoilt = &mut bytes[page * PAGE_BYTES..(page + 1) * PAGE_BYTES];
            if filling == "zeros" {
                spoilt.fill(0)
            } else {
                random.fill_bytes(spoilt)
            }
            let state = copies.next();
            fs::write(state.join("registry.db"), &bytes).expect("registry");
            let what = format!("page {page} of {filling}");
            // A page of the free list holds nothing.
            assert_no_epoch_again(&what, &state, &known);
        }
    }
    for length in [1, 99, 100, 512, PAGE_BYTES, 2 * PAGE_BYTES, sound.len() / 2, sound.len() - PAGE_BYTES] {
        let state = copies.next();
        fs::write(state.join("registry.db"), &sound[..length]).expect("registry");
        assert_refused_by_start(&format!("{length} bytes of {}", sound.len()), &state);
    }
}

#[test]
fn a_lost_log_and_a_garbage_log_are_refused() {
    let (mount, known) = used();
    let mut copies = Copies::of(&mount.state());
    let sound = fs::read(log_of(&copies.original)).expect("log");
    assert!(sound.len() > 4096, "there is something in it");
    assert_eq!(start(&copies.next()).expect("it is sound"), known);
    let spoil = |name: &str, log: Option<Vec<u8>>, state: &Path| {
        let _ = fs::remove_file(state.join("registry.db-shm"));
        match log {
            Some(bytes) => fs::write(log_of(state), bytes).expect("log"),
            None => fs::remove_file(log_of(state)).expect("log"),
        }
        assert_refused_by_start(name, state);
    };
    spoil("no log", None, &copies.next());
    spoil("an empty log", Some(Vec::new()), &copies.next());
    spoil("a log of zeros", Some(vec![0; sound.len()]), &copies.next());
    let mut garbage = sound.clone();
    StdRng::seed_from_u64(7).fill_bytes(&mut garbage);
    spoil("a log of garbage", Some(garbage), &copies.next());
    let mut first = sound.clone();
    first[17] ^= 1;
    spoil("a flipped bit in its header", Some(first), &copies.next());
    let mut frame = sound.clone();
    frame[40] ^= 1;
    spoil("a flipped bit in its first frame", Some(frame), &copies.next());
}

#[test]
fn a_log_lost_after_a_checkpoint_is_refused_as_well() {
    let (mount, _) = used();
    let before = seal_of(&mount.state());
    let agent = Agent::new();
    let claims = r#"
for _ in range(count):
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.close(fd)
"#;
    wait_for("a checkpoint", || {
        agent.script(claims, serde_json::json!({ "path": mount.claim("busy"), "count": 200 })).expect("claims");
        seal_of(&mount.state()) > before
    });
    agent.script(claims, serde_json::json!({ "path": mount.claim("busy"), "count": 10 })).expect("claims");
    // The files are copied one after the other: nothing moves from the journal to the registry meanwhile.
    mount.wait_applied();
    let mut copies = Copies::of(&mount.state());
    let state = copies.next();
    fs::remove_file(log_of(&state)).expect("log");
    let _ = fs::remove_file(state.join("registry.db-shm"));
    assert_refused_by_start("no log", &state);
    // With everything folded into the main file by any SQLite, it is not missed.
    let state = copies.next();
    fold(&state);
    assert!(!log_of(&state).exists());
    assert!(start(&state).expect("nothing is lost")["busy"] >= 210);
}

#[test]
fn a_registry_that_is_gone_is_not_made_anew() {
    let place = Place::new();
    place.used_state();
    fold(&place.state());
    let registry = place.state().join("registry.db");
    let sound = fs::read(&registry).expect("registry");
    let refused = |what: &str| {
        let output = place.mount();
        assert_refused(&output, &place.state(), &[&["missing or empty"], &["leasefs verify"], &["leasefs backup"]]);
        assert_not_mounted(&place.mnt());
        assert_eq!(fs::metadata(&registry).map_or(0, |meta| meta.len()), 0, "{what}: not made anew");
    };
    fs::write(&registry, "").expect("registry");
    refused("a zero-length one");
    fs::remove_file(&registry).expect("registry");
    refused("none");
    // One that was made before there was a seal, with results.
    fs::remove_file(place.state().join("seal")).expect("seal");
    fs::write(place.state().join("results/1-1"), "a result").expect("result");
    refused("none beside results");
    fs::remove_file(place.state().join("results/1-1")).expect("result");
    // Put back, it is served as before.
    fs::write(&registry, sound).expect("registry");
    assert_ok(&place.mount());
    let agent = Agent::new();
    let fd = agent.create(&place.mnt().join("claims/ns/k")).expect("free key");
    assert_eq!(agent.epoch(fd), Ok(2));
    drop(agent);
    assert_ok(&place.unmount(&place.mnt()));
}

#[test]
fn a_start_that_failed_before_there_was_a_registry_does_not_count() {
    let place = Place::new();
    for dir in ["", "results", "drafts"] {
        fs::create_dir(place.state().join(dir)).expect("directory");
    }
    fs::write(place.state().join("registry.db"), "").expect("registry");
    fs::write(place.state().join("lock"), "").expect("lock");
    assert_ok(&place.mount());
    assert_ok(&place.unmount(&place.mnt()));
}
