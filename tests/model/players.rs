//! Who plays against a key: a few processes with open files, what they may do next, and how proptest draws it.
//!
//! A [`Move`] names things by where they are in a list, so that it means something whatever happened before and a
//! sequence can shrink.

use std::sync::Arc;

use leasefs::machine::{Claimant, Input, Mode, Process};
use leasefs::{Epoch, Handle, Now, Owner, RequestId, Ttl, WaiterId};
use proptest::prelude::*;

/// Most files open on a key, and most drafts.
pub const MAX_OPEN: usize = 6;
/// Processes 1 and 3 are of one uid, 2 is root.
pub const PROCESSES: u8 = 3;

/// How much time passes before a move.
#[derive(Clone, Copy, Debug)]
pub enum Pause {
    None,
    Ms(u64),
    /// To this many nanoseconds before or after the deadline, where there is one.
    Deadline(i64),
}

/// Something a process does. Small numbers pick from what is open, the newest first.
#[derive(Clone, Copy, Debug)]
pub enum Act {
    Tick,
    Open,
    Create { process: u8 },
    Lock { file: usize, process: u8, posix: bool, mode: Mode, wait: bool },
    Unlock { file: usize, process: u8, posix: bool },
    Cancel { waiter: usize },
    Close { file: usize },
    Unlink { process: u8, may_forget: bool },
    Renew { file: usize },
    SetTtl { process: u8, ttl: Ttl },
    SetAgent { process: u8, named: bool },
    GiveBack { process: u8, back: u64 },
    RenewAttempt { process: u8, back: u64 },
    Evict { back: u64 },
    Lose { back: u64 },
    LoseShares,
    OpenDraft { process: u8, back: u64 },
    Commit { draft: usize, size: u64 },
    CloseDraft { draft: usize },
}

/// A step of a sequence.
#[derive(Clone, Copy, Debug)]
pub struct Move {
    pub pause: Pause,
    pub act: Act,
    /// The TTL of new leases at that time.
    pub ttl: Ttl,
}

/// What is open on one key.
#[derive(Clone, Debug, Default)]
pub struct Players {
    pub files: Vec<Handle>,
    pub drafts: Vec<Handle>,
    waiters: Vec<WaiterId>,
    /// Which server they play on; lock owners are another server's numbers.
    era: u64,
}

/// Numbers nobody had before.
pub trait Numbers {
    fn handle(&mut self) -> Handle;
    fn waiter(&mut self) -> WaiterId;
}

