//! The directories below `claims/`: their attributes, what is in them, and who may claim there (§2, §4).
//!
//! A removed namespace keeps its number and its children, so that its keys go on with their epochs when it is made
//! again. Children are listed by a cookie that never changes, so that a listing survives changes while it is read.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use crate::error::Error;
use crate::ids::{KeyId, NamespaceId, RequestId};
use crate::key;
use crate::registry::NamespaceRow;
use crate::ttl::Ttl;

/// What a name in a namespace stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Node {
    /// A namespace, present or removed.
    Namespace(NamespaceId),
    /// A key that was opened or claimed once.
    Key(KeyId),
}

impl Node {
    /// Its place in listings: above 0, the same for ever, higher for what came later of the same kind.
    pub fn cookie(self) -> u64 {
        match self {
            Node::Namespace(id) => id.0 * 2,
            Node::Key(id) => id.0 * 2 + 1,
        }
    }
}

/// Who asks, as far as permissions go.
#[derive(Clone, Debug, Default)]
pub struct Credentials {
    /// Filesystem uid.
    pub uid: u32,
    /// Filesystem gid.
    pub gid: u32,
    /// Supplementary groups, where they had to be looked up.
    pub groups: Vec<u32>,
}

/// A namespace and its children.
#[derive(Debug)]
pub struct Namespace {
    /// Its attributes as they are stored.
    pub row: NamespaceRow,
    /// The namespace it is in; none for the root.
    pub parent: Option<NamespaceId>,
    /// By a hash that is safe against names chosen for it, unlike that of our own numbers elsewhere.
    children: HashMap<Box<str>, Node>,
    order: BTreeMap<u64, Node>,
    files: BTreeSet<KeyId>,
}

impl Namespace {
    /// Its name in its parent.
    pub fn name(&self) -> &str {
        self.row.path.rsplit('/').next().unwrap_or_default()
    }

    /// Whether the permission bits let the caller do all of `want` (`rwx` as 4, 2, 1). Root may always.
    pub fn allows(&self, who: &Credentials, want: u32) -> bool {
        let shift = if who.uid == self.row.uid {
            6
        } else if who.gid == self.row.gid || who.groups.contains(&self.row.gid) {
            3
        } else {
            0
        };
        who.uid == 0 || (self.row.mode >> shift) & want == want
    }

    /// Whether the answer of [`Namespace::allows`] could depend on the supplementary groups.
    pub fn groups_matter(&self, who: &Credentials) -> bool {
        let plain = who.uid == 0 || who.uid == self.row.uid || who.gid == self.row.gid;
        !plain && (self.row.mode >> 3) & 7 != self.row.mode & 7
    }
}

/// The whole tree of namespaces.
#[derive(Debug, Default)]
pub struct Namespaces {
    all: foldhash::HashMap<NamespaceId, Namespace>,
    last: u64,
}

impl Namespaces {
    /// Builds the tree from the registry. Where there is no root yet, `root` is it.
    pub fn load(mut rows: Vec<NamespaceRow>, root: NamespaceRow) -> Namespaces {
        let mut tree = Namespaces::default();
        if !rows.iter().any(|row| row.id == NamespaceId::ROOT) {
            rows.push(root);
        }
        // A parent's path is shorter than its children's.
        rows.sort_by_key(|row| row.path.len());
        for row in rows {
            let parent = (row.id != NamespaceId::ROOT).then(|| {
                let above = row.path.rsplit_once('/').map_or("", |(above, _)| above);
                tree.find(above).unwrap_or(NamespaceId::ROOT)
            });
            tree.put(row, parent);
        }
        tree
    }

    fn put(&mut self, row: NamespaceRow, parent: Option<NamespaceId>) {
        let id = row.id;
        self.last = self.last.max(id.0);
        let namespace =
            Namespace { row, parent, children: HashMap::new(), order: BTreeMap::new(), files: BTreeSet::new() };
        if let Some(parent) = parent {
            self.link(parent, namespace.name().into(), Node::Namespace(id));
        }
        self.all.insert(id, namespace);
    }

    /// Enters a child under its name.
    pub fn link(&mut self, parent: NamespaceId, name: Box<str>, node: Node) {
        if let Some(parent) = self.all.get_mut(&parent) {
            parent.children.insert(name, node);
            parent.order.insert(node.cookie(), node);
        }
    }

    /// Takes a child out again that was never told to anybody.
    pub fn unlink(&mut self, parent: NamespaceId, name: &str, node: Node) {
        if let Some(parent) = self.all.get_mut(&parent) {
            parent.children.remove(name);
            parent.order.remove(&node.cookie());
        }
    }

