"""`scripts/thirdparty`: runs foreign programs in a directory and judges what they said by `expected.txt`."""

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

import clients
import expected
import matrix
import selfcheck
from fetch import Cache
from outcome import FAILED, PASSED, SKIPPED, Broken
from programs import PROGRAMS, Room


def arguments():
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    parser = argparse.ArgumentParser(prog="scripts/thirdparty")
    parser.add_argument("--only", metavar="NAME,…", action="append", default=[])
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--matrix", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--cache", metavar="DIR", default=os.path.join(cache, "leasefs-thirdparty"))
    parser.add_argument("--timeout", metavar="SECONDS", type=int, default=900)
    parser.add_argument("dir", metavar="DIR", nargs="?")
    options = parser.parse_args()
    if not options.list and not options.dir:
        parser.error("which directory? A namespace of a mounted tree (mkdir ROOT/claims/try), or any other")
    if options.dir and not os.path.isdir(options.dir):
        parser.error(f"{options.dir} is no directory: make it first")
    options.dir = options.dir and os.path.abspath(options.dir)
    return options, parser


def tree_of(directory):
    """The mountpoint of ours that the directory is in, and its path below `claims/`; or None."""
    path = os.path.realpath(directory)
    best = ("", "")
    with open("/proc/self/mountinfo", encoding="utf-8") as mounts:
        for line in mounts:
            fields = line.split()
            point, kind = fields[4].encode().decode("unicode_escape"), fields[fields.index("-") + 1]
            if (path + "/").startswith(point.rstrip("/") + "/") and len(point) >= len(best[0]):
                best = (point, kind)
    if best[1] != "fuse.leasefs":
        return None
    below = os.path.relpath(path, best[0]).split("/")
    if below[0] != "claims":
        sys.exit(f"thirdparty: {directory} is in a leasefs tree, but not below its claims/")
    return best[0], "/".join(below[1:])


def made(directory, keep):
    """A directory of one's own in DIR, and scratch beside it, gone afterwards."""

    @contextlib.contextmanager
    def room():
        inside = tempfile.mkdtemp(prefix="tp-", dir=directory)
        os.chmod(inside, 0o777)
        scratch = tempfile.mkdtemp(prefix="thirdparty-", dir="/tmp")
        os.chmod(scratch, 0o755)
        try:
            yield inside, scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            if not keep:
                shutil.rmtree(inside, ignore_errors=True)

    return room()


def main():
    options, parser = arguments()
    known = {**PROGRAMS, **selfcheck.PROGRAMS}
    if options.list:
        for name, (_, source) in known.items():
            print(f"{name:<16} {source}")
        return 0
    names = [name for names in options.only for name in names.split(",") if name]
    tell = lambda text: print(f"thirdparty: {text}", file=sys.stderr, flush=True)
    tree = tree_of(options.dir)
    cache = Cache(options.cache)
    if options.matrix:
        unknown = set(names) - {*clients.CLIENTS, "leasefs run"}
        if unknown:
            parser.error(f"no client {', '.join(unknown)}: they are {', '.join(clients.CLIENTS)}, leasefs run")
        taking_part, missing = clients.ready(cache, tree and tree[0], names)
        for name, why in missing.items():
            tell(f"without {name}: {why}")
        if not taking_part:
            tell("nobody is left to take part: `leasefs run` does only on a tree")
            return 1
        with made(options.dir, options.keep) as (inside, _):
            parts = (tree[1] if tree else "", os.path.basename(inside))
            prefix = "/".join(part for part in parts if part not in ("", "."))
            found = matrix.Matrix(taking_part, inside, prefix, tell).run()
        print(json.dumps(found.json(), indent=1) if options.json else found.text())
        return 1 if missing else 0

    for name in names:
        if name not in known:
            parser.error(f"no program {name}: --list names them")
    place = "tree" if tree else "plain"
    table = expected.Table(Path(__file__).with_name("expected.txt"), place)
    total, report, bad = {PASSED: 0, FAILED: 0, SKIPPED: 0}, {}, False
    for name in names or known:
        tell(name)
        began = time.monotonic()
        with made(options.dir, options.keep) as (inside, scratch):
            try:
                outcomes = known[name][0](Room(inside, cache, scratch, options.timeout))
                if not outcomes:
                    raise Broken("no test ran")
                broken = None
            except Broken as error:
                outcomes, broken = [], str(error)
        verdict = table.judge(name, outcomes)
        counts = {kind: sum(one.result == kind for one in outcomes) for kind in total}
        for kind in total:
            total[kind] += counts[kind]
        bad |= bool(broken or verdict.unexpected)
        report[name] = {**counts, "seconds": round(time.monotonic() - began), "broken": broken,
                        "failures": verdict.failures, "unexpected": verdict.unexpected}
        if not options.json:
            print(expected.text(name, report[name]), flush=True)
    if options.json:
        print(json.dumps({"directory": options.dir, "in": place, "programs": report, "total": total}, indent=1))
    else:
        print(f"in all: {total[PASSED]} passed, {total[FAILED]} failed, {total[SKIPPED]} skipped, on a "
              f"{'leasefs tree' if tree else 'plain directory'}; {'NOT ' if bad else ''}as expected")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
