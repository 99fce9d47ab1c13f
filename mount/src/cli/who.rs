//! `leasefs who`: every process that keeps a key held: the one that claimed it, those that inherited its handle, and
//! those that wait.
//!
//! The kernel knows a lease by its open file, of which any number of processes may have copies. [`scan`] finds who has
//! the key's file open and which of them share an open file; here is decided which of the open files is the holder's,
//! and it is shown. Nothing is opened or locked in the tree, and nobody is waited for.

use std::collections::BTreeMap;
use std::io::{self, Write};
use std::process::ExitCode;

use anyhow::Result;
use leasefs::Key;
use leasefs::client::Status;
use leasefs::time::rfc3339;
use serde_json::{Value, json};

use super::deadlock;
use super::proc::{self, Pid};
use super::show::{self, NOTHING};
use super::table::{Column, Look, Table};
use super::tree::{Tree, TreeArgs};
use super::{EXIT_NO, complain};
use scan::{Answer, Handle, Scan};

mod scan;

/// Longest command among others on one line.
const IN_WORDS: usize = 30;

/// Which key, and how to show it.
#[derive(clap::Args, Debug)]
#[command(after_help = "\
HOW says what a process has to do with the key: it `claimed` it, it `inherited` the holder's handle (by fork, by exec, or
through a socket), it `waits` in line for so long, it `shares` it, it `writes` the attempt's result; with --all also that
it has the file `open` and nothing more. A lease ends when the last of those that claimed or inherited it has closed its
handle; `leasefs evict` ends it before.

To tell the holder's handle from others, a copy of each is taken for a moment, asked, and closed at once. Where that is
not allowed, those that may have it are shown as `perhaps`.

Exit codes: 0 somebody holds it; 1 nobody does, or there never was such a key; 2 bad usage or failure.")]
pub struct Args {
    /// Key to look for
    #[arg(value_name = "KEY")]
    pub key: String,
    /// Also processes that only have the key's file open
    #[arg(short, long)]
    pub all: bool,
    /// One JSON object
    #[arg(long)]
    pub json: bool,
    /// The tree.
    #[command(flatten)]
    pub tree: TreeArgs,
}

/// What a process has to do with a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum How {
    /// It claimed the key and has the handle still.
    Claimed,
    /// It has a copy of the holder's handle.
    Inherited,
    /// It has a handle that may be the holder's.
    Perhaps,
    /// It holds a shared lock.
    Shares,
    /// It has the result of the attempt open for writing.
    Writes,
    /// It is in line.
    Waits,
    /// It has the key's file open.
    Open,
}

impl How {
    /// As in JSON.
    pub fn word(self) -> &'static str {
        match self {
            How::Claimed => "claimed",
            How::Inherited => "inherited",
            How::Perhaps => "perhaps",
            How::Shares => "shares",
            How::Writes => "writes",
            How::Waits => "waits",
            How::Open => "open",
        }
    }

    /// The key stays held because of it.
    pub fn keeps(self) -> bool {
        self < How::Waits
    }
}

/// A process and a key.
#[derive(Clone, Debug)]
pub struct Person {
    /// The process.
    pub process: Pid,
    /// What it has to do with the key.
    pub how: How,
    /// Its descriptors.
    pub fds: Vec<u32>,
    /// Since when it waits, in Unix milliseconds.
    pub since_ms: Option<i64>,
}

/// Everybody, and how far one can be sure that it is everybody.
#[derive(Debug, Default)]
pub struct Found {
    /// By how, then by process.
    pub people: Vec<Person>,
    /// Processes that may not be looked into.
    pub unseen: usize,
    /// What cannot be said of the holder's handle, in words.
    pub remark: Option<String>,
}

/// Looks for everybody who has to do with a key.
///
/// # Errors
/// Where `/proc` or the tree cannot be read.
pub fn look(tree: &Tree, key: &Key, status: &Status) -> Result<Found> {
    let scan = scan::scan(tree, key, status)?;
    Ok(judge(status, scan))
}

