//! Requests and answers as the kernel has them (`linux/fuse.h`): only what a take-over makes or looks at itself.

use crate::flight::{OWN, RESEND, Record, opcode};
use crate::ino::Node;

/// The root's inode.
pub const ROOT: u64 = 1;
/// The number of the request that marks the end of what is handed over.
pub const BARRIER: u64 = OWN | 1;
/// `FUSE_NOTIFY_POLL`
const NOTIFY_POLL: i32 = 1;
/// `FUSE_NOTIFY_RESEND`
const NOTIFY_RESEND: i32 = 7;
/// `FUSE_INIT_EXT`: there are 32 more flags.
const INIT_EXT: u64 = 1 << 30;

/// `FUSE_INT_REQ_BIT`
const INTERRUPTED: u64 = 1;

const HEADER: usize = 40;
const ANSWER: usize = 16;

/// The head of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// What it asks for.
    pub opcode: u32,
    /// Its number.
    pub unique: u64,
    /// The inode.
    pub ino: u64,
    /// Who asks.
    pub pid: u32,
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes)
}

fn u64_at(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..at + 8)?.try_into().ok().map(u64::from_ne_bytes)
}

impl Header {
    /// Reads it.
    pub fn of(request: &[u8]) -> Option<Header> {
        Some(Header {
            opcode: u32_at(request, 4)?,
            unique: u64_at(request, 8)?,
            ino: u64_at(request, 16)?,
            pid: u32_at(request, 32)?,
        })
    }
}

/// The number of the request that a signal came for, where this is what the kernel says.
pub fn interrupted(request: &[u8]) -> Option<u64> {
    let is_interrupt = u32_at(request, 4) == Some(opcode::INTERRUPT);
    u64_at(request, HEADER).filter(|_| is_interrupt).map(|unique| unique & !RESEND)
}

/// The number an answer is for; 0 for a notice.
pub fn answered(answer: &[u8]) -> Option<u64> {
    u64_at(answer, 8)
}

/// The flags of the kernel's first request.
pub fn init_flags(init: &[u8]) -> u64 {
    let low = u32_at(init, HEADER + 12).map_or(0, u64::from);
    let high = u32_at(init, HEADER + 16).filter(|_| low & INIT_EXT != 0).map_or(0, u64::from);
    low | high << 32
}

/// A request.
pub fn request(opcode: u32, unique: u64, ino: u64, ids: (u32, u32), pid: u32, body: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + body.len());
    bytes.extend(((HEADER + body.len()) as u32).to_ne_bytes());
    bytes.extend(opcode.to_ne_bytes());
    bytes.extend(unique.to_ne_bytes());
    bytes.extend(ino.to_ne_bytes());
    for number in [ids.0, ids.1, pid, 0] {
        bytes.extend(number.to_ne_bytes());
    }
    bytes.extend(body);
    bytes
}

/// A request whose answer says that everything before it was handled.
pub fn barrier() -> Vec<u8> {
    request(opcode::GETATTR, BARRIER, ROOT, (0, 0), 0, &[0; 16])
}

/// A close, a lock or a poll, as the kernel sent it, but for flags that make no difference here.
pub fn again(record: &Record) -> Vec<u8> {
    let &Record { unique, opcode, pid, ino, handle, ids, owner, kind, range } = record;
    let body: Vec<u8> = if opcode == opcode::POLL {
        let words = [handle, owner].into_iter().flat_map(u64::to_ne_bytes);
        words.chain([kind, range.0 as u32].into_iter().flat_map(u32::to_ne_bytes)).collect()
    } else if matches!(opcode, opcode::SETLK | opcode::SETLKW) {
        let words = [handle, owner, range.0, range.1].into_iter().flat_map(u64::to_ne_bytes);
        // The type, a pid that nobody looks at, flags and padding.
        words.chain([kind, pid, 0, 0].into_iter().flat_map(u32::to_ne_bytes)).collect()
    } else {
        [handle, 0, owner].into_iter().flat_map(u64::to_ne_bytes).collect()
    };
    request(opcode, unique, ino, ids, pid, &body)
}

/// Asks whether a request is unanswered, and changes nothing: it has the form of an answer to an interruption of that
/// request, which the kernel takes where the request is there, and refuses with `ENOENT` where it is not.
pub fn question(unique: u64) -> [u8; ANSWER] {
    answer(unique | INTERRUPTED, 0)
}

/// Has the kernel send the interrupt of a request once more, where a signal came for it: it has the form of the answer that
/// the request is not known yet.
pub fn interrupt_again(unique: u64) -> [u8; ANSWER] {
    answer(unique | INTERRUPTED, -libc::EAGAIN)
}

fn answer(unique: u64, error: i32) -> [u8; ANSWER] {
    let mut bytes = [0; ANSWER];
    bytes[..4].copy_from_slice(&(ANSWER as u32).to_ne_bytes());
    bytes[4..8].copy_from_slice(&error.to_ne_bytes());
    bytes[8..].copy_from_slice(&unique.to_ne_bytes());
    bytes
}

/// The answer that something cannot be done.
pub fn refusal(unique: u64, errno: i32) -> [u8; ANSWER] {
    answer(unique, -errno)
}

