//! Waiters: served in order of arrival, gone at once when a signal ends them, and in nobody's way. Contract §3.

#[path = "../common/mod.rs"]
mod common;

mod ends;
mod kills;
mod limits;
mod order;
mod others;
