//! A worker process: this test binary once more, told its job by the environment, writing down all it does.
//!
//! [`Worker::call`] is the only way a worker touches a key, so every claim, renewal and release has its two time stamps.
//! The roles themselves are with the suites they belong to.
use std::io::Read as _;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::PathBuf;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde::{Deserialize, Serialize};

use crate::record::{Ending, Form, Line, Op, Renewal, Side, allowed};
use crate::roles::{self, Role};
use crate::sys::{self, Alarm, Answer, Board, Number};

/// The environment variable with the [`Job`].
pub const JOB: &str = "LEASEFS_SUITE_JOB";

/// What a worker is told.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// What to do.
    pub role: Role,
    /// The mountpoint.
    pub root: PathBuf,
    /// The keys to do it with.
    pub keys: Vec<String>,
    /// The log to write.
    pub log: PathBuf,
    /// The board all share.
    pub board: PathBuf,
    /// Where all chance comes from.
    pub seed: u64,
    /// The uid and gid to be.
    pub uid: u32,
    /// Whether to be pid 1 of a pid namespace of one's own.
    pub nested: bool,
    /// TTL of the leases where nobody sets another, in milliseconds.
    pub ttl_ms: u64,
    /// Whether a call may answer `EINTR` because the server died. Then it is made again, as `flock(1)` and Python do.
    pub interrupted: bool,
}

impl Job {
    /// Of one that runs as root. Its fleet says where it writes.
    pub fn new(role: Role, root: PathBuf, keys: Vec<String>, seed: u64, ttl_ms: u64) -> Job {
        let (log, board) = (PathBuf::new(), PathBuf::new());
        Job { role, root, keys, log, board, seed, uid: 0, nested: false, ttl_ms, interrupted: false }
    }
}

/// The state of a worker.
pub struct Worker {
    /// What it was told.
    pub job: Job,
    /// Its chance.
    pub rng: StdRng,
    log: OwnedFd,
    board: Board,
}

/// A handle that holds a lease, or did.
pub struct Held {
    /// The descriptor.
    pub fd: OwnedFd,
    /// How it was claimed.
    pub form: Form,
}

#[test]
#[ignore = "not a test: the suites start this binary again as their workers"]
fn entry() {
    let Ok(job) = std::env::var(JOB) else { return };
    let job: Job = serde_json::from_str(&job).expect("the job is JSON");
    let mut worker = Worker::start(job);
    let role = worker.job.role;
    roles::play(&mut worker, role);
}

impl Worker {
    fn start(job: Job) -> Worker {
        let log = sys::open(&job.log, libc::O_WRONLY | libc::O_CREAT | libc::O_APPEND).expect("log");
        let board = Board::open(&job.board);
        die_with_parent();
        if job.nested {
            enter_pid_namespace();
        }
        // The pid as /proc, mounted in the server's pid namespace, knows it.
        let pid = std::fs::read_link("/proc/self").expect("/proc").to_string_lossy().parse().expect("a pid");
        become_uid(job.uid);
        die_with_parent();
        sys::interruptible();
        let worker = Worker { rng: StdRng::seed_from_u64(job.seed), job, log, board };
        worker.line(&Line::Start { t: sys::now(), pid });
        worker
    }

    /// Whether the run is over.
    pub fn stopping(&self) -> bool {
        self.board.count(Number::Pulse);
        self.board.get(Number::Stop) != 0
    }

    /// Writes a line to the log, whole.
    fn line(&self, line: &Line) {
        let mut text = serde_json::to_vec(line).expect("a line is JSON");
        text.push(b'\n');
        assert_eq!(sys::write(&self.log, &text), Ok(text.len() as u64), "the log takes a line");
    }

    /// Notes that it is alive (and holds what it held).
    pub fn beat(&self) {
        self.line(&Line::Beat { t: sys::now() });
    }

    /// Notes something for the reader of the history.
    pub fn note(&self, text: &str) {
        self.line(&Line::Note { t: sys::now(), text: text.into() });
    }

    /// Notes a violation seen on the spot.
    pub fn wrong(&self, text: String) {
        self.board.count(Number::Wrong);
        self.line(&Line::Wrong { t: sys::now(), text });
    }

