//! The journal's file: numbered records in two segments, and how a whole record is told from a torn or an old one.
//!
//! What is stored in the file is in the kernel's page cache at once, so it survives the end of the server whenever that
//! comes; nothing is synced, so after a power cut anything may be here. A record counts if its checksum, which takes in
//! the file's own number, is right, and its number follows the one before. Segments are written over from the start,
//! never cleared: old records have numbers that were applied long ago.
//!
//! The file keeps its size, so that a full disk is met when it is made and not when a record is stored. So it can be
//! mapped, and a record costs no system call, where the filesystem writes over what it has. Where it may need a new place
//! for it, a full disk would kill whoever stores into a mapping: there it is written, and the error is an error.
//!
//! It must not know what is in a record.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{Ordering, fence};

use memmap2::MmapMut;
use nix::sys::statfs::{EXT4_SUPER_MAGIC, FsType, TMPFS_MAGIC, XFS_SUPER_MAGIC, fstatfs};

/// File name in the state directory.
pub const FILE: &str = "journal";
/// Raised with every change of what is encoded in a record: `Write` and all that is in it.
pub(super) const FORMAT: u32 = 3;
/// Records of one segment are applied while the other is written.
pub(super) const SEGMENT_BYTES: usize = 2 << 20;

const MAGIC: [u8; 8] = *b"leasefsj";
/// Magic, format, number of the file, checksum of these.
const HEADER_BYTES: usize = 24;
const FIRST_SEGMENT: usize = 4096;
const FILE_BYTES: usize = FIRST_SEGMENT + 2 * SEGMENT_BYTES;
/// Length of the payload, checksum, number.
const HEAD_BYTES: usize = 16;
/// A length of 0: nothing comes after.
const END: [u8; 4] = [0; 4];

/// The file, for writing.
pub(super) struct Tape {
    medium: Medium,
    id: i64,
    buffer: Vec<u8>,
}

enum Medium {
    Mapped(MmapMut),
    Written(File),
}

/// Filesystems that write over a block where it is.
const IN_PLACE: [FsType; 3] = [EXT4_SUPER_MAGIC, XFS_SUPER_MAGIC, TMPFS_MAGIC];

impl Medium {
    fn of(file: File) -> io::Result<Medium> {
        if !fstatfs(&file).is_ok_and(|disk| IN_PLACE.contains(&disk.filesystem_type())) {
            return Ok(Medium::Written(file));
        }
        // SAFETY: whoever else has the file open reads it: the state directory is ours alone, and nobody shortens it.
        unsafe { MmapMut::map_mut(&file) }.map(Medium::Mapped)
    }

    /// Stores a record with the end behind it. Its length is stored last: until then the end before it stands.
    fn store(&mut self, at: usize, bytes: &[u8]) -> io::Result<()> {
        match self {
            Medium::Written(file) => file.write_all_at(bytes, at as u64),
            Medium::Mapped(map) => {
                let (length, rest) = bytes.split_at(END.len());
                map[at + END.len()..at + bytes.len()].copy_from_slice(rest);
                fence(Ordering::Release);
                map[at..at + END.len()].copy_from_slice(length);
                Ok(())
            }
        }
    }
}

/// What was found in the file.
pub(super) struct Content {
    /// The number of the file; another with each server.
    pub id: i64,
    /// How its records are encoded.
    pub format: u32,
    /// The numbers and payloads of all whole records, lowest first, whether applied or not.
    pub records: Vec<(u64, Vec<u8>)>,
}

impl Tape {
    /// Begins the file anew; whatever is in it must be in the registry.
    pub fn begin(state_dir: &Path, id: i64) -> io::Result<Tape> {
        let mut options = OpenOptions::new();
        let mut file =
            options.read(true).write(true).create(true).truncate(false).mode(0o600).open(state_dir.join(FILE))?;
        if file.metadata()?.len() != FILE_BYTES as u64 {
            file.set_len(0)?;
            // Written and not only reserved: nothing has to be allocated later, on most filesystems.
            file.write_all(&vec![0; FILE_BYTES])?;
        }
        for segment in 0..2 {
            file.write_all_at(&END, start_of(segment) as u64)?;
        }
        file.write_all_at(&header(id), 0)?;
        Ok(Tape { medium: Medium::of(file)?, id, buffer: Vec::new() })
    }