    /// A namespace, present or removed.
    pub fn get(&self, id: NamespaceId) -> Option<&Namespace> {
        self.all.get(&id)
    }

    /// The number of the namespace with this path, present or removed.
    pub fn find(&self, path: &str) -> Option<NamespaceId> {
        let mut id = NamespaceId::ROOT;
        self.all.get(&id)?;
        for name in path.split('/').filter(|name| !name.is_empty()) {
            match self.child(id, name) {
                Some(Node::Namespace(below)) => id = below,
                _ => return None,
            }
        }
        Some(id)
    }

    /// Whether the permission bits let the caller list the namespace with this path.
    pub fn may_see(&self, who: &Credentials, path: &str) -> bool {
        const READ_AND_SEARCH: u32 = 5;
        const SEARCH: u32 = 1;
        let Some(last) = self.find(path).and_then(|id| self.all.get(&id)) else { return false };
        let mut above = last.parent.and_then(|id| self.all.get(&id));
        while let Some(namespace) = above {
            if !namespace.allows(who, SEARCH) {
                return false;
            }
            above = namespace.parent.and_then(|id| self.all.get(&id));
        }
        last.allows(who, READ_AND_SEARCH)
    }

    /// What a name stands for, removed namespaces included.
    pub fn child(&self, parent: NamespaceId, name: &str) -> Option<Node> {
        self.all.get(&parent)?.children.get(name).copied()
    }

