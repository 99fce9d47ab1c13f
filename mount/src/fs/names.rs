//! Names, attributes and listings of the whole tree, and the namespaces in it (§2).

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{
    Errno, FileAttr, FileType, Generation, INodeNo, ReplyAttr, ReplyDirectory, ReplyEmpty, ReplyEntry, TimeOrNow,
};
use leasefs::engine::{Asked, KeyEntry};
use leasefs::machine::State;
use leasefs::namespaces::{self, Namespaces};
use leasefs::registry::NamespaceRow;
use leasefs::{Epoch, Error, KeyId, NamespaceId, Now, view};

use super::{Caller, LeaseFs};
use crate::clock;
use crate::errno::errno;
use crate::ino::{Control, Node, Tree};

/// For what changes through this mount alone, and by requests that tell the kernel so.
pub const LONG: Duration = Duration::from_secs(3600);
/// For everything else: a key is never cached.
pub const NEVER: Duration = Duration::ZERO;

/// Listing offsets 1 and 2 are `.` and `..`; a child's is its cookie and this.
const FIRST_CHILD: u64 = 2;
/// Entries looked at for one listing request.
const CHUNK: usize = 1024;

/// A setattr request, decoded.
pub struct Change {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub atime: Option<TimeOrNow>,
    pub mtime: Option<TimeOrNow>,
    pub handle: Option<u64>,
}

impl LeaseFs {
    /// How long the kernel may keep a node's name and attributes. A namespace's mirrors under `results/` and `status/`
    /// change without the kernel knowing, so only its own directory may be kept.
    pub(super) fn ttl(node: Node) -> Duration {
        match node {
            Node::Root | Node::ControlDir | Node::Namespace(Tree::Claims, _) => LONG,
            _ => NEVER,
        }
    }

    pub(super) fn lookup_node(&self, parent: Node, name: &OsStr, now: Now) -> Result<Option<Node>, Error> {
        let bytes = name.as_bytes();
        match parent {
            Node::Root => Ok(match bytes {
                b"claims" => Some(Node::Namespace(Tree::Claims, NamespaceId::ROOT)),
                b"results" => Some(Node::Namespace(Tree::Results, NamespaceId::ROOT)),
                b"status" => Some(Node::Namespace(Tree::Status, NamespaceId::ROOT)),
                b".leasefs" => Some(Node::ControlDir),
                _ => None,
            }),
            Node::ControlDir => {
                Ok(Control::ALL.into_iter().find(|file| file.name().as_bytes() == bytes).map(Node::Control))
            }
            Node::Namespace(tree, id) => Ok(match self.engine.child(id, bytes)? {
                Some(namespaces::Node::Namespace(below)) => Some(Node::Namespace(tree, below)),
                Some(namespaces::Node::Key(key)) => {
                    self.expire(key, now);
                    let shown = self.engine.view(key, |entry, _| is_shown(tree, entry)) == Some(true);
                    shown.then_some(key_node(tree, key))
                }
                None => None,
            }),
            Node::ResultDir(key) if bytes == b"latest" => {
                let latest = self.engine.view(key, |entry, _| entry.state.latest_result).flatten();
                Ok(latest.map(|_| Node::Latest(key)))
            }
            Node::ResultDir(key) => match parse_epoch(bytes) {
                Some(epoch) => Ok(self.engine.result_of(key, epoch)?.map(|_| Node::Result(key, epoch))),
                None => Ok(None),
            },
            _ => Ok(None),
        }
    }

