//! The engine over SQLite, many keys, batches of any size, and servers that end and start again.

use std::sync::Arc;

use parking_lot::Mutex;
use proptest::prelude::*;

use crate::check;
use crate::game::{Game, Turn, turn};
use crate::rig::storage;

#[test]
fn every_answer_and_every_restart_is_as_the_contract_says() {
    let end = any::<bool>();
    check(1_000, (storage(), prop::collection::vec(turn(false), 1..=60), end), |(storage, turns, rebooted)| {
        let game = Arc::new(Mutex::new(Game::on(storage)));
        for turn in &turns {
            Game::take(&game, turn);
        }
        Game::verdict(&game)?;
        Game::take(&game, &Turn::Restart(rebooted));
        Game::verdict(&game)
    });
}
