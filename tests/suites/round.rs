//! One round of a suite: its namespace, the fleet at work, and the history it left.
use std::fs;
use std::time::Duration;

use crate::common::Mount;
use crate::fleet::{Chaos, Fleet};
use crate::history::{History, Violation};
use crate::sys::Number;

/// Runs a fleet until so many claims were told or something went wrong, ends it, and gives what it did.
pub fn run(fleet: &mut Fleet, chaos: &mut Chaos, claims: u64, ttl_ms: u64) -> Result<History, Violation> {
    let mut ran = Ok(());
    while ran.is_ok() && fleet.board.get(Number::Claims) < claims && fleet.board.get(Number::Wrong) == 0 {
        chaos.step(fleet);
        ran = fleet.tend();
        std::thread::sleep(Duration::from_millis(1));
    }
    finish(fleet, ran, ttl_ms)
}

/// Ends a fleet and reads what it wrote.
pub fn finish(fleet: &mut Fleet, ran: Result<(), String>, ttl_ms: u64) -> Result<History, Violation> {
    let ended = ran.and_then(|()| fleet.finish());
    let stalls = ended.as_ref().cloned().unwrap_or_default();
    let history = History::load(&fleet.gone, ttl_ms, stalls, fleet.interrupted());
    match ended {
        Ok(_) => history,
        // What the workers saw explains more than that one of them is stuck.
        Err(trouble) => Err(history.err().unwrap_or_else(|| Violation {
            invariant: "LIVENESS",
            key: String::new(),
            what: trouble,
            history: String::new(),
        })),
    }
}

/// A namespace open to all.
pub fn make_namespace(mount: &Mount, namespace: &str) {
    let path = mount.claim(namespace);
    fs::create_dir(&path).expect("mkdir of a namespace");
    crate::common::set_mode(&path, 0o777);
}
