"""The clients of the matrix: for each, a command that holds a path until it is killed, and one that tries to get it.

`hold` prints "held" once it has it. `try` exits with 0 if it got it, and has let go of it then; with anything else if not.
Neither waits.
"""

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path

from fetch import run
from outcome import Broken

HERE = Path(__file__).resolve().parent / "clients"

# Once the handle is in place: says so, and stays until it is killed. `exec` so that there is one process.
STAY = "echo held; exec tail -f /dev/null"

# In shell, with the path as $1.
SHELL = {
    "flock -x": (f"exec flock -n -x -o \"$1\" sh -c '{STAY}'", 'exec flock -n -x "$1" true'),
    "flock -s": (f"exec flock -n -s -o \"$1\" sh -c '{STAY}'", 'exec flock -n -s "$1" true'),
    "set -C": (f'set -C; exec 9>"$1" || exit; {STAY}', 'set -C; exec 9>"$1" || exit; rm -f "$1" || true'),
    # A widespread idiom: the file's being there is the lock, not the handle.
    "create+close": (f'set -C; echo $$ >"$1" || exit; {STAY}', 'set -C; echo $$ >"$1" && { rm -f "$1" || true; }'),
    "ln -s": (f'ln -s "pid$$" "$1" || exit; {STAY}', 'ln -s "pid$$" "$1" && rm -f "$1"'),
    "mkdir": (f'mkdir "$1" || exit; {STAY}', 'mkdir "$1" && rmdir "$1"'),
    "lckdo": (f"exec lckdo -e \"$1\" sh -c '{STAY}'", 'exec lckdo "$1" true'),
    "lockfile": (f'lockfile -r 0 "$1" || exit; {STAY}', 'lockfile -r 0 "$1" && rm -f "$1"'),
    "dotlockfile": (f'dotlockfile -r 0 -l "$1" || exit; {STAY}', 'dotlockfile -r 0 -l "$1" && dotlockfile -u "$1"'),
}
# The command a client needs beside the shell, and the package that has it.
DEBIAN = {"flock -x": ("flock", "util-linux"), "flock -s": ("flock", "util-linux"), "lckdo": ("lckdo", "moreutils"),
          "lockfile": ("lockfile", "procmail"), "dotlockfile": ("dotlockfile", "liblockfile-bin")}


@dataclass
class Client:
    name: str
    hold: list
    attempt: list
    env: dict = field(default_factory=dict)
    # Not the path but the key below claims/ is what it takes.
    by_key: bool = False


# What lock.py calls a kind, and the matrix another.
NAMES = {"flock": "py flock", "lockf": "py lockf", "ofd": "py OFD", "create": "py open x", "softfilelock": "SoftFileLock"}


def _need(cache, command, package):
    if not shutil.which(command):
        cache.debian(package)


def _shell(cache, name):
    if name in DEBIAN:
        _need(cache, *DEBIAN[name])
    hold, attempt = SHELL[name]
    return Client(name, ["bash", "-c", hold, "hold"], ["bash", "-c", attempt, "try"])


def _verbs(name, *command, env=None):
    return Client(name, [*command, "hold"], [*command, "try"], env or {})


def _python(cache, kind, libraries=False):
    """`libraries`: more than Python's own is needed."""
    python = cache.python() if libraries else "python3"
    return _verbs(NAMES.get(kind, kind), python, str(HERE / "lock.py"), kind)


def _perl(cache):
    _need(cache, "perl", "perl-base")
    return _verbs("perl flock", "perl", str(HERE / "lock.pl"))


def _java(cache):
    _need(cache, "javac", "default-jdk-headless")
    classes = cache.once("java", lambda where: run(["javac", "-d", str(where), str(HERE / "Lock.java")]))
    return _verbs("java", "java", "-Xshare:auto", "-XX:TieredStopAtLevel=1", "-cp", str(classes), "Lock")


def _go(cache):
    cache.debian("golang-go", "golang-github-gofrs-flock-dev")
    env = dict(os.environ, GO111MODULE="off", GOPATH="/usr/share/gocode", GOCACHE=str(cache.path / "go"), GOFLAGS="")
    built = cache.once("client-go", lambda where: run(["go", "build", "-o", str(where / "lock"), str(HERE / "lock.go")],
                                                      env=env))
    return _verbs("go gofrs", str(built / "lock"))


def _rust(cache, name):
    def make(where):
        shutil.copytree(HERE / "rust", where / "src")
        env = dict(os.environ, CARGO_TARGET_DIR=str(cache.path / "target"))
        run(["cargo", "build", "--quiet"], where / "src", env)
        shutil.copy(cache.path / "target/debug/lock", where / "lock")

    return _verbs(name, str(cache.once("client-rust", make) / "lock"), name)


def _node(cache):
    modules = cache.npm("proper-lockfile", "proper-lockfile@4.1.2")
    return _verbs("proper-lockfile", "node", str(HERE / "lock.js"), env={"NODE_PATH": str(modules / "node_modules")})


def _leasefs(root):
    leasefs = shutil.which("leasefs")
    if not leasefs:
        raise Broken("no `leasefs` on the PATH: set LEASEFS_BIN")
    return Client("leasefs run", ["bash", "-c", f"exec {leasefs} run -n \"$1\" -- sh -c '{STAY}'", "hold"],
                  ["bash", "-c", f'exec {leasefs} run -n "$1" -- true', "try"], {"LEASEFS_ROOT": str(root)}, True)


# name: how it is made ready
CLIENTS = {
    "flock -x": lambda cache: _shell(cache, "flock -x"),
    "flock -s": lambda cache: _shell(cache, "flock -s"),
    "py flock": lambda cache: _python(cache, "flock"),
    "py lockf": lambda cache: _python(cache, "lockf"),
    "py OFD": lambda cache: _python(cache, "ofd"),
    "perl flock": _perl,
    "java": _java,
    "go gofrs": _go,
    "fd-lock": lambda cache: _rust(cache, "fd-lock"),
    "fs4": lambda cache: _rust(cache, "fs4"),
    "filelock": lambda cache: _python(cache, "filelock", True),
    "portalocker": lambda cache: _python(cache, "portalocker", True),
    "fasteners": lambda cache: _python(cache, "fasteners", True),
    "lckdo": lambda cache: _shell(cache, "lckdo"),
    "set -C": lambda cache: _shell(cache, "set -C"),
    "py open x": lambda cache: _python(cache, "create"),
    "SoftFileLock": lambda cache: _python(cache, "softfilelock", True),
    "create+close": lambda cache: _shell(cache, "create+close"),
    "mkdir": lambda cache: _shell(cache, "mkdir"),
    "proper-lockfile": _node,
    "ln -s": lambda cache: _shell(cache, "ln -s"),
    "lockfile": lambda cache: _shell(cache, "lockfile"),
    "dotlockfile": lambda cache: _shell(cache, "dotlockfile"),
}


def ready(cache, root, names=None):
    """The clients, and those that cannot be had here with why. `root`: the mountpoint, where it is one of ours."""
    makers = dict(CLIENTS)
    if root:
        makers["leasefs run"] = lambda cache: _leasefs(root)
    clients, missing = [], {}
    for name, make in makers.items():
        if names and name not in names:
            continue
        try:
            clients.append(make(cache))
        except Broken as error:
            missing[name] = str(error)
    return clients, missing
