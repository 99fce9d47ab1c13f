//! What may happen in a game, and how often.

use proptest::prelude::*;

use crate::players::{Act, PROCESSES, Pause, act};
use crate::rig::Fate;

/// A step of a game.
#[derive(Clone, Debug)]
pub enum Turn {
    /// Something is done with a key.
    Play(usize, Act),
    /// A worker does its work, while all is well.
    Finish(usize, u8),
    /// Time passes, measured by a key's deadline.
    Wait(usize, Pause),
    /// What was decided is recorded, or not.
    Flush(Vec<Fate>),
    /// As above; while the first commit is on its way other things are done.
    Slow(Vec<Fate>, Vec<(usize, Act)>),
    /// The server is killed, perhaps between what it recorded last and the answers, and another takes over.
    TakeOver(bool),
    /// The server ends and another is started; perhaps the machine was rebooted in between.
    Restart(bool),
}

fn seat() -> impl Strategy<Value = usize> {
    prop_oneof![6 => Just(0usize), 2 => Just(1), 2 => Just(2)]
}

/// A step of a game with faults or of one with restarts.
pub fn turn(faults: bool) -> impl Strategy<Value = Turn> {
    let fate = move || {
        let weight = u32::from(faults) * 4;
        prop_oneof![5 => Just(Fate::Done), weight => Just(Fate::DiskFull), weight => Just(Fate::Broken)]
    };
    let fates = move || prop::collection::vec(fate(), 1..4);
    let waits = prop_oneof![
        (1..400u64).prop_map(Pause::Ms),
        prop_oneof![Just(-1i64), Just(0), Just(1)].prop_map(Pause::Deadline)
    ];
    prop_oneof![
        30 => (seat(), act()).prop_map(|(seat, act)| Turn::Play(seat, act)),
        2 => (seat(), 1..=PROCESSES).prop_map(|(seat, process)| Turn::Finish(seat, process)),
        3 => (seat(), waits).prop_map(|(seat, pause)| Turn::Wait(seat, pause)),
        8 => fates().prop_map(Turn::Flush),
        5 => (fates(), prop::collection::vec((seat(), act()), 1..6)).prop_map(|(fates, acts)| Turn::Slow(fates, acts)),
        u32::from(!faults) => any::<bool>().prop_map(Turn::Restart),
        3 * u32::from(!faults) => any::<bool>().prop_map(Turn::TakeOver),
    ]
}
