//! A recording of a tree at work, cut at hundreds of points, and what a server finds after each.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use leasefs::engine::{Durability, Start};
use leasefs::registry::sqlite::{Check, Reader, SqliteRegistry};
use leasefs::registry::{AttemptRow, NamespaceRow};
use leasefs::results::Results;
use leasefs::{Config, Engine, Epoch, KeyId, Now, Ttl, verify};
use parking_lot::Mutex;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::json;
use tempfile::TempDir;

use crate::common::agent::Agent;
use crate::common::{InTime, LEASEFS, PATIENCE, assert_ok};
use crate::device::{Device, Event, Faults};
use crate::replay::{Replay, Survivors};

const DISK_BYTES: usize = 64 << 20;
const AGENTS: usize = 4;
/// Cuts, and how many of them a real mount looks at as well.
const CUTS: usize = 256;
const MOUNTS: usize = 8;
/// Copies looked at at the same time.
const LOOKERS: usize = 6;

/// Claims in both forms, notes, results by fsync and by close. What it was told goes down in the recording at once:
/// a claim when its call returned, a result when fsync returned or, after a mere close, when it can be read.
const LOAD: &str = r#"
import random, signal
random.seed(seed)
told = os.open(told_path, os.O_WRONLY)
say = lambda line: os.write(told, (line + "\n").encode())
end = time.monotonic() + seconds
claims = results = n = 0
# A slow machine takes longer for what there has to be at least.
while n < 1000 and (time.monotonic() < end or claims < 20 or results < 5):
    n += 1
    own = random.random() < 0.3
    key = f"own-{seed}-{n}" if own else f"shared-{random.randrange(6)}"
    path = os.path.join(root, "claims", key)
    if own:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    else:
        fd = os.open(path, os.O_RDWR | os.O_CREAT)
        try: fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            continue
    epoch = int(read(fd).split(b"\n")[0])
    say(f"claim {key} {epoch}")
    claims += 1
    if random.random() < 0.3: os.write(fd, f"note {n}".encode())
    if random.random() < 0.4:
        target = os.path.join(root, "results", key, str(epoch))
        content = f"{key} {epoch} ".encode() * random.choice([1, 7, 400, 1500])
        draft = os.open(target, os.O_WRONLY | os.O_CREAT)
        os.write(draft, content)
        synced = random.random() < 0.5
        if synced:
            os.fsync(draft)
            say(f"result {key} {epoch} {len(content)}")
        os.close(draft)
        if not synced:
            while True:
                try:
                    with open(target, "rb") as f: assert f.read() == content
                    break
                except FileNotFoundError: pass
            say(f"result {key} {epoch} {len(content)}")
        results += 1
    os.close(fd)
result = [claims, results]
"#;

/// Claims until the log has been moved into the main file and is written over: from then on no commit makes a file longer,
/// and what is synced is only what is asked for.
const WARM: &str = r#"
told = os.open(told_path, os.O_WRONLY)
for epoch in range(1, count + 1):
    fd = os.open(os.path.join(root, "claims", "warm"), os.O_RDWR | os.O_CREAT | os.O_EXCL)
    os.write(told, f"claim warm {epoch}\n".encode())
    os.close(fd)
"#;
const WARM_CLAIMS: usize = 1_100;

/// A tree at work, from the making of its state directory on.
fn recording(seconds: f64) -> (Vec<u8>, Vec<Event>) {
    let device = Device::new(DISK_BYTES);
    let base = device.record();
    let tree = Tree::mount(&device.aside("tree"), &device.path().join("state"));
    let warm = json!({ "root": tree.root, "told_path": device.told(), "count": WARM_CLAIMS });
    Agent::new().script(WARM, warm).expect("claims");
    let agents: Vec<Agent> = (0..AGENTS).map(|_| Agent::new()).collect();
    for (seed, agent) in agents.iter().enumerate() {
        let names = json!({ "root": tree.root, "told_path": device.told(), "seed": seed, "seconds": seconds });
        agent.begin("script", json!([LOAD, names]));
    }
    let (mut claims, mut results) = (0, 0);
    for agent in &agents {
        let done =
            agent.answer_within(Duration::from_secs_f64(seconds) + 3 * PATIENCE).expect("in time").expect("no error");
        claims += done[0].as_u64().expect("a count");
        results += done[1].as_u64().expect("a count");
    }
    drop(agents);
    let events = device.recorded();
    let flushes = events.iter().filter(|event| matches!(event, Event::Flush)).count();
    println!("recorded {claims} claims, {results} results, {} events, {flushes} flushes", events.len());
    assert!(claims > 50 && results > 10 && flushes > 50, "there is something to cut");
    tree.unmount();
    (base, events)
}

