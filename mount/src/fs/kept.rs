//! What the adapter keeps in [`OpenFiles`] for the server that may have to take the connection over, and how that one
//! goes on with it.
//!
//! Everything is kept before the client is told of it and forgotten after what ends it is recorded: what is found after
//! a crash may be more than clients were told, never less. What belongs to a request that was not answered is found by
//! the request's number when it comes again.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;

use leasefs::engine::{Memory, Survivors};
use leasefs::machine::Process;
use leasefs::namespaces::Credentials;
use leasefs::{Epoch, Handle, KeyId, Owner};

use super::claims::KnownOwner;
use super::handles::{Draft, Open, Snapshot};
use super::{Caller, LeaseFs, Shared};
use crate::ino::{Control, Node};
use crate::openfiles::{Name, OpenFiles, Slot, WORDS, Words};
use crate::process::{self, Seen};

const CLAIM: u64 = 1;
const STATUS: u64 = 2;
const DRAFT: u64 = 3;
const RESULT: u64 = 4;
const TEXT: u64 = 5;
const EVENTS: u64 = 6;
const ORDERS: u64 = 7;
const OWNER: u64 = 9;
const POLL: u64 = 10;
/// A piece of a text that is being read.
const PIECE: u64 = 11;

// A piece's bytes.
const PIECE_AT: usize = 4;
const PIECE_BYTES: usize = 8 * (WORDS - PIECE_AT);

// Words of an open file.
const HANDLE: usize = 1;
const INO: usize = 2;
/// The request that opened it.
const REQUEST: usize = 3;
const PID: usize = 4;
const START: usize = 5;
const FLAGS: usize = 6;
const COMM: usize = 7;
/// A request that moves a position, and the position it started from: should it come again, it starts there again.
const MOVER: usize = 9;
const MOVED_FROM: usize = 10;
/// For events, the number of the next one; for a text, the length of what was read last.
const POSITION: usize = 11;
/// For claims, the epoch of the lease that the handle lost; 0 is none.
const LOST: usize = 12;
/// Processes that wrote to a draft, two in a word.
const WRITERS: usize = 12;
/// Most writers that are told apart; with more, any process counts as one.
const MAX_WRITERS: usize = 2 * (WORDS - WRITERS);

// Flags.
const KILLED: u64 = 1 << 1;
const FLUSHED: u64 = 1 << 2;
const CUT_SHORT: u64 = 1 << 3;
const MANY_WRITERS: u64 = 1 << 4;

fn open_name(handle: u64) -> Name {
    (CLAIM, handle, 0)
}

fn piece_name(handle: u64, number: u64) -> Name {
    (PIECE, handle, number)
}

fn poll_name(handle: u64) -> Name {
    (POLL, handle, 0)
}

fn owner_name(number: u64, handle: Handle) -> Name {
    (OWNER, number, handle.0)
}

/// A command's name as two words: `comm` has fifteen bytes at most.
fn pack(comm: &str) -> [u64; 2] {
    let mut bytes = [0; 16];
    let length = comm.len().min(15);
    bytes[..length].copy_from_slice(&comm.as_bytes()[..length]);
    let (words, _) = bytes.as_chunks::<8>();
    [u64::from_le_bytes(words[0]), u64::from_le_bytes(words[1])]
}

fn unpack(words: [u64; 2]) -> Arc<str> {
    let bytes = words.map(u64::to_le_bytes).concat();
    let length = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    Arc::from(String::from_utf8_lossy(&bytes[..length]))
}

fn piece_of(words: &Words) -> Vec<u8> {
    let mut bytes: Vec<u8> = words[PIECE_AT..].iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.truncate(usize::try_from(words[3]).unwrap_or(0));
    bytes
}

fn process(words: &Words, at: usize) -> Process {
    Process { pid: u32::try_from(words[at]).unwrap_or(0), start_time: words[at + 1] }
}

fn pair(high: u32, low: u32) -> u64 {
    u64::from(high) << 32 | u64::from(low)
}

fn split(word: u64) -> (u32, u32) {
    ((word >> 32) as u32, word as u32)
}

fn key_of(ino: u64) -> Option<KeyId> {
    match Node::of(fuser::INodeNo(ino))? {
        Node::Claim(key) | Node::Status(key) | Node::Result(key, _) => Some(key),
        _ => None,
    }
}

/// The engine's side: what handles become.
pub struct Kept(pub Arc<OpenFiles>);

impl Memory for Kept {
    fn lost(&self, handle: Handle, epoch: Epoch) {
        if let Some(slot) = self.0.find(open_name(handle.0)) {
            self.0.set(slot, LOST, epoch.0);
        }
    }

