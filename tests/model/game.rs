//! Keys of a real engine under random play, and the verdict: what everybody was told and what is left has to be what the
//! contract's model says of the requests that were not refused by the registry.
//!
//! So a refused request has to be as if it never was, a granted one as if there were no faults, and what has happened
//! (a handle *was* closed) has to count in either case.

mod history;
mod turn;
mod verdict;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use leasefs::engine::KeyEntry;
use leasefs::machine::Input;
use leasefs::namespaces::Node;
use leasefs::{Engine, Epoch, Handle, Key, KeyId, NamespaceId, Now, Ttl, WaiterId};
use parking_lot::Mutex;
use proptest::prelude::*;

use crate::contract::{Contract, Told};
use crate::machine::compare;
use crate::players::{Act, MAX_OPEN, Numbers, Players, after, finish, moment, ttl};
use crate::rig::{Fate, OpenHandles, Rig, Storage, TTL_MS};
use history::{Entry, Teller};
pub use turn::{Turn, turn};

/// The keys that are played for; one in a namespace with a TTL of its own.
const KEYS: [(&str, &str); 3] = [("", "a"), ("", "b"), ("ns", "c")];
/// The TTL in `ns`.
const NS_TTL_MS: u64 = 300;
/// Waiters the registry refused of which two explanations are tried.
const MAX_EXPLAINED: usize = 6;

struct Seat {
    parent: NamespaceId,
    name: &'static str,
    key: Key,
    ttl: Ttl,
    players: Players,
    /// Handles of plain opens, which no request of the history opened.
    opened: Vec<Handle>,
    /// Its number is not recorded yet, so whoever opened it is not answered yet.
    is_new: Arc<AtomicBool>,
    history: Arc<Mutex<Vec<Entry>>>,
}

/// Keys, players and an engine.
pub struct Game {
    rig: Option<Rig>,
    seats: Vec<Seat>,
    now_ns: u64,
    /// The wall clock goes on over a reboot, the boot clock does not.
    wall_offset_ms: i64,
    boots: u32,
    /// Set when the server is killed: nothing it says any more is heard.
    silenced: Arc<AtomicBool>,
}

struct EngineNumbers<'a>(&'a Engine);

impl Numbers for EngineNumbers<'_> {
    fn handle(&mut self) -> Handle {
        self.0.new_handle()
    }

    fn waiter(&mut self) -> WaiterId {
        self.0.new_waiter()
    }
}

/// What a draft has in it, so that no result is mistaken for another.
fn content(draft: Handle) -> Vec<u8> {
    format!("written by {draft}{}", "!".repeat(usize::try_from(draft.0 % 7).unwrap_or(0))).into_bytes()
}

impl Game {
    pub fn new() -> Game {
        Game::on(Storage::Plain)
    }

    pub fn on(storage: Storage) -> Game {
        let now_ns = 1_000_000_000;
        let rig = Rig::on(storage, moment(now_ns));
        let ns = crate::rig::mkdir(&rig.engine, b"ns", moment(now_ns));
        let set_ttl = |row: &mut leasefs::registry::NamespaceRow| row.ttl_ms = Some(NS_TTL_MS);
        rig.engine.change_namespace(ns, moment(now_ns), set_ttl, Box::new(|_| ())).expect("a namespace");
        rig.engine.flush(moment(now_ns));
        let seats = KEYS
            .iter()
            .map(|(parent, name)| Seat {
                parent: if parent.is_empty() { NamespaceId::ROOT } else { ns },
                name,
                key: Key::join(parent, name.as_bytes()).expect("a key"),
                ttl: if parent.is_empty() { ttl(TTL_MS) } else { ttl(NS_TTL_MS) },
                players: Players::default(),
                opened: Vec::new(),
                is_new: Arc::default(),
                history: Arc::default(),
            })
            .collect();
        Game { rig: Some(rig), seats, now_ns, wall_offset_ms: 0, boots: 1, silenced: Arc::default() }
    }

    pub fn rig(&self) -> &Rig {
        self.rig.as_ref().expect("taken only while restarting")
    }

    fn now(&self) -> Now {
        let now = moment(self.now_ns);
        Now { wall_ms: now.wall_ms + self.wall_offset_ms, ..now }
    }

