//! Threads that ask, a thread that records, a registry that refuses now and then: everybody is answered, and an order
//! of the granted requests explains all answers.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::mpsc;
use std::sync::{Arc, Mutex, OnceLock};
use std::thread;
use std::time::Duration;

use leasefs::machine::{Input, Mode, Reply};
use leasefs::{Engine, Epoch, Error, Handle, KeyId, NamespaceId, Owner};

use crate::linear::{self, Timed};
use crate::players::{claimant, moment, uid};
use crate::register::{Act, Commits};
use crate::rig::{Fate, Rig, Storage, is_by_order};

const THREADS: u8 = 4;
const ROUNDS: u64 = 3_000;
const KEYS: u64 = 2;
/// The one time: nothing expires.
const NOW_NS: u64 = 1_000_000_000;
/// An answer that does not come by then never comes.
const PATIENCE: Duration = Duration::from_secs(60);

/// A small generator: the choices of a thread are the same in every run, only their timing differs.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % sides
    }
}

struct Table<'a> {
    engine: &'a Engine,
    clock: &'a AtomicU64,
    leases: &'a AtomicU32,
    flusher: &'a OnceLock<thread::Thread>,
    histories: &'a Mutex<HashMap<u64, Vec<Timed>>>,
    number: u64,
    key: KeyId,
}

/// An answer with the interval it was given in.
struct Answered {
    told: Result<Reply, Error>,
    from: u64,
    to: u64,
}

impl Table<'_> {
    fn ask(&self, input: Input) -> Answered {
        let (send, receive) = mpsc::channel();
        let from = self.clock.fetch_add(1, Ordering::SeqCst);
        let named = format!("{input:?}");
        self.engine.submit(self.key, input, moment(NOW_NS), Box::new(move |told| drop(send.send(told))));
        self.flusher.get().inspect(|thread| thread.unpark());
        let told = receive.recv_timeout(PATIENCE).unwrap_or_else(|_| panic!("never answered: {named}"));
        Answered { told, from, to: self.clock.fetch_add(1, Ordering::SeqCst) }
    }

    fn note(&self, answered: &Answered, act: Act) {
        let Answered { from, to, .. } = *answered;
        let mut histories = self.histories.lock().expect("no thread failed");
        histories.entry(self.number).or_default().push(Timed { from, to, act, after: None });
    }

    /// Claims in one of the forms; the handle and the lease where it was granted.
    fn claim(&self, player: u8, form: u64) -> Option<(Handle, u32, Epoch)> {
        self.engine.open_key(self.key).expect("the test has it open");
        let (handle, lease) = (self.engine.new_handle(), self.leases.fetch_add(1, Ordering::SeqCst));
        let (claimant, owner) = (claimant(player, player), Owner(handle.0));
        let (create, share) = (form == 0, form >= 4);
        let input = if create {
            Input::Create { handle, claimant }
        } else {
            let mode = if share { Mode::Shared } else { Mode::Exclusive };
            let wait = (form % 2 == 1).then(|| self.engine.new_waiter());
            Input::Lock { handle, owner, mode, wait, claimant }
        };
        let answered = self.ask(input);
        match &answered.told {
            Ok(Reply::Claimed(epoch)) => {
                self.note(&answered, Act::Grant { lease, known: epoch.0, create, maybe: false });
                return Some((handle, lease, *epoch));
            }
            Ok(Reply::Shared) => {
                self.note(&answered, Act::Share { lease, maybe: false });
                return Some((handle, lease, Epoch(0)));
            }
            // A shared lock is also refused for the sake of an exclusive one in line.
            Err(Error::Taken | Error::WouldBlock) => self.note(&answered, Act::Deny { create, share: false }),
            _ if is_by_order(&answered.told) => {}
            other => panic!("a claim was answered {other:?}"),
        }
        self.ask(Input::Close { handle, why: Arc::from("closed") });
        None
    }

    fn report(&self, player: u8, lease: u32, epoch: Epoch, commits: bool) {
        let handle = self.engine.new_handle();
        drop(self.engine.results.create_draft(handle).expect("a draft"));
        let opened = self.ask(Input::OpenDraft { handle, epoch, uid: uid(player) });
        match &opened.told {
            Ok(_) => self.note(&opened, Act::Draft { lease, maybe: false }),
            _ if is_by_order(&opened.told) => return self.engine.results.discard(handle),
            other => panic!("the holder's draft was answered {other:?}"),
        }
        if commits {
            let committed = self.ask(Input::Commit { handle, size: 0 });
            match &committed.told {
                Ok(_) => self.note(&committed, Act::Commit { lease, maybe: false }),
                _ if is_by_order(&committed.told) => {}
                other => panic!("the holder's result was answered {other:?}"),
            }
        }
        let closed = self.ask(Input::CloseDraft { handle });
        self.engine.results.discard(handle);
        self.note(&closed, Act::DraftEnd { lease, commits: Commits::No });
    }

    fn round(&self, player: u8, dice: &mut Dice) {
        if dice.roll(6) == 0 {
            let input = Input::Unlink {
                process: crate::players::process(0),
                may_forget: true,
                uid: 0,
                request: leasefs::RequestId(0),
            };
            let answered = self.ask(input);
            match &answered.told {
                Ok(_) => self.note(&answered, Act::Forget),
                Err(Error::NotFound) => self.note(&answered, Act::ForgetNone),
                Err(Error::Busy) => self.note(&answered, Act::ForgetBusy),
                _ if is_by_order(&answered.told) => {}
                other => panic!("unlink was answered {other:?}"),
            }
            return;
        }
        let Some((handle, lease, epoch)) = self.claim(player, dice.roll(6)) else { return };
        if epoch.0 > 0 {
            if dice.roll(2) == 0 {
                let renewed = self.ask(Input::Renew { handle, note: None });
                match renewed.told {
                    Ok(_) => self.note(&renewed, Act::Own { lease, epoch: epoch.0 }),
                    _ if is_by_order(&renewed.told) => {}
                    other => panic!("the holder's renewal was answered {other:?}"),
                }
            }
            if dice.roll(4) == 0 {
                self.report(player, lease, epoch, dice.roll(2) == 0);
            }
        }
        let input = match dice.roll(2) {
            0 if epoch.0 == 0 => Input::Unlock { handle, owner: Owner(handle.0) },
            _ => Input::Close { handle, why: Arc::from("closed") },
        };
        let closed = self.ask(input);
        assert_eq!(closed.told, Ok(Reply::Done), "giving it back cannot fail");
        self.note(&closed, Act::Release { lease });
    }
}

