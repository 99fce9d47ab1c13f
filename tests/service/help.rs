//! `leasefs help`: commands, topics, exit codes as they are.

use std::collections::BTreeMap;
use std::fs;
use std::process::{Command, Output};

use crate::common::{InTime, LEASEFS, Mount, assert_ok, stdout};

fn leasefs(arguments: &[&str]) -> Output {
    Command::new(LEASEFS).args(arguments).env_remove("LEASEFS_ROOT").output_in_time()
}

fn help(topic: &str) -> String {
    let output = leasefs(&["help", topic]);
    assert_ok(&output);
    stdout(&output)
}

/// The commands that `leasefs --help` lists.
pub fn commands() -> Vec<String> {
    let text = stdout(&leasefs(&["--help"]));
    let list = text.split("Commands:\n").nth(1).expect("commands").split("\n\n").next().expect("a list");
    let names: Vec<String> =
        list.lines().filter_map(|line| line.split_whitespace().next()).map(str::to_owned).collect();
    assert!(names.contains(&"run".to_owned()) && !names.contains(&"serve".to_owned()), "{text}");
    names
}

/// Exit codes by command, as `leasefs help exit-codes` lists them.
fn exit_codes() -> BTreeMap<String, Vec<String>> {
    let (mut codes, mut command) = (BTreeMap::<String, Vec<String>>::new(), None);
    for line in help("exit-codes").lines() {
        if let Some(name) = line.strip_prefix("leasefs ").filter(|name| !name.contains(' ')) {
            command = Some(name.to_owned());
            codes.entry(name.to_owned()).or_default();
        } else if let (Some(name), Some(entry)) = (&command, line.strip_prefix("  ").filter(|e| !e.starts_with(' '))) {
            let code = entry.split(' ').next().expect("a code").to_owned();
            codes.get_mut(name).expect("it was made").push(code);
        }
    }
    codes
}

#[test]
fn every_command_has_help_a_page_and_exit_codes() {
    let codes = exit_codes();
    for command in commands() {
        assert_eq!(help(&command), stdout(&leasefs(&[&command, "--help"])), "{command}");
        assert!(codes.get(&command).is_some_and(|codes| codes.len() >= 2), "{command}: {codes:?}");
    }
    assert_eq!(codes.len(), commands().len(), "and no other has: {codes:?}");
    assert!(stdout(&leasefs(&["help"])).contains("Commands:"));
    let unknown = leasefs(&["help", "nonsense"]);
    let said = String::from_utf8_lossy(&unknown.stderr).into_owned();
    assert_eq!(unknown.status.code(), Some(2));
    assert!(said.lines().count() == 1 && said.contains("nonsense") && said.contains("exit-codes"), "{said}");
}

#[test]
fn every_command_is_in_the_readme_and_the_changelog() {
    let file = |name| fs::read_to_string(format!("{}/../{name}", env!("CARGO_MANIFEST_DIR"))).expect("a text");
    let readme = file("README.md");
    let list = readme.split("## Commands\n").nth(1).and_then(|rest| rest.split("\n## ").next()).expect("a section");
    let changelog = file("CHANGELOG.md");
    for command in commands() {
        assert!(list.lines().any(|line| line.starts_with(&format!("    leasefs {command} "))), "README.md: {command}");
        let is_told =
            [format!("`{command}`"), format!("`leasefs {command}`")].iter().any(|name| changelog.contains(name));
        assert!(is_told, "CHANGELOG.md: {command}");
    }
}

/// One line, what is wrong with what, and what to do; never what clap or a panic would print.
#[test]
fn wrong_uses_are_told_in_one_line() {
    for (words, about) in [
        (&["frobnicate"][..], "frobnicate"),
        (&["ls", "--frobnicate"], "--frobnicate"),
        (&["evict", "job"], "--epoch"),
        (&["abandon", "job"], "--reason"),
        (&["run", "job"], "<CMD>"),
        (&["run", "-n", "-w", "3", "job", "--", "true"], "--wait"),
        (&["wait", "-w", "soon", "job"], "soon"),
        (&["claim", "job", "--ttl", "long"], "long"),
        (&["claim", "job", "--grace", "3s"], "--sentinel"),
        (&["claim", "job", "--agent", "two\nlines"], "--agent"),
        (&["timeline", "--since", "ever"], "ever"),
        (&["top", "--sort", "colour"], "colour"),
        (&["prune", "--attempts-over", "few"], "few"),
        (&["mount", "/tmp", "--max-result", "much"], "much"),
    ] {
        let output = leasefs(words);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{words:?}: {said}");
        assert!(output.stdout.is_empty() && said.lines().count() == 1, "{words:?}: {said}");
        assert!(said.starts_with("leasefs: ") && said.contains(about), "{words:?}: {said}");
        assert!(said.contains("leasefs help") || said.contains("--help"), "{words:?}: {said}");
    }
}

