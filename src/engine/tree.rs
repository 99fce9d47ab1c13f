//! The engine's tree: which key or namespace a name stands for, and making, changing and removing namespaces.

use foldhash::HashMap;

use super::unread::Need;
use super::{Engine, Inner, KeyEntry};
use crate::batch::{Done, Settled};
use crate::error::Error;
use crate::ids::{KeyId, NamespaceId, RequestId};
use crate::key::Key;
use crate::machine::Reply;
use crate::namespaces::{Credentials, Namespaces, Node};
use crate::registry::NamespaceRow;
use crate::time::Now;

/// Who asks for a change of the tree.
pub struct Asked<'a> {
    /// Who.
    pub who: &'a Credentials,
    /// Recognises the request when it comes again.
    pub request: RequestId,
    /// When.
    pub now: Now,
}

impl Engine {
    /// What a name in a namespace stands for; removed namespaces stand for nothing.
    ///
    /// # Errors
    /// [`Error::BadKey`] for a name §1 rules out.
    pub fn child(&self, parent: NamespaceId, name: &[u8]) -> Result<Option<Node>, Error> {
        let name = crate::key::part(name)?;
        let inner = self.knowing(Need::Name(parent, name.as_bytes()))?;
        Ok(inner.namespaces.child(parent, name).filter(|node| inner.is_present(*node)))
    }

    /// The number of a key that is about to be opened, given one on the first call for it. Each call is matched by an
    /// [`Input::Close`] or by [`Engine::not_opened`].
    ///
    /// # Errors
    /// [`Error::Exists`] where the path is a namespace, [`Error::BadKey`] for a path §1 rules out.
    pub fn open_name(&self, parent: NamespaceId, name: &[u8], now: Now) -> Result<KeyId, Error> {
        let mut inner = self.knowing(Need::Name(parent, name))?;
        let id = inner.intern(parent, name, now)?;
        inner.opened(id);
        self.publish_hints(&inner);
        Ok(id)
    }

    /// As [`Engine::open_name`], for a key whose number is known.
    ///
    /// # Errors
    /// [`Error::NotFound`], [`Error::Storage`].
    pub fn open_key(&self, key: KeyId) -> Result<(), Error> {
        if self.knowing(Need::Key(key))?.opened(key) { Ok(()) } else { Err(Error::NotFound) }
    }

    /// Takes [`Engine::open_name`] back: the open was refused.
    pub fn not_opened(&self, key: KeyId, now: Now) {
        let mut inner = self.inner.lock();
        inner.closed(key, now);
        self.publish_hints(&inner);
    }