    pub(super) fn do_lookup(&self, req: &Caller, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let now = clock::now();
        let Some(parent) = Node::of(parent) else { return reply.error(Errno::ENOENT) };
        let key = match parent {
            Node::ResultDir(key) => Some(key),
            Node::Namespace(_, id) => match self.engine.child(id, name.as_bytes()) {
                Ok(Some(namespaces::Node::Key(key))) => Some(key),
                Ok(_) => None,
                Err(error) => return reply.error(errno(&error)),
            },
            _ => None,
        };
        // An expiry may hand the key to somebody in line, which has to be recorded before it is shown.
        if let Some(key) = key {
            self.expire(key, now);
            // The kernel creates only what is not there, and a file that is there it refuses without asking.
            if matches!(parent, Node::Namespace(Tree::Claims, _)) && self.creates_again(req, key) {
                return reply.error(Errno::ENOENT);
            }
        }
        let fs = self.clone();
        let name = name.to_owned();
        let answer = move || match fs.lookup_node(parent, &name, now) {
            Ok(Some(node)) => match fs.attributes(node, now) {
                Some(attr) => {
                    let keep = LeaseFs::ttl(node);
                    reply.entry_with_ttls(&keep, &keep, &attr, fs.generation(node));
                }
                None => reply.error(Errno::ENOENT),
            },
            Ok(None) => reply.error(Errno::ENOENT),
            Err(error) => reply.error(errno(&error)),
        };
        match key {
            // What is not recorded yet may still be taken back: nobody is shown it.
            Some(key) => self.engine.when_settled(key, now, Box::new(answer)),
            None => answer(),
        }
    }

    /// Tells a namespace from the one of the same number that was removed before: the kernel keeps that one's inode for
    /// as long as a file in it is open, and would take it for dead.
    fn generation(&self, node: Node) -> Generation {
        let Node::Namespace(_, id) = node else { return Generation(0) };
        Generation(self.engine.look(|tree| tree.get(id).map_or(0, |namespace| namespace.row.made)))
    }

    pub(super) fn do_getattr(&self, req: &Caller, ino: INodeNo, handle: Option<u64>, reply: ReplyAttr) {
        let now = clock::now();
        let Some(node) = Node::of(ino) else { return reply.error(Errno::ENOENT) };
        let attr = handle.and_then(|handle| self.draft_attributes(node, handle)).or_else(|| self.attributes(node, now));
        let attr = attr.or_else(|| {
            let Node::Result(key, epoch) = node else { return None };
            let caller = self.processes.identify(req.pid()).process;
            let draft = self.draft_of(key, epoch, caller).and_then(|draft| self.draft_attributes(node, draft));
            draft.or_else(|| self.pruned_attributes(node, key, epoch))
        });
        match attr {
            Some(attr) => reply.attr(&LeaseFs::ttl(node), &attr),
            None => reply.error(Errno::ESTALE),
        }
    }

    /// The attributes of a node; none where it is gone.
    pub(super) fn attributes(&self, node: Node, now: Now) -> Option<FileAttr> {
        let owner = self.settings.mount_owner;
        let fixed = |kind, perm| Some(attr(node, kind, perm, owner, self.root_gid(), 0, Times::default()));
        match node {
            Node::Root | Node::ControlDir => fixed(FileType::Directory, 0o755),
            Node::Control(Control::Orders) => fixed(FileType::RegularFile, 0o222),
            Node::Control(_) => fixed(FileType::RegularFile, 0o444),
            Node::Namespace(tree, id) => self.engine.look(|tree_of| {
                let row = &tree_of.get(id).filter(|namespace| namespace.row.present)?.row;
                let mode = if tree == Tree::Status { row.mode & !0o222 } else { row.mode };
                Some(directory(node, row, mode))
            }),
            Node::Claim(key) => {
                self.expire(key, now);
                self.engine.view(key, |entry, tree| claim_attributes(node, entry, tree, now))
            }
            Node::Status(key) => self.engine.view(key, |entry, tree| {
                let (mode, _, gid) = namespace_of(entry, tree);
                let size = view::status(entry, now).len() as u64;
                let times =
                    Times { mtime: at(entry.state.changed_at.wall_ms), ctime: at(entry.state.changed_at.wall_ms) };
                attr(node, FileType::RegularFile, mode & 0o444, entry.file_uid(tree), gid, size, times)
            }),
            Node::ResultDir(key) => self.engine.view(key, |entry, tree| {
                let row = &tree.get(entry.namespace)?.row;
                Some(directory(node, row, row.mode))
            })?,
            Node::Latest(key) => self.engine.view(key, |entry, tree| {
                let (_, uid, gid) = namespace_of(entry, tree);
                let (epoch, result) = entry.state.latest_result?;
                let times = Times { mtime: at(result.committed_ms), ctime: at(result.committed_ms) };
                let size = epoch.to_string().len() as u64;
                Some(attr(node, FileType::Symlink, 0o777, uid, gid, size, times))
            })?,
            Node::Result(key, epoch) => {
                let result = self.engine.result_of(key, epoch).ok()??;
                let (mode, _, gid) = self.engine.view(key, namespace_of)?;
                let times = Times { mtime: at(result.committed_ms), ctime: at(result.committed_ms) };
                Some(attr(node, FileType::RegularFile, mode & 0o444, result.uid, gid, result.size, times))
            }
        }
    }

