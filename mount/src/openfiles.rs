//! What every open file of the connection is, in memory that the keeper holds: it outlives the server.
//!
//! The kernel names an open file by a number and tells nothing else of it, so a server that takes the connection over
//! has to know what its predecessor gave that number to: which key, opened by whom, what is polled, which locks are
//! shared or asked for. The registry knows none of that, and need not: all of it ends with the connection.
//!
//! The memory is an array of slots of sixteen 64-bit words. A slot's first word says what it is and is stored last, and
//! cleared first: whenever the server dies, each slot is whole or free. Words change one at a time. One thread of one
//! server at a time fills, changes or frees a slot, so plain loads and stores are enough; the order of the stores is
//! all that counts.
//!
//! It must not know what a lease is: what a slot means is decided by [`crate::fs`].

use std::fs::File;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, bail};
use foldhash::HashMap;
use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use parking_lot::Mutex;

/// Words of a slot.
pub const WORDS: usize = 16;
/// Most things that can be open, locked and polled at once. Room is taken as it is used.
const SLOTS: usize = 1 << 22;
const BYTES: usize = SLOTS * WORDS * 8;
/// Tells the layout from others: a server that does not know it must not take over.
pub const LAYOUT: u64 = 0x6c66_0001;

/// Words of the first slot, which is no slot.
const LAYOUT_WORD: usize = 0;
const HIGH_WORD: usize = 1;
const EVENT_WORD: usize = 2;
const SALT_WORD: usize = 3;
const OVERFLOW_WORD: usize = 4;

/// The content of a slot; word 0 is its kind, never 0.
pub type Words = [u64; WORDS];

/// How something is found again: what kind of thing it is, and two numbers that tell it from others of its kind.
pub type Name = (u64, u64, u64);

/// A slot's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Slot(u32);

/// The mapped memory.
pub struct OpenFiles {
    base: NonNull<AtomicU64>,
    free: Mutex<Free>,
    index: Mutex<HashMap<Name, Slot>>,
}

struct Free {
    slots: Vec<u32>,
    next: u32,
}

// SAFETY: the mapping is shared memory of atomics, valid for as long as the value lives.
unsafe impl Send for OpenFiles {}
// SAFETY: as above; every access is atomic.
unsafe impl Sync for OpenFiles {}

impl OpenFiles {
    /// Maps memory that is empty, or that an earlier server of the same connection used.
    ///
    /// # Errors
    /// Those of `ftruncate(2)` and `mmap(2)`; a layout this program does not know.
    pub fn attach(fd: &OwnedFd) -> Result<OpenFiles> {
        let file = File::from(fd.try_clone().context("memory of the open files")?);
        if file.metadata().context("memory of the open files")?.len() < BYTES as u64 {
            file.set_len(BYTES as u64).context("memory of the open files")?;
        }
        let length = NonZeroUsize::new(BYTES).context("memory of the open files")?;
        // SAFETY: a new mapping of our own choice of address aliases nothing; the file is never shortened.
        let base = unsafe {
            mmap(None, length, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED, fd.as_fd(), 0)
        }
        .context("memory of the open files")?
        .cast::<AtomicU64>();
        let free = Mutex::new(Free { slots: Vec::new(), next: 1 });
        let files = OpenFiles { base, free, index: Mutex::default() };
        match files.head(LAYOUT_WORD).load(Ordering::Acquire) {
            0 => files.head(LAYOUT_WORD).store(LAYOUT, Ordering::Release),
            LAYOUT => {}
            other => bail!("the open files are kept in layout {other:#x}, and this program knows {LAYOUT:#x} only"),
        }
        files.adopt();
        Ok(files)
    }

    /// Finds what is there already.
    fn adopt(&self) {
        let high = u32::try_from(self.head(HIGH_WORD).load(Ordering::Acquire)).unwrap_or(0);
        let mut free = self.free.lock();
        free.next = high + 1;
        for number in 1..=high {
            if self.word(Slot(number), 0).load(Ordering::Acquire) == 0 {
                free.slots.push(number);
            }
        }
    }

    fn head(&self, word: usize) -> &AtomicU64 {
        self.word(Slot(0), word)
    }

    fn word(&self, slot: Slot, word: usize) -> &AtomicU64 {
        let index = slot.0 as usize * WORDS + word;
        assert!(index < SLOTS * WORDS && word < WORDS);
        // SAFETY: within the mapping, by the assertion; aligned, since a mapping begins with a page.
        unsafe { self.base.add(index).as_ref() }
    }

    /// What makes the kernel's request numbers of this connection differ from those of every other: the first server's
    /// number, kept for the later ones.
    pub fn salt(&self, generation: u64) -> u64 {
        let salt = self.head(SALT_WORD);
        if salt.load(Ordering::Acquire) == 0 {
            salt.store(generation, Ordering::Release);
        }
        salt.load(Ordering::Acquire)
    }

    /// Whether everything found room: then what is not here is not open.
    pub fn is_complete(&self) -> bool {
        self.head(OVERFLOW_WORD).load(Ordering::Acquire) == 0
    }

    /// The number of the connection's first server; none where it gave out no handle yet.
    pub fn first_server(&self) -> Option<u64> {
        Some(self.head(SALT_WORD).load(Ordering::Acquire)).filter(|salt| *salt != 0)
    }

