//! Listing while claims come and go: what stays is listed exactly once, each time.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::time::Instant;

use serde_json::json;

use crate::common::agent::{Agent, hold_all};
use crate::common::{Mount, PATIENCE};

const STABLE: usize = 10_000;

#[test]
fn ten_thousand_held_keys_are_each_listed_once_while_others_change() {
    let mount = Mount::new();
    fs::create_dir(mount.claim("ns")).expect("mkdir");
    let churner = Agent::new();
    let keys: Vec<_> = (0..STABLE).map(|n| mount.claim(&format!("ns/stable-{n:05}"))).collect();
    let _held = hold_all(&keys);
    // Names before, between and after the stable ones come and go until the test is done.
    churner.begin(
        "script",
        json!([
            "n = 0\nwhile True:\n  n += 1\n  names = [f'{ns}/{prefix}{n % 97}' for prefix in ('a-', 'stable-0', 'stable-5000x', 'z-')]\n  fds = [os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL) for name in names]\n  for fd in fds: os.close(fd)",
            { "ns": mount.claim("ns") }
        ]),
    );
    let expected: BTreeSet<String> = (0..STABLE).map(|n| format!("stable-{n:05}")).collect();
    // They all have been there, so the rest of the time they come and go.
    mount.wait_status("ns/z-1", "the churner is at it", |status| status["epoch"].as_u64() >= Some(1));
    let cycles = || mount.status("ns/z-1")["epoch"].as_u64().expect("an epoch");
    let (first, until) = (cycles(), Instant::now() + PATIENCE);
    for round in 0.. {
        if round >= 5 && cycles() > first {
            break;
        }
        assert!(round < 5 || Instant::now() < until, "nothing came and went meanwhile");
        for subtree in ["claims", "status"] {
            let mut seen: BTreeMap<String, u32> = BTreeMap::new();
            for entry in fs::read_dir(mount.root().join(subtree).join("ns")).expect("namespace") {
                *seen.entry(entry.expect("entry").file_name().into_string().expect("UTF-8")).or_default() += 1;
            }
            let twice: Vec<&String> = seen.iter().filter(|(_, times)| **times > 1).map(|(name, _)| name).collect();
            assert!(twice.is_empty(), "round {round}, {subtree}: listed twice: {twice:?}");
            let missing: Vec<&String> = expected.iter().filter(|name| !seen.contains_key(*name)).collect();
            assert!(
                missing.is_empty(),
                "round {round}, {subtree}: not listed: {} such as {:?}",
                missing.len(),
                missing[0]
            );
        }
    }
    assert_eq!(churner.answer_within(std::time::Duration::ZERO), None, "the claims went on");
}

#[test]
fn a_listing_goes_on_where_it_stopped_after_its_place_was_removed() {
    let mount = Mount::new();
    let keys: Vec<_> = (0..2000).map(|n| mount.claim(&format!("{n:04}"))).collect();
    let held = hold_all(&keys);
    let mut listing = fs::read_dir(mount.root().join("claims")).expect("claims");
    let mut seen: BTreeSet<String> = BTreeSet::new();
    // Read a part, let go of every second key, read the rest.
    for entry in listing.by_ref().take(300) {
        seen.insert(entry.expect("entry").file_name().into_string().expect("UTF-8"));
    }
    let fds = held.iter().flat_map(|(agent, fds)| fds.iter().map(move |fd| (agent, *fd)));
    fds.skip(1).step_by(2).for_each(|(agent, fd)| agent.close(fd));
    for entry in listing {
        let name = entry.expect("entry").file_name().into_string().expect("UTF-8");
        assert!(seen.insert(name.clone()), "{name} twice");
    }
    for number in (0..2000).step_by(2) {
        assert!(seen.contains(&format!("{number:04}")), "{number:04} was there all the time");
    }
}

#[test]
fn rewinding_shows_the_present() {
    let mount = Mount::new();
    let agent = Agent::new();
    let first = agent.create(&mount.claim("first")).expect("free key");
    let seen = agent
        .script(
            "listing = os.open(claims, os.O_RDONLY | os.O_DIRECTORY)\nold = sorted(os.listdir(listing))\nos.close(first)\nos.open(claims + '/second', os.O_RDWR | os.O_CREAT | os.O_EXCL)\nresult = [old, sorted(os.listdir(listing))]",
            json!({ "claims": mount.root().join("claims"), "first": first }),
        )
        .expect("list");
    assert_eq!(seen, json!([["first"], ["second"]]));
}
