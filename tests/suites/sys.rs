//! System calls as the workers need them: the plain errno for an answer, and the clock of the leases.
//!
//! Nothing here retries, translates or hides an answer; a suite that did could not tell what the mount said.
use std::ffi::CString;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

/// A system call's answer: its value, or the errno.
pub type Answer = Result<u64, i32>;

/// Nanoseconds of `CLOCK_BOOTTIME`, the clock the leases live by; the same in all processes.
pub fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is a valid place for the result.
    let failed = unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &mut time) };
    assert_eq!(failed, 0, "CLOCK_BOOTTIME exists");
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// The errno's name (`ESTALE`), for people.
pub fn errno_name(errno: i32) -> String {
    format!("{:?}", nix::errno::Errno::from_raw(errno))
}

/// What a call returned, or the errno it left.
pub fn answer(value: i64) -> Answer {
    if value < 0 { Err(nix::errno::Errno::last_raw()) } else { Ok(value as u64) }
}

fn c_path(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).expect("test paths have no NUL")
}

/// `open(2)`; close-on-exec.
pub fn open(path: &Path, flags: i32) -> Result<OwnedFd, i32> {
    let path = c_path(path);
    // SAFETY: `path` is NUL-terminated and outlives the call.
    let fd = answer(unsafe { libc::open(path.as_ptr(), flags | libc::O_CLOEXEC, 0o666) }.into())?;
    // SAFETY: the kernel just gave us this descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as i32) })
}

/// `close(2)`, with its answer.
pub fn close(fd: OwnedFd) -> Answer {
    // SAFETY: the descriptor was owned and is given up here.
    answer(unsafe { libc::close(fd.into_raw_fd()) }.into())
}

/// One `pread(2)` from the start.
pub fn read(fd: &OwnedFd) -> Result<Vec<u8>, i32> {
    let mut buffer = vec![0; 16 << 10];
    // SAFETY: the buffer is writable for its whole length.
    let got = answer(unsafe { libc::pread(fd.as_raw_fd(), buffer.as_mut_ptr().cast(), buffer.len(), 0) } as i64)?;
    buffer.truncate(got as usize);
    Ok(buffer)
}

/// One `write(2)` of the whole buffer; a short write is the bytes written.
pub fn write(fd: &OwnedFd, bytes: &[u8]) -> Answer {
    // SAFETY: the buffer is readable for its whole length.
    answer(unsafe { libc::write(fd.as_raw_fd(), bytes.as_ptr().cast(), bytes.len()) } as i64)
}

/// `futimens(2)` to the present time.
pub fn touch(fd: &OwnedFd) -> Answer {
    // SAFETY: a null pointer means "now".
    answer(unsafe { libc::futimens(fd.as_raw_fd(), std::ptr::null()) }.into())
}

/// `fsync(2)`.
pub fn fsync(fd: &OwnedFd) -> Answer {
    // SAFETY: no pointer is involved.
    answer(unsafe { libc::fsync(fd.as_raw_fd()) }.into())
}

/// `fsetxattr(2)`.
pub fn set_xattr(fd: &OwnedFd, name: &str, value: &str) -> Answer {
    let name = CString::new(name).expect("no NUL");
    // SAFETY: name and value outlive the call; the length is the value's.
    answer(unsafe { libc::fsetxattr(fd.as_raw_fd(), name.as_ptr(), value.as_ptr().cast(), value.len(), 0) }.into())
}

/// `flock(2)`.
pub fn flock(fd: &OwnedFd, operation: i32) -> Answer {
    // SAFETY: no pointer is involved.
    answer(unsafe { libc::flock(fd.as_raw_fd(), operation) }.into())
}

/// `fcntl(2)` with a lock command over the whole file.
pub fn fcntl_lock(fd: &OwnedFd, command: i32, kind: i32) -> Answer {
    // SAFETY: all-zero is a valid flock: from the start to the end, owner 0 as the OFD commands demand.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as i16;
    // SAFETY: `lock` outlives the call.
    answer(unsafe { libc::fcntl(fd.as_raw_fd(), command, &lock) }.into())
}

/// A path-only call of libc: `unlink`, `rmdir`.
pub fn on_path(call: unsafe extern "C" fn(*const libc::c_char) -> i32, path: &Path) -> Answer {
    let path = c_path(path);
    // SAFETY: `path` is NUL-terminated and outlives the call.
    answer(unsafe { call(path.as_ptr()) }.into())
}

/// A call of libc on two paths: `rename`, `link`, `symlink`.
pub fn on_paths(
    call: unsafe extern "C" fn(*const libc::c_char, *const libc::c_char) -> i32,
    from: &Path,
    to: &Path,
) -> Answer {
    let (from, to) = (c_path(from), c_path(to));
    // SAFETY: both are NUL-terminated and outlive the call.
    answer(unsafe { call(from.as_ptr(), to.as_ptr()) }.into())
}

/// A call of libc on a path and a mode: `chmod`, `mkdir`, `mkfifo`.
pub fn with_mode(
    call: unsafe extern "C" fn(*const libc::c_char, libc::mode_t) -> i32,
    path: &Path,
    mode: u32,
) -> Answer {
    let path = c_path(path);
    // SAFETY: `path` is NUL-terminated and outlives the call.
    answer(unsafe { call(path.as_ptr(), mode) }.into())
}

