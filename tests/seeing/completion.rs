//! Completion at the Tab key: in bash, zsh and fish themselves, and what they are told.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::common::agent::Agent;
use crate::common::{InTime, LEASEFS, Mount, PATIENCE, Stopped, assert_ok, stdout};
use crate::screen::Screen;

/// A place with the scripts, a `leasefs` to be found in the PATH, and files that shells read when they start.
fn place(mount: &Mount) -> PathBuf {
    let place = mount.scratch().join("home");
    fs::create_dir_all(place.join("bin")).expect("a directory");
    symlink(LEASEFS, place.join("bin/leasefs")).expect("a link");
    let output = Command::new(LEASEFS).arg("generate").arg(&place).output_in_time();
    assert_ok(&output);
    let scripts = place.join("completions");
    let bash = format!("PS1='> '; bind 'set bell-style none'; . {}/leasefs.bash\n", scripts.display());
    fs::write(place.join("bashrc"), bash).expect("a file");
    let zsh = format!(
        "PS1='> '; setopt nobeep; fpath=({} $fpath); autoload -U compinit; compinit -u -D\n",
        scripts.display()
    );
    fs::write(place.join(".zshrc"), zsh).expect("a file");
    place
}

/// What bash is told to offer for these words, of which the last is being typed.
fn offered(mount: &Mount, words: &[&str]) -> Vec<String> {
    let script = ". \"$1\"; shift; COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); \
                  _clap_complete_leasefs leasefs \"${COMP_WORDS[COMP_CWORD]}\" \"${COMP_WORDS[COMP_CWORD-1]}\"; \
                  printf '%s\\n' \"${COMPREPLY[@]}\"";
    let home = mount.scratch().join("home");
    let home = if home.exists() { home } else { place(mount) };
    let path = format!("{}:{}", home.join("bin").display(), std::env::var("PATH").expect("a PATH"));
    let mut bash = mount.command("bash");
    bash.args(["-c", script, "bash"]).arg(home.join("completions/leasefs.bash")).args(words).env("PATH", path);
    let output = bash.output_in_time();
    assert_ok(&output);
    stdout(&output).lines().filter(|line| !line.is_empty()).map(str::to_owned).collect()
}

/// The same once it is as it should be: whoever asks is kept waiting for a second and a half at most, and is offered
/// nothing where the machine is too slow for that.
fn offered_in_time(mount: &Mount, words: &[&str], is_right: impl Fn(&[String]) -> bool) -> Vec<String> {
    let until = Instant::now() + PATIENCE;
    loop {
        let keys = offered(mount, words);
        if is_right(&keys) {
            return keys;
        }
        assert!(Instant::now() < until, "{words:?}: {keys:?}");
    }
}

/// A key that was held and is free.
fn once(mount: &Mount, key: &str) {
    assert_ok(&mount.leasefs(&["run", "-n", key, "--", "true"]));
}

#[test]
fn tab_completes_commands_keys_and_namespaces_in_each_shell() {
    let mount = Mount::new();
    fs::create_dir(mount.claim("team")).expect("a namespace");
    for key in ["nightly", "team/build", "team/deploy"] {
        once(&mount, key);
    }
    let home = place(&mount);
    let fish = format!(
        "fish --no-config -C 'source {}/completions/leasefs.fish; function fish_prompt; echo \"> \"; end'",
        home.display()
    );
    for shell in [format!("bash --rcfile {}/bashrc -i", home.display()), "zsh -i".to_owned(), fish] {
        let variables = format!("HOME={0} ZDOTDIR={0} PATH={0}/bin:$PATH TERM=xterm", home.display());
        let screen = Screen::run(&mount, (80, 24), &format!("env {variables} {shell}"));
        screen.wait("a prompt", |lines| lines.iter().any(|line| line == ">"));
        // Once more where nothing was offered in time.
        let completes = |keys: &[&str], what: &str| {
            screen.press(keys);
            screen.press(&["Tab"]);
            let mut pressed = Instant::now();
            screen.wait(&format!("{what}, in {shell}"), |lines| {
                if pressed.elapsed() > Duration::from_secs(15) {
                    screen.press(&["Tab"]);
                    pressed = Instant::now();
                }
                lines.iter().any(|line| line == what)
            });
        };
        completes(&["leasefs hist"], "> leasefs history");
        completes(&["nigh"], "> leasefs history nightly");
        completes(&["C-u", "leasefs run tea"], "> leasefs run team/");
        completes(&["de"], "> leasefs run team/deploy");
    }
    // Asking claims nothing.
    for key in ["nightly", "team/build", "team/deploy"] {
        assert_eq!((mount.state_of(key).as_str(), mount.status(key)["epoch"].as_u64()), ("free", Some(1)), "{key}");
    }
    mount.verify();
}

