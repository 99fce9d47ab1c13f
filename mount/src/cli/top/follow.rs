//! What keeps `top` up to date: one thread follows the tree's events and reads again what they name, another finds out
//! who has a key's handle.
//!
//! Every key is read once, and again where events were missed. Events tell of no name that an agent gave itself, so what is
//! on the screen is read again from time to time. However much happens, at least as much time is left to the tree as
//! reading took.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::time::{Duration, Instant};

use anyhow::Result;
use leasefs::Key;
use parking_lot::Mutex;

use super::model::Entry;
use super::start;
use crate::cli::deadlock::{self, Ring};
use crate::cli::events::{self, Events};
use crate::cli::listing;
use crate::cli::proc::{self, Pid};
use crate::cli::show;
use crate::cli::tree::{Status, Tree};
use crate::cli::who;

/// Between two readings of what events name.
const PAUSE: Duration = Duration::from_millis(50);
/// Between two readings of what is on the screen.
const SCREEN: Duration = Duration::from_secs(3);
/// Between two looks for rings, while somebody waits.
const RINGS: Duration = Duration::from_secs(1);
/// Between two readings of everything.
const EVERYTHING: Duration = Duration::from_secs(10);
/// Most keys told of at a time.
const BATCH: usize = 256;
/// Most containers remembered.
const CONTAINERS: usize = 10_000;
/// Between two attempts to reach a tree that fails.
const AGAIN: Duration = Duration::from_secs(2);

/// What was found out.
pub enum News {
    /// Keys as they are now; none for a key that is no more.
    Changed(Vec<(String, Option<Entry>)>),
    /// Everything was read: these keys, and so many namespaces may not be.
    Loaded {
        /// The keys there are.
        keys: Vec<String>,
        /// Namespaces that may not be read.
        shut: usize,
    },
    /// The rings there are.
    Rings(Vec<Ring>),
    /// Who has the handle of a key, a line each.
    Who(String, Vec<String>),
    /// The tree fails.
    Trouble(String),
}

/// The threads.
pub struct Follower {
    on_screen: Arc<Mutex<Vec<String>>>,
    asked: Sender<String>,
}

impl Follower {
    /// Starts them. They end when `tell` says that nobody listens.
    ///
    /// # Errors
    /// Where the tree cannot be followed.
    pub fn start(tree: &Tree, prefix: &str, tell: impl Fn(News) -> bool + Clone + Send + 'static) -> Result<Follower> {
        let on_screen = Arc::new(Mutex::new(Vec::new()));
        let events = Events::open(tree)?;
        let mut following = Following {
            tree: tree.clone(),
            prefix: prefix.to_owned(),
            on_screen: Arc::clone(&on_screen),
            tell: tell.clone(),
            containers: Containers::default(),
            with_line: HashMap::new(),
            had_rings: false,
        };
        start("events", move || following.run(events))?;
        let (asked, questions) = mpsc::channel::<String>();
        let tree = tree.clone();
        start("who", move || {
            while let Ok(mut key) = questions.recv() {
                // Only the newest question still matters.
                while let Ok(newer) = questions.try_recv() {
                    key = newer;
                }
                let lines = who_has(&tree, &key);
                if !tell(News::Who(key, lines)) {
                    return;
                }
            }
        })?;
        Ok(Follower { on_screen, asked })
    }

    /// Says what is on the screen.
    pub fn is_shown(&self, keys: Vec<String>) {
        *self.on_screen.lock() = keys;
    }

    /// Asks who has the handle of a key.
    pub fn ask_who(&self, key: String) {
        let _ = self.asked.send(key);
    }
}

fn who_has(tree: &Tree, key: &str) -> Vec<String> {
    let look = || -> Result<Vec<String>> {
        let key = Key::parse(key)?;
        let Some(status) = tree.status(&key)? else { return Ok(Vec::new()) };
        let found = who::look(tree, &key, &status)?;
        let mut lines: Vec<String> =
            found.people.iter().filter(|person| person.how.keeps()).map(who::in_words).collect();
        lines.extend(found.remark);
        Ok(lines)
    };
    look().unwrap_or_else(|error| vec![show::plain(&format!("{error:#}"))])
}

/// Containers of processes, each found out once.
#[derive(Default)]
pub struct Containers(HashMap<Pid, Option<String>>);

impl Containers {
    /// A key with the container of its holder.
    pub fn entry(&mut self, status: Status) -> Entry {
        let container = proc::holder(&status).and_then(|holder| self.of(holder));
        Entry::new(status, container)
    }

    fn of(&mut self, process: Pid) -> Option<String> {
        if self.0.len() >= CONTAINERS {
            self.0.clear();
        }
        let find = || process.is_there().then(|| proc::container(process.pid)).flatten();
        self.0.entry(process).or_insert_with(find).clone()
    }
}

