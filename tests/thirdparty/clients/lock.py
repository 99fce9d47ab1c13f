"""lock.py KIND hold|try PATH: takes a lock by a Python library, without waiting.

`hold` prints "held" and stays until it is killed; `try` lets go again. Exit code 1: another has it, or it is refused.
"""

import os
import signal
import sys

kind, verb, path = sys.argv[1:]


def got(release):
    if verb == "hold":
        print("held", flush=True)
        signal.pause()
    release()
    sys.exit(0)


def kept_out(error):
    print(f"{type(error).__name__}: {error}", file=sys.stderr)
    sys.exit(1)


try:
    if kind == "create":
        file = open(path, "x")
        got(lambda: (os.path.exists(path) and os.unlink(path), file.close()))
    elif kind in ("flock", "lockf", "ofd"):
        import fcntl
        import struct

        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        if kind == "flock":
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        elif kind == "lockf":
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        else:
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        got(lambda: os.close(fd))
    elif kind in ("filelock", "softfilelock"):
        import filelock

        lock = (filelock.FileLock if kind == "filelock" else filelock.SoftFileLock)(path, timeout=0)
        lock.acquire()
        got(lock.release)
    elif kind == "portalocker":
        import portalocker

        lock = portalocker.Lock(path, mode="a", timeout=0, fail_when_locked=True)
        lock.acquire()
        got(lock.release)
    elif kind == "fasteners":
        import fasteners

        lock = fasteners.InterProcessLock(path)
        if not lock.acquire(blocking=False):
            raise BlockingIOError("held")
        got(lock.release)
    else:
        sys.exit(f"no such kind: {kind}")
except Exception as error:  # whatever a library says is its answer
    kept_out(error)
