//! Every field of every JSON that is read from the tree or printed by a command, and of the orders that are written.
//!
//! Fields may be added, never renamed (contract §2). A test holds this table against what a live mount shows
//! (`tests/service`).

use super::page::Page;

/// A JSON object.
pub struct Shape {
    /// Where it is.
    pub title: &'static str,
    /// What there is to say of it as a whole.
    pub about: &'static str,
    /// Its fields.
    pub fields: &'static [Field],
}

/// A field: `a.b` is a field of the object `a`, `a[].b` of each object in the list `a`.
pub struct Field(
    /// Its name.
    pub &'static str,
    /// Its type; after a `?`, one that may be null; in brackets, what may be missing.
    pub &'static str,
    /// What it means.
    pub &'static str,
);

/// `status/KEY`.
pub const STATUS: Shape = Shape {
    title: "status/KEY, `leasefs status --json`, `leasefs ls --json`",
    about: "One object on one line for each key.",
    fields: &[
        Field("key", "string", "the key"),
        Field(
            "state",
            "string",
            "`free`, `held`, `shared`, `reporting` (only a draft of its result keeps it), `orphaned` (held, but its \
             connection is gone) or `finished`",
        ),
        Field("epoch", "number", "the newest epoch; 0 before the first"),
        Field("holder", "object?", "who holds it"),
        Field("holder.pid", "number", "process id as the server sees it; 0 for a process it does not see"),
        Field(
            "holder.start_time",
            "number",
            "when that process was started, in clock ticks after boot: tells a pid used again",
        ),
        Field("holder.uid", "number", "user id"),
        Field("holder.gid", "number", "group id"),
        Field("holder.command", "string", "its name as `ps -o comm` shows it; `(unseen)` where it cannot be seen"),
        Field("agent", "string?", "name of the agent that holds it"),
        Field("since", "time?", "since when the key is in this state; of a held key, when the attempt began"),
        Field("renewed", "time?", "last renewal of the attempt that holds it"),
        Field("expires", "time?", "end of its TTL"),
        Field("ttl_ms", "number?", "its TTL in milliseconds"),
        Field("via", "string?", "`create` or `lock`: how it was claimed"),
        Field("waiters", "number", "locks waiting in line"),
        Field("line", "list", "the first 100 of them, in order"),
        Field("line[].pid", "number", "as in holder"),
        Field("line[].start_time", "number", "as in holder"),
        Field("line[].uid", "number", "as in holder"),
        Field("line[].command", "string", "as in holder"),
        Field("line[].since", "time", "since when it waits"),
        Field("line[].mode", "string", "`exclusive` or `shared`"),
        Field("sharers", "number", "holders of shared locks"),
        Field("sharing", "list", "the first 100 of them"),
        Field("sharing[].pid", "number", "as in holder"),
        Field("sharing[].start_time", "number", "as in holder"),
        Field("sharing[].uid", "number", "as in holder"),
        Field("sharing[].command", "string", "as in holder"),
        Field("note", "string", "the holder's note; empty where there is none"),
        Field(
            "outcome",
            "string?",
            "how the newest ended attempt ended: `released`, `completed`, `expired`, `evicted` or `lost`",
        ),
        Field("result", "object?", "the newest committed result"),
        Field("result.epoch", "number", "the attempt it is of"),
        Field("result.size", "number", "bytes"),
        Field("result.committed", "time", "when"),
        Field("why", "[string]", "why the newest attempt ended, where that is known"),
        Field("orphaned_why", "[string]", "why an orphaned key is not free yet"),
    ],
};

/// `leasefs history --json`.
pub const HISTORY: Shape = Shape {
    title: "`leasefs history --json`",
    about: "One object on one line for each attempt, oldest first.",
    fields: &[
        Field("key", "string", "the key"),
        Field("epoch", "number", "the attempt's number"),
        Field("outcome", "string?", "how it ended, as in status; null while it has not"),
        Field("reason", "string?", "why"),
        Field("holder", "object", "who held it"),
        Field("holder.pid", "number", "process id"),
        Field("holder.start_time", "number", "as in status"),
        Field("holder.uid", "number", "user id"),
        Field("holder.gid", "number", "group id"),
        Field("holder.command", "string", "its name as `ps -o comm` shows it; `(unseen)` where it cannot be seen"),
        Field("agent", "string?", "name of the agent that held it"),
        Field("via", "string", "`create` or `lock`"),
        Field("waited_ms", "number", "milliseconds in line before the grant; 0 when at once"),
        Field("since", "time", "when it began"),
        Field("renewed", "time", "its last renewal"),
        Field("expires", "time", "end of its TTL"),
        Field("ended", "time?", "when it ended"),
        Field("ttl_ms", "number", "its TTL in milliseconds"),
        Field("note", "string", "its last note"),
        Field("registered", "boolean", "whether it may still commit a result"),
        Field("result", "object?", "its committed result"),
        Field("result_pruned", "boolean", "its result was pruned; what is told of it is still here"),
        Field("result.epoch", "number", "the same as epoch"),
        Field("result.size", "number", "bytes"),
        Field("result.committed", "time", "when"),
    ],
};

