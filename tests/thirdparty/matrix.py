"""Every holder against every contender: is the contender kept out, and what is left after `kill -9` of the holder?"""

import os
import signal
import subprocess
import time
from pathlib import Path

KEPT_OUT, LET_IN, REFUSED = "out", "IN", "-"
# How often to try, and after how long a pause, before what a dead holder left counts as stuck.
TRIES, PAUSE = 15, 0.2


class Holder:
    """A client that has a path, in a session of its own."""

    def __init__(self, client, path, key):
        where = key if client.by_key else str(path)
        self.child = subprocess.Popen([*client.hold, where], env=dict(os.environ, **client.env), text=True,
                                      stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                      start_new_session=True)
        self.has_it = self.child.stdout.readline().strip() == "held"
        self.said = "" if self.has_it else self.child.stderr.read().strip()

    def kill(self):
        """Ends all of it by SIGKILL, and waits for the end of the process that was started."""
        try:
            os.killpg(self.child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        # The pipe ends with the last process that has it.
        self.child.communicate()


def attempt(client, path, key):
    """Whether the client gets the path; what it said if not."""
    where = key if client.by_key else str(path)
    try:
        done = subprocess.run([*client.attempt, where], env=dict(os.environ, **client.env), stdin=subprocess.DEVNULL,
                              capture_output=True, text=True, errors="replace", timeout=60, check=False)
    except subprocess.TimeoutExpired:
        return False, "no answer in 60 s"
    return done.returncode == 0, (done.stderr or done.stdout).strip()


def clear(path):
    """Takes away what a client left. A key that is free has no file; one that is held is a fault that shows later."""
    try:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()
    except OSError:
        pass


class Matrix:
    """The answers: `cells[holder][contender]`, `left[holder]`, and `refused[client]` with its message."""

    def __init__(self, clients, directory, key_prefix, tell):
        self.clients, self.dir, self.prefix, self.tell = clients, Path(directory), key_prefix, tell
        self.cells, self.left, self.refused = {}, {}, {}
        self.count = 0

    def fresh(self):
        self.count += 1
        name = f"k{self.count}"
        return self.dir / name, f"{self.prefix}/{name}"

    def run(self):
        for client in self.clients:
            path, key = self.fresh()
            got, said = attempt(client, path, key)
            if not got:
                self.refused[client.name] = said.splitlines()[-1] if said else "no"
            clear(path)
        for holder in self.clients:
            self.tell(f"{holder.name} holds")
            row = self.cells[holder.name] = {}
            if holder.name in self.refused:
                row.update({other.name: REFUSED for other in self.clients})
                self.left[holder.name] = "refused"
                continue
            place, held = None, None
            for other in self.clients:
                if other.name in self.refused:
                    row[other.name] = REFUSED
                    continue
                if held is None:
                    place = self.fresh()
                    held = Holder(holder, *place)
                got, _ = attempt(other, *place)
                row[other.name] = LET_IN if got else KEPT_OUT
                if got and other.name != holder.name:
                    # It may have taken away what the holder made.
                    held.kill()
                    clear(place[0])
                    held = None
            if held:
                held.kill()
                clear(place[0])
            self.left[holder.name] = self.after_kill(holder)
        return self

    def after_kill(self, client):
        path, key = self.fresh()
        held = Holder(client, path, key)
        if not held.has_it:
            held.kill()
            return f"does not hold: {held.said}"
        held.kill()
        began = time.monotonic()
        for tries in range(TRIES):
            if attempt(client, path, key)[0]:
                clear(path)
                return "free at once" if tries == 0 else f"free after {time.monotonic() - began:.1f} s"
            time.sleep(PAUSE)
        clear(path)
        return "stuck"

    def text(self):
        names = [client.name for client in self.clients]
        width = max(map(len, names)) + 1
        lines = [f"{'holder':<{width + 3}} {' '.join(f'{i + 1:>3}' for i in range(len(names)))}  after kill -9"]
        for i, name in enumerate(names):
            row = " ".join(f"{self.cells[name][other]:>3}" for other in names)
            lines.append(f"{i + 1:>2} {name:<{width}} {row}  {self.left[name]}")
        lines.append("out: the contender is kept out; IN: it gets in; -: refused here, in every case")
        lines += [f"refused: {name}: {said}" for name, said in self.refused.items()]
        return "\n".join(lines)

    def json(self):
        return {"cells": self.cells, "after_kill": self.left, "refused": self.refused}
