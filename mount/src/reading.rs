//! How fuser reads requests: `read(2)` is defined here, in front of the C library's.
//!
//! fuser answers the kernel's interrupts with `ENOSYS`, and from then on the kernel sends none: whoever waits for us is
//! deaf to signals then. fuser cannot be told otherwise; but it reads by the function `read`, and the linker takes the
//! program's own over a library's. So this one is the plain system call for every descriptor but the session's. There,
//! interrupts are taken out and told to whoever asked for them, and fuser never sees one.
//!
//! An interrupt needs no answer. It comes after its request, as one thread reads, and the kernel sends it only once the
//! request was read; the request may have been answered by then.
//!
//! Should fuser read in another way one day, [`is_in_use`] says so: then signals are found by [`crate::watcher`]'s looks
//! alone, as far as callers can be seen.

use std::ffi::{c_int, c_void};
use std::os::fd::RawFd;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use crate::connection::interrupted;

/// No session.
const NONE: RawFd = -1;

static SESSION: AtomicI32 = AtomicI32::new(NONE);
static IN_USE: AtomicBool = AtomicBool::new(false);
static ON_INTERRUPT: OnceLock<Box<dyn Fn(u64) + Send + Sync>> = OnceLock::new();

/// From here on, `on_interrupt` is called, by the thread that reads `session`, with the number of each request that a signal
/// came for. To be called once, before that thread is made.
pub fn begin(session: RawFd, on_interrupt: impl Fn(u64) + Send + Sync + 'static) {
    // The first one stays, as there is one session.
    let _ = ON_INTERRUPT.set(Box::new(on_interrupt));
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
    unsafe { read_request(fd, buffer, count) }
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
/// That of [`read`].
unsafe fn read_request(fd: c_int, buffer: *mut c_void, count: libc::size_t) -> libc::ssize_t {
    IN_USE.store(true, Ordering::Relaxed);
    loop {
        // SAFETY: the caller's promise.
        let read = unsafe { system_read(fd, buffer, count) };
        let Ok(length) = usize::try_from(read) else {
            // Where this ends the session, its number is somebody else's next.
            let errno = std::io::Error::last_os_error().raw_os_error();
            if !matches!(errno, Some(libc::EINTR | libc::EAGAIN | libc::ENOENT)) {
                SESSION.store(NONE, Ordering::Relaxed);
            }
            return read;
        };
        // SAFETY: the kernel has just written them, and until this returns nobody else uses the caller's buffer.
        let message = unsafe { std::slice::from_raw_parts(buffer.cast::<u8>(), length) };
        match interrupted(message) {
            None => return read,
            Some(unique) => ON_INTERRUPT.get().map_or((), |tell| tell(unique)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
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
        begin(session.as_raw_fd(), move |unique| said.send(unique).expect("somebody hears"));

        let interrupt = message(36, 11, &10_u64.to_ne_bytes());
        let (first, second) = (message(3, 12, &[1; 16]), message(3, 14, &[2; 16]));
        for request in [&first, &interrupt, &interrupt, &second] {
            nix::unistd::write(&kernel, request).expect("sent");
        }
        let mut bytes = vec![0; 4096];
        // As fuser reads.
        let length = nix::unistd::read(&session, &mut bytes).expect("a request");
        assert_eq!((&bytes[..length], heard.try_recv().ok()), (&first[..], None));
        let length = nix::unistd::read(&session, &mut bytes).expect("a request");
        assert_eq!(&bytes[..length], &second[..]);
        assert_eq!(heard.try_iter().collect::<Vec<_>>(), [10, 10]);
        assert!(is_in_use());
        // Nothing to read is no end.
        assert_eq!(nix::unistd::read(&session, &mut bytes), Err(Errno::EAGAIN));

        // Whatever is read elsewhere is left as it is.
        nix::unistd::write(&far, &interrupt).expect("sent");
        let length = nix::unistd::read(&other, &mut bytes).expect("all of it");
        assert_eq!((&bytes[..length], heard.try_recv().ok()), (&interrupt[..], None));
        assert_eq!(nix::unistd::read(&other, &mut bytes), Err(Errno::EAGAIN), "with the errno of the call");
        let mut file = std::fs::File::open("/proc/self/comm").expect("a file");
        assert!(file.read(&mut bytes).expect("it is read") > 0);
    }
}
