"""Agents: processes that do what a test tells them, one call at a time.

One such program runs for each test program. It forks an agent per request and never opens a file of the tree itself,
so no fork of it keeps a lease alive. Calls and answers are one JSON message each on a SOCK_SEQPACKET socket.
"""

import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import threading
import time
import traceback

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
LIBC = ctypes.CDLL(None, use_errno=True)


class Interrupted(OSError):
    """A caught signal ended a system call."""


def lock(fd, command, kind, start=0, length=0, whence=0):
    """fcntl(2) with a struct flock; the struct as the kernel gave it back."""
    answer = fcntl.fcntl(fd, command, struct.pack("hhqqi4x", kind, whence, start, length, 0))
    kind, whence, start, length, pid = struct.unpack("hhqqi4x", answer)
    return {"type": kind, "whence": whence, "start": start, "len": length, "pid": pid}


def read(fd, size=65536):
    """The content from the beginning."""
    return os.pread(fd, size, 0)


def os_read(fd, size):
    """The next of a stream."""
    return os.read(fd, size)


def poll(fd, mask, timeout_ms):
    """The returned events, 0 on a timeout."""
    poller = select.poll()
    poller.register(fd, mask)
    events = poller.poll(timeout_ms)
    return events[0][1] if events else 0


def on_signal(number, what):
    """`raise`: system calls end with EINTR; `ignore`; `block`; `default`."""

    def handler(number, frame):
        raise Interrupted(4, "interrupted")

    if what == "block":
        signal.pthread_sigmask(signal.SIG_BLOCK, [number])
    else:
        signal.signal(number, {"raise": handler, "ignore": signal.SIG_IGN, "default": signal.SIG_DFL}[what])


def die(number):
    os.kill(os.getpid(), number)
    signal.pause()


def threaded_exit(count, code):
    """Ends like a program with `count` busy threads that calls exit(3) without closing its files."""
    for number in range(count):
        threading.Thread(target=time.sleep if number % 2 else spin, args=(3600,), daemon=True).start()
    os._exit(code)


def spin(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


def mailbox(name):
    """A socket that receives descriptors by SCM_RIGHTS."""
    box = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    box.bind("\0" + name)
    MAILBOXES[name] = box


def send_fd(name, fd):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.connect("\0" + name)
        socket.send_fds(sender, [b"fd"], [fd])


def receive_fd(name):
    return socket.recv_fds(MAILBOXES[name], 16, 1)[1][0]


def spawn(argv, fds):
    """Starts a program that inherits the descriptors under their own numbers."""
    for fd in fds:
        os.set_inheritable(fd, True)
    try:
        return os.posix_spawnp(argv[0], argv, os.environ)
    finally:
        for fd in fds:
            os.set_inheritable(fd, False)


def script(source, **names):
    """Runs statements; the answer is what they leave in `result`."""
    scope = dict(globals(), result=None, **names)
    exec(source, scope)
    return scope["result"]


MAILBOXES = {}
CALLS = {
    f.__name__: f
    for f in (lock, read, os_read, poll, on_signal, die, threaded_exit, mailbox, send_fd, receive_fd, spawn)
}
CALLS.update(flock=fcntl.flock, lockf=fcntl.lockf, exit=os._exit)


def decode(value):
    """Bytes that are no text travel as {"hex": …}."""
    if isinstance(value, dict) and set(value) == {"hex"}:
        return bytes.fromhex(value["hex"])
    return value


def encode(value):
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if isinstance(value, (os.stat_result, os.statvfs_result)):
        return {name: getattr(value, name) for name in dir(value) if name.startswith(("st_", "f_"))}
    return value


def perform(name, arguments):
    if name == "script":
        return script(arguments[0], **(arguments[1] if len(arguments) > 1 else {}))
    function = CALLS.get(name) or getattr(os, name)
    keywords = arguments.pop() if arguments and isinstance(arguments[-1], dict) and "hex" not in arguments[-1] else {}
    return function(*map(decode, arguments), **keywords)


def serve(control):
    """An agent's life: until the test closes its socket."""
    while True:
        message, fds, _, _ = socket.recv_fds(control, 1 << 20, 1)
        if not message:
            os._exit(0)
        name, *arguments = json.loads(message)
        if name == "fork":
            child = os.fork()
            if child == 0:
                control.close()
                control = socket.socket(fileno=fds[0])
                continue
            os.close(fds[0])
            answer = {"ok": child}
        else:
            try:
                answer = {"ok": encode(perform(name, arguments))}
            except OSError as error:
                answer = {"errno": error.errno}
            except Exception:
                answer = {"panic": traceback.format_exc()}
        control.send(json.dumps(answer).encode())


def become(who):
    """What a fresh agent is: its ids, and that it does not outlive the test program."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.umask(who.get("umask", 0o022))
    if who["uid"]:
        os.setgroups(who["groups"])
        os.setresgid(who["gid"], who["gid"], who["gid"])
        os.setresuid(who["uid"], who["uid"], who["uid"])
    LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main():
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    while True:
        message, fds, _, _ = socket.recv_fds(control, 65536, 1)
        if not message:
            sys.exit(0)
        request = json.loads(message)
        if "wait" in request:
            try:
                pid, status = os.waitpid(request["wait"], os.WNOHANG)
                answer = {"status": status if pid else None}
            except ChildProcessError:
                answer = {"status": -1}
        else:
            pid = os.fork()
            if pid == 0:
                control.close()
                become(request)
                serve(socket.socket(fileno=fds[0]))
            os.close(fds[0])
            answer = {"pid": pid}
        control.send(json.dumps(answer).encode())


main()