    /// Makes a call, with a time stamp before and one after it.
    pub fn call(&self, key: &str, op: Op, call: impl FnMut() -> Answer) -> Answer {
        self.call_while(key, op, self.job.interrupted, call)
    }

    /// A call that is made again, as a part of itself, when it is interrupted by nothing but the server's end.
    fn call_while(&self, key: &str, op: Op, again: bool, mut call: impl FnMut() -> Answer) -> Answer {
        self.line(&Line::Ask { t: sys::now(), key: key.into(), op });
        let mut answer = call();
        if again && answer == Err(libc::EINTR) {
            answer = self.repeat(&op, call);
        }
        self.line(&Line::Got { t: sys::now(), answer });
        let interrupted = self.job.interrupted && answer == Err(libc::EINTR);
        if answer.is_err_and(|errno| !allowed(&op, errno)) && !interrupted {
            self.board.count(Number::Wrong);
        }
        answer
    }

    /// Goes on with an interrupted call. What cannot be done twice may have been done the first time.
    fn repeat(&self, op: &Op, mut call: impl FnMut() -> Answer) -> Answer {
        match op {
            Op::Claim { form: Form::Create, .. } => return Err(libc::EINTR),
            // Whatever `close` answers, the descriptor is gone.
            Op::Release(Ending::Close | Ending::ChildsClose) | Op::Finish => return Ok(0),
            _ => {}
        }
        let mut answer = Err(libc::EINTR);
        while answer == Err(libc::EINTR) {
            self.board.count(Number::Interrupted);
            answer = call();
        }
        match (op, answer) {
            // Whoever has the key by then, it is not this one.
            (Op::Release(Ending::Unlink), Err(_))
            | (Op::Side(Side::Rmdir), Err(libc::ENOENT))
            | (Op::Side(Side::Mkdir), Err(libc::EEXIST))
            | (Op::Evict(_), Err(libc::ESTALE)) => Ok(0),
            _ => answer,
        }
    }

    /// `claims/KEY`.
    pub fn claim_path(&self, key: &str) -> PathBuf {
        self.job.root.join("claims").join(key)
    }

    /// One of the keys.
    pub fn any_key(&mut self) -> String {
        let at = self.rng.random_range(0..self.job.keys.len());
        self.job.keys[at].clone()
    }

    /// True once in so many times.
    pub fn once_in(&mut self, times: u32) -> bool {
        self.rng.random_ratio(1, times)
    }

    /// Claims a key. A wait may be cut short by `SIGALRM` after so many microseconds (0: never).
    pub fn claim(&mut self, key: &str, form: Form, wait: bool, alarm_us: u64) -> Option<Held> {
        let path = self.claim_path(key);
        let op = Op::Claim { form, wait };
        let held = if form == Form::Create {
            let mut made = None;
            let flags = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL;
            self.call(key, op, || sys::open(&path, flags).map(|fd| made.insert(fd).as_raw_fd() as u64)).ok()?;
            Held { fd: made?, form }
        } else {
            let mut made = None;
            let opens = Op::Side(Side::Handle);
            let _ = self.call(key, opens, || {
                sys::open(&path, libc::O_RDWR | libc::O_CREAT).map(|fd| made.insert(fd).as_raw_fd() as u64)
            });
            self.lock(key, Held { fd: made?, form }, wait, alarm_us)?
        };
        self.board.count(Number::Pulse);
        Some(held)
    }

    /// Claims by locking a handle that is open already.
    pub fn lock(&mut self, key: &str, held: Held, wait: bool, alarm_us: u64) -> Option<Held> {
        let op = Op::Claim { form: held.form, wait };
        let alarm = (wait && alarm_us > 0).then(|| Alarm::every(alarm_us, libc::SIGALRM));
        let again = self.job.interrupted && alarm.is_none();
        let answer = self.call_while(key, op, again, || lock(&held, wait));
        let alarmed = alarm.is_some();
        drop(alarm);
        if answer == Err(libc::EINTR) {
            if self.job.interrupted {
                self.close(key, held);
            } else if !alarmed {
                self.wrong(format!("a lock request for {key} was interrupted, and there was no signal"));
            }
            return None;
        }
        answer.ok().map(|_| held)
    }