/// `.leasefs/events`.
pub const EVENTS: Shape = Shape {
    title: ".leasefs/events, `leasefs watch --json`",
    about: "One object on one line for each event, from when the file was opened. A reader sees events of keys it may \
            see. `leasefs watch --json` prints the same.",
    fields: &[
        Field("seq", "[number]", "the event's number"),
        Field("time", "[time]", "when"),
        Field(
            "event",
            "string",
            "`granted`, `denied`, `waiting`, `interrupted` (a signal ended a wait in line), `refused` (another error did), \
             `renewed`, `released`, `expired`, `evicted`, `completed` (its result was committed), `finished` (and its \
             handles are closed), `lost`, `stale` (a handle that lost its lease was refused), `shared`, `unshared`, \
             `forgotten` (a finished key was unlinked), `pruned` or `gap`",
        ),
        Field("key", "[string]", "the key"),
        Field("epoch", "[number]", "the attempt it is about, else the newest"),
        Field("pid", "[number]", "of interrupted and refused alone: who waited, as in the line of status/KEY"),
        Field("uid", "[number]", "of interrupted and refused alone: its user"),
        Field("command", "[string]", "of interrupted and refused alone: its name, as in the line of status/KEY"),
        Field("waited_ms", "[number]", "of interrupted and refused alone: milliseconds in line"),
        Field("missed", "[number]", "of a gap alone: how many events this reader was too slow for"),
        Field("attempts", "[number]", "of pruned alone: ended attempts that went"),
        Field("results", "[number]", "of pruned alone: results that went"),
    ],
};

/// `.leasefs/config`.
pub const CONFIG: Shape = Shape {
    title: ".leasefs/config",
    about: "One object: how the tree is served.",
    fields: &[
        Field("version", "string", "the server's version"),
        Field("mountpoint", "string", "where it was mounted"),
        Field("state_dir", "string", "the state directory"),
        Field("ttl_ms", "number", "TTL where no namespace sets one, in milliseconds"),
        Field("durability", "string", "`full` or `process`"),
        Field("max_result", "number", "most bytes in a result"),
        Field("max_keys", "number", "most keys one user may hold"),
        Field("max_waiters", "number", "most waiting locks of one user"),
        Field("allow_other", "boolean", "whether every user may use the tree"),
        Field("mount_owner", "number", "uid that mounted it"),
        Field("pid", "number", "the server's pid"),
        Field("keeper_pid", "number", "the keeper's pid"),
        Field("starts", "number", "servers this mount has had"),
        Field("resend", "boolean", "whether a call under way when a server ends is made again without an error"),
    ],
};

/// `leasefs verify --json`.
pub const VERIFY: Shape = Shape {
    title: "`leasefs verify --json`",
    about: "One object.",
    fields: &[
        Field("ok", "boolean", "whether all invariants hold"),
        Field("keys", "number", "keys looked at"),
        Field("attempts", "number", "attempts looked at"),
        Field("results", "number", "results looked at"),
        Field("damage", "list", "the database's own complaints, as strings"),
        Field("violations", "list", "what does not hold"),
        Field("violations[].invariant", "string", "its name"),
        Field("violations[].key", "string", "the key"),
        Field("violations[].epoch", "number?", "the attempt"),
        Field("violations[].problem", "string", "what is wrong"),
        Field("violations[].by_clock", "boolean", "a step of the clock would show the same"),
    ],
};

/// `leasefs doctor --json`.
pub const DOCTOR: Shape = Shape {
    title: "`leasefs doctor --json`",
    about: "One object.",
    fields: &[
        Field("ok", "boolean", "whether nothing failed; warnings are no failures"),
        Field("checks", "list", "what was looked at, in order"),
        Field("checks[].check", "string", "its name, which does not change"),
        Field("checks[].verdict", "string", "`ok`, `warn` or `fail`"),
        Field("checks[].found", "string", "what was found, for a person"),
        Field("checks[].cure", "string?", "what to do"),
    ],
};

