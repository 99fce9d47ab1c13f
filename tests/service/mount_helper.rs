//! `mount -t leasefs`, lines of fstab, `umount`: by the real programs, in a mount namespace in which mount(8) finds the helper.

use std::path::Path;
use std::process::{Command, Output};

use crate::common::{InTime, LEASEFS, stdout};

/// Makes the helper to be found, and directories to work with; `$D` is a directory of the test's own. Whatever is mounted
/// is gone at the end, and so is what served it.
const SET_UP: &str = r#"
set -eu
mount --make-rprivate /
mkdir -p $D/sbin $D/mnt $D/other
ln -s "$LEASEFS" $D/sbin/mount.leasefs
sbin=$(readlink -f /sbin)
mount -t overlay -o lowerdir=$D/sbin:$sbin none $sbin
: >$D/fstab
mount --bind $D/fstab /etc/fstab
trap 'umount $D/mnt $D/other 2>/dev/null || true' EXIT
"#;

fn in_a_namespace(script: &str) -> Output {
    let dir = tempfile::tempdir().expect("directory");
    let script = format!("{SET_UP}{script}");
    let mut command = Command::new("timeout");
    command.args(["100", "unshare", "-m", "bash", "-c", &script]);
    let output = command.env("D", dir.path()).env("LEASEFS", LEASEFS).output_in_time();
    assert!(output.status.success(), "{}\n{}", stdout(&output), String::from_utf8_lossy(&output.stderr));
    // The keeper has ended with its mount: its lock is free.
    let lock = dir.path().join("state/lock");
    if lock.exists() {
        let free = Command::new("flock").args(["-w", "60"]).arg(&lock).arg("true").output_in_time();
        assert!(free.status.success(), "a keeper is left");
    }
    output
}

fn lines(output: &Output) -> Vec<String> {
    stdout(output).lines().map(str::to_owned).collect()
}

#[test]
fn mount_and_umount_know_the_type() {
    let output = in_a_namespace(
        r#"
        mount -t leasefs -o ttl=1h,durability=process,max_result=1MiB,noexec,_netdev,nofail,x-systemd.automount $D/state $D/mnt
        findmnt -no SOURCE,FSTYPE $D/mnt
        findmnt -no OPTIONS $D/mnt | grep -c noexec
        grep -o '"ttl_ms":[0-9]*' $D/mnt/.leasefs/config
        grep -o '"durability":"[a-z]*"' $D/mnt/.leasefs/config
        grep -o '"max_result":[0-9]*' $D/mnt/.leasefs/config
        exec 9<>$D/mnt/claims/k; flock -n 9; read -r epoch <&9; echo epoch $epoch
        umount $D/mnt 2>/dev/null && echo robbed
        flock -n 9 && echo held
        exec 9>&-
        umount $D/mnt
        findmnt $D/mnt || echo gone
        "#,
    );
    let lines = lines(&output);
    let (source, rest) = lines.split_first().expect("lines");
    let mut source = source.split_whitespace();
    assert!(source.next().is_some_and(|source| Path::new(source).ends_with("state")), "{lines:?}");
    assert_eq!(source.next(), Some("fuse.leasefs"));
    let expected =
        ["1", "\"ttl_ms\":3600000", "\"durability\":\"process\"", "\"max_result\":1048576", "epoch 1", "held", "gone"];
    assert_eq!(rest, expected);
}

#[test]
fn a_line_of_fstab_is_mounted_once() {
    let output = in_a_namespace(
        r#"
        echo "$D/state $D/mnt leasefs allow_other,ttl=90s,nofail 0 0" >/etc/fstab
        echo "$D/state2 $D/other leasefs noauto 0 0" >>/etc/fstab
        mount -a
        mount -a
        grep -c " $D/mnt fuse.leasefs " /proc/self/mounts
        findmnt $D/other || echo not the other
        mkdir $D/mnt/claims/team && stat -c %a $D/mnt/claims
        umount $D/mnt
        # Once what served it has written everything and ended, however long that takes.
        flock $D/state/lock true
        mount $D/mnt
        ls $D/mnt/claims
        umount $D/mnt
        "#,
    );
    assert_eq!(lines(&output), ["1", "not the other", "777", "team"]);
}

