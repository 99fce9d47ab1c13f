//! Processes under a test's command, and scripts that end when the test does.
//!
//! A test must not hold handles of the tree in its own process: its neighbours start children all the time, and a child
//! holds copies of every descriptor between fork and exec, which keeps a lease alive. So handles live in [`Agent`]s,
//! single-threaded processes forked from one parent that opens nothing (`agent.py`), or in [`Script`]s.

use std::io::{BufRead, BufReader, IoSlice, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc::{self, Receiver};
use std::sync::{LazyLock, Mutex, PoisonError};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::signal::{Signal, kill};
use nix::sys::socket::{self, AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::{Mount, PATIENCE, end, wait_for};

/// What a system call answered.
pub type Answer<T> = Result<T, Errno>;

/// A descriptor in an agent.
pub type Fd = i64;

/// A place no neighbour can look into: the parent of all agents.
static PARENT: LazyLock<Mutex<OwnedFd>> = LazyLock::new(|| {
    let (ours, theirs) = pair();
    // The program goes over the socket, so that the agents' command line is a short one.
    let child = Command::new("python3")
        .args(["-I", "-S", "-c", "import os, socket; exec(socket.socket(fileno=os.dup(0)).recv(1 << 20).decode())"])
        .stdin(Stdio::from(theirs))
        .spawn()
        .expect("python3 runs");
    // It ends by itself when this program's end of the socket closes.
    drop(child);
    socket::send(ours.as_raw_fd(), include_bytes!("agent.py"), MsgFlags::MSG_NOSIGNAL)
        .expect("agents' parent is there");
    Mutex::new(ours)
});

fn pair() -> (OwnedFd, OwnedFd) {
    socket::socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC).expect("socketpair")
}

/// Sends one message, with a descriptor if there is one to pass.
fn send(to: &OwnedFd, message: &Value, pass: Option<RawFd>) {
    let text = message.to_string();
    let fds: Vec<RawFd> = pass.into_iter().collect();
    let rights = [ControlMessage::ScmRights(&fds)];
    let rights = if fds.is_empty() { &rights[..0] } else { &rights[..] };
    socket::sendmsg::<()>(to.as_raw_fd(), &[IoSlice::new(text.as_bytes())], rights, MsgFlags::MSG_NOSIGNAL, None)
        .unwrap_or_else(|e| panic!("agent is gone: {e}; it was to do {text}"));
}

/// Receives one message; `None` when none came in time.
fn receive(from: &OwnedFd, within: Duration) -> Option<Value> {
    let deadline = Instant::now() + within;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let timeout = PollTimeout::try_from(left.as_millis() as i32).expect("a timeout of minutes fits");
        match nix::poll::poll(&mut [PollFd::new(from.as_fd(), PollFlags::POLLIN)], timeout) {
            Ok(0) => return None,
            Ok(_) => break,
            Err(Errno::EINTR) => {}
            Err(e) => panic!("poll: {e}"),
        }
    }
    let mut buffer = vec![0; 1 << 20];
    let length = socket::recv(from.as_raw_fd(), &mut buffer, MsgFlags::empty()).expect("agent answers");
    assert!(length > 0, "the agent ended instead of answering");
    Some(serde_json::from_slice(&buffer[..length]).expect("answers are JSON"))
}

fn ask_parent(request: &Value, pass: Option<RawFd>) -> Value {
    let socket = PARENT.lock().unwrap_or_else(PoisonError::into_inner);
    send(&socket, request, pass);
    receive(&socket, PATIENCE).expect("the agents' parent answers")
}

/// A process that does what the test says, one call at a time, and is killed when the value goes.
pub struct Agent {
    control: OwnedFd,
    pid: i32,
}

impl Agent {
    /// A process of the user who runs the tests.
    pub fn new() -> Agent {
        Agent::spawn(&json!({ "uid": 0 }))
    }

    /// A process of another user, with these supplementary groups and no others.
    pub fn user(uid: u32, gid: u32, groups: &[u32]) -> Agent {
        Agent::spawn(&json!({ "uid": uid, "gid": gid, "groups": groups }))
    }

    /// With a umask of its own.
    pub fn with_umask(umask: u32) -> Agent {
        Agent::spawn(&json!({ "uid": 0, "umask": umask }))
    }

