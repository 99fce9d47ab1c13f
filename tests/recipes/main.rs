//! The README's recipes, run as they are written there.
//!
//! A recipe is the fenced block after a line `<!-- recipe: NAME -->`. Each test runs one on a mount of its own, in a
//! directory where the programs it calls (`./import`, …) are stand-ins, and looks at what came of it.

#[path = "../common/mod.rs"]
mod common;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};

use common::agent::Agent;
use common::{InTime, LEASEFS, Mount, assert_ok, stdout, write_program};

mod jobs;

const README: &str = include_str!("../../README.md");

/// Names and blocks, in the README's order.
fn recipes() -> Vec<(&'static str, &'static str, &'static str)> {
    README
        .split("<!-- recipe: ")
        .skip(1)
        .map(|text| {
            let (name, rest) = text.split_once(" -->\n```").expect("a fenced block follows the marker at once");
            let (language, rest) = rest.split_once('\n').expect("a block has lines");
            let (code, _) = rest.split_once("\n```\n").expect("a block ends");
            (name, language, code)
        })
        .collect()
}

/// The block of a recipe that no interpreter of ours runs as a whole.
fn block(name: &str) -> &'static str {
    recipes().into_iter().find(|recipe| recipe.0 == name).unwrap_or_else(|| panic!("no recipe {name}")).2
}

/// A mount, and a directory in which recipes are run.
struct Kitchen {
    mount: Mount,
    dir: PathBuf,
}

impl Kitchen {
    fn new() -> Kitchen {
        let mount = Mount::new();
        let dir = mount.scratch();
        Kitchen { mount, dir }
    }

    /// Puts a program there that prints its arguments and the time-honoured answer, and counts its runs.
    fn program(&self, name: &str) {
        self.script(name, &format!("echo run >>{name}.runs; echo 42 \"$@\""));
    }

    fn script(&self, name: &str, body: &str) {
        write_program(self.dir.join(name), &format!("#!/bin/sh\n{body}\n"));
    }

    fn runs(&self, name: &str) -> usize {
        fs::read_to_string(self.dir.join(format!("{name}.runs"))).map_or(0, |runs| runs.lines().count())
    }

    /// Runs a recipe to its end.
    fn cook(&self, name: &str) -> Output {
        cook(name, &self.dir, self.mount.command("env"))
    }

    fn result(&self, key: &str, epoch: u64) -> String {
        let path = self.mount.result(key, epoch);
        fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    }

    /// Asserts that the key is finished with this result under this epoch.
    fn assert_finished(&self, key: &str, epoch: u64, result: &str) {
        self.mount.wait_status(key, "finished", |status| status["state"] == "finished");
        assert_eq!(self.mount.status(key)["epoch"], epoch);
        assert_eq!(self.result(key, epoch), result);
    }
}

/// The recipes call the command by its name.
fn path() -> String {
    let bin = Path::new(LEASEFS).parent().expect("the binary is in a directory");
    format!("{}:{}", bin.display(), std::env::var("PATH").expect("PATH is set"))
}

/// Writes the recipe's block to a file and runs that with its language's own command.
fn cook(name: &str, dir: &Path, mut command: Command) -> Output {
    let (_, language, code) =
        recipes().into_iter().find(|recipe| recipe.0 == name).unwrap_or_else(|| panic!("no recipe {name}"));
    // A file of its own for each run: they may run side by side.
    static RUNS: AtomicUsize = AtomicUsize::new(0);
    let file = dir.join(format!("{name}-{}.{language}", RUNS.fetch_add(1, Ordering::Relaxed)));
    fs::write(&file, format!("{code}\n")).expect("recipe written");
    let runner: &[&str] = match language {
        "bash" => &["bash"],
        "sh" => &["sh"],
        "python" => &["python3"],
        "js" => &["node"],
        "go" => &["go", "run"],
        other => panic!("recipe {name} is in {other}"),
    };
    // Go's compiler wants a place for what it has made.
    if language == "go" && ["GOCACHE", "XDG_CACHE_HOME", "HOME"].iter().all(|name| std::env::var_os(name).is_none()) {
        command.arg(format!("HOME={}", dir.display()));
    }
    command.arg(format!("PATH={}", path())).args(runner).arg(&file).current_dir(dir).output_in_time()
}

#[test]
fn every_recipe_of_the_readme_is_tested() {
    let written: BTreeSet<_> = recipes().iter().map(|recipe| recipe.0).collect();
    let tests = [include_str!("main.rs"), include_str!("jobs.rs")];
    for name in &written {
        let calls = ["cook", "block"].map(|call| format!("{call}(\"{name}\""));
        assert!(tests.iter().any(|text| calls.iter().any(|call| text.contains(call))), "no test runs {name}");
    }
    assert_eq!(written.len(), recipes().len(), "a name is used twice");
    // Indented blocks are for lines no test runs; code in a fence is a recipe.
    assert_eq!(README.matches("\n```").count(), 2 * written.len(), "a fenced block has no recipe marker");
}

