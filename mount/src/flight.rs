//! The flight recorder: what a server that was killed was doing, for the one that comes after it.
//!
//! A memory file that the keeper holds and every server of a connection maps. Plain atomics and nothing else, so that
//! a server killed at any instruction leaves something that can be read: a field that says "valid" is stored last.
//! It records numbers, not meanings: nothing of leases is here.
//!
//! What it may say too much of is answered twice, and the kernel ignores that. What it said too little of would hang.

pub mod opcode;
mod record;

use std::ffi::c_void;
use std::fs::File;
use std::num::NonZeroUsize;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

use anyhow::{Context, Result, bail};
use foldhash::HashMap;
use nix::sys::mman::{MapFlags, ProtFlags, mmap};
use parking_lot::Mutex;

pub use record::Record;
use record::Slot;

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
/// Newest requests that are kept whole: as above.
const RECORDS: usize = 1 << 14;
/// Room for one request as the kernel gave it.
const SAVED: usize = 1 << 18;
/// Requests that may wait long at the same time.
const PARKED: usize = 1 << 16;
/// Requests that were being handled when a server was killed.
const STRUCK: usize = 64;
/// Kill points that count how often they were passed.
#[cfg(debug_assertions)]
pub const COUNTERS: usize = 16;

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
struct Table {
    magic: AtomicU64,
    answered_init: AtomicU64,
    unique: AtomicU64,
    opcode: AtomicU64,
    ino: AtomicU64,
    newest: AtomicU64,
    head: AtomicU64,
    record_head: AtomicU64,
    passes: [AtomicU64; 16],
    strikes: [Strike; STRUCK],
    records: [Slot; RECORDS],
    saved_length: AtomicU64,
    saved: [AtomicU8; SAVED],
    ring: [AtomicU64; RING],
    parked: [Slot; PARKED],
}

