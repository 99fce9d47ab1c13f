//! A newtype for every number, so that none can stand where another is meant.

use std::fmt;

macro_rules! number {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(
            Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize,
        )]
        pub struct $name(pub $inner);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
    };
}

number!(
    /// The number of an attempt of a key: 1..n without gap or repeat, for ever; 0 before the first.
    ///
    /// A fencing token: whatever a later attempt touches can refuse an earlier one by comparing.
    Epoch(u64)
);
number!(
    /// A key's number in the registry. Never used again for another key.
    KeyId(u64)
);
number!(
    /// A namespace's number in the registry. The root of the tree is [`NamespaceId::ROOT`].
    NamespaceId(u64)
);
number!(
    /// An open file description on the mount. Unique over all servers that ever ran on a state directory.
    Handle(u64)
);
number!(
    /// The kernel's `lock_owner`: one per open file for `flock` and OFD locks, one per process for POSIX locks.
    Owner(u64)
);
number!(
    /// A lock request that waits in line; unique within one server.
    WaiterId(u64)
);
number!(
    /// A request of a client, by which it is recognised when it comes again to a server that was replaced in between.
    /// Unique over all connections of a state directory; 0 is none.
    RequestId(u64)
);

impl Epoch {
    /// The highest epoch the registry has room for.
    pub const MAX: Epoch = Epoch(i64::MAX as u64);
    /// The highest epoch whose result an inode number has room for. A mutex goes on beyond it; results do not.
    pub const MAX_WITH_RESULT: Epoch = Epoch(u32::MAX as u64);

    /// The epoch of the next attempt.
    #[must_use]
    pub fn next(self) -> Epoch {
        Epoch(self.0 + 1)
    }
}

impl KeyId {
    /// The highest key number an inode number has room for.
    pub const MAX: KeyId = KeyId((1 << 28) - 1);
}

impl NamespaceId {
    /// `claims/` itself.
    pub const ROOT: NamespaceId = NamespaceId(1);
}
