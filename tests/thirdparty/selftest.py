"""Of the judge itself: `expected.txt` is well formed, and both an unexpected failure and an unexpected pass are told."""

import tempfile
from pathlib import Path

import expected
import main
from outcome import FAILED, PASSED, SKIPPED, Outcome

TABLE = """\
# a comment
prog tree contract §4: so it is
    known
    group::*
    ~ sometimes
prog plain as root
    beside
"""


def judged(place, *outcomes):
    with tempfile.TemporaryDirectory() as where:
        path = Path(where) / "expected.txt"
        path.write_text(TABLE, encoding="utf-8")
        return expected.Table(path, place).judge("prog", [Outcome(*one) for one in outcomes])


FULL = [("known", FAILED), ("group::a", FAILED), ("sometimes", PASSED), ("other", PASSED)]

assert judged("tree", *FULL).unexpected == []
assert [f["why"] for f in judged("tree", *FULL).failures] == ["contract §4: so it is"] * 2
assert judged("tree", *FULL, ("new", FAILED)).unexpected, "a failure that nobody knows"
assert judged("tree", ("known", PASSED), *FULL[1:]).unexpected, "a known failure that passes"
assert judged("tree", *FULL, ("group::b", PASSED)).unexpected, "one of a group that passes"
assert judged("tree", *FULL[1:]).unexpected, "a known failure that is no test any more"
assert judged("tree", ("known", SKIPPED), *FULL[1:]).unexpected == []
assert judged("tree", *FULL[:2], ("sometimes", FAILED)).unexpected == []
assert judged("plain", ("beside", FAILED), ("known", PASSED)).unexpected == []
assert judged("plain", ("beside", FAILED), ("known", FAILED)).unexpected, "a tree's failure elsewhere"

known = {**main.PROGRAMS, **main.selfcheck.PROGRAMS}
for place in ("tree", "plain"):
    table = expected.Table(Path("expected.txt"), place)
    assert table.known, f"nothing is expected on a {place}"
    strangers = set(table.known) - set(known)
    assert not strangers, f"no such programs: {strangers}"
