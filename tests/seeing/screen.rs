//! A terminal of so many columns and lines, in tmux, gone with the value.

use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::common::{InTime, LEASEFS, Mount, assert_ok, stdout, wait_for};

/// What is shown once the program in the terminal has ended.
const ENDED: &str = "ended with";

pub struct Screen {
    socket: PathBuf,
}

impl Screen {
    /// Runs `leasefs` with the mount named in its environment.
    pub fn leasefs(mount: &Mount, size: (u32, u32), args: &str) -> Screen {
        Screen::run(mount, size, &format!("{LEASEFS} {args}"))
    }

    /// Runs a shell command; the screen stays when it ends.
    pub fn run(mount: &Mount, (columns, lines): (u32, u32), command: &str) -> Screen {
        // Never the same twice: a server of tmux that was told to end is still there for a moment.
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let screen = Screen { socket: mount.scratch().join(format!("tmux{number}")) };
        let command = format!("{command}; echo \"{ENDED} $?\"; exec sleep 1000");
        let mut tmux = screen.tmux();
        tmux.args(["new-session", "-d", "-x", &columns.to_string(), "-y", &lines.to_string(), &command]);
        assert_ok(&tmux.env("LEASEFS_ROOT", mount.root()).output_in_time());
        screen
    }

    fn tmux(&self) -> Command {
        let mut tmux = Command::new("tmux");
        // A terminal in UTF-8, with no settings of whoever runs the tests.
        tmux.args(["-u", "-f", "/dev/null", "-S"]).arg(&self.socket);
        tmux.env("LC_ALL", "C.UTF-8")
            .env("SHELL", "/bin/sh")
            .env_remove("TMUX")
            .env_remove("NO_COLOR")
            .stdin(Stdio::null());
        tmux
    }

    /// The lines on it, without the blanks at their ends.
    pub fn lines(&self) -> Vec<String> {
        let shown = self.tmux().args(["capture-pane", "-p"]).output_in_time();
        stdout(&shown).lines().map(|line| line.trim_end().to_owned()).collect()
    }

    /// The same as text.
    pub fn text(&self) -> String {
        self.lines().join("\n")
    }

    /// The same with the sequences that colour it.
    pub fn coloured(&self) -> String {
        stdout(&self.tmux().args(["capture-pane", "-p", "-e"]).output_in_time())
    }

    /// Presses keys, by the names that tmux has for them.
    pub fn press(&self, keys: &[&str]) {
        assert_ok(&self.tmux().arg("send-keys").args(keys).output_in_time());
    }

    /// Makes it as large as this.
    pub fn resize(&self, columns: u32, lines: u32) {
        let size = ["resize-window", "-x", &columns.to_string(), "-y", &lines.to_string()].map(str::to_owned);
        assert_ok(&self.tmux().args(size).output_in_time());
    }

    /// Waits until what it shows satisfies the condition.
    #[track_caller]
    pub fn wait(&self, what: &str, mut condition: impl FnMut(&[String]) -> bool) -> Vec<String> {
        let mut lines = Vec::new();
        let came = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            wait_for(what, || {
                lines = self.lines();
                !lines.is_empty() && condition(&lines)
            });
        }));
        assert!(came.is_ok(), "never shown: {what}:\n{}", lines.join("\n"));
        lines
    }

    /// Waits for the program's end, and gives its exit code.
    pub fn ended(&self) -> i32 {
        let code = |lines: &[String]| lines.iter().find_map(|line| line.strip_prefix(ENDED)?.trim().parse().ok());
        let lines = self.wait("the end", |lines| code(lines).is_some());
        code(&lines).expect("it ended")
    }

    /// The pid of the shell that runs the program.
    pub fn shell(&self) -> i32 {
        let pid = self.tmux().args(["display-message", "-p", "#{pane_pid}"]).output_in_time();
        stdout(&pid).trim().parse().expect("a pid")
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        self.tmux().arg("kill-server").quietly_in_time();
    }
}