impl Players {
    /// What an act means now; none where there is nothing to do it with.
    pub fn input(&mut self, act: Act, epoch: Epoch, numbers: &mut impl Numbers) -> Option<Input> {
        let pick = |from: &[Handle], at: usize| from.iter().rev().nth(at % from.len().max(1)).copied();
        let file = |at: usize| pick(&self.files, at);
        let draft = |at: usize| pick(&self.drafts, at);
        let back = |by: u64| Epoch((epoch.0 + 1).saturating_sub(by));
        let why = Arc::from("said so");
        Some(match act {
            Act::Tick => Input::Tick,
            Act::Open => {
                if self.files.len() < MAX_OPEN {
                    self.files.push(numbers.handle());
                }
                return None;
            }
            Act::Create { process } => {
                let handle = numbers.handle();
                let request = RequestId(handle.0);
                Input::Create { handle, claimant: Claimant { request, ..claimant(process, process) } }
            }
            Act::Lock { file: at, process, posix, mode, wait } => {
                let handle = file(at)?;
                let wait = wait.then(|| numbers.waiter());
                self.waiters.extend(wait);
                let request = RequestId(numbers.handle().0);
                let claimant = Claimant { request, ..claimant(opener(handle), process) };
                Input::Lock { handle, owner: self.owner(handle, process, posix), mode, wait, claimant }
            }
            Act::Unlock { file: at, process, posix } => {
                let handle = file(at)?;
                Input::Unlock { handle, owner: self.owner(handle, process, posix) }
            }
            Act::Cancel { waiter } => {
                let recent = self.waiters.len().checked_sub(1 + waiter)?;
                Input::Cancel(self.waiters[recent])
            }
            Act::Close { file: at } => {
                let handle = file(at)?;
                self.files.retain(|other| *other != handle);
                Input::Close { handle, why: Arc::from("closed") }
            }
            Act::Unlink { process, may_forget } => Input::Unlink {
                process: self::process(process),
                may_forget,
                uid: uid(process),
                request: RequestId(numbers.handle().0),
            },
            Act::Renew { file: at } => Input::Renew { handle: file(at)?, note: None },
            Act::SetTtl { process, ttl } => Input::SetTtl { uid: uid(process), ttl },
            Act::SetAgent { process, named } => {
                Input::SetAgent { uid: uid(process), agent: named.then(|| Arc::from(format!("agent {epoch}"))) }
            }
            Act::GiveBack { process, back: by } => {
                let request = RequestId(numbers.handle().0);
                Input::GiveBack { epoch: back(by), uid: uid(process), why, request }
            }
            Act::RenewAttempt { process, back: by } => Input::RenewAttempt { epoch: back(by), uid: uid(process) },
            Act::Evict { back: by } => Input::Evict { epoch: back(by), why, request: RequestId(numbers.handle().0) },
            Act::Lose { back: by } => Input::Lose { epoch: back(by), why },
            Act::LoseShares => Input::LoseShares,
            Act::OpenDraft { process, back: by } => {
                Input::OpenDraft { handle: numbers.handle(), epoch: back(by), uid: uid(process) }
            }
            Act::Commit { draft: at, size } => Input::Commit { handle: draft(at)?, size },
            Act::CloseDraft { draft: at } => {
                let handle = draft(at)?;
                self.drafts.retain(|other| *other != handle);
                Input::CloseDraft { handle }
            }
        })
    }

    /// flock and OFD locks are the open file's, POSIX locks the process's.
    fn owner(&self, handle: Handle, process: u8, posix: bool) -> Owner {
        if posix { Owner(self.era * 100 + u64::from(process)) } else { Owner(1_000_000 + handle.0) }
    }

    /// The server is gone, and everything that was open with it.
    pub fn leave(&mut self) {
        *self = Players { era: self.era + 1, ..Players::default() };
    }

    /// A request was granted: what it opened is open.
    pub fn granted(&mut self, input: &Input) {
        match input {
            Input::Create { handle, .. } => self.files.push(*handle),
            Input::OpenDraft { handle, .. } => self.drafts.push(*handle),
            _ => {}
        }
    }
}

fn opener(handle: Handle) -> u8 {
    u8::try_from(handle.0 % u64::from(PROCESSES)).unwrap_or(0) + 1
}

pub fn uid(process: u8) -> u32 {
    if process == 2 { 0 } else { 1_000 + u32::from(process % 2) }
}

/// Number 0 is a process that cannot be seen.
pub fn process(number: u8) -> Process {
    if number == 0 { Process::default() } else { Process { pid: 100 + u32::from(number), start_time: 7 } }
}

pub fn claimant(opener: u8, locker: u8) -> Claimant {
    Claimant {
        uid: uid(locker),
        gid: 5,
        holder: process(opener),
        opener: process(opener),
        locker: process(locker),
        command: Arc::from("player"),
        request: RequestId(0),
    }
}

/// A moment of a clock whose wall time goes with its boot time.
pub fn moment(boot_ns: u64) -> Now {
    Now { boot_ns, wall_ms: 1_700_000_000_000 + i64::try_from(boot_ns / 1_000_000).unwrap_or(0) }
}

pub fn ttl(ms: u64) -> Ttl {
    Ttl::from_millis(ms).expect("a valid TTL")
}

fn pause() -> impl Strategy<Value = Pause> {
    prop_oneof![
        12 => Just(Pause::None),
        4 => (0..1_500u64).prop_map(Pause::Ms),
        2 => prop_oneof![Just(-1i64), Just(0), Just(1)].prop_map(Pause::Deadline),
    ]
}

