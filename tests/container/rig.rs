//! Shells in containers and on the host that do what a test says.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::common::agent::Script;
pub use crate::common::podman::Podman;
use crate::common::{InTime, Mount, assert_ok, copy_program, set_mode, stdout};

/// The file of a program, and the libraries it is linked to.
pub fn with_libraries(program: &str) -> Vec<PathBuf> {
    let found = Command::new("sh").args(["-c", &format!("command -v {program}")]).output_in_time();
    let program = fs::canonicalize(stdout(&found).trim()).expect("the program");
    let listed = Command::new("ldd").arg(&program).output_in_time();
    let words = stdout(&listed);
    let libraries = words.split_whitespace().filter(|word| word.starts_with('/')).map(PathBuf::from);
    libraries.chain([program.clone()]).collect()
}

/// Tries or holds a key in a form of claiming: see its own words.
pub const CLAIM: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/container/claim.py");

/// Every form of claiming, as [`CLAIM`] names them.
pub const FORMS: [&str; 5] = ["create", "flock", "posix", "ofd", "shared"];

impl Podman {
    /// An image with nothing in it: programs are the host's, by bind mounts.
    pub fn empty_image(&self, name: &str) {
        let root = self.rootfs();
        for directory in ["bin", "lib", "lib64", "usr", "tmp", "proc", "dev", "sys", "etc"] {
            fs::create_dir_all(root.join(directory)).expect("directory of the image");
        }
        self.image(name, &[]);
    }

    /// `podman run` of a container of that image with the host's programs and [`CLAIM`]; the image, the command and more
    /// options are still to be given.
    pub fn run(&self, name: &str) -> Command {
        let mut command = self.command();
        command.args(["run", "--rm", "--name", name, "--network", "none"]);
        command.args(["--ulimit", "nofile=1024:1024", "--ulimit", "nproc=4096:4096"]);
        for directory in ["/usr", "/bin", "/lib", "/lib64"].map(Path::new).iter().filter(|path| path.is_dir()) {
            command.arg("-v").arg(format!("{0}:{0}:ro", directory.display()));
        }
        // A copy, which the users of every container can read.
        let claim = self.rootfs().with_file_name("claim.py");
        if !claim.exists() {
            copy_program(CLAIM, &claim);
            set_mode(&claim, 0o644);
        }
        command.arg("-v").arg(format!("{}:/claim.py:ro", claim.display()));
        command.args(["--env", "PATH=/usr/bin:/bin", "--env", "M=/leases", "--env", "CLAIM=/claim.py"]);
        command
    }

    /// A shell in a container that has the tree of `mount`.
    pub fn shell(&self, mount: &Mount, name: &str, options: &[&str]) -> Shell {
        let mut command = self.run(name);
        command.args(["-i", "-v"]).arg(format!("{}:/leases", mount.root().display())).args(options);
        command.args(["empty", "/bin/bash"]);
        let argv: Vec<&str> = [command.get_program()]
            .into_iter()
            .chain(command.get_args())
            .map(|word| word.to_str().expect("UTF-8"))
            .collect();
        Shell::ready(Script::start_with(mount, &argv))
    }

    /// Sends a signal to the first process of a container; SIGKILL takes the others along.
    pub fn kill(&self, name: &str, signal: &str) {
        assert_ok(&self.command().args(["kill", "--signal", signal, name]).output_in_time());
    }
}

/// A shell that runs what it is told; handles it opens stay open.
pub struct Shell(Script);

impl Shell {
    /// One on the host.
    pub fn host(mount: &Mount) -> Shell {
        let claim = format!("CLAIM={CLAIM}");
        Shell::ready(Script::start_with(mount, &["env", "--default-signal", &claim, "bash"]))
    }

    fn ready(script: Script) -> Shell {
        let mut shell = Shell(script);
        assert_eq!(shell.ask("echo ready"), (0, "ready".into()));
        shell
    }

    /// Runs a script: its exit status, and what it said, errors too.
    pub fn ask(&mut self, script: &str) -> (i32, String) {
        const END: &str = "=== ";
        self.0.say(&format!("{{ {script}\n}} </dev/null 2>&1; echo \"{END}$?\""));
        let mut said = Vec::new();
        loop {
            let line = self.0.line().unwrap_or_else(|| panic!("the shell ended at {script:?}: {said:?}"));
            match line.strip_prefix(END) {
                Some(status) => return (status.parse().expect("a status"), said.join("\n")),
                None => said.push(line),
            }
        }
    }

    /// Runs a script that is to succeed, and gives what it said.
    pub fn must(&mut self, script: &str) -> String {
        let (status, said) = self.ask(script);
        assert_eq!(status, 0, "{script}: {said}");
        said
    }

    /// Starts a script in the background and goes on.
    pub fn begin(&mut self, script: &str) {
        self.must(&format!("{{ {script}\n}} >/dev/null & disown"));
    }

    /// How an attempt by every form went, in the order of [`FORMS`]: `ok`, or the errno's name.
    pub fn try_all(&mut self, key: &str) -> String {
        self.must(&format!("python3 -S $CLAIM try $M/claims/{key} {}", FORMS.join(" ")))
    }

    /// Waits until the shell has ended, as it does when its container is killed.
    pub fn wait(&mut self) {
        self.0.wait();
    }
}