    /// The present namespaces and all keys below `parent`, in order of their cookies, after `after`.
    pub fn list(&self, parent: NamespaceId, after: u64) -> impl Iterator<Item = Node> + '_ {
        let children = self.all.get(&parent).map(|parent| parent.order.range(after + 1..));
        children.into_iter().flatten().map(|(_, node)| *node).filter(|node| match node {
            Node::Namespace(id) => self.all.get(id).is_some_and(|namespace| namespace.row.present),
            Node::Key(_) => true,
        })
    }

    /// The present namespaces and the keys that have a file in `claims/`, in order of their cookies, after `after`.
    pub fn list_files(&self, parent: NamespaceId, after: u64) -> impl Iterator<Item = Node> + '_ {
        let namespace = self.all.get(&parent);
        let files = namespace.into_iter().flat_map(move |namespace| namespace.files.range(KeyId(after / 2)..));
        let mut files = files.copied().map(Node::Key).filter(move |node| node.cookie() > after).peekable();
        let below = namespace.into_iter().flat_map(move |namespace| namespace.order.range(after + 1..));
        let is_present = |id: &NamespaceId| self.all.get(id).is_some_and(|namespace| namespace.row.present);
        let below = below.map(|(_, node)| *node);
        let mut below = below.filter(move |node| matches!(node, Node::Namespace(id) if is_present(id))).peekable();
        // Nothing more than is taken: whoever lists very many takes a piece at a time.
        std::iter::from_fn(move || match (files.peek(), below.peek()) {
            (Some(file), Some(namespace)) if file.cookie() < namespace.cookie() => files.next(),
            (Some(_), None) => files.next(),
            _ => below.next(),
        })
    }

    /// Notes whether a key has a file in `claims/`.
    pub fn set_file(&mut self, parent: NamespaceId, key: KeyId, exists: bool) {
        if let Some(parent) = self.all.get_mut(&parent) {
            if exists {
                parent.files.insert(key);
            } else {
                parent.files.remove(&key);
            }
        }
    }

    /// The TTL new leases get in a namespace: its own, or that of the nearest one above that sets one.
    pub fn ttl(&self, id: NamespaceId) -> Option<Ttl> {
        let mut at = self.all.get(&id);
        while let Some(namespace) = at {
            if let Some(ms) = namespace.row.ttl_ms {
                return Ttl::from_millis(ms).ok();
            }
            at = namespace.parent.and_then(|parent| self.all.get(&parent));
        }
        None
    }

    /// Works out the row of a namespace to be made; [`Namespaces::set`] makes it so.
    ///
    /// # Errors
    /// [`Error::Exists`] where the name is a namespace already, [`Error::BadKey`] for a name or path §1 rules out.
    pub fn plan_mkdir(
        &self,
        parent: NamespaceId,
        name: &[u8],
        mode: u32,
        who: &Credentials,
        now_ns: i64,
    ) -> Result<NamespaceRow, Error> {
        const SETGID: u32 = 0o2000;
        let above = self.all.get(&parent).ok_or(Error::NotFound)?;
        let path = key::Key::join(&above.row.path, name)?;
        let (_, name) = path.split();
        let old = match self.child(parent, name) {
            Some(Node::Namespace(id)) if self.all.get(&id).is_some_and(|namespace| !namespace.row.present) => Some(id),
            Some(_) => return Err(Error::Exists),
            None => None,
        };
        // As on any Linux filesystem: below a setgid directory its group is inherited, and the bit with it.
        let inherits = above.row.mode & SETGID != 0;
        Ok(NamespaceRow {
            id: old.unwrap_or(NamespaceId(self.last + 1)),
            path: path.as_str().to_owned(),
            present: true,
            made: old.and_then(|id| self.all.get(&id)).map_or(0, |before| before.row.made) + 1,
            mode: if inherits { mode | SETGID } else { mode } & 0o7777,
            uid: who.uid,
            gid: if inherits { above.row.gid } else { who.gid },
            atime_ns: now_ns,
            mtime_ns: now_ns,
            ctime_ns: now_ns,
            ttl_ms: None,
            request: RequestId(0),
        })
    }

    /// Whether a namespace may be removed: no present namespace and no key's file in it.
    pub fn is_empty(&self, id: NamespaceId) -> bool {
        self.list_files(id, 0).next().is_none()
    }

    /// Whether anything was ever made in it.
    pub fn has_children(&self, id: NamespaceId) -> bool {
        self.all.get(&id).is_some_and(|namespace| !namespace.children.is_empty())
    }

    /// Puts a row in force and gives the one before it, for undoing.
    pub fn set(&mut self, row: NamespaceRow) -> Option<NamespaceRow> {
        if let Some(namespace) = self.all.get_mut(&row.id) {
            return Some(std::mem::replace(&mut namespace.row, row));
        }
        let above = row.path.rsplit_once('/').map_or("", |(above, _)| above);
        let parent = self.find(above);
        self.put(row, parent);
        None
    }

    /// Takes a namespace out again whose making was not recorded.
    pub fn remove(&mut self, id: NamespaceId) {
        if let Some(namespace) = self.all.remove(&id)
            && let Some(parent) = namespace.parent
        {
            self.unlink(parent, namespace.name(), Node::Namespace(id));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(id: u64, path: &str, mode: u32) -> NamespaceRow {
        NamespaceRow { id: NamespaceId(id), path: path.into(), ..NamespaceRow::root(mode, 10, 20, 0) }
    }

    #[test]
    fn permission_is_by_the_first_class_that_fits() {
        let tree = Namespaces::load(vec![row(2, "a", 0o075)], row(1, "", 0o777));
        let namespace = tree.get(NamespaceId(2)).unwrap();
        let who = |uid, gid, groups: &[u32]| Credentials { uid, gid, groups: groups.to_vec() };
        assert!(!namespace.allows(&who(10, 20, &[]), 3), "the owner's bits rule the owner out");
        assert!(namespace.allows(&who(11, 20, &[]), 3));
        assert!(namespace.allows(&who(11, 21, &[20]), 3));
        assert!(!namespace.allows(&who(11, 21, &[]), 3));
        assert!(namespace.allows(&who(0, 0, &[]), 3));
        assert!(namespace.groups_matter(&who(11, 21, &[])));
        assert!(!namespace.groups_matter(&who(10, 21, &[])));
    }

    #[test]
    fn the_nearest_ttl_wins() {
        let mut tree = Namespaces::load(vec![row(2, "a", 0o777), row(3, "a/b", 0o777)], row(1, "", 0o777));
        assert_eq!(tree.ttl(NamespaceId(3)), None);
        tree.set(NamespaceRow { ttl_ms: Some(1_000), ..row(1, "", 0o777) });
        tree.set(NamespaceRow { ttl_ms: Some(2_000), ..row(2, "a", 0o777) });
        assert_eq!(tree.ttl(NamespaceId(3)), Ttl::from_millis(2_000).ok());
        assert_eq!(tree.ttl(NamespaceId(1)), Ttl::from_millis(1_000).ok());
    }

    #[test]
    fn a_removed_namespace_comes_back_with_its_number() {
        let mut tree = Namespaces::load(vec![row(2, "a", 0o777)], row(1, "", 0o777));
        tree.set(NamespaceRow { present: false, ..row(2, "a", 0o777) });
        assert_eq!(tree.list(NamespaceId::ROOT, 0).count(), 0);
        let again = tree.plan_mkdir(NamespaceId::ROOT, b"a", 0o700, &Credentials::default(), 5).unwrap();
        assert_eq!((again.id, again.mode), (NamespaceId(2), 0o700));
    }
}
