//! The keeper: another server takes over a live mount, upgrades, signals, and what becomes of a server that cannot live.

#[path = "../common/mod.rs"]
mod common;
mod place;

mod beside;
mod ends;
mod inherited;
mod killed;
mod load;
mod service;
mod upgrade;
mod waiters;
