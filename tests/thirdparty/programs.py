"""The foreign programs with suites of their own: where each comes from, and how its suite is run in a directory.

What is run is what was published, unchanged. Where a suite keeps its lock files at a place it chooses itself, a symlink
outside the directory leads there.
"""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import outcome
from fetch import run
from outcome import Broken


class Room:
    """Where one program runs: its directory under test, scratch beside it, the cache, and how long it may take."""

    def __init__(self, directory, cache, scratch, timeout):
        self.dir, self.cache, self.scratch, self.timeout = Path(directory), cache, Path(scratch), timeout

    def env(self, **more):
        env = {name: value for name, value in os.environ.items() if name not in ("RUST_BACKTRACE", "PYTEST_ADDOPTS")}
        return {**env, "TMPDIR": str(self.dir), **more}

    def run(self, command, where=None, env=None, timeout=None):
        """Runs a suite, whatever its exit code; its output. All that it started is ended with it."""
        log = self.scratch / "output"
        with open(log, "w+", encoding="utf-8", errors="replace") as out:
            child = subprocess.Popen([str(part) for part in command], cwd=where or self.scratch, env=env or self.env(),
                                     stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                     start_new_session=True)
            try:
                child.wait(timeout or self.timeout)
            except subprocess.TimeoutExpired as error:
                raise Broken(f"not done after {timeout or self.timeout} s: {self.last(log)}") from error
            finally:
                try:
                    os.killpg(child.pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
                child.wait()
        self.code = child.returncode
        return log.read_text(encoding="utf-8", errors="replace")

    @staticmethod
    def last(log):
        return " / ".join(Path(log).read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:])

    def pytest(self, source, tests, *options):
        report = self.scratch / "report.xml"
        # A busy machine takes its time; a test that hangs ends all the same.
        self.run([self.cache.python(), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--basetemp", self.dir / "b",
                  "--junitxml", report, "--timeout", "120", *options, *tests],
                 where=source, env=self.env(PYTHONDONTWRITEBYTECODE="1"))
        return outcome.junit(report)


def flock(room):
    """ts/misc/flock of the source package, with the installed flock(1)."""
    room.cache.debian("util-linux", "procps")
    source = room.cache.debian_source("util-linux")
    output = room.scratch / "tests/output/misc"
    output.mkdir(parents=True)
    (output / "lockfile").symlink_to(room.dir / "lockfile")
    return outcome.util_linux(room.run(["bash", "ts/misc/flock", f"--srcdir={source}", f"--builddir={room.scratch}",
                                        "--use-system-commands"], where=source / "tests"))


def filelock(room):
    return room.pytest(room.cache.sdist("filelock", "3.29.0"), ["tests"])


def portalocker(room):
    # What needs a Redis server has nothing to do with files. Its files lie where TMPDIR or --basetemp say.
    tests = room.cache.sdist("portalocker", "3.2.0")
    return room.pytest(tests, ["portalocker_tests"], "-o", "addopts=", "--ignore-glob=*redis*")


def fasteners(room):
    return room.pytest(room.cache.sdist("fasteners", "0.20"), ["tests/test_process_lock.py"])


def crate(room, name, version, *targets):
    """The suite is built first: only its programs are to see TMPDIR."""
    source = room.cache.crate(name, version)
    env = dict(os.environ, CARGO_TARGET_DIR=str(room.cache.path / "target"))
    built = run(["cargo", "test", "--no-run", "--message-format=short", *targets], source, env)
    programs = re.findall(r"^\s*Executable .*\((\S+)\)$", built, re.M)
    if not programs:
        raise Broken(f"{name}: no test program was built")
    return [one for program in programs for one in outcome.libtest(room.run([program], where=source))]


def fd_lock(room):
    return crate(room, "fd-lock", "4.0.4", "--lib", "--test", "test")


def fs4(room):
    return crate(room, "fs4", "1.1.0", "--lib")


def pjdfstest(room):
    root = room.cache.path / "pjdfstest-0.2.2"
    if not (root / "bin/pjdfstest").exists():
        env = dict(os.environ, CARGO_TARGET_DIR=str(room.cache.path / "target"))
        run(["cargo", "install", "--quiet", "--locked", "--debug", "--root", str(root), "pjdfstest@0.2.2"], env=env)
    # Users that every Debian has, instead of new ones.
    config = room.scratch / "pjdfstest.toml"
    config.write_text('[features]\n[settings]\nnaptime = 0.01\nallow_remount = false\n'
                      '[dummy_auth]\nentries = [["nobody", "nogroup"], ["daemon", "daemon"]]\n')
    # The other users have to get there.
    room.dir.chmod(0o755)
    return outcome.pjdfstest(room.run([root / "bin/pjdfstest", "-c", config, "-p", room.dir,
                                       "open", "unlink", "ftruncate", "mkdir", "rmdir"]))


def cpython(room):
    """test_fcntl, test_mailbox and test_tempfile of the system's Python."""
    python = "/usr/bin/python3"
    room.cache.debian("python3")
    version = run([python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]).strip()
    room.cache.debian(f"libpython{version}-testsuite")
    report = room.scratch / "report.xml"

    def tests(*arguments, timeout):
        report.unlink(missing_ok=True)
        room.run([python, "-m", "test", "--junit-xml", report, "--tempdir", room.dir, *arguments], timeout=timeout)
        return outcome.junit(report)

    found = tests("-i", "test_lock_conflict", "test_fcntl", "test_mailbox", "test_tempfile", timeout=room.timeout)
    # Where its child cannot lock, this one waits for it for ever.
    for kind in ("TestMbox", "TestMMDF"):
        name = f"test_mailbox.{kind}::test_lock_conflict"
        try:
            found += tests("-m", f"test.test_mailbox.{kind}.test_lock_conflict", "test_mailbox", timeout=20)
        except Broken as error:
            found.append(outcome.Outcome(name, outcome.FAILED, f"its child gets no lock: {error}"))
    return found


