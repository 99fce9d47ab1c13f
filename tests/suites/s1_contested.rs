//! S1, contested keys: many processes race for few keys by every form of claim, and are stopped, killed and replaced meanwhile.
//!
//! Judged by the holders' own time stamps: no two holding times of a key overlap, every epoch has one winner, and the
//! epochs of a key grow with time. The register check and the books of [`registry`](crate::registry) come on top.
use std::fs;

use rand::SeedableRng;
use rand::rngs::StdRng;
use serial_test::serial;

use crate::common::{Mount, wait_for};
use crate::fleet::{Chaos, Fleet};
use crate::history::{Lease, Violation};
use crate::judge::{epochs_grow, no_overlap};
use crate::record::Op;
use crate::roles::Role;
use crate::round::{finish, make_namespace, run};
use crate::settings::Settings;
use crate::worker::Job;
use crate::{registry, trace};

const PROCESSES: u64 = 8;
const KEYS: u64 = 4;
const TTL_MS: u64 = 24 * 3_600_000;

#[test]
#[serial]
fn s1_contested_keys_have_one_holder_each() {
    let settings = Settings::read("S1");
    let mount = Mount::shared();
    for round in settings.rounds() {
        s1_round(&mount, &settings, round).unwrap_or_else(|e| panic!("S1 seed {} round {round}: {e}", settings.seed));
    }
    mount.verify();
}

fn s1_round(mount: &Mount, settings: &Settings, round: u64) -> Result<(), Violation> {
    let namespace = format!("s1-{round}");
    make_namespace(mount, &namespace);
    let logs = mount.scratch().join(&namespace);
    let mut fleet = Fleet::new(&logs);
    let seed = settings.seed.wrapping_add(round << 32);
    for slot in 0..PROCESSES {
        let keys = (0..KEYS).map(|key| format!("{namespace}/k{key}")).collect();
        let job = Job::new(Role::Contend, mount.root(), keys, seed.wrapping_add(slot + 1), TTL_MS);
        fleet.add(Job { uid: if slot % 2 == 0 { 0 } else { 20_000 + slot as u32 }, ..job }, true);
    }
    let rng = StdRng::seed_from_u64(seed);
    let mut chaos = Chaos { rng, freeze_once_in: 12, freeze_ms: (1, 40), kill_once_in: 40 };
    let history = run(&mut fleet, &mut chaos, settings.claims, TTL_MS)?;

    let intervals = no_overlap(&history)?;
    epochs_grow(&history)?;
    let report = trace::check(&history)?;
    // The end of the last processes is on its way to the server; a status answers behind it.
    for key in history.keys() {
        wait_for("all handles are closed", || mount.state_of(&key) == "free");
    }
    mount.wait_applied();
    let (rows, keys) = registry::read_settled(&mount.state(), &namespace);
    let books = registry::balance(&history, &rows, &keys)?;
    let is_claim = |op: Op| matches!(op, Op::Claim { .. });
    println!(
        "S1 round {round}: {} claims, {} denials, {} waits, {} interrupted, {} kills, {} freezes; {} epochs ({} untold); \
         {intervals} holding times without overlap; {} register calls in order ({} denials explained, {} excused, widest {})",
        history.count(|call| is_claim(call.op) && call.ok()),
        history.count(|call| is_claim(call.op) && matches!(call.answer, Some(Err(libc::EEXIST | libc::EAGAIN)))),
        history.count(|call| matches!(call.op, Op::Claim { wait: true, .. })),
        history.count(|call| call.answer == Some(Err(libc::EINTR))),
        fleet.kills,
        fleet.freezes.len(),
        books.epochs,
        books.untold,
        report.checked.calls,
        report.denials,
        report.excused,
        report.checked.widest,
    );
    drop(fleet);
    fs::remove_dir_all(&logs).expect("logs can be removed");
    Ok(())
}

#[test]
#[serial]
fn s1_waiters_get_the_key_in_order_of_arrival() {
    let mount = Mount::new();
    make_namespace(&mount, "line");
    let logs = mount.scratch().join("line");
    let mut fleet = Fleet::new(&logs);
    let first = fs::File::create(mount.claim("line/k")).expect("open");
    first.lock().expect("a free key");
    let waiters = 12;
    for slot in 0..waiters {
        fleet.add(Job::new(Role::Queue, mount.root(), vec!["line/k".into()], slot, TTL_MS), false);
        wait_for("one more in line", || mount.status("line/k")["waiters"].as_u64() == Some(slot + 1));
    }
    drop(first);
    let history = finish(&mut fleet, Ok(()), TTL_MS).expect("the line moves");
    let mut leases: Vec<&Lease> = history.leases.iter().collect();
    leases.sort_by_key(|lease| lease.epoch);
    let order: Vec<usize> = leases.iter().map(|lease| history.runs[lease.run].slot).collect();
    let key = "line/k";
    if order != (0..waiters as usize).collect::<Vec<_>>() {
        let what = format!("workers waited in the order 0, 1, 2, … and were granted in the order {order:?}");
        panic!("{}", history.violation("FIFO", key, leases[0].asked, what));
    }
}
