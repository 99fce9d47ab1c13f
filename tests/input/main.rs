//! Bad input: the errno of §8 or one line on stderr, and nothing granted or lost.

#[path = "../common/mod.rs"]
mod common;

mod clash;
mod disk;
mod keys;
mod mountpoint;
mod operations;
mod place;
mod state;
mod ttl;
