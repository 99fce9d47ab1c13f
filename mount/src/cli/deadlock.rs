//! Processes that wait for each other in a ring: none of them gets what it waits for until one gives up.
//!
//! A key waits for another when one that keeps it held is in the other's line. Its holder keeps it held; so does
//! whoever its holder may be waiting for: a descendant, or the process that a `leasefs claim --for` is bound to. And
//! where the holder is gone, each process that has the key's file open.
//!
//! It is a warning, not a proof: a thread may let go of the key that another thread's wait seems to keep. Nothing is
//! ended because of it.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fs;
use std::path::Path;

use anyhow::Result;
use leasefs::Key;
use leasefs::client::Status;

use super::proc::{self, Pid};
use super::show;
use super::tree::Tree;

/// What `/proc/PID/fd` shows of a descriptor of a process.
const PIDFD: &str = "anon_inode:[pidfd]";

/// Most keys looked at on the way round from one key.
const MOST_KEYS: usize = 1_000;

/// A key that is held, as far as rings go.
#[derive(Clone, Debug, Default)]
pub struct Held {
    /// The key.
    pub key: String,
    /// Its newest epoch.
    pub epoch: u64,
    /// Who holds or shares it, and their commands.
    pub holders: Vec<(Pid, String)>,
    /// Who waits for it.
    pub line: Vec<Pid>,
}

impl Held {
    /// Of a key that somebody holds and somebody waits for.
    pub fn of(status: &Status) -> Option<Held> {
        if status.waiters == 0 {
            return None;
        }
        let seen = |pid, start_time| Some(Pid { pid, start_time }).filter(|process| process.pid != 0);
        let holder = status.holder.iter().filter_map(|who| Some((seen(who.pid, who.start_time)?, who.command.clone())));
        let sharing =
            status.sharing.iter().filter_map(|who| Some((seen(who.pid, who.start_time)?, who.command.clone())));
        let held = Held {
            key: status.key.clone(),
            epoch: status.epoch,
            holders: holder.chain(sharing).collect(),
            line: status.line.iter().filter_map(|who| seen(who.pid, who.start_time)).collect(),
        };
        (!held.holders.is_empty() && !held.line.is_empty()).then_some(held)
    }
}

/// Keys of which each is kept held by a process that waits for the next, and the last by one that waits for the first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ring {
    /// The keys in this order, the smallest first.
    pub keys: Vec<String>,
    /// The same for a person: who holds what and waits for what, and what to do.
    pub text: String,
}

/// Every ring among these keys, the shortest through each key, each once. `keeps` says which holders cannot let go before
/// this process in the line of this key has been served.
pub fn rings(held: &[Held], mut keeps: impl FnMut(&Held, Pid) -> Vec<Pid>) -> Vec<Ring> {
    let mut kept_by: HashMap<Pid, Vec<usize>> = HashMap::new();
    for (at, key) in held.iter().enumerate() {
        for (holder, _) in &key.holders {
            kept_by.entry(*holder).or_default().push(at);
        }
    }
    // From each key to those whose line has somebody who keeps it.
    let mut waits_for: Vec<Vec<usize>> = vec![Vec::new(); held.len()];
    for (at, key) in held.iter().enumerate() {
        let keepers: HashSet<Pid> = key.line.iter().flat_map(|waiter| keeps(key, *waiter)).collect();
        for kept in keepers.iter().filter_map(|keeper| kept_by.get(keeper)).flatten() {
            if !waits_for[*kept].contains(&at) {
                waits_for[*kept].push(at);
            }
        }
    }
    let mut found = HashSet::new();
    let mut rings = Vec::new();
    for start in 0..held.len() {
        let Some(mut ring) = way_round(start, &waits_for) else { continue };
        let first = ring.iter().enumerate().min_by_key(|(_, at)| &held[**at].key).map_or(0, |(first, _)| first);
        ring.rotate_left(first);
        if found.insert(ring.clone()) {
            let keys = ring.iter().map(|at| held[*at].key.clone()).collect();
            rings.push(Ring { keys, text: in_words(&ring, held) });
        }
    }
    rings
}

/// The shortest way from a key back to it.
fn way_round(start: usize, waits_for: &[Vec<usize>]) -> Option<Vec<usize>> {
    let mut came_from: HashMap<usize, usize> = HashMap::new();
    let mut next = VecDeque::from([start]);
    while let Some(at) = next.pop_front() {
        for to in &waits_for[at] {
            if *to == start {
                let mut way = vec![at];
                while let Some(before) = came_from.get(way.last()?).filter(|_| way.last() != Some(&start)) {
                    way.push(*before);
                }
                way.reverse();
                return Some(way);
            }
            if !came_from.contains_key(to) {
                came_from.insert(*to, at);
                next.push_back(*to);
            }
        }
    }
    None
}