/// Asks the kernel to send what is unanswered again.
pub fn resend_notice() -> [u8; ANSWER] {
    answer(0, NOTIFY_RESEND)
}

/// Wakes whoever polls under this number.
pub fn poll_notice(poll: u64) -> [u8; ANSWER + 8] {
    let mut bytes = [0; ANSWER + 8];
    bytes[..4].copy_from_slice(&(ANSWER as u32 + 8).to_ne_bytes());
    bytes[4..8].copy_from_slice(&NOTIFY_POLL.to_ne_bytes());
    bytes[ANSWER..].copy_from_slice(&poll.to_ne_bytes());
    bytes
}

/// What an operation is called.
pub fn name(code: u32) -> String {
    let name = match code {
        opcode::LOOKUP => "LOOKUP",
        opcode::FORGET => "FORGET",
        opcode::GETATTR => "GETATTR",
        opcode::SETATTR => "SETATTR",
        opcode::READLINK => "READLINK",
        opcode::MKDIR => "MKDIR",
        opcode::UNLINK => "UNLINK",
        opcode::RMDIR => "RMDIR",
        opcode::OPEN => "OPEN",
        opcode::READ => "READ",
        opcode::WRITE => "WRITE",
        opcode::STATFS => "STATFS",
        opcode::RELEASE => "RELEASE",
        opcode::FSYNC => "FSYNC",
        opcode::SETXATTR => "SETXATTR",
        opcode::GETXATTR => "GETXATTR",
        opcode::LISTXATTR => "LISTXATTR",
        opcode::REMOVEXATTR => "REMOVEXATTR",
        opcode::FLUSH => "FLUSH",
        opcode::OPENDIR => "OPENDIR",
        opcode::READDIR => "READDIR",
        opcode::RELEASEDIR => "RELEASEDIR",
        opcode::GETLK => "GETLK",
        opcode::SETLK => "SETLK",
        opcode::SETLKW => "SETLKW",
        opcode::CREATE => "CREATE",
        opcode::INTERRUPT => "INTERRUPT",
        opcode::POLL => "POLL",
        other => return format!("operation {other}"),
    };
    name.to_owned()
}

/// What an inode number stands for, as far as it can be said without looking anything up.
pub fn place(ino: u64) -> String {
    match Node::of(fuser::INodeNo(ino)) {
        Some(Node::Claim(key)) => format!("claims, key number {}", key.0),
        Some(Node::Status(key)) => format!("status, key number {}", key.0),
        Some(Node::ResultDir(key) | Node::Latest(key)) => format!("results, key number {}", key.0),
        Some(Node::Result(key, epoch)) => format!("results, key number {}, epoch {}", key.0, epoch.0),
        Some(Node::Namespace(_, namespace)) => format!("namespace number {}", namespace.0),
        _ => format!("inode {ino}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_laid_out_as_the_kernel_has_them() {
        let record = Record {
            unique: 10,
            opcode: opcode::RELEASE,
            pid: 7,
            ino: 99,
            handle: 5,
            ids: (1, 2),
            ..Record::default()
        };
        let message = again(&record);
        assert_eq!((message.len(), u32_at(&message, 0)), (64, Some(64)));
        let header = Header { opcode: opcode::RELEASE, unique: 10, ino: 99, pid: 7 };
        assert_eq!(Header::of(&message), Some(header));
        assert_eq!((u32_at(&message, 24), u32_at(&message, 28), u64_at(&message, 40)), (Some(1), Some(2), Some(5)));
        let lock = again(&Record { opcode: opcode::SETLKW, owner: 6, kind: 1, range: (0, 9), ..record });
        assert_eq!(
            (lock.len(), u64_at(&lock, 48), u64_at(&lock, 64), u32_at(&lock, 72)),
            (88, Some(6), Some(9), Some(1))
        );
        let poll = again(&Record { opcode: opcode::POLL, owner: 6, kind: 1, range: (9, 0), ..record });
        assert_eq!(
            (poll.len(), u64_at(&poll, 48), u32_at(&poll, 56), u32_at(&poll, 60)),
            (64, Some(6), Some(1), Some(9))
        );
        assert_eq!(answered(&refusal(42, libc::EINTR)), Some(42));
        let interrupt = request(opcode::INTERRUPT, 43 | RESEND, 0, (0, 0), 0, &(42 | RESEND).to_ne_bytes());
        assert_eq!((interrupted(&interrupt), interrupted(&lock)), (Some(42), None));
        assert_eq!(Header::of(&[0; 12]), None);
    }

    #[test]
    fn the_kernel_says_in_a_second_word_whether_it_can_send_again() {
        let init = |flags: u32, flags2: u32| {
            let mut body = [0; 64];
            body[12..16].copy_from_slice(&flags.to_ne_bytes());
            body[16..20].copy_from_slice(&flags2.to_ne_bytes());
            request(26, 2, 0, (0, 0), 0, &body)
        };
        assert!(crate::connection::has_resend(&init(1 << 30, 1 << 7)));
        assert!(!crate::connection::has_resend(&init(1 << 30, 1 << 6)));
        assert!(!crate::connection::has_resend(&init(0, 1 << 7)), "not without the flag that says so");
    }
}