def go(room, packages, *options, **env):
    """Tests of Go packages that Debian installs as source. Building has its temporary files elsewhere."""
    env = room.env(GOTMPDIR=str(room.scratch), GOCACHE=str(room.cache.path / "go"), GOFLAGS="", GOTOOLCHAIN="local",
                   **env)
    where = run(["go", "env", "GOROOT"]).strip() + "/src/cmd"
    return outcome.go_json(room.run(["go", "test", "-json", "-count=1", *packages, *options], where=where, env=env))


def lockedfile(room):
    """Each test in a process of its own: one that fails leaves a handle, and the collector ends the program for that."""
    room.cache.debian("golang-go")
    package = "cmd/go/internal/lockedfile"
    found = []
    for part in (package, f"{package}/internal/filelock"):
        go(room, [part], "-list", ".")
        names = re.findall(r"\"Output\":\"(Test\w+)", (room.scratch / "output").read_text(encoding="utf-8"))
        if not names:
            raise Broken(f"{part}: no tests")
        for name in names:
            said = go(room, [part], "-run", f"^{name}$")
            crashed = outcome.Outcome(f"{part.rsplit('/', 1)[-1]}::{name}", outcome.FAILED, "the test program crashed")
            found += said or [crashed]
    return found


def gofrs_flock(room):
    room.cache.debian("golang-go", "golang-github-gofrs-flock-dev", "golang-gopkg-check.v1-dev")
    env = {"GO111MODULE": "off", "GOPATH": "/usr/share/gocode"}
    return go(room, ["github.com/gofrs/flock"], "-check.v", **env)


def proper_lockfile(room):
    """Its suite from the release that Debian's source package has; jest and the rest from npm."""
    source = room.cache.debian_source("node-proper-lockfile", ("--download-only", "--tar-only"))
    modules = room.cache.npm("jest", "jest@24", "delay@4", "execa@1", "mkdirp@0.5", "p-defer@2", "rimraf@2", "stable@0.1",
                             "thread-sleep@2", "@segment/clear-timeouts@2", "graceful-fs@4", "retry@0.12",
                             "signal-exit@3")
    copy = room.scratch / "proper-lockfile"
    shutil.copytree(source, copy)
    (copy / "node_modules").symlink_to(modules / "node_modules")
    outcomes = []
    for suite in sorted((copy / "test").glob("*.test.js")):
        # Each suite makes test/tmp unless it is there, and takes it away at its end.
        (room.dir / "tmp").mkdir(exist_ok=True)
        (copy / "test/tmp").unlink(missing_ok=True)
        (copy / "test/tmp").symlink_to(room.dir / "tmp")
        report = room.scratch / f"{suite.name}.json"
        room.run([modules / "node_modules/.bin/jest", "--env", "node", "--runInBand", "--json", "--outputFile", report,
                  f"test/{suite.name}"], where=copy, env=room.env(TMPDIR=str(room.scratch)))
        outcomes += outcome.jest(report)
    return outcomes


def stress_ng(room):
    room.cache.debian("stress-ng")
    outcomes = []
    for stressor in ("flock", "lockf", "lockofd"):
        text = room.run(["stress-ng", f"--{stressor}", "2", "--timeout", "5", "--temp-path", room.dir])
        bad = [line for line in text.splitlines() if re.search(r"fail|error", line) and "failed: 0" not in line]
        passed = room.code == 0 and not bad and "successful run completed" in text
        outcomes.append(outcome.Outcome(stressor, outcome.PASSED if passed else outcome.FAILED,
                                        outcome.one_line(" / ".join(bad) or text) if not passed else ""))
    return outcomes


# name: (what runs it, where it comes from)
PROGRAMS = {
    "flock": (flock, "util-linux: flock(1), its own ts/misc/flock"),
    "filelock": (filelock, "PyPI filelock 3.29.0, its sdist's suite"),
    "portalocker": (portalocker, "PyPI portalocker 3.2.0, its sdist's suite without Redis"),
    "fasteners": (fasteners, "PyPI fasteners 0.20, test_process_lock"),
    "fd-lock": (fd_lock, "crates.io fd-lock 4.0.4, its suite"),
    "fs4": (fs4, "crates.io fs4 1.1.0, its suite"),
    "pjdfstest": (pjdfstest, "crates.io pjdfstest 0.2.2: open, unlink, ftruncate, mkdir, rmdir"),
    "cpython": (cpython, "Debian libpython3-testsuite: test_fcntl, test_mailbox, test_tempfile"),
    "lockedfile": (lockedfile, "Debian golang-src: cmd/go/internal/lockedfile"),
    "gofrs-flock": (gofrs_flock, "Debian golang-github-gofrs-flock-dev, its suite"),
    "proper-lockfile": (proper_lockfile, "npm proper-lockfile 4.1.2, its suite from Debian's source package"),
    "stress-ng": (stress_ng, "Debian stress-ng: --flock --lockf --lockofd"),
}
