//! The far end of the socket pair a session begins on: says what the kernel would, and passes on what is answered.
//!
//! Neither side may wait for the other: a session that cannot get rid of its answers reads nothing more.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockType, recv, send, setsockopt, socketpair, sockopt::SndBuf,
};

use super::{BUFFER, raw};

/// Send buffer to ask for; the kernel gives less where it may not be as much.
const SEND_BUFFER: usize = 1 << 20;

/// The far end, and the kernel's connection.
pub struct Relay<'a> {
    pair: OwnedFd,
    device: BorrowedFd<'a>,
    buffer: RefCell<Vec<u8>>,
}

impl<'a> Relay<'a> {
    /// A pair, and the end that is a session's.
    ///
    /// # Errors
    /// Those of `socketpair(2)`.
    pub fn new(device: BorrowedFd<'a>) -> io::Result<(Relay<'a>, OwnedFd)> {
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
        for end in [&ours, &theirs] {
            setsockopt(end, SndBuf, &SEND_BUFFER)?;
        }
        // Written to, so that the memory is there: see `lastread`.
        Ok((Relay { pair: ours, device, buffer: RefCell::new(vec![0xff; BUFFER]) }, theirs))
    }

    /// Says something to the session.
    ///
    /// # Errors
    /// Those of `send(2)`.
    pub fn say(&self, message: &[u8]) -> io::Result<()> {
        send(self.pair.as_raw_fd(), message, MsgFlags::MSG_NOSIGNAL)?;
        Ok(())
    }

    /// What the session answers; none once it is gone.
    ///
    /// # Errors
    /// Those of `recv(2)`.
    pub fn hear(&self) -> io::Result<Option<Vec<u8>>> {
        let mut buffer = self.buffer.borrow_mut();
        loop {
            match recv(self.pair.as_raw_fd(), &mut buffer, MsgFlags::empty()) {
                Ok(0) => return Ok(None),
                Ok(length) => return Ok(Some(buffer[..length].to_vec())),
                // It left something unread, and went; what it said before that can still be heard.
                Err(Errno::ECONNRESET | Errno::EINTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Gives the kernel an answer or a notice.
    ///
    /// # Errors
    /// The kernel's: `ENOENT` where nobody waits for this answer.
    pub fn pass_on(&self, answer: &[u8]) -> io::Result<()> {
        nix::unistd::write(self.device, answer)?;
        Ok(())
    }

    /// The kernel's next request, if there is one now.
    ///
    /// # Errors
    /// Those of `read(2)`, but for the connection's end, which the session is to find.
    pub fn read_device(&self) -> io::Result<Option<Vec<u8>>> {
        loop {
            let mut fds = [PollFd::new(self.device, PollFlags::POLLIN)];
            poll(&mut fds, PollTimeout::ZERO)?;
            if !fds[0].revents().is_some_and(|ready| ready.contains(PollFlags::POLLIN)) {
                return Ok(None);
            }
            let mut buffer = self.buffer.borrow_mut();
            match nix::unistd::read(self.device, &mut buffer) {
                Ok(length) => return Ok(Some(buffer[..length].to_vec())),
                Err(Errno::ENODEV) => return Ok(None),
                Err(Errno::ENOENT | Errno::EINTR | Errno::EAGAIN) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Has the session handle these in this order, and passes on what it answers, until all were handled.
    ///
    /// # Errors
    /// Where the session ends before that.
    pub fn feed(&self, mut messages: VecDeque<Vec<u8>>) -> io::Result<()> {
        messages.push_back(raw::barrier());
        loop {
            let interest = if messages.is_empty() { PollFlags::POLLIN } else { PollFlags::POLLIN | PollFlags::POLLOUT };
            let mut fds = [PollFd::new(self.pair.as_fd(), interest)];
            match poll(&mut fds, PollTimeout::NONE) {
                Err(Errno::EINTR) => continue,
                result => result?,
            };
            let ready = fds[0].revents().unwrap_or(PollFlags::empty());
            if ready.intersects(PollFlags::POLLIN | PollFlags::POLLHUP | PollFlags::POLLERR) {
                match self.hear()? {
                    None => return Err(io::Error::from_raw_os_error(libc::EPIPE)),
                    Some(answer) if raw::answered(&answer) == Some(raw::BARRIER) => return Ok(()),
                    Some(answer) => self.pass_on_or_log(&answer),
                }
            } else if ready.contains(PollFlags::POLLOUT)
                && let Some(message) = messages.front()
            {
                let flags = MsgFlags::MSG_NOSIGNAL | MsgFlags::MSG_DONTWAIT;
                match send(self.pair.as_raw_fd(), message, flags) {
                    Ok(_) => drop(messages.pop_front()),
                    Err(Errno::EAGAIN | Errno::EINTR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
        }
    }

    /// Passes on what is still answered, until the session's end of the pair is gone.
    ///
    /// # Errors
    /// Those of `recv(2)`.
    pub fn drain(&self) -> io::Result<()> {
        while let Some(answer) = self.hear()? {
            self.pass_on_or_log(&answer);
        }
        Ok(())
    }

    fn pass_on_or_log(&self, answer: &[u8]) {
        if let Err(error) = self.pass_on(answer) {
            // A caller that was killed meanwhile waits no more.
            tracing::debug!("answer to {:?}: {error}", raw::answered(answer));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Read;

    use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};

    use super::*;
    use crate::connection::MAX_WRITE;
    use crate::connection::raw::Header;
    use crate::flight::{RESEND, opcode};

    #[test]
    fn any_request_fits_and_neither_side_waits_for_the_other() {
        const COUNT: u64 = 500;
        // In the kernel's place, whatever takes messages; what it is told is counted.
        let (device, kernel) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).expect("pair");
        let (relay, theirs) = Relay::new(device.as_fd()).expect("relay");
        let session = std::thread::spawn(move || {
            let (mut buffer, mut seen) = (vec![0; BUFFER], Vec::new());
            loop {
                let length = nix::unistd::read(&theirs, &mut buffer).expect("a request");
                let unique = Header::of(&buffer[..length]).expect("a request").unique;
                // As large as the answer to a read can be.
                let mut answer = vec![0; MAX_WRITE as usize + 16];
                answer[8..16].copy_from_slice(&unique.to_ne_bytes());
                nix::unistd::write(&theirs, &answer).expect("an answer");
                if unique == raw::BARRIER {
                    return seen;
                }
                seen.push(unique);
            }
        });
        let told = std::thread::spawn(move || {
            let (mut kernel, mut buffer) = (File::from(kernel), vec![0; BUFFER]);
            (0..COUNT).all(|_| kernel.read(&mut buffer).expect("an answer") == MAX_WRITE as usize + 16)
        });
        let body = vec![7; MAX_WRITE as usize + 40];
        let request = |unique| raw::request(opcode::WRITE, unique | RESEND, 9, (0, 0), 1, &body);
        relay.feed((1..=COUNT).map(request).collect()).expect("all are handled");
        let in_order: Vec<u64> = (1..=COUNT).map(|unique| unique | RESEND).collect();
        assert_eq!(session.join().expect("session"), in_order);
        assert!(told.join().expect("kernel"));
        relay.drain().expect("it is gone");
    }
}
