//! What a test program has from whoever starts it, made the same everywhere before the first test runs: settings, ignored
//! signals, the umask, the place for files.
//!
//! A test that is about an odd environment makes it for the command it runs, as `keeper::inherited` does.

use std::env;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// Settings of ours, and of programs that tests run, which change what these say or do.
const SETTINGS: [&str; 21] = [
    "LEASEFS_AGENT",
    "LEASEFS_EPOCH",
    "LEASEFS_FD",
    "LEASEFS_KEY",
    "LEASEFS_LOG",
    "LEASEFS_RESULT",
    "LEASEFS_ROOT",
    "LEASEFS_TEST_ABORT",
    "NOTIFY_SOCKET",
    "BASH_ENV",
    "CLICOLOR",
    "CLICOLOR_FORCE",
    "COLUMNS",
    "CONTAINER_HOST",
    "ENV",
    "LANGUAGE",
    "LINES",
    "MAKEFLAGS",
    "NO_COLOR",
    "POSIXLY_CORRECT",
    "TMUX",
];

/// Longest path of the directory for files: the name of a socket below it has 108 bytes.
const LONGEST: usize = 60;

// Before `main` there is one thread, so the environment can be changed, and no child that has it from before.
// SAFETY: the C library calls what is in this section once, with the environment in place.
#[used]
#[unsafe(link_section = ".init_array")]
static SETTLE: extern "C" fn() = settle;

extern "C" fn settle() {
    // SAFETY: there is one thread.
    unsafe {
        SETTINGS.iter().for_each(|name| env::remove_var(name));
        // Messages are looked at in English; names may have any letters.
        env::set_var("LC_ALL", "C.UTF-8");
        env::set_var("PATH", path());
        if !is_fit(&env::temp_dir()) {
            let others = ["/tmp", "/var/tmp", "/dev/shm"].map(Path::new);
            others.into_iter().find(|path| is_fit(path)).into_iter().for_each(|path| env::set_var("TMPDIR", path));
        }
        libc::umask(0o022);
    }
    heed_signals();
}

/// Other users walk through it, and names below it are not too long.
fn is_fit(directory: &Path) -> bool {
    is_open_to_all(directory) && directory.as_os_str().len() <= LONGEST
}

/// The search path, with the places where an administrator's programs are.
fn path() -> String {
    let mut path = env::var("PATH").unwrap_or_else(|_| "/usr/local/bin:/usr/bin:/bin".into());
    for directory in ["/usr/local/sbin", "/usr/sbin", "/sbin"] {
        if !path.split(':').any(|known| known == directory) {
            path = format!("{path}:{directory}");
        }
    }
    path
}

/// Signals that the starter ignores are not ignored by what tests start, and still do not end this program: what has a
/// handler has the default action again in a program that is executed. Nor are children reaped unseen.
fn heed_signals() {
    extern "C" fn nothing(_: libc::c_int) {}
    for signal in (1..32).filter(|signal| ![libc::SIGKILL, libc::SIGSTOP, libc::SIGPIPE].contains(signal)) {
        // SAFETY: all-zero is a valid sigaction, the pointers are to values that outlive the calls, and the handler does
        // nothing.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            if libc::sigaction(signal, std::ptr::null(), &mut action) != 0 || action.sa_sigaction != libc::SIG_IGN {
                continue;
            }
            action.sa_sigaction =
                if signal == libc::SIGCHLD { libc::SIG_DFL } else { nothing as *const () as libc::sighandler_t };
            action.sa_flags = libc::SA_RESTART;
            libc::sigaction(signal, &action, std::ptr::null_mut());
        }
    }
}

/// Whether every user may go through these directories, or read and execute this file.
pub fn is_open_to_all(path: &Path) -> bool {
    let bits = |path: &Path| std::fs::metadata(path).map(|found| (found.is_dir(), found.permissions().mode()));
    let is_open = |(is_directory, mode): (bool, u32)| {
        let needed = if is_directory { 0o001 } else { 0o005 };
        mode & needed == needed
    };
    let path: PathBuf = std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    path.ancestors().all(|path| bits(path).is_ok_and(is_open))
}
