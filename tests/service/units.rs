//! The systemd units: by what systemd says of them, and by what they do under one.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::common::{InTime, assert_ok, stdout, wait_for};
use crate::machine::Machine;
use crate::package;

#[test]
fn systemd_has_nothing_to_say_against_them() {
    let dir = tempfile::tempdir().expect("directory");
    let dist = Path::new(env!("CARGO_MANIFEST_DIR")).join("dist/systemd");
    fs::create_dir_all(dir.path().join("usr/bin")).expect("mkdir");
    fs::create_dir_all(dir.path().join("etc/systemd/system")).expect("mkdir");
    for program in ["leasefs", "mkdir"] {
        fs::copy("/bin/true", dir.path().join("usr/bin").join(program)).expect("a program");
    }
    std::os::unix::fs::symlink("usr/bin", dir.path().join("bin")).expect("symlink");
    for (file, unit) in
        [("system/leasefs@.service", "leasefs@main.service"), ("user/leasefs.service", "leasefs.service")]
    {
        let name = Path::new(file).file_name().expect("a name");
        fs::copy(dist.join(file), dir.path().join("etc/systemd/system").join(name)).expect("copy");
        let mut verify = Command::new("systemd-analyze");
        verify.args(["verify", "--man=no", "--recursive-errors=no", "--root"]).arg(dir.path()).arg(unit);
        let output = verify.output_in_time();
        assert_ok(&output);
        assert_eq!(String::from_utf8_lossy(&output.stderr), "", "{unit}");
    }
    let mut security = Command::new("systemd-analyze");
    security.args(["security", "--offline=true", "--no-pager", "--threshold=45", "--root"]).arg(dir.path());
    let output = security.arg("leasefs@main.service").output_in_time();
    assert!(output.status.success(), "its exposure is over 4.5: {}", stdout(&output));
}

/// A process in the machine that has a key, until `/root/go` is there; then it writes down which epoch it still has.
const HOLD: &str = "rm -f /root/go /root/has; systemd-run --quiet --collect bash -c \
    'exec 9<>/run/leasefs/main/claims/KEY; flock 9; touch /root/has; until [ -e /root/go ]; do sleep .05; done; \
    read -r epoch <&9; echo $epoch >/root/epoch'; until [ -e /root/has ]; do sleep .05; done";