/// A mounted tree; unmounted when the value goes.
struct Tree {
    root: PathBuf,
}

impl Tree {
    fn mount(root: &Path, state: &Path) -> Tree {
        let mut command = Command::new("timeout");
        command.args(["60", LEASEFS, "mount"]).arg(root).arg("--state").arg(state).args(["--durability", "full"]);
        assert_ok(&command.output_in_time());
        Tree { root: root.to_owned() }
    }

    fn unmount(self) {
        assert_ok(&Command::new("timeout").args(["60", LEASEFS, "unmount"]).arg(&self.root).output_in_time());
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        Command::new("umount").arg("-l").arg(&self.root).quietly_in_time();
    }
}

const CHUNK: usize = 1 << 16;

/// Whether there is room for all copies that are looked at together: in a container memory may be short there.
fn has_room(directory: &str) -> bool {
    let needed = (2 * LOOKERS * DISK_BYTES) as u64;
    nix::sys::statvfs::statvfs(directory).is_ok_and(|found| found.blocks_available() * found.fragment_size() > needed)
}

/// A copy of a disk, mounted; gone with the value.
struct Copy {
    dir: TempDir,
}

impl Copy {
    fn new(image: &[u8], repair: bool) -> Copy {
        let dir = if has_room("/dev/shm") { tempfile::tempdir_in("/dev/shm") } else { tempfile::tempdir() };
        let dir = dir.expect("a directory");
        // What is zero need not be written.
        let file = fs::File::create(dir.path().join("image")).expect("image");
        file.set_len(image.len() as u64).expect("image");
        for (number, chunk) in image.chunks(CHUNK).enumerate() {
            if chunk.iter().any(|byte| *byte != 0) {
                file.write_all_at(chunk, (number * CHUNK) as u64).expect("image");
            }
        }
        fs::create_dir(dir.path().join("mnt")).expect("mountpoint");
        let copy = Copy { dir };
        if repair {
            let mut fsck = Command::new("fsck.ext4");
            let fsck = fsck.args(["-f", "-y"]).arg(copy.dir.path().join("image")).output_in_time();
            assert!(fsck.status.code().is_some_and(|code| code <= 1), "{}", String::from_utf8_lossy(&fsck.stdout));
        }
        let mount = Command::new("mount")
            .args(["-t", "ext4", "-o", "loop"])
            .arg(copy.dir.path().join("image"))
            .arg(copy.path())
            .output_in_time();
        assert_ok(&mount);
        copy
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("mnt")
    }
}

impl Drop for Copy {
    fn drop(&mut self) {
        if !Command::new("umount").arg(self.path()).quietly_in_time() {
            Command::new("umount").arg("-l").arg(self.path()).quietly_in_time();
        }
    }
}

fn config() -> Config {
    let root = NamespaceRow::root(0o700, 0, 0, 0);
    let ttl = Ttl::from_millis(3_600_000).expect("an hour");
    let (max_result, max_keys, max_waiters) = (1 << 20, 1_000, 1_000);
    Config { ttl, durability: Durability::Full, max_result, max_keys, max_waiters, root }
}

