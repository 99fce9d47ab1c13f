//! The man pages: one for each command, without a complaint of what renders them, and with all that was promised.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::common::{InTime, LEASEFS, assert_ok, stdout};

fn rendered(page: &Path) -> String {
    let output = Command::new("mandoc").args(["-T", "ascii", "-O", "width=78"]).arg(page).output_in_time();
    assert_ok(&output);
    // Letters are made bold by printing them twice.
    let text = stdout(&output);
    let mut plain: Vec<char> = Vec::new();
    let mut characters = text.chars();
    while let Some(c) = characters.next() {
        if c == '\u{8}' {
            plain.pop();
            plain.extend(characters.next());
        } else {
            plain.push(c);
        }
    }
    plain.into_iter().collect()
}

#[test]
fn every_page_renders_without_a_complaint_and_says_what_it_must() {
    let dir = tempfile::tempdir().expect("directory");
    assert_ok(&Command::new(LEASEFS).arg("generate").arg(dir.path()).output_in_time());
    let page = |name: &str| dir.path().join(format!("man{}", &name[name.len() - 1..])).join(name);
    let mut names = vec!["leasefs.1".to_owned(), "mount.leasefs.8".to_owned()];
    names.extend(crate::help::commands().iter().map(|command| format!("leasefs-{command}.1")));
    for name in &names {
        let lint = Command::new("mandoc").args(["-T", "lint", "-W", "warning"]).arg(page(name)).output_in_time();
        // A page without a date has the version instead; how clap_mangen sets possible values apart changes nothing.
        let passed_over = ["missing date", "cannot parse date", "br before sp", "br after sp"];
        let said: Vec<String> = stdout(&lint)
            .lines()
            .filter(|line| !passed_over.iter().any(|known| line.contains(known)))
            .map(str::to_owned)
            .collect();
        assert!(said.is_empty(), "{name}: {said:#?}");
        let text = rendered(&page(name));
        for section in ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "EXIT STATUS", "SEE ALSO"] {
            assert!(text.lines().any(|line| line == section), "{name} has no {section}: {text}");
        }
        let wide: Vec<&str> = text.lines().filter(|line| line.chars().count() > 79).collect();
        assert!(wide.is_empty(), "{name}: lines that are set in must fit into 80 columns: {wide:#?}");
    }
    let written = fs::read_dir(dir.path().join("man1")).expect("pages").count();
    assert_eq!(written, names.len() - 1, "and no page of what is not for people");

    let text = rendered(&page("leasefs.1"));
    for section in ["COMMANDS", "FILES", "ENVIRONMENT", "JSON", "METRICS", "DIAGNOSTICS", "EXAMPLES"] {
        assert!(text.lines().any(|line| line == section), "no {section}");
    }
    // Texts that stand once in the program are in the page as well.
    let flat = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let flat_page = flat(&text);
    for part in [
        "orphaned_why ([string]) why an orphaned key is not free yet",
        "leasefs_wait_seconds Time in line",
        "127 CMD was not found",
        "results/KEY/EPOCH The result of that attempt",
        "PATH is already a leasefs mount use it, or leasefs unmount PATH first",
        "LEASEFS_ROOT The tree that commands are about",
    ] {
        assert!(flat_page.contains(part), "{part}: {flat_page}");
    }
    // Hyphenation would split what is to be found; these are whole in the page of one command.
    let run = flat(&rendered(&page("leasefs-run.1")));
    assert!(run.contains("LEASEFS_EPOCH the epoch of this attempt") && run.contains("75 a lease was lost"), "{run}");
}
