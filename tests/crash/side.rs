//! The calls around the leases: looking, listing, waiting for changes, namespaces. Each has the answers it may give, given
//! what the worker itself knows; what it does with keys of its own below `KEYS-side` no checker looks at afterwards.
use std::ffi::OsString;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rand::Rng;

use crate::calls;
use crate::record::{Op, Side};
use crate::sys::{self, Answer};
use crate::worker::{Worker, first_number};

/// Longest wait for a change, in milliseconds. A call of more than a second is judged by its time, where the machine did not
/// stand still.
const CHANGE_MS: i32 = 60_000;

/// One of them, at random.
pub fn once(worker: &mut Worker) {
    match worker.rng.random_range(0..12) {
        0 | 1 => look(worker),
        2 => list(worker),
        3 => status(worker),
        4 => texts(worker),
        5 => events(worker),
        6 => change(worker),
        7 => hang_up(worker),
        8 => namespace(worker),
        9 | 10 => read_any_result(worker),
        _ => rename(worker),
    }
}

/// `results/KEY/NAME`.
pub fn result_path(worker: &Worker, key: &str, name: &str) -> PathBuf {
    worker.job.root.join("results").join(key).join(name)
}

/// The namespace that no checker looks at.
pub fn namespace_of(worker: &Worker) -> String {
    let key = &worker.job.keys[0];
    format!("{}-side", key.split('/').next().unwrap_or(key))
}

/// A key of this process alone.
fn own_key(worker: &Worker, name: &str) -> String {
    format!("{}/{name}-{}", namespace_of(worker), std::process::id())
}

fn io(result: std::io::Result<u64>) -> Answer {
    result.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
}

fn side(worker: &Worker, key: &str, what: Side, call: impl FnMut() -> Answer) -> Answer {
    worker.call(key, Op::Side(what), call)
}

/// Opens, reads whole, closes: one call of the history.
pub fn read_file(worker: &Worker, key: &str, what: Side, path: &Path) -> Option<Vec<u8>> {
    let mut text = Vec::new();
    side(worker, key, what, || {
        text = io_bytes(std::fs::read(path))?;
        Ok(text.len() as u64)
    })
    .ok()?;
    Some(text)
}

fn io_bytes(result: std::io::Result<Vec<u8>>) -> Result<Vec<u8>, i32> {
    result.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))
}

/// The epoch of the latest result of a key that has one.
pub fn latest(worker: &Worker, key: &str) -> Option<u64> {
    let path = result_path(worker, key, "latest");
    let answer = side(worker, key, Side::Latest, || {
        let target = std::fs::read_link(&path).map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?;
        Ok(target.to_string_lossy().parse().unwrap_or(0))
    });
    answer.ok()
}

/// Looks at a key without wanting it: the record is whole, whoever holds it.
fn look(worker: &mut Worker) {
    let key = worker.any_key();
    let path = worker.claim_path(&key);
    let _ = side(worker, &key, Side::Stat, || io(std::fs::metadata(&path).map(|meta| meta.len())));
    let mut made: Option<OwnedFd> = None;
    let opened = side(worker, &key, Side::Open, || {
        sys::open(&path, libc::O_RDONLY).map(|fd| made.insert(fd).as_raw_fd() as u64)
    });
    let (Ok(_), Some(fd)) = (opened, made) else { return };
    let mut text = Vec::new();
    let read = side(worker, &key, Side::Read, || {
        text = sys::read(&fd)?;
        Ok(text.len() as u64)
    });
    if read.is_ok() {
        let text = String::from_utf8_lossy(&text);
        if text.lines().next().is_none_or(|line| line.parse::<u64>().is_err())
            || !text.contains("\nstate: ")
            || !text.ends_with('\n')
        {
            worker.wrong(format!("the record of {key} is torn: {text:?}"));
        }
    }
}

