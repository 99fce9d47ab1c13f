//! `mount.leasefs`: what mount(8) calls for `mount -t leasefs` and for lines of `/etc/fstab`. It is this program under
//! another name, and `leasefs mount` in another form: `mount.leasefs STATE_DIR MOUNTPOINT [-sfnv] [-o OPTIONS]`.
//!
//! The state directory is the source of the mount, so that `mount -a` knows a mounted tree for what the line in fstab
//! stands for. mount(8) puts what it is given itself after what fstab has, so of an option that comes twice the last counts.

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail};
use clap::Parser;
use clap::error::{ContextKind, ContextValue};
use clap_mangen::roff::{Roff, bold, italic, roman};

use super::help::page::{self, Page};
use super::{Cli, Command, mount};

/// The name it is called by.
const NAME: &str = "mount.leasefs";
/// And the one for the type that the kernel shows.
const KERNEL_NAME: &str = "mount.fuse.leasefs";
const USAGE: &str = "mount.leasefs STATE_DIR MOUNTPOINT [-sfnv] [-o OPTIONS]";
/// mount(8): incorrect invocation.
const EXIT_USAGE: u8 = 1;
/// mount(8): mount failure.
const EXIT_MOUNT: u8 = 32;

/// Options that are `leasefs mount`'s own, with their values.
const WITH_VALUE: &[(&str, &str)] = &[
    ("ttl", "How long a lease lasts without renewal."),
    ("durability", "`full` or `process`: what a grant survives."),
    ("max_result", "The largest result."),
    ("max_keys", "The most keys one user may hold."),
    ("max_waiters", "The most waiting locks of one user."),
    ("max_starts", "The most servers in a row that may fail to get ready."),
];
/// And those without.
const FLAGS: &[(&str, &str)] = &[
    ("allow_other", "Let every user use the tree; without it, only the one that mounts."),
    ("no_resend", "Do not have the kernel send unanswered calls again to a new server."),
];
/// Options of mount(2) and fuse(4).
const PASSED: &[&str] = &["ro", "noexec", "noatime", "sync", "dirsync", "dev", "suid", "max_read", "context"];
/// What mount(8), systemd and udisks write for each other, and what a tree is like in any case.
const IGNORED: &[&str] = &[
    "defaults",
    "auto",
    "noauto",
    "nofail",
    "_netdev",
    "user",
    "users",
    "nouser",
    "owner",
    "noowner",
    "group",
    "nogroup",
    "rw",
    "exec",
    "async",
    "atime",
    "relatime",
    "norelatime",
    "diratime",
    "nodiratime",
    "nodev",
    "nosuid",
    "comment",
    "uhelper",
    "helper",
    "default_permissions",
];

/// What was asked for.
#[derive(Debug, Default, PartialEq, Eq)]
struct Call {
    state: PathBuf,
    mountpoint: PathBuf,
    /// What `leasefs mount` is given.
    options: Vec<String>,
    /// What it passes on to the kernel, and what the mount is of.
    kernel: Vec<String>,
    /// It is mounted, and to be mounted otherwise.
    remount: bool,
    /// Say what became of it.
    verbose: bool,
    /// Only check the arguments.
    fake: bool,
}

/// Whether the program was called by this name.
pub fn is_called() -> bool {
    let name = std::env::args_os().next();
    let name = name.as_deref().and_then(|name| Path::new(name).file_name());
    name.is_some_and(|name| name == NAME || name == KERNEL_NAME)
}

/// Reads the command line and mounts.
pub fn main() -> ExitCode {
    let words: Vec<OsString> = std::env::args_os().skip(1).collect();
    if let [word] = words.as_slice()
        && let Some(text) = match word.to_str() {
            Some("-h" | "--help") => Some(format!("{USAGE}\nSee mount.leasefs(8).")),
            Some("-V" | "--version") => Some(format!("{NAME} {}", env!("CARGO_PKG_VERSION"))),
            _ => None,
        }
    {
        let _ = writeln!(std::io::stdout(), "{text}");
        return ExitCode::SUCCESS;
    }
    let (outcome, failure) = match Call::read(words.into_iter()) {
        Ok(call) => (call.mount(), EXIT_MOUNT),
        Err(error) => (Err(error), EXIT_USAGE),
    };
    outcome.unwrap_or_else(|error| {
        let _ = writeln!(std::io::stderr(), "{NAME}: {error:#}");
        ExitCode::from(failure)
    })
}

