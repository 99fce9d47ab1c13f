//! What `/proc` tells of a process: who it is, whether a signal waits for it, how it ends.
//!
//! A process is told from a later one of the same number by files of `/proc` kept open: reading one whose process is
//! gone fails, whatever runs under the number by then. What cannot be seen proves nothing.
//!
//! # What must not be read
//! `/proc/PID/stat` waits while the process is inside `execve(2)`, and that may be waiting for us: it closes files, and
//! the close of a draft is a request. So `stat` is read only of a thread that waits for an answer to something else, or
//! that has no memory any more, which `statm` tells without waiting.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use foldhash::HashMap;
use leasefs::machine::{Process, Why};
use parking_lot::Mutex;

/// Most processes remembered.
const CAPACITY: usize = 512;
/// `PF_SIGNALED` in field 9 of `/proc/PID/stat`: a signal killed it.
const PF_SIGNALED: u64 = 0x400;

/// What a process is called that cannot be seen.
const UNSEEN: &str = "(unseen)";

/// A thread's process and what it runs.
#[derive(Clone, Debug)]
pub struct Seen {
    /// The process; all 0 where the thread cannot be seen.
    pub process: Process,
    /// Its name, as `comm` has it; `(unseen)` where the thread cannot be seen.
    pub command: Arc<str>,
}

struct Known {
    comm_file: File,
    comm: Vec<u8>,
    seen: Seen,
}

/// Processes seen lately.
#[derive(Default)]
pub struct Processes {
    known: Mutex<HashMap<u32, Known>>,
    memory: Mutex<HashMap<u32, (u64, File)>>,
}

impl Processes {
    /// The process of the thread whose request is being answered. It is waiting for the answer, so it is there, unless
    /// it is in a pid namespace the server does not see.
    pub fn identify(&self, tid: u32) -> Seen {
        let mut known = self.known.lock();
        let mut comm = [0; 32];
        if let Some(found) = known.get(&tid)
            && let Ok(length) = found.comm_file.read_at(&mut comm, 0)
            && found.comm == comm[..length]
        {
            return found.seen.clone();
        }
        if known.len() >= CAPACITY {
            known.clear();
        }
        match Known::read(tid) {
            Ok(new) => {
                let seen = new.seen.clone();
                self.remember_memory(seen.process);
                known.insert(tid, new);
                seen
            }
            Err(_) => Seen { process: Process::default(), command: Arc::from(UNSEEN) },
        }
    }

    /// Keeps the file that tells whether the process has memory, while it is certain whose it is.
    fn remember_memory(&self, process: Process) {
        let mut memory = self.memory.lock();
        if memory.get(&process.pid).is_some_and(|(start, _)| *start == process.start_time) {
            return;
        }
        if memory.len() >= CAPACITY {
            memory.clear();
        }
        if let Ok(file) = File::open(format!("/proc/{}/statm", process.pid)) {
            memory.insert(process.pid, (process.start_time, file));
        }
    }

    /// Whether a process seen before still has memory: `None` where that was too long ago to tell.
    fn has_memory(&self, process: Process) -> Option<bool> {
        let memory = self.memory.lock();
        let (_, file) = memory.get(&process.pid).filter(|(start, _)| *start == process.start_time)?;
        Some(has_memory(file))
    }

    /// Whether a process seen before is there and at work. One that cannot be told about is taken for gone, which only
    /// decides who is shown as the holder.
    pub fn is_alive(&self, process: Process) -> bool {
        process.pid != 0 && self.has_memory(process) == Some(true)
    }

    /// How a handle went that this process opened: `closed`, `exited`, or `killed by signal N`.
    pub fn why_gone(&self, process: Process) -> Why {
        if process.pid == 0 {
            return Why::from("closed");
        }
        match self.has_memory(process) {
            Some(true) => Why::from("closed"),
            Some(false) => {
                let stat = File::open(format!("/proc/{}/stat", process.pid)).and_then(|file| Stat::read(&file));
                match stat {
                    Ok(stat) if stat.start_time == process.start_time => stat.why(),
                    _ => Why::from("exited"),
                }
            }
            None if Path::new(&format!("/proc/{}", process.pid)).exists() => Why::from("closed"),
            None => Why::from("exited"),
        }
    }
}