/// Lists the namespace below each subtree; it has what must be there.
fn list(worker: &mut Worker) {
    let key = worker.any_key();
    let namespace = key.split('/').next().unwrap_or(&key).to_owned();
    for subtree in ["claims", "results", "status"] {
        let path = worker.job.root.join(subtree).join(&namespace);
        let mut names: Vec<OsString> = Vec::new();
        let listed = side(worker, &key, Side::List, || {
            names.clear();
            for entry in std::fs::read_dir(&path).map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))? {
                names.push(entry.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?.file_name());
            }
            Ok(names.len() as u64)
        });
        let mut sorted = names.clone();
        sorted.sort();
        sorted.dedup();
        if listed.is_ok() && sorted.len() != names.len() {
            worker.wrong(format!("{subtree}/{namespace} lists a name twice: {names:?}"));
        }
        let _ = side(worker, &key, Side::StatDir, || io(std::fs::metadata(&path).map(|meta| meta.len())));
    }
}

fn status(worker: &mut Worker) {
    let key = worker.any_key();
    worker.observe(&key);
}

/// What the tree says of itself.
fn texts(worker: &mut Worker) {
    let key = worker.any_key();
    for name in ["version", "config", "metrics"] {
        let path = worker.job.root.join(".leasefs").join(name);
        let text = read_file(worker, &key, Side::Text, &path);
        if text.as_ref().is_some_and(Vec::is_empty) {
            worker.wrong(format!(".leasefs/{name} is empty"));
        }
    }
}

/// Claims a key of its own and reads of it in the events, waiting or not.
fn events(worker: &mut Worker) {
    let key = own_key(worker, "e");
    let path = worker.job.root.join(".leasefs/events");
    let waits = worker.once_in(2);
    let mut made = None;
    let flags = libc::O_RDONLY | if waits { 0 } else { libc::O_NONBLOCK };
    let opened =
        side(worker, &key, Side::Text, || sys::open(&path, flags).map(|fd| made.insert(fd).as_raw_fd() as u64));
    let (Ok(_), Some(fd)) = (opened, made) else { return };
    if !touch_key(worker, &key) {
        return;
    }
    let read = |worker: &Worker| {
        let mut text = Vec::new();
        let answer = side(worker, &key, Side::Events, || {
            text = calls::read_next(&fd)?;
            Ok(text.len() as u64)
        });
        answer.map(|_| text)
    };
    match read(worker) {
        Ok(text) => {
            // A line longer than the buffer comes in pieces: only whole ones are looked at.
            let text = String::from_utf8_lossy(&text).into_owned();
            let whole = text.rfind('\n').map_or("", |end| &text[..end]);
            if let Some(line) = whole.lines().find(|line| serde_json::from_str::<serde_json::Value>(line).is_err()) {
                worker.wrong(format!("no event: {line:?}"));
            }
        }
        Err(libc::EAGAIN) if !waits => {
            worker.wrong(format!("{key} was claimed, and there is no event"));
        }
        Err(_) => {}
    }
}

/// Claims a key of this process alone and lets it go. True if both worked.
fn touch_key(worker: &Worker, key: &str) -> bool {
    let path = worker.claim_path(key);
    let mut made = None;
    let flags = libc::O_RDWR | libc::O_CREAT;
    let opened =
        side(worker, key, Side::Handle, || sys::open(&path, flags).map(|fd| made.insert(fd).as_raw_fd() as u64));
    let (Ok(_), Some(fd)) = (opened, made) else { return false };
    let locked = side(worker, key, Side::Handle, || sys::flock(&fd, libc::LOCK_EX | libc::LOCK_NB));
    let mut fd = Some(fd);
    let closed = side(worker, key, Side::Handle, || fd.take().map_or(Ok(0), sys::close));
    locked.is_ok() && closed.is_ok()
}

/// Forks a child that pauses and then does something with no line in the log.
fn meanwhile(pause_us: u64, act: impl FnOnce() -> bool) -> i32 {
    // SAFETY: this process runs one thread of ours; the child uses plain calls and leaves by _exit.
    match unsafe { libc::fork() } {
        0 => {
            sys::pause(pause_us);
            let done = act();
            // SAFETY: ends the child.
            unsafe { libc::_exit(i32::from(!done)) }
        }
        child => {
            assert!(child > 0, "fork");
            child
        }
    }
}

/// Whether the child did what it was to do.
fn reap(child: i32) -> bool {
    let mut status = 0;
    // SAFETY: `status` is a valid place for the result.
    unsafe { libc::waitpid(child, &mut status, 0) };
    status == 0
}

