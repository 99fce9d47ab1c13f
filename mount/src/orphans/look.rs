//! One look through `/proc`: who has which old handle open, and what could not be seen.
//!
//! A handle is known by its inode number in `/proc/PID/fdinfo/FD`, and as an old one by the device number of its
//! filesystem, which the kernel tells without asking the filesystem.
//!
//! # What may be read
//! Directories of descriptors and their `fdinfo` take no lock that a process keeps while it waits for a filesystem, and
//! neither does comparing the tables of two threads: a process inside `execve(2)` has one thread left by the time it
//! closes files. `stat`, `cmdline` and `maps` do, so they are left alone.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::io;
use std::path::Path;

use nix::errno::Errno;

use super::fdinfo::FdInfo;
use super::sight::blindness;
use crate::dead_mount::Connections;
use crate::mountinfo;

/// `KCMP_FILES`: whether two threads have one table of descriptors.
const KCMP_FILES: libc::c_int = 2;
/// What the link of a ring's descriptor says.
const RING: &[u8] = b"anon_inode:[io_uring]";
/// Listings within one look in which somebody new may appear.
const MAX_LISTINGS: u32 = 100;

/// Who has an old handle of a key open.
#[derive(Clone, Debug)]
struct Keeper {
    pid: u32,
    command: String,
    /// Further processes.
    others: usize,
}

/// What one look found.
#[derive(Debug, Default)]
pub struct Look {
    keepers: HashMap<u64, Keeper>,
    /// Why the look proves nothing for any key, in words.
    blind: Option<String>,
    unreadable: Unreadable,
    /// Descriptors are on their way through a socket of this process.
    in_socket: Option<u32>,
    /// This process has a ring that does not show its files.
    in_ring: Option<u32>,
    /// No process or thread began while it lasted.
    pub is_quiet: bool,
}

#[derive(Debug, Default)]
struct Unreadable {
    processes: HashSet<u32>,
    error: Option<io::Error>,
}

impl Look {
    /// Why a key cannot be said to be in nobody's hands, in words for people; none where nobody has it.
    pub fn why_held(&self, ino: u64) -> Option<String> {
        if let Some(Keeper { pid, command, others }) = self.keepers.get(&ino) {
            let more = if *others > 0 { format!(" and {others} more") } else { String::new() };
            return Some(format!("pid {pid} ({command}){more} still has it open"));
        }
        if let Some(blind) = &self.blind {
            return Some(blind.clone());
        }
        let socket = self.in_socket.map(|pid| (pid, "a socket"));
        if let Some((pid, by)) = socket.or(self.in_ring.map(|pid| (pid, "a ring"))) {
            return Some(format!("an open file is on its way through {by} of pid {pid}, and may be this one"));
        }
        if let Some(error) = &self.unreadable.error {
            let (count, why) = (self.unreadable.processes.len(), Errno::from_raw(error.raw_os_error().unwrap_or(0)));
            let processes = if count == 1 { "1 process".to_owned() } else { format!("{count} processes") };
            return Some(format!("{processes} cannot be looked into: {}", why.desc()));
        }
        None
    }

    /// Whether nothing but what is on its way through a socket stands in the way of a proof for this key: a ring, or a
    /// process that cannot be looked into, will be there at the next look as well.
    pub fn is_held_in_passing(&self, ino: u64) -> bool {
        let is_all_seen = self.blind.is_none() && self.in_ring.is_none() && self.unreadable.error.is_none();
        self.in_socket.is_some() && is_all_seen && !self.keepers.contains_key(&ino)
    }
}

/// Looks for old handles of the claim files with these inode numbers.
///
/// Each comes with its name, by which a ring shows a file.
pub fn look(asked: &HashMap<u64, String>, connections: &Connections) -> Look {
    let proc = Path::new("/proc");
    let look = Look { blind: blindness(), ..Look::default() };
    let mut looking = Looking { proc, shows_counts: shows_counts(proc), asked, connections, look };
    let began = forks();
    if let Err(error) = looking.everybody() {
        looking.look.blind.get_or_insert(format!("/proc cannot be read: {error}"));
    }
    let mut look = looking.look;
    look.is_quiet = began.is_some() && began == forks();
    look
}

