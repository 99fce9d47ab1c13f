//! An agent's tool calls: each a shell of its own, which is gone when the next begins.

use std::path::Path;
use std::process::{Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::common::agent::has_ended;
pub use crate::common::assert_refused;
use crate::common::{Background, InTime, LEASEFS, Mount, assert_ok, stdout, wait_for};

/// A mount, and shells that know it. Holder processes that a failed test leaves are ended with it.
pub struct Tools {
    /// The mount.
    pub mount: Mount,
}

impl Tools {
    /// With a mount of its own.
    pub fn new() -> Tools {
        Tools { mount: Mount::new() }
    }

    /// With a mount for every uid.
    pub fn shared() -> Tools {
        Tools { mount: Mount::shared() }
    }

    /// A command with the mount and the program in its environment, and nothing that names an agent or an attempt.
    pub fn command(&self, argv: &[&str]) -> Command {
        let mut command = self.mount.command("env");
        command.arg(self.path()).args(argv);
        for name in ["LEASEFS_AGENT", "LEASEFS_KEY", "LEASEFS_EPOCH", "LEASEFS_RESULT"] {
            command.env_remove(name);
        }
        command
    }

    /// The setting under which programs find `leasefs` by its name.
    pub fn path(&self) -> String {
        let bin = Path::new(LEASEFS).parent().expect("the binary is in a directory");
        format!("PATH={}:{}", bin.display(), std::env::var("PATH").expect("PATH is set"))
    }

    /// A step in the session of the test.
    pub fn step(&self, script: &str) -> Output {
        self.command(&["bash", "-c", &with_a_shell(script)]).output_in_time()
    }

    /// A step in a session that is gone with it, so that nothing but what it is told connects it to other steps.
    pub fn elsewhere(&self, script: &str) -> Output {
        self.command(&["setsid", "-w", "bash", "-c", &with_a_shell(script)]).output_in_time()
    }

    /// A step in the background.
    pub fn start(&self, script: &str) -> Background {
        let mut command = self.command(&["bash", "-c", &with_a_shell(script)]);
        Background(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("bash runs"))
    }

    /// Claims in a session of its own and gives the epoch.
    pub fn claim(&self, arguments: &str) -> u64 {
        let output = self.elsewhere(&format!("leasefs claim {arguments}"));
        assert_ok(&output);
        epoch(&output)
    }

    /// The process that holds a key.
    pub fn holder(&self, key: &str) -> i32 {
        let status = self.mount.status(key);
        let pid = status["holder"]["pid"].as_i64();
        pid.and_then(|pid| i32::try_from(pid).ok()).unwrap_or_else(|| panic!("{key} is not held: {status}"))
    }

    /// Waits until a key is free and the process that held it is gone.
    pub fn wait_free(&self, key: &str, holder: i32) {
        self.mount.wait_status(key, "free", |status| status["state"] == "free");
        wait_for("end of the holder process", || has_ended(holder));
    }

    /// The attempts of a key, oldest first.
    pub fn history(&self, key: &str) -> Vec<Value> {
        self.mount.wait_applied();
        let output = self.step(&format!("leasefs history {key} --json"));
        assert_ok(&output);
        stdout(&output).lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
    }

    /// Waits until the process that holds a key is the only one: one that was refused ends after it has said so.
    pub fn wait_one_holder(&self, key: &str) {
        wait_for("end of every other holder process", || self.mount.holders() == [self.holder(key)]);
    }

    /// Waits until there is none.
    pub fn wait_no_holders(&self) {
        wait_for("end of every holder process", || self.mount.holders().is_empty());
    }
}

/// The shell stays, so that the command is its child as it is in a longer script.
fn with_a_shell(script: &str) -> String {
    format!("{script}\nexit $?")
}

/// The epoch that `leasefs claim` printed.
pub fn epoch(output: &Output) -> u64 {
    let text = stdout(output);
    text.lines().next().and_then(|line| line.parse().ok()).unwrap_or_else(|| panic!("no epoch first: {text:?}"))
}

/// Sends a signal to a process.
pub fn signal(pid: i32, signal: Signal) {
    kill(Pid::from_raw(pid), signal).expect("kill");
}