    fn spawn(request: &Value) -> Agent {
        let (ours, theirs) = pair();
        let answer = ask_parent(request, Some(theirs.as_raw_fd()));
        Agent { control: ours, pid: answer["pid"].as_i64().expect("a pid") as i32 }
    }

    /// A forked child of this process, with copies of all its descriptors.
    pub fn fork(&self) -> Agent {
        let (ours, theirs) = pair();
        send(&self.control, &json!(["fork"]), Some(theirs.as_raw_fd()));
        let pid = self.answer().expect("fork");
        Agent { control: ours, pid: pid.as_i64().expect("a pid") as i32 }
    }

    /// The process id.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Does one call: a function of `agent.py` or of Python's `os`.
    pub fn call(&self, function: &str, arguments: Value) -> Answer<Value> {
        self.begin(function, arguments);
        self.answer()
    }

    /// Starts a call that may block.
    pub fn begin(&self, function: &str, arguments: Value) {
        let mut message = vec![Value::from(function)];
        message.extend(arguments.as_array().expect("arguments are a list").iter().cloned());
        send(&self.control, &Value::from(message), None);
    }

    /// The answer to the call that was begun.
    pub fn answer(&self) -> Answer<Value> {
        self.answer_within(PATIENCE).unwrap_or_else(|| panic!("process {} did not answer in {PATIENCE:?}", self.pid))
    }

    /// The answer if it comes in time.
    pub fn answer_within(&self, within: Duration) -> Option<Answer<Value>> {
        let answer = receive(&self.control, within)?;
        assert!(answer["panic"].is_null(), "{}", answer["panic"].as_str().unwrap_or_default());
        Some(match answer["errno"].as_i64() {
            Some(errno) => Err(Errno::from_raw(errno as i32)),
            None => Ok(answer["ok"].clone()),
        })
    }

    /// Runs Python statements and gives what they left in `result`; `names` are its variables.
    pub fn script(&self, source: &str, names: Value) -> Answer<Value> {
        self.call("script", json!([source, names]))
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid), signal).expect("kill");
    }

    /// Kills it and waits until it has closed its files; it stays a zombie until the value goes.
    pub fn kill(&self) {
        self.end_by(Signal::SIGKILL);
    }

    /// Ends it by a signal and waits until it has closed its files; it stays a zombie until the value goes.
    pub fn end_by(&self, signal: Signal) {
        self.signal(signal);
        self.wait_end();
    }

    /// Lets it exit (its files open) and waits for that; it stays a zombie until the value goes.
    pub fn exit(&self) {
        self.begin("exit", json!([0]));
        self.wait_end();
    }

    /// Waits until it has ended. A zombie has closed its files already.
    pub fn wait_end(&self) {
        wait_for(&format!("end of process {}", self.pid), || has_ended(self.pid));
    }

    /// Is it still there?
    pub fn is_alive(&self) -> bool {
        !has_ended(self.pid)
    }
}

/// Shorthands for what tests do most. Locks are `LOCK_*` of flock(2) and `F_*` of fcntl(2).
impl Agent {
    /// Opens with the flags given.
    pub fn open(&self, path: &Path, flags: i32) -> Answer<Fd> {
        self.call("open", json!([path, flags, 0o666])).map(|fd| number(&fd))
    }

    /// The exclusive create, readable and writable.
    pub fn create(&self, path: &Path) -> Answer<Fd> {
        self.open(path, libc::O_RDWR | libc::O_CREAT | libc::O_EXCL)
    }

    /// An ordinary open that makes a handle to lock.
    pub fn handle(&self, path: &Path) -> Fd {
        self.open(path, libc::O_RDWR | libc::O_CREAT).unwrap_or_else(|e| panic!("open {}: {e}", path.display()))
    }

    /// A new process that has a key by exclusive create, and its handle.
    pub fn holding(path: &Path) -> (Agent, Fd) {
        let agent = Agent::new();
        let fd = agent.create(path).expect("free key");
        (agent, fd)
    }

    /// flock(2).
    pub fn flock(&self, fd: Fd, operation: i32) -> Answer<()> {
        self.call("flock", json!([fd, operation])).map(drop)
    }