/// Processes and threads begun since boot.
fn forks() -> Option<u64> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    stat.lines().find_map(|line| line.strip_prefix("processes "))?.trim().parse().ok()
}

/// The numbers a directory of `/proc` lists.
fn numbers(directory: &Path) -> io::Result<Vec<u32>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        found.extend(entry?.file_name().to_str().and_then(|name| name.parse::<u32>().ok()));
    }
    Ok(found)
}

/// Whether the kernel tells how many descriptors a process has: it would tell that we have some.
fn shows_counts(proc: &Path) -> bool {
    fs::metadata(proc.join("self/fd")).is_ok_and(|fds| fds.len() > 0)
}

/// What was asked of a process that is no more.
fn is_gone(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
}

/// Whether two threads have one table of descriptors; none where the kernel does not say.
fn is_one_table(one: u32, other: u32) -> Option<bool> {
    // SAFETY: with KCMP_FILES, kcmp(2) takes two thread ids and two numbers it ignores, and writes nothing.
    match unsafe { libc::syscall(libc::SYS_kcmp, one, other, KCMP_FILES, 0, 0) } {
        0 => Some(true),
        order if order > 0 => Some(false),
        _ => None,
    }
}

struct Looking<'a> {
    proc: &'a Path,
    /// The size of a directory of descriptors is their count (Linux 6.2).
    shows_counts: bool,
    asked: &'a HashMap<u64, String>,
    connections: &'a Connections,
    look: Look,
}

impl Looking<'_> {
    /// Looks at every process there is, and at those that appear meanwhile.
    fn everybody(&mut self) -> io::Result<()> {
        let mut seen = HashSet::new();
        for _ in 0..MAX_LISTINGS {
            let mut new = numbers(self.proc)?;
            new.retain(|pid| seen.insert(*pid));
            if new.is_empty() {
                return Ok(());
            }
            for pid in new {
                if let Err(error) = self.process(pid)
                    && !is_gone(&error)
                {
                    self.look.unreadable.processes.insert(pid);
                    self.look.unreadable.error.get_or_insert(error);
                }
            }
        }
        self.look.blind.get_or_insert("processes begin faster than they can be looked at".to_owned());
        Ok(())
    }

    /// Looks at each table of descriptors of a process once: threads may have one of their own.
    fn process(&mut self, pid: u32) -> io::Result<()> {
        let tasks = self.proc.join(format!("{pid}/task"));
        let mut looked_at: Vec<u32> = Vec::new();
        let mut failed = None;
        for tid in numbers(&tasks)? {
            if looked_at.iter().any(|other| is_one_table(*other, tid) == Some(true)) {
                continue;
            }
            match self.table(pid, &tasks.join(tid.to_string())) {
                Ok(()) => looked_at.push(tid),
                Err(error) if is_gone(&error) => {}
                Err(error) => failed = Some(error),
            }
        }
        failed.map_or(Ok(()), Err)
    }

    fn table(&mut self, pid: u32, task: &Path) -> io::Result<()> {
        let (fds, infos) = (task.join("fd"), task.join("fdinfo"));
        let open = match numbers(&infos) {
            // Kernel threads have none, whoever may look into them.
            Err(error) if !is_gone(&error) && self.has_none(&fds) => return Ok(()),
            listed => listed?,
        };
        for fd in open {
            let name = fd.to_string();
            // Pipes, timers and the like are passed over; where the link cannot be read, fdinfo decides.
            let link = fs::read_link(fds.join(&name)).map(|link| link.into_os_string().into_encoded_bytes());
            if link.as_ref().is_ok_and(|link| is_beside_the_point(link)) {
                continue;
            }
            let info = match fs::read_to_string(infos.join(&name)) {
                Ok(text) => FdInfo::parse(&text),
                // Closed meanwhile.
                Err(error) if is_gone(&error) => continue,
                Err(error) => return Err(error),
            };
            if info.in_socket > 0 {
                self.look.in_socket.get_or_insert(pid);
            }
            if link.is_ok_and(|link| link == RING) {
                self.ring(pid, task, &info);
            }
            if self.asked.contains_key(&info.ino) && self.is_old(&fds.join(&name)) {
                self.found(pid, task, info.ino);
            }
        }
        Ok(())
    }

    /// Whether a table that may not be read is empty: how many descriptors there are may be asked.
    fn has_none(&self, fds: &Path) -> bool {
        self.shows_counts && fs::metadata(fds).is_ok_and(|fds| fds.len() == 0)
    }

    /// A ring may have a file that is in no table. It tells names and no numbers, so a file of the name is taken for ours.
    fn ring(&mut self, pid: u32, task: &Path, info: &FdInfo) {
        if !info.is_listed {
            self.look.in_ring.get_or_insert(pid);
        }
        let is_registered = |name: &String| info.in_ring.iter().any(|file| file == name.as_bytes());
        let registered: Vec<u64> =
            self.asked.iter().filter(|(_, name)| is_registered(name)).map(|(ino, _)| *ino).collect();
        for ino in registered {
            self.found(pid, task, ino);
        }
    }

    fn found(&mut self, pid: u32, task: &Path, ino: u64) {
        match self.look.keepers.get_mut(&ino) {
            Some(keeper) if keeper.pid == pid => {}
            Some(keeper) => keeper.others += 1,
            None => {
                let command = fs::read(task.join("comm")).unwrap_or_default();
                let command = String::from_utf8_lossy(&command).trim_end().to_owned();
                self.look.keepers.insert(ino, Keeper { pid, command, others: 0 });
            }
        }
    }

    /// Whether an open file is one of a lost connection. One of which that is not known may be.
    fn is_old(&self, link: &Path) -> bool {
        mountinfo::device_of(link).map_or(true, |device| self.connections.may_be_lost(&device))
    }
}

