//! The lease engine of leasefs: the rules, the registry and the results, knowing nothing of FUSE.
//!
//! | to find | look in |
//! |---|---|
//! | what a lease may do | [`machine`] |
//! | what is stored, and when it is durable | [`registry`] |
//! | drafts, and how one becomes a result | [`results`] |
//! | who may claim where | [`namespaces`] |
//! | the facade that owns the lock | [`engine`] |
//! | copies of a state directory | [`backup`] |
//! | using a mounted tree from Rust | [`client`] |
//!
//! Time is passed in everywhere ([`Now`]); nothing here but [`client`] reads a clock.

pub mod agent;
pub mod backup;
pub mod batch;
pub mod client;
pub mod engine;
pub mod error;
pub mod events;
pub mod ids;
pub mod key;
pub mod machine;
pub mod metrics;
pub mod namespaces;
pub mod probe;
pub mod registry;
pub mod results;
pub mod time;
pub mod ttl;
pub mod verify;
pub mod view;

pub use engine::{Config, Engine};
pub use error::Error;
pub use ids::{Epoch, Handle, KeyId, NamespaceId, Owner, RequestId, WaiterId};
pub use key::Key;
pub use time::Now;
pub use ttl::Ttl;
