//! Results: one per attempt, written by the registered attempt alone, published whole or not at all. Contract §6.

#[path = "../common/mod.rs"]
mod common;

mod commit;
mod draft;
mod killed;
mod race;
mod reporting;
mod users;