/// Whether a link of `/proc/PID/fd` is to something that neither is a claim file nor may carry one.
fn is_beside_the_point(link: &[u8]) -> bool {
    link.starts_with(b"pipe:[") || link.starts_with(b"anon_inode:") && link != RING
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    #[test]
    fn only_what_carries_nothing_is_passed_over() {
        for link in ["pipe:[1]", "anon_inode:[eventpoll]", "anon_inode:inotify"] {
            assert!(is_beside_the_point(link.as_bytes()), "{link}");
        }
        for link in ["anon_inode:[io_uring]", "socket:[1]", "/claims/k", "/claims/pipe:[1] (deleted)"] {
            assert!(!is_beside_the_point(link.as_bytes()), "{link}");
        }
    }

    /// A `/proc` of our own making.
    struct Proc(tempfile::TempDir);

    impl Proc {
        fn new() -> Proc {
            Proc(tempfile::tempdir().expect("directory"))
        }

        fn task(&self, pid: u32, tid: u32) -> PathBuf {
            let task = self.0.path().join(format!("{pid}/task/{tid}"));
            fs::create_dir_all(task.join("fd")).expect("made");
            fs::create_dir_all(task.join("fdinfo")).expect("made");
            fs::write(task.join("comm"), format!("worker-{tid}\n")).expect("written");
            task
        }

        fn open(&self, (pid, tid): (u32, u32), fd: u32, link: &str, info: &str) {
            let task = self.task(pid, tid);
            std::os::unix::fs::symlink(link, task.join(format!("fd/{fd}"))).expect("linked");
            fs::write(task.join(format!("fdinfo/{fd}")), info).expect("written");
        }

        fn look(&self) -> Look {
            self.look_with(&Connections::of("0:1000001", &["0:1000002"]))
        }

        fn look_with(&self, connections: &Connections) -> Look {
            let asked = HashMap::from([(KEY, "k".to_owned())]);
            let (proc, look) = (self.0.path(), Look::default());
            let mut looking = Looking { proc, shows_counts: false, asked: &asked, connections, look };
            looking.everybody().expect("looked");
            looking.look
        }
    }

    // No kernel has as many.
    const A: u32 = 50_000_010;
    const B: u32 = 50_000_020;
    const KEY: u64 = (4 << 60) | 7;

    const CLAIM: &str = "pos:\t0\nflags:\t02\nmnt_id:\t42\nino:\t4611686018427387911\n";

    #[test]
    fn only_a_handle_of_the_lost_tree_keeps_a_key() {
        let proc = Proc::new();
        let file = proc.0.path().join("claim");
        fs::write(&file, "").expect("written");
        let here = mountinfo::device_of(&file).expect("a file");
        proc.open((A, A), 3, file.to_str().expect("UTF-8"), CLAIM);
        proc.open((A, A), 4, "pipe:[1]", CLAIM);
        let why = |live, lost: &[&str]| proc.look_with(&Connections::of(live, lost)).why_held(KEY);
        let kept = Some(format!("pid {A} (worker-{A}) still has it open"));
        assert_eq!(why("0:1000001", &[&here]), kept);
        assert_eq!(why(&here, &["0:1000001"]), None, "of the tree that is served");
        assert_eq!(why("0:1000001", &["0:1000002"]), None, "of a stranger's tree");
        assert_eq!(why("0:1000001", &[]), kept, "it is not known what was lost");
        fs::remove_file(&file).expect("removed");
        assert_eq!(why("0:1000001", &["0:1000002"]), kept, "it is not known whose it is");
    }

    #[test]
    fn a_table_of_another_thread_is_looked_at() {
        let proc = Proc::new();
        proc.task(A, A);
        proc.open((A, A + 1), 3, "/claims/k (deleted)", CLAIM);
        proc.open((B, B), 3, "/claims/k", CLAIM);
        proc.open((B, B), 4, "/claims/k", CLAIM);
        let why = proc.look().why_held(KEY).expect("two have it");
        assert!(why.ends_with("and 1 more still has it open"), "{why}");
    }

    #[test]
    fn what_is_on_its_way_may_be_any_key() {
        let proc = Proc::new();
        proc.open((A, A), 3, "socket:[27]", "ino:\t27\nmnt_id:\t10\nscm_fds: 1\n");
        let why = proc.look().why_held(KEY).expect("it may be this");
        assert!(why.contains("through a socket of pid 50000010"), "{why}");
    }

    #[test]
    fn only_what_is_on_its_way_through_a_socket_passes() {
        let socket = "ino:\t27\nmnt_id:\t10\nscm_fds: 1\n";
        let proc = Proc::new();
        proc.open((A, A), 3, "socket:[27]", socket);
        let mut look = proc.look();
        assert!(look.is_held_in_passing(KEY));
        look.unreadable.error = Some(io::Error::from_raw_os_error(libc::EACCES));
        assert!(!look.is_held_in_passing(KEY), "and somebody cannot be looked into");
        for (link, info) in [("/claims/k", CLAIM), ("anon_inode:[io_uring]", "ino:\t5\nmnt_id:\t10\nUserBufs:\t0\n")] {
            let proc = Proc::new();
            proc.open((A, A), 3, "socket:[27]", socket);
            proc.open((B, B), 3, link, info);
            let look = proc.look();
            assert!(look.why_held(KEY).is_some() && !look.is_held_in_passing(KEY), "{link}");
        }
    }

    #[test]
    fn a_file_in_a_ring_is_known_by_its_name() {
        let ring = |files: &str| format!("ino:\t5\nmnt_id:\t10\n{files}UserBufs:\t0\n");
        for (files, says) in [
            ("UserFiles:\t1\n    0: /claims/k\n", "pid 50000010 ("),
            ("UserFiles:\t2\n    0: <none>\n    1: /tmp/other\n", ""),
            ("", "through a ring of pid 50000010"),
        ] {
            let proc = Proc::new();
            proc.open((A, A), 3, "anon_inode:[io_uring]", &ring(files));
            let why = proc.look().why_held(KEY).unwrap_or_default();
            assert!(why.contains(says) && why.is_empty() == says.is_empty(), "{files}: {why}");
        }
    }

    #[test]
    fn a_file_of_ones_own_is_found_by_its_number() {
        use std::os::unix::fs::MetadataExt;
        let file = tempfile::tempfile().expect("a file");
        let ino = file.metadata().expect("metadata").ino();
        let found = look(&HashMap::from([(ino, String::new())]), &Connections::default());
        assert!(found.why_held(ino).is_some_and(|why| why.contains(&format!("pid {}", std::process::id()))));
    }
}
