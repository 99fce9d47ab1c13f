//! The connection is lost: server and keeper are gone, or the kernel was told to cut it. What was held stays held for as
//! long as it may be held, and not longer (contract §5).

#[path = "../common/mod.rs"]
mod common;

mod back;
mod blind;
mod dead_mount;
mod ends;
mod held;
mod lost;
mod reap;
mod shared;
