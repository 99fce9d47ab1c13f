//! A registry that refuses commits: what was refused never was, what was granted stays, and all is well once it is.

use std::sync::Arc;

use parking_lot::Mutex;
use proptest::prelude::*;

use crate::check;
use crate::game::{Game, turn};

#[test]
fn a_refused_commit_grants_nothing_and_takes_nothing_back() {
    check(1_200, prop::collection::vec(turn(true), 1..=60), |turns| {
        let game = Arc::new(Mutex::new(Game::new()));
        for turn in &turns {
            Game::take(&game, turn);
        }
        Game::verdict(&game)
    });
}