    fn next_event(&self, number: u64) {
        self.0.keep_next_event(number);
    }
}

/// Whether any file of the tree is open, or was closed and what that means is not recorded yet.
pub fn any_open(files: &OpenFiles) -> bool {
    files.any(|kind| matches!(kind, CLAIM..=ORDERS))
}

/// What the engine of a server that takes over has to know, from what its predecessor kept.
pub fn survivors(files: &OpenFiles) -> Survivors {
    let mut left = Survivors::default();
    left.next_event = files.next_event();
    // Handles carry the number of the server that gave them out, and those of this connection begin with its first.
    left.complete_since = files.first_server().filter(|_| files.is_complete()).map(|number| Handle(number << 40));
    for (slot, words) in files.all() {
        let (kind, handle) = (words[0], Handle(words[HANDLE]));
        let node = Node::of(fuser::INodeNo(words[INO]));
        match (kind, node) {
            (CLAIM, Some(Node::Claim(key))) => {
                left.claim(key, handle, (words[LOST] != 0).then_some(Epoch(words[LOST])))
            }
            (DRAFT, Some(Node::Result(key, epoch))) => left.draft(key, handle, epoch),
            _ => {}
        }
        if matches!(kind, CLAIM..=ORDERS) {
            files.name(open_name(handle.0), slot);
        }
    }
    left
}

impl Shared {
    /// Enters an open file.
    pub(super) fn open_handle(&self, caller: &Caller, handle: Handle, open: Open) {
        let mut words = [0; WORDS];
        let mut by = |opener: &Seen| {
            (words[PID], words[START]) = (opener.process.pid.into(), opener.process.start_time);
            [words[COMM], words[COMM + 1]] = pack(&opener.command);
        };
        let (kind, node) = match &open {
            Open::Claim { key, opener, .. } => {
                by(opener);
                (CLAIM, Node::Claim(*key))
            }
            Open::Draft(draft) => {
                by(&Seen { process: draft.opener, command: Arc::from("") });
                (DRAFT, Node::Result(draft.key, draft.epoch))
            }
            Open::Status { key, .. } => (STATUS, Node::Status(*key)),
            Open::Result(key, epoch, _) => (RESULT, Node::Result(*key, *epoch)),
            Open::Text(file, _) => (TEXT, Node::Control(*file)),
            Open::Events { next, who, .. } => {
                words[POSITION] = *next;
                words[WRITERS] = pair(who.uid, who.gid);
                words[PID] = caller.pid().into();
                (EVENTS, Node::Control(Control::Events))
            }
            Open::Control => (ORDERS, Node::Control(Control::Orders)),
        };
        (words[0], words[HANDLE], words[INO], words[REQUEST]) = (kind, handle.0, node.ino().0, caller.request().0);
        if self.files.insert(open_name(handle.0), words).is_none() {
            tracing::error!(
                "no room to keep another open file: should this server be killed, its handle answers EBADF"
            );
        }
        self.handles.lock().insert(handle.0, open);
    }

    /// Forgets an open file, once what its end means is recorded.
    pub(super) fn forget_kept(&self, handle: u64) {
        self.forget_text(handle);
        self.files.remove(open_name(handle));
    }

    fn slot(&self, handle: u64) -> Option<Slot> {
        self.files.find(open_name(handle))
    }

    /// Keeps what closing a draft will depend on.
    pub(super) fn keep_draft(&self, handle: u64, draft: &Draft) {
        let Some(slot) = self.slot(handle) else { return };
        let mut words = [0; MAX_WRITERS / 2];
        for (at, writer) in draft.writers.iter().take(MAX_WRITERS).enumerate() {
            words[at / 2] |= u64::from(*writer) << (32 * (at % 2));
        }
        for (at, word) in words.into_iter().enumerate() {
            self.files.set(slot, WRITERS + at, word);
        }
        let flags = [
            (draft.killed, KILLED),
            (draft.flushed, FLUSHED),
            (draft.cut_short, CUT_SHORT),
            (draft.any_writer || draft.writers.len() > MAX_WRITERS, MANY_WRITERS),
        ];
        let flags = flags.iter().filter(|(set, _)| *set).fold(0, |all, (_, flag)| all | flag);
        self.files.set(slot, FLAGS, flags);
    }

