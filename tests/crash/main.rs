//! The crash suite: the server is killed again and again under a random load of all operations, and nobody notices.
//!
//! [`load`] is what the workers do, [`killer`] what happens to the server meanwhile, [`verdict`] what must have held. Workers,
//! histories and checkers are those of the property suites. README.md tells how to run.
#[path = "../common/mod.rs"]
mod common;

#[allow(dead_code, reason = "the property suites use all of it")]
#[path = "../suites/attempt.rs"]
mod attempt;
#[allow(dead_code, reason = "the property suites use all of it")]
#[path = "../suites/contend.rs"]
mod contend;
#[allow(dead_code, reason = "the property suites use all of it")]
#[path = "../suites/fleet.rs"]
mod fleet;
#[allow(dead_code, reason = "the property suites use all of it")]
#[path = "../suites/history.rs"]
mod history;
#[allow(dead_code, reason = "the property suites use all of it")]
#[path = "../suites/judge.rs"]
mod judge;
#[allow(dead_code, reason = "the property suites use all of it")]
#[path = "../suites/linear.rs"]
mod linear;
#[allow(dead_code, reason = "the property suites use all of it")]
#[path = "../suites/record.rs"]
mod record;
#[allow(dead_code, reason = "the property suites use all of it")]
#[path = "../suites/register.rs"]
mod register;
#[allow(dead_code, reason = "the property suites use all of it")]
#[path = "../suites/registry.rs"]
mod registry;
#[allow(dead_code, reason = "the property suites use all of it")]
#[path = "../suites/results.rs"]
mod results;
#[allow(dead_code, reason = "the property suites use all of it")]
#[path = "../suites/round.rs"]
mod round;
#[allow(dead_code, reason = "the property suites use all of it")]
#[path = "../suites/settings.rs"]
mod settings;
#[allow(dead_code, reason = "the property suites use all of it")]
#[path = "../suites/sys.rs"]
mod sys;
#[allow(dead_code, reason = "the property suites use all of it")]
#[path = "../suites/trace.rs"]
mod trace;
#[allow(dead_code, reason = "the property suites use all of it")]
#[path = "../suites/worker.rs"]
mod worker;

mod calls;
mod cost;
mod crash;
mod killer;
mod line;
mod load;
mod points;
mod roles;
mod side;
mod verdict;