    fn root_gid(&self) -> u32 {
        self.engine.look(|tree| tree.get(NamespaceId::ROOT).map_or(0, |root| root.row.gid))
    }

    pub(super) fn do_setattr(&self, req: &Caller, ino: INodeNo, change: Change, reply: ReplyAttr) {
        match Node::of(ino) {
            Some(Node::Namespace(Tree::Claims, id)) => self.change_namespace(id, change, reply),
            Some(node @ Node::Claim(key)) => self.change_claim(req, node, key, change, reply),
            Some(node @ Node::Result(..)) => self.change_result(node, change, reply),
            // `: > .leasefs/control` truncates before it writes.
            Some(node @ Node::Control(Control::Orders)) if change.size.is_some() => {
                self.do_getattr(req, node.ino(), None, reply);
            }
            Some(_) => reply.error(Errno::EPERM),
            None => reply.error(Errno::ENOENT),
        }
    }

    fn change_namespace(&self, id: NamespaceId, change: Change, reply: ReplyAttr) {
        let now = clock::now();
        let fs = self.clone();
        let node = Node::Namespace(Tree::Claims, id);
        let wall_ns = now.wall_ms * 1_000_000;
        let answer = move |result: Result<_, Error>| match result.map(|_| fs.attributes(node, now)) {
            Ok(Some(attr)) => reply.attr(&LONG, &attr),
            Ok(None) => reply.error(Errno::ENOENT),
            Err(error) => reply.error(errno(&error)),
        };
        let apply = |row: &mut NamespaceRow| {
            row.mode = change.mode.map_or(row.mode, |mode| mode & 0o7777);
            row.uid = change.uid.unwrap_or(row.uid);
            row.gid = change.gid.unwrap_or(row.gid);
            row.atime_ns = change.atime.map_or(row.atime_ns, |time| nanoseconds(time, wall_ns));
            row.mtime_ns = change.mtime.map_or(row.mtime_ns, |time| nanoseconds(time, wall_ns));
        };
        // It is there: the kernel has it open or looked it up, and a removed one keeps its row.
        let _ = self.engine.change_namespace(id, now, apply, Box::new(answer));
    }

    pub(super) fn do_mkdir(&self, req: &Caller, parent: INodeNo, name: &OsStr, mode: u32, reply: ReplyEntry) {
        let Some(Node::Namespace(Tree::Claims, parent)) = Node::of(parent) else { return reply.error(Errno::EPERM) };
        let now = clock::now();
        let fs = self.clone();
        let path = name.to_owned();
        let done = move |result: Result<_, Error>| {
            if let Err(error) = result {
                return reply.error(errno(&error));
            }
            let node = fs.lookup_node(Node::Namespace(Tree::Claims, parent), &path, now).ok().flatten();
            match node.and_then(|node| Some((node, fs.attributes(node, now)?))) {
                Some((node, attr)) => reply.entry(&LONG, &attr, fs.generation(node)),
                None => reply.error(Errno::EIO),
            }
        };
        let who = self.credentials(req);
        let asked = Asked { who: &who, request: req.request(), now };
        self.engine.mkdir(parent, name.as_bytes(), mode & 0o7777, &asked, Box::new(done));
    }

    pub(super) fn do_rmdir(&self, req: &Caller, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        let Some(Node::Namespace(Tree::Claims, parent)) = Node::of(parent) else { return reply.error(Errno::EPERM) };
        let who = self.credentials(req);
        let asked = Asked { who: &who, request: req.request(), now: clock::now() };
        self.engine.rmdir(parent, name.as_bytes(), &asked, Box::new(|result| finish(reply, result)));
    }

