"""The failures that are known, and why: reads `expected.txt` and judges outcomes by it.

An unindented line opens a group: `PROGRAM PLACE WHY`, where PLACE is `tree`, `plain` (any other directory) or `any`. The
indented lines below it are its tests; `*` stands for anything. A test in a group has to fail there, or to be skipped;
one marked `~` may pass as well (it depends on timing).
"""

import re
from dataclasses import dataclass, field

from outcome import FAILED, PASSED, one_line


@dataclass
class Known:
    pattern: re.Pattern
    text: str
    why: str
    may_pass: bool
    seen: bool = False


@dataclass
class Verdict:
    # Each: test, message, why (None: nobody expects it).
    failures: list = field(default_factory=list)
    unexpected: list = field(default_factory=list)


class Table:
    def __init__(self, path, place):
        self.known = {}
        group = None
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            if not line[0].isspace():
                fields = line.split(None, 2)
                if len(fields) != 3 or fields[1] not in ("tree", "plain", "any"):
                    raise SystemExit(f"{path}:{number}: not `PROGRAM tree|plain|any WHY`: {line}")
                group = fields if fields[1] in ("any", place) else None
                if fields[1] != "plain" and not re.search(r"contract §\d|everywhere:", fields[2]):
                    raise SystemExit(f"{path}:{number}: which line of the contract? {line}")
                continue
            if group is None:
                continue
            test = line.strip()
            may_pass = test.startswith("~")
            test = test.lstrip("~ ")
            pattern = re.compile(".*".join(map(re.escape, test.split("*"))) + r"\Z", re.S)
            self.known.setdefault(group[0], []).append(Known(pattern, test, group[2], may_pass))

    def judge(self, program, outcomes):
        verdict = Verdict()
        known = self.known.get(program, [])
        for one in outcomes:
            entry = next((entry for entry in known if entry.pattern.match(one.test)), None)
            if entry:
                entry.seen = True
            if one.result == FAILED:
                verdict.failures.append({"test": one.test, "message": one.message, "why": entry and entry.why})
                if not entry:
                    verdict.unexpected.append(f"{one.test} fails: {one.message}")
            elif one.result == PASSED and entry and not entry.may_pass:
                verdict.unexpected.append(f"{one.test} passes, though: {entry.why}")
        if outcomes:
            gone = [entry.text for entry in known if not entry.seen]
            verdict.unexpected += [f"{text} is no test of this program, but in expected.txt" for text in gone]
        return verdict


def text(name, report):
    lines = [f"{name}: {report['passed']} passed, {report['failed']} failed, {report['skipped']} skipped "
             f"({report['seconds']} s)"]
    if report["broken"]:
        lines.append(f"  BROKEN: {report['broken']}")
    reasons = {}
    for failure in report["failures"]:
        reasons.setdefault(failure["why"] or "NOT EXPECTED", []).append(failure)
    for why, failures in reasons.items():
        lines.append(f"  {why}")
        for failure in failures:
            message = "" if failure["why"] else f": {one_line(failure['message'])}"
            lines.append(f"    {failure['test']}{message}")
    lines += [f"  NOT EXPECTED: {line}" for line in report["unexpected"] if " fails: " not in line]
    return "\n".join(lines)
