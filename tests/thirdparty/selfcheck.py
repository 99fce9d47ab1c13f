"""Programs without a suite of their own that runs elsewhere: what each promises, asked of it.

A second one is kept out while the first has the path; it is let in when the first was killed.
"""

import clients
import matrix
from outcome import FAILED, PASSED, Broken, Outcome, one_line


def check(name):
    def run(room):
        ready, missing = clients.ready(room.cache, None, [name])
        if missing:
            raise Broken(missing[name])
        client, path = ready[0], room.dir / "lock"
        outcomes = []

        def say(test, good, message=""):
            outcomes.append(Outcome(test, PASSED if good else FAILED, "" if good else one_line(message)))

        say("takes-and-lets-go", *matrix.attempt(client, path, ""))
        matrix.clear(path)
        held = matrix.Holder(client, path, "")
        try:
            say("holds", held.has_it, held.said)
            got, _ = matrix.attempt(client, path, "")
            say("keeps-a-second-out", held.has_it and not got, "it gets in" if held.has_it else "it does not hold")
        finally:
            held.kill()
        say("free-after-kill-9", *(matrix.attempt(client, path, "") if held.has_it else (False, "it does not hold")))
        matrix.clear(path)
        return outcomes

    return run


PROGRAMS = {
    "java": (check("java"), "Java's FileChannel.tryLock: takes, keeps out, is free after kill -9"),
    "perl": (check("perl flock"), "Perl's flock: the same"),
    "lckdo": (check("lckdo"), "Debian moreutils, lckdo: the same"),
    "lockfile": (check("lockfile"), "Debian procmail, lockfile: the same"),
    "dotlockfile": (check("dotlockfile"), "Debian liblockfile-bin, dotlockfile: the same"),
}
