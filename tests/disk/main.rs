//! Faults of the disk a tree keeps its state on: full, failing, slow, damaged; and the backup that mends the last.

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/device.rs"]
mod device;
#[allow(dead_code, reason = "other tests use more of it")]
#[path = "../input/place.rs"]
mod place;

mod backup;
mod damage;
mod failing;
mod full;