#[test]
fn odd_paths_and_options_that_come_twice_are_taken_as_mount_8_takes_them() {
    let output = in_a_namespace(
        r#"
        mkdir "$D/real" && ln -s real "$D/link" && mkdir "$D/m t"
        trap 'umount "$D/m t" $D/mnt 2>/dev/null || true' EXIT
        # A state directory that is not there yet, by a link, with a blank and a comma; what mount(8) is given beats fstab.
        echo "$D/link/st\040a,te $D/m\040t leasefs ttl=1h,allow_other,nofail 0 0" >/etc/fstab
        mount -o ttl=2h,allow_other "$D/m t"
        mount -a
        findmnt -no SOURCE "$D/m t" | sed s,.*real,real,
        grep -c fuse.leasefs <<<"$(grep $D /proc/self/mounts)"
        grep -o '"ttl_ms":[0-9]*' "$D/m t/.leasefs/config"
        umount "$D/m t"
        # By a path from here, and by the type that the kernel shows.
        ln -s mount.leasefs $D/sbin/mount.fuse.leasefs
        cd $D && mount -t leasefs state mnt && cd /
        findmnt -no SOURCE $D/mnt | sed s,.*/,/,
        mount -o remount,ttl=1h $D/mnt 2>&1 | sed 's/ it .*//'
        umount $D/mnt
        mount.leasefs --help | head -1; mount.leasefs --version
        "#,
    );
    let version = concat!("mount.leasefs ", env!("CARGO_PKG_VERSION"));
    let expected = [
        "real/st a,te",
        "1",
        "\"ttl_ms\":7200000",
        "/state",
        "mount.leasefs: a tree cannot be remounted: unmount",
        "mount.leasefs STATE_DIR MOUNTPOINT [-sfnv] [-o OPTIONS]",
        version,
    ];
    assert_eq!(lines(&output), expected);
}

#[test]
fn what_is_wrong_is_told_in_one_line_and_mounts_nothing() {
    let output = in_a_namespace(
        r#"
        try() { code=0; said=$(mount -t leasefs "$@" 2>&1) || code=$?; echo "$code $(wc -l <<<"$said") $said"; }
        try -o tll=1h $D/state $D/mnt
        try -o ttl=never $D/state $D/mnt
        try -o durability=none $D/state $D/mnt
        try none $D/mnt
        try $D/no/such $D/mnt
        try $D/state $D/nowhere
        code=0; $D/sbin/mount.leasefs $D/state 2>&1 || code=$?; echo $code
        $D/sbin/mount.leasefs -f $D/state $D/mnt && echo faked
        findmnt -t fuse.leasefs -no TARGET | grep $D || echo nothing
        test -e $D/state || echo not made
        "#,
    );
    let lines = lines(&output);
    let expected = [
        ("1 1 mount.leasefs: ", "-o tll=1h is not known"),
        ("32 1 mount.leasefs: ", "for -o ttl: a TTL looks like"),
        ("32 1 mount.leasefs: ", "for -o durability: use full or process"),
        ("1 1 mount.leasefs: ", "the source is the state directory"),
        ("32 1 mount.leasefs: ", "mkdir it first"),
        ("32 1 mount.leasefs: ", "nowhere does not exist"),
        ("mount.leasefs: ", "two paths are needed, and 1 given"),
        ("1", ""),
        ("faked", ""),
        ("nothing", ""),
        ("not made", ""),
    ];
    assert_eq!(lines.len(), expected.len(), "{lines:#?}");
    for (line, (start, part)) in lines.iter().zip(expected) {
        assert!(line.starts_with(start) && line.contains(part), "{start:?}, {part:?}: {line}");
    }
}
