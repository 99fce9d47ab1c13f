//! What the keeper gives a server: how to serve, and by which descriptors. The servers of a connection may be of
//! different versions of the program, so its form has a version of its own.

use std::os::fd::{FromRawFd, OwnedFd, RawFd};

use anyhow::{Context, Result, bail};
use leasefs::Ttl;
use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use serde::{Deserialize, Serialize};

use crate::failure::Failure;
use crate::server::Plan;

/// The version of this form, and of what server and keeper say to each other. To be raised with every change an older
/// or newer program would misread.
pub const PROTOCOL: u32 = 1;
/// The environment variable it is in.
pub const VARIABLE: &str = "LEASEFS_HANDOVER";

/// What a server says, on [`Fds::report`], when it answers the kernel. Anything else is why it does not.
pub const READY: &str = "ready";
/// How a program that was asked whether it can take over says yes; its version follows.
pub const ABLE: &str = "can take over: ";

/// Everything a server is told.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Handover {
    /// [`PROTOCOL`] of the keeper.
    pub protocol: u32,
    /// How to serve.
    pub plan: Plan,
    /// The kernel's first request, as it was read.
    pub init: Vec<u8>,
    /// Whether the kernel is to be asked for unanswered requests again.
    pub resend: bool,
    /// The keeper's pid.
    pub keeper_pid: u32,
    /// How many servers this one makes on this connection.
    pub starts: u32,
    /// The server before was ended by the keeper, in good health.
    pub blameless: bool,
    /// Log to the state directory; stderr is its file, as the keeper has it.
    #[serde(default)]
    pub log_there: bool,
    /// Descriptors.
    pub fds: Fds,
}

/// Numbers of inherited descriptors.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Fds {
    /// The connection to the kernel.
    pub device: RawFd,
    /// Memory of [`crate::flight`].
    pub flight: RawFd,
    /// Memory of what is open.
    pub files: RawFd,
    /// Memory of [`crate::lastread`].
    pub last_read: RawFd,
    /// The locked file of the state directory: locked for as long as keeper or server is there.
    pub lock: RawFd,
    /// Where the server says that it is ready, or why not.
    pub report: RawFd,
}

/// The descriptors themselves.
#[derive(Debug)]
pub struct Passed {
    /// The connection to the kernel.
    pub device: OwnedFd,
    /// Memory of [`crate::flight`].
    pub flight: OwnedFd,
    /// Memory of what is open.
    pub files: OwnedFd,
    /// Memory of [`crate::lastread`].
    pub last_read: OwnedFd,
    /// Keeps the state directory locked.
    pub lock: OwnedFd,
}

impl Handover {
    /// Takes what the keeper left in the environment: the descriptor to report on, which is to be closed once all is said,
    /// and the rest, or why it cannot be used. To be called once, before there is a second thread.
    ///
    /// # Errors
    /// Where no keeper left anything.
    pub fn take() -> Result<(OwnedFd, Result<(Handover, Passed)>)> {
        let text = std::env::var(VARIABLE).context("`leasefs serve` is for the keeper: use `leasefs mount`")?;
        // SAFETY: no other thread of this process exists yet, so nobody reads the environment meanwhile.
        unsafe { std::env::remove_var(VARIABLE) };
        let value: serde_json::Value = serde_json::from_str(&text).context(VARIABLE)?;
        // This and the version are where they are in every version, so that a refusal can be told.
        let report = value["fds"]["report"].as_i64().and_then(|number| RawFd::try_from(number).ok());
        let report = adopt(report.context(VARIABLE)?)?;
        Ok((report, Handover::read(value)))
    }

    fn read(value: serde_json::Value) -> Result<(Handover, Passed)> {
        let protocol = value["protocol"].as_u64();
        if protocol != Some(PROTOCOL.into()) {
            bail!(Failure::OtherProtocol {
                keeper: protocol.unwrap_or(0).to_string(),
                program: PROTOCOL.to_string(),
                version: env!("CARGO_PKG_VERSION").to_owned(),
            });
        }
        let handover: Handover = serde_json::from_value(value).context(VARIABLE)?;
        let Fds { device, flight, files, last_read, lock, report: _ } = handover.fds;
        let passed = Passed {
            device: adopt(device)?,
            flight: adopt(flight)?,
            files: adopt(files)?,
            last_read: adopt(last_read)?,
            lock: adopt(lock)?,
        };
        Ok((handover, passed))
    }
}

fn adopt(number: RawFd) -> Result<OwnedFd> {
    // SAFETY: only asks about the number; a closed one is answered with an error.
    let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
    if flags < 0 {
        bail!("descriptor {number} was not passed");
    }
    // SAFETY: it is open, and the keeper passed it to us under this number; nothing else here owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(number) };
    fcntl(&fd, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC)).context("descriptor")?;
    Ok(fd)
}

/// A TTL in the handover: milliseconds.
pub mod ttl_ms {
    use serde::{Deserialize, Deserializer, Serializer};

    use super::Ttl;

    /// Writes it.
    ///
    /// # Errors
    /// The serializer's.
    pub fn serialize<S: Serializer>(ttl: &Ttl, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_u64(ttl.as_millis())
    }

    /// Reads it.
    ///
    /// # Errors
    /// Where it is no TTL.
    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Ttl, D::Error> {
        Ttl::from_millis(u64::deserialize(from)?).map_err(serde::de::Error::custom)
    }
}