#[test]
fn what_is_offered_is_what_the_command_can_do_something_with() {
    let mount = Mount::new();
    let agent = Agent::new();
    once(&mount, "free");
    agent.create(&mount.claim("held")).expect("a free key");
    assert_ok(&mount.leasefs(&["run", "-n", "done", "--", "sh", "-c", ": >$LEASEFS_RESULT"]));
    for command in ["status", "history", "wait", "who", "run", "claim", "timeline", "ls", "top", "watch"] {
        let all = |keys: &[String]| ["free", "held", "done"].iter().all(|key| keys.iter().any(|one| one == key));
        let keys = offered_in_time(&mount, &["leasefs", command, ""], all);
        assert!(keys.contains(&"--root".to_owned()), "{command}: options as well: {keys:?}");
    }
    for command in ["evict", "renew", "release", "complete", "abandon"] {
        let has = |keys: &[String], key: &str| keys.iter().any(|one| one == key);
        let keys = offered_in_time(&mount, &["leasefs", command, ""], |keys| has(keys, "held"));
        assert!(!has(&keys, "free"), "{command}: {keys:?}");
    }
    // A second key of a run, the tree by its option, and no key where there is none to give.
    offered_in_time(&mount, &["leasefs", "run", "free", "he"], |keys| keys == ["held"]);
    let other = Mount::new();
    once(&other, "elsewhere");
    let root = other.root();
    let root = root.to_str().expect("UTF-8");
    offered_in_time(&mount, &["leasefs", "status", "--root", root, "e"], |keys| keys == ["elsewhere"]);
    assert_eq!(offered(&mount, &["leasefs", "doctor", "he"]), [""; 0]);
    assert_eq!(offered(&mount, &["leasefs", "status", "none"]), [""; 0]);
}

#[test]
fn names_that_a_shell_would_take_apart_or_run_are_not_offered() {
    let mount = Mount::new();
    let mark = mount.scratch().join("mark");
    let odd = ["$(touch mark)", "`touch mark`", "a b", "x;y", "-n", "it's", "a\"b", "*", "~root", "a:b", "a=b", "a|b"];
    for key in odd {
        once_of(&mount, key);
    }
    once(&mount, "plain-1.2_3");
    once(&mount, "über");
    let plain = |keys: &[String]| ["plain-1.2_3", "über"].iter().all(|key| keys.iter().any(|one| one == key));
    let keys = offered_in_time(&mount, &["leasefs", "status", ""], plain);
    assert!(odd.iter().all(|key| !keys.contains(&(*key).to_owned())), "{keys:?}");
    assert!(!mark.exists());
}

/// As [`once`], of a key that a command line might take for something else.
fn once_of(mount: &Mount, key: &str) {
    let script = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDWR | os.O_CREAT), fcntl.LOCK_EX)";
    let mut command = mount.command("python3");
    assert_ok(&command.args(["-c", script]).arg(mount.claim(key)).output_in_time());
}

#[test]
fn of_very_many_the_first_are_offered_and_the_line_grows_by_what_all_begin_with() {
    let mount = Mount::new();
    let script = "
for n in range(3000):
    os.close(os.open(f'{path}-{n:04}', os.O_RDWR | os.O_CREAT | os.O_EXCL))
";
    let agent = Agent::new();
    agent.script(script, serde_json::json!({ "path": mount.claim("job") })).expect("free keys");
    let first_and_last = |keys: &[String]| {
        let ends = (keys.first().map(String::as_str), keys.last().map(String::as_str));
        ends == (Some("job-0000"), Some("job-2999"))
    };
    let keys = offered_in_time(&mount, &["leasefs", "status", "j"], first_and_last);
    assert!((100..1000).contains(&keys.len()), "{} are offered", keys.len());
    offered_in_time(&mount, &["leasefs", "status", "job-123"], |keys| keys.len() == 10);
}

#[test]
fn a_tree_that_does_not_answer_keeps_nobody_waiting() {
    let mount = Mount::new();
    once(&mount, "job");
    offered_in_time(&mount, &["leasefs", "status", "j"], |keys| keys == ["job"]);
    let stopped = Stopped::these(&[mount.server_pid().expect("a server")]);
    let began = Instant::now();
    let keys = offered(&mount, &["leasefs", "status", "j"]);
    let took = began.elapsed();
    drop(stopped);
    assert_eq!(keys, [""; 0]);
    assert!(took < Duration::from_secs(30), "{took:?}");
    // A tree that is gone, and none at all.
    mount.lose_connection();
    assert_eq!(offered(&mount, &["leasefs", "status", "j"]), [""; 0]);
    assert_eq!(offered(&mount, &["leasefs", "status", "--root", "/", "j"]), [""; 0]);
}