/// Watches a status until a child claims the key.
fn change(worker: &mut Worker) {
    let key = own_key(worker, "p");
    if !touch_key(worker, &key) {
        return;
    }
    let path = worker.job.root.join("status").join(&key);
    let mut made = None;
    let opened = side(worker, &key, Side::Status, || {
        sys::open(&path, libc::O_RDONLY).map(|fd| made.insert(fd).as_raw_fd() as u64)
    });
    let (Ok(_), Some(fd)) = (opened, made) else { return };
    let _ = side(worker, &key, Side::Status, || sys::read(&fd).map(|text| text.len() as u64));
    let claims = worker.claim_path(&key);
    let pause_us = worker.rng.random_range(0..30_000);
    let child = meanwhile(pause_us, || {
        let fd = retried(|| sys::open(&claims, libc::O_RDWR | libc::O_CREAT));
        fd.is_ok_and(|fd| retried(|| sys::flock(&fd, libc::LOCK_EX)).is_ok())
    });
    let events = watch(worker, &key, Side::Poll, &fd, libc::POLLPRI);
    let did = reap(child);
    if !did {
        worker.wrong(format!("{key}, which nobody else wants, could not be claimed by a child"));
    } else if events & libc::POLLPRI == 0 {
        worker.wrong(format!("{key} was claimed, and its watcher was not woken in a minute: {events:#x}"));
    }
}

/// Polls for a minute. Where calls may be interrupted, the kernel makes an error of an interrupted `poll`: it is made again.
fn watch(worker: &Worker, key: &str, what: Side, fd: &OwnedFd, events: i16) -> i16 {
    loop {
        let seen = side(worker, key, what, || calls::poll(fd, events, CHANGE_MS)).unwrap_or(0) as i16;
        if !(worker.job.interrupted && seen == libc::POLLERR) {
            return seen;
        }
    }
}

fn retried<T>(mut call: impl FnMut() -> Result<T, i32>) -> Result<T, i32> {
    loop {
        match call() {
            Err(libc::EINTR) => {}
            answer => return answer,
        }
    }
}

/// Holds a key until it is evicted (root) or its TTL runs out, and is told so by `poll` and by each call after it.
fn hang_up(worker: &mut Worker) {
    let key = own_key(worker, "h");
    let path = worker.claim_path(&key);
    let mut made = None;
    let flags = libc::O_RDWR | libc::O_CREAT;
    let opened =
        side(worker, &key, Side::Handle, || sys::open(&path, flags).map(|fd| made.insert(fd).as_raw_fd() as u64));
    let (Ok(_), Some(fd)) = (opened, made) else { return };
    if side(worker, &key, Side::Handle, || sys::flock(&fd, libc::LOCK_EX | libc::LOCK_NB)).is_err() {
        return;
    }
    let epoch = match side(worker, &key, Side::Read, || {
        sys::read(&fd).map(|text| first_number(&String::from_utf8_lossy(&text)))
    }) {
        Ok(epoch) if epoch > 0 => epoch,
        answer => return worker.wrong(format!("{key}: the holder reads {answer:?}")),
    };
    let pause_us = worker.rng.random_range(0..30_000);
    let child = if worker.job.uid == 0 {
        let control = worker.job.root.join(".leasefs/control");
        let order = serde_json::json!({"op": "evict", "key": key, "epoch": epoch, "reason": "crash"}).to_string();
        Some(meanwhile(pause_us, || {
            let fd = retried(|| sys::open(&control, libc::O_WRONLY));
            // Interrupted, it may have been done the first time.
            let mut again = false;
            fd.is_ok_and(|fd| {
                loop {
                    match sys::write(&fd, order.as_bytes()) {
                        Err(libc::EINTR) => again = true,
                        answer => return answer.is_ok() || again && answer == Err(libc::ESTALE),
                    }
                }
            })
        }))
    } else {
        let ttl_ms = 20 + pause_us / 1_000;
        let began = sys::now();
        let ttl = format!("{ttl_ms}ms");
        let set = side(worker, &key, Side::ShortTtl, || sys::set_xattr(&fd, "user.lease.ttl", &ttl));
        if set.is_err() && sys::now() - began < ttl_ms * 1_000_000 {
            worker.wrong(format!("{key} was lost before the TTL it was given"));
        }
        None
    };
    // Loss is always told, whatever is asked for.
    let events = watch(worker, &key, Side::HangUp, &fd, 0);
    if child.is_some_and(|child| !reap(child)) {
        return worker.wrong(format!("{key} could not be evicted"));
    }
    if events & libc::POLLHUP == 0 {
        return worker.wrong(format!("{key} was lost, and its holder was not told in a minute: {events:#x}"));
    }
    for answer in [sys::read(&fd).map(|_| 0), sys::write(&fd, b"late"), sys::flock(&fd, libc::LOCK_EX | libc::LOCK_NB)]
    {
        let interrupted = worker.job.interrupted && answer == Err(libc::EINTR);
        if answer != Err(libc::ESTALE) && !interrupted {
            worker.wrong(format!("{key} was lost, and its old handle answers {answer:?}"));
        }
    }
}

