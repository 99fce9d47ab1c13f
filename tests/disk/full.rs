//! A disk that fills and empties again under load, several times: nothing granted that is not recorded, nothing lost, no
//! hang, and on it goes by itself.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use serde_json::json;

use crate::common::agent::Agent;
use crate::common::{InTime, LEASEFS, PATIENCE, assert_ok, wait_for};
use crate::device::Device;
use crate::place::Place;

const WORKERS: usize = 5;
const CYCLES: usize = 4;
/// Everything that a worker does until it is told to stop. The only fault it may see is that the disk is full.
const WORK: &str = r#"
import random, errno
random.seed(seed)
told, refused, slowest, n, results = [], 0, 0, 0, []
def call(function, *arguments):
    global slowest
    began = time.monotonic()
    try: return function(*arguments)
    finally: slowest = max(slowest, time.monotonic() - began)
def full(error):
    global refused
    if error.errno != errno.ENOSPC: raise error
    refused += 1
while not os.path.exists(stop):
    n += 1
    key = random.choice([f"shared-{n % 3}", f"own-{seed}", f"new-{seed}-{n}"])
    path = f"{root}/claims/{key}"
    try:
        if key.startswith("shared"):
            fd = call(os.open, path, os.O_RDWR | os.O_CREAT)
            try: call(fcntl.flock, fd, fcntl.LOCK_EX | random.choice([0, fcntl.LOCK_NB]))
            except BlockingIOError:
                os.close(fd)
                continue
            except OSError:
                os.close(fd)
                raise
        else: fd = call(os.open, path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    except OSError as error:
        full(error)
        continue
    epoch = int(call(read, fd).split(b"\n")[0])
    told.append([key, epoch])
    try:
        call(os.write, fd, b"note %d" % n)
        if key.startswith("shared") and random.random() < 0.5:
            draft = call(os.open, f"{root}/results/{key}/{epoch}", os.O_WRONLY | os.O_CREAT)
            try:
                os.write(draft, b"%d " % epoch * 300)
                call(os.fsync, draft)
                results.append([key, epoch])
            finally: os.close(draft)
    except OSError as error: full(error)
    call(os.close, fd)
result = [told, results, refused, slowest]
"#;

/// Takes all the room that is left.
fn fill(ballast: &Path) {
    let mut file = fs::OpenOptions::new().create(true).append(true).open(ballast).expect("ballast");
    for size in [1 << 16, 4096, 1] {
        let block = vec![0; size];
        while file.write_all(&block).is_ok() {}
    }
    let _ = file.sync_all();
}

/// `NAME` in `.leasefs/metrics`, over all its labels.
fn metric(root: &Path, name: &str) -> u64 {
    let text = fs::read_to_string(root.join(".leasefs/metrics")).expect("metrics");
    let of_name = text.lines().filter(|line| line.split([' ', '{']).next() == Some(name));
    let values: Vec<u64> = of_name.filter_map(|line| line.rsplit(' ').next()?.parse().ok()).collect();
    assert!(!values.is_empty(), "no {name} in {text}");
    values.iter().sum()
}

fn status(root: &Path, key: &str) -> serde_json::Value {
    let text = fs::read_to_string(root.join("status").join(key)).expect("status");
    serde_json::from_str(&text).expect("JSON")
}

fn verify(state: &Path) {
    assert_ok(&Command::new(LEASEFS).arg("verify").arg("--state").arg(state).output_in_time());
}

/// The load, and the disk beneath it that fills and empties.
fn fill_and_empty(place: &Place, disk: &Path) {
    let (root, state, ballast) = (place.mnt(), disk.join("state"), disk.join("ballast"));
    let stop = place.path("stop");
    let holder = Agent::new();
    let claim = |key: &str| -> PathBuf { root.join("claims").join(key) };
    let held: Vec<_> = (0..5).map(|n| holder.create(&claim(&format!("held-{n}"))).expect("free key")).collect();
    let workers: Vec<Agent> = (0..WORKERS).map(|_| Agent::new()).collect();
    for (seed, worker) in workers.iter().enumerate() {
        worker.begin("script", json!([WORK, { "root": root, "stop": stop, "seed": seed }]));
    }
    let probe = Agent::new();
    let mut slowest_recovery = Duration::ZERO;
    let mut probed = 0;
    for cycle in 0..CYCLES {
        let granted = metric(&root, "leasefs_grants_total");
        wait_for("load", || metric(&root, "leasefs_grants_total") >= granted + 100);
        let before = metric(&root, "leasefs_commit_failures_total");
        wait_for("the disk is full", || {
            fill(&ballast);
            metric(&root, "leasefs_commit_failures_total") >= before + 20
        });
        // While it is full.
        for (number, fd) in held.iter().enumerate() {
            let key = format!("held-{number}");
            assert_eq!(holder.epoch(*fd), Ok(1), "cycle {cycle}: {key} is held still");
            assert_eq!(status(&root, &key)["state"], "held");
            assert_eq!(probe.create(&claim(&key)), Err(Errno::EEXIST));
        }
        // Space returns: a part at first, then all of it.
        fs::OpenOptions::new().write(true).open(&ballast).expect("ballast").set_len(1 << 20).expect("truncate");
        let began = Instant::now();
        let fd = loop {
            match probe.create(&claim("probe")) {
                Ok(fd) => break fd,
                Err(errno) => assert_eq!(errno, Errno::ENOSPC),
            }
            assert!(began.elapsed() < PATIENCE, "cycle {cycle}: still refused after {PATIENCE:?}");
        };
        slowest_recovery = slowest_recovery.max(began.elapsed());
        probed += 1;
        assert_eq!(probe.epoch(fd), Ok(probed), "no epoch was spent");
        probe.close(fd);
        fs::remove_file(&ballast).expect("ballast");
        verify(&state);
    }
    fs::write(&stop, "").expect("stop");
    let mut told: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    let (mut refused, mut slowest, mut results) = (0, 0.0_f64, 0);
    for worker in &workers {
        let done = worker.answer().expect("no fault but a full disk");
        for pair in done[0].as_array().expect("a list") {
            let epochs = told.entry(pair[0].as_str().expect("a key").to_owned()).or_default();
            epochs.push(pair[1].as_u64().expect("an epoch"));
        }
        for pair in done[1].as_array().expect("a list") {
            let (key, epoch) = (pair[0].as_str().expect("a key"), &pair[1]);
            let content = fs::read_to_string(root.join("results").join(key).join(epoch.to_string())).expect("result");
            assert_eq!(content, format!("{epoch} ").repeat(300), "{key} {epoch} is whole");
            results += 1;
        }
        refused += done[2].as_u64().expect("a count");
        slowest = slowest.max(done[3].as_f64().expect("seconds"));
    }
    let claims: usize = told.values().map(Vec::len).sum();
    for (key, epochs) in &mut told {
        epochs.sort_unstable();
        let newest = status(&root, key)["epoch"].as_u64().expect("an epoch");
        assert_eq!(*epochs, (1..=newest).collect::<Vec<_>>(), "{key}: told, without a gap, each once");
    }
    println!(
        "{claims} claims, {results} results, {refused} refused in {CYCLES} cycles; slowest call {slowest:.3} s, slowest \
         recovery {slowest_recovery:?}"
    );
    assert!(
        claims > 100 * CYCLES && results > 10 && refused > 10 * CYCLES as u64,
        "there was load, and it met a full disk"
    );
    assert!(slowest < PATIENCE.as_secs_f64(), "a call took {slowest} s");
    for fd in &held {
        assert_eq!(holder.epoch(*fd), Ok(1), "held to the end");
    }
    drop((holder, workers, probe));
    assert_ok(&place.unmount(&root));
    verify(&state);
}

#[test]
fn a_tmpfs_that_fills_and_empties_under_load() {
    let place = Place::new();
    let disk = place.tmpfs("disk", "24m");
    assert_ok(&place.mount_at(&place.mnt(), &disk.join("state"), &[]));
    fill_and_empty(&place, &disk);
}

#[test]
fn an_ext4_that_fills_and_empties_under_load_with_full_durability() {
    let device = Device::new(32 << 20);
    let place = Place::new();
    let mut command = Command::new("timeout");
    command.args(["200", LEASEFS, "mount"]).arg(place.mnt()).arg("--state").arg(device.path().join("state"));
    assert_ok(&command.output_in_time());
    fill_and_empty(&place, &device.path());
}
