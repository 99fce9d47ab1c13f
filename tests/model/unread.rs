//! Keys that a server has not read yet: whatever is asked for first, all is as if they had been read before.

use std::collections::BTreeMap;
use std::sync::Arc;

use leasefs::batch::Done;
use leasefs::machine::Input;
use leasefs::namespaces::{Credentials, Node};
use leasefs::{Error, Key, KeyId, NamespaceId, view};
use parking_lot::Mutex;
use proptest::prelude::*;

use crate::check;
use crate::players::{claimant, moment};
use crate::rig::{Rig, mkdir, rmdir, root_asks, storage};

const NOW_NS: u64 = 1_000_000_000;
/// `ab` is no part of `a`, though its name begins so, and `gone` is removed again.
const DIRS: [&str; 4] = ["", "a", "ab", "gone"];
/// More than are read at a time.
const KEYS: usize = 150;
/// Opened, never claimed, and its handle gone with the server: nobody's.
const UNUSED: usize = 0;

fn path(dir: usize, key: usize) -> Key {
    let slash = if DIRS[dir].is_empty() { "" } else { "/" };
    Key::parse(&format!("{}{slash}k{key}", DIRS[dir])).expect("a key")
}

fn dir_id(rig: &Rig, dir: usize) -> NamespaceId {
    rig.engine.look(|tree| tree.find(DIRS[dir])).expect("it was made")
}

fn submit(rig: &Rig, key: KeyId, input: Input) {
    rig.engine.submit(
        key,
        input,
        moment(NOW_NS),
        Box::new(|told| assert!(told.is_ok(), "it is in nobody's way: {told:?}")),
    );
}

/// A tree with keys of all kinds: claimed and let go, finished, held, and never claimed.
fn grow(rig: &Rig) {
    let (engine, now) = (&rig.engine, moment(NOW_NS));
    let dirs: Vec<NamespaceId> = DIRS
        .iter()
        .map(|name| if name.is_empty() { NamespaceId::ROOT } else { mkdir(engine, name.as_bytes(), now) })
        .collect();
    for key in 0..KEYS {
        for (dir, parent) in dirs.iter().enumerate() {
            let id = engine.open_name(*parent, format!("k{key}").as_bytes(), now).expect("a key");
            if key == UNUSED {
                continue;
            }
            let (holder, claims) = (engine.new_handle(), 1 + key % 3);
            for _ in 0..claims {
                engine.open_key(id).expect("it is there");
                let handle = engine.new_handle();
                submit(rig, id, Input::Create { handle, claimant: claimant(1, 1) });
                submit(rig, id, Input::Close { handle, why: Arc::from("closed") });
            }
            if key % 10 == 7 && DIRS[dir] != "gone" {
                submit(rig, id, Input::Create { handle: holder, claimant: claimant(1, 1) });
                continue;
            }
            if key % 10 == 3 && DIRS[dir] != "gone" {
                submit(rig, id, Input::Create { handle: holder, claimant: claimant(1, 1) });
                let epoch = engine.view(id, |entry, _| entry.state.epoch).expect("it is known");
                let draft = engine.new_handle();
                engine.results.create_draft(draft).expect("a draft");
                submit(rig, id, Input::OpenDraft { handle: draft, epoch, uid: 0 });
                submit(rig, id, Input::Commit { handle: draft, size: 0 });
                submit(rig, id, Input::CloseDraft { handle: draft });
            }
            submit(rig, id, Input::Close { handle: holder, why: Arc::from("closed") });
        }
        engine.flush(now);
    }
    rmdir(engine, b"gone", now);
    engine.flush(now);
}

/// All that is shown of a key.
fn shown(rig: &Rig, id: KeyId) -> Option<(String, String, u32)> {
    let now = moment(NOW_NS);
    rig.engine.view(id, |entry, tree| (view::status(entry, now), view::record(entry, now), entry.file_uid(tree)))
}

type Listing = (Vec<Node>, Vec<Node>);

/// What is in a namespace, and which of it has a file.
fn listing(rig: &Rig, dir: usize) -> Listing {
    let id = dir_id(rig, dir);
    let all = rig.engine.look_into(id, |tree, _| (tree.list(id, 0).collect(), tree.list_files(id, 0).collect()));
    all.expect("keys can be read")
}

#[derive(Clone, Copy, Debug)]
enum Ask {
    /// By name.
    Find(usize, usize),
    /// By number, as whoever looked it up at the server before.
    Number(usize, usize),
    List(usize),
    /// As the thread that reads them while nobody waits.
    ReadOn,
    /// A name is given to a namespace that a key has.
    Mkdir(usize, usize),
    /// A name is given to a key that a namespace with keys had.
    Reuse,
    /// A namespace with files in it is removed.
    Rmdir,
    /// A key that nobody uses is opened.
    Open(usize),
}