/// Whether the thread of a `/proc/TID/statm` has memory: one that is exiting or gone has none.
fn has_memory(statm: &File) -> bool {
    let mut buffer = [0; 64];
    statm.read_at(&mut buffer, 0).is_ok_and(|length| length > 0 && buffer[0] != b'0')
}

impl Known {
    fn read(tid: u32) -> io::Result<Known> {
        let comm_file = File::open(format!("/proc/{tid}/comm"))?;
        let mut comm = vec![0; 32];
        let length = comm_file.read_at(&mut comm, 0)?;
        comm.truncate(length);
        let status = fs::read_to_string(format!("/proc/{tid}/status"))?;
        let pid = field(&status, "Tgid:").and_then(|value| value.parse().ok()).unwrap_or(tid);
        let stat = Stat::read(&File::open(format!("/proc/{pid}/stat"))?)?;
        let command = name_of(pid).unwrap_or_else(|| String::from_utf8_lossy(&comm).trim_end().to_owned());
        let process = Process { pid, start_time: stat.start_time };
        Ok(Known { comm_file, comm, seen: Seen { process, command: Arc::from(command) } })
    }
}

/// What the first thread of a process calls itself. Its command line would say more, but reading that waits for the
/// process's memory map, which may be waiting for an answer of ours.
fn name_of(pid: u32) -> Option<String> {
    let bytes = fs::read(format!("/proc/{pid}/comm")).ok()?;
    Some(String::from_utf8_lossy(&bytes).trim_end().to_owned())
}

/// The fields of `/proc/PID/stat` that matter here.
struct Stat {
    flags: u64,
    start_time: u64,
    /// As `wait(2)` gives it, for the whole process; 0 while it runs.
    exit_code: i64,
}

impl Stat {
    fn read(file: &File) -> io::Result<Stat> {
        let mut buffer = [0; 1024];
        let length = file.read_at(&mut buffer, 0)?;
        let text = String::from_utf8_lossy(&buffer[..length]);
        // The command in parentheses may hold anything, also spaces and parentheses.
        let after = text.rsplit_once(") ").map(|(_, after)| after).ok_or(io::ErrorKind::InvalidData)?;
        let fields: Vec<&str> = after.split_ascii_whitespace().collect();
        let number = |index: usize| fields.get(index).and_then(|value| value.parse::<i64>().ok()).unwrap_or(0);
        Ok(Stat { flags: number(6).cast_unsigned(), start_time: number(19).cast_unsigned(), exit_code: number(49) })
    }

    fn signal(&self) -> i64 {
        self.exit_code & 0x7f
    }

    fn why(&self) -> Why {
        match self.signal() {
            0 => Why::from("exited"),
            signal => Why::from(format!("killed by signal {signal}")),
        }
    }
}

/// Whether a thread that is closing a file does so because a signal killed its process.
///
/// Threads of a process that exits by itself are ended by the kernel with a signal of its own, so the flag alone would
/// take them for killed: the exit code of the process decides.
pub fn is_killed(tid: u32) -> bool {
    // One that has memory closes the file of its own accord, or is inside execve(2).
    if File::open(format!("/proc/{tid}/statm")).map_or(true, |statm| has_memory(&statm)) {
        return false;
    }
    let stat = File::open(format!("/proc/{tid}/stat")).and_then(|file| Stat::read(&file));
    stat.is_ok_and(|stat| stat.flags & PF_SIGNALED != 0 && (stat.signal() != 0 || !may_see_exit_code(tid)))
}

/// Whether the kernel shows us the exit code of a thread. Without the right to trace it, it shows 0; publishing half a
/// result would be worse than publishing none.
fn may_see_exit_code(tid: u32) -> bool {
    let refused = fs::read_link(format!("/proc/{tid}/cwd")).is_err_and(|e| e.kind() == io::ErrorKind::PermissionDenied);
    !refused
}

