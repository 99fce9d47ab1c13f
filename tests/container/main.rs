//! Containers: as clients with a bind mount of the tree, with user ids of their own, and around the server itself.
#[path = "../common/mod.rs"]
mod common;

mod contend;
mod ids;
mod keeps;
mod rig;
mod server;