    /// The epoch as the own handle tells it; none if the lease is lost.
    pub fn epoch(&self, key: &str, held: &Held) -> Option<u64> {
        self.record(key, held).map(|(epoch, _)| epoch)
    }

    /// Reads the own handle's record: its epoch and all of it.
    pub fn record(&self, key: &str, held: &Held) -> Option<(u64, String)> {
        let mut text = String::new();
        let answer = self.call(key, Op::Epoch, || {
            text = String::from_utf8_lossy(&sys::read(&held.fd)?).into_owned();
            Ok(first_number(&text))
        });
        if answer == Ok(0) {
            self.wrong(format!("the record of {key} starts with no epoch: {text:?}"));
        }
        Some((answer.ok().filter(|&epoch| epoch > 0)?, text))
    }

    /// Counts an exclusive claim that is told with its epoch.
    pub fn claimed(&self) {
        self.board.count(Number::Claims);
    }

    /// Renews by the handle.
    pub fn renew(&self, key: &str, held: &Held, how: Renewal, note: &str) -> Answer {
        self.call(key, Op::Renew(how), || match how {
            Renewal::Note => sys::write(&held.fd, note.as_bytes()),
            Renewal::Touch => sys::touch(&held.fd),
            Renewal::Relock => lock(held, false),
        })
    }

    /// Sets the TTL of the held key.
    pub fn set_ttl(&self, key: &str, held: &Held, ms: u64) -> Answer {
        self.call(key, Op::Ttl(ms), || sys::set_xattr(&held.fd, "user.lease.ttl", &format!("{ms}ms")))
    }

    /// Lets go by closing the last copy.
    pub fn close(&self, key: &str, held: Held) {
        self.close_by(key, held, Ending::Close);
    }

    fn close_by(&self, key: &str, held: Held, ending: Ending) {
        let mut fd = Some(held.fd);
        let _ = self.call(key, Op::Release(ending), || fd.take().map_or(Ok(0), sys::close));
    }

    /// Closes a draft, which commits it.
    pub fn close_draft(&self, key: &str, fd: OwnedFd) -> Answer {
        let mut fd = Some(fd);
        self.call(key, Op::Finish, || fd.take().map_or(Ok(0), sys::close))
    }

    /// Lets go by unlocking; the handle can lock again.
    pub fn unlock(&self, key: &str, held: &Held) -> Answer {
        self.call(key, Op::Release(Ending::Unlock), || match held.form {
            Form::Create | Form::Flock | Form::Share => sys::flock(&held.fd, libc::LOCK_UN),
            Form::Ofd => sys::fcntl_lock(&held.fd, libc::F_OFD_SETLK, libc::F_UNLCK),
            Form::Posix => sys::fcntl_lock(&held.fd, libc::F_SETLK, libc::F_UNLCK),
        })
    }

    /// Lets go by unlinking, as only the process that claimed may.
    pub fn unlink(&self, key: &str) -> Answer {
        let path = self.claim_path(key);
        self.call(key, Op::Release(Ending::Unlink), || sys::on_path(libc::unlink, &path))
    }

    /// Leaves with the handle open: the kernel lets go.
    pub fn exit_holding(&self, key: &str) -> ! {
        let _ = self.call(key, Op::Release(Ending::Exit), || {
            // SAFETY: ends the process; nothing of ours runs after it.
            unsafe { libc::_exit(0) }
        });
        unreachable!("_exit does not return")
    }

    /// Dies as a crash does.
    pub fn die(&self, why: &str) -> ! {
        self.note(why);
        let _ = sys::kill(self.pid(), libc::SIGKILL);
        unreachable!("nobody outlives SIGKILL")
    }

    fn pid(&self) -> i32 {
        // SAFETY: always succeeds.
        unsafe { libc::getpid() }
    }

