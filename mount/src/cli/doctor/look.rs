//! Looking at what may hang whoever looks: by a child, which is left behind if it does not come back.
//!
//! A call into a tree whose server does not answer cannot be ended by a signal once the server has taken it, so a child
//! that is killed is not waited for either.

use std::io::Read;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// How long a tree may take to answer.
pub const PATIENCE: Duration = Duration::from_secs(3);
/// How often it is looked for the answer at least.
const LOOKS: u32 = 500;

/// What came of it.
#[derive(Debug, PartialEq, Eq)]
pub enum Seen {
    /// The text of `.leasefs/config`.
    Config(String),
    /// Its connection is lost.
    Dead,
    /// It is of another user, and not for this one.
    Shut,
    /// No answer.
    Hangs,
    /// Another error, in words.
    Odd(String),
}

/// Looks at the root of a tree.
pub fn at(root: &Path) -> Seen {
    let mut probe = Command::new("/proc/self/exe");
    probe.arg("probe").arg("--show").arg(root).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut probe = match probe.spawn() {
        Ok(probe) => probe,
        Err(error) => return Seen::Odd(format!("cannot start a process: {error}")),
    };
    let deadline = Instant::now() + PATIENCE;
    let mut looks = 0;
    let status = loop {
        looks += 1;
        match probe.try_wait() {
            Ok(Some(status)) => break status,
            // Time alone proves nothing: where the machine stood still, the tree did as well.
            Ok(None) if Instant::now() < deadline || looks < LOOKS => std::thread::sleep(Duration::from_millis(2)),
            Ok(None) => {
                let _ = probe.kill();
                return Seen::Hangs;
            }
            Err(error) => return Seen::Odd(error.to_string()),
        }
    };
    // It has ended, and what it says fits into a pipe.
    let read = |pipe: Option<&mut dyn Read>| {
        let mut text = String::new();
        pipe.map(|pipe| pipe.read_to_string(&mut text));
        text
    };
    let said = read(probe.stdout.as_mut().map(|pipe| pipe as &mut dyn Read));
    if status.success() {
        return Seen::Config(said);
    }
    match said.trim().parse::<i32>() {
        Ok(libc::ENOTCONN | libc::ECONNABORTED) => Seen::Dead,
        Ok(libc::EACCES | libc::EPERM) => Seen::Shut,
        Ok(errno) => Seen::Odd(std::io::Error::from_raw_os_error(errno).to_string()),
        Err(_) => Seen::Odd(read(probe.stderr.as_mut().map(|pipe| pipe as &mut dyn Read)).trim().to_owned()),
    }
}