    /// Writes a record at an offset in a segment. The offset after it; none where it does not fit.
    pub fn write(
        &mut self,
        segment: usize,
        at: usize,
        number: u64,
        encode: impl FnOnce(Vec<u8>) -> io::Result<Vec<u8>>,
    ) -> io::Result<Option<usize>> {
        let mut buffer = std::mem::take(&mut self.buffer);
        buffer.clear();
        buffer.extend_from_slice(&[0; HEAD_BYTES]);
        self.buffer = encode(buffer)?;
        let length = self.buffer.len() - HEAD_BYTES;
        let end = at + self.buffer.len();
        let Some(short) = u32::try_from(length).ok().filter(|_| end + END.len() <= SEGMENT_BYTES) else {
            return Ok(None);
        };
        let (head, payload) = self.buffer.split_at_mut(HEAD_BYTES);
        head[..4].copy_from_slice(&short.to_le_bytes());
        head[4..8].copy_from_slice(&checksum(self.id, number, payload).to_le_bytes());
        head[8..].copy_from_slice(&number.to_le_bytes());
        self.buffer.extend_from_slice(&END);
        self.medium.store(start_of(segment) + at, &self.buffer)?;
        Ok(Some(end))
    }
}

/// Reads the file, also while it is being written. None where there is none, or none of this kind.
pub(super) fn read(state_dir: &Path) -> io::Result<Option<Content>> {
    let mut bytes = Vec::with_capacity(FILE_BYTES);
    match File::open(state_dir.join(FILE)) {
        Ok(file) => file.take(FILE_BYTES as u64).read_to_end(&mut bytes)?,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    Ok(parse(&bytes))
}

fn parse(bytes: &[u8]) -> Option<Content> {
    let (format, id) = (u32_at(bytes, 8)?, i64::from_le_bytes(*bytes.get(12..)?.first_chunk()?));
    let mut expected = header(id);
    expected[8..12].copy_from_slice(&format.to_le_bytes());
    let sum = crc32fast::hash(&expected[..20]).to_le_bytes();
    if bytes[..8] != MAGIC || bytes.get(20..HEADER_BYTES)? != sum {
        return None;
    }
    let mut records = Vec::new();
    for segment in 0..2 {
        let start = start_of(segment);
        let end = bytes.len().min(start + SEGMENT_BYTES);
        let mut rest = bytes.get(start..end).unwrap_or_default();
        let mut before = None;
        while let Some((number, payload)) = first_record(rest, id) {
            if before.is_some_and(|before| number != before + 1) {
                break;
            }
            before = Some(number);
            records.push((number, payload.to_vec()));
            rest = &rest[HEAD_BYTES + payload.len()..];
        }
    }
    records.sort_unstable_by_key(|(number, _)| *number);
    Some(Content { id, format, records })
}

fn first_record(bytes: &[u8], id: i64) -> Option<(u64, &[u8])> {
    let length = u32_at(bytes, 0).filter(|length| *length > 0)?;
    let number = u64::from_le_bytes(*bytes.get(8..)?.first_chunk()?);
    let payload = bytes.get(HEAD_BYTES..)?.get(..usize::try_from(length).ok()?)?;
    (u32_at(bytes, 4)? == checksum(id, number, payload)).then_some((number, payload))
}

fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(*bytes.get(at..)?.first_chunk()?))
}

fn start_of(segment: usize) -> usize {
    FIRST_SEGMENT + segment * SEGMENT_BYTES
}

fn header(id: i64) -> [u8; HEADER_BYTES] {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..12].copy_from_slice(&FORMAT.to_le_bytes());
    bytes[12..20].copy_from_slice(&id.to_le_bytes());
    let sum = crc32fast::hash(&bytes[..20]);
    bytes[20..].copy_from_slice(&sum.to_le_bytes());
    bytes
}

/// The number of the file is in it, so that no record of another counts, nor one that a client has written in a note.
fn checksum(id: i64, number: u64, payload: &[u8]) -> u32 {
    let mut sum = crc32fast::Hasher::new();
    let mut head = [0; 20];
    head[..8].copy_from_slice(&id.to_le_bytes());
    head[8..16].copy_from_slice(&number.to_le_bytes());
    head[16..].copy_from_slice(&u32::try_from(payload.len()).unwrap_or(0).to_le_bytes());
    sum.update(&head);
    sum.update(payload);
    sum.finalize()
}
