//! Claiming: every form excludes every other, for every user, until the last copy of the handle is gone. Contract §3.

#[path = "../common/mod.rs"]
mod common;

mod attrs;
mod copies;
mod finished;
mod forms;
mod getlk;
mod hostile;
mod namespaces;
mod opens;
mod order;
mod relock;
mod shared;
mod uids;
mod unlink;