/// The mapped recorder.
pub struct Flight {
    table: NonNull<Table>,
    /// Since when requests wait that a server before had parked, by their number: its places are found in no order.
    before: Mutex<HashMap<u64, u32>>,
}

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
        let flight = Flight { table: at.cast(), before: Mutex::default() };
        let magic = &flight.table().magic;
        match magic.compare_exchange(0, MAGIC, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) | Err(MAGIC) => Ok(flight),
            Err(other) => bail!("the flight recorder is of layout {other:#x}, and this program's is {MAGIC:#x}"),
        }
    }

    fn table(&self) -> &Table {
        // SAFETY: the mapping has the table's size and is never unmapped; zeroes are valid atomics, and page-aligned.
        unsafe { self.table.as_ref() }
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

    /// As [`Flight::handling`], of a request that must not be cut off.
    pub fn recording(&self, record: Record) -> Handling<'_> {
        let (table, unique) = (self.table(), record.unique & !RESEND);
        let head = table.record_head.fetch_add(1, Ordering::Relaxed);
        table.records[head as usize % RECORDS].store(&Record { unique, ..record }, 0);
        self.handling(unique, record.opcode, record.ino)
    }

    /// The request being handled is going to wait, for longer than the rings remember it. Gives since when it waits, in
    /// nanoseconds as `now_ns`: longer than now where it was parked by a server before. None where too many wait.
    pub fn park(&self, unique: u64, now_ns: u64) -> Option<(Place, u64)> {
        let (table, unique) = (self.table(), unique & !RESEND);
        let newest = table.record_head.load(Ordering::Relaxed).wrapping_sub(1);
        let newest = Some(table.records[newest as usize % RECORDS].load()).filter(|record| record.unique == unique);
        let record = newest.unwrap_or(Record { unique, ..Record::default() });
        let start = (unique / 2) as usize;
        // Only the thread that handles requests parks them, so that what is free stays free.
        let mut since = self.before.lock().get(&unique).copied().unwrap_or(0);
        let free = (0..PARKED).map(|step| (start + step) % PARKED).find(|slot| {
            let slot = &table.parked[*slot];
            let number = slot.unique();
            if number == unique {
                since = slot.since();
            }
            number == 0
        })?;
        let now_ms = (now_ns / 1_000_000) as u32;
        // Whoever waits for more than 49 days is told of less.
        let waited_ms = if since == 0 { 0 } else { now_ms.wrapping_sub(since) };
        table.parked[free].store(&record, now_ms.wrapping_sub(waited_ms).max(1));
        Some((Place(free), now_ns.saturating_sub(u64::from(waited_ms) * 1_000_000)))
    }

    /// It was answered.
    pub fn unpark(&self, place: Place) {
        let slot = &self.table().parked[place.0];
        self.before.lock().remove(&slot.unique());
        slot.clear();
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
        let ring = table.ring.iter().map(|number| number.load(Ordering::Relaxed));
        let mut numbers: Vec<u64> =
            ring.chain(table.parked.iter().map(Slot::unique)).filter(|unique| *unique != 0).collect();
        numbers.sort_unstable();
        numbers.dedup();
        (numbers, table.newest.load(Ordering::Relaxed))
    }

    /// Requests that can be made again, oldest first, each once. Most of them were answered.
    pub fn records(&self) -> Vec<Record> {
        let slots = self.table().records.iter().chain(&self.table().parked);
        let mut records: Vec<Record> =
            slots.map(Slot::load).filter(|record| record.unique != 0 && record.opcode != 0).collect();
        records.sort_by_key(|record| record.unique);
        records.dedup_by_key(|record| record.unique);
        records
    }

    /// A request that was read and not handled, and is about to be.
    pub fn saved(&self) -> Option<Vec<u8>> {
        let table = self.table();
        let length = usize::try_from(table.saved_length.load(Ordering::Acquire)).ok().filter(|length| *length > 0)?;
        Some(table.saved.get(..length)?.iter().map(|byte| byte.load(Ordering::Relaxed)).collect())
    }

    /// Keeps such a request until it was handled; none when it was.
    pub fn save(&self, message: Option<&[u8]>) {
        let table = self.table();
        table.saved_length.store(0, Ordering::Release);
        let Some(message) = message.filter(|message| message.len() <= SAVED) else { return };
        for (place, byte) in table.saved.iter().zip(message) {
            place.store(*byte, Ordering::Relaxed);
        }
        table.saved_length.store(message.len() as u64, Ordering::Release);
    }

    /// Who waits. Of those who are parked again it is known from then on since when, until they are taken away here.
    pub fn parked(&self) -> Vec<Place> {
        let slots = || self.table().parked.iter().enumerate().filter(|(_, slot)| slot.unique() != 0);
        self.before.lock().extend(slots().map(|(_, slot)| (slot.unique(), slot.since())));
        slots().map(|(place, _)| Place(place)).collect()
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

    const NOW: u64 = 1 << 40;

    /// Two servers on the same memory.
    fn servers() -> (Flight, Flight) {
        let memory = memfd_create("flight", MFdFlags::MFD_CLOEXEC).expect("memfd");
        let first = Flight::open(memory.try_clone().expect("fd")).expect("new");
        (first, Flight::open(memory).expect("again"))
    }

    #[test]
    fn what_was_being_handled_is_struck_and_what_was_finished_is_not() {
        let (first, second) = servers();
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
        let (first, second) = servers();
        for unique in (2..).step_by(2).take(STRUCK + 1) {
            std::mem::forget(first.handling(unique, opcode::OPEN, 1));
            second.strike(false);
        }
        assert_eq!((second.strikes(2), second.strikes(4)), (0, 1));
    }

    #[test]
    fn requests_that_wait_outlast_the_ring() {
        let (first, second) = servers();
        drop(first.handling(2, opcode::SETLK, 1));
        drop(first.handling(4, opcode::SETLK, 1));
        let (waits, answered) = (first.park(2, NOW).expect("room").0, first.park(4, NOW).expect("room").0);
        first.unpark(answered);
        for unique in (6..).step_by(2).take(RING) {
            drop(first.handling(unique, opcode::GETATTR, 1));
        }
        let (numbers, newest) = second.unanswered();
        assert_eq!((numbers.len(), numbers[0], numbers[1]), (RING + 1, 2, 6));
        assert_eq!(newest, 4 + 2 * RING as u64);
        second.parked().into_iter().for_each(|place| second.unpark(place));
        assert_eq!(second.unanswered().0[0], 6);
        first.unpark(waits);
        let room = (0..PARKED as u64).filter(|unique| first.park(unique * 2 + 2, NOW).is_some()).count();
        assert_eq!(room, PARKED);
        assert_eq!(first.park(1 << 40, NOW), None, "no room");
    }

    #[test]
    fn a_request_that_is_parked_again_has_waited_since_it_was_first() {
        const SECOND: u64 = 1_000_000_000;
        let memory = memfd_create("flight", MFdFlags::MFD_CLOEXEC).expect("memfd");
        let server = || Flight::open(memory.try_clone().expect("fd")).expect("a server");
        let (first, second) = (server(), server());
        let parked = |server: &Flight, now_ns| server.park(6, now_ns).expect("room");
        let waits = |seconds| parked(&second, seconds * SECOND).1 / SECOND;
        assert_eq!(parked(&first, 7 * SECOND).1, 7 * SECOND);
        assert_eq!((waits(9), waits(12)), (7, 7), "however often");
        // As servers take over: parked again first, and the places of the one before taken away then.
        for seconds in 13..20 {
            let server = server();
            let before = server.parked();
            let others = [10, 12, 14].map(|unique| server.park(unique, seconds * SECOND).expect("room").1 / SECOND);
            assert_eq!(parked(&server, seconds * SECOND).1 / SECOND, 7, "however many servers");
            assert_eq!(others, [13; 3], "nor do others stand in the way");
            before.into_iter().for_each(|place| server.unpark(place));
        }
        assert_eq!(second.park(8, 12 * SECOND).map(|(_, since_ns)| since_ns), Some(12 * SECOND), "another has not");
        second.parked().into_iter().for_each(|place| second.unpark(place));
        assert_eq!(waits(13), 13, "it was answered");
        second.parked().into_iter().for_each(|place| second.unpark(place));
        // Over the end of what 32 bits of milliseconds can tell.
        let end = (1 << 32) / 1_000 * SECOND;
        parked(&first, end - SECOND);
        assert_eq!(end + SECOND - parked(&second, end + SECOND).1, 2 * SECOND);
    }

    #[test]
    fn records_are_kept_whole() {
        let (first, second) = servers();
        let record = |unique| Record {
            unique,
            opcode: opcode::SETLKW,
            pid: 77,
            ino: unique + 1,
            handle: 1 << 50 | unique,
            ids: (1000, 4_000_000_000),
            owner: u64::MAX - unique,
            kind: 1,
            range: (3, u64::MAX / 2),
        };
        drop(first.recording(record(8)));
        drop(first.recording(Record { unique: 6 | RESEND, ..record(6) }));
        drop(first.recording(record(8)));
        assert_eq!(second.records(), [record(6), record(8)]);
        // Those that wait are, whatever comes after them.
        drop(first.recording(record(4)));
        first.park(4, NOW).expect("room");
        for unique in (10..).step_by(2).take(RECORDS) {
            drop(first.recording(record(unique)));
        }
        assert_eq!(second.records()[..2], [record(4), record(10)]);
        // A request of which only the number is known cannot be made again.
        first.park(2, NOW).expect("room");
        assert_eq!(second.records()[0], record(4));
        assert_eq!(second.unanswered().0[0], 2);
    }

    #[test]
    fn a_request_is_saved_until_it_was_handled() {
        let (first, second) = servers();
        assert_eq!(second.saved(), None);
        first.save(Some(b"a request"));
        assert_eq!(second.saved().as_deref(), Some(&b"a request"[..]));
        second.save(None);
        assert_eq!(first.saved(), None);
    }

    #[test]
    fn a_recorder_of_another_size_is_refused() {
        let memory = memfd_create("flight", MFdFlags::MFD_CLOEXEC).expect("memfd");
        File::from(memory.try_clone().expect("fd")).set_len(4096).expect("size");
        assert!(Flight::open(memory).is_err());
    }
}
