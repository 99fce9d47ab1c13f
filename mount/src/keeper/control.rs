//! Orders to the keeper, through a socket in the state directory, which only its owner and root can reach.
//!
//! One order is known: a connection that says `upgrade` is told in one line what came of it, and closed.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// The socket, in the state directory.
const SOCKET: &str = "keeper.sock";
/// The order.
const UPGRADE: &str = "upgrade\n";
/// How an answer begins that says what was done.
pub const DONE: &str = "upgraded to ";
/// How an answer begins that says why nothing was.
pub const REFUSED: &str = "refused: ";
/// How long who has connected may take to say what it wants: it may have been stopped in between. Nobody waits for it.
const PATIENCE: Duration = Duration::from_secs(60);
/// How many may be about to say what they want.
const MAX_ASKING: usize = 16;
/// How long an answer may take to write, which fits into the socket.
const WRITING: Duration = Duration::from_secs(1);

/// Where orders come in.
pub struct Control {
    listener: UnixListener,
    path: PathBuf,
    asking: Vec<Asking>,
}

/// Who has connected, and what it said so far.
struct Asking {
    stream: UnixStream,
    said: Vec<u8>,
    since: Instant,
}

impl Asking {
    /// Reads what there is. Whether it is the order; none while that may still come.
    fn hear(&mut self) -> Option<bool> {
        let mut bytes = [0; 64];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return Some(false),
                Ok(length) => self.said.extend(&bytes[..length]),
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return None,
                Err(_) => return Some(false),
            }
            if self.said == UPGRADE.as_bytes() {
                return Some(true);
            }
            if !UPGRADE.as_bytes().starts_with(&self.said) {
                return Some(false);
            }
        }
    }
}

/// Who is to be told what came of an order.
pub struct Requester(Option<UnixStream>);

/// A path of the socket that is short enough for an address, however long the directory's is.
fn address(dir: &std::fs::File) -> PathBuf {
    format!("/proc/self/fd/{}/{SOCKET}", dir.as_raw_fd()).into()
}

impl Control {
    /// Opens the socket of a state directory. Its lock is held, so that one left there is nobody's.
    ///
    /// # Errors
    /// Where it cannot be made.
    pub fn open(state_dir: &Path) -> Result<Control> {
        let path = state_dir.join(SOCKET);
        let _ = std::fs::remove_file(&path);
        let dir = std::fs::File::open(state_dir).with_context(|| format!("{}", state_dir.display()))?;
        let listener = UnixListener::bind(address(&dir)).with_context(|| format!("{}", path.display()))?;
        listener.set_nonblocking(true)?;
        Ok(Control { listener, path, asking: Vec::new() })
    }

    /// What there may be an order on.
    pub fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        [self.listener.as_fd()].into_iter().chain(self.asking.iter().map(|asking| asking.stream.as_fd()))
    }

    /// The next order, if one has come.
    pub fn next_order(&mut self) -> Option<Requester> {
        self.asking.retain(|asking| asking.since.elapsed() < PATIENCE);
        while let Ok((stream, _)) = self.listener.accept() {
            if stream.set_nonblocking(true).is_err() {
                continue;
            }
            self.asking.push(Asking { stream, said: Vec::new(), since: Instant::now() });
            if self.asking.len() <= MAX_ASKING {
                continue;
            }
            // Some may have gone, or said it, since they were heard last.
            if let Some(requester) = self.hear() {
                return Some(requester);
            }
            if self.asking.len() > MAX_ASKING
                && let Some(Asking { stream, .. }) = self.asking.pop()
            {
                let why = format!("{REFUSED}{MAX_ASKING} others have connected, and not yet said what they want");
                Requester(Some(stream)).answer(&why);
            }
        }
        self.hear()
    }

    /// The first order of those that have connected.
    fn hear(&mut self) -> Option<Requester> {
        let mut at = 0;
        while let Some(asking) = self.asking.get_mut(at) {
            match asking.hear() {
                None => at += 1,
                Some(is_order) => {
                    let Asking { stream, .. } = self.asking.remove(at);
                    if is_order {
                        stream.set_nonblocking(false).ok()?;
                        stream.set_write_timeout(Some(WRITING)).ok()?;
                        return Some(Requester(Some(stream)));
                    }
                }
            }
        }
        None
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // The state directory is still locked.
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Requester {
    /// The order came by a signal.
    pub fn nobody() -> Requester {
        Requester(None)
    }

    /// Tells them.
    pub fn answer(self, text: &str) {
        if let Some(mut stream) = self.0 {
            let _ = writeln!(stream, "{}", text.replace('\n', "; "));
        }
    }
}

/// Orders an upgrade, and gives the answer: an empty one where the keeper hung up.
///
/// # Errors
/// Where there is no keeper.
pub fn upgrade(state_dir: &Path) -> Result<String> {
    let dir = std::fs::File::open(state_dir).with_context(|| format!("{}", state_dir.display()))?;
    let mut stream = UnixStream::connect(address(&dir)).context("the keeper cannot be reached")?;
    // Who has hung up may have said why before, and is no reader of our output that has seen enough.
    let _ = stream.write_all(UPGRADE.as_bytes());
    let mut answer = String::new();
    let _ = BufReader::new(stream).read_line(&mut answer);
    Ok(answer.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_hangs_up_has_not_answered() {
        let dir = tempfile::tempdir().expect("directory");
        let listener = UnixListener::bind(dir.path().join(SOCKET)).expect("socket");
        let hanging_up = std::thread::spawn(move || drop(listener.accept().expect("connected")));
        assert_eq!(upgrade(dir.path()).expect("it was there"), "");
        hanging_up.join().expect("thread");
    }
}