#[test]
fn five_lines() {
    // It mounts by itself, in a home of its own.
    let home = tempfile::Builder::new().prefix("leasefs-test-").tempdir().expect("temporary directory");
    let mut command = Command::new("env");
    command.args(["-u", "XDG_STATE_HOME", "-u", "LEASEFS_ROOT"]).arg(format!("HOME={}", home.path().display()));
    let output = cook("five-lines", home.path(), command);
    // Not left behind, whatever came of it.
    if Command::new("mountpoint").arg("-q").arg(home.path().join("leases")).quietly_in_time() {
        Command::new(LEASEFS).arg("unmount").arg(home.path().join("leases")).quietly_in_time();
        panic!("still mounted: {output:?}");
    }
    assert_ok(&output);
    // Mounting says how the server is replaced; the key's state is one line of JSON.
    let text = stdout(&output);
    let line = text.lines().find(|line| line.starts_with('{')).expect("one line of JSON");
    let status: serde_json::Value = serde_json::from_str(line).expect("one line of JSON");
    assert_eq!(status["state"], "held");
    assert_eq!(status["epoch"], 1);
    let results = home.path().join(".local/state/leasefs/results");
    let kept: Vec<_> = fs::read_dir(&results).expect("the default state directory").collect();
    assert_eq!(kept.len(), 1);
    let path = kept[0].as_ref().expect("entry").path();
    assert_eq!(fs::read_to_string(path).expect("result"), "1\n2\n3\n");
}

#[test]
fn shell_once_does_it_once() {
    let kitchen = Kitchen::new();
    kitchen.script("import", "echo run >>import.runs; exit 3");
    let output = kitchen.cook("shell-once");
    assert_eq!(output.status.code(), Some(3), "{output:?}");
    assert_eq!(kitchen.mount.state_of("import-0601"), "free");

    kitchen.program("import");
    assert_ok(&kitchen.cook("shell-once"));
    kitchen.assert_finished("import-0601", 2, "42\n");

    let output = kitchen.cook("shell-once");
    assert_ok(&output);
    assert!(String::from_utf8_lossy(&output.stderr).contains("cannot overwrite existing file"), "{output:?}");
    assert_eq!(kitchen.runs("import"), 2);
}

#[test]
fn sh_once_does_it_once() {
    let kitchen = Kitchen::new();
    kitchen.script("rotate", "echo run >>rotate.runs; exit 3");
    assert_eq!(kitchen.cook("sh-once").status.code(), Some(3));
    kitchen.program("rotate");
    assert_ok(&kitchen.cook("sh-once"));
    kitchen.assert_finished("rotate", 2, "");
    assert_ok(&kitchen.cook("sh-once"));
    assert_eq!(kitchen.runs("rotate"), 2);
}

#[test]
fn rust_client_is_the_example_of_its_documentation() {
    // Which `cargo test` compiles; tests/client runs every call.
    let documented: Vec<_> = include_str!("../../src/client.rs")
        .lines()
        .skip_while(|line| *line != "//! ```no_run")
        .skip(1)
        .take_while(|line| *line != "//! ```")
        .map(|line| line.strip_prefix("//!").expect("a comment").trim_start_matches(' '))
        .filter(|line| !line.starts_with("# "))
        .collect();
    let shown: Vec<_> = block("rust-client").lines().map(str::trim_start).collect();
    assert_eq!(shown, documented);
}

#[test]
fn shell_lock_runs_one_at_a_time() {
    let kitchen = Kitchen::new();
    // Fails when another is at it.
    kitchen.script(
        "backup",
        "mkdir at-it || exit 9; sleep 0.05; rmdir at-it; grep -q '\"state\":\"held\"' \"$LEASEFS_ROOT/status/backup\" && echo run >>backup.runs",
    );
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| assert_ok(&kitchen.cook("shell-lock")));
        }
    });
    // Of the first lines at least one got through, and every second line waited its turn.
    assert!((5..=8).contains(&kitchen.runs("backup")), "{} runs", kitchen.runs("backup"));
    assert_eq!(kitchen.mount.status("backup")["epoch"], kitchen.runs("backup"));
}

#[test]
fn shell_note_tells_others_and_passes_the_number_on() {
    let kitchen = Kitchen::new();
    kitchen.program("deploy");
    kitchen.script("check", "cat \"$LEASEFS_ROOT/status/deploy\"");
    let output = kitchen.cook("shell-note");
    assert_ok(&output);
    let said = stdout(&output);
    let (deployed, seen) = said.split_once('\n').expect("two lines");
    assert_eq!(deployed, "42 --token 1");
    let seen: serde_json::Value = serde_json::from_str(seen.trim()).expect("status is JSON");
    assert_eq!(seen["state"], "held");
    assert_eq!(seen["note"].as_str().map(str::trim_end), Some("deployed, checking"));
    assert_eq!(kitchen.mount.state_of("deploy"), "free");
}

#[test]
fn shell_note_stops_once_the_lease_is_lost() {
    let kitchen = Kitchen::new();
    kitchen.script("deploy", "leasefs evict deploy --epoch 1 --reason test");
    kitchen.program("check");
    let output = kitchen.cook("shell-note");
    assert!(!output.status.success(), "{output:?}");
    assert_eq!(kitchen.runs("check"), 0);
}

