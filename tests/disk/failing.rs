//! A disk that fails or is slow: nothing is granted that is not on it, what is held stays held, and reads go on.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::errno::Errno;

use crate::common::agent::Agent;
use crate::common::{InTime, LEASEFS, PATIENCE, assert_ok, shown_once, wait_for};
use crate::device::{Device, Faults};

const DISK_BYTES: usize = 32 << 20;

/// A tree whose state directory is on a device of the test's.
struct Served {
    root: PathBuf,
    device: Device,
}

impl Served {
    fn new() -> Served {
        let device = Device::new(DISK_BYTES);
        let mut served = Served { root: device.aside("tree"), device };
        served.mount();
        served
    }

    fn mount(&mut self) {
        let mut command = Command::new("timeout");
        command.args(["200", LEASEFS, "mount"]).arg(&self.root).arg("--state").arg(self.state());
        assert_ok(&command.output_in_time());
    }

    fn unmount(&self) {
        assert_ok(&Command::new("timeout").args(["200", LEASEFS, "unmount"]).arg(&self.root).output_in_time());
    }

    fn state(&self) -> PathBuf {
        self.device.path().join("state")
    }

    fn claim(&self, key: &str) -> PathBuf {
        self.root.join("claims").join(key)
    }

    fn verify(&self) {
        assert_ok(&Command::new(LEASEFS).arg("verify").arg("--state").arg(self.state()).output_in_time());
    }

    /// What may be read while nothing can be recorded.
    fn assert_reads_go_on(&self, key: &str, epoch: u64, holder: (&Agent, i64), reader: &Agent) {
        let began = Instant::now();
        let text = fs::read_to_string(self.root.join("status").join(key)).expect("status");
        assert!(text.contains(&format!("\"epoch\":{epoch}")) && text.contains("\"held\""), "{text}");
        assert_eq!(holder.0.epoch(holder.1), Ok(epoch), "the holder has it still");
        assert_eq!(reader.create(&self.claim(key)), Err(Errno::EEXIST));
        assert!(fs::read_to_string(self.root.join(".leasefs/metrics")).is_ok());
        assert_eq!(fs::read_to_string(self.root.join("results/done/1")).expect("result"), "done");
        assert!(began.elapsed() < PATIENCE, "reads took {:?}", began.elapsed());
    }
}

impl Drop for Served {
    fn drop(&mut self) {
        self.device.set(Faults::default());
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
        if mounts.lines().any(|line| line.split(' ').nth(1) == self.root.to_str()) {
            Command::new("umount").arg("-l").arg(&self.root).quietly_in_time();
        }
    }
}

/// Has the server record what it decided so far.
const RECORD: &str = "fd = os.open(path, os.O_RDONLY); os.fsync(fd); os.close(fd)";

fn prepare(served: &Served) -> (Agent, i64, Agent) {
    let (holder, other) = (Agent::new(), Agent::new());
    let held = holder.create(&served.claim("held")).expect("free key");
    let done = other.create(&served.claim("done")).expect("free key");
    let draft = other.handle(&served.root.join("results/done/1"));
    other.write(draft, "done").expect("registered");
    other.fsync(draft).expect("commits");
    other.close(draft);
    other.close(done);
    (holder, held, other)
}

/// Claims that are refused and claims that are granted: the epochs told.
fn claim_some(agent: &Agent, served: &Served, count: usize) -> (Vec<u64>, Vec<Errno>) {
    let (mut told, mut refused) = (Vec::new(), Vec::new());
    for _ in 0..count {
        match agent.create(&served.claim("k")) {
            Ok(fd) => {
                told.push(agent.epoch(fd).expect("a holder reads its epoch"));
                agent.close(fd);
            }
            Err(errno) => refused.push(errno),
        }
    }
    (told, refused)
}

