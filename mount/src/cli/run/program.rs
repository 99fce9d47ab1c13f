//! Which file would be executed, by the shell's rules; looked up before anything is claimed.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use nix::errno::Errno;
use nix::unistd::{AccessFlags, access};
use serde::{Deserialize, Serialize};

use crate::cli::complain;

/// The command cannot be started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Missing {
    /// There is no such file.
    NotFound,
    /// It may not be executed.
    NotExecutable,
    /// Anything else, by the number of the error: too long a command line, too many processes.
    Failed(i32),
}

impl Missing {
    /// Says so, and gives the exit code that `env` gives.
    pub fn report(self, name: &OsStr) -> ExitCode {
        let (what, code) = match self {
            Missing::NotFound => ("command not found: check its name and PATH".to_owned(), 127),
            Missing::NotExecutable => ("cannot be executed: check its permissions".to_owned(), 126),
            Missing::Failed(number) => (format!("cannot be executed: {}", Errno::from_raw(number).desc()), 126),
        };
        complain(format_args!("{}: {what}", name.display()));
        ExitCode::from(code)
    }

    /// What an error of starting it means.
    pub fn of(error: &io::Error) -> Missing {
        match error.raw_os_error().map(Errno::from_raw) {
            Some(Errno::ENOENT) => Missing::NotFound,
            Some(errno) if errno != Errno::EACCES => Missing::Failed(errno as i32),
            _ => Missing::NotExecutable,
        }
    }
}

/// The file that would be executed.
pub fn find_program(name: &OsStr) -> Result<PathBuf, Missing> {
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    find_program_in(name, &path)
}

fn find_program_in(name: &OsStr, path: &OsStr) -> Result<PathBuf, Missing> {
    if name.is_empty() {
        return Err(Missing::NotFound);
    }
    if name.as_encoded_bytes().contains(&b'/') {
        return check_program(Path::new(name));
    }
    let mut missing = Missing::NotFound;
    for dir in std::env::split_paths(path) {
        // An empty entry is the working directory; `./` keeps it from being searched for again.
        let dir = if dir.as_os_str().is_empty() { PathBuf::from(".") } else { dir };
        match check_program(&dir.join(name)) {
            Ok(program) => return Ok(program),
            Err(Missing::NotExecutable) => missing = Missing::NotExecutable,
            Err(_) => {}
        }
    }
    Err(missing)
}

fn check_program(path: &Path) -> Result<PathBuf, Missing> {
    match path.metadata() {
        Ok(meta) if meta.is_file() && access(path, AccessFlags::X_OK).is_ok() => Ok(path.to_owned()),
        Ok(_) => Err(Missing::NotExecutable),
        Err(error) if error.kind() == io::ErrorKind::NotADirectory => Err(Missing::NotFound),
        Err(error) => Err(Missing::of(&error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_are_found_as_a_shell_finds_them() {
        let find = |name: &str, path: &str| find_program_in(OsStr::new(name), OsStr::new(path));
        assert_eq!(find("sh", "/nowhere:/bin"), Ok(PathBuf::from("/bin/sh")));
        assert_eq!(find("/bin/sh", ""), Ok(PathBuf::from("/bin/sh")));
        assert_eq!(find("no-such-command", "/bin:/usr/bin"), Err(Missing::NotFound));
        assert_eq!(find("", "/bin"), Err(Missing::NotFound));
        assert_eq!(find("/no/such/command", "/bin"), Err(Missing::NotFound));
        assert_eq!(find("/", "/bin"), Err(Missing::NotExecutable));
        assert_eq!(find("passwd", "/etc"), Err(Missing::NotExecutable));
        assert_eq!(find("/etc/passwd/x", "/bin"), Err(Missing::NotFound));
    }
}