/// Starts a server's engine as after a reboot, and holds it to what clients were told.
fn check(state: &Path, told: &BTreeSet<String>) {
    if told.is_empty() && !state.exists() {
        return;
    }
    fs::create_dir_all(state).expect("state directory");
    let results = Results::open(state).expect("results");
    let registry = SqliteRegistry::open(state, Check::Full).expect("the registry is sound");
    let now = Now { boot_ns: 1, wall_ms: jiff::Timestamp::now().as_millisecond() };
    drop(
        Engine::open(config(), Box::new(registry), results, Start::alone("after the cut", now))
            .expect("the engine starts"),
    );
    let (keys, attempts) = Reader::open(state).and_then(|reader| reader.snapshot()).expect("rows");
    let files = Results::at(state);
    let file = |row: &AttemptRow| files.result(KeyId(row.key_id), Epoch(row.epoch));
    let size = |row: &AttemptRow| fs::metadata(file(row)).ok().map(|meta| meta.len());
    let violations: Vec<_> =
        verify::check(&keys, &attempts, size).into_iter().filter(|found| !found.by_clock).collect();
    assert!(violations.is_empty(), "{violations:?}");
    let by_name: BTreeMap<&str, _> = keys.iter().map(|row| (row.key.as_str(), row)).collect();
    let by_epoch: BTreeMap<_, _> = attempts.iter().map(|row| ((row.key_id, row.epoch), row)).collect();
    for line in told {
        let words: Vec<&str> = line.split(' ').collect();
        let epoch: u64 = words[2].parse().expect("an epoch");
        let key = by_name.get(words[1]).unwrap_or_else(|| panic!("{line}: the key is unknown"));
        assert!(key.epoch >= epoch, "{line}: the key is at epoch {}", key.epoch);
        if words[0] == "result" {
            let row = by_epoch[&(key.id, epoch)];
            let content = fs::read_to_string(file(row)).unwrap_or_else(|error| panic!("{line}: {error}"));
            let unit = format!("{} {epoch} ", words[1]);
            assert_eq!(row.result.map(|(size, _)| size.to_string()).as_deref(), Some(words[3]), "{line}");
            assert_eq!(content, unit.repeat(content.len() / unit.len()), "{line}: it is whole");
            assert_eq!(content.len().to_string(), words[3], "{line}");
        }
    }
}