#[test]
fn an_order_of_the_granted_requests_explains_all_answers() {
    play(Storage::Plain);
}

#[test]
fn an_order_explains_all_answers_while_a_journal_is_applied() {
    play(Storage::Process);
}

fn play(storage: Storage) {
    let rig = Rig::on(storage, moment(NOW_NS));
    let (clock, leases, histories) = (AtomicU64::new(0), AtomicU32::new(1), Mutex::new(HashMap::new()));
    let over = AtomicBool::new(false);
    let keys: Vec<KeyId> = (0..KEYS)
        .map(|number| rig.engine.open_name(NamespaceId::ROOT, format!("k{number}").as_bytes(), moment(NOW_NS)))
        .collect::<Result<_, _>>()
        .expect("keys");
    let flusher = OnceLock::new();
    thread::scope(|scope| {
        scope.spawn(|| {
            let _ = flusher.set(thread::current());
            let mut dice = Dice(99);
            while !over.load(Ordering::SeqCst) {
                let fate = [Fate::Done, Fate::Done, Fate::DiskFull, Fate::Broken][dice.roll(4) as usize];
                rig.orders.expect([fate]);
                rig.orders.meanwhile(|| thread::sleep(Duration::from_micros(200)));
                rig.engine.flush(moment(NOW_NS));
                rig.orders.clear();
                thread::park_timeout(Duration::from_millis(1));
            }
        });
        scope.spawn(|| {
            while !over.load(Ordering::SeqCst) {
                rig.engine.apply(moment(NOW_NS)).expect("the registry takes what it accepted");
                thread::park_timeout(Duration::from_micros(300));
            }
        });
        let (engine, keys, clock, leases, histories, flusher) =
            (&*rig.engine, &keys, &clock, &leases, &histories, &flusher);
        let players: Vec<_> = (0..THREADS)
            .map(|player| {
                scope.spawn(move || {
                    let mut dice = Dice(u64::from(player));
                    for _ in 0..ROUNDS {
                        let number = dice.roll(KEYS);
                        let key = keys[usize::try_from(number).expect("few")];
                        let table = Table { engine, clock, leases, flusher, histories, number, key };
                        table.round(player % 3 + 1, &mut dice);
                    }
                })
            })
            .collect();
        let failed = players.into_iter().filter_map(|player| player.join().err()).count();
        over.store(true, Ordering::SeqCst);
        assert_eq!(failed, 0, "players failed, see above");
    });
    rig.engine.flush(moment(NOW_NS));
    for (number, history) in histories.into_inner().expect("no thread failed") {
        let granted = history.iter().filter(|timed| matches!(timed.act, Act::Grant { .. })).count() as u64;
        let epoch = rig.engine.view(keys[usize::try_from(number).expect("few")], |entry, _| entry.state.epoch.0);
        assert_eq!(epoch, Some(granted), "an epoch for each claim that was granted, and no other");
        let checked = linear::check(&history).unwrap_or_else(|error| {
            let near = history[error.call.saturating_sub(4)..=error.call].to_vec();
            panic!("key {number}: {error}\nup to that call: {near:#?}")
        });
        println!("key {number}: {granted} grants, {checked:?}");
    }
    assert_eq!(rig.violations(), vec![]);
}
