//! The packages: what is in them, and that it runs.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::{InTime, LEASEFS, assert_ok, stdout};

fn package() -> Command {
    Command::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../scripts/package"))
}

/// Makes the packages of the program under test, in a directory.
pub fn make(out: &Path) -> (PathBuf, PathBuf) {
    // By paths as a person gives them who is somewhere else.
    let program = out.join("the program");
    fs::create_dir_all(out).expect("mkdir");
    std::os::unix::fs::symlink(LEASEFS, &program).expect("symlink");
    let output = package().current_dir(out).args(["--binary", "the program", "--out", "."]).output_in_time();
    assert_ok(&output);
    fs::remove_file(program).expect("rm");
    let made: Vec<PathBuf> = stdout(&output).lines().map(PathBuf::from).collect();
    assert!(made.iter().all(|path| path.parent() == out.canonicalize().ok().as_deref()), "{made:?}");
    let [tar, deb] = <[PathBuf; 2]>::try_from(made).expect("two packages");
    (tar, deb)
}

/// The files below a directory, as paths from there.
fn files(dir: &Path) -> BTreeSet<String> {
    let output = Command::new("find")
        .arg(dir)
        .args(["(", "-type", "f", "-o", "-type", "l", ")", "-printf", "%P\n"])
        .output_in_time();
    stdout(&output).lines().map(str::to_owned).collect()
}

#[test]
fn the_packages_have_all_that_belongs_to_the_program_and_it_runs_from_there() {
    let dir = tempfile::tempdir().expect("directory");
    let (tar, deb) = make(&dir.path().join("out"));
    let (root, usr) = (dir.path().join("root"), dir.path().join("usr"));
    assert_ok(&Command::new("dpkg-deb").arg("-x").arg(&deb).arg(&root).output_in_time());
    fs::create_dir(&usr).expect("mkdir");
    let mut unpack = Command::new("tar");
    assert_ok(&unpack.arg("-xzf").arg(&tar).args(["--strip-components=1", "-C"]).arg(&usr).output_in_time());

    let (of_deb, of_tar) = (files(&root.join("usr")), files(&usr));
    for file in [
        "bin/leasefs",
        "sbin/mount.leasefs",
        "sbin/mount.fuse.leasefs",
        "lib/systemd/system/leasefs@.service",
        "lib/systemd/user/leasefs.service",
        "share/man/man1/leasefs.1.gz",
        "share/man/man1/leasefs-run.1.gz",
        "share/man/man8/mount.leasefs.8.gz",
        "share/bash-completion/completions/leasefs",
        "share/zsh/vendor-completions/_leasefs",
        "share/fish/vendor_completions.d/leasefs.fish",
        "share/doc/leasefs/README.md",
        "share/doc/leasefs/examples/compose.yaml",
    ] {
        assert!(of_deb.contains(file) && of_tar.contains(file), "{file}: {of_deb:#?} {of_tar:#?}");
    }
    for file in ["share/doc/leasefs/copyright", "share/doc/leasefs/changelog.gz"] {
        assert!(of_deb.contains(file), "{file}: {of_deb:#?}");
    }
    let copyright = fs::read_to_string(root.join("usr/share/doc/leasefs/copyright")).expect("copyright");
    assert!(copyright.contains("Permission is hereby granted") && !copyright.contains('@'), "{copyright}");

    assert!(root.join("etc/needrestart/conf.d/leasefs.conf").is_file(), "no tree is restarted for an upgrade");
    let configuration = Command::new("dpkg-deb").arg("-I").arg(&deb).arg("conffiles").output_in_time();
    assert_eq!(stdout(&configuration), "/etc/needrestart/conf.d/leasefs.conf\n");

    let field = |name: &str| {
        let output = Command::new("dpkg-deb").arg("-f").arg(&deb).arg(name).output_in_time();
        stdout(&output).trim().to_owned()
    };
    assert_eq!(field("Version"), env!("CARGO_PKG_VERSION"));
    assert!(field("Depends").starts_with("libc6 (>= 2."), "{}", field("Depends"));
    assert_eq!(field("Recommends"), "fuse3");

    for program in [root.join("usr/bin/leasefs"), usr.join("bin/leasefs")] {
        let linked = stdout(&Command::new("ldd").arg(&program).output_in_time());
        for library in linked.lines().filter_map(|line| line.split_whitespace().next()) {
            let name = library.rsplit('/').next().unwrap_or_default();
            let is_of_the_c_library =
                ["linux-vdso", "ld-linux", "libc.", "libm.", "libgcc_s.", "libdl.", "libpthread."];
            assert!(is_of_the_c_library.iter().any(|known| name.starts_with(known)), "{linked}");
        }
        let version = stdout(&Command::new(&program).arg("--version").output_in_time());
        assert_eq!(version.trim(), format!("leasefs {}", env!("CARGO_PKG_VERSION")));
    }

    // Mounted by what the package calls its helper, and unmounted by its program.
    let (mnt, state) = (dir.path().join("mnt"), dir.path().join("state"));
    fs::create_dir(&mnt).expect("mountpoint");
    let mounted = Command::new(root.join("usr/sbin/mount.leasefs")).arg(&state).arg(&mnt).output_in_time();
    assert_ok(&mounted);
    assert_eq!(stdout(&mounted), "", "it is silent, as mount(8) is");
    let served = mnt.join("claims").is_dir();
    assert_ok(&Command::new(root.join("usr/bin/leasefs")).arg("unmount").arg(&mnt).output_in_time());
    assert!(served);
}