/// Whether a thread that waits for an answer is inside an exclusive create: `open(2)` with `O_CREAT | O_EXCL`.
///
/// False where it cannot be told. Reading this waits for a process inside `execve(2)`, but only once no other thread of it
/// is left, and this one is inside another call.
pub fn is_creating(tid: u32) -> bool {
    // It may not sleep yet. How long that takes is up to the kernel, so there is an end to it.
    const TRIES: usize = 1_000;
    for _ in 0..TRIES {
        match fs::read_to_string(format!("/proc/{tid}/syscall")) {
            Ok(call) if call.starts_with("running") => std::thread::yield_now(),
            Ok(call) => return is_exclusive_create(&call),
            Err(_) => return false,
        }
    }
    false
}

/// Reads a line of `/proc/TID/syscall`: the call's number and its arguments.
fn is_exclusive_create(call: &str) -> bool {
    let mut fields = call.split_ascii_whitespace();
    let number = fields.next().and_then(|number| number.parse::<i64>().ok());
    let argument = |index: usize| {
        let argument = call.split_ascii_whitespace().nth(index + 1)?.strip_prefix("0x")?;
        u64::from_str_radix(argument, 16).ok()
    };
    let flags = match number {
        Some(libc::SYS_openat) => argument(2),
        #[cfg(target_arch = "x86_64")]
        Some(libc::SYS_open) => argument(1),
        _ => None,
    };
    let exclusive = (libc::O_CREAT | libc::O_EXCL).cast_unsigned();
    flags.is_some_and(|flags| flags as u32 & exclusive == exclusive)
}

/// The supplementary groups of a thread; none where it cannot be seen.
pub fn groups(tid: u32) -> Vec<u32> {
    let status = fs::read_to_string(format!("/proc/{tid}/status")).unwrap_or_default();
    let groups = field(&status, "Groups:").unwrap_or_default();
    groups.split_ascii_whitespace().filter_map(|group| group.parse().ok()).collect()
}

/// What a thread that waits for an answer has been sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pending {
    /// Nothing that would end a wait.
    Nothing,
    /// A signal that another thread of its process may be about to take. To be looked at again soon.
    Perhaps,
    /// A signal of its own, or it is gone.
    Signal,
}

/// A thread that waits for an answer, watched for signals.
pub struct Watched {
    status: File,
    tid: u32,
    /// Signals to the process seen at the last look.
    shared: u64,
}

impl Watched {
    /// Begins to watch.
    ///
    /// # Errors
    /// Where the thread cannot be seen.
    pub fn open(tid: u32) -> io::Result<Watched> {
        Ok(Watched { status: File::open(format!("/proc/{tid}/status"))?, tid, shared: 0 })
    }

    /// Whether a signal waits for this very thread that is neither blocked nor ignored.
    ///
    /// A signal to the process is for one thread of it, and only that one can be told `EINTR`: to any other the kernel
    /// would return a number that is no errno (512).
    pub fn look(&mut self) -> Pending {
        let Ok(status) = read_whole(&self.status) else { return Pending::Signal };
        let signals = Signals::parse(&String::from_utf8_lossy(&status));
        if signals.own != 0 || signals.shared != 0 && signals.is_alone(self.tid) {
            return Pending::Signal;
        }
        // The kernel prefers the first thread. Among the others it is as good as taken by whoever is not stuck here.
        let shared = signals.shared & signals.blocked_by_first();
        let lasting = shared & self.shared;
        self.shared = shared;
        match (shared, lasting) {
            (0, _) => Pending::Nothing,
            (_, 0) => Pending::Perhaps,
            _ => Pending::Signal,
        }
    }
}

/// The signals of `/proc/TID/status`.
struct Signals {
    pid: u32,
    threads: u32,
    is_zombie: bool,
    blocked: u64,
    /// Pending for the thread, neither blocked nor ignored.
    own: u64,
    /// Pending for its process, neither blocked nor ignored.
    shared: u64,
}