struct Following<T> {
    tree: Tree,
    prefix: String,
    on_screen: Arc<Mutex<Vec<String>>>,
    tell: T,
    containers: Containers,
    /// Keys that are waited for: only they can be in a ring.
    with_line: HashMap<String, Status>,
    had_rings: bool,
}

/// Nobody listens any more.
struct Unheard;

impl<T: Fn(News) -> bool> Following<T> {
    fn run(&mut self, events: Events) {
        let mut events = Some(events);
        loop {
            let outcome = match events.take() {
                Some(events) => self.follow(events),
                None => Events::open(&self.tree).and_then(|events| self.follow(events)),
            };
            match outcome {
                Ok(Unheard) => return,
                Err(error) => {
                    if !(self.tell)(News::Trouble(show::plain(&format!("{error:#}")))) {
                        return;
                    }
                    std::thread::sleep(AGAIN);
                }
            }
        }
    }

    /// Follows the tree until nobody listens, or it fails.
    fn follow(&mut self, mut events: Events) -> Result<Unheard> {
        let mut changed: BTreeSet<String> = BTreeSet::new();
        let (mut screen_at, mut rings_at) = (Instant::now() + SCREEN, Instant::now());
        // Everything, as soon as this.
        let mut everything_at = Some(Instant::now());
        let mut last_read = None;
        loop {
            let now = Instant::now();
            if everything_at.is_some_and(|at| at <= now) {
                everything_at = None;
                last_read = Some(now);
                changed.clear();
                if !self.everything()? {
                    return Ok(Unheard);
                }
            }
            if screen_at <= now {
                changed.extend(self.on_screen.lock().iter().cloned());
                screen_at = now + SCREEN;
            }
            let began = Instant::now();
            if !changed.is_empty() && !self.read(&std::mem::take(&mut changed))? {
                return Ok(Unheard);
            }
            if rings_at <= now && (self.had_rings || !self.with_line.is_empty()) {
                let rings = deadlock::among(self.tree.root(), self.with_line.values());
                self.had_rings = !rings.is_empty();
                rings_at = Instant::now() + RINGS;
                if !(self.tell)(News::Rings(rings)) {
                    return Ok(Unheard);
                }
            }
            // As long again as that took, so that a busy tree is left alone for half of the time.
            std::thread::sleep(PAUSE.max(began.elapsed()));
            let rings_due = (!self.with_line.is_empty() || self.had_rings).then_some(rings_at);
            // Where nothing is on the screen, nothing but an event wakes this thread.
            let screen_due = (!self.on_screen.lock().is_empty()).then_some(screen_at);
            let until = [screen_due, rings_due, everything_at].into_iter().flatten().min();
            let Some(lines) = events.wait(until)? else { continue };
            for (_, event) in events::parse(&lines) {
                match event.map(|event| (event.is_gap(), event.event, event.key)) {
                    // Refusals change nothing.
                    Some((_, name, _)) if name == "denied" || name == "stale" => {}
                    Some((false, _, Some(key))) => drop(changed.insert(key)),
                    _ => {
                        let next = last_read.map_or(now, |read: Instant| read + EVERYTHING);
                        everything_at = Some(everything_at.map_or(next, |at| at.min(next)));
                    }
                }
            }
        }
    }

    /// Reads everything that is wanted; false when nobody listens.
    fn everything(&mut self) -> Result<bool> {
        let mut batch = Vec::new();
        self.with_line.clear();
        let (tell, containers, with_line) = (&self.tell, &mut self.containers, &mut self.with_line);
        let (mut is_heard, mut sent) = (true, Instant::now());
        let mut hear = |status: &Status| {
            if status.waiters > 0 {
                with_line.insert(status.key.clone(), status.clone());
            }
            batch.push((status.key.clone(), Some(containers.entry(status.clone()))));
            if batch.len() >= BATCH || sent.elapsed() >= PAUSE {
                sent = Instant::now();
                is_heard &= tell(News::Changed(std::mem::take(&mut batch)));
            }
        };
        // Those that are held come first, however many are free.
        listing::walk_files(&self.tree, &self.prefix, &mut hear)?;
        let listing = listing::walk(&self.tree, &self.prefix, &mut hear)?;
        is_heard &= tell(News::Changed(batch));
        let keys = listing.found.into_iter().map(|status| status.key).collect();
        Ok(is_heard && tell(News::Loaded { keys, shut: listing.shut }))
    }

    /// Reads these keys; false when nobody listens.
    fn read(&mut self, keys: &BTreeSet<String>) -> Result<bool> {
        let mut changes = Vec::new();
        for path in keys.iter().filter(|key| key.starts_with(&self.prefix)) {
            let Ok(key) = Key::parse(path) else { continue };
            let status = self.tree.status(&key)?;
            match &status {
                Some(status) if status.waiters > 0 => drop(self.with_line.insert(path.clone(), status.clone())),
                _ => drop(self.with_line.remove(path)),
            }
            changes.push((path.clone(), status.map(|status| self.containers.entry(status))));
        }
        Ok((self.tell)(News::Changed(changes)))
    }
}
