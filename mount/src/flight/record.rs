//! A request as it is recorded, to be made again.

use std::sync::atomic::{AtomicU64, Ordering};

/// A request that must not be cut off, as much of it as it takes to make it again: a close, whose effect would be lost,
/// a lock, whose caller would be given a number that is no errno, or a poll, whose caller would be told of an error.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Its number.
    pub unique: u64,
    /// What it asks for.
    pub opcode: u32,
    /// Who asks; 0 for `RELEASE`.
    pub pid: u32,
    /// The inode.
    pub ino: u64,
    /// The handle.
    pub handle: u64,
    /// The caller's uid and gid.
    pub ids: (u32, u32),
    /// Of a lock: its owner. Of a poll: the kernel's handle of the poller.
    pub owner: u64,
    /// Of a lock: `F_RDLCK`, `F_WRLCK` or `F_UNLCK`. Of a poll: its flags.
    pub kind: u32,
    /// Of a lock: its first and its last byte. Of a poll: the events asked for, and 0.
    pub range: (u64, u64),
}

/// A [`Record`]: free where its first field, the number, is 0.
///
/// Beside `kind`, which needs half a word, is since when it waits: milliseconds of the clock in 32 bits, 0 for unknown.
#[repr(C)]
pub(super) struct Slot([AtomicU64; 9]);

/// Where that word is.
const KIND: usize = 6;

fn pair(high: u32, low: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

fn halves(both: u64) -> (u32, u32) {
    ((both >> 32) as u32, both as u32)
}

impl Slot {
    /// The number of the request in it; 0 for none.
    pub fn unique(&self) -> u64 {
        self.0[0].load(Ordering::Acquire)
    }

    /// Fills it. Whatever is in it is not valid until the number is.
    pub fn store(&self, record: &Record, since: u32) {
        self.0[0].store(0, Ordering::Release);
        let Record { unique, opcode, pid, ino, handle, ids, owner, kind, range } = *record;
        let fields = [pair(opcode, pid), ino, handle, pair(ids.0, ids.1), owner, pair(since, kind), range.0, range.1];
        for (place, field) in self.0[1..].iter().zip(fields) {
            place.store(field, Ordering::Relaxed);
        }
        self.0[0].store(unique, Ordering::Release);
    }

    /// Since when it waits.
    pub fn since(&self) -> u32 {
        halves(self.0[KIND].load(Ordering::Relaxed)).0
    }

    /// What is in it.
    pub fn load(&self) -> Record {
        let unique = self.unique();
        let [what, ino, handle, ids, owner, kind, first, last] =
            std::array::from_fn(|field| self.0[field + 1].load(Ordering::Relaxed));
        let (opcode, pid) = halves(what);
        let kind = kind as u32;
        Record { unique, opcode, pid, ino, handle, ids: halves(ids), owner, kind, range: (first, last) }
    }

    /// Frees it.
    pub fn clear(&self) {
        self.0[0].store(0, Ordering::Release);
    }
}