#[test]
fn a_tree_is_installed_started_reloaded_stopped_and_restarted_as_the_unit_says() {
    let dir = tempfile::tempdir().expect("directory");
    let (_, deb) = package::make(dir.path());
    let machine = Machine::boot();
    fs::copy(&deb, machine.root().join("root/leasefs.deb")).expect("copy");
    machine.ok("dpkg -i /root/leasefs.deb");

    // It is on, and to be seen by others than the service.
    machine.ok("systemctl start leasefs@main");
    let status = machine.ok("systemctl show -P StatusText leasefs@main");
    assert_eq!(status.trim(), "serving /run/leasefs/main (server 1)");
    assert_eq!(machine.ok("findmnt -no FSTYPE /run/leasefs/main").trim(), "fuse.leasefs");
    let state = machine.ok("stat -c '%a %U' /var/lib/leasefs/main");
    assert_eq!(state.trim(), "700 root");
    machine.ok("setpriv --reuid nobody --clear-groups flock -n /run/leasefs/main/claims/theirs true");
    let log = machine.ok("journalctl -u leasefs@main -o json | grep -o '\"PRIORITY\":\"6\"' | sort -u");
    assert_eq!(log.trim(), "\"PRIORITY\":\"6\"", "the journal knows how much each line matters");

    // Its sandbox leaves it what it needs to tell a writer that was killed.
    machine.ok("cd /run/leasefs/main && exec 9<>claims/job && flock -n 9 || exit; \
         { bash -c 'exec 7>results/job/1; echo half >&7; kill -KILL $$' || test $? = 137; } && \
         dd status=none conv=fsync of=results/job/1 <<<whole && grep -q whole results/job/1");

    // Another program takes over under a holder: by reload, and by an upgrade of the package.
    machine.ok(&HOLD.replace("KEY", "held"));
    let holder = machine.ok("cat /run/leasefs/main/status/held");
    let starts = || machine.ok("grep -o '\"starts\":[0-9]*' /run/leasefs/main/.leasefs/config").trim().to_owned();
    machine.ok("systemctl reload leasefs@main");
    assert_eq!(starts(), "\"starts\":2");
    machine.ok("dpkg -i /root/leasefs.deb");
    assert_eq!(starts(), "\"starts\":3");
    assert_eq!(machine.ok("cat /run/leasefs/main/status/held"), holder, "it holds as before");

    // Stop waits for it, out of sight, and cuts nothing short.
    let is_active = || stdout(&machine.run("systemctl is-active leasefs@main")).trim().to_owned();
    machine.ok("systemctl stop --no-block leasefs@main");
    wait_for("the tree is out of sight", || !machine.run("findmnt /run/leasefs/main").status.success());
    assert_eq!(is_active(), "deactivating");
    machine.ok("touch /root/go; until [ -e /root/epoch ]; do sleep .05; done");
    assert_eq!(machine.ok("cat /root/epoch").trim(), "1", "it still had its lease");
    wait_for("it is stopped", || is_active() == "inactive");

    // Started again it is the same tree; a keeper that is killed is started again over the dead mount.
    machine.ok("systemctl start leasefs@main; flock -n /run/leasefs/main/claims/held true");
    machine.ok("grep -q '\"epoch\":2' /run/leasefs/main/status/held");
    let main_pid = || machine.ok("systemctl show -P MainPID leasefs@main").trim().to_owned();
    let killed = main_pid();
    machine.ok(&format!("kill -KILL {killed}"));
    wait_for("it is back", || {
        // Until systemd has heard of the end, it counts as active.
        ![killed.as_str(), "0"].contains(&main_pid().as_str())
            && is_active() == "active"
            && machine.run("[ -d /run/leasefs/main/claims ]").status.success()
    });
    machine.ok("flock -n /run/leasefs/main/claims/held true; leasefs doctor /run/leasefs/main");

    // Who is asked a second time does not wait for holders.
    machine.ok(&HOLD.replace("KEY", "late"));
    machine.ok("systemctl stop --no-block leasefs@main");
    wait_for("it stops", || is_active() == "deactivating");
    wait_for("the tree is out of sight", || !machine.run("findmnt /run/leasefs/main").status.success());
    machine.ok("systemctl kill --kill-whom=main leasefs@main");
    wait_for("it has ended", || matches!(is_active().as_str(), "failed" | "inactive"));
    machine.ok("touch /root/go");

    // Another instance, as its configuration says; and a line of fstab, which systemd makes a unit of.
    machine.ok("printf 'MOUNTPOINT=/srv/leases\\nOPTIONS=--ttl 1h --durability process\\n' >/etc/leasefs/other.conf");
    machine.ok("systemctl start leasefs@other; grep -q '\"ttl_ms\":3600000' /srv/leases/.leasefs/config");
    machine.ok(
        "echo '/var/lib/leasefs/f /srv/table leasefs ttl=90s,nofail,x-systemd.after=local-fs.target 0 0' >/etc/fstab",
    );
    machine.ok("systemctl daemon-reload; systemctl start srv-table.mount");
    machine.ok("grep -q '\"ttl_ms\":90000' /srv/table/.leasefs/config");
    machine.ok("systemctl stop srv-table.mount; ! findmnt /srv/table");
    // One that is mounted by whoever looks into it first.
    machine
        .ok("mkdir /srv/late; echo '/var/lib/leasefs/l /srv/late leasefs noauto,x-systemd.automount 0 0' >>/etc/fstab");
    machine.ok("systemctl daemon-reload; systemctl start srv-late.automount; ! findmnt -t fuse.leasefs /srv/late");
    machine.ok("timeout 30 flock -n /srv/late/claims/k true && findmnt -t fuse.leasefs /srv/late");
    machine.ok("systemctl stop srv-late.automount || true; umount /srv/late || ! findmnt /srv/late");

    // Without the program on the disk it is served on.
    let output = machine.run("dpkg -r leasefs");
    assert_ok(&output);
    assert!(String::from_utf8_lossy(&output.stderr).contains("still mounted"), "{output:?}");
    machine.ok("kill -KILL $(grep -o '\"pid\":[0-9]*' /srv/leases/.leasefs/config | cut -d: -f2)");
    machine.ok("flock -n /srv/leases/claims/k true; umount /srv/leases");
}

