//! The engine over SQLite, many keys, batches of any size, and servers that end and start again.

use std::sync::Arc;

use parking_lot::Mutex;
use proptest::prelude::*;

use crate::check;
use crate::game::{Game, Turn, turn};

#[test]
fn every_answer_and_every_restart_is_as_the_contract_says() {
    let end = any::<bool>();
    check(500, (prop::collection::vec(turn(false), 1..=60), end), |(turns, rebooted)| {
        let game = Arc::new(Mutex::new(Game::new()));
        for turn in &turns {
            Game::take(&game, turn);
        }
        Game::verdict(&game)?;
        Game::take(&game, &Turn::Restart(rebooted));
        Game::verdict(&game)
    });
}