impl Call {
    fn read(mut words: impl Iterator<Item = OsString>) -> Result<Call> {
        let (mut call, mut paths, mut sloppy, mut lists) = (Call::default(), Vec::new(), false, Vec::new());
        let mut only_paths = false;
        while let Some(word) = words.next() {
            let text = word.to_str().filter(|_| !only_paths).map(str::to_owned);
            match text.as_deref() {
                Some("--") => {
                    only_paths = true;
                    continue;
                }
                Some(text) if text.starts_with("--") => bail!("{text} is not known: {USAGE}"),
                _ => {}
            }
            let Some(flags) = text.as_deref().and_then(|text| text.strip_prefix('-')).filter(|flags| !flags.is_empty())
            else {
                paths.push(PathBuf::from(word));
                continue;
            };
            for (at, flag) in flags.char_indices() {
                let rest = &flags[at + flag.len_utf8()..];
                let value = |words: &mut dyn Iterator<Item = OsString>| {
                    let next = if rest.is_empty() { words.next() } else { Some(rest.into()) };
                    let next = next.with_context(|| format!("-{flag} has no value"))?;
                    next.into_string().map_err(|_| anyhow!("-{flag}: not UTF-8"))
                };
                match flag {
                    'o' => lists.push(value(&mut words)?),
                    't' | 'N' => drop(value(&mut words)?),
                    'v' => call.verbose = true,
                    'f' => call.fake = true,
                    's' => sloppy = true,
                    'n' | 'r' | 'w' => {}
                    _ => bail!("-{flag} is not known: {USAGE}"),
                }
                if matches!(flag, 'o' | 't' | 'N') {
                    break;
                }
            }
        }
        let [state, mountpoint] = <[PathBuf; 2]>::try_from(paths)
            .map_err(|paths| anyhow!("two paths are needed, and {} given: {USAGE}", paths.len()))?;
        if state == Path::new("none") || state == Path::new("leasefs") {
            bail!("{}: the source is the state directory: give its path, as in /var/lib/leasefs/main", state.display());
        }
        (call.state, call.mountpoint) = (state, mountpoint);
        let options: Vec<String> = lists.iter().flat_map(|list| split(list)).filter(|one| !one.is_empty()).collect();
        // Then the rest is what the kernel has the mount be like now, and nothing comes of it.
        call.remount = options.iter().any(|option| option == "remount");
        for option in options {
            match translate(&option) {
                Some(Meaning::Ours(word)) => {
                    let name = word.split('=').next().unwrap_or_default().to_owned();
                    call.options.retain(|before| before.split('=').next() != Some(&name));
                    call.options.push(word);
                }
                Some(Meaning::Kernels) => call.kernel.push(option),
                Some(Meaning::Nothing) => {}
                None if sloppy || call.remount => {}
                None => bail!("-o {option} is not known: see mount.leasefs(8)"),
            }
        }
        if let Some(source) = source(&call.state).to_str() {
            call.kernel.push(format!("fsname={source}"));
        }
        Ok(call)
    }

    fn mount(self) -> Result<ExitCode> {
        if self.remount {
            bail!(
                "a tree cannot be remounted: unmount it and mount it again; a new program takes over by `leasefs upgrade`"
            );
        }
        let mut words: Vec<OsString> = vec!["leasefs".into(), "mount".into(), "--state".into(), self.state.into()];
        words.extend(self.options.iter().map(OsString::from));
        words.extend(["--".into(), self.mountpoint.into()]);
        let parsed = Cli::try_parse_from(words).map_err(|error| anyhow!("{}", in_options(&error)))?;
        let Command::Mount(mut args) = parsed.command else { bail!("not a mount") };
        args.add_options(self.kernel);
        if self.fake {
            return Ok(ExitCode::SUCCESS);
        }
        mount::run_quietly(args, !self.verbose)
    }
}

/// Splits a list of options; a comma in double quotes is part of a value, and the quotes are not.
fn split(list: &str) -> Vec<String> {
    let (mut options, mut quoted) = (vec![String::new()], false);
    for c in list.chars() {
        match c {
            '"' => quoted = !quoted,
            ',' if !quoted => options.push(String::new()),
            c => options.last_mut().into_iter().for_each(|last| last.push(c)),
        }
    }
    options
}