/// `chown(2)`.
pub fn chown(path: &Path, uid: u32, gid: u32) -> Answer {
    let path = c_path(path);
    // SAFETY: `path` is NUL-terminated and outlives the call.
    answer(unsafe { libc::chown(path.as_ptr(), uid, gid) }.into())
}

/// `truncate(2)` to nothing.
pub fn truncate(path: &Path) -> Answer {
    let path = c_path(path);
    // SAFETY: `path` is NUL-terminated and outlives the call.
    answer(unsafe { libc::truncate(path.as_ptr(), 0) }.into())
}

/// `utimensat(2)` of a path to the present time.
pub fn touch_path(path: &Path) -> Answer {
    let path = c_path(path);
    // SAFETY: `path` is NUL-terminated; a null pointer means "now".
    answer(unsafe { libc::utimensat(libc::AT_FDCWD, path.as_ptr(), std::ptr::null(), 0) }.into())
}

/// `setxattr(2)` of a path.
pub fn set_xattr_path(path: &Path, name: &str, value: &str) -> Answer {
    let (path, name) = (c_path(path), CString::new(name).expect("no NUL"));
    // SAFETY: path, name and value outlive the call; the length is the value's.
    answer(unsafe { libc::setxattr(path.as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), 0) }.into())
}

/// `kill(2)`; a negative pid means a process group.
pub fn kill(pid: i32, signal: i32) -> Answer {
    // SAFETY: no pointer is involved.
    answer(unsafe { libc::kill(pid, signal) }.into())
}

/// Sleeps for so many microseconds, or yields the processor for none.
pub fn pause(micros: u64) {
    if micros == 0 {
        std::thread::yield_now();
    } else {
        std::thread::sleep(std::time::Duration::from_micros(micros));
    }
}

extern "C" fn woken(_signal: i32) {}

/// Has `SIGALRM` interrupt system calls (no `SA_RESTART`) and do nothing else.
pub fn interruptible() {
    // SAFETY: all-zero is a valid sigaction (no flags, empty mask); the handler touches nothing.
    let failed = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = woken as *const () as usize;
        libc::sigaction(libc::SIGALRM, &action, std::ptr::null_mut())
    };
    assert_eq!(failed, 0, "SIGALRM can be handled");
}

/// Sends the thread that made it a signal, again and again (the first may come before the call it is meant for), as long
/// as the value lives. Not the process: another thread of it would take the signal, and the call would never know.
pub struct Alarm(libc::timer_t);

impl Alarm {
    /// The first comes after so many microseconds.
    pub fn every(micros: u64, signal: i32) -> Alarm {
        let time = libc::timespec { tv_sec: (micros / 1_000_000) as i64, tv_nsec: (micros % 1_000_000 * 1_000) as i64 };
        let times = libc::itimerspec { it_interval: time, it_value: time };
        let mut timer = std::ptr::null_mut();
        // SAFETY: all-zero is a valid sigevent, and all that is passed outlives the calls.
        let failed = unsafe {
            let mut event: libc::sigevent = std::mem::zeroed();
            event.sigev_notify = libc::SIGEV_THREAD_ID;
            event.sigev_signo = signal;
            event.sigev_notify_thread_id = libc::gettid();
            libc::timer_create(libc::CLOCK_MONOTONIC, &mut event, &mut timer)
                | libc::timer_settime(timer, 0, &times, std::ptr::null_mut())
        };
        assert_eq!(failed, 0, "the timer can be set");
        Alarm(timer)
    }
}

impl Drop for Alarm {
    fn drop(&mut self) {
        // SAFETY: made by `every`, and deleted once.
        unsafe { libc::timer_delete(self.0) };
    }
}

/// Numbers shared by all processes of a run: it goes on when one of them is killed.
pub struct Board(*mut AtomicU64);

/// The slots of a [`Board`].
#[derive(Clone, Copy)]
pub enum Number {
    /// Not 0: the run is over, release and leave.
    Stop = 0,
    /// Exclusive claims granted so far.
    Claims = 1,
    /// Times a worker did anything at all.
    Pulse = 2,
    /// Not 0: somebody saw what may never be, and the run need not go on.
    Wrong = 3,
    /// Calls made again because the server's end interrupted them.
    Interrupted = 4,
}

impl Board {
    /// Maps the file, making it if need be.
    pub fn open(path: &Path) -> Board {
        let file = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .expect("the board can be opened");
        file.set_len(4096).expect("the board can be sized");
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh shared mapping of a file that is as long as the mapping and is never shortened.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), 4096, protection, libc::MAP_SHARED, file.as_raw_fd(), 0) };
        assert_ne!(at, libc::MAP_FAILED, "the board can be mapped");
        Board(at.cast())
    }

    fn slot(&self, number: Number) -> &AtomicU64 {
        // SAFETY: the mapping is page-aligned, holds 512 of them, lives as long as `self`, and is only used atomically.
        unsafe { &*self.0.add(number as usize) }
    }

    /// The number now.
    pub fn get(&self, number: Number) -> u64 {
        self.slot(number).load(Ordering::SeqCst)
    }

    /// Adds one.
    pub fn count(&self, number: Number) {
        self.slot(number).fetch_add(1, Ordering::SeqCst);
    }
}

impl Drop for Board {
    fn drop(&mut self) {
        // SAFETY: mapped by `open`, and nothing refers to it any more.
        unsafe { libc::munmap(self.0.cast(), 4096) };
    }
}
