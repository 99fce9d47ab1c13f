//! The clients of a cell: processes that claim and release as fast as they can for a given time.
//!
//! Each says it is ready, starts on a word from the parent and answers with its counts, so that starting up is not
//! measured. A denied exclusive create is tried again at once; only cycles that held the key count.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::histogram::Histogram;
use crate::stage::{self, Stage};
use crate::{Cell, Form, Keys, Variant};

/// First argument that makes this program a client.
pub const WAY_IN: &str = "--as-client";

/// Cycles before the clock starts.
const WARM_UP: usize = 20;

/// A client refused for that long gives up: something holds the key for good.
const PATIENCE: Duration = Duration::from_secs(20);

/// What one client counted, or all clients of a cell together.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Counted {
    /// Cycles that held the key
    pub cycles: u64,
    /// Exclusive creates that were refused
    pub denied: u64,
    /// Cycles per second
    pub rate: f64,
    /// From the first try to the end of the release
    pub latency: Histogram,
}

/// Runs one cell on one variant.
pub fn measure(stage: &Stage, variant: Variant, cell: Cell, seconds: f64) -> Result<Counted> {
    let directory = stage.directory(variant)?;
    let mut clients = Vec::new();
    for index in 0..cell.clients {
        // On the local disk a locked file stays, and could not be created exclusively afterwards.
        let form = if cell.form == Form::Create { "create" } else { "flock" };
        let key = match cell.keys {
            Keys::Own => format!("{form}-{index}"),
            Keys::One => format!("{form}-shared"),
        };
        clients.push(Client::start(&directory.join(key), cell.form, variant == Variant::Local, seconds)?);
    }
    for client in &mut clients {
        client.expect("ready")?;
    }
    for client in &mut clients {
        client.go()?;
    }
    let mut together = Counted::default();
    for client in &mut clients {
        let counted = client.answer()?;
        together.cycles += counted.cycles;
        together.denied += counted.denied;
        together.rate += counted.rate;
        together.latency.merge(&counted.latency);
    }
    stage::stop_if_told()?;
    Ok(together)
}

/// A client process; killed and reaped when dropped.
struct Client {
    child: Child,
    answers: BufReader<std::process::ChildStdout>,
}

impl Client {
    fn start(path: &Path, form: Form, unlink: bool, seconds: f64) -> Result<Client> {
        let mut child = Command::new(std::env::current_exe()?)
            .arg(WAY_IN)
            .arg(match form {
                Form::Create if unlink => "create-unlink",
                Form::Create => "create",
                Form::Flock => "flock",
            })
            .arg(seconds.to_string())
            .arg(path)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("cannot start a client")?;
        let stdout = child.stdout.take().context("client without output")?;
        Ok(Client { child, answers: BufReader::new(stdout) })
    }

    fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        if self.answers.read_line(&mut line)? == 0 {
            bail!("a client ended early");
        }
        Ok(line)
    }

    fn expect(&mut self, word: &str) -> Result<()> {
        let line = self.line()?;
        if line.trim() != word {
            bail!("a client said {line:?} instead of {word:?}");
        }
        Ok(())
    }

    fn go(&mut self) -> Result<()> {
        let mut stdin = self.child.stdin.take().context("client without input")?;
        stdin.write_all(b"go\n").context("a client ended early")
    }

    fn answer(&mut self) -> Result<Counted> {
        Ok(serde_json::from_str(&self.line()?)?)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        // It has ended already, unless something failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The client's own side: `FORM SECONDS PATH`.
pub fn main(args: &[String]) -> Result<()> {
    let [form, seconds, path] = args else { bail!("a client takes FORM SECONDS PATH") };
    let length = Duration::from_secs_f64(seconds.parse()?);
    let path = Path::new(path);
    match form.as_str() {
        "create" => cycles(length, || create(path)),
        "create-unlink" => cycles(length, || {
            let denied = create(path)?;
            fs::remove_file(path)?;
            Ok(denied)
        }),
        "flock" => {
            let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path)?;
            cycles(length, || lock(&file))
        }
        other => bail!("no such form: {other}"),
    }
}

/// Creates the file exclusively and closes it; gives how often that was refused before.
fn create(path: &Path) -> io::Result<u64> {
    let mut denied = 0;
    let start = Instant::now();
    loop {
        match OpenOptions::new().write(true).create_new(true).open(path) {
            Ok(file) => {
                drop(file);
                return Ok(denied);
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && start.elapsed() < PATIENCE => denied += 1,
            Err(error) => return Err(error),
        }
    }
}

fn lock(file: &File) -> io::Result<u64> {
    // flock(LOCK_EX) and flock(LOCK_UN) on Linux.
    file.lock()?;
    file.unlock()?;
    Ok(0)
}

fn cycles(length: Duration, mut cycle: impl FnMut() -> io::Result<u64>) -> Result<()> {
    for _ in 0..WARM_UP {
        cycle()?;
    }
    println!("ready");
    let mut word = String::new();
    io::stdin().read_line(&mut word)?;
    if word.is_empty() {
        bail!("the bench went away");
    }
    let mut counted = Counted::default();
    let start = Instant::now();
    let mut last = start;
    while last.duration_since(start) < length {
        counted.denied += cycle()?;
        let now = Instant::now();
        counted.latency.record(now.duration_since(last).as_nanos() as u64);
        counted.cycles += 1;
        last = now;
    }
    counted.rate = counted.cycles as f64 / last.duration_since(start).as_secs_f64();
    println!("{}", serde_json::to_string(&counted)?);
    Ok(())
}
