//! A registry that refuses commits: what was refused never was, what was granted stays, and all is well once it is.

use std::sync::Arc;

use parking_lot::Mutex;
use proptest::prelude::*;

use crate::check;
use crate::game::{Game, turn};
use crate::rig::storage;

#[test]
fn a_refused_commit_grants_nothing_and_takes_nothing_back() {
    check(1_600, (storage(), prop::collection::vec(turn(true), 1..=60)), |(storage, turns)| {
        let game = Arc::new(Mutex::new(Game::on(storage)));
        for turn in &turns {
            Game::take(&game, turn);
        }
        Game::verdict(&game)
    });
}
