//! Where fuser reads requests into: memory that outlives the server.
//!
//! Between the `read(2)` that takes a request from the kernel and the handler that notes it there is a moment in which a
//! killed server loses it: nobody knows what it asked for, only that there is one. So the buffer is shared memory, and
//! the kernel itself leaves the last request there for the next server. fuser allocates its buffer by a size that nothing else
//! has; what is allocated with it, one at a time, is given the memory offered, and all else is the system's.
use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicPtr, Ordering};

/// The size of fuser 0.18's buffer, in bytes.
pub const SIZE: usize = 16 * 1024 * 1024 + 4096;
/// Most of it that a request fills: a write of 128 KiB and its head.
pub const USED: usize = 256 * 1024;

static OFFERED: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());
static GIVEN: AtomicPtr<u8> = AtomicPtr::new(ptr::null_mut());

/// Offers memory for allocations of [`SIZE`] zeroed bytes, one at a time. It must be zeroed, of that size, and never be unmapped.
pub fn offer(memory: NonNull<u8>) {
    OFFERED.store(memory.as_ptr(), Ordering::Release);
}

/// Whether it was taken.
pub fn is_taken() -> bool {
    !GIVEN.load(Ordering::Acquire).is_null()
}

/// The system's allocator, but for that.
pub struct Allocator;

// SAFETY: as the system's, and the memory offered fits the one layout it is given out for, and is given out to one at a time.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        if layout.size() == SIZE {
            let offered = OFFERED.swap(ptr::null_mut(), Ordering::AcqRel);
            if !offered.is_null() {
                GIVEN.store(offered, Ordering::Release);
                return offered;
            }
        }
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        if memory == GIVEN.load(Ordering::Acquire) {
            // fuser shakes hands with one buffer and reads requests with the next.
            // SAFETY: it was given out with this size, and nobody has it any more.
            unsafe { memory.write_bytes(0, USED) };
            return OFFERED.store(memory, Ordering::Release);
        }
        // SAFETY: it came from the system; the caller's promises are passed on.
        unsafe { System.dealloc(memory, layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        if memory != GIVEN.load(Ordering::Acquire) {
            // SAFETY: it came from the system; the caller's promises are passed on.
            return unsafe { System.realloc(memory, layout, size) };
        }
        let Ok(wanted) = Layout::from_size_align(size, layout.align()) else { return ptr::null_mut() };
        // SAFETY: as much is copied as fits both.
        unsafe {
            let new = System.alloc(wanted);
            if !new.is_null() {
                ptr::copy_nonoverlapping(memory, new, layout.size().min(size));
            }
            new
        }
    }
}
