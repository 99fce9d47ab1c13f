//! What the workers of the crash suite can be.
use serde::{Deserialize, Serialize};

use crate::load;
use crate::worker::Worker;

/// What a worker does all day.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Role {
    /// Everything, at random.
    Work,
    /// Holds one lease from start to end of the run.
    Pin,
    /// Holds a shared lock from start to end.
    Share,
    /// Writes one result from start to end.
    Report,
    /// Waits in line for a pinned key until the end.
    Wait,
    /// Waits in line once.
    Queue,
}

/// Does it.
pub fn play(worker: &mut Worker, role: Role) {
    match role {
        Role::Work => load::work(worker),
        Role::Pin => load::pin(worker),
        Role::Share => load::share(worker),
        Role::Report => load::report(worker),
        Role::Wait | Role::Queue => load::queue(worker),
    }
}
