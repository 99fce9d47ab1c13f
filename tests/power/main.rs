//! A power cut at any moment: what a client was told is still true of what is on the disk (§3, §6, I-CRASH-KEEP).

#[path = "../common/mod.rs"]
mod common;
#[path = "../common/device.rs"]
mod device;

mod cut;
mod replay;