#[test]
fn what_is_wrong_with_its_arguments_is_told_in_one_line() {
    let dir = tempfile::tempdir().expect("directory");
    for (arguments, words) in [
        (&["--binary"][..], "--binary needs a path"),
        (&["--out", ""], "--out needs a path"),
        (&["--binary", "/bin/true"], "/bin/true is not leasefs"),
        (&["--binary", "none"], "none is no program"),
        (&["--frob"], "no such option: '--frob'"),
    ] {
        let output = package().current_dir(dir.path()).args(arguments).output_in_time();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(1), "{arguments:?}");
        assert!(said.lines().count() == 1 && said.contains(words) && output.stdout.is_empty(), "{arguments:?}: {said}");
    }
    assert_eq!(fs::read_dir(dir.path()).expect("list").count(), 0);
}

#[test]
fn the_examples_are_what_their_readers_expect() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("dist/examples");
    for (file, services) in [("compose.yaml", 2), ("compose.namespace.yaml", 1)] {
        let script = "import sys, yaml; compose = yaml.safe_load(open(sys.argv[1])); \
                      print(len(compose['services'])); \
                      [print(v['type'], v['target'], v.get('bind', {}).get('propagation', '')) \
                       for s in compose['services'].values() for v in s['volumes']]";
        let output = Command::new("python3").args(["-c", script]).arg(dir.join(file)).output_in_time();
        assert_ok(&output);
        let text = stdout(&output);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], services.to_string());
        assert!(lines.len() > services && lines[1..].iter().all(|line| line.starts_with("bind /leases")), "{text}");
        assert_eq!(text.contains("rslave"), file == "compose.yaml", "{text}");
    }
    for file in ["devcontainer.json", "devcontainer.own.json"] {
        let text = fs::read_to_string(dir.join(file)).expect("text");
        let value: serde_json::Value = serde_json::from_str(&text).expect("JSON");
        let mounts = value["mounts"].as_array().expect("mounts");
        assert!(mounts.iter().all(|mount| mount.as_str().is_some_and(|mount| mount.contains("source="))), "{text}");
        assert!(value["containerEnv"]["LEASEFS_ROOT"].as_str().is_some_and(|root| root.starts_with("/leases")));
    }
    // The commands in them are commands.
    let own: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(dir.join("devcontainer.own.json")).expect("text")).expect("JSON");
    let command = own["postStartCommand"].as_str().expect("a command");
    assert!(command.contains("leasefs mount /leases --state /var/lib/leasefs/main --allow-other"), "{command}");
    let fstab = fs::read_to_string(dir.join("fstab")).expect("text");
    let line = fstab.lines().find(|line| !line.starts_with('#')).expect("a line");
    let fields: Vec<&str> = line.split_whitespace().collect();
    let fake = Command::new("bash")
        .args(["-c", "exec -a mount.leasefs \"$@\"", "bash", LEASEFS, fields[0], fields[1], "-f", "-o", fields[3]])
        .output_in_time();
    assert_ok(&fake);
}