/// `leasefs prune --json`.
pub const PRUNE: Shape = Shape {
    title: "`leasefs prune --json`",
    about: "One object.",
    fields: &[
        Field("dry_run", "boolean", "whether nothing was taken away"),
        Field("attempts", "number", "attempts that went, or would go"),
        Field("results", "number", "results that went, or would go"),
        Field("bytes", "number", "their bytes"),
        Field("keys", "list", "the same for each key"),
        Field("keys[].key", "string", "the key"),
        Field("keys[].attempts", "number", "its attempts"),
        Field("keys[].results", "number", "its results"),
        Field("keys[].bytes", "number", "their bytes"),
    ],
};

/// `leasefs who --json`.
pub const WHO: Shape = Shape {
    title: "`leasefs who --json`",
    about: "One object. What cannot be seen of a process, or of one that is gone, is null.",
    fields: &[
        Field("key", "string", "the key"),
        Field("state", "string", "as in status/KEY"),
        Field("epoch", "number", "the newest epoch"),
        Field("processes", "list", "who has to do with the key"),
        Field("processes[].pid", "number", "process id, as seen by this command; of one in line, by the server"),
        Field("processes[].ppid", "number?", "its parent's"),
        Field("processes[].start_time", "number", "when it started, in clock ticks since boot"),
        Field("processes[].started", "time?", "the same by the clock"),
        Field("processes[].uid", "number?", "the user it acts as"),
        Field("processes[].command", "string?", "its command line"),
        Field("processes[].container", "string?", "the container or service it is in, as `podman:0123456789ab`"),
        Field(
            "processes[].how",
            "string",
            "`claimed`: it claimed the key and has the handle; `inherited`: it has the holder's handle; `perhaps`: it has a \
             handle that may be the holder's; `shares`: it holds a shared lock; `writes`: it has the attempt's result open \
             for writing; `waits`: it is in line; `open`: it has the key's file open and nothing more",
        ),
        Field("processes[].keeps", "boolean", "whether the key stays held because of it"),
        Field("processes[].fds", "list", "its descriptors, as numbers"),
        Field("processes[].since", "time?", "since when it waits"),
        Field("unseen", "number", "processes that could not be looked into"),
        Field("remark", "string?", "what cannot be said of the holder's handle, for a person"),
    ],
};

/// `leasefs claim --json`.
pub const CLAIM: Shape = Shape {
    title: "`leasefs claim --json`",
    about: "One object.",
    fields: &[
        Field("key", "string", "the key"),
        Field("epoch", "number", "the attempt's number"),
        Field("result", "string", "the file that takes its result"),
        Field("holder_pid", "number", "the process that holds it"),
        Field("agent", "string?", "the agent's name"),
        Field("expires", "time?", "end of its TTL"),
    ],
};

/// All that is written to `.leasefs/control`.
pub const ORDERS: Shape = Shape {
    title: ".leasefs/control",
    about: "Takes one object for each write; what came of it is the write's errno.",
    fields: &[
        Field(
            "op",
            "string",
            "`evict`: end an attempt, for root, the mount's owner and the namespace's owner; `release`, `renew`: end or \
             renew it, for the user it is of; `prune`, `reap`: as the commands do, for root and the mount's owner",
        ),
        Field("key", "[string]", "of evict, release, renew: the key"),
        Field("epoch", "[number]", "and the attempt that is meant; `ESTALE` where it does not hold the key"),
        Field("reason", "[string]", "of evict and release: why, for the history"),
        Field("completed_older_ms", "[number]", "of prune: completed attempts that ended so long ago or longer go"),
        Field("attempts_over", "[number]", "of prune: so many of the newest ended attempts of a key stay"),
    ],
};

/// All of them.
pub const SHAPES: &[&Shape] = &[&STATUS, &HISTORY, &EVENTS, &CONFIG, &VERIFY, &DOCTOR, &PRUNE, &WHO, &CLAIM, &ORDERS];

/// The page.
pub fn page() -> Page {
    let mut page = Page::default();
    page.text(
        "Fields may be added in later versions, never renamed or given another meaning: pass over those that are not \
         known. A time is a string as RFC 3339 has it, in UTC with milliseconds. A type with a question mark may be null; \
         a field whose type is in brackets may be missing. `a.b` is a field of the object a, `a[].b` of each object in \
         the list a.",
    );
    for shape in SHAPES {
        page.head(shape.title.replace('`', ""));
        page.text(shape.about);
        for Field(name, kind, about) in shape.fields {
            page.entry(format!("{name} ({kind})"), *about);
        }
    }
    page
}
