"""Tests run against a copy of the tree, as it is or with one fault planted. The checkout is never changed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from virtual_gpu.planted.faults import ROOT, Fault

PARTS = ("service", "cudasrc", "tests", "pyproject.toml")
MOST_SECONDS = 600  # of one run of tests; a fault may hang


@dataclass(frozen=True)
class Outcome:
    """How a fault fared: "caught", "not caught", or "broken" where the trial itself says nothing."""

    verdict: str
    seconds: float
    detail: str = ""


class Tree:
    """A copy of the sources. Compiled kernels go to `cache`, which several trees may share."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.root, self._cache = folder, cache
        folder.mkdir(parents=True)
        for part in PARTS:
            source, target = ROOT / part, folder / part
            shutil.copytree(source, target) if source.is_dir() else shutil.copy2(source, target)

    def run(self, tests: Iterable[str], seconds: float = MOST_SECONDS) -> tuple[int, str]:
        """Return pytest's exit code (0 passed, 1 failed, more: nothing learnt) and output; the first failure ends it."""
        paths = os.pathsep.join([str(self.root / "service"), str(self.root / "tests")])
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1"}
        environment["XDG_CACHE_HOME"] = str(self._cache)
        command = [sys.executable, "-m", "pytest", "-x", "--durations=0", "-p", "no:cacheprovider", "-rN", *tests]
        try:
            done = subprocess.run(
                command, cwd=self.root, env=environment, capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return 124, f"the tests still ran after {seconds:.0f} s"
        return done.returncode, done.stdout + done.stderr

    def attempt(self, fault: Fault) -> Outcome:
        """Plant the fault, run its tests, and take the fault out again."""
        if fault.occurrences(self.root) != 1:
            return Outcome("broken", 0.0, f"the text is {fault.occurrences(self.root)} times in {fault.file}")
        fault.plant(self.root)
        start = time.monotonic()
        try:
            code, output = self.run(fault.tests)
        finally:
            shutil.copy2(ROOT / fault.file, self.root / fault.file)
        return judge(code, output, time.monotonic() - start)


def judge(code: int, output: str, seconds: float) -> Outcome:
    """Return what a run of a fault's tests says of them."""
    if "does not compile with" in output or "SyntaxError" in output:
        return Outcome("broken", seconds, "the changed source does not compile")
    if code == 0:
        return Outcome("not caught", seconds)
    if code != 1:
        return Outcome("broken", seconds, f"pytest ended with {code}: {output.strip().splitlines()[-1:]}")
    failed = [line for line in output.splitlines() if line.startswith("E ")]
    return Outcome("caught", seconds, failed[0][1:].strip() if failed else "")
