//! Recipes for what starts programs: cron, systemd, make, a CI runner, compose.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::common::podman::Podman;
use crate::common::{Background, InTime, PATIENCE, assert_ok, copy_program, stdout, wait_for, write_program};
use crate::{Kitchen, block, path};

/// A shell as cron and CI runners start it: with little in its environment.
fn bare(kitchen: &Kitchen, shell: &[&str], line: &str) -> Command {
    let mut command = Command::new(shell[0]);
    command
        .args(&shell[1..])
        .arg(line)
        .env_clear()
        .env("HOME", &kitchen.dir)
        .env("PATH", path())
        .env("LEASEFS_ROOT", kitchen.mount.root())
        .current_dir(&kitchen.dir)
        .stdin(Stdio::null());
    command
}

/// A program that goes on until the file `go` is there.
fn slow_program(kitchen: &Kitchen, name: &str) {
    kitchen.script(name, &format!("echo run >>{name}.runs; until [ -e go ]; do sleep 0.01; done; echo 42"));
}

fn in_background(command: &mut Command) -> Background {
    Background(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("it starts"))
}

#[test]
fn cron_leaves_out_a_run_while_the_last_is_at_it() {
    let kitchen = Kitchen::new();
    slow_program(&kitchen, "sync");
    let line = block("cron").lines().find(|line| line.starts_with('*')).expect("a line with a command");
    let command = line.splitn(6, ' ').nth(5).expect("five fields and a command");
    let mut first = in_background(&mut bare(&kitchen, &["/bin/sh", "-c"], command));
    wait_for("the first run", || kitchen.runs("sync") == 1);
    let output = bare(&kitchen, &["/bin/sh", "-c"], command).output_in_time();
    assert_ok(&output);
    assert_eq!(stdout(&output), "", "cron would mail it");
    assert_eq!(kitchen.runs("sync"), 1);
    File::create(kitchen.dir.join("go")).expect("a file");
    assert!(first.wait().success());
    assert_ok(&bare(&kitchen, &["/bin/sh", "-c"], command).output_in_time());
    assert_eq!(kitchen.runs("sync"), 2);
}

#[test]
fn systemd_takes_the_unit_and_its_command_holds_the_key() {
    let kitchen = Kitchen::new();
    // A root of its own, in which the unit's programs are.
    let root = kitchen.dir.join("root");
    fs::create_dir_all(root.join("etc/systemd/system")).expect("directories");
    fs::create_dir_all(root.join("usr/bin")).expect("directories");
    for program in ["leasefs", "index-documents"] {
        fs::copy("/bin/true", root.join("usr/bin").join(program)).expect("a program");
    }
    fs::write(root.join("etc/systemd/system/index.service"), block("systemd")).expect("the unit");
    let output = Command::new("systemd-analyze")
        .args(["verify", "--man=no", "--recursive-errors=no", "--root"])
        .arg(&root)
        .arg("index.service")
        .output_in_time();
    assert_ok(&output);
    assert_eq!(String::from_utf8_lossy(&output.stderr), "", "systemd has nothing to say against it");

    kitchen.script("index-documents", "echo \"$@\" >seen; cat \"$LEASEFS_ROOT/status/index\" >>seen");
    let command = block("systemd").lines().find_map(|line| line.strip_prefix("ExecStart=")).expect("a command");
    let path = format!("{}:{}", path(), kitchen.dir.display());
    assert_ok(&bare(&kitchen, &["/bin/sh", "-c"], command).env("PATH", path).output_in_time());
    let seen = fs::read_to_string(kitchen.dir.join("seen")).expect("it ran");
    assert!(seen.starts_with("--all\n") && seen.contains("\"state\":\"held\""), "{seen}");
}

#[test]
fn make_builds_once_though_asked_twice() {
    let kitchen = Kitchen::new();
    slow_program(&kitchen, "report");
    fs::write(kitchen.dir.join("Makefile"), format!("{}\n", block("make"))).expect("the Makefile");
    fs::write(kitchen.dir.join("data.csv"), "1\n").expect("the data");
    let make = || bare(&kitchen, &["make"], "report.txt");
    let mut first = in_background(&mut make());
    wait_for("the first build", || kitchen.runs("report") == 1);
    let mut second = in_background(&mut make());
    kitchen.mount.wait_status("report", "the second waits", |status| status["waiters"] == 1);
    File::create(kitchen.dir.join("go")).expect("a file");
    assert!(first.wait().success() && second.wait().success());
    assert_eq!(kitchen.runs("report"), 1);
    assert_eq!(fs::read_to_string(kitchen.dir.join("report.txt")).expect("the report"), "42\n");

    // A build that fails leaves nothing that a later one would take for done.
    kitchen.script("report", "echo half; exit 1");
    fs::remove_file(kitchen.dir.join("report.txt")).expect("removed");
    assert!(!make().output_in_time().status.success());
    assert!(!kitchen.dir.join("report.txt").exists());
}