/// What a mount of this state directory is of: its path as mount(8) works it out from fstab, also where the directory is not
/// there yet.
fn source(state: &Path) -> PathBuf {
    let resolved = state.canonicalize().or_else(|error| {
        let absolute = std::path::absolute(state)?;
        let (Some(above), Some(name)) = (absolute.parent(), absolute.file_name()) else { return Err(error) };
        Ok(above.canonicalize()?.join(name))
    });
    resolved.unwrap_or_else(|_| state.to_owned())
}

/// What an option is.
#[derive(Debug, PartialEq, Eq)]
enum Meaning {
    /// One that `leasefs mount` has as this word.
    Ours(String),
    /// One of mount(2) or fuse(4).
    Kernels,
    /// For others, or what is so in any case.
    Nothing,
}

/// What an option means; none if it is not known.
fn translate(option: &str) -> Option<Meaning> {
    let (name, value) = option.split_once('=').map_or((option, None), |(name, value)| (name, Some(value)));
    let long = || format!("--{}", name.replace('_', "-"));
    if let (Some(value), true) = (value, WITH_VALUE.iter().any(|(known, _)| *known == name)) {
        return Some(Meaning::Ours(format!("{}={value}", long())));
    }
    if value.is_none() && FLAGS.iter().any(|(known, _)| *known == name) {
        return Some(Meaning::Ours(long()));
    }
    if PASSED.contains(&name) {
        return Some(Meaning::Kernels);
    }
    (IGNORED.contains(&name) || name.starts_with("x-") || name.starts_with("X-")).then_some(Meaning::Nothing)
}

/// What is wrong with a word of `leasefs mount`, in terms of the option that it was made of.
fn in_options(error: &clap::Error) -> String {
    let text = error.to_string();
    let line = text.lines().next().unwrap_or_default().trim_start_matches("error: ");
    let Some(ContextValue::String(word)) = error.get(ContextKind::InvalidArg) else { return line.to_owned() };
    let name = word.split(' ').next().unwrap_or_default().trim_start_matches("--").replace('-', "_");
    let line = line.replace(&format!("'{word}'"), &format!("-o {name}"));
    match error.get(ContextKind::ValidValue) {
        Some(ContextValue::Strings(values)) if !values.is_empty() => format!("{line}: use {}", values.join(" or ")),
        _ => line,
    }
}

