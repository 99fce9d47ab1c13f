//! Inode numbers: derived from registry numbers, so that they mean the same to a later server.
//!
//! The top four bits say what kind of node it is, the rest which: a namespace's or key's number, or for a result the
//! key's number and the epoch.

use fuser::INodeNo;
use leasefs::{Epoch, KeyId, NamespaceId};

/// A subtree that mirrors the namespaces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tree {
    /// `claims/`
    Claims,
    /// `results/`
    Results,
    /// `status/`
    Status,
}

/// A file of `.leasefs/`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Control {
    /// Program and protocol version.
    Version,
    /// The mount's settings.
    Config,
    /// Counters.
    Metrics,
    /// What happens.
    Events,
    /// Orders, as `control`.
    Orders,
}

impl Control {
    /// Every file, in the order they are listed.
    pub const ALL: [Control; 5] =
        [Control::Version, Control::Config, Control::Metrics, Control::Events, Control::Orders];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Control::Version => "version",
            Control::Config => "config",
            Control::Metrics => "metrics",
            Control::Events => "events",
            Control::Orders => "control",
        }
    }
}

/// What an inode number stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Node {
    /// The mountpoint.
    Root,
    /// `.leasefs/`
    ControlDir,
    /// A file in it.
    Control(Control),
    /// A namespace in one of the subtrees.
    Namespace(Tree, NamespaceId),
    /// `claims/KEY`
    Claim(KeyId),
    /// `status/KEY`
    Status(KeyId),
    /// `results/KEY/`
    ResultDir(KeyId),
    /// `results/KEY/latest`
    Latest(KeyId),
    /// `results/KEY/EPOCH`
    Result(KeyId, Epoch),
}

const KIND_SHIFT: u32 = 60;
const EPOCH_BITS: u32 = 32;
const NUMBER: u64 = (1 << KIND_SHIFT) - 1;

impl Node {
    /// Its inode number.
    pub fn ino(self) -> INodeNo {
        let (kind, number) = match self {
            Node::Root => (0, 1),
            Node::ControlDir => (0, 2),
            Node::Control(file) => (0, 3 + file as u64),
            Node::Namespace(Tree::Claims, id) => (1, id.0),
            Node::Namespace(Tree::Results, id) => (2, id.0),
            Node::Namespace(Tree::Status, id) => (3, id.0),
            Node::Claim(id) => (4, id.0),
            Node::Status(id) => (5, id.0),
            Node::ResultDir(id) => (6, id.0),
            Node::Latest(id) => (7, id.0),
            Node::Result(id, epoch) => (8, id.0 << EPOCH_BITS | epoch.0),
        };
        INodeNo(kind << KIND_SHIFT | number)
    }

    /// What an inode number stands for; nothing for one that was never given out.
    pub fn of(ino: INodeNo) -> Option<Node> {
        let number = ino.0 & NUMBER;
        Some(match ino.0 >> KIND_SHIFT {
            0 if number == 1 => Node::Root,
            0 if number == 2 => Node::ControlDir,
            0 => Node::Control(*Control::ALL.get(usize::try_from(number).ok()?.checked_sub(3)?)?),
            1 => Node::Namespace(Tree::Claims, NamespaceId(number)),
            2 => Node::Namespace(Tree::Results, NamespaceId(number)),
            3 => Node::Namespace(Tree::Status, NamespaceId(number)),
            4 => Node::Claim(KeyId(number)),
            5 => Node::Status(KeyId(number)),
            6 => Node::ResultDir(KeyId(number)),
            7 => Node::Latest(KeyId(number)),
            8 => Node::Result(KeyId(number >> EPOCH_BITS), Epoch(number & u64::from(u32::MAX))),
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_stands_for_one_node() {
        let mut nodes = vec![Node::Root, Node::ControlDir];
        nodes.extend(Control::ALL.map(Node::Control));
        for id in [1, 77, KeyId::MAX.0] {
            for tree in [Tree::Claims, Tree::Results, Tree::Status] {
                nodes.push(Node::Namespace(tree, NamespaceId(id)));
            }
            let key = KeyId(id);
            nodes.extend([Node::Claim(key), Node::Status(key), Node::ResultDir(key), Node::Latest(key)]);
            nodes.extend([Epoch(1), Epoch::MAX_WITH_RESULT].map(|epoch| Node::Result(key, epoch)));
        }
        for (i, node) in nodes.iter().enumerate() {
            assert_eq!(Node::of(node.ino()), Some(*node));
            assert!(nodes[..i].iter().all(|other| other.ino() != node.ino()), "{node:?}");
        }
    }
}
