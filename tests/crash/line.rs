//! The order of arrival outlives the server: waiters of every kind, killed under at each arrival and at each grant.
use std::fs::File;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serial_test::serial;

use crate::common::{Mount, wait_for};
use crate::crash::in_order;
use crate::fleet::Fleet;
use crate::killer::{self, Killer, Plan, kill_once};
use crate::roles::Role;
use crate::round::{finish, make_namespace};
use crate::settings::Settings;
use crate::worker::Job;

const TTL_MS: u64 = 24 * 3_600_000;
const WAITERS: u64 = 12;
const ROUNDS: u64 = 4;

#[test]
#[serial]
fn the_order_of_arrival_outlives_the_server() {
    lines(&[], false);
}

#[test]
#[serial]
fn without_resend_the_order_of_arrival_is_that_of_those_who_try_again() {
    lines(&["--no-resend"], true);
}

fn lines(options: &[&str], interrupted: bool) {
    let settings = Settings::read("line");
    let mut rng = StdRng::seed_from_u64(settings.seed);
    let mount = Mount::with(options);
    make_namespace(&mount, "line");
    for round in 0..ROUNDS {
        let key = format!("line/k{round}");
        let logs = mount.scratch().join(format!("line{round}"));
        let mut fleet = Fleet::new(&logs);
        let first = File::create(mount.claim(&key)).expect("open");
        first.lock().expect("a free key");
        for slot in 0..WAITERS {
            let job = Job::new(Role::Queue, mount.root(), vec![key.clone()], slot, TTL_MS);
            fleet.add(Job { interrupted, ..job }, false);
            wait_for("one more in line", || mount.status(&key)["waiters"].as_u64() == Some(slot + 1));
            if killer::wanted() > 0 && rng.random_ratio(1, 2) {
                kill_once(&mount.root()).expect("another server answers");
                wait_for("all in line again", || mount.status(&key)["waiters"].as_u64() == Some(slot + 1));
            }
        }
        let plan = Plan { pause_us: 4_000, early_once_in: 0, seed: settings.seed.wrapping_add(round) };
        let killer = (killer::wanted() > 0).then(|| Killer::start(mount.root(), plan));
        drop(first);
        let history = finish(&mut fleet, Ok(()), TTL_MS);
        if let Some((recoveries, Some(trouble))) = killer.map(Killer::stop) {
            panic!("LEASEFS_SEED={} round {round}, after {} recoveries: {trouble}", settings.seed, recoveries.len());
        }
        let history = history.unwrap_or_else(|e| panic!("LEASEFS_SEED={} round {round}: {e}", settings.seed));
        let granted = history.leases.iter().filter(|lease| lease.epoch.is_some()).count();
        assert_eq!(granted as u64, WAITERS, "everybody in line got the key");
        in_order(&history, &key).unwrap_or_else(|e| panic!("LEASEFS_SEED={} round {round}: {e}", settings.seed));
    }
    mount.verify();
}
