"""Claims a key in a form of claiming: create, flock, posix, ofd, or shared, a lock that only keeps others out.

try PATH FORM...: claims in each form without waiting, and lets go: says `ok` or the errno's name for each.
hold PATH FORM:   claims without waiting and holds until it is killed.
wait PATH FORM:   waits for the claim, says the epoch, and lets go.
"""

import errno
import fcntl
import os
import signal
import struct
import sys


def claim(path, form, wait):
    flags = os.O_RDWR | os.O_CREAT | (os.O_EXCL if form == "create" else 0)
    fd = os.open(path, flags, 0o666)
    now = 0 if wait else fcntl.LOCK_NB
    if form in ("flock", "shared"):
        fcntl.flock(fd, (fcntl.LOCK_SH if form == "shared" else fcntl.LOCK_EX) | now)
    elif form in ("posix", "ofd"):
        ofd = form == "ofd"
        whole = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        nowait, waiting = (37, 38) if ofd else (fcntl.F_SETLK, fcntl.F_SETLKW)
        fcntl.fcntl(fd, waiting if wait else nowait, whole)
    return fd


what, path, *forms = sys.argv[1:]
for form in forms:
    try:
        fd = claim(path, form, what == "wait")
    except OSError as error:
        print(errno.errorcode.get(error.errno, error.errno), end=" ", flush=True)
        continue
    if what == "hold":
        signal.pause()
    print(os.pread(fd, 99, 0).split()[0].decode() if what == "wait" else "ok", end=" ", flush=True)
    os.close(fd)
print()
