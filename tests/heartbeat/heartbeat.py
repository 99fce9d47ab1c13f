"""A service that runs once per host: it owns a key, beats into its note, and stops by itself when it lost the lease.

    heartbeat.py start TREE KEY INTERVAL GATE STOP   one starter: waits for the file GATE, ends when STOP is there
    heartbeat.py rounds TREE KEY STARTERS ROUNDS     many starters at the same instant, many times
    heartbeat.py read TREE KEY STOP                  polls the file; every record must be whole

Each prints JSON lines. Exit codes: 0 owner told to stop, or not the owner; 3 the owner lost its lease; 1 anything wrong.
"""

import errno
import json
import os
import sys
import time
import zlib


def note(beat):
    """One beat: its parts belong together, and no two beats have the same length."""
    body = f"{os.getpid()}:{beat}:" + "x" * (beat * 37 % 3000)
    return f"{body}:{zlib.crc32(body.encode())}".encode()


def own(tree, key):
    """A handle that owns the key, or None and who does."""
    try:
        return os.open(f"{tree}/claims/{key}", os.O_RDWR | os.O_CREAT | os.O_EXCL), None
    except FileExistsError:
        with open(f"{tree}/status/{key}") as file:
            return None, json.load(file)["holder"]["pid"]


def beats(fd, until, interval):
    """Beats until told to stop; the number of beats, and whether the lease is still there."""
    beat = 0
    while not (beat and until()):
        try:
            os.write(fd, note(beat))
        except OSError as error:
            if error.errno == errno.ESTALE:
                return beat, False
            raise
        beat += 1
        time.sleep(interval)
    return beat, True


def say(out, **what):
    os.write(out, (json.dumps(dict(pid=os.getpid(), **what)) + "\n").encode())


def serve(tree, key, interval, until, out):
    fd, owner = own(tree, key)
    if fd is None:
        say(out, role="bystander", owner=owner)
        return 0
    say(out, role="owner", epoch=int(os.pread(fd, 4096, 0).split(b"\n")[0]))
    count, kept = beats(fd, until, interval)
    say(out, role="kept" if kept else "lost", beats=count)
    return 0 if kept else 3


def start(tree, key, interval, gate, stop):
    while not os.path.exists(gate):
        pass
    return serve(tree, key, float(interval), lambda: os.path.exists(stop), 1)


def at_once(tree, key, starters):
    """One round: forks the starters, opens the gate, and checks what they say."""
    gate, stop, reports = os.pipe(), os.pipe(), os.pipe()
    pids = []
    for _ in range(starters):
        pid = os.fork()
        if pid == 0:
            os.close(gate[1])
            os.close(stop[1])
            os.read(gate[0], 1)
            os.set_blocking(stop[0], False)

            def told():
                try:
                    return os.read(stop[0], 1) == b""
                except BlockingIOError:
                    return False

            try:
                os._exit(serve(tree, key, 0, told, reports[1]))
            except BaseException as error:
                say(reports[1], role="broken", error=repr(error))
                os._exit(1)
        pids.append(pid)
    for fd in (gate[0], stop[0], reports[1], gate[1]):
        os.close(fd)
    with os.fdopen(reports[0]) as lines:
        said = [json.loads(lines.readline()) for _ in range(starters)]
        os.close(stop[1])
        said += [json.loads(line) for line in lines]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return said, codes


def rounds(tree, key, starters, count):
    starters, count = int(starters), int(count)
    total = 0
    for number in range(1, count + 1):
        said, codes = at_once(tree, key, starters)
        owners = [line for line in said if line["role"] == "owner"]
        bystanders = [line for line in said if line["role"] == "bystander"]
        kept = [line for line in said if line["role"] == "kept"]
        right = (
            len(owners) == 1
            and owners[0]["epoch"] == number
            and len(bystanders) == starters - 1
            and all(line["owner"] == owners[0]["pid"] for line in bystanders)
            and [line["pid"] for line in kept] == [owners[0]["pid"]]
            and codes == [0] * starters
        )
        if not right:
            say(1, wrong=number, said=said, codes=codes)
            return 1
        total += kept[0]["beats"]
        say(1, right=number)
    say(1, rounds=count, beats=total)
    return 0


def whole(record):
    """The note of a record, when record and note are whole and belong together; '' while there is no note."""
    lines = record.decode().split("\n")
    int(lines[0])
    fields = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
    text = fields.get("note", "")
    if text:
        body, checksum = text.rsplit(":", 1)
        assert int(checksum) == zlib.crc32(body.encode()), f"torn note: {text[:60]!r}"
        pid = body.split(":")[0]
        assert pid in fields["holder"], f"the note of {pid} under the holder {fields['holder']!r}"
    assert lines[-1] == "" and "state" in fields and "expires" in fields, f"not whole: {record[:200]!r}"
    return text


def read(tree, key, stop):
    seen, records = set(), 0
    while not os.path.exists(stop):
        try:
            with open(f"{tree}/claims/{key}", "rb") as file:
                record = file.read()
            with open(f"{tree}/status/{key}", "rb") as file:
                status = json.loads(file.read())
        except FileNotFoundError:
            continue
        seen.add(whole(record)[:20])
        text = status["note"] or ""
        if text:
            body, checksum = text.rsplit(":", 1)
            assert int(checksum) == zlib.crc32(body.encode()), f"torn status: {text[:60]!r}"
        records += 1
    say(1, records=records, different=len(seen))
    return 0


if __name__ == "__main__":
    sys.exit({"start": start, "rounds": rounds, "read": read}[sys.argv[1]](*sys.argv[2:]))
