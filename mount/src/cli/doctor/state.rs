//! The state directory: whether what is kept there will be there.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::time::Duration;

use leasefs::registry::sqlite;
use nix::sys::statfs::statfs;
use nix::sys::statvfs::{FsFlags, statvfs};
use nix::unistd::{AccessFlags, access, geteuid};

use super::{Check, shown};

/// How long a filesystem may take to say what it is.
const PATIENCE: Duration = Duration::from_secs(5);
/// Less than this is told of.
const LITTLE_BYTES: u64 = 64 << 20;
/// Less than this is not enough.
const TOO_LITTLE_BYTES: u64 = 1 << 20;

/// What is known of a state directory.
struct State {
    /// It, or the directory above it that is there.
    place: PathBuf,
    /// Its owner and mode; none where it is not there.
    there: Option<(u32, u32)>,
    magic: i64,
    read_only: bool,
    free_bytes: u64,
    /// Some are left, or the filesystem does not count them.
    has_inodes: bool,
    may_write: bool,
    /// Why its registry cannot be served; none where it can, or there is none yet.
    refused: Option<String>,
    has_registry: bool,
}

/// Looks at a state directory, also one that is not there yet. `is_default` says that nobody named it.
pub fn examine(dir: &Path, is_default: bool) -> Vec<Check> {
    let absolute = std::path::absolute(dir).unwrap_or_else(|_| dir.to_owned());
    let dir = absolute.as_path();
    let (answer, answered) = mpsc::channel();
    let asked = dir.to_owned();
    std::thread::spawn(move || answer.send(look(&asked)));
    match answered.recv_timeout(PATIENCE) {
        Ok(Ok(state)) => judge(dir, &state, is_default, geteuid().as_raw()),
        Ok(Err(error)) => vec![Check::fail("state", format!("{}: {error}", shown(dir)), "use another --state")],
        Err(_) => vec![Check::fail(
            "state",
            format!("{}: its filesystem does not answer", shown(dir)),
            "see that the disk or the server it is on is there, or use another --state",
        )],
    }
}

