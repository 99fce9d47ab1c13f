//! The flight recorder: what a server that was killed was doing, for the one that comes after it.
//!
//! A memory file that the keeper holds and every server of a connection maps. Plain atomics and nothing else, so that
//! a server killed at any instruction leaves something that can be read: a field that says "valid" is stored last.
//! It records numbers, not meanings: nothing of leases is here.
//!
//! What it may say too much of is answered twice, and the kernel ignores that. What it said too little of would hang.

use std::ffi::c_void;
use std::fs::File;
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, bail};
use nix::sys::mman::{MapFlags, ProtFlags, mmap};

/// Marks a request the kernel sends again after the server was replaced.
pub const RESEND: u64 = 1 << 63;
/// Marks a request that the take-over itself made.
pub const OWN: u64 = 1 << 62;
/// Servers a request may kill before it is refused.
pub const STRIKES: u64 = 3;

/// `b"leasefl"` and the version of the layout.
const MAGIC: u64 = u64::from_le_bytes(*b"leasefl\x01");
/// Newest requests whose numbers are kept: many times what can be unanswered at once, short of those that wait long.
const RING: usize = 1 << 16;
/// Newest closes that are kept. The engine leaves few unanswered, and the kernel allows each process one at a time.
const CLOSES: usize = 1 << 12;
/// Requests that may wait long at the same time.
const PARKED: usize = 1 << 16;
/// Requests that were being handled when a server was killed.
const STRUCK: usize = 64;
/// Kill points that count how often they were passed.
#[cfg(debug_assertions)]
pub const COUNTERS: usize = 16;

/// What of the kernel's operation codes (`linux/fuse.h`) is told apart.
pub mod opcode {
    #![allow(missing_docs)]
    pub const LOOKUP: u32 = 1;
    pub const FORGET: u32 = 2;
    pub const GETATTR: u32 = 3;
    pub const SETATTR: u32 = 4;
    pub const READLINK: u32 = 5;
    pub const SYMLINK: u32 = 6;
    pub const MKNOD: u32 = 8;
    pub const MKDIR: u32 = 9;
    pub const UNLINK: u32 = 10;
    pub const RMDIR: u32 = 11;
    pub const RENAME: u32 = 12;
    pub const LINK: u32 = 13;
    pub const OPEN: u32 = 14;
    pub const READ: u32 = 15;
    pub const WRITE: u32 = 16;
    pub const STATFS: u32 = 17;
    pub const RELEASE: u32 = 18;
    pub const FSYNC: u32 = 20;
    pub const SETXATTR: u32 = 21;
    pub const GETXATTR: u32 = 22;
    pub const LISTXATTR: u32 = 23;
    pub const REMOVEXATTR: u32 = 24;
    pub const FLUSH: u32 = 25;
    pub const OPENDIR: u32 = 27;
    pub const READDIR: u32 = 28;
    pub const RELEASEDIR: u32 = 29;
    pub const FSYNCDIR: u32 = 30;
    pub const GETLK: u32 = 31;
    pub const SETLK: u32 = 32;
    pub const SETLKW: u32 = 33;
    pub const CREATE: u32 = 35;
    pub const INTERRUPT: u32 = 36;
    pub const IOCTL: u32 = 39;
    pub const POLL: u32 = 40;
    pub const BATCH_FORGET: u32 = 42;
    pub const FALLOCATE: u32 = 43;
    pub const LSEEK: u32 = 46;
}

/// A close of a handle, as much of it as it takes to send it again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Close {
    /// The request's number.
    pub unique: u64,
    /// `RELEASE` or `FLUSH`.
    pub opcode: u32,
    /// Who closed it; 0 for `RELEASE`.
    pub pid: u32,
    /// The inode.
    pub ino: u64,
    /// The handle.
    pub handle: u64,
    /// The closer's uid and gid.
    pub ids: (u32, u32),
}

/// A request that was being handled when a server was killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Struck {
    /// The request's number.
    pub unique: u64,
    /// What it asked for.
    pub opcode: u32,
    /// The inode it named.
    pub ino: u64,
    /// Servers it has killed.
    pub count: u64,
}

