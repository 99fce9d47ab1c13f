//! Putting fuser on a connection that is already there.
//!
//! fuser wants to shake hands, and the kernel does so once. So fuser's session begins on a socket pair, where the
//! kernel's first request is said again, and `/dev/fuse` is put in the socket's place under the same descriptor number:
//! from there on fuser talks to the kernel itself, with nobody in between.
//!
//! A server that takes over first lets fuser handle, through the pair, what the server before left unanswered, by age;
//! only then may fuser read what is new. The end of that is marked by a request of our own whose answer comes back.

mod raw;
mod relay;

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};

use anyhow::{Context, Result, bail};
use fuser::{Filesystem, Session, SessionACL};

use crate::flight::{Flight, OWN, RESEND, Record, STRIKES, opcode};
use crate::{lastread, reading};
use raw::Header;
pub use raw::interrupted;
use relay::Relay;

/// Largest write request, in bytes: any request fits a message of the socket pair, whose size is bounded for ordinary
/// users by `net.core.wmem_default` (208 KiB unless set).
pub const MAX_WRITE: u32 = 128 * 1024;
/// Room for a request of the kernel or an answer to it.
const BUFFER: usize = 1 << 18;
/// Numbers to look at on either side of the newest that was handled: of what was read but did not reach its handler.
/// One reader
/// has one such request, and each number a forget used up counts; the rest is margin.
const BEYOND: u64 = 64;
/// The kernel counts requests in steps of this.
const STEP: u64 = 2;

/// A connection and what is known about it.
pub struct Connection<'a> {
    /// `/dev/fuse`.
    pub device: OwnedFd,
    /// Memory of [`crate::lastread`].
    pub last_read: OwnedFd,
    /// The kernel's first request.
    pub init: &'a [u8],
    /// The kernel sends unanswered requests again when asked to.
    pub resend: bool,
    /// What the server before was doing.
    pub flight: &'a Flight,
    /// The kernel's numbers of pollers that the server before would have woken.
    pub polls: &'a [u64],
    /// The handles that server gave out, by the number of the request that asked for each.
    pub given_out: HashMap<u64, u64>,
}

/// Whether a kernel that began like this can send unanswered requests again (Linux 6.9 and later).
pub fn has_resend(init: &[u8]) -> bool {
    raw::init_flags(init) & fuser::InitFlags::FUSE_HAS_RESEND.bits() != 0
}

/// A request in words.
pub fn describe(code: u32, ino: u64) -> String {
    format!("{} on {}", raw::name(code), raw::place(ino))
}

