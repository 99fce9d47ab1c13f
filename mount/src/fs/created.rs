//! The answer to `CREATE`, written past fuser, which gives a name and its attributes one time to be kept.
//!
//! A key's name must never be kept. But the kernel asks for the attributes of what it was just told of, to see whether
//! the caller may open it, unless it may keep them for an instant: one request less in every claim by create. An instant
//! is the kernel's tick, at most 10 ms. A write, and setting times, have the kernel ask all the same; what a renewal by
//! lock or another's request changes of the file's size and times, `stat` shows a tick later.

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernel_keeps_the_attributes_for_an_instant_and_the_name_not_at_all() {
        let at = UNIX_EPOCH + std::time::Duration::new(7, 9);
        let attr = FileAttr {
            ino: fuser::INodeNo(0x11),
            size: 0x22,
            blocks: 1,
            atime: at,
            mtime: at,
            ctime: at,
            crtime: at,
            kind: fuser::FileType::RegularFile,
            perm: 0o640,
            nlink: 1,
            uid: 0x33,
            gid: 0x44,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        };
        let bytes = encode(0x55, &attr, 0x66, 0x77);
        let u32_at = |at: usize| u32::from_ne_bytes(*bytes[at..].first_chunk().expect("inside"));
        let u64_at = |at: usize| u64::from_ne_bytes(*bytes[at..].first_chunk().expect("inside"));
        // Offsets of `struct fuse_out_header`, `fuse_entry_out`, `fuse_attr` and `fuse_open_out` in `linux/fuse.h`.
        assert_eq!((u32_at(0), u32_at(4), u64_at(8)), (160, 0, 0x55));
        assert_eq!((u64_at(16), u64_at(24)), (0x11, 0), "inode, generation");
        assert_eq!((u64_at(32), u32_at(48)), (0, 0), "the name is never kept");
        assert_eq!((u64_at(40), u32_at(52)), (0, 1), "the attributes for an instant");
        assert_eq!((u64_at(56), u64_at(64), u64_at(72)), (0x11, 0x22, 1));
        assert_eq!((u64_at(80), u64_at(88), u64_at(96)), (7, 7, 7));
        assert_eq!((u32_at(104), u32_at(108), u32_at(112)), (9, 9, 9));
        assert_eq!((u32_at(116), u32_at(120), u32_at(124), u32_at(128)), (0o100_640, 1, 0x33, 0x44));
        assert_eq!((u32_at(132), u32_at(136), u32_at(140)), (0, 4096, 0));
        assert_eq!((u64_at(144), u32_at(152), u32_at(156)), (0x66, 0x77, 0));
    }
}
