//! The extended attributes of `claims/`: `user.lease.ttl` and `user.lease.agent` (§4, §5).
//!
//! On a key's file they are those of the attempt that holds it, and end with it: set by its own user, refused (`ESTALE`)
//! where nobody holds it. A namespace has only the TTL, for the new leases below it.

use std::ffi::OsStr;

use fuser::{Errno, INodeNo, ReplyEmpty, ReplyXattr};
use leasefs::engine::KeyEntry;
use leasefs::machine::{Attempt, Input};
use leasefs::registry::NamespaceRow;
use leasefs::{KeyId, NamespaceId, Ttl, agent};

use super::names::finish;
use super::{Caller, LeaseFs};
use crate::clock;
use crate::ino::{Node, Tree};

/// An attribute, by its name.
#[derive(Clone, Copy)]
enum Attribute {
    Ttl,
    Agent,
}

impl Attribute {
    const ALL: [Attribute; 2] = [Attribute::Ttl, Attribute::Agent];

    fn name(self) -> &'static str {
        match self {
            Attribute::Ttl => "user.lease.ttl",
            Attribute::Agent => "user.lease.agent",
        }
    }

    fn named(name: &OsStr) -> Option<Attribute> {
        Attribute::ALL.into_iter().find(|attribute| name == attribute.name())
    }

    fn of(self, attempt: &Attempt) -> Option<String> {
        match self {
            Attribute::Ttl => Some(attempt.ttl.to_string()),
            Attribute::Agent => attempt.agent.as_deref().map(str::to_owned),
        }
    }
}

fn parse_ttl(value: &[u8]) -> Result<Ttl, Errno> {
    std::str::from_utf8(value).ok().and_then(|text| text.parse().ok()).ok_or(Errno::EINVAL)
}

impl LeaseFs {
    fn xattr(&self, ino: INodeNo, attribute: Attribute) -> Option<String> {
        match (Node::of(ino)?, attribute) {
            (Node::Namespace(Tree::Claims, id), Attribute::Ttl) => {
                let ms = self.engine.look(|tree| tree.get(id).and_then(|namespace| namespace.row.ttl_ms))?;
                Ttl::from_millis(ms).ok().map(|ttl| ttl.to_string())
            }
            (Node::Claim(key), _) => {
                let now = clock::now();
                let live =
                    |entry: &KeyEntry| attribute.of(entry.state.live().filter(|attempt| !attempt.is_due(now))?);
                self.engine.view(key, |entry, _| live(entry))?
            }
            _ => None,
        }
    }

    pub(super) fn get_xattr(&self, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        match Attribute::named(name).and_then(|attribute| self.xattr(ino, attribute)) {
            Some(value) => answer(value.as_bytes(), size, reply),
            None => reply.error(Errno::ENODATA),
        }
    }

    pub(super) fn list_xattrs(&self, ino: INodeNo, size: u32, reply: ReplyXattr) {
        let there = Attribute::ALL.into_iter().filter(|attribute| self.xattr(ino, *attribute).is_some());
        let names: Vec<u8> = there.flat_map(|attribute| [attribute.name().as_bytes(), b"\0"].concat()).collect();
        answer(&names, size, reply);
    }

    /// `XATTR_CREATE` is for an attribute that is not there, `XATTR_REPLACE` for one that is.
    pub(super) fn check_flags(&self, req: &Caller, ino: INodeNo, name: &OsStr, flags: i32) -> Result<(), Errno> {
        let Some(attribute) = Attribute::named(name).filter(|_| flags != 0 && !req.is_repeated) else { return Ok(()) };
        match (flags, self.xattr(ino, attribute).is_some()) {
            (libc::XATTR_CREATE, true) => Err(Errno::EEXIST),
            (libc::XATTR_REPLACE, false) => Err(Errno::ENODATA),
            _ => Ok(()),
        }
    }

    /// Sets an attribute; without a value, takes it away.
    pub(super) fn set_xattr(&self, req: &Caller, ino: INodeNo, name: &OsStr, value: Option<&[u8]>, reply: ReplyEmpty) {
        let attribute = Attribute::named(name);
        // Taken away already, where it comes again unanswered.
        let is_there = |attribute| req.is_repeated || self.xattr(ino, attribute).is_some();
        if value.is_none() && !attribute.is_some_and(is_there) {
            return reply.error(Errno::ENODATA);
        }
        let refused = match (attribute, Node::of(ino)) {
            (Some(Attribute::Ttl), Some(Node::Namespace(Tree::Claims, id))) => match value.map(parse_ttl).transpose() {
                Ok(ttl) => return self.set_namespace_ttl(req, id, ttl, reply),
                Err(refused) => refused,
            },
            (Some(attribute), Some(Node::Claim(key))) => match claim_input(attribute, req.uid(), value) {
                Ok(input) => return self.set_claim_xattr(key, input, reply),
                Err(refused) => refused,
            },
            _ => Errno::EOPNOTSUPP,
        };
        reply.error(refused);
    }

    fn set_namespace_ttl(&self, req: &Caller, id: NamespaceId, ttl: Option<Ttl>, reply: ReplyEmpty) {
        let owner = self.engine.look(|tree| tree.get(id).map(|namespace| namespace.row.uid));
        // A TTL decides over everybody's leases below, so it is the owner's, as the mode is.
        if req.uid() != 0 && owner != Some(req.uid()) {
            return reply.error(Errno::EPERM);
        }
        let change = |row: &mut NamespaceRow| row.ttl_ms = ttl.map(Ttl::as_millis);
        let done = Box::new(|result: Result<_, leasefs::Error>| finish(reply, result));
        // It is there: the kernel has just looked it up.
        let _ = self.engine.change_namespace(id, clock::now(), change, done);
    }

    fn set_claim_xattr(&self, key: KeyId, input: Input, reply: ReplyEmpty) {
        self.engine.submit(key, input, clock::now(), Box::new(|result| finish(reply, result)));
    }
}

/// What setting an attribute of a key's file asks for. Every lease has a TTL, so that cannot be taken away.
fn claim_input(attribute: Attribute, uid: u32, value: Option<&[u8]>) -> Result<Input, Errno> {
    match (attribute, value) {
        (Attribute::Ttl, None) => Err(Errno::EPERM),
        (Attribute::Ttl, Some(value)) => parse_ttl(value).map(|ttl| Input::SetTtl { uid, ttl }),
        (Attribute::Agent, value) => {
            let agent = value.map(agent::name).transpose().map_err(|_| Errno::EINVAL)?;
            Ok(Input::SetAgent { uid, agent })
        }
    }
}

/// Answers a request for an attribute's value or its size.
fn answer(value: &[u8], size: u32, reply: ReplyXattr) {
    match u32::try_from(value.len()) {
        Ok(length) if size == 0 => reply.size(length),
        Ok(length) if length <= size => reply.data(value),
        _ => reply.error(Errno::ERANGE),
    }
}
