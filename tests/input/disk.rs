//! A state directory that is full: `ENOSPC`, nothing granted, nothing lost, and on it goes when there is room.

use std::fs;
use std::path::Path;

use nix::errno::Errno;
use serde_json::json;

use crate::common::agent::{Agent, Fd};
use crate::common::{InTime, LEASEFS, assert_ok};
use crate::place::{Place, assert_not_mounted, assert_refused};

/// Takes all the room that is left.
fn fill(disk: &Path) -> std::path::PathBuf {
    use std::io::Write;
    let path = disk.join("ballast");
    let mut file = fs::OpenOptions::new().create(true).append(true).open(&path).expect("ballast");
    for size in [1 << 16, 4096, 1] {
        let block = vec![0; size];
        while file.write_all(&block).is_ok() {}
    }
    path
}

struct Served {
    place: Place,
    disk: std::path::PathBuf,
}

impl Served {
    fn new() -> Served {
        let place = Place::new();
        let disk = place.tmpfs("disk", "24m");
        assert_ok(&place.mount_at(&place.mnt(), &disk.join("state"), &[]));
        Served { place, disk }
    }

    fn claim(&self, key: &str) -> std::path::PathBuf {
        self.place.mnt().join("claims").join(key)
    }

    fn status(&self, key: &str) -> serde_json::Value {
        let text = fs::read_to_string(self.place.mnt().join("status").join(key)).expect("status");
        serde_json::from_str(&text).expect("JSON")
    }

    fn end(self) {
        self.place.assert_unmounts();
        let output = std::process::Command::new(LEASEFS)
            .arg("verify")
            .arg("--state")
            .arg(self.disk.join("state"))
            .output_in_time();
        assert_ok(&output);
    }
}

/// Claims and releases until there is no more room; the last epoch that was told, and the errno.
const UNTIL_FULL: &str = r#"
last = first
for _ in range(60000):
    try: fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    except OSError as e:
        result = [last, e.errno]
        break
    epoch = int(read(fd).split(b"\n")[0])
    assert epoch == last + 1, f"epoch {epoch} after {last}"
    last = epoch
    os.close(fd)
else: result = [last, 0]
"#;

#[test]
fn a_full_disk_grants_nothing_and_spends_no_epoch() {
    let served = Served::new();
    let path = served.claim("k");
    let agent = Agent::new();
    let ballast = fill(&served.disk);
    let mut last = 0;
    for round in 0..3 {
        let answer = agent.script(UNTIL_FULL, json!({ "path": path, "first": last })).expect("claims");
        last = answer[0].as_u64().expect("an epoch");
        assert_eq!(answer[1], Errno::ENOSPC as i32, "round {round}: after {last} claims");
        assert!(!path.exists(), "nothing was granted");
        if last > 0 {
            let status = served.status("k");
            assert_eq!(
                (status["state"].as_str(), status["epoch"].as_u64()),
                (Some("free"), Some(last)),
                "round {round}"
            );
        }
        // Some room, and it goes on where it was; the next round fills that too.
        fs::OpenOptions::new().write(true).open(&ballast).expect("ballast").set_len(4 << 20).expect("truncate");
        let fd = agent.create(&path).expect("there is room again");
        last += 1;
        assert_eq!(agent.epoch(fd), Ok(last), "round {round}: no epoch was spent");
        agent.close(fd);
        fill(&served.disk);
    }
    fs::remove_file(ballast).expect("ballast");
    served.end();
}

#[test]
fn a_lease_held_when_the_disk_fills_is_neither_lost_nor_stuck() {
    let served = Served::new();
    let (holder, other) = (Agent::new(), Agent::new());
    let held: Fd = holder.create(&served.claim("held")).expect("free key");
    let ballast = fill(&served.disk);
    let answer = other.script(UNTIL_FULL, json!({ "path": served.claim("k"), "first": 0 })).expect("claims");
    assert_eq!(answer[1], Errno::ENOSPC as i32);
    assert_eq!(holder.epoch(held), Ok(1), "the holder has it still");
    assert_eq!(other.create(&served.claim("held")), Err(Errno::EEXIST));
    holder.close(held);
    // Given back, whether that could be written down or not: the kernel has released the handle.
    let answer = other.create(&served.claim("held"));
    assert!(matches!(answer, Ok(_) | Err(Errno::ENOSPC)), "{answer:?}");
    fs::remove_file(ballast).expect("ballast");
    let fd = match answer {
        Ok(fd) => fd,
        Err(_) => other.create(&served.claim("held")).expect("free, and there is room"),
    };
    assert_eq!(other.epoch(fd), Ok(2));
    drop((holder, other));
    served.end();
}

#[test]
fn a_result_that_does_not_fit_is_enospc_and_can_be_written_when_there_is_room() {
    let served = Served::new();
    let agent = Agent::new();
    let fd = agent.create(&served.claim("k")).expect("free key");
    let path = served.place.mnt().join("results/k/1");
    let draft = agent.handle(&path);
    agent.write(draft, "the beginning ").expect("registered attempt");
    let ballast = fill(&served.disk);
    let block = "x".repeat(65_536);
    let mut failed = None;
    for _ in 0..64 {
        if let Err(errno) = agent.call("pwrite", json!([draft, { "hex": "78".repeat(block.len()) }, 14])) {
            failed = Some(errno);
            break;
        }
    }
    assert_eq!(failed, Some(Errno::ENOSPC));
    assert!(!path.exists());
    fs::remove_file(ballast).expect("ballast");
    assert_eq!(agent.call("ftruncate", json!([draft, 14])).map(drop), Ok(()), "what was written before is there");
    agent.call("lseek", json!([draft, 0, libc::SEEK_END])).expect("lseek");
    agent.write(draft, "and the end").expect("there is room again");
    assert_eq!(agent.fsync(draft), Ok(()));
    assert_eq!(fs::read_to_string(&path).expect("committed"), "the beginning and the end");
    agent.close(draft);
    agent.close(fd);
    drop(agent);
    served.end();
}

#[test]
fn a_mount_on_a_full_disk_says_so() {
    let place = Place::new();
    let disk = place.tmpfs("disk", "1m");
    fill(&disk);
    let output = place.mount_at(&place.mnt(), &disk.join("state"), &[]);
    assert_refused(&output, &disk, &[&["no space", "full", "room"]]);
    assert_not_mounted(&place.mnt());
}
