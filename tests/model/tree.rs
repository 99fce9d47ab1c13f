//! Namespaces and the names of keys under a registry that refuses commits: the tree is what was told, no path is both,
//! and no leftover name stops the registry for good.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use leasefs::machine::{Input, Mode, Reply};
use leasefs::namespaces::{Credentials, Node};
use leasefs::{Error, Handle, Key, KeyId, NamespaceId, Owner};
use parking_lot::Mutex;
use proptest::prelude::*;

use crate::check;
use crate::players::{claimant, moment};
use crate::rig::{Fate, Rig, Storage, root_asks, storage};

/// Namespaces that are made and removed; the keys' names are among theirs.
const DIRS: [&str; 3] = ["", "x", "x/y"];
const NAMES: [&str; 3] = ["x", "y", "k"];
const NOW_NS: u64 = 1_000_000_000;

#[derive(Clone, Copy, Debug)]
enum Act {
    Mkdir(usize, usize),
    Rmdir(usize, usize),
    Open(usize, usize),
    Create(usize, usize),
    Lock(usize),
    Close(usize),
}

#[derive(Clone, Debug)]
enum Turn {
    Do(Act),
    Flush(Fate),
    Slow(Fate, Vec<Act>),
}

fn act() -> impl Strategy<Value = Act> {
    let dir = || 0..DIRS.len();
    let name = || 0..NAMES.len();
    prop_oneof![
        4 => (dir(), name()).prop_map(|(dir, name)| Act::Mkdir(dir, name)),
        3 => (dir(), name()).prop_map(|(dir, name)| Act::Rmdir(dir, name)),
        3 => (dir(), name()).prop_map(|(dir, name)| Act::Open(dir, name)),
        3 => (dir(), name()).prop_map(|(dir, name)| Act::Create(dir, name)),
        3 => (0..8usize).prop_map(Act::Lock),
        4 => (0..8usize).prop_map(Act::Close),
    ]
}

fn turn() -> impl Strategy<Value = Turn> {
    let fate = || prop_oneof![Just(Fate::Done), Just(Fate::DiskFull)];
    prop_oneof![
        4 => act().prop_map(Turn::Do),
        2 => fate().prop_map(Turn::Flush),
        2 => (fate(), prop::collection::vec(act(), 1..5)).prop_map(|(fate, acts)| Turn::Slow(fate, acts)),
    ]
}

#[derive(Default)]
struct Told {
    /// Changes that were acknowledged, by number of the request: the path, and whether it is there since.
    dirs: BTreeMap<usize, (String, bool)>,
    /// Acknowledged claims of each key.
    claims: BTreeMap<String, u64>,
    /// Open handles, with their keys.
    open: Vec<(KeyId, String, Handle)>,
    requests: usize,
}

fn join(dir: usize, name: usize) -> String {
    if DIRS[dir].is_empty() { NAMES[name].to_owned() } else { format!("{}/{}", DIRS[dir], NAMES[name]) }
}

fn take(rig: &Rig, told: &Arc<Mutex<Told>>, act: Act) {
    let (engine, now) = (&rig.engine, moment(NOW_NS));
    let number = {
        let mut told = told.lock();
        told.requests += 1;
        told.requests
    };
    let parent = |dir: usize| engine.look(|tree| tree.find(DIRS[dir]));
    let acknowledge = |path: String, there: bool| {
        let told = Arc::clone(told);
        move |reply: Result<Reply, Error>| {
            if reply.is_ok() {
                told.lock().dirs.insert(number, (path, there));
            }
        }
    };
    match act {
        Act::Mkdir(dir, name) => {
            let Some(parent) = parent(dir).filter(|id| is_present(rig, *id)) else { return };
            let done = Box::new(acknowledge(join(dir, name), true));
            engine.mkdir(parent, NAMES[name].as_bytes(), 0o777, &root_asks(&Credentials::default(), now), done);
        }
        Act::Rmdir(dir, name) => {
            let Some(parent) = parent(dir) else { return };
            let done = Box::new(acknowledge(join(dir, name), false));
            engine.rmdir(parent, NAMES[name].as_bytes(), &root_asks(&Credentials::default(), now), done);
        }
        Act::Open(dir, name) | Act::Create(dir, name) => {
            let Some(parent) = parent(dir) else { return };
            let Ok(key) = engine.open_name(parent, NAMES[name].as_bytes(), now) else { return };
            let handle = engine.new_handle();
            if matches!(act, Act::Open(..)) {
                return told.lock().open.push((key, join(dir, name), handle));
            }
            let (told, path, weak) = (Arc::clone(told), join(dir, name), Arc::downgrade(engine));
            let done = move |reply: Result<Reply, Error>| {
                if reply.is_ok() {
                    let mut told = told.lock();
                    *told.claims.entry(path.clone()).or_default() += 1;
                    told.open.push((key, path, handle));
                } else if let Some(engine) = weak.upgrade() {
                    engine.not_opened(key, now);
                }
            };
            engine.submit(key, Input::Create { handle, claimant: claimant(1, 1) }, now, Box::new(done));
        }
        Act::Lock(which) => {
            let opened = told.lock().open.clone();
            let Some((key, path, handle)) = opened.get(which % opened.len().max(1)).cloned() else { return };
            let told = Arc::clone(told);
            let done = move |reply: Result<Reply, Error>| {
                if matches!(reply, Ok(Reply::Claimed(_))) {
                    *told.lock().claims.entry(path).or_default() += 1;
                }
            };
            let (owner, mode) = (Owner(handle.0), Mode::Exclusive);
            let input = Input::Lock { handle, owner, mode, wait: None, claimant: claimant(1, 1) };
            engine.submit(key, input, now, Box::new(done));
        }
        Act::Close(which) => {
            let (key, _, handle) = {
                let mut told = told.lock();
                if told.open.is_empty() {
                    return;
                }
                let which = which % told.open.len();
                told.open.swap_remove(which)
            };
            engine.submit(key, Input::Close { handle, why: Arc::from("closed") }, now, Box::new(|_| ()));
        }
    }
}

