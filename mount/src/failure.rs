//! Every failure that a command tells a person of in words of its own: what is wrong, and the cure.
//!
//! A failure is raised as a value of [`Failure`] and shown as one line, `what is wrong: what to do`. `leasefs help errors`
//! and the man page print the same table, so nothing is said in two ways. What the kernel tells programs, which are
//! numbers without a cure, is in [`SYMPTOMS`]; README's troubleshooting table is that one, word for word.
//!
//! What is not here: the engine's own faults of a registry, whose words are in the library ([`ENGINE`] repeats how they
//! begin), and what one command alone can meet.

use std::fmt;
use std::io;
use std::path::Path;

/// A row of a table: what a person sees, and what they can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// What is seen; `{name}` stands for what varies.
    pub what: &'static str,
    /// What to do.
    pub cure: &'static str,
}

/// Rows on one subject.
#[derive(Clone, Copy, Debug)]
pub struct Section {
    /// The subject.
    pub title: &'static str,
    /// The rows.
    pub rows: &'static [Row],
}

macro_rules! failures {
    ($(
        $title:literal {
            $( $(#[$doc:meta])* $name:ident $({ $($field:ident),+ })? = $what:literal, cure $cure:literal; )+
        }
    )+) => {
        /// A failure, with what varies in what is said of it.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum Failure {
            $($( $(#[$doc])* #[allow(missing_docs)] $name $({ $($field: String),+ })?, )+)+
        }

        impl Failure {
            /// What is wrong.
            pub fn what(&self) -> String {
                match self {
                    // What a field is not needed for is written with no character of it.
                    $($( Failure::$name $({ $($field),+ })? =>
                        format!(concat!($what $( $(, "{", stringify!($field), ":.0}")+ )?) $( $(, $field = $field)+ )?), )+)+
                }
            }

            /// What to do.
            pub fn cure(&self) -> String {
                match self {
                    $($( Failure::$name $({ $($field),+ })? =>
                        format!(concat!($cure $( $(, "{", stringify!($field), ":.0}")+ )?) $( $(, $field = $field)+ )?), )+)+
                }
            }
        }

        /// The table of [`Failure`].
        pub const FAILURES: &[Section] = &[
            $( Section { title: $title, rows: &[ $( Row { what: $what, cure: $cure } ),+ ] } ),+
        ];
    };
}

failures! {
    "Mounting" {
    /// The module is not loaded, or the container was not given the device.
    NoDevice = "/dev/fuse does not exist",
        cure "load the module (`modprobe fuse`), or give the container --device /dev/fuse --cap-add SYS_ADMIN";
    /// The device is there and may not be opened.
    DeviceShut { why } = "cannot open /dev/fuse ({why})",
        cure "give the container --device /dev/fuse; in a unit, DeviceAllow=/dev/fuse";
    /// Only root mounts by itself.
    NoFusermount = "fusermount3 is not installed", cure "install the package fuse3, or mount as root";
    /// Its mode is not the usual 0666.
    DeviceMode = "this user may not open /dev/fuse", cure "run `chmod 666 /dev/fuse` as root, or mount as root";
    /// fusermount3 refuses `allow_other` to users other than root.
    NoAllowOther = "--allow-other needs `user_allow_other` in /etc/fuse.conf",
        cure "add that line, or mount as root";
    /// `EPERM` from mount(2).
    MountNotPermitted { path } = "not permitted to mount on {path}",
        cure "run as root, or in a container with CAP_SYS_ADMIN";
    /// `EINVAL` from mount(2).
    OptionsRefused { options } = "the kernel refuses the mount options", cure "check -o {options}";
    /// An option this filesystem does not have.
    UnknownOption { option } = "-o {option} is not known",
        cure "use ro, noexec, noatime, sync, dirsync, dev, suid, max_read=BYTES, context=LABEL or fsname=NAME";
    /// The kernel would abort the connection.
    RequestTimeout { setting, seconds } =
        "{setting} is {seconds} s, and one longer wait would end the whole mount",
        cure "run `sysctl {setting}=0`, and take it out of /etc/sysctl.d";
    /// There is no such directory.
    NoMountpoint { path } = "{path} does not exist", cure "mkdir it first";
    /// It is something else.
    MountpointNoDirectory { path } = "{path} is not a directory", cure "give an empty directory";
    /// It would be hidden.
    MountpointNotEmpty { path } = "{path} is not empty", cure "give an empty directory";
    /// Paths are kept and told as text.
    PathNotText { path } = "{path} is not UTF-8", cure "give a directory whose whole path is";
    /// A tree is there.
    MountedAlready { path } = "{path} is already a leasefs mount", cure "use it, or `leasefs unmount {path}` first";
    /// Something else is mounted there.
    MountpointTaken { path } = "{path} is already a mountpoint", cure "unmount it, or give another directory";
    /// A dead mount that is not of this state directory.
    DeadMountpoint { path } = "{path} is a mount whose server is gone",
        cure "end the processes that use it, then `leasefs unmount {path}`";
    /// A mount whose keeper is gone and whose connection somebody else has.
    StillConnected { path } = "{path} is still connected though its server is gone",
        cure "end the process that has its /dev/fuse open";
    /// The keeper gave up.
    GaveUp { starts, path, why } =
        "{starts} servers in a row did not get ready ({why}): {path} is left as it is and answers ENOTCONN; what is held \
         stays held",
        cure "put right what is wrong, `leasefs unmount {path}`, and mount again";
    /// A program that is too old or too new for the keeper.
    OtherProtocol { keeper, program, version } =
        "the keeper hands over by protocol {keeper}, and this program ({version}) knows {program}",
        cure "unmount and mount again";
    }

    "The state directory" {
    /// Another keeper has its lock.
    StateServed { path } = "state directory {path} is already served by another leasefs",
        cure "unmount that one, or use another --state";
    /// Likely a typing error.
    NoStateParent { path, parent } = "state directory {path}: {parent} does not exist", cure "mkdir it first";
    /// `EROFS`.
    StateReadOnly { path } = "state directory {path}: the filesystem is read-only",
        cure "remount it writable, or use another --state";
    /// `ENOSPC`, `EDQUOT`.
    StateFull { path, why } = "state directory {path} has no room ({why})", cure "free some space, or use another --state";
    /// Any other reason.
    StateUnwritable { path, why } = "state directory {path} cannot be written ({why})",
        cure "make it writable for this user, or use another --state";
    /// It could not be made.
    StateUnmade { path, why } = "state directory {path} cannot be made ({why})", cure "use another --state";
    /// The log of a background mount.
    LogShut { path, why } = "cannot write the log {path} ({why})",
        cure "take away what is there, or mount with --foreground, which logs to stderr";
    /// It would hide itself.
    StateInMountpoint { path } = "state directory {path} is inside the mountpoint", cure "use a --state outside it";
    /// A tree of this kind keeps no files.
    StateInTree { path, tree } = "state directory {path} is inside the leasefs tree {tree}",
        cure "use a --state outside it";
    /// There is no default.
    NoHome = "neither XDG_STATE_HOME nor HOME is set", cure "give --state DIR";
    /// Nothing of ours is in it.
    NoRegistry { path } = "{path}: no registry is here", cure "give a state directory with --state";
    /// It is 0700.
    StateShut { path } = "{path}: permission denied", cure "only its owner may look into it";
    }

    "Unmounting" {
    /// There is no tree.
    NothingThere { path } = "{path} does not exist, so nothing is mounted on it", cure "see `findmnt -t fuse.leasefs`";
        /// Unmounting: no leasefs mount.
        NotMounted { path } = "{path} is not a leasefs mount", cure "see `findmnt -t fuse.leasefs`";
    /// `EBUSY`.
    InUse { path } = "{path} is in use",
        cure "end the processes that have files open in it (`leasefs ls` shows the holders, `fuser -vm {path}` all), then \
              unmount again";
    /// `EPERM`.
    UnmountNotPermitted { path } = "not permitted to unmount {path}",
        cure "do it as the user who mounted it, or as root";
    /// It takes longer than it should.
    KeeperStays { pid, path } = "unmounted, but the keeper (pid {pid}) of {path} has not ended yet",
        cure "a container or service with mounts of its own may still have the tree (`grep -l fuse.leasefs \
              /proc/*/mountinfo` names its processes): it ends with the last of them; else see its log";
    }

    "Finding the tree and the key" {
    /// `--root` or `LEASEFS_ROOT` names a plain directory.
    NoTree { path } = "{path}: no leasefs tree is mounted here",
        cure "run `leasefs mount` there, or name another with --root";
    /// FUSE keeps other users out.
    TreeShut { path } = "{path}: permission denied",
        cure "only a tree mounted with --allow-other is open to other users";
    /// Nothing to choose from.
    NoTreeAtAll = "no leasefs tree is mounted", cure "run `leasefs mount MOUNTPOINT`, or name one with --root";
    /// Too much to choose from.
    SeveralTrees { list } = "several trees are mounted ({list})", cure "name one with --root or LEASEFS_ROOT";
    /// `ENOTCONN`.
    KeeperGone { subject } = "{subject}: its keeper and server are gone",
        cure "`leasefs mount` it again over the same state, which keeps what is held";
    /// Not below `claims/`.
    OutsideTree { path, claims } = "{path}: not below {claims}", cure "give a key of this tree";
    /// A directory.
    IsNamespace { subject } = "{subject}: a namespace, not a key", cure "`leasefs ls {subject}/` lists its keys";
    /// `ENOTDIR`.
    BelowKey { subject } = "{subject}: a part of it is a key", cure "nothing can be below a key";
    }

    "At the key" {
    /// `EACCES`.
    Denied { subject } = "{subject}: permission denied",
        cure "its namespace does not let you (see `ls -ld` of its directory)";
    /// `ESTALE`.
    Stale { subject } = "{subject}: that attempt's lease is over",
        cure "`leasefs history` says why; claim the key again for a new attempt";
    /// `ENOSPC`.
    NoSpace { subject } = "{subject}: the state directory's disk is full, and nothing was granted",
        cure "free some space; it goes on by itself, and what is held stays held";
    /// `ENOLCK`.
    OverLimit { subject } = "{subject}: this user holds too many keys, or waits too often",
        cure "give keys back, or mount with a higher --max-keys or --max-waiters";
    /// `EIO`.
    StateFailed { subject } = "{subject}: the state directory failed, and nothing was granted",
        cure "see leasefs.log in it and the kernel's log, and run `leasefs doctor`";
    }

    "Upgrading" {
    /// The keeper or the program said no.
    NotUpgraded { why } = "not upgraded: {why}", cure "the server that was there goes on";
    /// It ended meanwhile.
    KeeperSilent { log } = "the keeper ended before it said what came of it", cure "see {log}";
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.what(), self.cure())
    }
}

impl std::error::Error for Failure {}

/// Faults of a registry, as the engine words them: how they begin, and what it says to do.
pub const ENGINE: Section = Section {
    title: "The registry",
    rows: &[
        Row { what: "state directory {path}: {registry} is damaged ({what})", cure: leasefs::registry::sqlite::REMEDY },
        Row {
            what: "state directory {path}: {registry} was written by a newer leasefs (schema {found}, this one knows {known})",
            cure: "install that version, or use another --state",
        },
        Row { what: "state directory {path}: {registry} is not a leasefs registry", cure: "use another --state" },
    ],
};

/// What is seen without a word of ours: in the kernel's messages, and by looking.
pub const SYMPTOMS: Section = Section {
    title: "Seen elsewhere",
    rows: &[
        Row {
            what: "no `/dev/fuse`",
            cure: "`modprobe fuse`; in a container: `--device /dev/fuse --cap-add SYS_ADMIN`",
        },
        Row { what: "`fusermount3` not found", cure: "only root can mount without it: `apt-get install fuse3`" },
        Row {
            what: "`Transport endpoint is not connected`",
            cure: "keeper and server are gone: `leasefs mount DIR` over the same state; the last lines of `leasefs.log` \
                   in the state directory may say why",
        },
        Row {
            what: "`unmount`: busy",
            cure: "a process has a handle or its working directory in the tree: `leasefs ls`, `fuser -vm DIR`",
        },
        Row {
            what: "a key stays held though its process is gone",
            cure: "a child inherited the handle: start children with `9>&-`. `leasefs who KEY` shows who has it, \
                   `leasefs evict` ends it",
        },
        Row {
            what: "`File exists`, `cannot overwrite existing file`, and nobody holds the key",
            cure: "it is finished: `leasefs status KEY`. To do it again, `rm claims/KEY` or take it by lock",
        },
        Row {
            what: "`Stale file handle`",
            cure: "this attempt's lease is over; `leasefs history KEY` says why. Open the key again for a new one",
        },
        Row {
            what: "`Device or resource busy` from `rm claims/KEY`",
            cure: "it is held, and not by you. `leasefs evict KEY --epoch N`",
        },
        Row {
            what: "`Bad file descriptor` when reading the number",
            cure: "`9>` opens for writing only: use `9<>` and a lock, or read the key's path",
        },
        Row {
            what: "`Permission denied` for other users",
            cure: "mount with `--allow-other` (not root: `user_allow_other` in `/etc/fuse.conf`), and look at the \
                   namespace's mode",
        },
        Row {
            what: "`mount`: the registry `is damaged`",
            cure: "keep the directory; `leasefs verify --state DIR` says what is wrong; mount the newest backup: see \
                   \"When the disk fails\"",
        },
        Row {
            what: "`No space left on device` from a claim",
            cure: "the state directory's disk is full; nothing is lost, and it goes on when there is room",
        },
        Row {
            what: "a lock that never comes",
            cure: "`leasefs ls` shows the holder and its age; wait at most so long: `flock -w`, `leasefs run -w`",
        },
    ],
};

impl Failure {
    /// What an error of the system about `subject` means here, where it means something.
    pub fn of(subject: &dyn fmt::Display, error: &io::Error) -> Option<Failure> {
        let subject = subject.to_string();
        match error.raw_os_error()? {
            libc::ENOTCONN | libc::ECONNABORTED => Some(Failure::KeeperGone { subject }),
            libc::EISDIR => Some(Failure::IsNamespace { subject }),
            libc::ENOTDIR => Some(Failure::BelowKey { subject }),
            libc::EACCES => Some(Failure::Denied { subject }),
            libc::ESTALE => Some(Failure::Stale { subject }),
            libc::ENOSPC => Some(Failure::NoSpace { subject }),
            libc::ENOLCK => Some(Failure::OverLimit { subject }),
            libc::EIO => Some(Failure::StateFailed { subject }),
            _ => None,
        }
    }

    /// The device is there and cannot be opened, by the system's error.
    pub fn of_device(error: &io::Error) -> Failure {
        match error.raw_os_error() {
            // Where a container or a unit shuts it, it is `EPERM`.
            Some(libc::EACCES) => Failure::DeviceMode,
            _ => Failure::DeviceShut { why: error.to_string() },
        }
    }

    /// A failure that makes or opens a state directory, by the system's error.
    pub fn of_state(path: &Path, error: &io::Error) -> Failure {
        let (path, why) = (shown(path), error.to_string());
        match error.raw_os_error() {
            Some(libc::ENOSPC | libc::EDQUOT) => Failure::StateFull { path, why },
            Some(libc::EROFS) => Failure::StateReadOnly { path },
            _ => Failure::StateUnwritable { path, why },
        }
    }
}

/// A path as messages show it.
pub fn shown(path: &Path) -> String {
    path.display().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_what_the_table_says() {
        let said = Failure::MountedAlready { path: "/mnt".into() }.to_string();
        assert_eq!(said, "/mnt is already a leasefs mount: use it, or `leasefs unmount /mnt` first");
        let row = FAILURES[0].rows.iter().find(|row| row.what.contains("already a leasefs mount")).expect("a row");
        assert_eq!(said, format!("{}: {}", row.what, row.cure).replace("{path}", "/mnt"));
    }

    #[test]
    fn each_row_is_one_line_with_a_cure_and_said_once() {
        let mut seen = std::collections::HashSet::new();
        for row in FAILURES.iter().chain([&ENGINE, &SYMPTOMS]).flat_map(|section| section.rows) {
            assert!(!row.cure.is_empty() && !row.what.is_empty());
            assert!(!row.what.contains('\n') && !row.cure.contains('\n'), "{row:?}");
            assert!(seen.insert((row.what, row.cure)), "twice: {row:?}");
        }
    }

    #[test]
    fn an_error_of_the_system_is_told_in_the_tables_words() {
        let of = |errno| Failure::of(&"team/job", &io::Error::from_raw_os_error(errno));
        assert_eq!(of(libc::EISDIR), Some(Failure::IsNamespace { subject: "team/job".into() }));
        assert_eq!(of(libc::EXDEV), None);
        assert!(of(libc::ENOTCONN).expect("known").to_string().contains("leasefs mount"));
    }
}