    /// Gives the lease to a forked child, whose copy of the handle is the last one from then on, and waits for its end.
    pub fn hand_over(&mut self, key: &str, held: Held, hold_us: u64) {
        let (mut wait, go) = std::io::pipe().expect("pipe");
        // SAFETY: this process runs one thread of ours; the child uses plain calls and leaves by _exit.
        match unsafe { libc::fork() } {
            0 => {
                drop(go);
                // The pipe ends when the parent has closed its copy.
                let _ = wait.read(&mut [0]);
                self.beat();
                sys::pause(hold_us);
                let _ = self.epoch(key, &held);
                self.close_by(key, held, Ending::ChildsClose);
                // SAFETY: ends the child.
                unsafe { libc::_exit(0) }
            }
            child => {
                assert!(child > 0, "fork");
                let _ = sys::close(held.fd);
                drop(go);
                let mut status = 0;
                // SAFETY: `status` is a valid place for the result.
                unsafe { libc::waitpid(child, &mut status, 0) };
            }
        }
    }

    /// Has a forked child close its copy of everything, which ends nothing.
    pub fn fork_and_exit(&self) {
        // SAFETY: this process runs one thread of ours; the child does nothing but exit.
        match unsafe { libc::fork() } {
            // SAFETY: ends the child.
            0 => unsafe { libc::_exit(0) },
            child => {
                assert!(child > 0, "fork");
                let mut status = 0;
                // SAFETY: `status` is a valid place for the result.
                unsafe { libc::waitpid(child, &mut status, 0) };
            }
        }
    }

    /// The key's newest epoch by `status/KEY`; 0 for one that never was.
    pub fn observe(&self, key: &str) -> Option<u64> {
        let path = self.job.root.join("status").join(key);
        let answer = self.call(key, Op::Observe, || match std::fs::read(&path) {
            Ok(text) => match serde_json::from_slice::<serde_json::Value>(&text) {
                Ok(status) if status["epoch"].is_u64() => Ok(status["epoch"].as_u64().unwrap_or(0)),
                _ => {
                    self.wrong(format!("status/{key} is no record: {:?}", String::from_utf8_lossy(&text)));
                    Err(libc::EIO)
                }
            },
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(0),
            Err(error) => Err(error.raw_os_error().unwrap_or(libc::EIO)),
        });
        answer.ok()
    }
}

fn lock(held: &Held, wait: bool) -> Answer {
    let flag = if wait { 0 } else { libc::LOCK_NB };
    match held.form {
        Form::Create | Form::Flock => sys::flock(&held.fd, libc::LOCK_EX | flag),
        Form::Share => sys::flock(&held.fd, libc::LOCK_SH | flag),
        Form::Ofd => {
            let command = if wait { libc::F_OFD_SETLKW } else { libc::F_OFD_SETLK };
            sys::fcntl_lock(&held.fd, command, libc::F_WRLCK)
        }
        Form::Posix => {
            let command = if wait { libc::F_SETLKW } else { libc::F_SETLK };
            sys::fcntl_lock(&held.fd, command, libc::F_WRLCK)
        }
    }
}

/// The number in the first line; 0 if there is none.
pub fn first_number(text: &str) -> u64 {
    text.lines().next().and_then(|line| line.parse().ok()).unwrap_or(0)
}

/// Goes on as pid 1 of a new pid namespace; the process outside waits for its end.
fn enter_pid_namespace() {
    // SAFETY: plain calls; this process runs one thread of ours.
    unsafe {
        assert_eq!(libc::unshare(libc::CLONE_NEWPID), 0, "unshare(CLONE_NEWPID) needs root");
        let child = libc::fork();
        assert!(child >= 0, "fork");
        if child > 0 {
            let mut status = 0;
            libc::waitpid(child, &mut status, 0);
            libc::_exit(if status == 0 { 0 } else { 1 });
        }
    }
}

/// A suite that ends takes its workers along. Changing the uid undoes it.
fn die_with_parent() {
    // SAFETY: plain prctl.
    unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
}

fn become_uid(uid: u32) {
    // SAFETY: plain calls.
    unsafe {
        // The raw calls: one thread is all there is, and the wrappers would signal the others.
        assert_eq!(libc::syscall(libc::SYS_setgroups, 0usize, std::ptr::null::<libc::gid_t>()), 0, "setgroups");
        assert_eq!(libc::syscall(libc::SYS_setresgid, uid, uid, uid), 0, "setresgid");
        assert_eq!(libc::syscall(libc::SYS_setresuid, uid, uid, uid), 0, "setresuid");
    }
}
