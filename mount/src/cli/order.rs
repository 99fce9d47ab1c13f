//! Orders to the server: what is written to `.leasefs/control`, and how a refusal reads.
//!
//! Each order names key and epoch, so it hits the attempt that was looked at or none.

use std::fs::OpenOptions;
use std::io::{self, Write};

use leasefs::Key;
use serde::Serialize;

use super::tree::Tree;

/// What `.leasefs/control` reads.
#[derive(Serialize)]
struct Order<'a> {
    op: &'static str,
    key: &'a str,
    epoch: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'a str>,
}

/// Sends an order about one attempt.
///
/// # Errors
/// `ESTALE` when that attempt does not hold the key, `ENOENT` for a key that never was, `EACCES` when it is not the
/// caller's to give; those of writing.
pub fn send(tree: &Tree, op: &'static str, key: &Key, epoch: u64, reason: Option<&str>) -> io::Result<()> {
    send_text(tree, &serde_json::to_string(&Order { op, key: key.as_str(), epoch, reason })?)
}

/// Sends any order. One order is one write, and its return is the answer.
///
/// # Errors
/// Those of writing, by which the server refuses.
pub fn send_text(tree: &Tree, order: &str) -> io::Result<()> {
    let mut control = OpenOptions::new().write(true).open(tree.control("control"))?;
    match control.write(format!("{order}\n").as_bytes())? {
        length if length > order.len() => Ok(()),
        _ => Err(io::Error::new(io::ErrorKind::WriteZero, "the order was cut short")),
    }
}

/// What the key is now, for whoever named an attempt that does not hold it.
pub fn not_holding(tree: &Tree, key: &Key, epoch: u64) -> String {
    let now = match tree.status(key) {
        Ok(Some(status)) if status.is_open() => format!("it is {}, its newest epoch is {}", status.state, status.epoch),
        Ok(Some(status)) => format!("epoch {} is {}", status.epoch, status.in_the_way()),
        _ => "its holder is not known".to_owned(),
    };
    format!("{key}: epoch {epoch} does not hold it: {now}")
}