#[test]
fn commands_exit_as_they_say() {
    let mount = Mount::new();
    let root = mount.root().to_str().expect("UTF-8").to_owned();
    let codes = exit_codes();
    for (words, code) in [
        ("ls", 0),
        ("ls --nonsense", 2),
        ("status never", 1),
        ("status a//b", 2),
        ("history never", 1),
        ("wait never", 0),
        ("wait never --result -w 0", 1),
        ("evict never --epoch 1", 1),
        ("evict never", 2),
        ("verify", 0),
        ("verify --state /nowhere", 2),
        ("backup /nowhere/at/all", 2),
        ("mount /nowhere", 1),
        ("mount", 2),
        ("unmount /nowhere", 1),
        ("upgrade /nowhere", 1),
        ("doctor ROOT", 0),
        ("doctor ROOT --state /nowhere/at/all", 1),
        ("doctor --nonsense", 2),
        ("help run", 0),
        ("help nonsense", 2),
        ("run k -- true", 0),
        ("run k -- /nowhere", 127),
        ("run k -- /etc/passwd", 126),
        ("run a//b -- true", 125),
        ("run k", 2),
    ] {
        let words: Vec<&str> = words.split(' ').map(|word| if word == "ROOT" { &root } else { word }).collect();
        let output = mount.leasefs(&words);
        assert_eq!(output.status.code(), Some(code), "{words:?}: {output:?}");
        let listed = &codes[words[0]];
        let is_childs = words[0] == "run" && code == 0;
        assert!(is_childs || listed.contains(&code.to_string()), "{words:?}: {code} is not among {listed:?}");
    }
}

#[test]
fn every_metric_is_documented() {
    let mount = Mount::new();
    let metrics = fs::read_to_string(mount.root().join(".leasefs/metrics")).expect("metrics");
    let page = help("metrics");
    let names: Vec<&str> = metrics.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    assert!(names.len() > 10, "{metrics}");
    for name in names {
        assert!(page.lines().any(|line| line == format!("  {name}")), "{name} is not in: {page}");
    }
}

#[test]
fn completions_offer_what_is_for_people() {
    let complete = |words: &[&str]| {
        let mut shell = Command::new(LEASEFS);
        shell.env("LEASEFS_COMPLETE", "bash").env("_CLAP_COMPLETE_INDEX", (words.len() - 1).to_string());
        let output = shell.env("_CLAP_IFS", "\n").arg("--").args(words).output_in_time();
        assert_ok(&output);
        stdout(&output).lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let offered = complete(&["leasefs", ""]);
    for command in commands() {
        assert!(offered.contains(&command), "{command}: {offered:?}");
    }
    for hidden in ["serve", "probe", "generate", "hold"] {
        assert!(!offered.contains(&hidden.to_owned()), "{hidden}: {offered:?}");
        assert!(complete(&["leasefs", &hidden[..3]]).iter().all(|word| word != hidden), "{hidden}");
    }
    assert_eq!(complete(&["leasefs", "doc"]), ["doctor"]);
    assert!(complete(&["leasefs", "doctor", "--"]).contains(&"--json".to_owned()));
    // Each shell is told how to ask; whatever a variable of that name says, none that asks for nothing is answered.
    let dir = tempfile::tempdir().expect("directory");
    assert_ok(&leasefs(&["generate", dir.path().to_str().expect("UTF-8")]));
    for (file, shell) in [("leasefs.bash", "bash"), ("_leasefs", "zsh"), ("leasefs.fish", "fish")] {
        let text = fs::read_to_string(dir.path().join("completions").join(file)).expect("completions");
        let asks = [format!("LEASEFS_COMPLETE=\"{shell}\""), format!("LEASEFS_COMPLETE={shell}")];
        assert!(asks.iter().any(|asks| text.contains(asks)), "{shell}: {text}");
    }
    let mut usual = Command::new(LEASEFS);
    assert!(stdout(&usual.arg("--version").env("LEASEFS_COMPLETE", "").output_in_time()).starts_with("leasefs "));
}