/// The man page.
pub fn man_page() -> String {
    let mut roff = Roff::new();
    roff.control("SH", ["NAME"]).text([roman(format!("{NAME} - mount a lease tree by mount(8) or /etc/fstab"))]);
    roff.control("SH", ["SYNOPSIS"]);
    roff.text([
        bold("mount -t leasefs "),
        roman("[-o "),
        italic("options"),
        roman("] "),
        italic("state_dir mountpoint"),
    ]);
    let section = |roff: &mut Roff, title: &str, fill: &dyn Fn(&mut Page)| {
        let mut page = Page::default();
        fill(&mut page);
        roff.control("SH", [title]);
        page::to_roff(&page, roff);
    };
    section(&mut roff, "DESCRIPTION", &|page| {
        page.text(
            "Mounts as `leasefs mount` does, in the background, and returns when the tree answers. The source is the \
             state directory: where epochs, leases and results are kept. It is made if it is not there; the directory it \
             is in must be. A tree that is in use is not unmounted by `umount`, which says that it is busy.",
        );
    });
    section(&mut roff, "OPTIONS", &|page| {
        for (name, about) in WITH_VALUE {
            page.entry(format!("{name}=VALUE"), *about);
        }
        for (name, about) in FLAGS {
            page.entry(*name, *about);
        }
        page.entry(PASSED.join(", "), "As in mount(8) and fuse(4).");
        page.entry(
            format!("x-*, {}", IGNORED.join(", ")),
            "Are for others, or make no difference here. Any other option is refused. Of one that comes twice, the last counts.",
        );
    });
    section(&mut roff, "EXIT STATUS", &|page| {
        page.entry("0", "mounted").entry("1", "bad usage").entry("32", "it could not be mounted: stderr says why");
    });
    section(&mut roff, "EXAMPLES", &|page| {
        page.text("A line of /etc/fstab:");
        page.code("/var/lib/leasefs/main /srv/leases leasefs ttl=1h,nofail 0 0");
        page.text(
            "Where the state directory may be on a filesystem of its own, add \
             `x-systemd.requires-mounts-for=/var/lib/leasefs`: that one has to be mounted before, or numbers would begin \
             anew in a directory below it.",
        );
    });
    roff.control("SH", ["SEE ALSO"]);
    roff.text([
        bold("leasefs-mount"),
        roman("(1), "),
        bold("leasefs"),
        roman("(1), "),
        bold("mount"),
        roman("(8), "),
        bold("fstab"),
        roman("(5)"),
    ]);
    super::generate::title(NAME, 8) + &roff.to_roff()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(words: &[&str]) -> Result<Call> {
        Call::read(words.iter().map(OsString::from))
    }

    #[test]
    fn what_mount_8_says_becomes_what_leasefs_mount_understands() {
        let list =
            "rw,ttl=1h,allow_other,durability=process,max_result=1MiB,noexec,_netdev,nofail,x-systemd.requires=a.mount";
        let call = read(&["/var/lib/l", "/srv/l", "-n", "-o", list]).expect("fits");
        assert_eq!(call.options.join(" "), "--ttl=1h --allow-other --durability=process --max-result=1MiB");
        assert_eq!(call.kernel, ["noexec", "fsname=/var/lib/l"]);
        assert_eq!((call.state, call.mountpoint), ("/var/lib/l".into(), "/srv/l".into()));
        let call = read(&["/s,1", "/m", "-fvorw", "-t", "leasefs"]).expect("fits");
        assert!(call.fake && call.verbose && call.options.is_empty());
        assert_eq!(call.kernel, ["fsname=/s,1"], "also one that would not fit into a list");
        assert_eq!(split("a,context=\"b,c\",d"), ["a", "context=b,c", "d"]);
    }

    #[test]
    fn what_is_not_known_is_told_and_passed_over_only_where_asked_for() {
        for (words, expected) in [
            (&["/s", "/m", "-o", "tll=1h"][..], "-o tll=1h is not known"),
            (&["/s", "/m", "-o", "ttl"], "-o ttl is not known"),
            (&["/s"], "two paths are needed, and 1 given"),
            (&["/s", "/m", "/x"], "two paths are needed, and 3 given"),
            (&["/s", "/m", "--frob"], "--frob is not known"),
            (&["/s", "/m", "-o"], "-o has no value"),
            (&["/s", "/m", "-q"], "-q is not known"),
            (&["none", "/m"], "the source is the state directory"),
        ] {
            let error = read(words).expect_err("refused").to_string();
            assert!(error.contains(expected), "{words:?}: {error}");
        }
        assert!(read(&["/s", "/m", "-s", "-o", "tll=1h"]).is_ok());
    }

    #[test]
    fn of_an_option_that_comes_twice_the_last_counts() {
        let list = "ttl=1h,allow_other,max_keys=5,ttl=2h,allow_other";
        let call = read(&["/s", "--", "-m", "x"]).map(|_| ());
        assert!(call.is_err(), "three paths");
        let call = read(&["-o", list, "--", "/s", "-m"]).expect("fits");
        assert_eq!(call.options.join(" "), "--max-keys=5 --ttl=2h --allow-other");
        assert_eq!(call.mountpoint, Path::new("-m"));
    }

    #[test]
    fn what_is_wrong_with_a_value_is_told_of_the_option() {
        for (option, expected) in [
            ("max_result=0", "invalid value '0' for -o max_result: give a size such as"),
            ("durability=foo", "invalid value 'foo' for -o durability: use full or process"),
            ("ttl=never", "invalid value 'never' for -o ttl: a TTL looks like"),
        ] {
            let error = read(&["/s", "/m", "-f", "-o", option]).expect("known").mount().expect_err("refused");
            assert!(error.to_string().starts_with(expected), "{error}");
        }
    }

    #[test]
    fn the_source_is_the_path_that_fstab_is_resolved_to() {
        let dir = tempfile::tempdir().expect("directory");
        let real = dir.path().canonicalize().expect("a path").join("real");
        std::fs::create_dir(&real).expect("mkdir");
        std::os::unix::fs::symlink(&real, dir.path().join("link")).expect("symlink");
        assert_eq!(source(&dir.path().join("link/new")), real.join("new"), "not there yet");
        assert_eq!(source(&dir.path().join("link")), real);
    }
}
