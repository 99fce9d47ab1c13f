//! Agents that cannot keep a file open: `leasefs claim`, and what later processes do with the attempt it keeps.

#[path = "../common/mod.rs"]
mod common;
#[allow(dead_code, reason = "the list of connections is all that is needed here")]
#[path = "../orphans/lost.rs"]
mod lost;

mod bound;
mod complete;
mod ends;
mod handoff;
mod holder;
mod sentinel;
mod steps;
mod tools;
mod wait;
mod whose;
