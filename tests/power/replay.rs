//! What a disk would hold had the power failed at a given point of a recording.

use std::collections::BTreeSet;

use rand::Rng;
use rand::rngs::StdRng;

use crate::device::Event;

/// A filesystem's block: what the disk writes as a whole.
const BLOCK: usize = 4096;

/// What becomes of writes that no flush came after.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Survivors {
    /// All are lost.
    None,
    /// All are there: the server's end, not the machine's.
    All,
    /// Any of their blocks, whatever the order.
    Some,
}

/// A walk through a recording.
pub struct Replay<'a> {
    events: &'a [Event],
    at: usize,
    durable: Vec<u8>,
    unsynced: Vec<(u64, &'a [u8])>,
    /// What clients had been told by then.
    pub told: BTreeSet<String>,
}

impl<'a> Replay<'a> {
    pub fn new(base: Vec<u8>, events: &'a [Event]) -> Replay<'a> {
        Replay { events, at: 0, durable: base, unsynced: Vec::new(), told: BTreeSet::new() }
    }

    /// Goes on to this many events from the beginning.
    pub fn go_to(&mut self, point: usize) {
        for event in &self.events[self.at..point] {
            match event {
                Event::Write(offset, data) => self.unsynced.push((*offset, data)),
                Event::Flush => {
                    for (offset, data) in self.unsynced.drain(..) {
                        put(&mut self.durable, offset, data);
                    }
                }
                Event::Lost => self.unsynced.clear(),
                Event::Told(lines) => self.told.extend(lines.lines().map(str::to_owned)),
            }
        }
        self.at = point;
    }

    /// The disk, had the power failed here.
    pub fn image(&self, survivors: Survivors, random: &mut StdRng) -> Vec<u8> {
        let mut image = self.durable.clone();
        let share = random.random_range(0.1..0.9);
        for (offset, data) in &self.unsynced {
            for (number, block) in data.chunks(BLOCK).enumerate() {
                let survives = match survivors {
                    Survivors::None => false,
                    Survivors::All => true,
                    Survivors::Some => random.random_bool(share),
                };
                if survives {
                    put(&mut image, offset + (number * BLOCK) as u64, block);
                }
            }
        }
        image
    }
}

fn put(image: &mut [u8], offset: u64, data: &[u8]) {
    let from = offset as usize;
    image[from..from + data.len()].copy_from_slice(data);
}