#[test]
fn a_disk_that_fails_grants_nothing_and_after_its_repair_all_that_was_told_is_there() {
    for faults in
        [Faults { flush: true, ..Faults::default() }, Faults { write: true, flush: true, ..Faults::default() }]
    {
        let mut served = Served::new();
        let (holder, held, other) = prepare(&served);
        let (mut told, refused) = claim_some(&other, &served, 20);
        assert_eq!((told.len(), refused.len()), (20, 0));
        // A claim takes what was given back before it along to the disk.
        other.script(RECORD, serde_json::json!({ "path": served.root.join(".leasefs/config") })).expect("fsync");
        other.create(&served.claim("mark")).expect("free key");
        served.device.set(faults);
        let (meanwhile, refused) = claim_some(&other, &served, 20);
        assert!(refused.iter().all(|errno| *errno == Errno::EIO), "{refused:?}");
        assert!(meanwhile.is_empty(), "granted although nothing can be synced: {meanwhile:?}");
        served.assert_reads_go_on("held", 1, (&holder, held), &other);
        // ext4 gives up writing after this: only a repair helps, which needs it unmounted.
        served.device.set(Faults::default());
        drop((holder, other));
        Command::new(LEASEFS).arg("unmount").arg(&served.root).quietly_in_time();
        wait_for("the server's end", || {
            Command::new("umount").arg(served.device.path()).output_in_time().status.success()
        });
        served.device.repair();
        served.device.mount();
        served.mount();
        let agent = Agent::new();
        let (after, refused) = claim_some(&agent, &served, 5);
        assert_eq!(refused, [], "it works again");
        told.extend(after);
        assert_eq!(told, (1..=25).collect::<Vec<_>>(), "no epoch is skipped or repeated");
        assert_eq!(fs::read_to_string(served.root.join("results/done/1")).expect("result"), "done");
        drop(agent);
        served.unmount();
        served.verify();
    }
}

#[test]
fn a_slow_disk_delays_grants_and_not_reads() {
    const DELAY: Duration = Duration::from_millis(400);
    let served = Served::new();
    let (holder, held, other) = prepare(&served);
    served.device.set(Faults { flush_delay: DELAY, ..Faults::default() });
    // From the first slow commit on, another thread waits for the disk.
    let (mut told, refused) = claim_some(&other, &served, 2);
    assert_eq!(refused, []);
    let claimer = Agent::new();
    let mut claims = 0;
    let mut claim_slowly = || {
        claims += 1;
        let began = Instant::now();
        claimer
            .begin("open", serde_json::json!([served.claim("k"), libc::O_RDWR | libc::O_CREAT | libc::O_EXCL, 0o666]));
        let mut reads = 0;
        let mut slowest = Duration::ZERO;
        let answer = loop {
            let read_began = Instant::now();
            assert_eq!(holder.epoch(held), Ok(1));
            assert!(fs::read_to_string(served.root.join("status/held")).is_ok());
            assert_eq!(fs::read_to_string(served.root.join("results/done/1")).expect("result"), "done");
            slowest = slowest.max(read_began.elapsed());
            reads += 1;
            if let Some(answer) = claimer.answer_within(Duration::ZERO) {
                break answer;
            }
        };
        let fd = answer.expect("granted in the end").as_i64().expect("a descriptor");
        assert!(began.elapsed() >= DELAY, "granted after {:?}, before it was on disk", began.elapsed());
        told.push(claimer.epoch(fd).expect("holder"));
        claimer.close(fd);
        if slowest < DELAY / 2 { Ok(()) } else { Err(format!("a read took {slowest:?} of {reads} meanwhile")) }
    };
    for _ in 0..3 {
        shown_once("reads that do not wait for the disk", &mut claim_slowly);
    }
    served.device.set(Faults::default());
    let (after, refused) = claim_some(&other, &served, 5);
    assert_eq!(refused, []);
    told.extend(after);
    assert_eq!(told, (1..=7 + claims).collect::<Vec<_>>());
    drop((holder, other, claimer));
    served.unmount();
    served.verify();
}