    pub(super) fn do_readdir(&self, ino: INodeNo, offset: u64, mut reply: ReplyDirectory) {
        let Some(node) = Node::of(ino) else { return reply.error(Errno::ENOENT) };
        let now = clock::now();
        if offset < 1 && reply.add(ino, 1, FileType::Directory, ".") {
            return reply.ok();
        }
        if offset < 2 && reply.add(Node::Root.ino(), 2, FileType::Directory, "..") {
            return reply.ok();
        }
        let after = offset.saturating_sub(FIRST_CHILD);
        let entries = match self.children(node, after, now) {
            Ok(entries) => entries,
            Err(error) => return reply.error(errno(&error)),
        };
        for (cookie, child, name) in entries {
            if reply.add(child.ino(), cookie + FIRST_CHILD, kind(child), name) {
                break;
            }
        }
        reply.ok();
    }

    /// Children with a cookie above `after`, in the order of their cookies, at most [`CHUNK`].
    fn children(&self, node: Node, after: u64, now: Now) -> Result<Vec<(u64, Node, String)>, Error> {
        let fixed = |nodes: &[(Node, &str)]| {
            let numbered = nodes.iter().zip(1..).filter(|(_, cookie)| *cookie > after);
            numbered.map(|((node, name), cookie)| (cookie, *node, (*name).to_owned())).collect()
        };
        Ok(match node {
            Node::Root => fixed(&[
                (Node::Namespace(Tree::Claims, NamespaceId::ROOT), "claims"),
                (Node::Namespace(Tree::Results, NamespaceId::ROOT), "results"),
                (Node::Namespace(Tree::Status, NamespaceId::ROOT), "status"),
                (Node::ControlDir, ".leasefs"),
            ]),
            Node::ControlDir => fixed(&Control::ALL.map(|file| (Node::Control(file), file.name()))),
            Node::Namespace(tree, id) => self.engine.look_into(id, |namespaces, keys| {
                let nodes: Box<dyn Iterator<Item = namespaces::Node>> = match tree {
                    Tree::Claims => Box::new(namespaces.list_files(id, after)),
                    _ => Box::new(namespaces.list(id, after)),
                };
                let shown = |node: namespaces::Node| match node {
                    namespaces::Node::Namespace(id) => {
                        let name = namespaces.get(id)?.name().to_owned();
                        Some((node.cookie(), Node::Namespace(tree, id), name))
                    }
                    namespaces::Node::Key(key) => {
                        let entry = keys.get(&key)?;
                        let due = entry.state.deadline_ns().is_some_and(|at| at <= now.boot_ns);
                        let there = is_shown(tree, entry) && !(tree == Tree::Claims && due);
                        there.then(|| (node.cookie(), key_node(tree, key), entry.key.split().1.to_owned()))
                    }
                };
                nodes.filter_map(shown).take(CHUNK).collect()
            })?,
            Node::ResultDir(key) => {
                let latest = self.engine.view(key, |entry, _| entry.state.latest_result).flatten();
                let link = latest.filter(|_| after == 0).map(|_| (1, Node::Latest(key), "latest".to_owned()));
                let epochs = self.engine.results_of(key, Epoch(after.saturating_sub(1)), CHUNK)?;
                let files = epochs.into_iter().map(|epoch| (epoch.0 + 1, Node::Result(key, epoch), epoch.to_string()));
                link.into_iter().chain(files).collect()
            }
            _ => return Err(Error::NotFound),
        })
    }
}

/// Answers a request that has nothing to say but whether it was done.
pub fn finish<T>(reply: ReplyEmpty, result: Result<T, Error>) {
    match result {
        Ok(_) => reply.ok(),
        Err(error) => reply.error(errno(&error)),
    }
}

/// An epoch as a file name: decimal, without a sign or leading zeros.
pub fn parse_epoch(name: &[u8]) -> Option<Epoch> {
    let text = std::str::from_utf8(name).ok()?;
    let number: u64 = text.parse().ok()?;
    (number.to_string() == text && number > 0 && number <= Epoch::MAX_WITH_RESULT.0).then_some(Epoch(number))
}

