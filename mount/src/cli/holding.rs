//! Holding keys from a command: taking the lock, waiting in line, renewing; shared by the commands that hold.

pub mod claim;
pub mod time;
pub mod waiting;