    /// The number of a key by its path.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub fn find(&self, key: &Key) -> Result<Option<KeyId>, Error> {
        let (above, name) = key.split();
        let Some(above) = self.look(|tree| tree.find(above)) else { return Ok(None) };
        match self.child(above, name.as_bytes())? {
            Some(Node::Key(id)) => Ok(Some(id)),
            Some(Node::Namespace(_)) | None => Ok(None),
        }
    }

    /// Looks at a key and the tree around it. None where there is no such key, and where it cannot be read.
    pub fn view<R>(&self, key: KeyId, look: impl FnOnce(&KeyEntry, &Namespaces) -> R) -> Option<R> {
        let inner = self.knowing(Need::Key(key)).ok()?;
        inner.keys.get(&key).map(|entry| look(entry, &inner.namespaces))
    }

    /// Looks at the tree of namespaces; which keys are in them is for [`Engine::look_into`].
    pub fn look<R>(&self, look: impl FnOnce(&Namespaces) -> R) -> R {
        look(&self.inner.lock().namespaces)
    }

    /// Looks at the keys in a namespace, by their number.
    ///
    /// # Errors
    /// [`Error::Storage`].
    pub fn look_into<R>(
        &self,
        namespace: NamespaceId,
        look: impl FnOnce(&Namespaces, &HashMap<KeyId, KeyEntry>) -> R,
    ) -> Result<R, Error> {
        let inner = self.knowing(Need::Below(namespace))?;
        Ok(look(&inner.namespaces, &inner.keys))
    }

    /// Calls `then` when everything decided so far is recorded; at once where nothing is outstanding.
    pub fn when_recorded(&self, then: Settled) {
        let mut inner = self.inner.lock();
        if inner.batch.is_empty() && inner.settled + 1 == inner.batch.number {
            drop(inner);
            return then();
        }
        inner.batch.urgent = true;
        inner.batch.settled.push(then);
        self.publish_hints(&inner);
    }

    /// Whether anybody asks for [`Engine::take_changed`]; until then nothing is kept for it.
    pub fn set_watched(&self, watched: bool) {
        let mut inner = self.inner.lock();
        inner.watched = watched;
        if !watched {
            inner.changed.clear();
        }
    }

    /// Calls `then` when everything decided about a key so far is recorded or taken back; at once if it is.
    pub fn when_settled(&self, key: KeyId, now: Now, then: Settled) {
        self.when_at(key, |entry| entry.unsettled, now, then);
    }

    /// As [`Engine::when_settled`], and what cannot be taken back, as the end of an attempt, is recorded too: for whoever
    /// is told how and when it ended. Should the server be killed before that is recorded, the next one finds the end anew.
    pub fn when_lasting(&self, key: KeyId, now: Now, then: Settled) {
        self.when_at(key, |entry| entry.changed, now, then);
    }

    fn when_at(&self, key: KeyId, newest: impl FnOnce(&KeyEntry) -> u64, now: Now, then: Settled) {
        let mut inner = self.inner.lock();
        if inner.keys.get(&key).map(newest).is_none_or(|batch| batch <= inner.settled) {
            drop(inner);
            return then();
        }
        inner.touch_batch(now);
        inner.batch.urgent = true;
        inner.batch.settled.push(then);
        self.publish_hints(&inner);
    }

    // ---- namespaces ---------------------------------------------------------------------------------------------

    /// Makes a namespace. `done` is told once it is recorded, or else
    /// [`Error::Exists`] where the name is taken, also by a key that ever was; [`Error::BadKey`].
    pub fn mkdir(&self, parent: NamespaceId, name: &[u8], mode: u32, asked: &Asked<'_>, done: Done) {
        let mut inner = match self.knowing(Need::Name(parent, name)) {
            Ok(inner) => inner,
            Err(error) => return done(Err(error)),
        };
        let now = asked.now;
        let planned = inner.namespaces.plan_mkdir(parent, name, mode, asked.who, now.wall_ms * 1_000_000);
        let row = match planned {
            Ok(row) => NamespaceRow { request: asked.request, ..row },
            Err(error) => {
                let made = inner.was_done_to(parent, name, true, asked.request);
                drop(inner);
                return done(if made { Ok(Reply::Done) } else { Err(error) });
            }
        };
        inner.set_namespace(row, now, done);
        inner.touch_mtime(parent, now);
        self.publish_hints(&inner);
    }

    /// Removes a namespace; its keys keep their epochs. `done` is told once it is recorded, or else
    /// [`Error::NotEmpty`] while a key in it is held or finished, or a namespace is in it; [`Error::NotPermitted`] for
    /// anybody but root and the owners of it and of the namespace above, once there were keys in it;
    /// [`Error::NotFound`].
    pub fn rmdir(&self, parent: NamespaceId, name: &[u8], asked: &Asked<'_>, done: Done) {
        let mut inner = match self.knowing(Need::Inside(parent, name)) {
            Ok(inner) => inner,
            Err(error) => return done(Err(error)),
        };
        match inner.plan_rmdir(parent, name, asked.who) {
            Ok(row) => {
                inner.removes = inner.batch.number;
                let row = NamespaceRow { present: false, ttl_ms: None, request: asked.request, ..row };
                inner.set_namespace(row, asked.now, done);
                inner.touch_mtime(parent, asked.now);
                self.publish_hints(&inner);
            }
            Err(error) => {
                let removed = inner.was_done_to(parent, name, false, asked.request);
                drop(inner);
                done(if removed { Ok(Reply::Done) } else { Err(error) });
            }
        }
    }

    /// Changes a namespace's attributes.
    ///
    /// # Errors
    /// [`Error::NotFound`].
    pub fn change_namespace(
        &self,
        id: NamespaceId,
        now: Now,
        change: impl FnOnce(&mut NamespaceRow),
        done: Done,
    ) -> Result<(), Error> {
        let mut inner = self.inner.lock();
        let mut row = inner.namespaces.get(id).map(|namespace| namespace.row.clone()).ok_or(Error::NotFound)?;
        change(&mut row);
        row.ctime_ns = now.wall_ms * 1_000_000;
        inner.set_namespace(row, now, done);
        self.publish_hints(&inner);
        Ok(())
    }
}

impl Inner {
    /// Whether this very request made, or removed, the namespace of that name: it comes again, unanswered.
    fn was_done_to(&self, parent: NamespaceId, name: &[u8], present: bool, request: RequestId) -> bool {
        let Ok(name) = crate::key::part(name) else { return false };
        let Some(Node::Namespace(id)) = self.namespaces.child(parent, name) else { return false };
        let row = self.namespaces.get(id).map(|namespace| &namespace.row);
        request != RequestId(0) && row.is_some_and(|row| row.present == present && row.request == request)
    }

    /// The row of a namespace that may be removed.
    fn plan_rmdir(&self, parent: NamespaceId, name: &[u8], who: &Credentials) -> Result<NamespaceRow, Error> {
        let Some(Node::Namespace(id)) = self.namespaces.child(parent, crate::key::part(name)?) else {
            return Err(Error::NotFound);
        };
        let busy = !self.namespaces.is_empty(id) || self.is_in_use(id);
        let row = self.namespaces.get(id).map(|namespace| namespace.row.clone()).ok_or(Error::NotFound)?;
        if !row.present {
            return Err(Error::NotFound);
        }
        if busy {
            return Err(Error::NotEmpty);
        }
        // Whoever makes it again owns it, with the results of the keys that were in it.
        let owner_above = self.namespaces.get(parent).map(|above| above.row.uid);
        let owns = who.uid == 0 || who.uid == row.uid || owner_above == Some(who.uid);
        if self.namespaces.has_children(id) && !owns {
            return Err(Error::NotPermitted);
        }
        Ok(row)
    }
}
