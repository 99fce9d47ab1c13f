//! What an operator meets: `leasefs doctor`, the help and man pages, failures with their cures, `mount -t leasefs`, the log,
//! the packages, and the units under a systemd of their own.
#[path = "../common/mod.rs"]
mod common;

mod doctor;
mod fields;
mod help;
mod log;
mod machine;
mod man;
mod messages;
mod mount_helper;
mod package;
mod units;