impl Connection<'_> {
    /// Runs a filesystem on the connection until it ends. `on_interrupt` is called for each request that a signal came for,
    /// `ready` once requests are read from the kernel.
    ///
    /// # Errors
    /// Where the kernel cannot do what is needed, or the connection breaks.
    pub fn run<F, I>(self, fs: F, on_interrupt: I, ready: impl FnOnce()) -> Result<()>
    where
        F: Filesystem + Send + Sync + 'static,
        I: Fn(u64) + Send + Sync + 'static,
    {
        let (relay, theirs) = Relay::new(self.device.as_fd()).context("a socket pair")?;
        relay.say(self.init).context("a socket pair")?;
        // The kernel lets in whom the mount options say; permissions inside are the tree's.
        let session = Session::from_fd(fs, theirs, SessionACL::All, fuser::Config::default());
        let takes_over = self.flight.has_answered_init();
        let answer = relay.hear().context("a socket pair")?;
        if let Some(answer) = answer.filter(|_| !takes_over) {
            // A server killed before it could remember had told the kernel already.
            match relay.pass_on(&answer) {
                Err(error) if error.raw_os_error() != Some(libc::ENOENT) => {
                    return Err(error).context("cannot answer the kernel");
                }
                _ => {}
            }
        }
        let session = session.context("the kernel does not speak FUSE as it is needed here")?;
        let number = session.as_fd().as_raw_fd();
        if !takes_over {
            self.flight.answered_init();
            self.replace(number)?;
        }
        let last = self.last_read(&relay, takes_over).context("what was read last")?;
        reading::begin(number, on_interrupt);
        // Not bound to this scope: where taking over fails, the process is to end though the session still waits.
        let running = std::thread::Builder::new().name("session".into()).spawn(|| session.run())?;
        if takes_over {
            self.take_over(&relay, number, last)?;
        }
        // Open, it would keep the session's end of the pair in use.
        drop(relay);
        ready();
        // Whoever was told has looked at the tree, so something was read.
        if !reading::is_in_use() {
            tracing::warn!("whoever waits in another pid namespace does not hear signals: fuser has changed");
        }
        match running.join() {
            Ok(result) => result.context("the connection to the kernel broke"),
            Err(_) => bail!("the thread that answers requests failed: see the log above"),
        }
    }

    /// Puts the kernel's connection where the session reads and writes.
    fn replace(&self, number: RawFd) -> Result<()> {
        // SAFETY: both are open; who uses the number now goes on with what it has, and finds the kernel next time.
        let done = unsafe { libc::dup3(self.device.as_raw_fd(), number, libc::O_CLOEXEC) };
        if done < 0 { Err(io::Error::last_os_error()).context("dup3") } else { Ok(()) }
    }

    /// What the server before had read and nobody has handled. The next such is kept, too.
    fn last_read(&self, relay: &Relay, takes_over: bool) -> io::Result<Option<Vec<u8>>> {
        // What was saved comes first: then what was read last came from here, and is known.
        let candidates = if takes_over && !self.resend {
            [self.flight.saved(), lastread::load(&self.last_read)?]
        } else {
            [None, None]
        };
        let is_unanswered =
            |message: &Vec<u8>| Header::of(message).is_some_and(|h| self.is_unanswered(relay, h.unique));
        let last = candidates.into_iter().flatten().find(is_unanswered);
        self.flight.save(last.as_deref());
        lastread::offer(&self.last_read)?;
        Ok(last)
    }

    fn is_unanswered(&self, relay: &Relay, unique: u64) -> bool {
        relay.pass_on(&raw::question(unique)).is_ok()
    }

    fn take_over(&self, relay: &Relay, number: RawFd, last: Option<Vec<u8>>) -> Result<()> {
        // Whoever waits is put in line anew, and forgotten here only once that is done.
        let parked = self.flight.parked();
        let (again, cut_off) =
            if self.resend { (self.resent(relay)?, Vec::new()) } else { self.made_again(relay, last) };
        let count = again.len();
        let asked_again: Vec<u64> = again.iter().filter_map(|message| Header::of(message)).map(|h| h.unique).collect();
        relay.feed(again).context("handing over what was unanswered")?;
        for unique in cut_off {
            let _ = relay.pass_on(&raw::refusal(unique, libc::EINTR));
        }
        parked.into_iter().for_each(|place| self.flight.unpark(place));
        self.flight.save(None);
        if !lastread::is_in_use() {
            tracing::warn!("should this server be killed, what it reads last may get lost: fuser has changed");
        }
        // A request that is sent again brings its interrupt along; of those made again, the server before may have had it.
        for unique in asked_again.into_iter().filter(|_| !self.resend) {
            let _ = relay.pass_on(&raw::interrupt_again(unique));
        }
        // Whoever was to be told of a change looks for itself.
        for poll in self.polls {
            let _ = relay.pass_on(&raw::poll_notice(*poll));
        }
        self.replace(number)?;
        // Wakes the reader, if it already waits for the pair: this asks nothing and has no answer.
        let _ = relay.say(&raw::request(opcode::FORGET, 0, raw::ROOT, (0, 0), 0, &[0; 8]));
        // Whoever was about to answer when the pair was replaced has answered into it.
        relay.drain().context("handing over what was unanswered")?;
        tracing::info!("took over the connection: {count} requests were handled again");
        Ok(())
    }

    /// What the kernel sends again, by age, and what else had to be read to know that this is all.
    fn resent(&self, relay: &Relay) -> Result<VecDeque<Vec<u8>>> {
        relay.pass_on(&raw::resend_notice()).context("asking the kernel for what is unanswered")?;
        let mut again = Vec::new();
        let mut others = Vec::new();
        while let Some(message) = relay.read_device().context("reading what is unanswered")? {
            let Some(header) = Header::of(&message) else { continue };
            if header.unique & RESEND != 0 {
                if self.is_refused(relay, &header) {
                    continue;
                }
                again.push((header.unique, message));
                continue;
            }
            others.push(message);
            // What is asked for again comes first, but what has no answer may come in between.
            if !matches!(header.opcode, opcode::FORGET | opcode::BATCH_FORGET | opcode::INTERRUPT) {
                break;
            }
        }
        again.sort_by_key(|(unique, _)| *unique);
        Ok(again.into_iter().map(|(_, message)| message).chain(others).collect())
    }

    /// Answers a request that has killed too many servers, so that the others can go on.
    fn is_refused(&self, relay: &Relay, header: &Header) -> bool {
        if self.flight.strikes(header.unique) < STRIKES {
            return false;
        }
        tracing::error!(
            "request {} ({}) of pid {} has killed {STRIKES} servers: it is answered EIO",
            header.unique & !RESEND,
            describe(header.opcode, header.ino),
            header.pid
        );
        let _ = relay.pass_on(&raw::refusal(header.unique, libc::EIO));
        true
    }

    /// For a kernel that sends nothing again: what is unanswered and can be made again here, by age; and what cannot, by
    /// number, which is to end with `EINTR`.
    ///
    /// A lock must not end so while its caller has no signal: the kernel turns the answer into `ERESTARTSYS`, and a caller
    /// without a signal would be given that, which is no errno it knows. A poll would be told `POLLERR`, which is how the
    /// loss of a lease looks.
    fn made_again(&self, relay: &Relay, last: Option<Vec<u8>>) -> (VecDeque<Vec<u8>>, Vec<u64>) {
        let (mut numbers, newest) = self.flight.unanswered();
        // A forget takes its number when it is read, past those of requests that are read after it.
        numbers.extend((newest.saturating_sub(BEYOND * STEP)..=newest + BEYOND * STEP).step_by(STEP as usize));
        numbers.extend(last.as_deref().and_then(Header::of).map(|header| header.unique));
        numbers.sort_unstable();
        numbers.dedup();
        numbers.retain(|unique| self.is_unanswered(relay, *unique));
        let made = self.flight.records().into_iter().map(|record| (record.unique, raw::again(&record)));
        let read = last.and_then(|message| Some((Header::of(&message)?.unique, message)));
        let mut again: BTreeMap<u64, Vec<u8>> = made.chain(read).collect();
        again.retain(|unique, message| {
            numbers.binary_search(unique).is_ok()
                && Header::of(message).is_some_and(|header| !self.is_refused(relay, &header))
        });
        numbers.retain(|unique| !again.contains_key(unique));
        tracing::info!("{} calls end with EINTR", numbers.len());
        if let Some(lost) = numbers.last().filter(|unique| **unique > newest) {
            // It may have been the close of a handle, which then is never known.
            tracing::error!("request {lost} had been read by the server before, and is not known");
        }
        // Who is told `EINTR` has no handle, and nobody will ever close the one that it was to get.
        let unheard = numbers.iter().filter_map(|unique| self.given_out.get(unique));
        let closes = unheard.map(|&handle| {
            let (opcode, unique) = (opcode::RELEASE, OWN | 3);
            raw::again(&Record { unique, opcode, ino: raw::ROOT, handle, ..Record::default() })
        });
        (closes.chain(again.into_values()).collect(), numbers)
    }
}
