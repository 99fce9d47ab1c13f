//! Keys that were not read from the registry yet.
//!
//! A server that takes over answers at once, however many keys there are: before that it reads only those that are in
//! use. Another is read when somebody asks for it, and besides bit by bit ([`Engine::read_on`]), until none is left.
//! Until then
//! - a key is known wholly or not at all: nothing is decided, or shown, of one that was not read;
//! - a key is read once: of one that is known, or was forgotten since, the registry may give what was before that.
//!
//! It must not know what a key's state means.

use std::collections::HashSet;

use parking_lot::MutexGuard;

use super::survivors::Left;
use super::{Engine, Inner};
use crate::error::Error;
use crate::ids::{KeyId, NamespaceId};
use crate::key::{self, Key};
use crate::namespaces::Node;
use crate::registry::{LoadedKey, Read, Which};
use crate::time::Now;

/// How many keys are read at a time while nobody waits for them: a request may have to wait for these.
const AT_A_TIME: usize = 128;

/// What has to be known before something can be decided or shown.
#[derive(Clone, Copy)]
pub(super) enum Need<'a> {
    /// A key.
    Key(KeyId),
    /// What a name in a namespace stands for, and whether a removed namespace of that name had keys.
    Name(NamespaceId, &'a [u8]),
    /// All that is in the namespace of that name.
    Inside(NamespaceId, &'a [u8]),
    /// All that is in a namespace.
    Below(NamespaceId),
    /// Every key.
    All,
}

/// Where keys that are not known are read from.
pub(super) struct Unread {
    reader: Box<dyn Read>,
    /// Keys above this one are new.
    last: KeyId,
    /// Keys up to this one were read.
    read_to: KeyId,
    /// Keys that were forgotten since.
    forgotten: HashSet<KeyId>,
    /// Namespaces all of whose keys were read.
    below: HashSet<NamespaceId>,
    /// When the engine began.
    began: Now,
}

impl Unread {
    /// With keys up to `last`; none where there are none.
    pub(super) fn new(reader: Box<dyn Read>, last: KeyId, began: Now) -> Option<Unread> {
        let (forgotten, below) = (HashSet::new(), HashSet::new());
        (last > KeyId(0)).then_some(Unread { reader, last, read_to: KeyId(0), forgotten, below, began })
    }
}

impl Engine {
    /// The state, with all in it that is needed.
    pub(super) fn knowing(&self, need: Need<'_>) -> Result<MutexGuard<'_, Inner>, Error> {
        let mut inner = self.inner.lock();
        if inner.unread.is_some() {
            let read = inner.learn(need);
            // To forget a key that nobody uses is a write.
            self.publish_hints(&inner);
            read?;
        }
        Ok(inner)
    }

    /// Reads some more of the keys that nobody has asked for yet; to be called from a thread nobody waits for. True while
    /// there are more.
    ///
    /// # Errors
    /// [`Error::Storage`]; they are read when they are asked for.
    pub fn read_on(&self) -> Result<bool, Error> {
        let mut inner = self.inner.lock();
        let read = inner.read_on(AT_A_TIME);
        self.publish_hints(&inner);
        let more = inner.unread.is_some();
        // Whoever waits for the lock goes first, else this thread would have it all the time.
        MutexGuard::unlock_fair(inner);
        read.map(|()| more)
    }
}

impl Inner {
    /// Sees to it that what is needed is known.
    fn learn(&mut self, need: Need<'_>) -> Result<(), Error> {
        let Some(unread) = &self.unread else { return Ok(()) };
        match need {
            Need::Key(id) => {
                let may_be = id > unread.read_to && id <= unread.last && !self.keys.contains_key(&id);
                if may_be { self.read(Which::Number(id)) } else { Ok(()) }
            }
            Need::Name(parent, name) => {
                let Ok(part) = key::part(name) else { return Ok(()) };
                let node = self.namespaces.child(parent, part);
                // A key may have the name of a removed namespace that never had any.
                if node.is_some_and(|node| self.is_present(node)) {
                    return Ok(());
                }
                if let Some(Node::Namespace(id)) = node {
                    self.learn(Need::Below(id))?;
                }
                let path = self.namespaces.get(parent).and_then(|above| Key::join(&above.row.path, name).ok());
                path.map_or(Ok(()), |path| self.read(Which::Named(path.as_str())))
            }
            Need::Inside(parent, name) => {
                match key::part(name).ok().and_then(|name| self.namespaces.child(parent, name)) {
                    Some(Node::Namespace(id)) => self.learn(Need::Below(id)),
                    _ => self.learn(Need::Name(parent, name)),
                }
            }
            Need::Below(NamespaceId::ROOT) | Need::All => {
                while self.unread.is_some() {
                    self.read_on(usize::from(u16::MAX))?;
                }
                Ok(())
            }
            Need::Below(id) => {
                let known = unread.below.contains(&id);
                let Some(namespace) = self.namespaces.get(id).filter(|_| !known) else { return Ok(()) };
                let path = namespace.row.path.clone();
                self.read(Which::Below(&path))?;
                self.unread.as_mut().map(|unread| unread.below.insert(id));
                Ok(())
            }
        }
    }

    fn read_on(&mut self, limit: usize) -> Result<(), Error> {
        let Some(unread) = &mut self.unread else { return Ok(()) };
        let found = unread.reader.keys(Which::After(unread.read_to, limit))?;
        let read_to = found.last().map(|known| KeyId(known.row.id));
        let is_all = found.len() < limit || read_to >= Some(unread.last);
        self.take_in(found);
        if is_all {
            self.unread = None;
        } else if let (Some(unread), Some(read_to)) = (&mut self.unread, read_to) {
            unread.read_to = read_to;
        }
        Ok(())
    }

    fn read(&mut self, which: Which<'_>) -> Result<(), Error> {
        let Some(unread) = &mut self.unread else { return Ok(()) };
        let found = unread.reader.keys(which)?;
        self.take_in(found);
        Ok(())
    }

    fn take_in(&mut self, found: Vec<LoadedKey>) {
        for known in found {
            let Some(unread) = &self.unread else { return };
            let id = KeyId(known.row.id);
            if id <= unread.last && !unread.forgotten.contains(&id) && !self.keys.contains_key(&id) {
                let began = unread.began;
                self.admit(known, Left::default(), began);
            }
        }
    }

    /// Notes that a key is not to be read any more.
    pub(super) fn unlearn(&mut self, id: KeyId) {
        if let Some(unread) = &mut self.unread {
            unread.forgotten.insert(id);
        }
    }
}
