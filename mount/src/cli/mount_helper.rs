//! `mount.leasefs`: what mount(8) calls for `mount -t leasefs` and for lines of `/etc/fstab`. It is this program under
//! another name, and `leasefs mount` in another form: `mount.leasefs STATE_DIR MOUNTPOINT [-sfnv] [-o OPTIONS]`.
//!
//! The state directory is the source of the mount, so that `mount -a` knows a mounted tree for what the line in fstab
//! stands for.

use std::ffi::OsString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, anyhow, bail};
use clap::Parser;
use clap_mangen::roff::{Roff, bold, italic, roman};

use super::help::page::{self, Page};
use super::{Cli, Command, mount};

/// The name it is called by.
const NAME: &str = "mount.leasefs";
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
    /// Say what became of it.
    verbose: bool,
    /// Only check the arguments.
    fake: bool,
}

/// Whether the program was called by this name.
pub fn is_called() -> bool {
    let name = std::env::args_os().next();
    name.is_some_and(|name| Path::new(&name).file_name().is_some_and(|name| name == NAME))
}

/// Reads the command line and mounts.
pub fn main() -> ExitCode {
    let (outcome, failure) = match Call::read(std::env::args_os().skip(1)) {
        Ok(call) => (call.mount(), EXIT_MOUNT),
        Err(error) => (Err(error), EXIT_USAGE),
    };
    outcome.unwrap_or_else(|error| {
        let _ = writeln!(std::io::stderr(), "{NAME}: {error:#}");
        ExitCode::from(failure)
    })
}

impl Call {
    fn read(words: impl Iterator<Item = OsString>) -> Result<Call> {
        let (mut call, mut paths, mut sloppy, mut lists) = (Call::default(), Vec::new(), false, Vec::new());
        let mut words = words.peekable();
        while let Some(word) = words.next() {
            let text = word.to_str().map(str::to_owned);
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
                    _ => bail!("-{flag} is not known: {NAME} STATE_DIR MOUNTPOINT [-sfnv] [-o OPTIONS]"),
                }
                if matches!(flag, 'o' | 't' | 'N') {
                    break;
                }
            }
        }
        let [state, mountpoint] = <[PathBuf; 2]>::try_from(paths).map_err(|paths| {
            anyhow!("{} paths are given: {NAME} STATE_DIR MOUNTPOINT [-sfnv] [-o OPTIONS]", paths.len())
        })?;
        if state == Path::new("none") || state == Path::new("leasefs") {
            bail!("{}: the source is the state directory: give its path, as in /var/lib/leasefs/main", state.display());
        }
        (call.state, call.mountpoint) = (state, mountpoint);
        for option in lists.iter().flat_map(|list| split(list)).filter(|option| !option.is_empty()) {
            match translate(&option) {
                Some(words) => call.options.extend(words),
                None if sloppy => {}
                None => bail!("-o {option} is not known: see mount.leasefs(8)"),
            }
        }
        if let Some(state) = call.state.to_str().filter(|state| !state.contains(',')) {
            call.options.push("-o".into());
            call.options.push(format!("fsname={state}"));
        }
        Ok(call)
    }

    fn mount(self) -> Result<ExitCode> {
        if self.options.iter().any(|option| option == "remount") {
            bail!(
                "a tree cannot be remounted: unmount it and mount it again; a new program takes over by `leasefs upgrade`"
            );
        }
        let mut words: Vec<OsString> = vec!["leasefs".into(), "mount".into(), "--state".into(), self.state.into()];
        words.extend(self.options.iter().map(OsString::from));
        words.extend(["--".into(), self.mountpoint.into()]);
        let parsed = Cli::try_parse_from(words).map_err(|error| {
            let text = error.to_string();
            anyhow!("{}", text.lines().next().unwrap_or_default().trim_start_matches("error: "))
        })?;
        let Command::Mount(args) = parsed.command else { bail!("not a mount") };
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

/// What `leasefs mount` is given for an option; none if it is not known.
fn translate(option: &str) -> Option<Vec<String>> {
    let (name, value) = option.split_once('=').map_or((option, None), |(name, value)| (name, Some(value)));
    let long = || format!("--{}", name.replace('_', "-"));
    if let (Some(value), true) = (value, WITH_VALUE.iter().any(|(known, _)| *known == name)) {
        return Some(vec![format!("{}={value}", long())]);
    }
    if value.is_none() && FLAGS.iter().any(|(known, _)| *known == name) {
        return Some(vec![long()]);
    }
    if PASSED.contains(&name) {
        return Some(vec!["-o".into(), option.into()]);
    }
    if name == "remount" {
        return Some(vec![name.into()]);
    }
    (IGNORED.contains(&name) || name.starts_with("x-") || name.starts_with("X-")).then(Vec::new)
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
            "Are for others, or make no difference here. Any other option is refused.",
        );
    });
    section(&mut roff, "EXIT STATUS", &|page| {
        page.entry("0", "mounted").entry("1", "bad usage").entry("32", "it could not be mounted: stderr says why");
    });
    section(&mut roff, "EXAMPLES", &|page| {
        page.text("A line of /etc/fstab:");
        page.code("/var/lib/leasefs/main /srv/leases leasefs ttl=1h,nofail 0 0");
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
        let expected = "--ttl=1h --allow-other --durability=process --max-result=1MiB -o noexec -o fsname=/var/lib/l";
        assert_eq!(call.options.join(" "), expected);
        assert_eq!((call.state, call.mountpoint), ("/var/lib/l".into(), "/srv/l".into()));
        let call = read(&["/s,1", "/m", "-fvorw", "-t", "leasefs"]).expect("fits");
        assert!(call.fake && call.verbose && call.options.is_empty());
        assert_eq!(split("a,context=\"b,c\",d"), ["a", "context=b,c", "d"]);
    }

    #[test]
    fn what_is_not_known_is_told_and_passed_over_only_where_asked_for() {
        for (words, expected) in [
            (&["/s", "/m", "-o", "tll=1h"][..], "-o tll=1h is not known"),
            (&["/s", "/m", "-o", "ttl"], "-o ttl is not known"),
            (&["/s"], "1 paths are given"),
            (&["/s", "/m", "/x"], "3 paths are given"),
            (&["/s", "/m", "-o"], "-o has no value"),
            (&["/s", "/m", "-q"], "-q is not known"),
            (&["none", "/m"], "the source is the state directory"),
        ] {
            let error = read(words).expect_err("refused").to_string();
            assert!(error.contains(expected), "{words:?}: {error}");
        }
        assert!(read(&["/s", "/m", "-s", "-o", "tll=1h"]).is_ok());
    }
}