#[repr(C)]
struct Strike {
    unique: AtomicU64,
    count: AtomicU64,
}

#[repr(C)]
struct CloseSlot {
    unique: AtomicU64,
    what: AtomicU64,
    ino: AtomicU64,
    handle: AtomicU64,
    ids: AtomicU64,
}

#[repr(C)]
struct Table {
    magic: AtomicU64,
    answered_init: AtomicU64,
    unique: AtomicU64,
    opcode: AtomicU64,
    ino: AtomicU64,
    newest: AtomicU64,
    head: AtomicU64,
    close_head: AtomicU64,
    passes: [AtomicU64; 16],
    strikes: [Strike; STRUCK],
    closes: [CloseSlot; CLOSES],
    ring: [AtomicU64; RING],
    parked: [AtomicU64; PARKED],
}

/// The mapped recorder.
pub struct Flight(NonNull<Table>);

// SAFETY: all of the table is atomics, and the mapping lasts as long as the process.
unsafe impl Send for Flight {}
// SAFETY: as above.
unsafe impl Sync for Flight {}

/// A place among the requests that wait long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place(usize);

/// Says, for as long as it lives, which request is being handled.
pub struct Handling<'a>(&'a Flight);

impl Drop for Handling<'_> {
    fn drop(&mut self) {
        // A request that makes its handler panic brings the server down, and is to be known for it.
        if !std::thread::panicking() {
            self.0.table().unique.store(0, Ordering::Release);
        }
    }
}

