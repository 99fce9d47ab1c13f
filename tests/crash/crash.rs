//! Sixteen processes, all operations at random, and a server that is killed hundreds of times meanwhile.
//!
//! No client may see an error it would not have seen without the kills; no lease is lost or doubled, no epoch skipped or
//! repeated, no committed byte lost, and no call takes more than a second. Judged from the workers' own logs, then from the
//! registry, then once more after the tree was mounted anew.
use std::fs;
use std::time::Duration;

use nix::mount::MntFlags;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serial_test::serial;

use crate::attempt::SHARED_UID;
use crate::common::{Mount, wait_for};
use crate::fleet::Fleet;
use crate::history::{History, Lease, Violation};
use crate::judge::{epochs_grow, no_overlap};
use crate::killer::{self, Killer, Plan, Recovery};
use crate::roles::Role;
use crate::round::{finish, make_namespace};
use crate::settings::Settings;
use crate::sys::{self, Number, now};
use crate::worker::Job;
use crate::{registry, results, trace, verdict};

/// Those that do everything, at random; six more do one thing throughout.
const WORKERS: u64 = 10;
const KEYS: u64 = 4;
const TTL_MS: u64 = 24 * 3_600_000;

/// Longest a round may take, whatever it is to reach.
const ROUND_NS: u64 = 600 * SECOND_NS;
const SECOND_NS: u64 = 1_000_000_000;

/// How the tree is mounted, and what clients may see of a kill.
#[derive(Clone, Copy, Debug)]
struct Mode {
    options: &'static [&'static str],
    interrupted: bool,
}

#[test]
#[serial]
fn nobody_notices_the_server_die() {
    rounds("crash", Mode { options: &["--allow-other"], interrupted: false });
}

#[test]
#[serial]
fn without_resend_calls_are_interrupted_and_no_more() {
    rounds("crash without resend", Mode { options: &["--allow-other", "--no-resend"], interrupted: true });
}

/// The other way round: where nobody takes over, the suite sees it.
#[test]
#[serial]
fn a_connection_that_is_lost_is_noticed() {
    let settings = Settings::read("crash without a keeper");
    let mount = Mount::shared();
    let mode = Mode { options: &[], interrupted: false };
    make_namespace(&mount, "c");
    make_namespace(&mount, "c-side");
    let mut fleet = Fleet::new(&mount.scratch().join("c"));
    start(&mount, &mut fleet, "c", settings.seed, mode);
    wait_for("the load is on", || fleet.board.get(Number::Claims) > 100);
    let keeper = mount.keeper_pid().expect("a keeper");
    sys::kill(keeper, libc::SIGKILL).expect("the keeper can be killed");
    wait_for("somebody sees it", || fleet.board.get(Number::Wrong) > 0);
    let violation = finish(&mut fleet, Ok(()), TTL_MS).expect_err("every call failed");
    assert!(["ERRNO", "CONTRACT"].contains(&violation.invariant), "{violation}");
    // By name or, in what a worker says of a call of its own, by number.
    let cut_off = ["ENOTCONN", "ECONNABORTED", "Err(107)", "Err(103)"];
    assert!(cut_off.iter().any(|errno| violation.history.contains(errno)), "{violation}");
}

fn rounds(name: &str, mode: Mode) {
    let settings = Settings::read(name);
    let mut mount = Mount::with(mode.options);
    for at in settings.rounds() {
        if let Err(violation) = round(&mut mount, &settings, mode, at) {
            panic!("{name}: LEASEFS_SEED={} round {at}: {violation}", settings.seed);
        }
    }
    mount.verify();
}

fn job(mount: &Mount, role: Role, keys: &[String], seed: u64, mode: Mode) -> Job {
    Job { interrupted: mode.interrupted, ..Job::new(role, mount.root(), keys.to_vec(), seed, TTL_MS) }
}

/// Starts all of them; the random ones last, when the others have what they hold.
fn start(mount: &Mount, fleet: &mut Fleet, namespace: &str, seed: u64, mode: Mode) {
    let key = |name: &str| format!("{namespace}/{name}");
    let one = |name: &str| vec![key(name)];
    // The forms of these are fixed by their seeds: created, and a POSIX lock, which is an owner of another kind.
    fleet.add(job(mount, Role::Pin, &one("pin0"), 0, mode), false);
    fleet.add(job(mount, Role::Pin, &one("pin1"), 3, mode), false);
    fleet.add(job(mount, Role::Share, &one("shared"), 0, mode), false);
    fleet.add(job(mount, Role::Report, &one("report"), 0, mode), false);
    mount.wait_status(&key("pin0"), "held", |status| status["state"] == "held");
    mount.wait_status(&key("pin1"), "held", |status| status["state"] == "held");
    mount.wait_status(&key("shared"), "shared", |status| status["state"] == "shared");
    for waiter in 1..=2 {
        fleet.add(job(mount, Role::Wait, &one("pin1"), waiter, mode), false);
        mount.wait_status(&key("pin1"), "in line", |status| status["waiters"].as_u64() == Some(waiter));
    }
    for slot in 0..WORKERS {
        let mut keys: Vec<String> = (0..KEYS).map(|at| key(&format!("k{at}"))).collect();
        keys.extend([key("shared"), key(&format!("own{slot}"))]);
        let seed = seed.wrapping_add(slot + 1);
        // Root sets no TTL, and those who do share no uid.
        let uid = if slot % 2 == 0 { 0 } else { SHARED_UID + 1 + slot as u32 };
        fleet.add(Job { uid, ..job(mount, Role::Work, &keys, seed, mode) }, true);
    }
}