fn in_words(ring: &[usize], held: &[Held]) -> String {
    let who = |key: &Held| match key.holders.first() {
        Some((process, command)) => format!("pid {} ({})", process.pid, show::cell(command)),
        None => "nobody".to_owned(),
    };
    let first = &held[ring[0]];
    let key = |at: usize| show::plain(&held[at].key);
    let cure = format!("end one of them, or `leasefs evict {} --epoch {}`", key(ring[0]), first.epoch);
    if ring.len() == 1 {
        return format!(
            "deadlock: {} of {} is waited for by itself, a child of it, or whom it holds it for: {cure}",
            key(ring[0]),
            who(first)
        );
    }
    let mut text = String::from("deadlock: ");
    for (number, at) in ring.iter().enumerate() {
        let next = ring[(number + 1) % ring.len()];
        let and = if number == 0 { "" } else { ", " };
        text += &format!("{and}{}, which has {}, waits for {}", who(&held[*at]), key(*at), key(next));
    }
    format!("{text}: {cure}")
}

/// The rings among keys of which the statuses are known.
pub fn among<'a>(root: &Path, statuses: impl IntoIterator<Item = &'a Status>) -> Vec<Ring> {
    let held: Vec<Held> = statuses.into_iter().filter_map(Held::of).collect();
    if held.is_empty() {
        return Vec::new();
    }
    let kin = Kin::of(root, &held);
    rings(&held, |key, waiter| kin.kept_by(key, waiter))
}

/// The ring that a key is in, in words; none where there is none, or it cannot be seen. Looks only at the keys that those
/// in line hold, so it is cheap however large the tree is.
pub fn ring_through(tree: &Tree, key: &Key) -> Option<String> {
    // A warning that cannot be given is no reason to fail.
    find_through(tree, key).ok().flatten()
}

fn find_through(tree: &Tree, key: &Key) -> Result<Option<String>> {
    let mut known: HashMap<String, Held> = HashMap::new();
    let mut ahead = VecDeque::from([key.as_str().to_owned()]);
    let mut seen: HashSet<String> = HashSet::from([key.as_str().to_owned()]);
    while let Some(path) = ahead.pop_front() {
        let Ok(parsed) = Key::parse(&path) else { continue };
        let Some(held) = tree.status(&parsed)?.as_ref().and_then(Held::of) else { continue };
        for pid in keepers(&held.line) {
            for open in keys_open_in(tree.root(), pid) {
                if seen.len() < MOST_KEYS && seen.insert(open.clone()) {
                    ahead.push_back(open);
                }
            }
        }
        known.insert(path, held);
    }
    let held: Vec<Held> = known.into_values().collect();
    let kin = Kin::of(tree.root(), &held);
    let found = rings(&held, |key, waiter| kin.kept_by(key, waiter));
    Ok(found.into_iter().find(|ring| ring.keys.iter().any(|member| member == key.as_str())).map(|ring| ring.text))
}

/// The processes that may have what these keep from being let go: themselves, their parents, and what is bound to any.
fn keepers(line: &[Pid]) -> HashSet<u32> {
    let mut keepers: HashSet<u32> = line.iter().flat_map(|waiter| waiter.family()).map(|process| process.pid).collect();
    let is_bound = |pid: &u32| is_holder(*pid) && bound_to(*pid).iter().any(|bound| keepers.contains(bound));
    let bound: Vec<u32> = proc::all().into_iter().filter(is_bound).collect();
    keepers.extend(bound);
    keepers
}

/// It is one of those processes that `leasefs claim` leaves behind to hold a key.
fn is_holder(pid: u32) -> bool {
    proc::name(pid).is_some_and(|name| name.starts_with("leasefs"))
}

/// Keys of this tree that a process has open, by the names its descriptors show, in its own mount namespace or ours.
fn keys_open_in(root: &Path, pid: u32) -> HashSet<String> {
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fd")) else { return HashSet::new() };
    let links = entries.flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
    links.filter_map(|link| key_of(root, link.to_str()?)).collect()
}

/// The key that a link into a tree names. A bind mount shows it under another root: what follows `claims/` is the key
/// all the same, and what is no key of this tree has no status there.
fn key_of(root: &Path, link: &str) -> Option<String> {
    let link = link.strip_suffix(" (deleted)").unwrap_or(link);
    let claims = format!("{}/claims/", root.display());
    let key = link.strip_prefix(&claims).or_else(|| link.split_once("/claims/").map(|(_, key)| key))?;
    Key::parse(key).ok().map(|key| key.as_str().to_owned())
}

/// Which processes keep which from letting go.
struct Kin<'a> {
    root: &'a Path,
    /// Of a process that something is bound to, what is: `leasefs claim --for` holds until it ends.
    bound: HashMap<u32, Vec<Pid>>,
    /// The keys of holders that are gone: somebody inherited their handles.
    inherited: HashMap<&'a str, Pid>,
}

