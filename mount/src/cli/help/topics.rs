//! The pages on what all commands have in common.

use clap::Command;
use leasefs::metrics::{Gauges, Metrics, Outside};

use super::page::Page;
use super::{exits, json};
use crate::failure::{ENGINE, FAILURES, Row, SYMPTOMS, Section};

/// How a page is made: from the command line it tells of.
type Maker = fn(&Command) -> Page;

/// Every topic by its name.
pub const TOPICS: &[(&str, Maker)] = &[
    ("exit-codes", exits::page),
    ("errors", |_| errors()),
    ("json", |_| json::page()),
    ("metrics", |_| metrics()),
    ("files", |_| files()),
    ("environment", |_| environment()),
];

/// A topic's page; none where there is no such topic.
pub fn find(name: &str, root: &Command) -> Option<Page> {
    TOPICS.iter().find(|(topic, _)| *topic == name).map(|(_, maker)| maker(root))
}

/// Each failure with its cure.
pub fn errors() -> Page {
    let mut page = Page::default();
    page.text(
        "A command that fails says so in one line on stderr, `leasefs: what is wrong: what to do`. Words in capitals \
         stand for what varies.",
    );
    for section in FAILURES.iter().chain([&ENGINE, &SYMPTOMS]) {
        let Section { title, rows } = section;
        page.head(*title);
        for Row { what, cure } in *rows {
            page.entry(placeholders(what), placeholders(cure));
        }
    }
    page.text(
        "What a program gets from the tree itself are numbers: `EEXIST` held or finished (exclusive create); `EAGAIN` \
         held (lock that does not wait); `EINTR` a signal while waiting; `ESTALE` this handle or attempt lost its lease; \
         `EBUSY` others may not unlink a held key; `EACCES` not the holder, or permissions; `EPERM` immutable, or not \
         supported in this tree; `EINVAL` bad key, bad value of an attribute, lock of a part of a file; `EILSEQ` not \
         UTF-8; `ENAMETOOLONG`; `EFBIG` note or result too large; `ENOSPC`, `EIO` the state directory's own fault, with \
         nothing granted; `ENOLCK` too many waiters or keys of one user.",
    );
    page
}

/// `{path}` is for a format string; a reader sees `PATH`.
fn placeholders(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for (at, piece) in text.split(['{', '}']).enumerate() {
        if at % 2 == 1 {
            shown.push_str(&piece.to_uppercase());
        } else {
            shown.push_str(piece);
        }
    }
    shown
}

/// The metrics, as they name themselves.
pub fn metrics() -> Page {
    let mut page = Page::default();
    page.text("`.leasefs/metrics` is Prometheus text. Counters begin at 0 when a server starts.");
    // With all that may be left out where it is not known.
    let gauges = Gauges { free_bytes: Some(0), ..Gauges::default() };
    let shown = Metrics::default().render(&gauges, &Outside::default());
    for line in shown.lines() {
        if let Some((name, help)) = line.strip_prefix("# HELP ").and_then(|rest| rest.split_once(' ')) {
            // Said once, above.
            page.entry(name, help.replace(", since this server started", ""));
        }
    }
    page
}

/// The tree, the state directory, and what belongs to the system.
pub fn files() -> Page {
    let mut page = Page::default();
    page.head("Below the mountpoint");
    for (path, about) in [
        (
            "claims/KEY",
            "The lease. There while the key is held or finished; a free key has no file. Creating it exclusively, or locking it, is claiming.",
        ),
        ("results/KEY/EPOCH", "The result of that attempt: writable by it alone, then by nobody."),
        ("results/KEY/latest", "Symbolic link to the newest committed result."),
        ("status/KEY", "One line of JSON on any key that ever was. Reading it claims nothing."),
        (".leasefs/version, config", "Version and settings of the server."),
        (".leasefs/metrics", "Prometheus text: see `leasefs help metrics`."),
        (".leasefs/events", "JSON lines, as things happen; a read waits for the next."),
        (".leasefs/control", "Takes orders, one JSON object for each write."),
    ] {
        page.entry(path, about);
    }
    page.head("In the state directory");
    for (path, about) in [
        (
            "registry.db, registry.db-wal, journal, seal",
            "Keys, attempts and epochs. Not to be deleted, copied or put back by hand: `leasefs backup`.",
        ),
        ("results/, drafts/", "Committed results, and those being written."),
        (
            "leasefs.log, leasefs.log.old",
            "What a background mount logs. The file is put aside, over the one before, when it has 1 MiB.",
        ),
        (
            "mount.json, lock, keeper.sock",
            "The mount that was served last, the lock that keeps a second server out, and where orders for the keeper come in.",
        ),
    ] {
        page.entry(path, about);
    }
    page.head("Of the system");
    for (path, about) in [
        ("$XDG_STATE_HOME/leasefs, ~/.local/state/leasefs", "The state directory where none is given."),
        ("/etc/leasefs/NAME.conf", "MOUNTPOINT, OPTIONS and GRACE of the systemd unit leasefs@NAME.service."),
        ("/var/lib/leasefs/NAME", "State directory of that unit."),
        ("/sbin/mount.leasefs", "What mount(8) and /etc/fstab call: see mount.leasefs(8)."),
        ("/etc/fuse.conf", "Has the line `user_allow_other` where users other than root may mount with --allow-other."),
    ] {
        page.entry(path, about);
    }
    page
}

/// What is read from the environment, and what `leasefs run` puts there.
pub fn environment() -> Page {
    let mut page = Page::default();
    for (name, about) in [
        ("LEASEFS_ROOT", "The tree that commands are about, where --root does not say."),
        ("LEASEFS_AGENT", "The agent's name, where --agent does not say."),
        (
            "LEASEFS_LOG",
            "How much the keeper and the server log: `error`, `warn`, `info` (the default), `debug` or `trace`.",
        ),
        ("XDG_STATE_HOME, HOME", "Where the state directory is if none is given."),
        (
            "LEASEFS_COMPLETE",
            "The shell that asks what may come next on a command line: for its completion scripts alone.",
        ),
        ("COLUMNS", "How wide pages of help are."),
        (
            "LEASEFS_KEY, LEASEFS_EPOCH, LEASEFS_RESULT",
            "Set by `leasefs run` for its command: the key, this attempt's epoch, and the file that takes its result. One line for each key.",
        ),
        (
            "LEASEFS_FD",
            "The number of the holder handle, where a command of `leasefs run` or `leasefs claim` inherits it.",
        ),
        ("NOTIFY_SOCKET", "Where `leasefs mount --foreground` tells a service manager of its state: see sd_notify(3)."),
    ] {
        page.entry(name, about);
    }
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_varies_is_in_capitals() {
        assert_eq!(placeholders("{path} is {why}: no"), "PATH is WHY: no");
    }

    #[test]
    fn every_metric_is_told_of() {
        let text = crate::cli::help::page::render(&metrics(), 80);
        for name in ["leasefs_wait_seconds", "leasefs_keys"] {
            assert!(text.lines().any(|line| line == format!("  {name}")), "{name}: {text}");
        }
    }
}
