"""Brings in foreign programs by their registries' ordinary clients, once, into the cache.

Debian's sources are asked for with an apt configuration of its own: the system's is not touched.
"""

import contextlib
import fcntl
import functools
import os
import shutil
import subprocess
from pathlib import Path

from outcome import Broken


def run(command, where=None, env=None, timeout=900):
    """Runs to its end; its output, or `Broken` with the last lines of it."""
    try:
        done = subprocess.run(command, cwd=where, env=env, timeout=timeout, stdin=subprocess.DEVNULL, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, errors="replace", check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Broken(f"{command[0]}: {error}") from error
    if done.returncode:
        last = " / ".join(done.stdout.strip().splitlines()[-3:])
        raise Broken(f"`{' '.join(map(str, command))}` ended with {done.returncode}: {last}")
    return done.stdout


def alone(method):
    """Two runs at once fetch one after the other: the cache has a lock."""

    @functools.wraps(method)
    def locked(self, *arguments, **more):
        with self.lock():
            return method(self, *arguments, **more)

    return locked


class Cache:
    def __init__(self, path):
        self.path = Path(path).absolute()
        self.path.mkdir(parents=True, exist_ok=True)
        self._apt_is_new = False
        self._depth = 0

    @contextlib.contextmanager
    def lock(self):
        self._depth += 1
        if self._depth == 1:
            self._file = open(self.path / "lock", "w")  # closed below
            fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._file.close()

    @alone
    def once(self, name, make):
        """The directory `name` below the cache, made whole by `make(dir)` or not at all."""
        done = self.path / name
        if not done.exists():
            part = self.path / f"{name}.part"
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            make(part)
            part.rename(done)
        return done

    def _as_root(self, command):
        env = dict(os.environ, DEBIAN_FRONTEND="noninteractive")
        run(command if os.geteuid() == 0 else ["sudo", "-n", *command], env=env)

    @alone
    def debian(self, *packages):
        """Installs the packages that are not there."""
        if not shutil.which("dpkg-query"):
            raise Broken(f"needs Debian's packages {', '.join(packages)}")

        def is_there(package):
            asked = subprocess.run(["dpkg-query", "-W", "-f", "${Status}", package], capture_output=True, text=True,
                                   check=False)
            return "install ok installed" in asked.stdout

        missing = [package for package in packages if not is_there(package)]
        if missing:
            if not self._apt_is_new:
                self._as_root(["apt-get", "update"])
                self._apt_is_new = True
            self._as_root(["apt-get", "install", "-y", "--no-install-recommends", *missing])

    def debian_source(self, package, files=("--download-only",)):
        """What upstream released, as Debian's source package has it, unpacked without Debian's patches."""

        def make(where):
            apt = self.path / "apt"
            (apt / "lists" / "partial").mkdir(parents=True, exist_ok=True)
            sources = apt / "sources.sources"
            system = Path("/etc/apt/sources.list.d/debian.sources")
            if system.exists():
                sources.write_text(system.read_text().replace("Types: deb\n", "Types: deb-src\n"))
            else:
                sources = apt / "sources.list"
                lines = Path("/etc/apt/sources.list").read_text().splitlines()
                sources.write_text("".join(f"deb-src{line[3:]}\n" for line in lines if line.startswith("deb ")))
            options = ["-o", f"Dir::Etc::sourcelist={sources}", "-o", "Dir::Etc::sourceparts=/dev/null",
                       "-o", f"Dir::State::lists={apt}/lists", "-o", f"Dir::Cache={apt}", "-o", "APT::Sandbox::User=root"]
            run(["apt-get", *options, "update"])
            run(["apt-get", *options, "source", *files, package], where)
            archive = next(iter(where.glob("*.orig.tar.*")), None)
            if archive is None:
                raise Broken(f"{package}: no archive in Debian's source package")
            (where / "src").mkdir()
            run(["tar", "-xf", str(archive), "-C", str(where / "src"), "--strip-components", "1"])

        return self.once(f"source-{package}", make) / "src"

    @alone
    def python(self):
        """The interpreter of a virtual environment with the libraries and what their suites need."""
        needs = ["filelock==3.29.0", "portalocker==3.2.0", "fasteners==0.20", "pytest==9.0.3", "pytest-asyncio",
                 "pytest-mock", "pytest-timeout", "pytest-cov", "pytest-rerunfailures", "virtualenv", "covdefaults",
                 "redis", "diskcache", "more_itertools", "eventlet"]
        venv = self.path / "venv"
        if not (venv / "ready").exists():
            shutil.rmtree(venv, ignore_errors=True)
            try:
                run(["python3", "-m", "venv", str(venv)])
            except Broken:
                shutil.rmtree(venv, ignore_errors=True)
                self.debian("python3-venv")
                run(["python3", "-m", "venv", str(venv)])
            run([str(venv / "bin/pip"), "install", "--quiet", *needs])
            (venv / "ready").touch()
        return str(venv / "bin/python")

    def sdist(self, name, version):
        """A release's source archive from PyPI, unpacked."""

        def make(where):
            # The build of its metadata needs what it names; the environment of the suites is not touched by that.
            run([self.python(), "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", name, "-d", str(where),
                 f"{name}=={version}"])
            archive = next(where.glob("*.tar.gz"))
            (where / "src").mkdir()
            run(["tar", "-xf", str(archive), "-C", str(where / "src"), "--strip-components", "1"])

        return self.once(f"sdist-{name}-{version}", make) / "src"

    def npm(self, name, *packages):
        """A folder with the packages in its `node_modules`."""
        if not shutil.which("npm"):
            self.debian("npm")

        def make(where):
            (where / "package.json").write_text('{"private":true}\n')
            run(["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error", *packages], where)

        return self.once(f"npm-{name}", make)

    def crate(self, name, version):
        """A crate's published source in a folder of its own."""

        def make(where):
            run(["cargo", "init", "--quiet", "--vcs", "none", "--name", "fetch", str(where / "fetch")])
            run(["cargo", "add", "--quiet", f"{name}@={version}"], where / "fetch")
            run(["cargo", "vendor", "--quiet", "--versioned-dirs", str(where / "vendor")], where / "fetch")
            source = where / "vendor" / f"{name}-{version}"
            source.rename(where / "src")
            # As published; only this says what vendoring added, and that it is nobody's workspace member.
            (where / "src" / ".cargo-checksum.json").unlink(missing_ok=True)
            shutil.rmtree(where / "vendor")
            shutil.rmtree(where / "fetch")

        return self.once(f"crate-{name}-{version}", make) / "src"
