//! What `/proc` tells commands of a process: its parent, when it began, what it runs, in which container.
//!
//! For commands only: `stat` and `cmdline` wait while a process is inside `execve(2)`, so the server must never read
//! them.

use std::fmt;
use std::fs;
use std::num::ParseIntError;
use std::str::FromStr;

use leasefs::client::Status;
use nix::unistd::{SysconfVar, sysconf};

/// `PF_KTHREAD` in field 9 of `/proc/PID/stat`: a thread of the kernel.
const PF_KTHREAD: u64 = 0x0020_0000;
/// Digits of a container's id.
const ID_LENGTH: usize = 64;
/// Those that are shown, as container tools show them.
const ID_DIGITS: usize = 12;

/// A process that no later one is taken for: both numbers are 0 where it cannot be seen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Pid {
    /// Its number.
    pub pid: u32,
    /// When it began, in clock ticks since boot.
    pub start_time: u64,
}

impl fmt::Display for Pid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.pid, self.start_time)
    }
}

impl FromStr for Pid {
    type Err = String;

    fn from_str(text: &str) -> Result<Pid, String> {
        let (pid, start_time) = text.split_once(':').ok_or("not PID:START")?;
        let wrong = |error: ParseIntError| error.to_string();
        Ok(Pid { pid: pid.parse().map_err(wrong)?, start_time: start_time.parse().map_err(wrong)? })
    }
}

/// `/proc/PID/stat`, as far as it matters here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stat {
    /// Its parent; 0 for none that can be seen.
    pub parent: u32,
    /// Its session: the number of the leader; 0 for one outside of this pid namespace.
    pub session: u32,
    /// When it began, in clock ticks since boot.
    pub start_time: u64,
    /// It is a thread of the kernel, which has no files.
    pub is_kernel: bool,
    /// It has ended, its files closed, and its parent has not heard yet.
    pub has_ended: bool,
}

impl Pid {
    /// The process of this number; none if it is gone.
    pub fn of(pid: u32) -> Option<Pid> {
        Stat::of(pid).map(|stat| Pid { pid, start_time: stat.start_time })
    }

    /// It is there and has not ended, and is none that took its number over.
    pub fn is_there(self) -> bool {
        let is_itself = |stat: Stat| stat.start_time == self.start_time && !stat.has_ended;
        self.pid != 0 && Stat::of(self.pid).is_some_and(is_itself)
    }

    /// It and its parents, as far as they can be seen.
    pub fn family(self) -> Vec<Pid> {
        let mut family = Vec::new();
        let mut at = self;
        while at.pid > 1
            && !family.contains(&at)
            && let Some(stat) = Stat::of(at.pid).filter(|stat| stat.start_time == at.start_time)
        {
            family.push(at);
            at = Pid::of(stat.parent).unwrap_or_default();
        }
        family
    }
}

impl Stat {
    /// Reads it; none if the process is gone.
    pub fn of(pid: u32) -> Option<Stat> {
        Stat::parse(&read(pid, "stat")?)
    }

    /// Any character may be in the command, so the last `)` ends it.
    fn parse(text: &str) -> Option<Stat> {
        let fields: Vec<&str> = text.rsplit_once(") ")?.1.split_ascii_whitespace().collect();
        let number = |field: usize| fields.get(field - 3)?.parse::<u64>().ok();
        Some(Stat {
            parent: u32::try_from(number(4)?).ok()?,
            session: u32::try_from(number(6)?).ok()?,
            start_time: number(22)?,
            is_kernel: number(9)? & PF_KTHREAD != 0,
            // The first thread may have ended while others go on.
            has_ended: matches!(fields.first(), Some(&("Z" | "X"))) && number(20)? <= 1,
        })
    }
}

/// The process that holds a key; none where nobody does or it cannot be seen by its number.
pub fn holder(status: &Status) -> Option<Pid> {
    let holder = status.holder.as_ref()?;
    (holder.pid != 0).then_some(Pid { pid: holder.pid, start_time: holder.start_time })
}