impl Flight {
    /// Maps the recorder; an empty file is given its size.
    ///
    /// # Errors
    /// Where it cannot be mapped, or is of a layout this program does not know.
    pub fn open(memory: OwnedFd) -> Result<Flight> {
        let file = File::from(memory);
        let size = size_of::<Table>();
        let length = file.metadata().context("flight recorder")?.len();
        if length == 0 {
            file.set_len(size as u64).context("flight recorder")?;
        } else if length != size as u64 {
            bail!("the flight recorder has {length} bytes, and this program's has {size}");
        }
        let size = NonZeroUsize::new(size).context("flight recorder")?;
        // SAFETY: a new mapping at an address of the kernel's choice, of a file that has this length and keeps it.
        let at =
            unsafe { mmap(None, size, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED, &file, 0) };
        let at: NonNull<c_void> = at.context("flight recorder")?;
        let flight = Flight(at.cast());
        let magic = &flight.table().magic;
        match magic.compare_exchange(0, MAGIC, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) | Err(MAGIC) => Ok(flight),
            Err(other) => bail!("the flight recorder is of layout {other:#x}, and this program's is {MAGIC:#x}"),
        }
    }

    fn table(&self) -> &Table {
        // SAFETY: the mapping has the table's size and is never unmapped; zeroes are valid atomics, and page-aligned.
        unsafe { self.0.as_ref() }
    }

    /// Whether the kernel has been told what was negotiated: whether there is a connection to take over.
    pub fn has_answered_init(&self) -> bool {
        self.table().answered_init.load(Ordering::Acquire) != 0
    }

    /// Remembers that the kernel has been told.
    pub fn answered_init(&self) {
        self.table().answered_init.store(1, Ordering::Release);
    }

    /// A request's handling begins.
    pub fn handling(&self, unique: u64, opcode: u32, ino: u64) -> Handling<'_> {
        let (table, unique) = (self.table(), unique & !RESEND);
        if unique & OWN == 0 {
            table.opcode.store(opcode.into(), Ordering::Relaxed);
            table.ino.store(ino, Ordering::Relaxed);
            let head = table.head.fetch_add(1, Ordering::Relaxed);
            table.ring[head as usize % RING].store(unique, Ordering::Relaxed);
            if unique > table.newest.load(Ordering::Relaxed) {
                table.newest.store(unique, Ordering::Relaxed);
            }
            table.unique.store(unique, Ordering::Release);
        }
        Handling(self)
    }

    /// A close's handling begins. Its effect must not be lost, whatever comes.
    pub fn closing(&self, close: Close) -> Handling<'_> {
        let (table, unique) = (self.table(), close.unique & !RESEND);
        let slot = &table.closes[table.close_head.fetch_add(1, Ordering::Relaxed) as usize % CLOSES];
        slot.unique.store(0, Ordering::Release);
        slot.what.store(u64::from(close.opcode) << 32 | u64::from(close.pid), Ordering::Relaxed);
        slot.ino.store(close.ino, Ordering::Relaxed);
        slot.handle.store(close.handle, Ordering::Relaxed);
        slot.ids.store(u64::from(close.ids.0) << 32 | u64::from(close.ids.1), Ordering::Relaxed);
        slot.unique.store(unique, Ordering::Release);
        self.handling(unique, close.opcode, close.ino)
    }

    /// A request is going to wait, for longer than the ring remembers it. None where too many do.
    pub fn park(&self, unique: u64) -> Option<Place> {
        let unique = unique & !RESEND;
        let start = (unique / 2) as usize;
        (0..PARKED).map(|step| (start + step) % PARKED).find_map(|slot| {
            let free = self.table().parked[slot].compare_exchange(0, unique, Ordering::AcqRel, Ordering::Relaxed);
            free.is_ok().then_some(Place(slot))
        })
    }

    /// It was answered.
    pub fn unpark(&self, place: Place) {
        self.table().parked[place.0].store(0, Ordering::Release);
    }

    /// What a killed server was handling gets a strike, unless `blameless`. To be called once by each new server.
    pub fn strike(&self, blameless: bool) -> Option<Struck> {
        let table = self.table();
        let unique = table.unique.load(Ordering::Acquire);
        if unique == 0 {
            return None;
        }
        let mut struck = None;
        if !blameless {
            let known = table.strikes.iter().find(|strike| strike.unique.load(Ordering::Relaxed) == unique);
            // The lowest number is the oldest request; free places are 0.
            let strike = known.or_else(|| table.strikes.iter().min_by_key(|s| s.unique.load(Ordering::Relaxed)))?;
            if strike.unique.swap(unique, Ordering::Relaxed) != unique {
                strike.count.store(0, Ordering::Relaxed);
            }
            let count = strike.count.fetch_add(1, Ordering::Relaxed) + 1;
            let opcode = u32::try_from(table.opcode.load(Ordering::Relaxed)).unwrap_or(0);
            struck = Some(Struck { unique, opcode, ino: table.ino.load(Ordering::Relaxed), count });
        }
        table.unique.store(0, Ordering::Release);
        struck
    }

    /// How many servers a request has killed.
    pub fn strikes(&self, unique: u64) -> u64 {
        let unique = unique & !RESEND;
        let strike = self.table().strikes.iter().find(|strike| strike.unique.load(Ordering::Relaxed) == unique);
        strike.map_or(0, |strike| strike.count.load(Ordering::Relaxed))
    }

    /// Every number that may be unanswered, and some that are not, lowest first; and the newest that was handled.
    pub fn unanswered(&self) -> (Vec<u64>, u64) {
        let table = self.table();
        let all = table.ring.iter().chain(&table.parked).map(|slot| slot.load(Ordering::Relaxed));
        let mut numbers: Vec<u64> = all.filter(|unique| *unique != 0).collect();
        numbers.sort_unstable();
        numbers.dedup();
        (numbers, table.newest.load(Ordering::Relaxed))
    }

    /// The newest closes, oldest first, each once. Most of them were answered.
    pub fn closes(&self) -> Vec<Close> {
        let slots = self.table().closes.iter().map(|slot| {
            let what = slot.what.load(Ordering::Relaxed);
            let ids = slot.ids.load(Ordering::Relaxed);
            Close {
                unique: slot.unique.load(Ordering::Acquire),
                opcode: (what >> 32) as u32,
                pid: what as u32,
                ino: slot.ino.load(Ordering::Relaxed),
                handle: slot.handle.load(Ordering::Relaxed),
                ids: ((ids >> 32) as u32, ids as u32),
            }
        });
        let mut closes: Vec<Close> = slots.filter(|close| close.unique != 0).collect();
        closes.sort_by_key(|close| close.unique);
        closes.dedup_by_key(|close| close.unique);
        closes
    }

    /// Nobody waits any more.
    pub fn clear_parked(&self) {
        for slot in &self.table().parked {
            if slot.load(Ordering::Relaxed) != 0 {
                slot.store(0, Ordering::Relaxed);
            }
        }
    }

    /// Counts one pass of a kill point, over all servers of the connection; the first is 1.
    #[cfg(debug_assertions)]
    pub fn pass(&self, counter: usize) -> u64 {
        self.table().passes[counter % COUNTERS].fetch_add(1, Ordering::Relaxed) + 1
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::memfd::{MFdFlags, memfd_create};

    use super::*;

    /// Two servers on the same memory.
    fn pair() -> (Flight, Flight) {
        let memory = memfd_create("flight", MFdFlags::MFD_CLOEXEC).expect("memfd");
        let first = Flight::open(memory.try_clone().expect("fd")).expect("new");
        (first, Flight::open(memory).expect("again"))
    }

    #[test]
    fn what_was_being_handled_is_struck_and_what_was_finished_is_not() {
        let (first, second) = pair();
        drop(first.handling(2, opcode::GETATTR, 1));
        assert_eq!(second.strike(false), None);
        for count in 1..=3 {
            std::mem::forget(first.handling(4 | RESEND, opcode::CREATE, 7));
            let struck = Struck { unique: 4, opcode: opcode::CREATE, ino: 7, count };
            assert_eq!(second.strike(false), Some(struck));
            assert_eq!(second.strike(false), None, "once");
        }
        assert_eq!((second.strikes(4 | RESEND), second.strikes(2)), (3, 0));
        std::mem::forget(first.handling(6, opcode::CREATE, 7));
        assert_eq!(second.strike(true), None, "it was ended on purpose");
        assert_eq!(second.strikes(6), 0);
    }

    #[test]
    fn the_newest_strikes_displace_the_oldest() {
        let (first, second) = pair();
        for unique in (2..).step_by(2).take(STRUCK + 1) {
            std::mem::forget(first.handling(unique, opcode::OPEN, 1));
            second.strike(false);
        }
        assert_eq!((second.strikes(2), second.strikes(4)), (0, 1));
    }

    #[test]
    fn requests_that_wait_outlast_the_ring() {
        let (first, second) = pair();
        drop(first.handling(2, opcode::SETLK, 1));
        drop(first.handling(4, opcode::SETLK, 1));
        let (waits, answered) = (first.park(2).expect("room"), first.park(4).expect("room"));
        first.unpark(answered);
        for unique in (6..).step_by(2).take(RING) {
            drop(first.handling(unique, opcode::GETATTR, 1));
        }
        let (numbers, newest) = second.unanswered();
        assert_eq!((numbers.len(), numbers[0], numbers[1]), (RING + 1, 2, 6));
        assert_eq!(newest, 4 + 2 * RING as u64);
        second.clear_parked();
        assert_eq!(second.unanswered().0[0], 6);
        first.unpark(waits);
        let room = (0..PARKED as u64).filter(|unique| first.park(unique * 2 + 2).is_some()).count();
        assert_eq!(room, PARKED);
        assert_eq!(first.park(1 << 40), None, "no room");
    }

    #[test]
    fn closes_are_kept_whole() {
        let (first, second) = pair();
        let close = |unique| Close {
            unique,
            opcode: opcode::FLUSH,
            pid: 77,
            ino: unique + 1,
            handle: 1 << 50 | unique,
            ids: (1000, 4_000_000_000),
        };
        drop(first.closing(close(8)));
        drop(first.closing(close(6)));
        drop(first.closing(close(8)));
        assert_eq!(second.closes(), [close(6), close(8)]);
    }

    #[test]
    fn a_recorder_of_another_size_is_refused() {
        let memory = memfd_create("flight", MFdFlags::MFD_CLOEXEC).expect("memfd");
        File::from(memory.try_clone().expect("fd")).set_len(4096).expect("size");
        assert!(Flight::open(memory).is_err());
    }
}
