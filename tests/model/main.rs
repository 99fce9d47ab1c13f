//! The engine against a small reference model of the contract, by random sequences that shrink.
//!
//! Every suite has a number of cases of its own, which `PROPTEST_CASES` scales: 256 is once, 25600 a hundred times. Where
//! it is set, the sequences are others each time (`LEASEFS_SEED`, printed, has them again). Where it is not, they are the
//! same each time: what a change breaks is told from what a search would have found some day.

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

use std::hash::{BuildHasher, RandomState};

use proptest::strategy::Strategy;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner};

/// Runs a property over many inputs, and shows the smallest that breaks it.
fn check<S: Strategy>(cases: u32, inputs: S, test: impl Fn(S::Value) -> Result<(), TestCaseError>)
where
    S::Value: Clone,
{
    const USUAL: u32 = 256;
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let asked = number("PROPTEST_CASES").and_then(|cases| u32::try_from(cases).ok());
    let factor = asked.unwrap_or(USUAL);
    // Of no meaning: any would do.
    let usual_seed = || if asked.is_some() { RandomState::new().hash_one(()) } else { 20_261_130 };
    let seed = number("LEASEFS_SEED").unwrap_or_else(usual_seed);
    let cases = (u64::from(cases) * u64::from(factor) / u64::from(USUAL)).max(1);
    let cases = u32::try_from(cases).unwrap_or(u32::MAX);
    let config = Config { cases, failure_persistence: None, max_shrink_iters: 50_000, ..Config::default() };
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let random = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    match TestRunner::new_with_rng(config, random).run(&inputs, test) {
        Ok(()) => println!("{cases} cases, LEASEFS_SEED={seed}"),
        Err(TestError::Fail(why, input)) => panic!("LEASEFS_SEED={seed}: {why}\nsmallest input: {input:?}"),
        Err(TestError::Abort(why)) => panic!("{why}"),
    }
}