/// A file of a process. Names in it are whatever its user chose, so they need not be UTF-8.
fn read(pid: u32, file: &str) -> Option<String> {
    let bytes = fs::read(format!("/proc/{pid}/{file}")).ok()?;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Every process that `/proc` lists.
pub fn all() -> Vec<u32> {
    let Ok(entries) = fs::read_dir("/proc") else { return Vec::new() };
    let mut pids: Vec<u32> = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect();
    pids.sort_unstable();
    pids
}

/// The user a process acts as; none if it is gone.
pub fn uid(pid: u32) -> Option<u32> {
    let status = read(pid, "status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("Uid:"))?;
    // Real, effective, saved, of the filesystem.
    line.split_ascii_whitespace().nth(1)?.parse().ok()
}

/// Its name, as `comm` has it.
pub fn name(pid: u32) -> Option<String> {
    read(pid, "comm").map(|comm| comm.trim_end().to_owned())
}

/// Its command line, a blank between arguments; its name where it has none.
pub fn command_line(pid: u32) -> Option<String> {
    let bytes = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    let words: Vec<_> = bytes.split(|byte| *byte == 0).map(String::from_utf8_lossy).collect();
    let line = words.join(" ").trim_end().to_owned();
    if line.is_empty() { name(pid) } else { Some(line) }
}

/// When a process began, in Unix milliseconds.
pub fn began_ms(start_time: u64) -> Option<i64> {
    let ticks = u64::try_from(sysconf(SysconfVar::CLK_TCK).ok()??).ok().filter(|ticks| *ticks > 0)?;
    let since_boot_ms = i64::try_from(start_time.checked_mul(1_000)? / ticks).ok()?;
    let boot = nix::time::clock_gettime(nix::time::ClockId::CLOCK_BOOTTIME).ok()?;
    let up_ms = boot.tv_sec().checked_mul(1_000)?.checked_add(boot.tv_nsec() / 1_000_000)?;
    Some(super::show::now_ms() - up_ms + since_boot_ms)
}

/// Where a process runs, by its control group: a container (`docker:0123456789ab`) or a service (`cron.service`); none
/// where it is in neither, or gone.
pub fn container(pid: u32) -> Option<String> {
    container_in(&read(pid, "cgroup")?)
}

fn container_in(cgroups: &str) -> Option<String> {
    let paths: Vec<&str> = cgroups.lines().filter_map(|line| line.splitn(3, ':').nth(2)).collect();
    let found = paths.iter().find_map(|path| by_container(path));
    found.or_else(|| paths.iter().find_map(|path| by_service(path)))
}

fn by_container(path: &str) -> Option<String> {
    // The innermost one is where it runs.
    path.rsplit('/').find_map(|part| {
        let name = part.strip_suffix(".scope").unwrap_or(part);
        if let Some(name) = name.strip_prefix("lxc.payload.") {
            return Some(format!("lxc:{name}"));
        }
        let (by, id) = match name.rsplit_once(['-', ':']) {
            Some((by, id)) => (by, id),
            None => ("", name),
        };
        let is_id = id.len() == ID_LENGTH && id.bytes().all(|byte| byte.is_ascii_hexdigit());
        is_id.then(|| {
            let maker = maker_of(by, path);
            format!("{maker}{}", &id[..ID_DIGITS])
        })
    })
}

/// Who made a container, as it is shown before the id.
fn maker_of(by: &str, path: &str) -> &'static str {
    if path.contains("kubepods") {
        return "k8s:";
    }
    match by {
        "docker" => "docker:",
        "libpod" | "crio" | "libpod-conmon" => "podman:",
        "cri-containerd" | "containerd" | "nerdctl" => "containerd:",
        _ if path.contains("/docker/") => "docker:",
        _ if path.contains("libpod") => "podman:",
        _ => "",
    }
}

fn by_service(path: &str) -> Option<String> {
    let part = path.rsplit('/').find(|part| part.ends_with(".service"))?;
    // What a whole session runs under says nothing.
    (!part.starts_with("user@")).then(|| part.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_may_have_parentheses() {
        let text = "7 (a) b) (c) S 3 7 7 0 -1 4194304 1 0 0 0 0 0 0 0 20 0 1 0 12345 0 0";
        let stat = Stat { parent: 3, session: 7, start_time: 12345, is_kernel: false, has_ended: false };
        assert_eq!(Stat::parse(text), Some(stat));
        assert_eq!(Stat::parse(&text.replace(" S ", " Z ")), Some(Stat { has_ended: true, ..stat }));
        assert_eq!(Stat::parse("7 (x"), None);
    }

    #[test]
    fn ones_own_family_begins_with_oneself() {
        let own = Pid::of(std::process::id()).expect("it is there");
        assert!(own.is_there());
        assert_eq!(own.family().first(), Some(&own));
        assert!(!Pid { start_time: own.start_time + 1, ..own }.is_there());
        let age_ms = super::super::show::now_ms() - began_ms(own.start_time).expect("a time");
        assert!((-1_000..3_600_000).contains(&age_ms), "{age_ms}");
    }

    #[test]
    fn containers_are_known_by_their_control_group() {
        let id = "0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
        for (path, shown) in [
            (format!("/system.slice/docker-{id}.scope"), Some("docker:0123456789ab")),
            (format!("/docker/{id}"), Some("docker:0123456789ab")),
            (format!("/machine.slice/libpod-{id}.scope/container"), Some("podman:0123456789ab")),
            (format!("/libpod_parent/libpod-{id}"), Some("podman:0123456789ab")),
            (format!("/kubepods.slice/kubepods-pod7.slice/cri-containerd-{id}.scope"), Some("k8s:0123456789ab")),
            (
                format!("/system.slice/containerd.service/kubepods-burstable-pod7.slice:cri-containerd:{id}"),
                Some("k8s:0123456789ab"),
            ),
            ("/lxc.payload.web/system.slice".to_owned(), Some("lxc:web")),
            ("/system.slice/cron.service".to_owned(), Some("cron.service")),
            ("/user.slice/user-0.slice/user@0.service/app.slice/job.service".to_owned(), Some("job.service")),
            ("/user.slice/user-0.slice/user@0.service/init.scope".to_owned(), None),
            ("/user.slice/user-0.slice/session-3.scope".to_owned(), None),
            ("/".to_owned(), None),
        ] {
            assert_eq!(container_in(&format!("0::{path}\n")).as_deref(), shown, "{path}");
        }
    }
}