#[test]
fn a_tree_in_use_outlives_its_package_and_does_not_keep_the_machine_up() {
    let dir = tempfile::tempdir().expect("directory");
    let (_, deb) = package::make(dir.path());
    let mut machine = Machine::boot();
    fs::copy(&deb, machine.root().join("root/leasefs.deb")).expect("copy");
    machine.ok("dpkg -i /root/leasefs.deb; echo GRACE=1 >/etc/leasefs/main.conf; systemctl enable --now leasefs@main");
    machine.ok("mkdir /srv/table; mount -t leasefs /var/lib/leasefs/f /srv/table");

    // A tree that is not of a unit is taken over by what is installed as well.
    machine.ok("dpkg -i /root/leasefs.deb");
    wait_for("its next server", || machine.ok("cat /srv/table/.leasefs/config").contains("\"starts\":2"));
    machine.ok("umount /srv/table");

    // Without the package's file it would be killed 90 s after it was told to stop.
    let rules = || machine.ok("systemctl show -P TimeoutStopUSec -P KillMode leasefs@main");
    let (before, unit) = (rules(), "/run/systemd/system/leasefs@.service");
    assert!(before.contains("infinity") && before.contains("mixed"), "{before}");
    machine.ok(&HOLD.replace("KEY", "held"));
    machine.ok("dpkg --purge leasefs; systemctl daemon-reload");
    assert_eq!(rules(), before);
    machine.ok("grep -q '\"state\":\"held\"' /run/leasefs/main/status/held; touch /root/go");
    machine.ok("! test -L /etc/systemd/system/multi-user.target.wants/leasefs@main.service");
    machine.ok("test -s /var/lib/leasefs/main/registry.db");
    machine.ok("mkdir -p /etc/leasefs; echo GRACE=1 >/etc/leasefs/main.conf; dpkg -i /root/leasefs.deb");
    machine.ok(&format!("! test -e {unit}; systemctl restart leasefs@main"));

    // The example for another user than root leaves it what fusermount3 needs; whether there is one is not asked here.
    machine.ok("useradd --system leases; cd /etc/systemd/system && mkdir leasefs@its.service.d && \
         cp /usr/share/doc/leasefs/examples/user.conf leasefs@its.service.d/ && \
         printf '[Service]\nExecStartPre=/bin/cp /proc/self/status /var/lib/leasefs/its/seen\n' \
             >leasefs@its.service.d/look.conf && systemctl daemon-reload");
    machine.run("systemctl start leasefs@its; systemctl stop leasefs@its");
    let seen = machine.ok("cat /var/lib/leasefs/its/seen");
    let field = |name: &str| seen.lines().find_map(|line| line.strip_prefix(name)).map(str::trim).expect("a field");
    assert_eq!(field("NoNewPrivs:"), "0");
    assert_ne!(field("Uid:").split('\t').next(), Some("0"));
    assert_eq!(
        field("CapBnd:"),
        machine.ok("sed -n 's/^CapBnd:\\s*//p' /proc/1/status").trim(),
        "nothing is kept from it"
    );

    // Who is killed last of all when the machine goes down, as what cron started is, is not waited for.
    machine.ok("systemd-run --quiet --unit cron -p KillMode=process \
         bash -c 'setsid -f flock /run/leasefs/main/claims/job sleep 1000; sleep 1000'");
    wait_for("the job", || machine.ok("cat /run/leasefs/main/status/job || true").contains("\"state\":\"held\""));
    machine.run("systemctl poweroff --no-block");
    machine.wait_off();
}