fn round(mount: &mut Mount, settings: &Settings, mode: Mode, at: u64) -> Result<(), Violation> {
    let namespace = format!("c-{at}");
    make_namespace(mount, &namespace);
    make_namespace(mount, &format!("{namespace}-side"));
    let logs = mount.scratch().join(&namespace);
    let mut fleet = Fleet::new(&logs);
    let seed = settings.seed.wrapping_add(at << 32);
    start(mount, &mut fleet, &namespace, seed, mode);

    let plan = Plan { pause_us: 600_000, early_once_in: 12, seed };
    let killer = (killer::wanted() > 0).then(|| Killer::start(mount.root(), plan));
    let mut rng = StdRng::seed_from_u64(!seed);
    let began = now();
    let mut ran = Ok(());
    // A machine on which a kill takes more than a second makes do with fewer.
    let has_enough = |kills| {
        kills >= killer::wanted() || kills >= killer::wanted() / 4 && now() - began > killer::wanted() * SECOND_NS
    };
    let is_over = |killer: &Option<Killer>| match killer {
        Some(killer) => has_enough(killer.kills()) || killer.gave_up(),
        None => now() - began > settings.hostile.as_nanos() as u64,
    };
    while ran.is_ok() && !is_over(&killer) && fleet.board.get(Number::Wrong) == 0 {
        // The clients die too, now and then, in any call.
        if rng.random_ratio(1, 200) {
            let slot = rng.random_range(fleet.len() - WORKERS as usize..fleet.len());
            fleet.kill(slot, rng.random());
        }
        ran = fleet.tend();
        if now() - began > ROUND_NS {
            ran = Err(format!(
                "the round did not end; the server was killed {:?} times",
                killer.as_ref().map(Killer::kills)
            ));
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    // The server goes on dying until the last worker is gone.
    let ended = finish(&mut fleet, ran, TTL_MS);
    if ended.is_err() {
        // Cut off whoever hangs in a call, or nothing would end here. What they see from now on no longer counts.
        let _ = nix::mount::umount2(&mount.root(), MntFlags::MNT_FORCE);
    }
    let (recoveries, gave_up) = killer.map(Killer::stop).unwrap_or_default();
    let mut history = ended?;
    history.outages = recoveries.iter().map(|recovery| (recovery.killed, recovery.answered)).collect();
    let interrupted = fleet.board.get(Number::Interrupted);
    println!(
        "{namespace}: {:.1} s, {} workers killed, {} calls interrupted and made again, the machine stood still {} times",
        (now() - began) as f64 / 1e9,
        fleet.kills,
        interrupted,
        history.stalls.len()
    );
    verdict::print_recoveries(&recoveries);
    verdict::print(&history);
    if let Some(trouble) = gave_up {
        return Err(history.violation("LIVENESS", "", now(), trouble));
    }
    judge(mount, &history, &namespace, mode, &recoveries)?;
    drop(fleet);
    fs::remove_dir_all(&logs).expect("logs can be removed");
    Ok(())
}

fn judge(
    mount: &mut Mount,
    history: &History,
    namespace: &str,
    mode: Mode,
    recoveries: &[Recovery],
) -> Result<(), Violation> {
    let intervals = no_overlap(history)?;
    epochs_grow(history)?;
    let report = trace::check(history)?;
    in_order(history, &format!("{namespace}/pin1"))?;
    verdict::nobody_waits(history)?;
    // The end of the last processes is on its way to the server; a status answers behind it.
    let judged: Vec<String> = history.keys().into_iter().filter(|key| !key.contains("-side/")).collect();
    for key in &judged {
        wait_for("all handles are closed", || ["free", "finished"].contains(&mount.state_of(key).as_str()));
    }
    let found = results::read(mount, &judged);
    let whole = results::are_their_own(history, &found)?;
    mount.wait_applied();
    let (rows, keys) = registry::read_settled(&mount.state(), namespace);
    let books = registry::balance(history, &rows, &keys)?;
    // And once more as a tree mounted anew has it.
    mount.unmount();
    mount.start(mode.options);
    if results::read(mount, &judged) != found {
        let what = "the results are others after the tree was mounted anew".to_owned();
        return Err(history.violation("I-CRASH-KEEP", &judged[0], now(), what));
    }
    let (again, _) = registry::read_settled(&mount.state(), namespace);
    if again != rows {
        let what = "the attempts are others after the tree was mounted anew".to_owned();
        return Err(history.violation("I-CRASH-KEEP", &judged[0], now(), what));
    }
    println!(
        "  {} epochs ({} untold, {} expired, {} with a result, {whole} of them read back whole); {intervals} holding times without \
         overlap; {} register calls in order ({} denials explained, {} excused, widest {}); {} recoveries",
        books.epochs,
        books.untold,
        books.expired,
        books.completed,
        report.checked.calls,
        report.denials,
        report.excused,
        report.checked.widest,
        recoveries.len(),
    );
    Ok(())
}

/// Those who got into line for the key one after the other got it in that order.
pub fn in_order(history: &History, key: &str) -> Result<(), Violation> {
    let mut leases: Vec<&Lease> = history.leases.iter().filter(|lease| lease.key == key).collect();
    leases.sort_by_key(|lease| lease.epoch);
    let order: Vec<usize> = leases.iter().map(|lease| history.runs[lease.run].slot).collect();
    if !order.is_sorted() {
        let what =
            format!("workers got into line in the order of their numbers, and had the key in the order {order:?}");
        return Err(history.violation("FIFO", key, leases[0].asked, what));
    }
    Ok(())
}