    /// A whole-file lock by fcntl(2): `F_SETLK`, `F_OFD_SETLK`, … with `F_WRLCK`, `F_RDLCK`, `F_UNLCK`.
    pub fn lock(&self, fd: Fd, command: i32, kind: i32) -> Answer<Value> {
        self.call("lock", json!([fd, command, kind]))
    }

    /// Begins a flock(2) that may wait.
    pub fn begin_flock(&self, fd: Fd, operation: i32) {
        self.begin("flock", json!([fd, operation]));
    }

    /// The whole content from the beginning.
    pub fn read(&self, fd: Fd) -> Answer<String> {
        self.call("read", json!([fd])).map(|text| text.as_str().expect("text").to_owned())
    }

    /// The epoch in the record of the handle.
    pub fn epoch(&self, fd: Fd) -> Answer<u64> {
        self.read(fd).map(|record| epoch_of(&record))
    }

    /// write(2) of text; the number of bytes written.
    pub fn write(&self, fd: Fd, text: &str) -> Answer<u64> {
        let hex: String = text.bytes().map(|byte| format!("{byte:02x}")).collect();
        self.call("write", json!([fd, { "hex": hex }])).map(|count| number(&count) as u64)
    }

    /// fsync(2).
    pub fn fsync(&self, fd: Fd) -> Answer<()> {
        self.call("fsync", json!([fd])).map(drop)
    }

    /// close(2).
    pub fn close(&self, fd: Fd) {
        self.call("close", json!([fd])).expect("close");
    }

    /// futimens(2) with the present time.
    pub fn touch(&self, fd: Fd) -> Answer<()> {
        self.call("utime", json!([fd])).map(drop)
    }

    /// unlink(2) by this very process.
    pub fn unlink(&self, path: &Path) -> Answer<()> {
        self.call("unlink", json!([path])).map(drop)
    }

    /// The returned events of poll(2), 0 after the timeout.
    pub fn poll(&self, fd: Fd, mask: i16, timeout_ms: u32) -> i16 {
        number(&self.call("poll", json!([fd, mask, timeout_ms])).expect("poll")) as i16
    }

