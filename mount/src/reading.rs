//! How fuser reads requests: `read(2)` is defined here, in front of the C library's.
//!
//! fuser answers the kernel's interrupts with `ENOSYS`, and from then on the kernel sends none: whoever waits for us is
//! deaf to signals then. It has no way to be asked for anything else, nor to be given a buffer; but it reads by the
//! function `read`, and the linker takes the program's own over a library's. So this one is the plain system call for
//! every descriptor but the session's, where it does two things more:
//!
//! - Interrupts are taken out and told to who asked for them; fuser never sees one. An interrupt needs no answer. It comes
//!   after its request, since one thread reads and the kernel sends it only once the request was read.
//! - What is read lies first in memory that outlives the server: see [`crate::lastread`].
//!
//! Should fuser read in another way one day, [`is_in_use`] says so: then signals are found by [`crate::watcher`]'s looks
//! alone, and what was read last is not known to the next server.

use std::ffi::{c_int, c_void};
use std::os::fd::RawFd;
use std::ptr::{NonNull, null_mut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicPtr, Ordering};

use crate::connection::interrupted;
use crate::lastread::LARGEST;

/// No session.
const NONE: RawFd = -1;

static SESSION: AtomicI32 = AtomicI32::new(NONE);
static BUFFER: AtomicPtr<u8> = AtomicPtr::new(null_mut());
static IN_USE: AtomicBool = AtomicBool::new(false);
static ON_INTERRUPT: OnceLock<Box<dyn Fn(u64) + Send + Sync>> = OnceLock::new();

/// From here on, what is read from `session` lies in `buffer` first, which is [`LARGEST`] bytes that are never unmapped, and
/// `on_interrupt` is called, by the thread that reads, with the number of each request that a signal came for. To be
/// called once, before the thread that reads is made.
pub fn begin(session: RawFd, buffer: NonNull<u8>, on_interrupt: impl Fn(u64) + Send + Sync + 'static) {
    // The first one stays, as there is one session.
    let _ = ON_INTERRUPT.set(Box::new(on_interrupt));
    BUFFER.store(buffer.as_ptr(), Ordering::Release);
    SESSION.store(session, Ordering::Release);
}

/// Whether the session is read through this.
pub fn is_in_use() -> bool {
    IN_USE.load(Ordering::Relaxed)
}

/// `read(2)`.
///
/// # Safety
/// As that of the C library: `buffer` is `count` bytes that may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn read(fd: c_int, buffer: *mut c_void, count: libc::size_t) -> libc::ssize_t {
    if fd != SESSION.load(Ordering::Relaxed) || fd == NONE {
        // SAFETY: the caller's promise.
        return unsafe { system_read(fd, buffer, count) };
    }
    // SAFETY: the caller's promise.
    unsafe { read_request(fd, buffer.cast(), count) }
}

/// The system call itself, which sets `errno` as the C library's function does.
///
/// # Safety
/// That of [`read`].
unsafe fn system_read(fd: c_int, buffer: *mut c_void, count: libc::size_t) -> libc::ssize_t {
    // SAFETY: these are the arguments of this call, and its result is as wide as a long.
    unsafe { libc::syscall(libc::SYS_read, fd, buffer, count) as libc::ssize_t }
}

/// The next request that is no interrupt.
///
/// # Safety
/// That of [`read`]; one thread only.
unsafe fn read_request(fd: c_int, buffer: *mut u8, count: libc::size_t) -> libc::ssize_t {
    let kept = BUFFER.load(Ordering::Acquire);
    IN_USE.store(true, Ordering::Relaxed);
    loop {
        // SAFETY: `begin` was promised this many bytes, for ever, and only the one thread that reads uses them.
        let read = unsafe { system_read(fd, kept.cast(), count.min(LARGEST)) };
        let Ok(length) = usize::try_from(read) else {
            // Where this ends the session, its number is somebody else's next.
            let errno = std::io::Error::last_os_error().raw_os_error();
            if !matches!(errno, Some(libc::EINTR | libc::EAGAIN | libc::ENOENT)) {
                SESSION.store(NONE, Ordering::Relaxed);
            }
            return read;
        };
        // SAFETY: the kernel has just written them, and nobody writes there before the next read.
        let message = unsafe { std::slice::from_raw_parts(kept, length) };
        if let Some(unique) = interrupted(message) {
            if let Some(tell) = ON_INTERRUPT.get() {
                tell(unique);
            }
            continue;
        }
        // SAFETY: at most `count` were read; the caller's buffer is its own.
        unsafe { std::ptr::copy_nonoverlapping(kept, buffer, length) };
        return read;
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::os::fd::AsRawFd;
    use std::sync::mpsc;

    use nix::errno::Errno;
    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

    use super::*;

    fn message(opcode: u32, unique: u64, body: &[u8]) -> Vec<u8> {
        let length = (40 + body.len()) as u32;
        let head = [length.to_ne_bytes(), opcode.to_ne_bytes()].concat();
        [&head[..], &unique.to_ne_bytes(), &[0; 24], body].concat()
    }

    /// In one test, as there is one session in a process.
    #[test]
    fn interrupts_are_taken_out_of_what_the_session_reads() {
        let pair =
            || socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_NONBLOCK).expect("pair");
        let ((kernel, session), (far, other)) = (pair(), pair());
        let (said, heard) = mpsc::channel();
        let buffer = Box::leak(vec![0_u8; LARGEST].into_boxed_slice());
        let kept = NonNull::from(&mut buffer[0]);
        begin(session.as_raw_fd(), kept, move |unique| said.send(unique).expect("somebody hears"));

        let interrupt = message(36, 11, &10_u64.to_ne_bytes());
        let (first, second) = (message(3, 12, &[1; 16]), message(3, 14, &[2; 16]));
        for request in [&first, &interrupt, &interrupt, &second] {
            nix::unistd::write(&kernel, request).expect("sent");
        }
        let mut bytes = vec![0; LARGEST + 4096];
        // As fuser reads, and as the standard library does.
        let length = nix::unistd::read(&session, &mut bytes).expect("a request");
        assert_eq!((&bytes[..length], heard.try_recv().ok()), (&first[..], None));
        let length = nix::unistd::read(&session, &mut bytes).expect("a request");
        assert_eq!(&bytes[..length], &second[..]);
        assert_eq!(heard.try_iter().collect::<Vec<_>>(), [10, 10]);
        // SAFETY: nothing writes there while this looks.
        assert_eq!(unsafe { std::slice::from_raw_parts(kept.as_ptr(), length) }, &second[..], "it is kept");
        assert!(is_in_use());
        // Nothing to read is no end.
        assert_eq!(nix::unistd::read(&session, &mut bytes), Err(Errno::EAGAIN));

        // Whatever is read elsewhere is left as it is.
        nix::unistd::write(&far, &interrupt).expect("sent");
        let length = nix::unistd::read(&other, &mut bytes).expect("all of it");
        assert_eq!((&bytes[..length], heard.try_recv().ok()), (&interrupt[..], None));
        assert_eq!(nix::unistd::read(&other, &mut bytes), Err(Errno::EAGAIN), "with the errno of the call");
        let mut file = std::fs::File::open("/proc/self/comm").expect("a file");
        assert!(io::Read::read_to_end(&mut file, &mut Vec::new()).expect("it is read") > 0);
    }
}