pub fn act() -> impl Strategy<Value = Act> {
    let file = || 0..MAX_OPEN;
    let process = || 1..=PROCESSES;
    let mode = prop_oneof![3 => Just(Mode::Exclusive), 2 => Just(Mode::Shared)];
    // The newest epoch is 1 back from the next.
    let back = || prop_oneof![1 => Just(0u64), 8 => Just(1), 2 => 2..4u64];
    let ttls = || prop_oneof![Just(ttl(1)), Just(ttl(700)), Just(ttl(3_000))];
    prop_oneof![
        2 => Just(Act::Tick),
        6 => Just(Act::Open),
        6 => process().prop_map(|process| Act::Create { process }),
        24 => (file(), process(), any::<bool>(), mode, prop::bool::weighted(0.7))
            .prop_map(|(file, process, posix, mode, wait)| Act::Lock { file, process, posix, mode, wait }),
        8 => (file(), process(), any::<bool>()).prop_map(|(file, process, posix)| Act::Unlock { file, process, posix }),
        4 => (0..4usize).prop_map(|waiter| Act::Cancel { waiter }),
        8 => file().prop_map(|file| Act::Close { file }),
        4 => (0..=PROCESSES, any::<bool>()).prop_map(|(process, may_forget)| Act::Unlink { process, may_forget }),
        5 => file().prop_map(|file| Act::Renew { file }),
        2 => (process(), ttls()).prop_map(|(process, ttl)| Act::SetTtl { process, ttl }),
        2 => (process(), prop::bool::weighted(0.8)).prop_map(|(process, named)| Act::SetAgent { process, named }),
        3 => (process(), back()).prop_map(|(process, back)| Act::GiveBack { process, back }),
        2 => (process(), back()).prop_map(|(process, back)| Act::RenewAttempt { process, back }),
        3 => back().prop_map(|back| Act::Evict { back }),
        1 => back().prop_map(|back| Act::Lose { back }),
        1 => Just(Act::LoseShares),
        9 => (process(), back()).prop_map(|(process, back)| Act::OpenDraft { process, back }),
        6 => (file(), 0..9u64).prop_map(|(draft, size)| Act::Commit { draft, size }),
        5 => file().prop_map(|draft| Act::CloseDraft { draft }),
    ]
}

/// What a worker does whose work is done: few random sequences would do it twice.
pub fn finish(process: u8) -> [Act; 7] {
    let (file, posix, mode, wait) = (0, false, Mode::Exclusive, false);
    [
        Act::Open,
        Act::Lock { file, process, posix, mode, wait },
        Act::OpenDraft { process, back: 1 },
        Act::Commit { draft: 0, size: 3 },
        Act::CloseDraft { draft: 0 },
        Act::Close { file: 0 },
        Act::Tick,
    ]
}

/// A few steps of a sequence.
pub fn moves() -> impl Strategy<Value = Vec<Move>> {
    let finished = |process| finish(process).map(|act| Move { pause: Pause::None, act, ttl: ttl(1_000) }).to_vec();
    prop_oneof![
        15 => a_move().prop_map(|one| vec![one]),
        1 => (1..=PROCESSES).prop_map(finished),
    ]
}

/// One step of a sequence.
fn a_move() -> impl Strategy<Value = Move> {
    let ttls = prop_oneof![1 => Just(ttl(300)), 3 => Just(ttl(1_000)), 1 => Just(ttl(5_000))];
    (pause(), act(), ttls).prop_map(|(pause, act, ttl)| Move { pause, act, ttl })
}

/// The time a pause leads to.
pub fn after(now_ns: u64, pause: Pause, deadline_ns: Option<u64>) -> u64 {
    match (pause, deadline_ns) {
        (Pause::Ms(ms), _) => now_ns + ms * 1_000_000,
        (Pause::Deadline(by), Some(at)) => now_ns.max(at.saturating_add_signed(by)),
        _ => now_ns,
    }
}
