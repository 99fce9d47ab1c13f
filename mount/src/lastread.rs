//! The request that was read last, where the next server finds it: for kernels that send nothing again.
//!
//! A server that is killed while it waits for a request may still read one: the kernel hands it out before it looks at
//! the signal. Nothing of that request is known then but that somebody waits for its answer, and if it was a close, its
//! effect would be lost. So the buffer that fuser reads into is put into memory that the keeper holds. fuser has no
//! way to be given a buffer; but it asks for one of a size nobody else asks for, once, when its reader starts. Where
//! that should change, [`is_in_use`] says so, and what was read last is not known, as it would be without this file.
//!
//! The buffer is there before it is read into. The kernel gives no memory to a process that a `SIGKILL` is on its way to,
//! and a request that it cannot hand out for that is answered with `EIO`: so every server reads into this buffer, also
//! where the kernel could resend.

use std::alloc::{GlobalAlloc, Layout, System};
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};

use nix::sys::mman::{MapFlags, ProtFlags, mmap};

use crate::connection::MAX_WRITE;

/// What fuser 0.18 asks for.
const SIZE: usize = 16 * 1024 * 1024 + 4096;
/// What of it the kernel fills: the largest request.
const LARGEST: usize = MAX_WRITE as usize + PAGE;
/// No page is smaller.
const PAGE: usize = 4096;

/// The buffer to give to whoever asks for one of its size next.
static OFFERED: AtomicPtr<u8> = AtomicPtr::new(null_mut());
/// The buffer, once it was taken or not.
static BUFFER: AtomicPtr<u8> = AtomicPtr::new(null_mut());

struct Allocator;

#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

// SAFETY: everything is the system's, but for one buffer: mapped, zeroed and page-aligned, given out once, and never
// unmapped. It is told by its address when it comes back.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise is the one that is asked for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() == SIZE {
            let offered = OFFERED.swap(null_mut(), Ordering::AcqRel);
            if !offered.is_null() {
                return offered;
            }
        }
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        if layout.size() == SIZE && at == BUFFER.load(Ordering::Acquire) {
            return;
        }
        // SAFETY: as above; it came from the system.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if layout.size() != SIZE || at != BUFFER.load(Ordering::Acquire) {
            // SAFETY: as above; it came from the system.
            return unsafe { System.realloc(at, layout, size) };
        }
        // SAFETY: the caller promises that `size`, rounded up, is a valid one for this alignment.
        let new = unsafe { System.alloc(Layout::from_size_align_unchecked(size, layout.align())) };
        if !new.is_null() {
            // SAFETY: both are as long as what is copied, and different.
            unsafe { std::ptr::copy_nonoverlapping(at, new, size.min(layout.size())) };
        }
        new
    }
}

/// What the server before read last.
///
/// # Errors
/// Those of `pread(2)`.
pub fn load(memory: &OwnedFd) -> io::Result<Option<Vec<u8>>> {
    let file = std::fs::File::from(memory.try_clone()?);
    if file.metadata()?.len() < SIZE as u64 {
        return Ok(None);
    }
    let mut length = [0; 4];
    file.read_exact_at(&mut length, 0)?;
    let length = u32::from_ne_bytes(length) as usize;
    // A request has its length in front; memory that was never read into has 0.
    if length == 0 || length > SIZE {
        return Ok(None);
    }
    let mut message = vec![0; length];
    file.read_exact_at(&mut message, 0)?;
    Ok(Some(message))
}

/// Forgets what is there, and has the next reader of fuser's read into it.
///
/// # Errors
/// Those of `ftruncate(2)` and `mmap(2)`.
pub fn offer(memory: &OwnedFd) -> io::Result<()> {
    nix::unistd::ftruncate(memory, SIZE as i64)?;
    let Some(size) = NonZeroUsize::new(SIZE) else { return Ok(()) };
    // SAFETY: a new mapping at an address of the kernel's choice, of a file that has this length and keeps it.
    let at = unsafe {
        mmap(None, size, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_SHARED, memory.as_fd(), 0)
    };
    let at: NonNull<u8> = at?.cast();
    for page in (0..LARGEST).step_by(PAGE) {
        // SAFETY: within the mapping, which nobody else uses yet. The first of these is the length of what was there.
        unsafe { at.add(page).cast::<u32>().write_volatile(0) };
    }
    BUFFER.store(at.as_ptr(), Ordering::Release);
    OFFERED.store(at.as_ptr(), Ordering::Release);
    Ok(())
}

/// Whether what was offered is used.
pub fn is_in_use() -> bool {
    OFFERED.load(Ordering::Acquire).is_null() && !BUFFER.load(Ordering::Acquire).is_null()
}