/// Carries the command out.
pub fn run(args: Args) -> Result<ExitCode> {
    let (tree, key) = Tree::find_with_key(&args.tree, &args.key)?;
    let Some(status) = tree.status_of_known(&key)? else { return Ok(ExitCode::from(EXIT_NO)) };
    let mut found = look(&tree, &key, &status)?;
    if !args.all {
        found.people.retain(|person| person.how != How::Open);
    }
    let mut out = io::BufWriter::new(io::stdout().lock());
    if args.json {
        writeln!(out, "{}", object(&status, &found))?;
    } else if !found.people.is_empty() {
        table(&found).write(&mut out, Look::of_stdout())?;
    }
    out.flush()?;
    if status.is_open() {
        complain(format_args!("{key}: nobody holds it: it is {}, its newest epoch is {}", status.state, status.epoch));
    } else if let Some(remark) = &found.remark {
        complain(format_args!("{key}: {}: {remark}", show::in_the_way(&status)));
    }
    if found.unseen > 0 {
        complain(format_args!("{} could not be looked into: run as root", processes_of_others(found.unseen)));
    }
    if let Some(ring) = deadlock::ring_through(&tree, &key) {
        complain(ring);
    }
    Ok(if status.is_open() { ExitCode::from(EXIT_NO) } else { ExitCode::SUCCESS })
}

fn processes_of_others(count: usize) -> String {
    if count == 1 { "1 process of another user".to_owned() } else { format!("{count} processes of other users") }
}

/// Decides what each has to do with the key.
fn judge(status: &Status, scan: Scan) -> Found {
    let claimant = proc::holder(status);
    let has_claimed = |process: Pid| Some(process) == claimant;
    let is_held = status.holder.is_some();
    // An open file is the holder's if it says so. Where it cannot be asked, the only one that the claimant has is it, and
    // of several, or where the claimant has none, each may be.
    let says_so = |handle: &Handle| matches!(handle.answer, Answer::Holds(epoch) if epoch == status.epoch);
    let is_its = |handle: &Handle| claimant.is_some_and(|claimant| handle.open_in.contains_key(&claimant));
    let may_be = |handle: &&Handle| is_held && handle.answer == Answer::Unknown;
    let of_claimant = scan.handles.iter().filter(may_be).filter(|handle| is_its(handle)).count();
    let is_asked = scan.handles.iter().any(says_so);
    let is_holder =
        |handle: &Handle| says_so(handle) || (!is_asked && of_claimant == 1 && is_its(handle) && may_be(&handle));
    let is_known = scan.handles.iter().any(is_holder);
    let mut people: BTreeMap<(Pid, How), Person> = BTreeMap::new();
    let mut add = |process: Pid, how: How, fds: &[u32], since_ms: Option<i64>| {
        let person = people.entry((process, how)).or_insert_with(|| Person { process, how, fds: Vec::new(), since_ms });
        person.fds.extend(fds);
        person.fds.sort_unstable();
        person.fds.dedup();
    };
    for handle in &scan.handles {
        let perhaps = !is_known && may_be(&handle) && (of_claimant == 0 || is_its(handle));
        for (process, fds) in &handle.open_in {
            let how = match () {
                () if is_holder(handle) && has_claimed(*process) => How::Claimed,
                () if is_holder(handle) => How::Inherited,
                () if perhaps => How::Perhaps,
                () => How::Open,
            };
            add(*process, how, fds, None);
        }
    }
    for (process, fds) in &scan.writers {
        add(*process, How::Writes, fds, None);
    }
    for waiting in &status.line {
        let process = Pid { pid: waiting.pid, start_time: waiting.start_time };
        add(process, How::Waits, &[], show::parse_ms(&waiting.since));
    }
    for sharing in &status.sharing {
        add(Pid { pid: sharing.pid, start_time: sharing.start_time }, How::Shares, &[], None);
    }
    // The handle that one waits or shares with is told beside that.
    let busy: Vec<Pid> =
        people.keys().filter(|(_, how)| matches!(how, How::Waits | How::Shares)).map(|(process, _)| *process).collect();
    for process in busy {
        let Some(open) = people.remove(&(process, How::Open)) else { continue };
        for how in [How::Shares, How::Waits] {
            if let Some(person) = people.get_mut(&(process, how)) {
                person.fds.extend(&open.fds);
            }
        }
    }
    let mut people: Vec<Person> = people.into_values().collect();
    people.sort_by_key(|person| (person.how, person.since_ms, person.process));
    let remark = remark(status, &people, is_known, &scan.in_flight);
    Found { people, unseen: scan.unseen, remark }
}

