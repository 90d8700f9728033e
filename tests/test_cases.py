"""tests/cases.md tells the truth: a case that says `test` has one, and a case that gives a reason has none."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parent
ROW = re.compile(r"^\| ([A-Z]{2}-\d\d) \| [^|]+ \| .+ \| ([^|]+) \|$", re.MULTILINE)
ID_IN_NAME = re.compile(r"(ba|pc|kn|sc|sd|gn|tk|gr|mt|ld|rt|nc|rl|cu)_?(\d\d)(?=_|$)")


def find_tested() -> set[str]:
    names = [name for path in TESTS.rglob("test_*.py") for name in re.findall(r"def (test_\w+)", path.read_text())]
    return {f"{kind.upper()}-{number}" for name in names for kind, number in ID_IN_NAME.findall(name)}


def test_cases_each_has_a_test_or_a_reason():
    listed = dict(ROW.findall((TESTS / "cases.md").read_text()))
    tested = find_tested()
    assert len(listed) > 100
    assert {name for name, status in listed.items() if status == "test"} == tested & set(listed)
    assert tested <= set(listed), "a test names a case that the list does not have"
