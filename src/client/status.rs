//! What `status/KEY` says, typed (contract §2).

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::str::FromStr;

use serde::Deserialize;

/// One look at a key. Times are RFC 3339, in UTC with milliseconds. Fields may be added, so one that a server does not
/// tell is none, and one that is not known here is only in [`Status::json`].
#[derive(Clone, Debug, Deserialize)]
#[non_exhaustive]
pub struct Status {
    /// The line it was read from.
    #[serde(skip)]
    json: String,
    /// The key.
    pub key: String,
    /// `free`, `held`, `shared`, `reporting` (only a draft keeps it), `orphaned` (held, but its connection is gone) or
    /// `finished`.
    pub state: String,
    /// The newest epoch; 0 before the first.
    pub epoch: u64,
    /// Who holds it, or none.
    #[serde(default)]
    pub holder: Option<Holder>,
    /// Start of the attempt that holds it, else of the present state.
    #[serde(default)]
    pub since: Option<String>,
    /// Last renewal.
    #[serde(default)]
    pub renewed: Option<String>,
    /// End of the TTL.
    #[serde(default)]
    pub expires: Option<String>,
    /// Time to live in milliseconds.
    #[serde(default)]
    pub ttl_ms: Option<u64>,
    /// `create` or `lock`.
    #[serde(default)]
    pub via: Option<String>,
    /// Locks waiting in line.
    #[serde(default)]
    pub waiters: u64,
    /// The first hundred of them, in order.
    #[serde(default)]
    pub line: Vec<Waiting>,
    /// Holders of shared locks.
    #[serde(default)]
    pub sharers: u64,
    /// The first hundred of them.
    #[serde(default)]
    pub sharing: Vec<Sharing>,
    /// The holder's note.
    #[serde(default)]
    pub note: Option<String>,
    /// The agent that the holder works for.
    #[serde(default)]
    pub agent: Option<String>,
    /// How the newest attempt that has ended did: `released`, `completed`, `expired`, `evicted` or `lost`.
    #[serde(default)]
    pub outcome: Option<String>,
    /// Why it ended so, where that is known and the attempt is the newest.
    #[serde(default)]
    pub why: Option<String>,
    /// Why an orphaned key is not free yet.
    #[serde(default)]
    pub orphaned_why: Option<String>,
    /// The newest committed result.
    #[serde(default)]
    pub result: Option<Committed>,
}

/// The process that holds a key.
#[derive(Clone, Debug, Deserialize)]
#[non_exhaustive]
pub struct Holder {
    /// Process id, as the server sees it; 0 where it does not.
    pub pid: u32,
    /// When it started, in clock ticks since boot: tells it from a later process of the same number.
    #[serde(default)]
    pub start_time: u64,
    /// User id.
    pub uid: u32,
    /// Group id.
    pub gid: u32,
    /// Its command.
    #[serde(default)]
    pub command: String,
}

/// A process in line.
#[derive(Clone, Debug, Deserialize)]
#[non_exhaustive]
pub struct Waiting {
    /// Process id, as the server sees it; 0 where it does not.
    pub pid: u32,
    /// When it started, in clock ticks since boot.
    pub start_time: u64,
    /// User id.
    pub uid: u32,
    /// Its command.
    pub command: String,
    /// Since when it waits.
    pub since: String,
    /// `exclusive` or `shared`.
    pub mode: String,
}

/// A process that has a shared lock.
#[derive(Clone, Debug, Deserialize)]
#[non_exhaustive]
pub struct Sharing {
    /// Process id, as the server sees it; 0 where it does not.
    pub pid: u32,
    /// When it started, in clock ticks since boot.
    pub start_time: u64,
    /// User id.
    pub uid: u32,
    /// Its command.
    pub command: String,
}

/// A committed result.
#[derive(Clone, Debug, Deserialize)]
#[non_exhaustive]
pub struct Committed {
    /// The attempt it is of.
    pub epoch: u64,
    /// Bytes.
    pub size: u64,
    /// When.
    pub committed: String,
}

impl Status {
    /// Reads what an open `status/KEY` says now. `poll` on it reports the changes from then on.
    ///
    /// # Errors
    /// Those of `read(2)`; [`io::ErrorKind::InvalidData`] for what is no status.
    pub fn read(file: &File) -> io::Result<Status> {
        // One line, so there is nothing after its end: whoever reads very many of them does not ask again each time.
        let (mut text, mut buffer) = (Vec::new(), [0; 8 * 1024]);
        while !text.ends_with(b"\n") {
            match file.read_at(&mut buffer, text.len() as u64) {
                Ok(0) => break,
                Ok(length) => text.extend_from_slice(&buffer[..length]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        let text = String::from_utf8(text).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        Ok(text.parse()?)
    }

    /// The line of JSON that this is, with the fields that are not known here.
    pub fn json(&self) -> &str {
        &self.json
    }

    /// Nobody holds or shares it, and no draft keeps it.
    pub fn is_open(&self) -> bool {
        self.state == "free" || self.is_finished()
    }

    /// It has a result and nobody holds it: exclusive create is refused.
    pub fn is_finished(&self) -> bool {
        self.state == "finished"
    }
}

impl FromStr for Status {
    type Err = serde_json::Error;

    fn from_str(text: &str) -> Result<Status, serde_json::Error> {
        let line = text.trim_end();
        let status: Status = serde_json::from_str(line)?;
        Ok(Status { json: line.to_owned(), ..status })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_may_gain_fields_and_lack_the_optional_ones() {
        let text = r#"{"key":"k","state":"held","epoch":3,"holder":{"pid":7,"uid":0,"gid":0},"new":1}"#;
        let status: Status = format!("{text}\n").parse().expect("parses");
        assert_eq!((status.epoch, status.json()), (3, text));
        assert_eq!(status.holder.as_ref().map(|holder| holder.pid), Some(7));
        assert!(!status.is_open() && !status.is_finished());
        assert!(r#"{"key":"k","state":"finished","epoch":3}"#.parse().is_ok_and(|s: Status| s.is_open()));
        assert!(r#"{"key":"k","epoch":3}"#.parse::<Status>().is_err(), "the state is not optional");
    }
}
