//! The property suites: real processes on a real mount under hostile timing, judged by the holders' own timestamps.
//!
//! [`s1_contested`], [`s2_epochs`] and [`s3_remediation`] are the suites. Each runs a [`fleet`] of worker processes, reads
//! back the logs they wrote ([`record`], [`history`]) and judges them with checkers that know nothing of the server,
//! among them the linearizability check of a lease register ([`linear`], fed by [`trace`]). README.md tells how to run.
#[path = "../common/mod.rs"]
mod common;

mod attempt;
mod contend;
mod evictor;
mod fleet;
mod history;
mod judge;
mod linear;
mod record;
mod register;
mod registry;
mod results;
mod roles;
mod round;
mod s1_contested;
mod s2_epochs;
mod s3_remediation;
mod settings;
mod sys;
mod trace;
mod worker;