fn key_node(tree: Tree, key: KeyId) -> Node {
    match tree {
        Tree::Claims => Node::Claim(key),
        Tree::Results => Node::ResultDir(key),
        Tree::Status => Node::Status(key),
    }
}

/// Whether a key has an entry in a subtree: a file while it is held or finished, a status and results once it ever was.
fn is_shown(tree: Tree, entry: &KeyEntry) -> bool {
    let state = &entry.state;
    match tree {
        Tree::Claims => state.has_file(),
        Tree::Results => state.epoch > Epoch(0),
        Tree::Status => state.epoch > Epoch(0) || !state.sharers.is_empty() || !state.line.is_empty(),
    }
}

fn kind(node: Node) -> FileType {
    match node {
        Node::Root | Node::ControlDir | Node::Namespace(..) | Node::ResultDir(_) => FileType::Directory,
        Node::Latest(_) => FileType::Symlink,
        _ => FileType::RegularFile,
    }
}

/// Mode, owner and group of a key's namespace.
pub fn namespace_of(entry: &KeyEntry, tree: &Namespaces) -> (u32, u32, u32) {
    tree.get(entry.namespace).map_or((0, 0, 0), |namespace| (namespace.row.mode, namespace.row.uid, namespace.row.gid))
}

fn claim_attributes(node: Node, entry: &KeyEntry, tree: &Namespaces, now: Now) -> FileAttr {
    let (mode, _, gid) = namespace_of(entry, tree);
    let state = &entry.state;
    let renewed = state.attempt.as_ref().map_or(0, |attempt| attempt.renewed.wall_ms);
    let size = view::record_len(entry, now);
    let times = Times { mtime: at(renewed), ctime: at(state.changed_at.wall_ms) };
    let mut attr = attr(node, FileType::RegularFile, mode & 0o666, entry.file_uid(tree), gid, size, times);
    // A free key has no file (§2), so a handle of one is of a file that was unlinked: programs that unlink lock files
    // look for that after each lock. Shared locks make no file, but they are as good as any other.
    attr.nlink = u32::from(state.state(now) != State::Free);
    attr
}

fn directory(node: Node, row: &NamespaceRow, mode: u32) -> FileAttr {
    let times = Times { mtime: from_ns(row.mtime_ns), ctime: from_ns(row.ctime_ns) };
    let mut attr = attr(node, FileType::Directory, mode, row.uid, row.gid, 0, times);
    attr.atime = from_ns(row.atime_ns);
    attr
}

#[derive(Clone, Copy)]
pub struct Times {
    pub mtime: SystemTime,
    pub ctime: SystemTime,
}

impl Default for Times {
    fn default() -> Times {
        Times { mtime: UNIX_EPOCH, ctime: UNIX_EPOCH }
    }
}

pub fn attr(node: Node, kind: FileType, mode: u32, uid: u32, gid: u32, size: u64, times: Times) -> FileAttr {
    FileAttr {
        ino: node.ino(),
        size,
        blocks: size.div_ceil(512),
        atime: times.mtime,
        mtime: times.mtime,
        ctime: times.ctime,
        crtime: times.ctime,
        kind,
        perm: u16::try_from(mode & 0o7777).unwrap_or(0),
        nlink: if kind == FileType::Directory { 2 } else { 1 },
        uid,
        gid,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

/// Unix milliseconds as the system's time.
pub fn at(wall_ms: i64) -> SystemTime {
    from_ns(wall_ms.saturating_mul(1_000_000))
}

fn from_ns(ns: i64) -> SystemTime {
    if ns >= 0 {
        UNIX_EPOCH + Duration::from_nanos(ns.unsigned_abs())
    } else {
        UNIX_EPOCH - Duration::from_nanos(ns.unsigned_abs())
    }
}

fn nanoseconds(time: TimeOrNow, now_ns: i64) -> i64 {
    match time {
        TimeOrNow::Now => now_ns,
        TimeOrNow::SpecificTime(time) => match time.duration_since(UNIX_EPOCH) {
            Ok(after) => i64::try_from(after.as_nanos()).unwrap_or(i64::MAX),
            Err(before) => i64::try_from(before.duration().as_nanos()).map_or(i64::MIN, |ns| -ns),
        },
    }
}