fn is_present(rig: &Rig, id: NamespaceId) -> bool {
    rig.engine.look(|tree| tree.get(id).is_some_and(|namespace| namespace.row.present))
}

/// The present namespaces, and the keys with their epochs, as found by name.
fn found(rig: &Rig) -> (BTreeSet<String>, BTreeMap<String, u64>) {
    let (mut dirs, mut keys) = (BTreeSet::new(), BTreeMap::new());
    for path in (0..DIRS.len()).flat_map(|dir| (0..NAMES.len()).map(move |name| join(dir, name))) {
        if rig.engine.look(|tree| tree.find(&path)).is_some_and(|id| is_present(rig, id)) {
            dirs.insert(path.clone());
        }
        let id = rig.engine.find(&Key::parse(&path).expect("a key")).expect("keys can be read");
        if let Some(epoch) = id.and_then(|id| rig.engine.view(id, |entry, _| entry.state.epoch.0)) {
            keys.insert(path, epoch);
        }
    }
    (dirs, keys)
}

fn play(storage: Storage, turns: &[Turn]) -> Result<(), TestCaseError> {
    let now = moment(NOW_NS);
    let rig = Rig::on(storage, now);
    let rig = Arc::new(rig);
    let told = Arc::new(Mutex::new(Told::default()));
    let flush = |fate: Fate, acts: &[Act]| {
        rig.orders.expect([fate]);
        let (weak, told, acts) = (Arc::downgrade(&rig), Arc::clone(&told), acts.to_vec());
        rig.orders.meanwhile(move || {
            let Some(rig) = weak.upgrade() else { return };
            acts.iter().for_each(|act| take(&rig, &told, *act));
        });
        rig.engine.flush(now);
        rig.orders.catch_up();
        rig.orders.clear();
    };
    for turn in turns {
        match turn {
            Turn::Do(act) => take(&rig, &told, *act),
            Turn::Flush(fate) => flush(*fate, &[]),
            Turn::Slow(fate, acts) => flush(*fate, acts),
        }
    }
    flush(Fate::Done, &[]);
    flush(Fate::Done, &[]);
    let well = Arc::new(Mutex::new(None));
    let (answer, who) = (Arc::clone(&well), Credentials::default());
    let done = Box::new(move |reply| *answer.lock() = Some(reply));
    rig.engine.mkdir(NamespaceId::ROOT, b"fresh", 0o777, &root_asks(&who, now), done);
    rig.engine.flush(now);
    let well = well.lock().clone();
    prop_assert_eq!(well, Some(Ok(Reply::Done)), "the registry takes nothing any more");

    let told = told.lock();
    let mut dirs = BTreeSet::new();
    for (path, there) in told.dirs.values() {
        if *there {
            dirs.insert(path.clone())
        } else {
            dirs.remove(path)
        };
    }
    let (found_dirs, found_keys) = found(&rig);
    prop_assert_eq!(&found_dirs, &dirs, "the namespaces that were acknowledged");
    let claimed: BTreeMap<_, _> = found_keys.into_iter().filter(|(_, epoch)| *epoch > 0).collect();
    prop_assert_eq!(&claimed, &told.claims, "the epochs that were told");
    let listed = rig.engine.look_into(NamespaceId::ROOT, |tree, keys| {
        let nodes = tree.list(NamespaceId::ROOT, 0).collect::<Vec<_>>();
        let name = |node: &Node| match node {
            Node::Namespace(id) => tree.get(*id).map(|namespace| namespace.name().to_owned()),
            Node::Key(id) => keys.get(id).filter(|key| key.state.epoch.0 > 0).map(|key| key.key.as_str().to_owned()),
        };
        nodes.iter().filter_map(name).collect::<Vec<_>>()
    });
    let listed = listed.expect("keys can be read");
    prop_assert_eq!(listed.iter().collect::<BTreeSet<_>>().len(), listed.len(), "listed twice: {:?}", &listed);
    prop_assert_eq!(rig.violations(), vec![]);
    drop(told);
    let rig = Arc::into_inner(rig).expect("nobody else has it").restart("boot-1", now);
    prop_assert_eq!((dirs, claimed), found(&rig), "after a restart");
    Ok(())
}

#[test]
fn the_tree_is_what_was_told() {
    check(1_000, (storage(), prop::collection::vec(turn(), 1..=40)), |(storage, turns)| play(storage, &turns));
}