    /// Where a request that moves a position starts from: where it started when it came first.
    pub(super) fn started_from(&self, caller: &Caller, handle: u64, now_at: u64) -> u64 {
        let Some(slot) = self.slot(handle) else { return now_at };
        let request = caller.request().0;
        if self.files.get(slot, MOVER) == request {
            return self.files.get(slot, MOVED_FROM);
        }
        self.files.set(slot, MOVED_FROM, now_at);
        self.files.set(slot, MOVER, request);
        now_at
    }

    /// Keeps the text that a read took, as far as it was not read to its end: the rest is to be of the same text.
    pub(super) fn keep_text(&self, handle: u64, snapshot: &Snapshot, read_to: u64) {
        let Some(text) = snapshot.new_text() else { return };
        self.forget_text(handle);
        self.keep_position(handle, text.len() as u64);
        if read_to >= text.len() as u64 {
            return;
        }
        for (number, piece) in text.as_bytes().chunks(PIECE_BYTES).enumerate() {
            let mut bytes = [0; PIECE_BYTES];
            bytes[..piece.len()].copy_from_slice(piece);
            let mut words = [0; WORDS];
            (words[0], words[HANDLE], words[2], words[3]) = (PIECE, handle, number as u64, piece.len() as u64);
            let (chunks, _) = bytes.as_chunks::<8>();
            for (word, chunk) in words[PIECE_AT..].iter_mut().zip(chunks) {
                *word = u64::from_le_bytes(*chunk);
            }
            self.files.insert(piece_name(handle, number as u64), words);
        }
    }

    fn forget_text(&self, handle: u64) {
        let mut number = 0;
        while self.files.remove(piece_name(handle, number)) {
            number += 1;
        }
    }

    /// Keeps how far a reader of events has come.
    pub(super) fn keep_position(&self, handle: u64, next: u64) {
        if let Some(slot) = self.slot(handle) {
            self.files.set(slot, POSITION, next);
        }
    }

    /// Keeps who is polled for, for as long as the handle is open: whoever was woken may not have heard of it, and who is
    /// woken once too often looks again. The kernel has one number for each open file.
    pub(super) fn keep_poll(&self, handle: u64, poll: u64) {
        if self.files.find(poll_name(handle)).is_some() {
            return;
        }
        let mut words = [0; WORDS];
        (words[0], words[HANDLE], words[2]) = (POLL, handle, poll);
        self.files.insert(poll_name(handle), words);
    }

    /// Forgets who is polled for.
    pub(super) fn forget_poll(&self, handle: u64) {
        self.files.remove(poll_name(handle));
    }

    /// Keeps which owner the kernel's number stands for on a handle.
    pub(super) fn keep_owner(&self, number: u64, handle: Handle, known: &KnownOwner) {
        let mut words = [0; WORDS];
        let fields = [OWNER, number, handle.0, known.owner.0, known.process.pid.into(), known.process.start_time];
        words[..fields.len()].copy_from_slice(&fields);
        self.files.insert(owner_name(number, handle), words);
    }

    /// Forgets the kernel's number of an owner on a handle.
    pub(super) fn forget_owner(&self, number: u64, handle: Handle) {
        self.files.remove(owner_name(number, handle));
    }
}

impl LeaseFs {
    /// Goes on with what the last server of the connection kept: its open files, and the owners of its locks. Gives
    /// the kernel's numbers of the polls to be woken.
    pub fn restore(&self) -> Vec<u64> {
        let mut polls = Vec::new();
        let mut kept: HashMap<u64, HashSet<u64>> = HashMap::new();
        let mut texts: HashMap<u64, BTreeMap<u64, Vec<u8>>> = HashMap::new();
        for (slot, words) in self.files.all() {
            match words[0] {
                OWNER => {
                    kept.entry(words[2]).or_default().insert(words[1]);
                    self.restore_owner(slot, &words);
                }
                // Woken, whoever polls looks again. Kept all the same: this server may die before it has woken anybody.
                POLL => {
                    polls.push(words[2]);
                    self.files.name(poll_name(words[HANDLE]), slot);
                }
                PIECE => {
                    let (handle, number) = (words[HANDLE], words[2]);
                    self.files.name(piece_name(handle, number), slot);
                    texts.entry(handle).or_default().insert(number, piece_of(&words));
                }
                _ => self.restore_open(slot, &words),
            }
        }
        for (handle, pieces) in texts {
            self.restore_text(handle, pieces);
        }
        for (handle, numbers) in kept {
            self.with_handle(handle, |open| {
                if let Open::Claim { owners, .. } = open {
                    owners.extend(numbers);
                }
            });
        }
        let drafts: HashSet<Handle> = self.open_drafts();
        self.engine.results.drop_drafts(|draft| drafts.contains(&draft));
        polls
    }