/// What a person should know about the holder's handle that the table does not say.
fn remark(status: &Status, people: &[Person], is_known: bool, in_flight: &[u32]) -> Option<String> {
    let holder = status.holder.as_ref()?;
    if status.state == "reporting" || is_known {
        return None;
    }
    if people.iter().any(|person| person.how == How::Perhaps) {
        let text = match () {
            () if status.state == "orphaned" => {
                "its connection is lost, so no handle can be asked whether it is the holder's"
            }
            () if nix::unistd::geteuid().is_root() => "the handles do not say which is the holder's",
            () => "which handle is the holder's could not be asked: run as root",
        };
        return Some(text.to_owned());
    }
    Some(match in_flight {
        _ if holder.pid == 0 => "its holder is in a pid namespace that the server does not see".to_owned(),
        [] => "no process that can be seen has the handle: it is in another pid namespace, or was closed just now"
            .to_owned(),
        pids => format!(
            "no process here has the handle; one may be on its way through a socket of pid {}",
            pids.iter().map(u32::to_string).collect::<Vec<_>>().join(" or ")
        ),
    })
}

fn table(found: &Found) -> Table {
    let now_ms = show::now_ms();
    let has_container = found.people.iter().any(|person| proc::container(person.process.pid).is_some());
    let mut columns: Vec<Column> = ["PID", "PPID", "UID", "HOW", "FD", "AGE"].map(Column::new).into();
    if has_container {
        columns.push(Column::new("CONTAINER"));
    }
    columns.push(Column::new("COMMAND").shrinks_to(10));
    let mut table = Table::new(columns);
    for person in &found.people {
        let pid = person.process.pid;
        let is_there = person.process.is_there();
        let seen = |text: Option<String>| text.filter(|_| is_there).unwrap_or_else(|| NOTHING.to_owned());
        let how = match person.since_ms {
            Some(since_ms) => format!("{} {}", person.how.word(), show::span(now_ms - since_ms)),
            None => person.how.word().to_owned(),
        };
        let mut cells = vec![
            pid.to_string(),
            seen(proc::Stat::of(pid).map(|stat| stat.parent.to_string())),
            seen(proc::uid(pid).map(|uid| uid.to_string())),
            how,
            numbers(&person.fds),
            seen(proc::began_ms(person.process.start_time).map(|began_ms| show::span(now_ms - began_ms))),
        ];
        if has_container {
            cells.push(seen(proc::container(pid)));
        }
        cells.push(seen(proc::command_line(pid).map(|line| show::plain(&line))));
        table.push(cells);
    }
    table
}

/// A process on one line: `4711 make -j8 (claimed, fd 9)`.
pub fn in_words(person: &Person) -> String {
    let pid = person.process.pid;
    let command = proc::command_line(pid).filter(|_| person.process.is_there()).unwrap_or_else(|| NOTHING.to_owned());
    let fds = if person.fds.is_empty() { String::new() } else { format!(", fd {}", numbers(&person.fds)) };
    let command = show::cell(&command);
    format!("{pid} {} ({}{fds})", show::clip(&command, IN_WORDS), person.how.word())
}

fn numbers(fds: &[u32]) -> String {
    if fds.is_empty() {
        return NOTHING.to_owned();
    }
    fds.iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

/// Names as in `status/KEY`, where the same thing is meant.
fn object(status: &Status, found: &Found) -> Value {
    let people: Vec<_> = found
        .people
        .iter()
        .map(|person| {
            let pid = person.process.pid;
            let stat = proc::Stat::of(pid).filter(|stat| stat.start_time == person.process.start_time);
            json!({
                "pid": pid,
                "ppid": stat.map(|stat| stat.parent),
                "start_time": person.process.start_time,
                "started": stat.and_then(|stat| proc::began_ms(stat.start_time)).map(rfc3339),
                "uid": stat.and_then(|_| proc::uid(pid)),
                "command": stat.and_then(|_| proc::command_line(pid)),
                "container": stat.and_then(|_| proc::container(pid)),
                "how": person.how.word(),
                "keeps": person.how.keeps(),
                "fds": person.fds,
                "since": person.since_ms.map(rfc3339),
            })
        })
        .collect();
    json!({
        "key": status.key,
        "state": status.state,
        "epoch": status.epoch,
        "processes": people,
        "unseen": found.unseen,
        "remark": found.remark,
    })
}
