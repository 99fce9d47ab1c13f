//! Holding: the record and its note, renewal, loss, deadlines, and what the tree tells about it all. Contract §2, §4, §5.

#[path = "../common/mod.rs"]
mod common;

mod agent;
mod events;
mod evict;
mod history;
mod holds;
mod line;
mod note;
mod notify;
mod orders;
mod readdir;
mod record;
mod renew;
mod stale;
mod status;
mod tree;
mod ttl;

/// A time of `status/KEY` in milliseconds since 1970.
fn millis(status: &serde_json::Value, field: &str) -> i64 {
    let text = status[field].as_str().unwrap_or_else(|| panic!("{field} is a time: {status}"));
    let time: jiff::Timestamp = text.parse().unwrap_or_else(|e| panic!("{field} is RFC 3339: {e}"));
    time.as_millisecond()
}

/// Waits until the wall clock has passed this time.
fn wait_until(millis: i64) {
    common::wait_for("the clock", || jiff::Timestamp::now().as_millisecond() > millis);
}