    fn open_drafts(&self) -> HashSet<Handle> {
        let handles = self.handles.lock();
        let drafts = handles.iter().filter(|(_, open)| matches!(open, Open::Draft(_)));
        drafts.map(|(handle, _)| Handle(*handle)).collect()
    }

    /// A text whose pieces are not all there was told of to nobody.
    fn restore_text(&self, handle: u64, pieces: BTreeMap<u64, Vec<u8>>) {
        let length = self.slot(handle).map_or(0, |slot| self.files.get(slot, POSITION));
        let text = String::from_utf8(pieces.into_values().flatten().collect()).ok();
        let text = text.filter(|text| text.len() as u64 == length);
        self.with_handle(handle, |open| {
            if let Open::Claim { snapshot, .. } | Open::Status { snapshot, .. } | Open::Text(_, snapshot) = open {
                *snapshot = Snapshot::restored(text, length);
            }
        });
    }

    fn restore_owner(&self, slot: Slot, words: &Words) {
        let (number, handle, process) = (words[1], Handle(words[2]), process(words, 4));
        self.files.name(owner_name(number, handle), slot);
        let mut owners = self.owners.lock();
        let fresh = || KnownOwner { owner: Owner(words[3]), process, handles: HashSet::new() };
        owners.entry(number).or_insert_with(fresh).handles.insert(handle);
    }

    fn restore_open(&self, slot: Slot, words: &Words) {
        let (handle, ino) = (words[HANDLE], words[INO]);
        let Some(open) = self.open_of(words) else {
            // Its key has no number yet, or its draft never was: whoever opens it was not told, and asks again.
            tracing::debug!("open file {handle:x} of inode {ino:x} is not there any more");
            return self.files.free(slot);
        };
        self.repeated.lock().insert(words[REQUEST], handle);
        self.handles.lock().insert(handle, open);
    }

    fn open_of(&self, words: &Words) -> Option<Open> {
        let node = Node::of(fuser::INodeNo(words[INO]))?;
        let is_known = |key| self.engine.view(key, |_, _| ()).is_some();
        if key_of(words[INO]).is_some_and(|key| !is_known(key)) {
            return None;
        }
        Some(match (words[0], node) {
            (CLAIM, Node::Claim(key)) => {
                let opener = Seen { process: process(words, PID), command: unpack([words[COMM], words[COMM + 1]]) };
                Open::Claim { key, opener, snapshot: Snapshot::restored(None, words[POSITION]), owners: HashSet::new() }
            }
            // Whatever happened meanwhile: whoever polls looks again.
            (STATUS, Node::Status(key)) => {
                Open::Status { key, seen: u64::MAX, snapshot: Snapshot::restored(None, words[POSITION]) }
            }
            (DRAFT, Node::Result(key, epoch)) => {
                let handle = Handle(words[HANDLE]);
                let committed = self.engine.view(key, |entry, _| entry.state.is_result(handle)) == Some(true);
                let results = &self.engine.results;
                let file = if committed {
                    results.read(key, epoch).ok()?
                } else {
                    let has_result = self.engine.result_of(key, epoch).ok()?.is_some();
                    results.resume(handle, key, epoch, has_result).ok()?
                };
                let mut draft = Draft::new(key, epoch, process(words, PID), Arc::new(file));
                let flags = words[FLAGS];
                (draft.killed, draft.flushed) = (flags & KILLED != 0, flags & FLUSHED != 0);
                (draft.cut_short, draft.any_writer) = (flags & CUT_SHORT != 0, flags & MANY_WRITERS != 0);
                draft.committed = committed;
                let writers = words[WRITERS..].iter().flat_map(|word| <[u32; 2]>::from(split(*word)));
                draft.writers = writers.filter(|pid| *pid != 0).collect();
                Open::Draft(draft)
            }
            (RESULT, Node::Result(key, epoch)) => {
                Open::Result(key, epoch, Arc::new(self.engine.results.read(key, epoch).ok()?))
            }
            (TEXT, Node::Control(file)) => Open::Text(file, Snapshot::restored(None, words[POSITION])),
            (EVENTS, _) => {
                let (uid, gid) = split(words[WRITERS]);
                let groups = process::groups(u32::try_from(words[PID]).unwrap_or(0));
                Open::Events { next: words[POSITION], rest: Vec::new(), who: Credentials { uid, gid, groups } }
            }
            (ORDERS, _) => Open::Control,
            _ => return None,
        })
    }
}