/// A namespace of its own: made, shut in, given a TTL, made smaller again. It keeps what it was given.
fn namespace(worker: &mut Worker) {
    let name = own_key(worker, "n");
    let path = worker.claim_path(&name);
    let inner = path.join("inner");
    for path in [&path, &inner] {
        if side(worker, &name, Side::Mkdir, || sys::with_mode(libc::mkdir, path, 0o755)).is_err() {
            return;
        }
    }
    let mode = [0o700, 0o750, 0o711][worker.rng.random_range(0..3)];
    if side(worker, &name, Side::Chmod, || sys::with_mode(libc::chmod, &path, mode)).is_ok() {
        let seen = side(worker, &name, Side::StatDir, || {
            io(std::fs::metadata(&path).map(|meta| u64::from(meta.permissions().mode() & 0o7777)))
        });
        if seen.is_ok_and(|seen| seen != u64::from(mode)) {
            worker.wrong(format!("{name} was given mode {mode:o} and has {seen:?}"));
        }
    }
    let _ = side(worker, &name, Side::Ttl, || sys::set_xattr_path(&path, "user.lease.ttl", "90s"));
    let mut options = std::fs::OpenOptions::new();
    options.read(true).custom_flags(libc::O_DIRECTORY);
    let _ = side(worker, &name, Side::StatDir, || io(options.open(&path).map(|_| 0)));
    for path in [&inner, &path] {
        let _ = side(worker, &name, Side::Rmdir, || sys::on_path(libc::rmdir, path));
    }
}

/// Reads a result that is listed: it is whole.
fn read_any_result(worker: &mut Worker) {
    let key = worker.any_key();
    let directory = worker.job.root.join("results").join(&key);
    let mut epochs: Vec<u64> = Vec::new();
    let listed = worker.call(&key, Op::Side(Side::Open), || {
        epochs.clear();
        for entry in std::fs::read_dir(&directory).map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))? {
            let entry = entry.map_err(|error| error.raw_os_error().unwrap_or(libc::EIO))?;
            epochs.extend(entry.file_name().to_string_lossy().parse::<u64>());
        }
        Ok(epochs.len() as u64)
    });
    if listed.is_err() || epochs.is_empty() {
        return;
    }
    let epoch = epochs[worker.rng.random_range(0..epochs.len())];
    let path = directory.join(epoch.to_string());
    let Some(text) = read_file(worker, &key, Side::Result, &path) else { return };
    let text = String::from_utf8_lossy(&text);
    if !text.starts_with(&format!("key={key} epoch={epoch} ")) || !text.ends_with("end\n") {
        worker.wrong(format!("the result of epoch {epoch} of {key} is torn or another's: {} bytes", text.len()));
    }
    let latest = latest(worker, &key);
    if latest.is_some_and(|latest| latest < epoch) {
        worker.wrong(format!("epoch {epoch} of {key} has a result, and the latest is {latest:?}"));
    }
}

fn rename(worker: &mut Worker) {
    let key = worker.any_key();
    let path = worker.claim_path(&key);
    let aside = path.with_extension("aside");
    let _ = side(worker, &key, Side::Rename, || sys::on_paths(libc::rename, &path, &aside));
}