impl Signals {
    fn parse(status: &str) -> Signals {
        let mask = |name: &str| field(status, name).and_then(|hex| u64::from_str_radix(hex, 16).ok()).unwrap_or(0);
        let number = |name: &str| field(status, name).and_then(|value| value.parse().ok()).unwrap_or(0);
        let (blocked, ignored) = (mask("SigBlk:"), mask("SigIgn:"));
        Signals {
            pid: number("Tgid:"),
            threads: number("Threads:"),
            is_zombie: field(status, "State:").is_some_and(|state| state.starts_with('Z')),
            blocked,
            own: mask("SigPnd:") & !blocked & !ignored,
            shared: mask("ShdPnd:") & !blocked & !ignored,
        }
    }

    /// Whether a signal to the process can only be for this thread, or is by the kernel's preference.
    fn is_alone(&self, tid: u32) -> bool {
        self.threads <= 1 || self.pid == tid
    }

    /// The signals that the first thread of the process does not take.
    fn blocked_by_first(&self) -> u64 {
        if self.shared == 0 {
            return 0;
        }
        let status = fs::read_to_string(format!("/proc/{}/status", self.pid)).unwrap_or_default();
        let first = Signals::parse(&status);
        if first.is_zombie || status.is_empty() { u64::MAX } else { first.blocked }
    }
}

/// Reads a file of `/proc` from its start to its end: a long list of groups may come before what is looked for.
fn read_whole(file: &File) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; 4096];
    let mut filled = 0;
    loop {
        match file.read_at(&mut bytes[filled..], filled as u64)? {
            0 => break,
            read => filled += read,
        }
        if filled == bytes.len() {
            bytes.resize(filled * 2, 0);
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

fn field<'a>(status: &'a str, name: &str) -> Option<&'a str> {
    status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_identified_by_any_of_its_threads() {
        let processes = Processes::default();
        let own = std::process::id();
        let by_thread = std::thread::spawn(|| nix::unistd::gettid().as_raw().cast_unsigned()).join();
        let seen = processes.identify(own);
        assert_eq!(seen.process.pid, own);
        assert!(seen.process.start_time > 0);
        let here = nix::unistd::gettid().as_raw().cast_unsigned();
        assert_eq!(processes.identify(here).process, seen.process);
        assert!(by_thread.is_ok());
        assert_eq!(&*processes.why_gone(seen.process), "closed");
    }

    #[test]
    fn a_process_that_cannot_be_seen_is_nobody() {
        assert_eq!(Processes::default().identify(0).process, Process::default());
    }

    #[test]
    fn how_a_child_ended_is_read_while_it_is_a_zombie() {
        let processes = Processes::default();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().expect("sleep runs");
        let process = processes.identify(child.id()).process;
        child.kill().expect("kill");
        let mut why = processes.why_gone(process);
        for _ in 0..1_000 {
            if &*why != "closed" {
                break;
            }
            std::thread::sleep(std::time::Duration::from_millis(2));
            why = processes.why_gone(process);
        }
        assert_eq!(&*why, "killed by signal 9");
        child.wait().expect("wait");
        assert_eq!(&*processes.why_gone(process), "exited");
    }

    #[test]
    fn an_exclusive_create_is_told_from_other_calls() {
        let call =
            |number: i64, flags: i32| format!("{number} 0xffffff9c 0x7f00 {flags:#x} 0x1b6 0x0 0x0 0x7ffd 0x7f01\n");
        let exclusive = libc::O_RDWR | libc::O_CREAT | libc::O_EXCL | libc::O_CLOEXEC;
        assert!(is_exclusive_create(&call(libc::SYS_openat, exclusive)));
        assert!(!is_exclusive_create(&call(libc::SYS_openat, libc::O_RDWR | libc::O_CREAT)));
        assert!(!is_exclusive_create(&call(libc::SYS_statx, exclusive)));
        assert!(!is_exclusive_create("-1 0x7ffd 0x7f01\n"));
    }
}
