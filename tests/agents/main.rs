//! Agents that cannot keep a file open: `leasefs claim`, and what later processes do with the attempt it keeps.

#[path = "../common/mod.rs"]
mod common;

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