    fn id(&self, seat: usize) -> Option<KeyId> {
        self.rig().engine.find(&self.seats[seat].key).expect("keys can be read")
    }

    fn look<R>(&self, seat: usize, look: impl FnOnce(&KeyEntry) -> R) -> Option<R> {
        self.rig().engine.view(self.id(seat)?, |entry, _| look(entry))
    }

    /// Does one thing with a key, as the mount would.
    fn play(&mut self, at: usize, act: Act) {
        let now = self.now();
        let engine = Arc::clone(&self.rig().engine);
        let known = self.id(at);
        let epoch = self.look(at, |entry| entry.state.epoch).unwrap_or_default();
        let claimed_by = self.look(at, |entry| entry.state.attempt.as_ref().map(|a| a.claimant.request)).flatten();
        let seat = &mut self.seats[at];
        if matches!(act, Act::Open) && seat.players.files.len() < MAX_OPEN || matches!(act, Act::Create { .. }) {
            engine.open_name(seat.parent, seat.name.as_bytes(), now).expect("a key's name");
        } else if known.is_none() || matches!(act, Act::Open) || seat.is_new.load(Ordering::SeqCst) {
            return;
        }
        if known.is_none() {
            seat.is_new.store(true, Ordering::SeqCst);
            let is_new = Arc::clone(&seat.is_new);
            engine.when_recorded(Box::new(move || is_new.store(false, Ordering::SeqCst)));
        }
        let before = (seat.players.files.clone(), seat.players.drafts.clone());
        let Some(mut input) = seat.players.input(act, epoch, &mut EngineNumbers(&engine)) else {
            if seat.players.files.len() > before.0.len() {
                seat.opened.extend(seat.players.files.last());
            }
            return;
        };
        // Whoever waits for an answer has the file open: its last copy is not closed before.
        if let Input::Close { handle, .. } | Input::CloseDraft { handle } | Input::Unlock { handle, .. } = &input
            && seat.history.lock().iter().any(|entry| entry.is_unanswered(*handle))
        {
            (seat.players.files, seat.players.drafts) = before;
            return;
        }
        // What ends a lease may come before or after whatever is on its way at the same time.
        let ends = matches!(
            &input,
            Input::Unlink { .. }
                | Input::GiveBack { .. }
                | Input::Evict { .. }
                | Input::Lose { .. }
                | Input::LoseShares
                | Input::Unlock { .. }
                | Input::Close { .. }
                | Input::CloseDraft { .. }
        );
        // A lock that neither waits nor has begun the attempt has renewed it. That is not remembered: asked again after the
        // lease was given back, it claims.
        let renews = |(waiter, request)| !engine.is_waiting(waiter) && claimed_by != Some(request);
        let on_its_way = |entry: &Entry| entry.is_unanswered_request() || entry.unanswered_wait().is_some_and(renews);
        if ends && seat.history.lock().iter().any(on_its_way) {
            (seat.players.files, seat.players.drafts) = before;
            return;
        }
        // A draft that is being opened while another becomes the result is there before that, or refused after it.
        if matches!(&input, Input::Commit { .. }) && seat.history.lock().iter().any(Entry::is_unanswered_opening) {
            (seat.players.files, seat.players.drafts) = before;
            return;
        }
        // Two threads that lock as one owner or by one handle at the same time may be taken in either order.
        if let Input::Lock { owner, handle, .. } | Input::Unlock { owner, handle, .. } = &input
            && seat.history.lock().iter().any(|entry| entry.is_unanswered_lock(*owner) || entry.is_unanswered(*handle))
        {
            return;
        }
        match &mut input {
            Input::OpenDraft { handle, .. } => {
                let mut file = engine.results.create_draft(*handle).expect("a draft");
                std::io::Write::write_all(&mut file, &content(*handle)).expect("a draft is written");
            }
            Input::Commit { handle, size } => *size = content(*handle).len() as u64,
            _ => {}
        }
        let key = engine.find(&seat.key).expect("keys can be read").expect("it was opened or known");
        let asked =
            Entry::Asked { input: input.clone(), now_ns: self.now_ns, told: Vec::new(), seen: false, again: false };
        let history = Arc::clone(&seat.history);
        let number = history.lock().len();
        history.lock().push(asked);
        let told = Teller { history, number, engine: Arc::downgrade(&engine), silenced: Arc::clone(&self.silenced) };
        let done = told.of(key, input.clone(), now);
        engine.submit(key, input, now, Box::new(done));
    }

