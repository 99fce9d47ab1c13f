"""What a test of a foreign program came to, and how each test runner says so."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass
class Outcome:
    test: str
    result: str
    message: str = ""


class Broken(Exception):
    """The program could not be fetched, built or run, or what it printed was not understood."""


def one_line(text, most=200):
    return " ".join((text or "").split())[:most]


def junit(path):
    """pytest's and CPython's XML. A test with a failure and an error in its teardown counts once."""
    outcomes = {}
    try:
        cases = list(ElementTree.parse(path).iter("testcase"))
    except (OSError, ElementTree.ParseError) as error:
        raise Broken(f"no report: {error}") from error
    for case in cases:
        # A test's name in full, without what is random in it.
        name = f"{case.get('classname')}::{case.get('name')}" if case.get("classname") else case.get("name")
        name = re.sub(r"^(test\.)", "", name)
        result, message = PASSED, ""
        for tag, value in (("skipped", SKIPPED), ("error", FAILED), ("failure", FAILED)):
            found = case.find(tag)
            if found is not None:
                result, message = value, one_line(found.get("message") or found.text)
        if case.get("result") == "skipped":
            result = SKIPPED
        known = outcomes.get(name)
        if known is None or known.result == PASSED:
            outcomes[name] = Outcome(name, result, message)
    return list(outcomes.values())


def go_json(text):
    """`go test -json`: events of tests; the output of one that failed is its message. gocheck says its own in there."""
    said, outcomes = {}, []
    for line in text.splitlines():
        if not line.startswith("{"):
            continue
        event = json.loads(line)
        if "Test" not in event:
            continue
        name = f"{event['Package'].rsplit('/', 1)[-1]}::{event['Test']}"
        if event["Action"] == "output":
            said[name] = said.get(name, "") + event["Output"]
            check = re.match(r"(PASS|FAIL|SKIP): \S+: (\S+)", event["Output"])
            if check:
                result = {"PASS": PASSED, "FAIL": FAILED, "SKIP": SKIPPED}[check[1]]
                outcomes.append(Outcome(f"{name}::{check[2]}", result, one_line(said[name]) if result == FAILED else ""))
        elif event["Action"] in ("pass", "fail", "skip"):
            result = {"pass": PASSED, "fail": FAILED, "skip": SKIPPED}[event["Action"]]
            lines = [l for l in said.get(name, "").splitlines() if not re.match(r"\s*(===|---)", l)]
            outcomes.append(Outcome(name, result, one_line(" ".join(lines)) if result == FAILED else ""))
    return outcomes


def libtest(text):
    """Rust's test harness: a line for each test; a panic's text is the message."""
    outcomes = []
    panics = dict(re.findall(r"^---- (\S+) stdout ----\n(.*?)(?=\n\n|\n---- |\Z)", text, re.S | re.M))
    for name, result in re.findall(r"^test (\S+)(?: - should panic)? \.\.\. (ok|FAILED|ignored)", text, re.M):
        result = {"ok": PASSED, "FAILED": FAILED, "ignored": SKIPPED}[result]
        panic = "\n".join(l for l in panics.get(name, "").splitlines() if "RUST_BACKTRACE" not in l)
        outcomes.append(Outcome(name, result, one_line(panic) if result == FAILED else ""))
    return outcomes


def jest(path):
    try:
        with open(path, encoding="utf-8") as report:
            files = json.load(report)["testResults"]
    except (OSError, ValueError) as error:
        raise Broken(f"no report: {error}") from error
    outcomes = []
    for file in files:
        where = file["name"].rsplit("/", 1)[-1].removesuffix(".test.js")
        if not file["assertionResults"]:
            outcomes.append(Outcome(f"{where}::", FAILED, one_line(file.get("message"))))
        for test in file["assertionResults"]:
            result = {"passed": PASSED, "failed": FAILED}.get(test["status"], SKIPPED)
            message = re.sub(r"\x1b\[[0-9;]*m", "", " ".join(test.get("failureMessages") or []))
            outcomes.append(Outcome(f"{where}::{test['fullName']}", result, one_line(message)))
    return outcomes


def util_linux(text):
    """util-linux's test library: a line for each subtest."""
    found = re.findall(r"^\s*: (\S+)\s*\.\.\. (OK|FAILED|SKIPPED)(.*)$", text, re.M)
    results = {"OK": PASSED, "FAILED": FAILED, "SKIPPED": SKIPPED}
    return [Outcome(name, results[result], one_line(rest) if result == "FAILED" else "") for name, result, rest in found]


def pjdfstest(text):
    """pjdfstest: `name  \\t result`, and what went wrong in the lines below it."""
    outcomes = []
    for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines():
        found = re.match(r"^([a-z0-9_]+(?:::[A-Za-z0-9_]+)+)\s+(ok|FAILED|skipped)\b(.*)$", line)
        if found:
            result = {"ok": PASSED, "FAILED": FAILED, "skipped": SKIPPED}[found[2]]
            outcomes.append(Outcome(found[1], result))
        elif outcomes and outcomes[-1].result == FAILED and line.strip():
            outcomes[-1].message = one_line(f"{outcomes[-1].message} {line}")
    return outcomes
