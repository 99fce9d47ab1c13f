//! What the workers of these suites can be.
use serde::{Deserialize, Serialize};

use crate::worker::Worker;
use crate::{attempt, contend, evictor, s3_remediation};

/// What a worker does all day.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Role {
    /// S1: claims, holds for moments, releases.
    Contend,
    /// S1: waits in line once.
    Queue,
    /// S2: lives whole attempts, with renewals, expiry and results.
    Attempt,
    /// S3: holds as long as it can.
    Keep,
    /// S3: holds one lease from start to end of the run.
    Pin,
    /// S3: claims at once, holds for a moment, exits.
    Fresh,
    /// S3: holds for a moment, over and over.
    Brief,
    /// S3: tries to end what is not its own.
    Evict,
}

/// Does it.
pub fn play(worker: &mut Worker, role: Role) {
    match role {
        Role::Contend => contend::contend(worker),
        Role::Queue => contend::queue(worker),
        Role::Attempt => attempt::attempt(worker),
        Role::Keep => s3_remediation::keep(worker),
        Role::Pin => s3_remediation::pin(worker),
        Role::Fresh => s3_remediation::fresh(worker),
        Role::Brief => s3_remediation::brief(worker),
        Role::Evict => evictor::evict(worker),
    }
}