    /// Players learn what they were granted.
    fn collect(&mut self) {
        for seat in &mut self.seats {
            for entry in seat.history.lock().iter_mut() {
                if let Entry::Asked { input, told, seen, .. } = entry
                    && !std::mem::replace(seen, !told.is_empty())
                    && told.first().is_some_and(Result::is_ok)
                {
                    seat.players.granted(input);
                }
            }
        }
    }

    /// Everything decided so far is recorded; the disk is well.
    pub fn settle(game: &Mutex<Game>) {
        let (engine, now) = {
            let game = game.lock();
            game.rig().orders.clear();
            (Arc::clone(&game.rig().engine), game.now())
        };
        engine.flush(now);
        engine.flush(now);
        game.lock().collect();
    }

    /// Takes a turn.
    pub fn take(game: &Arc<Mutex<Game>>, turn: &Turn) {
        match turn {
            Turn::Play(seat, act) => {
                let mut game = game.lock();
                game.play(*seat, *act);
                game.collect();
            }
            Turn::Finish(seat, process) => {
                for act in finish(*process) {
                    game.lock().play(*seat, act);
                    Game::settle(game);
                }
            }
            Turn::Wait(seat, pause) => {
                Game::settle(game);
                let engine = {
                    let mut game = game.lock();
                    let deadline_ns = game.look(*seat, |entry| entry.state.deadline_ns()).flatten();
                    game.now_ns = after(game.now_ns, *pause, deadline_ns);
                    let now_ns = game.now_ns;
                    for seat in &game.seats {
                        let told = vec![Ok(leasefs::machine::Reply::Done)];
                        seat.history.lock().push(Entry::Asked {
                            input: Input::Tick,
                            now_ns,
                            told,
                            seen: true,
                            again: false,
                        });
                    }
                    Arc::clone(&game.rig().engine)
                };
                let now = game.lock().now();
                let _ = engine.tick(now);
                game.lock().rig().write(now);
            }
            Turn::Flush(fates) => Game::flush(game, fates, &[]),
            Turn::Slow(fates, acts) => Game::flush(game, fates, acts),
            Turn::TakeOver(recorded) => {
                if *recorded {
                    let (engine, orders, now) = {
                        let game = game.lock();
                        game.silenced.store(true, Ordering::SeqCst);
                        (Arc::clone(&game.rig().engine), game.rig().orders.clone(), game.now())
                    };
                    orders.expect([Fate::Killed]);
                    let killed = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| engine.flush(now)));
                    drop(killed);
                    orders.clear();
                }
                game.lock().take_over();
            }
            Turn::Restart(rebooted) => {
                Game::settle(game);
                game.lock().restart(*rebooted);
            }
        }
    }

    fn flush(game: &Arc<Mutex<Game>>, fates: &[Fate], acts: &[(usize, Act)]) {
        let (engine, orders, now) = {
            let game = game.lock();
            (Arc::clone(&game.rig().engine), game.rig().orders.clone(), game.now())
        };
        orders.expect(fates.iter().copied());
        if !acts.is_empty() {
            let (game, acts) = (Arc::downgrade(game), acts.to_vec());
            orders.meanwhile(move || {
                let Some(game) = game.upgrade() else { return };
                for (seat, act) in acts {
                    game.lock().play(seat, act);
                }
            });
        }
        engine.flush(now);
        orders.catch_up();
        orders.clear();
        game.lock().collect();
    }

    fn restart(&mut self, rebooted: bool) {
        let before = self.now();
        self.boots += u32::from(rebooted);
        if rebooted {
            self.now_ns = 5_000_000_000;
            self.wall_offset_ms += before.wall_ms + 60_000 - self.now().wall_ms;
        }
        let now_ns = self.now_ns;
        for seat in &mut self.seats {
            seat.players.leave();
            seat.opened.clear();
            seat.history.lock().push(Entry::Restarted { rebooted, now_ns });
        }
        let (now, boot_id) = (self.now(), format!("boot-{}", self.boots));
        self.rig = self.rig.take().map(|rig| rig.restart(&boot_id, now));
    }

    /// Another server takes over what the one before kept; whatever was not answered is asked again.
    fn take_over(&mut self) {
        self.silenced.store(true, Ordering::SeqCst);
        self.silenced = Arc::default();
        for seat in &self.seats {
            seat.is_new.store(false, Ordering::SeqCst);
        }
        let now = self.now();
        let handles: Vec<OpenHandles> = (0..self.seats.len()).filter_map(|at| self.open_handles(at)).collect();
        let boot_id = format!("boot-{}", self.boots);
        self.rig = self.rig.take().map(|rig| rig.take_over(&boot_id, now, &handles));
        let engine = Arc::clone(&self.rig().engine);
        // What was due when the server was killed is due.
        let _ = engine.tick(now);
        let kept: HashSet<Handle> = handles.iter().flat_map(|(_, claims, _)| claims.iter().copied()).collect();
        for seat in &self.seats {
            if engine.find(&seat.key).expect("keys can be read").is_none() {
                // Whoever opened it was not answered before it had a number, and asks again.
                for _ in &seat.opened {
                    engine.open_name(seat.parent, seat.name.as_bytes(), now).expect("a key's name");
                }
            }
            let history = Arc::clone(&seat.history);
            let asked = |(number, entry): (usize, &Entry)| match entry {
                Entry::Asked { input, told, .. } if told.is_empty() => Some((number, input.clone())),
                _ => None,
            };
            let again: Vec<(usize, Input)> = {
                let history = history.lock();
                let lost = history.iter().rposition(|entry| matches!(entry, Entry::Restarted { .. }));
                history.iter().enumerate().skip(lost.unwrap_or(0)).filter_map(asked).collect()
            };
            for (number, ..) in &again {
                if let Entry::Asked { again, .. } = &mut history.lock()[*number] {
                    *again = true;
                }
            }
            for (number, input) in again {
                let known = engine.find(&seat.key).expect("keys can be read");
                match (&input, known) {
                    (Input::Create { handle, .. }, Some(_)) if kept.contains(handle) => {}
                    (Input::Create { .. }, _) => {
                        engine.open_name(seat.parent, seat.name.as_bytes(), now).expect("a key's name");
                    }
                    (Input::Lock { wait: Some(waiter), .. }, _) => while engine.new_waiter() <= *waiter {},
                    _ => {}
                }
                let Ok(Some(key)) = engine.find(&seat.key) else { panic!("{input:?} of a key nobody knows") };
                let engine_of = Arc::downgrade(&engine);
                let silenced = Arc::clone(&self.silenced);
                let told = Teller { history: Arc::clone(&history), number, engine: engine_of, silenced };
                let done = told.of(key, input.clone(), now);
                engine.submit(key, input, now, Box::new(done));
            }
        }
        drop(engine);
        self.collect();
    }

    /// The handles of a key that are open as far as anybody was told, and those whose opening was not answered.
    fn open_handles(&self, at: usize) -> Option<OpenHandles> {
        let id = self.id(at)?;
        let seat = &self.seats[at];
        let mut claims = seat.opened.clone();
        let mut drafts = HashMap::new();
        for entry in seat.history.lock().iter() {
            match entry {
                Entry::Restarted { .. } => (claims, drafts) = (seat.opened.clone(), HashMap::new()),
                Entry::Refused(..) => {}
                Entry::Asked { input, told, .. } => match input {
                    Input::Create { handle, .. } if told.first().is_none_or(Result::is_ok) => claims.push(*handle),
                    Input::Close { handle, .. } if !told.is_empty() => claims.retain(|other| other != handle),
                    Input::OpenDraft { handle, epoch, .. } if told.first().is_some_and(Result::is_ok) => {
                        drafts.insert(*handle, *epoch);
                    }
                    Input::CloseDraft { handle } if !told.is_empty() => drop(drafts.remove(handle)),
                    _ => {}
                },
            }
        }
        Some((id, claims, drafts.into_iter().collect()))
    }
}
