//! A program that uses `leasefs::client`: this test binary once more, ordered about by lines of words.
//!
//! Its handles live in a process that starts nothing by itself, so no other test's child has a copy.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write, stdin};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::Duration;

use leasefs::client::{Error, Lease, ResultWriter, Tree};
use leasefs::{Key, Ttl};

use crate::common::{PATIENCE, end};

/// The environment variable with the mountpoint.
const ROOT: &str = "LEASEFS_CLIENT_TEST_ROOT";
/// In front of every answer: the test harness prints, too.
const ANSWER: &str = "answer: ";

/// The program as a test sees it.
pub struct User {
    child: Child,
    orders: RefCell<ChildStdin>,
    answers: Receiver<String>,
}

impl User {
    /// Starts it.
    pub fn new(root: &Path) -> User {
        let mut child = Command::new(std::env::current_exe().expect("own path"))
            .args(["--exact", "user::program", "--ignored", "--nocapture", "--test-threads=1"])
            .env(ROOT, root)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the program starts");
        let orders = RefCell::new(child.stdin.take().expect("a pipe"));
        let lines = BufReader::new(child.stdout.take().expect("a pipe")).lines();
        let (sender, answers) = channel();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                // The harness leaves its own line unfinished.
                let Some((_, answer)) = line.split_once(ANSWER) else { continue };
                if sender.send(answer.to_owned()).is_err() {
                    return;
                }
            }
        });
        User { child, orders, answers }
    }

    /// Gives an order without waiting for its answer.
    pub fn begin(&self, order: &str) {
        writeln!(self.orders.borrow_mut(), "{order}").expect("the program reads");
    }

    /// The answer to the oldest order without one.
    pub fn answer(&self) -> String {
        self.answers.recv_timeout(PATIENCE).expect("the program answers")
    }

    /// Gives an order and waits for the answer: `ok`, what was asked for, or the error's name.
    pub fn ask(&self, order: &str) -> String {
        self.begin(order);
        self.answer()
    }

    /// Its pid.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for User {
    fn drop(&mut self) {
        end(&mut self.child);
    }
}

/// The program itself.
#[test]
#[ignore = "a program that the tests start"]
fn program() {
    let root = std::env::var_os(ROOT).expect("started by a test");
    let mut program = Program { tree: Tree::at(&root), leases: BTreeMap::new(), children: Vec::new() };
    for line in stdin().lines() {
        let line = line.expect("a line");
        let words: Vec<&str> = line.split(' ').collect();
        let answer = program.obey(&words).unwrap_or_else(|error| name(&error));
        println!("{ANSWER}{answer}");
    }
}

struct Program {
    tree: Result<Tree, Error>,
    leases: BTreeMap<String, Lease>,
    children: Vec<Child>,
}

impl Program {
    fn obey(&mut self, words: &[&str]) -> Result<String, Error> {
        let tree = match &self.tree {
            Ok(tree) => tree,
            Err(error) => return Ok(name(error)),
        };
        let key = |text: &str| Key::parse(text).expect("a key");
        let held = |name: &str| self.leases.get(name).expect("held by this program");
        let claimed = match words {
            ["claim", name] => Lease::try_claim(tree, &key(name)),
            ["once", name] => Lease::try_claim_once(tree, &key(name)),
            ["wait", name] => Lease::wait(tree, &key(name)),
            ["wait", name, ms] => {
                Lease::wait_timeout(tree, &key(name), Duration::from_millis(ms.parse().expect("a number")))
            }
            ["release", name] => {
                self.leases.remove(*name).expect("held by this program").release();
                return Ok("ok".into());
            }
            ["renew", name] => return held(name).renew().map(|()| "ok".into()),
            ["renew-in-a-child", name] => return Ok(renewed_in_a_child(held(name))),
            ["status", name] => {
                let status = tree.status(&key(name))?;
                return Ok(status.map_or("none".into(), |status| format!("{} {}", status.state, status.epoch)));
            }
            ["note", name, note] => return held(name).set_note(note).map(|()| "ok".into()),
            ["ttl", name, ttl] => {
                let ttl: Ttl = ttl.parse().expect("a TTL");
                return held(name).set_ttl(ttl).map(|()| "ok".into());
            }
            ["lost", name] => return held(name).lost().map(|lost| lost.to_string()),
            ["commit", name, text] => return commit(held(name).result_writer(), text),
            ["drop", name, text] => {
                write!(held(name).result_writer(), "{text}").expect("memory");
                return Ok("ok".into());
            }
            ["record", name, epoch, text] => {
                return commit(ResultWriter::new(tree, &key(name), epoch.parse().expect("a number")), text);
            }
            ["result", name, epoch] => {
                let bytes = tree.result(&key(name), epoch.parse().expect("a number"))?;
                return Ok(bytes.map_or("none".into(), |bytes| String::from_utf8_lossy(&bytes).into_owned()));
            }
            ["start-a-child"] => {
                let mut child = Command::new("cat").stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("cat");
                // It has been executed once it answers.
                child.stdin.as_mut().expect("a pipe").write_all(b"\n").expect("cat reads");
                let mut line = String::new();
                BufReader::new(child.stdout.as_mut().expect("a pipe")).read_line(&mut line).expect("cat answers");
                self.children.push(child);
                return Ok("ok".into());
            }
            other => panic!("no such order: {other:?}"),
        };
        let lease = claimed?;
        let epoch = lease.epoch().to_string();
        self.leases.insert(lease.key().to_string(), lease);
        Ok(epoch)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// What a forked child, which has a copy of the handle, is told.
fn renewed_in_a_child(lease: &Lease) -> String {
    // SAFETY: the child does system calls and nothing else, unless one fails.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let code = i32::from(lease.renew().is_err());
        // SAFETY: ends the child.
        unsafe { libc::_exit(code) };
    }
    let mut status = 0;
    // SAFETY: `status` is a place for the result.
    unsafe { libc::waitpid(child, &mut status, 0) };
    if child > 0 && status == 0 { "ok".into() } else { format!("child {child} ended with {status:#x}") }
}

fn commit(mut writer: ResultWriter, text: &str) -> Result<String, Error> {
    write!(writer, "{text}").expect("memory");
    writer.commit().map(|()| "ok".into())
}

fn name(error: &Error) -> String {
    match error {
        Error::Held(_) => "Held".into(),
        Error::Finished(_) => "Finished".into(),
        Error::Interrupted(_) => "Interrupted".into(),
        Error::Lost { epoch, .. } => format!("Lost {epoch}"),
        Error::NotAccepted { epoch, .. } => format!("NotAccepted {epoch}"),
        Error::NotFound(_) => "NotFound".into(),
        Error::Denied(_) => "Denied".into(),
        Error::NotATree(_) => "NotATree".into(),
        other => other.to_string(),
    }
}