    /// setxattr(2) by path.
    pub fn set_xattr(&self, path: &Path, name: &str, value: &str) -> Answer<()> {
        let hex: String = value.bytes().map(|byte| format!("{byte:02x}")).collect();
        self.call("setxattr", json!([path, name, { "hex": hex }])).map(drop)
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = kill(Pid::from_raw(self.pid), Signal::SIGKILL);
        // A waiter that a broken server does not answer cannot be reaped: give up after a while.
        let deadline = Instant::now() + Duration::from_secs(5);
        while Instant::now() < deadline {
            // Another agent's child is not the parent's to reap, but it is gone all the same.
            if !ask_parent(&json!({ "wait": self.pid }), None)["status"].is_null() && has_ended(self.pid) {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Holds many keys, by as many agents as the limit on open files makes necessary; the descriptors of each.
pub fn hold_all(keys: &[PathBuf]) -> Vec<(Agent, Vec<Fd>)> {
    // Below the usual limit of 1,024, with a few to spare.
    let hold = |keys: &[PathBuf]| {
        let agent = Agent::new();
        let source = "result = [os.open(key, os.O_RDWR | os.O_CREAT | os.O_EXCL) for key in keys]";
        let fds = agent.script(source, json!({ "keys": keys })).expect("free keys");
        let fds = fds.as_array().expect("descriptors").iter().map(number).collect();
        (agent, fds)
    };
    keys.chunks(900).map(hold).collect()
}

/// A bash script whose standard input the test holds: `read -r _` in it ends when the value goes.
pub struct Script {
    child: Child,
    stdin: Option<ChildStdin>,
    lines: Receiver<String>,
}

impl Script {
    /// Starts it; `$M` is the mountpoint.
    pub fn start(mount: &Mount, script: &str) -> Script {
        // All signals as in an interactive shell: a test program in the background ignores SIGINT.
        Script::start_with(mount, &["env", "--default-signal", "bash", "-c", script])
    }

    /// Starts any program the same way.
    pub fn start_with(mount: &Mount, argv: &[&str]) -> Script {
        let mut child = mount
            .command(argv[0])
            .args(&argv[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap_or_else(|e| panic!("{}: {e}", argv[0]));
        let stdin = child.stdin.take();
        let out = BufReader::new(child.stdout.take().expect("piped"));
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            for line in out.lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Script { child, stdin, lines }
    }

    /// The next line it prints; `None` when it ended without one.
    pub fn line(&self) -> Option<String> {
        match self.lines.recv_timeout(PATIENCE) {
            Ok(line) => Some(line),
            Err(mpsc::RecvTimeoutError::Disconnected) => None,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                panic!("script {} says nothing", self.child.id())
            }
        }
    }

    /// Writes a line to its standard input.
    pub fn say(&mut self, line: &str) {
        let stdin = self.stdin.as_mut().expect("its input is open");
        writeln!(stdin, "{line}").expect("the script reads");
    }

    /// The process id.
    pub fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).expect("kill");
    }

    /// Lets it go on to its end, and gives its exit status.
    pub fn finish(mut self) -> ExitStatus {
        drop(self.stdin.take());
        self.wait()
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> ExitStatus {
        let mut status = None;
        wait_for(&format!("end of script {}", self.child.id()), || {
            status = self.child.try_wait().expect("child can be waited for");
            status.is_some()
        });
        status.expect("it ended")
    }
}

impl Drop for Script {
    fn drop(&mut self) {
        drop(self.stdin.take());
        end(&mut self.child);
    }
}

/// A process that a script left behind; killed when the value goes.
pub struct Stray(pub i32);

impl Stray {
    /// Kills it and waits for its end.
    pub fn kill(&self) {
        let _ = kill(Pid::from_raw(self.0), Signal::SIGKILL);
        wait_for(&format!("end of process {}", self.0), || has_ended(self.0));
    }
}

impl Drop for Stray {
    fn drop(&mut self) {
        if !has_ended(self.0) {
            let _ = kill(Pid::from_raw(self.0), Signal::SIGKILL);
        }
    }
}

/// Where in the kernel a process sleeps.
pub fn sleeps_in(pid: i32) -> String {
    std::fs::read_to_string(format!("/proc/{pid}/wchan")).unwrap_or_default()
}

/// Does the process run the program of this name? A shell tells the number of a child before that has executed anything.
pub fn runs(pid: i32, program: &str) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim_end() == program)
}

/// Has the process ended? A zombie has closed its files already, once the last of its threads is gone.
pub fn has_ended(pid: i32) -> bool {
    // Not `stat`: reading that waits for a process in execve(2), which may wait for the tree.
    let Ok(status) = std::fs::read_to_string(format!("/proc/{pid}/status")) else { return true };
    let zombie = status.lines().any(|line| line.starts_with("State:\tZ") || line.starts_with("State:\tX"));
    zombie && std::fs::read_dir(format!("/proc/{pid}/task")).map_or(0, Iterator::count) <= 1
}

/// The epoch in the first line of a record.
pub fn epoch_of(record: &str) -> u64 {
    let line = record.lines().next().unwrap_or_default();
    line.parse().unwrap_or_else(|_| panic!("the first line of a record is the epoch alone, not {line:?} of {record:?}"))
}

/// The forms of lock that wait: of each the function and its arguments, for [`Agent::begin`].
pub fn waits(fd: Fd) -> [(&'static str, Value); 6] {
    [
        ("flock", json!([fd, libc::LOCK_EX])),
        ("flock", json!([fd, libc::LOCK_SH])),
        ("lock", json!([fd, libc::F_SETLKW, libc::F_WRLCK])),
        ("lock", json!([fd, libc::F_SETLKW, libc::F_RDLCK])),
        ("lock", json!([fd, libc::F_OFD_SETLKW, libc::F_WRLCK])),
        ("lock", json!([fd, libc::F_OFD_SETLKW, libc::F_RDLCK])),
    ]
}

fn number(value: &Value) -> i64 {
    value.as_i64().unwrap_or_else(|| panic!("a number, not {value}"))
}

/// `count` of waiters or sharers in `status/KEY`, whether it is a number or a list.
pub fn count(status: &Value, field: &str) -> u64 {
    match &status[field] {
        Value::Array(list) => list.len() as u64,
        other => other.as_u64().unwrap_or_else(|| panic!("{field} is a count or a list, not {other}")),
    }
}
