//! The engine against a small reference model of the contract, by random sequences that shrink.
//!
//! Every suite has a number of cases of its own, which `PROPTEST_CASES` scales: 256 is once, 25600 a hundred times.

mod beside;
mod contract;
mod facade;
mod faults;
mod game;
mod journal;
mod ledger;
mod limits;
#[allow(dead_code, reason = "the suites on a mount use more of it")]
#[path = "../suites/linear.rs"]
mod linear;
mod machine;
mod players;
mod prune;
mod refused;
#[allow(dead_code, reason = "the suites on a mount use more of it")]
#[path = "../suites/register.rs"]
mod register;
mod rig;
mod threads;
mod tree;
mod unread;

use proptest::strategy::Strategy;
use proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};

/// Runs a property over many inputs, and shows the smallest that breaks it.
fn check<S: Strategy>(cases: u32, inputs: S, test: impl Fn(S::Value) -> Result<(), TestCaseError>)
where
    S::Value: Clone,
{
    const USUAL: u32 = 256;
    let factor = std::env::var("PROPTEST_CASES").ok().and_then(|text| text.parse().ok()).unwrap_or(USUAL);
    let cases = (u64::from(cases) * u64::from(factor) / u64::from(USUAL)).max(1);
    let cases = u32::try_from(cases).unwrap_or(u32::MAX);
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 50_000, ..Config::default() };
    match TestRunner::new(config).run(&inputs, test) {
        Ok(()) => println!("{cases} cases"),
        Err(TestError::Fail(why, input)) => panic!("{why}\nsmallest input: {input:?}"),
        Err(TestError::Abort(why)) => panic!("{why}"),
    }
}