#[test]
fn what_a_client_was_told_outlives_the_power() {
    let seed = std::env::var("LEASEFS_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or_else(rand::random);
    println!("LEASEFS_SEED={seed}");
    let mut random = StdRng::seed_from_u64(seed);
    let long = std::env::var("LEASEFS_LONG").ok().and_then(|seconds| seconds.parse::<f64>().ok());
    let cuts = long.map_or(CUTS, |seconds| CUTS.max((seconds * 5.0) as usize));
    let (base, events) = recording(if long.is_some() { 20.0 } else { 3.0 });
    // Right after something was told is where it hurts most; elsewhere anything may be half done.
    let after_told = events.iter().enumerate().filter(|(_, event)| matches!(event, Event::Told(_)));
    let after_told: Vec<usize> = after_told.map(|(at, _)| at + 1).collect();
    let mut points: Vec<usize> = (0..cuts)
        .map(|number| match number % 8 {
            // The making of the state directory is but a few events.
            7 => random.random_range(0..after_told[0] + 50),
            0 | 2 | 4 | 6 => after_told[random.random_range(0..after_told.len())],
            _ => random.random_range(0..=events.len()),
        })
        .collect();
    points.sort_unstable();
    let mut replay = Replay::new(base, &events);
    let (sender, receiver) = mpsc::sync_channel::<Cut>(1);
    let receiver = Mutex::new(receiver);
    let failed = Mutex::new(Vec::new());
    // Mounting and unmounting the copies is mostly waiting.
    std::thread::scope(|scope| {
        let look = || {
            while let Ok(cut) = { receiver.lock().recv() } {
                let what = cut.what.clone();
                if std::panic::catch_unwind(|| cut.look()).is_err() {
                    failed.lock().push(what);
                }
            }
        };
        (0..LOOKERS).for_each(|_| drop(scope.spawn(look)));
        for (number, point) in points.into_iter().enumerate() {
            let survivors = match random.random_range(0..4) {
                0 | 1 => Survivors::None,
                2 => Survivors::Some,
                _ => Survivors::All,
            };
            replay.go_to(point);
            let image = replay.image(survivors, &mut random);
            let is_mounted = number % (cuts / MOUNTS) == cuts / MOUNTS - 1;
            let what = format!("cut {number} at event {point} of {}, {survivors:?} survive", events.len());
            let cut = Cut { what, image, told: replay.told.clone(), is_mounted };
            if sender.send(cut).is_err() || !failed.lock().is_empty() {
                break;
            }
        }
        drop(sender);
    });
    let failed = failed.into_inner();
    assert!(failed.is_empty(), "LEASEFS_SEED={seed}; see above: {failed:?}");
    println!("{cuts} cuts");
}

/// Once a sync has failed, the kernel takes what it could not write for written, and the next sync succeeds over a hole.
#[test]
fn what_is_told_after_a_fault_of_the_disk_outlives_the_power_too() {
    let device = Device::without_journal(DISK_BYTES);
    let base = device.record();
    let tree = Tree::mount(&device.aside("tree"), &device.path().join("state"));
    let agent = Agent::new();
    let warm = json!({ "root": tree.root, "told_path": device.told(), "count": WARM_CLAIMS });
    agent.script(WARM, warm).expect("claims");
    assert_ok(&Command::new("sync").arg("-f").arg(device.path()).output_in_time());
    let claim = |key: &str| tree.root.join("claims").join(key);
    let before: Vec<_> = (0..30).map(|n| agent.create(&claim(&format!("before-{n}"))).expect("free key")).collect();
    before.into_iter().for_each(|fd| agent.close(fd));
    // In the log, and not on the disk: that they were given back need not be.
    let record = "fd = os.open(path, os.O_RDONLY); os.fsync(fd); os.close(fd)";
    agent.script(record, json!({ "path": tree.root.join(".leasefs/config") })).expect("fsync");
    let holder = agent.create(&claim("worker")).expect("free key");
    let draft = agent.handle(&tree.root.join("results/worker/1"));
    let content = "worker 1 ".repeat(2000);
    agent.script("os.write(fd, text.encode())", json!({ "fd": draft, "text": content })).expect("registered");
    device.set(Faults { flush: true, ..Faults::default() });
    assert_eq!(agent.fsync(draft), Err(nix::errno::Errno::EIO));
    for _ in 0..3 {
        assert_eq!(agent.create(&claim("during")), Err(nix::errno::Errno::EIO));
    }
    device.set(Faults::default());
    let mut told: BTreeSet<String> = (0..30).map(|n| format!("claim before-{n} 1")).collect();
    for epoch in 1..=20 {
        let fd = agent.create(&claim("after")).expect("it goes on by itself");
        assert_eq!(agent.epoch(fd), Ok(epoch));
        told.insert(format!("claim after {epoch}"));
        agent.close(fd);
    }
    // What could not be synced is not taken for synced the second time: it has to be written again.
    assert_eq!(agent.fsync(draft), Err(nix::errno::Errno::EIO));
    let again = agent.handle(&tree.root.join("results/worker/1"));
    agent.script("os.write(fd, text.encode())", json!({ "fd": again, "text": content })).expect("registered");
    assert_eq!(agent.fsync(again), Ok(()));
    told.insert(format!("result worker 1 {}", content.len()));
    let events = device.recorded();
    assert!(events.iter().any(|event| matches!(event, Event::Lost)), "a sync failed");
    let mut replay = Replay::new(base, &events);
    replay.go_to(events.len());
    let copy = Copy::new(&replay.image(Survivors::None, &mut StdRng::seed_from_u64(0)), true);
    told.extend(replay.told.iter().cloned());
    check(&copy.path().join("state"), &told);
    for fd in [draft, again, holder] {
        agent.close(fd);
    }
    drop(agent);
    tree.unmount();
}

/// A disk after a power cut.
struct Cut {
    what: String,
    image: Vec<u8>,
    told: BTreeSet<String>,
    is_mounted: bool,
}

impl Cut {
    fn look(self) {
        let copy = Copy::new(&self.image, false);
        check(&copy.path().join("state"), &self.told);
        if self.is_mounted {
            claims_go_on(&copy, &self.told);
        }
    }
}

/// A real server on the copy gives the next claim of a key an epoch nobody was told before.
fn claims_go_on(copy: &Copy, told: &BTreeSet<String>) {
    let root = copy.dir.path().join("tree");
    fs::create_dir(&root).expect("mountpoint");
    let tree = Tree::mount(&root, &copy.path().join("state"));
    let mut newest: BTreeMap<&str, u64> = BTreeMap::new();
    for line in told {
        let words: Vec<&str> = line.split(' ').collect();
        let epoch: u64 = words[2].parse().expect("an epoch");
        newest.entry(words[1]).and_modify(|known| *known = epoch.max(*known)).or_insert(epoch);
    }
    let agent = Agent::new();
    for (key, known) in newest.into_iter().filter(|(key, _)| key.starts_with("shared-")) {
        let fd = agent.handle(&root.join("claims").join(key));
        // One that the cut left held is held still: its connection is gone, not its boot.
        match agent.flock(fd, libc::LOCK_EX | libc::LOCK_NB) {
            Ok(()) => assert!(agent.epoch(fd).expect("a holder reads its epoch") > known, "{key}: {known} was told"),
            Err(errno) => assert_eq!(errno, nix::errno::Errno::EWOULDBLOCK, "{key}"),
        }
        agent.close(fd);
    }
    drop(agent);
    tree.unmount();
}