fn ask() -> impl Strategy<Value = Ask> {
    let (dir, key) = (0..DIRS.len(), 1..KEYS);
    prop_oneof![
        4 => (dir.clone(), key.clone()).prop_map(|(dir, key)| Ask::Find(dir, key)),
        4 => (dir.clone(), key.clone()).prop_map(|(dir, key)| Ask::Number(dir, key)),
        1 => dir.clone().prop_map(Ask::List),
        2 => Just(Ask::ReadOn),
        1 => (0..3usize, key).prop_map(|(dir, key)| Ask::Mkdir(dir, key)),
        1 => Just(Ask::Reuse),
        1 => Just(Ask::Rmdir),
        1 => (0..3usize).prop_map(Ask::Open),
    ]
}

/// What is shown of a key, if anything.
type Shown = Option<(String, String, u32)>;

/// What was there before: keys by place, with their number and all that is shown of them.
struct Before {
    keys: BTreeMap<(usize, usize), (KeyId, Shown)>,
    listings: Vec<Listing>,
    opened: BTreeMap<usize, KeyId>,
}

/// Told at once, or with the next flush.
fn told(act: impl FnOnce(Done)) -> Option<Error> {
    let said = Arc::new(Mutex::new(None));
    let saying = Arc::clone(&said);
    act(Box::new(move |told| *saying.lock() = told.err()));
    said.lock().take()
}

fn put(rig: &Rig, before: &mut Before, ask: Ask) -> Result<(), TestCaseError> {
    let (engine, now, who) = (&rig.engine, moment(NOW_NS), Credentials::default());
    match ask {
        Ask::Find(dir, key) => {
            prop_assert_eq!(engine.find(&path(dir, key)), Ok(Some(before.keys[&(dir, key)].0)));
        }
        Ask::Number(dir, key) => {
            let (id, as_before) = &before.keys[&(dir, key)];
            prop_assert_eq!(&shown(rig, *id), as_before);
        }
        Ask::List(dir) => {
            // Those that nobody uses are listed only once they are opened again.
            let known = |nodes: Vec<Node>| nodes.into_iter().filter(|node| !is_opened(before, *node)).collect();
            let (all, files) = listing(rig, dir);
            prop_assert_eq!(&(known(all), files), &before.listings[dir]);
        }
        Ask::ReadOn => drop(engine.read_on().expect("keys can be read")),
        Ask::Mkdir(dir, key) => {
            let (parent, name) = (dir_id(rig, dir), format!("k{key}"));
            let error = told(|done| engine.mkdir(parent, name.as_bytes(), 0o777, &root_asks(&who, now), done));
            prop_assert_eq!(error, Some(Error::Exists));
        }
        Ask::Reuse => {
            let refused = engine.open_name(NamespaceId::ROOT, b"gone", now);
            prop_assert_eq!(refused, Err(Error::Exists));
        }
        Ask::Rmdir => {
            let error = told(|done| engine.rmdir(NamespaceId::ROOT, b"a", &root_asks(&who, now), done));
            prop_assert_eq!(error, Some(Error::NotEmpty));
        }
        Ask::Open(dir) => {
            let name = format!("k{UNUSED}");
            let id = engine.open_name(dir_id(rig, dir), name.as_bytes(), now).expect("a key");
            let given = *before.opened.entry(dir).or_insert(id);
            prop_assert_eq!(id, given, "it has one number");
            prop_assert!(before.keys.values().all(|(known, _)| *known < id), "and a new one");
        }
    }
    Ok(())
}

fn is_opened(before: &Before, node: Node) -> bool {
    before.opened.values().any(|id| Node::Key(*id) == node)
}

#[test]
fn what_is_read_late_is_as_if_it_had_been_read_before() {
    check(40, (storage(), prop::collection::vec(ask(), 1..=40)), |(storage, asks)| {
        let now = moment(NOW_NS);
        let rig = Rig::on(storage, now);
        grow(&rig);
        // What is held is orphaned by this, and that is as it stays.
        let rig = rig.restart("boot-1", now);
        while rig.engine.read_on().expect("keys can be read") {}
        let places = (0..DIRS.len()).flat_map(|dir| (1..KEYS).map(move |key| (dir, key)));
        let of = |(dir, key)| {
            let id = rig.engine.find(&path(dir, key)).ok().flatten().expect("it was claimed");
            ((dir, key), (id, shown(&rig, id)))
        };
        let keys: BTreeMap<_, _> = places.map(of).collect();
        let listings = (0..DIRS.len()).map(|dir| listing(&rig, dir)).collect();
        let mut before = Before { keys, listings, opened: BTreeMap::new() };
        prop_assert_eq!(before.keys.len(), rig.engine.key_count().expect("keys can be read"));
        // Those that nobody uses are forgotten by this one again: that is not recorded.
        let rig = rig.restart("boot-1", now);
        for ask in &asks {
            put(&rig, &mut before, *ask)?;
            rig.engine.flush(now);
        }
        for dir in 0..DIRS.len() {
            put(&rig, &mut before, Ask::List(dir))?;
            for key in 1..KEYS {
                put(&rig, &mut before, Ask::Number(dir, key))?;
                put(&rig, &mut before, Ask::Find(dir, key))?;
            }
        }
        prop_assert_eq!(rig.engine.key_count(), Ok(before.keys.len() + before.opened.len()));
        prop_assert!(!rig.engine.read_on().expect("keys can be read"), "something is left");
        rig.engine.flush(now);
        prop_assert_eq!(rig.violations(), vec![]);
        Ok(())
    });
}
