//! The answer to `CREATE`, written past fuser, which gives a name and its attributes one time to be kept.
//!
//! A key's name must never be kept. But the kernel asks for the attributes of what it was just told of, to see whether
//! the caller may open it, unless it may keep them for an instant: one request less in every claim by create. An instant
//! is the kernel's tick, at most 10 ms, and whatever goes through the file meanwhile has the kernel ask all the same.

use std::io::IoSlice;
use std::os::fd::AsFd;
use std::time::{SystemTime, UNIX_EPOCH};

use fuser::{FileAttr, ReplyCreate};
use nix::sys::uio::writev;

/// Bytes of `fuse_out_header`, `fuse_entry_out` and `fuse_open_out`.
const BYTES: usize = 16 + 128 + 16;
/// The shortest time there is; the kernel rounds it up to its tick.
const INSTANT_NS: u32 = 1;

/// Answers a request by its number: a regular file, its handle, and how it is open. Through `reply` where that fails.
pub fn answer(
    device: impl AsFd,
    unique: u64,
    reply: ReplyCreate,
    attr: &FileAttr,
    fh: fuser::FileHandle,
    flags: fuser::FopenFlags,
) {
    let bytes = encode(unique, attr, fh.0, flags.bits());
    match writev(device, &[IoSlice::new(&bytes)]) {
        // It would answer a second time when it is dropped. What it holds is one reference to the connection, which is
        // there for as long as the server.
        Ok(BYTES) => std::mem::forget(reply),
        _ => reply.created(&super::names::NEVER, attr, fuser::Generation(0), fh, flags),
    }
}

fn encode(unique: u64, attr: &FileAttr, fh: u64, flags: u32) -> [u8; BYTES] {
    let mut bytes = Bytes([0; BYTES], 0);
    let times = [attr.atime, attr.mtime, attr.ctime].map(since_epoch);
    bytes.u32(BYTES as u32);
    bytes.u32(0);
    bytes.u64(unique);
    bytes.u64(attr.ino.0);
    // Generation, and for how long the name and the attributes may be kept: seconds, then nanoseconds.
    for _ in 0..3 {
        bytes.u64(0);
    }
    bytes.u32(0);
    bytes.u32(INSTANT_NS);
    for word in [attr.ino.0, attr.size, attr.blocks] {
        bytes.u64(word);
    }
    for (seconds, _) in times {
        bytes.u64(seconds);
    }
    for (_, nanoseconds) in times {
        bytes.u32(nanoseconds);
    }
    let mode = libc::S_IFREG | u32::from(attr.perm);
    for word in [mode, attr.nlink, attr.uid, attr.gid, attr.rdev, attr.blksize, 0] {
        bytes.u32(word);
    }
    bytes.u64(fh);
    bytes.u32(flags);
    bytes.u32(0);
    debug_assert_eq!(bytes.1, BYTES);
    bytes.0
}

/// Times of a key's file are never before the epoch.
fn since_epoch(time: SystemTime) -> (u64, u32) {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    (since.as_secs(), since.subsec_nanos())
}

struct Bytes([u8; BYTES], usize);

impl Bytes {
    fn u32(&mut self, word: u32) {
        self.put(&word.to_ne_bytes());
    }

    fn u64(&mut self, word: u64) {
        self.put(&word.to_ne_bytes());
    }

    fn put(&mut self, bytes: &[u8]) {
        self.0[self.1..self.1 + bytes.len()].copy_from_slice(bytes);
        self.1 += bytes.len();
    }
}