#[test]
fn run_records_its_result_and_takes_both_keys() {
    let kitchen = Kitchen::new();
    kitchen.program("nightly");
    kitchen.script("migrate", "cat \"$LEASEFS_ROOT/status/db/main\" \"$LEASEFS_ROOT/status/db/replica\"");
    let output = kitchen.cook("run");
    assert_ok(&output);
    kitchen.assert_finished("nightly", 1, "42\n");
    let history = stdout(&kitchen.mount.leasefs(&["history", "nightly", "--json"]));
    assert!(history.contains("\"ttl_ms\":600000"), "{history}");
    let said = stdout(&output);
    assert_eq!(said.matches("\"state\":\"held\"").count(), 2, "{said}");
    assert_eq!(kitchen.mount.state_of("db/main"), "free");
}

#[test]
fn python_once_does_it_once() {
    let kitchen = Kitchen::new();
    assert_ok(&kitchen.cook("python-once"));
    kitchen.assert_finished("report-7", 1, "all is well\n");
    let output = kitchen.cook("python-once");
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(String::from_utf8_lossy(&output.stderr), "held, or done already\n");
    kitchen.assert_finished("report-7", 1, "all is well\n");
}

#[test]
fn python_lock_holds_and_lets_go() {
    let kitchen = Kitchen::new();
    for epoch in 1..=2 {
        let output = kitchen.cook("python-lock");
        assert_ok(&output);
        let wanted: String = (0..3).map(|shard| format!("attempt {epoch} indexes shard {shard}\n")).collect();
        assert_eq!(stdout(&output), wanted);
    }
    assert_eq!(kitchen.mount.state_of("indexer"), "free");
}

#[test]
fn node_once_does_it_once() {
    let kitchen = Kitchen::new();
    assert_ok(&kitchen.cook("node-once"));
    kitchen.assert_finished("thumbnails", 1, "all is well\n");
    let output = kitchen.cook("node-once");
    assert_ok(&output);
    assert_eq!(stdout(&output), "held, or done already\n");
}

#[test]
fn go_once_does_it_once() {
    let kitchen = Kitchen::new();
    assert_ok(&kitchen.cook("go-once"));
    kitchen.assert_finished("index", 1, "all is well\n");
    let output = kitchen.cook("go-once");
    assert_ok(&output);
    assert_eq!(stdout(&output), "held, or done already\n");
}

#[test]
fn shell_ttl_is_that_of_new_leases_in_the_namespace() {
    let kitchen = Kitchen::new();
    assert_ok(&kitchen.cook("shell-ttl"));
    let _held = Agent::holding(&kitchen.mount.claim("beats/host"));
    assert_eq!(kitchen.mount.status("beats/host")["ttl_ms"], 90_000);
}

#[test]
fn shell_sync_says_whether_the_result_was_accepted() {
    let kitchen = Kitchen::new();
    kitchen.program("audit");
    let output = kitchen.cook("shell-sync");
    assert_ok(&output);
    assert!(output.stderr.is_empty(), "{output:?}");
    kitchen.assert_finished("audit", 1, "42\n");

    kitchen.script("audit", "leasefs evict audit --epoch 2 --reason test; echo late");
    let output = kitchen.cook("shell-sync");
    assert!(String::from_utf8_lossy(&output.stderr).contains("not accepted"), "{output:?}");
    assert!(!kitchen.mount.result("audit", 2).exists());
}

#[test]
fn an_agents_calls_are_shells_of_their_own() {
    let kitchen = Kitchen::new();
    let call = |name: &str| {
        // As an agent starts them: this program is the parent of each shell.
        let output = cook(name, &kitchen.dir, kitchen.mount.command("env"));
        assert_ok(&output);
        stdout(&output)
    };
    let claimed = |epoch: u64| format!("{epoch}\n{}\n", kitchen.mount.result("fix-1234", epoch).display());
    kitchen.script("fix", "exit 1");
    assert_eq!(call("agent-claim"), claimed(1));
    let status = kitchen.mount.status("fix-1234");
    assert_eq!((status["state"].as_str(), status["agent"].as_str()), (Some("held"), Some("planner-7")));
    assert_eq!(call("agent-claim"), claimed(1), "the same agent");
    call("agent-work");
    kitchen.mount.wait_status("fix-1234", "given up", |status| status["state"] == "free");

    // An epoch that is over completes nothing.
    kitchen.program("fix");
    assert_eq!(call("agent-claim"), claimed(2));
    let late = cook("agent-work", &kitchen.dir, kitchen.mount.command("env"));
    assert_eq!(late.status.code(), Some(75), "{late:?}");
    assert_ok(&kitchen.mount.leasefs(&["release", "fix-1234", "--epoch", "2"]));

    let kitchen = Kitchen::new();
    kitchen.program("fix");
    assert_ok(&cook("agent-claim", &kitchen.dir, kitchen.mount.command("env")));
    assert_ok(&cook("agent-work", &kitchen.dir, kitchen.mount.command("env")));
    kitchen.assert_finished("fix-1234", 1, "42 1234\n");
}