impl<'a> Kin<'a> {
    fn of(root: &'a Path, held: &'a [Held]) -> Kin<'a> {
        let mut kin = Kin { root, bound: HashMap::new(), inherited: HashMap::new() };
        for key in held {
            for (holder, _) in &key.holders {
                if !holder.is_there() {
                    kin.inherited.insert(&key.key, *holder);
                } else if is_holder(holder.pid) {
                    for bound in bound_to(holder.pid) {
                        kin.bound.entry(bound).or_default().push(*holder);
                    }
                }
            }
        }
        kin
    }

    /// The holders that this process in the line of a key keeps from letting go.
    fn kept_by(&self, waits_for: &Held, waiter: Pid) -> Vec<Pid> {
        let family = waiter.family();
        let mut kept = family.clone();
        kept.extend(family.iter().filter_map(|process| self.bound.get(&process.pid)).flatten());
        if !self.inherited.is_empty() {
            // It has the file open that it waits with, which keeps nothing.
            let open = family.iter().flat_map(|process| keys_open_in(self.root, process.pid));
            let open = open.filter(|open| *open != waits_for.key);
            kept.extend(open.filter_map(|open| self.inherited.get(open.as_str()).copied()));
        }
        kept
    }
}

/// The processes that a process has a descriptor of.
///
/// Nothing is asked of its other descriptors: an epoll's waits for whatever the process waits for in it, and no signal
/// ends that.
fn bound_to(pid: u32) -> Vec<u32> {
    let Ok(entries) = fs::read_dir(format!("/proc/{pid}/fd")) else { return Vec::new() };
    let is_pidfd = |entry: &fs::DirEntry| fs::read_link(entry.path()).is_ok_and(|link| link.as_os_str() == PIDFD);
    let bound = entries.flatten().filter(is_pidfd);
    let texts = bound.filter_map(|entry| {
        let fd = entry.file_name();
        fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("fdinfo").join(fd)).ok()
    });
    texts.filter_map(|text| text.lines().find_map(|line| line.strip_prefix("Pid:"))?.trim().parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn process(pid: u32) -> Pid {
        Pid { pid, start_time: 1 }
    }

    fn held(key: &str, holder: u32, line: &[u32]) -> Held {
        let holders = vec![(process(holder), "sh".to_owned())];
        Held { key: key.to_owned(), epoch: 3, holders, line: line.iter().map(|pid| process(*pid)).collect() }
    }

    /// As if each process had no family.
    fn alone(_: &Held, waiter: Pid) -> Vec<Pid> {
        vec![waiter]
    }

    fn keys(rings: &[Ring]) -> Vec<Vec<&str>> {
        rings.iter().map(|ring| ring.keys.iter().map(String::as_str).collect()).collect()
    }

    #[test]
    fn two_that_wait_for_each_other_are_a_ring() {
        let found = rings(&[held("b", 2, &[1]), held("a", 1, &[2]), held("c", 4, &[1, 2])], alone);
        assert_eq!(keys(&found), [["a", "b"]]);
        let text = "deadlock: pid 1 (sh), which has a, waits for b, pid 2 (sh), which has b, waits for a: end one of \
                    them, or `leasefs evict a --epoch 3`";
        assert_eq!(found[0].text, text);
    }

    #[test]
    fn a_line_without_a_way_back_is_no_ring() {
        assert_eq!(rings(&[held("a", 1, &[2, 3]), held("b", 2, &[3]), held("c", 3, &[4])], alone), []);
        assert_eq!(rings(&[], alone), []);
    }

    #[test]
    fn each_ring_is_told_once() {
        let keys_held =
            [held("a", 1, &[3]), held("b", 2, &[1]), held("c", 3, &[2]), held("x", 7, &[8, 1]), held("y", 8, &[7])];
        assert_eq!(keys(&rings(&keys_held, alone)), [vec!["a", "b", "c"], vec!["x", "y"]]);
    }

    #[test]
    fn a_child_that_waits_for_its_parents_key_is_a_ring_of_one() {
        let family = |_: &Held, waiter: Pid| if waiter.pid == 5 { vec![waiter, process(1)] } else { vec![waiter] };
        let found = rings(&[held("a", 1, &[5])], family);
        assert_eq!(keys(&found), [["a"]]);
        assert!(found[0].text.contains("waited for by itself, a child of it"), "{}", found[0].text);
    }

    #[test]
    fn each_of_those_who_share_a_key_is_waited_for() {
        let mut shared = held("s", 1, &[9]);
        shared.holders.push((process(2), "reader".to_owned()));
        assert_eq!(keys(&rings(&[shared, held("t", 9, &[2])], alone)), [["s", "t"]]);
    }

    #[test]
    fn a_link_names_its_key_whatever_the_mount() {
        let root = Path::new("/mnt/a");
        for (link, key) in [
            ("/mnt/a/claims/t/k", Some("t/k")),
            ("/mnt/a/claims/t/k (deleted)", Some("t/k")),
            ("/leases/claims/k", Some("k")),
            ("/mnt/a/status/k", None),
            ("socket:[7]", None),
        ] {
            assert_eq!(key_of(root, link).as_deref(), key, "{link}");
        }
    }
}
