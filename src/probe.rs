//! Named points inside the engine that a test may watch: between two steps of which a crash must leave the right answer.
//!
//! The engine only says where it is. Nobody listens unless [`observe`] was called.

use std::sync::OnceLock;

/// About to write what was decided to the registry.
pub const BEFORE_COMMIT: &str = "before-commit";
/// It is in the registry; nobody was told.
pub const AFTER_COMMIT: &str = "after-commit";
/// One of a batch was told, and there is another.
pub const BETWEEN_ANSWERS: &str = "between-answers";
/// A draft has its place among the results; no row counts it yet.
pub const PUBLISH: &str = "publish";
/// A lease was found to be past its deadline; nothing of that is recorded.
pub const EXPIRY: &str = "expiry";
/// The registry's tables are being made or changed, inside the transaction that does so.
pub const MIGRATION: &str = "migration";

/// Rows were pruned; their files are still there.
pub const PRUNED: &str = "pruned";

static OBSERVER: OnceLock<fn(&'static str)> = OnceLock::new();

/// Has every point call `observer` from now on. Only the first call counts.
pub fn observe(observer: fn(&'static str)) {
    let _ = OBSERVER.set(observer);
}

pub(crate) fn at(point: &'static str) {
    if let Some(observer) = OBSERVER.get() {
        observer(point);
    }
}