#[test]
fn a_ci_job_deploys_one_at_a_time() {
    let kitchen = Kitchen::new();
    // Fails when another is at it.
    kitchen.script("deploy", "mkdir at-it || exit 9; echo \"$1\" >>deployed; sleep 0.05; rmdir at-it");
    let script: String = block("ci")
        .lines()
        .skip_while(|line| line.trim() != "run: |")
        .skip(1)
        .map(|line| format!("{}\n", line.trim_start()))
        .collect();
    let file = kitchen.dir.join("step.sh");
    fs::write(&file, script).expect("the step");
    // As a runner does it: the lines in a file, by this shell.
    let shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail"];
    std::thread::scope(|scope| {
        for at in 0..3 {
            let mut step = bare(&kitchen, &shell, file.to_str().expect("a plain path"));
            step.env("GITHUB_SHA", format!("sha-{at}"));
            scope.spawn(move || assert_ok(&step.output_in_time()));
        }
    });
    let mut deployed: Vec<_> =
        fs::read_to_string(kitchen.dir.join("deployed")).expect("deployed").lines().map(str::to_owned).collect();
    deployed.sort();
    assert_eq!(deployed, ["sha-0", "sha-1", "sha-2"]);
    assert_eq!(kitchen.mount.status("deploy/production")["epoch"], 3);
}

/// Puts a command `podman` into a directory: this one, for whoever calls it by its name; and makes an image `busybox`.
fn set_up(podman: &Podman, bin: &Path) {
    fs::create_dir_all(bin).expect("directories");
    let found = |name: &str| {
        let path = stdout(&Command::new("sh").args(["-c", &format!("command -v {name}")]).output_in_time());
        path.trim().to_owned()
    };
    // Networks cannot be made everywhere these tests run, and nothing here needs one.
    let wrapper = format!(
        r#"#!/bin/sh
        command=$1; shift
        if [ "$command" = run ]; then
            for word; do
                shift
                case $word in --net | --network-alias) drop=1; continue ;; esac
                [ "$drop" ] || set -- "$@" "$word"
                drop=
            done
            set -- --network=none --ulimit nofile=1024:1024 --ulimit nproc=4096:4096 "$@"
        fi
        exec {program} {options} "$command" "$@"
        "#,
        program = found("podman"),
        options = podman.options().join(" "),
    );
    write_program(bin.join("podman"), &wrapper);
    let programs = podman.rootfs().join("bin");
    fs::create_dir_all(&programs).expect("directories");
    copy_program(found("busybox"), programs.join("busybox"));
    for name in ["sh", "echo", "cat"] {
        std::os::unix::fs::symlink("busybox", programs.join(name)).expect("a link");
    }
    podman.image("docker.io/library/busybox:latest", &[]);
}

#[test]
fn of_two_services_of_a_compose_file_one_does_the_work() {
    let kitchen = Kitchen::new();
    let podman = Podman::new(kitchen.dir.join("pod"));
    let bin = kitchen.dir.join("bin");
    set_up(&podman, &bin);
    fs::create_dir(kitchen.dir.join("work")).expect("a directory");
    kitchen.script("work/import", "echo run >>/work/runs; echo 42");
    fs::write(kitchen.dir.join("compose.yaml"), block("compose")).expect("the file");
    let compose = |arguments: &[&str]| {
        Command::new("podman-compose")
            .args(["-f", "compose.yaml", "-p", "leasefs-test"])
            .args(arguments)
            .current_dir(&kitchen.dir)
            .env("LEASEFS_ROOT", kitchen.mount.root())
            .env("PATH", format!("{}:{}", bin.display(), path()))
            .stdin(Stdio::null())
            .output_in_time()
    };
    let output = compose(&["up", "-d"]);
    assert_ok(&output);
    let until = Instant::now() + PATIENCE;
    let listed = |which: &str| stdout(&podman.command().args(["ps", which]).output_in_time()).lines().count();
    while listed("-q") > 0 {
        assert!(Instant::now() < until, "the services did not end: {output:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(listed("-aq"), 2, "{output:?}");
    // They may have ended without having run.
    assert!(kitchen.mount.root().join("status/import").exists(), "{output:?}");
    kitchen.assert_finished("import", 1, "42\n");
    assert_eq!(fs::read_to_string(kitchen.dir.join("work/runs")).expect("it ran"), "run\n");
}
