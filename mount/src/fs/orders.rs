//! Orders to `.leasefs/control` that take their time: the write is answered when they are carried out, and a signal to
//! whoever waits for that ends the wait, and a prune with it.
//!
//! Should the server be replaced meanwhile, the order comes again and goes on with what is left; without resend, the write
//! ends with `EINTR` and whoever gave the order gives it again.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use fuser::{Errno, ReplyWrite};
use leasefs::Error;
use leasefs::engine::{Prune, ResultFile};
use leasefs::metrics::Outside;
use leasefs::registry::prune::Bounds;
use serde::Deserialize;

use super::handles::Open;
use super::{Caller, LeaseFs, Shared};
use crate::clock;
use crate::errno::errno;
use crate::flight::Place;
use crate::watcher::Wait;

/// Between two tries to go on with a prune.
const AGAIN: Duration = Duration::from_millis(50);

/// Orders that are being carried out, by their number.
#[derive(Default)]
pub struct Orders {
    waiting: HashMap<u64, Waiting>,
    last: u64,
}

struct Waiting {
    reply: ReplyWrite,
    /// What the write is answered with.
    length: u32,
    place: Place,
}

/// What an order to prune says; at least one of the two.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pruning {
    /// Completed attempts that ended so many milliseconds ago, or longer, go.
    #[serde(default)]
    completed_older_ms: Option<u64>,
    /// Of each key only so many of the newest ended attempts stay; at least 1.
    #[serde(default)]
    attempts_over: Option<u64>,
}

impl LeaseFs {
    pub(super) fn order_prune(&self, req: &Caller, pruning: Pruning, length: u32, reply: ReplyWrite) {
        if !self.is_operator(req) {
            return reply.error(Errno::EACCES);
        }
        let now = clock::now();
        let Pruning { completed_older_ms, attempts_over } = pruning;
        let bounds = Bounds {
            completed_by_ms: completed_older_ms.map(|ms| now.wall_ms.saturating_sub_unsigned(ms)),
            keep: attempts_over,
        };
        if bounds.is_none() || bounds.keep == Some(0) {
            return reply.error(Errno::EINVAL);
        }
        let Some(number) = self.park_order(req, length, reply) else { return };
        let shared = Arc::clone(self.shared());
        let is_repeated = req.is_repeated;
        let work = move || shared.prune(number, bounds, is_repeated);
        if let Err(error) = std::thread::Builder::new().name("prune".into()).spawn(work) {
            self.answer_order(number, Err(Error::from(error)));
        }
    }

    pub(super) fn order_reap(&self, req: &Caller, length: u32, reply: ReplyWrite) {
        if !self.is_operator(req) {
            return reply.error(Errno::EACCES);
        }
        let Some(number) = self.park_order(req, length, reply) else { return };
        if !self.reap.order(number) {
            self.answer_order(number, Ok(()));
        }
    }

    fn park_order(&self, req: &Caller, length: u32, reply: ReplyWrite) -> Option<u64> {
        let Some((place, _)) = self.flight.park(req.unique(), clock::now().boot_ns) else {
            reply.error(Errno::ENOMEM);
            return None;
        };
        let mut orders = self.orders.lock();
        orders.last += 1;
        let number = orders.last;
        orders.waiting.insert(number, Waiting { reply, length, place });
        self.watcher.add(Wait::Order(number), req.unique(), req.pid());
        Some(number)
    }
}

impl Shared {
    /// Carries out an order to prune, for as long as somebody waits for it.
    fn prune(&self, number: u64, bounds: Bounds, is_repeated: bool) {
        let begun = loop {
            match self.engine.begin_prune(bounds, clock::now()) {
                // It was at it when its server was killed, and a backup that waited for it came first: nobody is to be
                // told of that.
                Err(Error::Busy) if is_repeated && self.is_awaited(number) => std::thread::sleep(AGAIN),
                begun => break begun,
            }
        };
        let work = |prune: &mut Prune| -> Result<(), Error> {
            while self.is_awaited(number) {
                let more = self.engine.prune_step(prune, || self.open_results(), clock::now())?;
                self.announce();
                if self.engine.is_checkpoint_due() {
                    self.writer.wake();
                }
                if !more {
                    break;
                }
            }
            Ok(())
        };
        let done = begun.and_then(|mut prune| work(&mut prune));
        if let Err(error) = &done {
            tracing::warn!("prune: {error}");
        }
        self.timekeeper.need(self.next_ns());
        self.writer.need(self.engine.apply_ns());
        self.answer_order(number, done);
    }

    /// Deletes what an earlier prune left.
    pub fn sweep(&self) {
        if let Err(error) = self.engine.sweep(|| self.open_results()) {
            tracing::warn!("files of pruned results stay until the next start: {error}");
        }
    }

    /// The results that are open for reading. Whoever was about to open one has done so when this looks.
    fn open_results(&self) -> HashSet<ResultFile> {
        drop(self.opening.write());
        let handles = self.handles.lock();
        let results = handles.values().filter_map(|open| match open {
            Open::Result(key, epoch, _) => Some((*key, *epoch)),
            _ => None,
        });
        results.collect()
    }

    /// `.leasefs/metrics`.
    pub(super) fn metrics(&self) -> Result<String, Error> {
        let drafts = self.handles.lock().values().filter(|open| matches!(open, Open::Draft(_))).count();
        let restarts = self.settings.starts.saturating_sub(1);
        self.engine.metrics(&Outside { drafts, restarts }, clock::now())
    }

    fn is_awaited(&self, number: u64) -> bool {
        self.orders.lock().waiting.contains_key(&number)
    }

    /// Answers orders that were carried out.
    pub fn answer_orders(&self, numbers: Vec<u64>) {
        for number in numbers {
            self.answer_order(number, Ok(()));
        }
    }

    fn answer_order(&self, number: u64, done: Result<(), Error>) {
        let Some(Waiting { reply, length, place }) = self.orders.lock().waiting.remove(&number) else { return };
        self.watcher.remove(Wait::Order(number));
        match done {
            Ok(()) => reply.written(length),
            Err(error) => reply.error(errno(&error)),
        }
        self.flight.unpark(place);
    }

    /// Ends the wait for an order with `EINTR`; a prune stops after the step that it is at.
    pub(super) fn interrupt_order(&self, number: u64) {
        self.answer_order(number, Err(Error::Interrupted));
    }
}