fn look(dir: &Path) -> std::io::Result<State> {
    let there = match fs::metadata(dir) {
        Ok(found) if !found.is_dir() => return Err(std::io::Error::from_raw_os_error(libc::ENOTDIR)),
        Ok(found) => Some((found.uid(), found.mode() & 0o7777)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let place = dir.ancestors().find(|above| above.is_dir()).unwrap_or(Path::new("/")).to_owned();
    let (kind, space) = (statfs(&place)?, statvfs(&place)?);
    let registry = dir.join(sqlite::FILE);
    let has_registry = registry.exists();
    Ok(State {
        magic: kind.filesystem_type().0,
        read_only: space.flags().contains(FsFlags::ST_RDONLY),
        free_bytes: space.blocks_available().saturating_mul(space.fragment_size()),
        has_inodes: space.files() == 0 || space.files_available() > 0,
        may_write: access(&place, AccessFlags::W_OK | AccessFlags::X_OK).is_ok(),
        refused: if has_registry && access(&registry, AccessFlags::R_OK).is_ok() {
            sqlite::can_serve(dir).err().map(|error| error.to_string())
        } else {
            None
        },
        has_registry,
        place,
        there,
    })
}

fn judge(dir: &Path, state: &State, is_default: bool, uid: u32) -> Vec<Check> {
    vec![
        directory(dir, state, is_default, uid),
        filesystem(&shown(dir), state.magic),
        space(state),
        registry(dir, state),
    ]
}

fn directory(dir: &Path, state: &State, is_default: bool, uid: u32) -> Check {
    const NAME: &str = "state";
    let path = shown(dir);
    if state.read_only {
        return Check::fail(
            NAME,
            format!("{path}: the filesystem is read-only"),
            "remount it writable, or use another --state",
        );
    }
    let Some((owner, mode)) = state.there else {
        let parent = dir.parent().unwrap_or(dir);
        return match (state.may_write, is_default || state.place == parent) {
            (true, true) => Check::ok(NAME, format!("{path} is made by the first mount")),
            (true, false) => Check::fail(NAME, format!("{path}: {} does not exist", shown(parent)), "mkdir it first"),
            (false, _) => Check::fail(
                NAME,
                format!("{path} is not there, and {} is not writable for this user", shown(&state.place)),
                "mkdir it for this user, or use another --state",
            ),
        };
    };
    if owner != uid && uid != 0 {
        return Check::fail(
            NAME,
            format!("{path} belongs to uid {owner}"),
            "use another --state, or do this as that user",
        );
    }
    if !state.may_write {
        return Check::fail(
            NAME,
            format!("{path} is not writable"),
            "make it writable for this user, or use another --state",
        );
    }
    if mode & 0o077 != 0 {
        return Check::warn(
            NAME,
            format!("{path} has mode {mode:04o}: others may look into it"),
            format!("`chmod 700 {path}`"),
        );
    }
    Check::ok(NAME, format!("{path} belongs to uid {owner} alone"))
}

/// What a filesystem is called, and what is wrong with it for a registry.
enum Kind {
    Fit(&'static str),
    Network(&'static str),
    Memory(&'static str),
    Layered(&'static str),
    Unknown,
}

/// By the numbers of `statfs(2)`.
fn kind(magic: i64) -> Kind {
    match magic & 0xffff_ffff {
        0xef53 => Kind::Fit("ext4"),
        0x5846_5342 => Kind::Fit("XFS"),
        0x9123_683e => Kind::Fit("btrfs"),
        0x2fc1_2fc1 => Kind::Fit("ZFS"),
        0xf2f5_2010 => Kind::Fit("F2FS"),
        0xca45_1a4e => Kind::Fit("bcachefs"),
        0x6969 => Kind::Network("NFS"),
        0xff53_4d42 | 0xfe53_4d42 | 0x517b => Kind::Network("SMB"),
        0x0102_1997 => Kind::Network("9p"),
        0x00c3_6400 => Kind::Network("Ceph"),
        0x0bd0_0bd0 => Kind::Network("Lustre"),
        0x5346_414f | 0x6b41_4653 => Kind::Network("AFS"),
        0x0116_1970 => Kind::Network("GFS2"),
        0x7461_636f => Kind::Network("OCFS2"),
        0x6573_5546 => Kind::Network("FUSE"),
        0x0102_1994 => Kind::Memory("tmpfs"),
        0x8584_58f6 => Kind::Memory("ramfs"),
        0x794c_7630 => Kind::Layered("overlayfs"),
        _ => Kind::Unknown,
    }
}

fn filesystem(path: &str, magic: i64) -> Check {
    const NAME: &str = "state-filesystem";
    match kind(magic) {
        Kind::Fit(name) => Check::ok(NAME, format!("{path} is on {name}")),
        Kind::Network(name) => Check::warn(
            NAME,
            format!(
                "{path} is on {name}: locks, mapped files and syncs may not be there or not last, and another host could \
                 serve the same state"
            ),
            "use a --state on a local disk",
        ),
        Kind::Memory(name) => Check::warn(
            NAME,
            format!("{path} is on {name}: all is lost at the next boot, and numbers begin at 1 again"),
            "use a --state on a disk, unless nothing outside remembers a number",
        ),
        Kind::Layered(name) => Check::warn(
            NAME,
            format!(
                "{path} is on {name}, a container's own layer: all is lost with the container, and numbers begin at 1 again"
            ),
            "use a --state on a volume",
        ),
        Kind::Unknown => Check::ok(NAME, format!("{path} is on a filesystem of type {magic:#x}")),
    }
}

fn space(state: &State) -> Check {
    const NAME: &str = "state-space";
    let free = format!("{} MiB free", state.free_bytes >> 20);
    let cure = "free some space, or use another --state";
    if !state.has_inodes {
        return Check::fail(NAME, "no inodes are left: no result can be made", cure);
    }
    match state.free_bytes {
        0..TOO_LITTLE_BYTES => Check::fail(NAME, format!("{free}: claims are refused with ENOSPC"), cure),
        TOO_LITTLE_BYTES..LITTLE_BYTES => {
            Check::warn(NAME, format!("{free}: when it is full, claims are refused with ENOSPC"), cure)
        }
        _ => Check::ok(NAME, free),
    }
}

fn registry(dir: &Path, state: &State) -> Check {
    const NAME: &str = "registry";
    match &state.refused {
        // The library's message has its own cure, after the last colon but within the text: it stays whole.
        Some(why) => {
            Check::fail(NAME, why.clone(), format!("do as it says; `leasefs verify --state {}` says more", shown(dir)))
        }
        None if state.has_registry => Check::ok(NAME, "this program can serve it (`leasefs verify` checks all of it)"),
        None => Check::ok(NAME, "there is none yet"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Verdict::{Fail, Ok as Good, Warn};
    use super::*;

    fn state() -> State {
        State {
            place: "/var/lib/l".into(),
            there: Some((7, 0o700)),
            magic: 0xef53,
            read_only: false,
            free_bytes: 1 << 30,
            has_inodes: true,
            may_write: true,
            refused: None,
            has_registry: true,
        }
    }

    #[test]
    fn network_and_memory_are_warned_of() {
        for (magic, verdict) in [
            (0xef53, Good),
            (0x6969, Warn),
            (0xff53_4d42, Warn),
            (-11_317_950, Warn),
            (0x0102_1994, Warn),
            (0x794c_7630, Warn),
            (0x1234, Good),
        ] {
            assert_eq!(filesystem("/s", magic).verdict, verdict, "{magic:#x}");
        }
    }

    #[test]
    fn space_is_told_of_before_it_is_gone() {
        let with = |free_bytes, has_inodes| space(&State { free_bytes, has_inodes, ..state() }).verdict;
        assert_eq!(
            [with(1 << 30, true), with(32 << 20, true), with(4096, true), with(1 << 30, false)],
            [Good, Warn, Fail, Fail]
        );
    }

    #[test]
    fn owner_mode_and_place() {
        let dir = Path::new("/var/lib/l");
        let of = |state: State, is_default, uid| directory(dir, &state, is_default, uid).verdict;
        assert_eq!(of(state(), false, 7), Good);
        assert_eq!(of(state(), false, 0), Good);
        assert_eq!(of(state(), false, 8), Fail);
        assert_eq!(of(State { there: Some((7, 0o755)), ..state() }, false, 7), Warn);
        assert_eq!(of(State { read_only: true, ..state() }, false, 7), Fail);
        assert_eq!(of(State { may_write: false, ..state() }, false, 7), Fail);
        let absent = |place: &str| State { there: None, place: place.into(), ..state() };
        assert_eq!(of(absent("/var/lib"), false, 7), Good);
        assert_eq!(of(absent("/var"), false, 7), Fail);
        assert_eq!(of(absent("/var"), true, 7), Good);
        assert_eq!(of(State { may_write: false, ..absent("/var/lib") }, false, 7), Fail);
    }

    #[test]
    fn a_registry_that_is_refused_says_why() {
        let found = registry(Path::new("/s"), &State { refused: Some("it is damaged".into()), ..state() });
        assert!(found.verdict == Fail && found.found == "it is damaged");
        assert_eq!(registry(Path::new("/s"), &State { has_registry: false, ..state() }).verdict, Good);
    }
}
