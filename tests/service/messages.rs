//! Each failure is told in one line, in the words of one table, with the cure: `leasefs help errors`. README's
//! troubleshooting says the same.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

use crate::common::agent::Agent;
use crate::common::{InTime, LEASEFS, Mount, leasefs_for_all, stdout};

/// The table: what is wrong, and the cure. Words in capitals stand for what varies.
fn table() -> Vec<(String, String)> {
    let output = Command::new(LEASEFS).args(["help", "errors"]).env("COLUMNS", "100").output_in_time();
    let mut rows: Vec<(String, String)> = Vec::new();
    let mut is_row = false;
    for line in stdout(&output).lines() {
        match line.strip_prefix("        ") {
            Some(cure) if is_row => {
                let last = &mut rows.last_mut().expect("a row").1;
                *last = format!("{last} {}", cure.trim()).trim().to_owned();
            }
            _ => match line.strip_prefix("  ") {
                Some(what) => {
                    rows.push((what.to_owned(), String::new()));
                    is_row = true;
                }
                None => is_row = false,
            },
        }
    }
    assert!(rows.len() > 40, "{rows:?}");
    rows
}

/// Whether a text is a template with its words in capitals filled in.
fn fits(template: &str, text: &str) -> bool {
    let is_variable = |word: &str| word.len() > 1 && word.bytes().all(|byte| byte.is_ascii_uppercase());
    // Pieces of the template between what varies; each must come after the one before.
    let names = [
        "DIR",
        "KEY",
        "NAME",
        "BYTES",
        "LABEL",
        "MOUNTPOINT",
        "EPOCH",
        "ENOTCONN",
        "CAP",
        "SYS",
        "ADMIN",
        "LEASEFS",
        "ROOT",
        "XDG",
        "STATE",
        "HOME",
        "HOLDER",
    ];
    let mut pieces = vec![String::new()];
    for word in template.split_inclusive(|c: char| !c.is_ascii_alphanumeric()) {
        let bare = word.trim_end_matches(|c: char| !c.is_ascii_alphanumeric());
        if is_variable(bare) && !names.contains(&bare) {
            pieces.push(word[bare.len()..].to_owned());
        } else {
            pieces.last_mut().expect("one").push_str(word);
        }
    }
    let mut rest = match text.strip_prefix(pieces[0].as_str()) {
        Some(rest) => rest,
        None => return false,
    };
    for piece in &pieces[1..] {
        match rest.find(piece.as_str()) {
            Some(at) => rest = &rest[at + piece.len()..],
            None => return false,
        }
    }
    rest.is_empty() || pieces.len() > 1 && pieces.last().is_some_and(String::is_empty)
}

#[test]
fn templates_are_recognized() {
    assert!(fits("PATH is not empty: give an empty directory", "/mnt is not empty: give an empty directory"));
    assert!(!fits("PATH is not empty: give an empty directory", "/mnt is not empty: go away"));
    assert!(fits("cannot open it (WHY): see PATH", "cannot open it (no): see /x/y"));
}