    /// The number of the next event, as it was last kept.
    pub fn next_event(&self) -> u64 {
        self.head(EVENT_WORD).load(Ordering::Acquire)
    }

    /// Keeps the number of the next event.
    pub fn keep_next_event(&self, number: u64) {
        self.head(EVENT_WORD).store(number, Ordering::Release);
    }

    /// Enters something, in place of what has that name; `None` when there is no room.
    pub fn insert(&self, name: Name, words: Words) -> Option<Slot> {
        debug_assert!(words[0] != 0);
        let mut index = self.index.lock();
        let slot = if let Some(slot) = index.get(&name) {
            self.word(*slot, 0).store(0, Ordering::Release);
            *slot
        } else {
            let mut free = self.free.lock();
            match free.slots.pop() {
                Some(number) => Slot(number),
                None if (free.next as usize) < SLOTS => {
                    let number = free.next;
                    free.next += 1;
                    self.head(HIGH_WORD).store(u64::from(number), Ordering::Release);
                    Slot(number)
                }
                None => {
                    self.head(OVERFLOW_WORD).store(1, Ordering::Release);
                    return None;
                }
            }
        };
        for (at, word) in words.iter().enumerate().skip(1) {
            self.word(slot, at).store(*word, Ordering::Relaxed);
        }
        self.word(slot, 0).store(words[0], Ordering::Release);
        index.insert(name, slot);
        Some(slot)
    }

    /// The slot that was entered under a name.
    pub fn find(&self, name: Name) -> Option<Slot> {
        self.index.lock().get(&name).copied()
    }

    /// Gives a slot found by [`OpenFiles::all`] its name.
    pub fn name(&self, name: Name, slot: Slot) {
        self.index.lock().insert(name, slot);
    }

    /// Forgets what was entered under a name; false where there is no such thing.
    pub fn remove(&self, name: Name) -> bool {
        let slot = self.index.lock().remove(&name);
        if let Some(slot) = slot {
            self.free(slot);
        }
        slot.is_some()
    }

    /// Frees a slot that has no name.
    pub fn free(&self, slot: Slot) {
        self.word(slot, 0).store(0, Ordering::Release);
        self.free.lock().slots.push(slot.0);
    }

    /// A word of a slot.
    pub fn get(&self, slot: Slot, word: usize) -> u64 {
        self.word(slot, word).load(Ordering::Acquire)
    }

    /// Changes a word of a slot, after every word changed before.
    pub fn set(&self, slot: Slot, word: usize, value: u64) {
        self.word(slot, word).store(value, Ordering::Release);
    }

    /// Whether anything is entered of a kind that is asked for.
    pub fn any(&self, is_asked_for: impl Fn(u64) -> bool) -> bool {
        let high = self.head(HIGH_WORD).load(Ordering::Acquire);
        (1..=u32::try_from(high).unwrap_or(0)).any(|number| is_asked_for(self.get(Slot(number), 0)))
    }

    /// Everything that is entered.
    pub fn all(&self) -> Vec<(Slot, Words)> {
        let high = self.head(HIGH_WORD).load(Ordering::Acquire);
        let slots = (1..=u32::try_from(high).unwrap_or(0)).map(Slot);
        let words = |slot| std::array::from_fn(|word| self.get(slot, word));
        slots.map(|slot| (slot, words(slot))).filter(|(_, words): &(Slot, Words)| words[0] != 0).collect()
    }
}

impl Drop for OpenFiles {
    fn drop(&mut self) {
        // SAFETY: mapped with this length in `attach`, and nothing borrows from it any more.
        let _ = unsafe { munmap(self.base.cast(), BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory() -> OwnedFd {
        nix::sys::memfd::memfd_create(c"test", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).expect("memfd")
    }

    fn words(kind: u64, second: u64) -> Words {
        let mut words = [0; WORDS];
        (words[0], words[1]) = (kind, second);
        words
    }

    #[test]
    fn what_one_left_the_next_finds() {
        let fd = memory();
        let first = OpenFiles::attach(&fd).expect("maps");
        assert_eq!(first.salt(7), 7);
        let slots: Vec<Slot> = (1..=100).map(|n| first.insert((1, n, 0), words(1 + n % 3, n)).expect("room")).collect();
        first.remove((1, 50, 0));
        first.set(slots[9], 2, 77);
        first.keep_next_event(12);
        drop(first);
        let second = OpenFiles::attach(&fd).expect("maps");
        let all = second.all();
        assert_eq!((all.len(), second.salt(8), second.next_event()), (99, 7, 12));
        assert!(all.iter().all(|(_, words)| words[1] != 50));
        assert_eq!(all[9].1[2], 77);
        assert!(second.any(|kind| kind == 3) && !second.any(|kind| kind == 9));
        assert_eq!(second.insert((9, 5, 0), words(9, 9)), Some(slots[49]), "what is free is used again");
        assert_eq!(second.find((9, 5, 0)), Some(slots[49]));
    }

    #[test]
    fn another_layout_is_refused() {
        let fd = memory();
        let files = OpenFiles::attach(&fd).expect("maps");
        files.head(LAYOUT_WORD).store(1, Ordering::Release);
        assert!(OpenFiles::attach(&fd).is_err());
    }
}
