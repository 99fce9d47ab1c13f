//! Orders to the keeper, through a socket in the state directory, which only its owner and root can reach.
//!
//! One order is known: a connection that says `upgrade` is told in one line what came of it, and closed.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};

/// The socket, in the state directory.
const SOCKET: &str = "keeper.sock";
/// The order.
const UPGRADE: &str = "upgrade\n";
/// How an answer begins that says what was done.
pub const DONE: &str = "upgraded to ";
/// How an answer begins that says why nothing was.
pub const REFUSED: &str = "refused: ";
/// How long who has connected may take to say what it wants.
const PATIENCE: Duration = Duration::from_secs(1);

/// Where orders come in.
pub struct Control {
    listener: UnixListener,
    path: PathBuf,
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
        Ok(Control { listener, path })
    }

    /// The next order.
    pub fn accept(&self) -> Option<Requester> {
        let (stream, _) = self.listener.accept().ok()?;
        stream.set_nonblocking(false).ok()?;
        stream.set_read_timeout(Some(PATIENCE)).ok()?;
        stream.set_write_timeout(Some(PATIENCE)).ok()?;
        let mut order = String::new();
        BufReader::new((&stream).take(64)).read_line(&mut order).ok()?;
        (order == UPGRADE).then_some(Requester(Some(stream)))
    }
}

impl AsFd for Control {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
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

/// Orders an upgrade, and gives the answer.
///
/// # Errors
/// Where there is no keeper.
pub fn upgrade(state_dir: &Path) -> Result<String> {
    let dir = std::fs::File::open(state_dir).with_context(|| format!("{}", state_dir.display()))?;
    let mut stream = UnixStream::connect(address(&dir)).context("the keeper cannot be reached")?;
    stream.write_all(UPGRADE.as_bytes()).context("the keeper")?;
    let mut answer = String::new();
    BufReader::new(stream).read_line(&mut answer).context("the keeper")?;
    Ok(answer.trim_end().to_owned())
}