#[test]
fn what_is_told_is_in_the_table() {
    let table = table();
    let told = |output: &Output, expected: &str| {
        let said = String::from_utf8_lossy(&output.stderr).trim_end().to_owned();
        assert!(!output.status.success() && said.lines().count() == 1, "{output:?}");
        assert!(said.contains(expected), "{expected}: {said}");
        let said = said.strip_prefix("leasefs: ").unwrap_or_else(|| panic!("{said}"));
        assert!(table.iter().any(|(what, cure)| fits(&format!("{what}: {cure}"), said)), "not in the table: {said}");
    };
    let run = |arguments: &[&Path]| {
        let mut command = Command::new("timeout");
        command.arg("60").arg(LEASEFS).args(arguments).env_remove("LEASEFS_ROOT").output_in_time()
    };
    let word = Path::new;
    let dir = tempfile::tempdir().expect("directory");
    let at = |name: &str| dir.path().join(name);
    fs::create_dir(at("mnt")).expect("mkdir");
    fs::create_dir(at("full")).expect("mkdir");
    fs::write(at("full/file"), "").expect("file");

    let mount = |mountpoint: &Path, state: &Path| run(&[word("mount"), mountpoint, word("--state"), state]);
    told(&mount(&at("nowhere"), &at("s")), "does not exist");
    told(&mount(&at("full"), &at("s")), "is not empty");
    told(&mount(&at("full/file"), &at("s")), "is not a directory");
    told(&mount(&at("mnt"), &at("no/s")), "does not exist");
    told(&mount(&at("mnt"), &at("mnt/s")), "is inside the mountpoint");
    told(&mount(&at("mnt"), &at("full/file")), "cannot be made");
    told(
        &run(&[word("mount"), &at("mnt"), word("--state"), &at("s"), word("-o"), word("bind")]),
        "-o bind is not known",
    );
    told(&run(&[word("unmount"), &at("mnt")]), "is not a leasefs mount");
    told(&run(&[word("ls"), word("--root"), &at("mnt")]), "no leasefs tree is mounted here");
    told(&run(&[word("verify"), word("--state"), &at("full")]), "no registry is here");

    let mut served = Mount::new();
    let agent = Agent::new();
    let fd = agent.create(&served.claim("k")).expect("free key");
    told(&mount(&at("mnt"), &served.state()), "already served");
    told(&mount(&served.root(), &at("s")), "already a leasefs mount");
    told(&mount(&at("mnt"), &served.claim("s")), "is inside the leasefs tree");
    told(&run(&[word("unmount"), &served.root()]), "is in use");
    told(&served.leasefs(&["status", "/etc/passwd"]), "not below");
    fs::create_dir(served.claim("team")).expect("mkdir");
    told(&served.leasefs(&["status", "team"]), "a namespace, not a key");
    told(&served.leasefs(&["status", "k/below"]), "a part of it is a key");
    let mut as_other = served.command("setpriv");
    let everybodys = leasefs_for_all(&served);
    as_other.args(["--reuid", "12345", "--regid", "12345", "--clear-groups"]).arg(everybodys).arg("ls");
    told(&as_other.output_in_time(), "only a tree mounted with --allow-other");
    agent.close(fd);
    drop(agent);

    served.lose_connection();
    told(&served.leasefs(&["ls"]), "its keeper and server are gone");
    told(&mount(&served.root(), &at("s")), "a mount whose server is gone");
    served.start(&[]);
    served.unmount();
    let registry = rusqlite::Connection::open(served.state().join("registry.db")).expect("registry");
    registry.execute_batch("PRAGMA user_version = 9999").expect("SQL");
    drop(registry);
    told(&mount(&at("mnt"), &served.state()), "newer leasefs");
    fs::write(served.state().join("registry.db"), vec![0x5a; 8192]).expect("registry");
    told(&mount(&at("mnt"), &served.state()), "is damaged");
}

#[test]
fn the_readmes_troubleshooting_is_the_same_table() {
    let readme = fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../README.md")).expect("README.md");
    let section =
        readme.split("## Troubleshooting\n").nth(1).expect("the section").split("\n## ").next().expect("its end");
    let rows: Vec<(String, String)> = section
        .lines()
        .filter_map(|line| line.strip_prefix("| ")?.strip_suffix(" |")?.split_once(" | "))
        .filter(|(what, _)| *what != "symptom")
        .map(|(what, cure)| (what.to_owned(), cure.to_owned()))
        .collect();
    assert!(rows.len() > 10, "{section}");
    let table = table();
    for row in &rows {
        assert!(table.contains(row), "only in README.md: {row:?}");
    }
    let symptoms = stdout(&Command::new(LEASEFS).args(["help", "errors"]).output_in_time());
    let symptoms = symptoms.split("Seen elsewhere\n").nth(1).expect("the section");
    let told = symptoms.lines().filter(|line| line.starts_with("  ") && !line.starts_with("   ")).count();
    assert_eq!(told, rows.len(), "each symptom is in README.md, too");
}
