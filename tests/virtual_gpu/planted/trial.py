"""Tests run against a copy of the tree, as it is or with one fault planted. The checkout is never changed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
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
    """A copy of the sources, and a warm process in it. Compiled kernels go to `cache`, which trees may share."""

    def __init__(self, folder: Path, cache: Path) -> None:
        self.root = folder
        folder.mkdir(parents=True)
        for part in PARTS:
            source, target = ROOT / part, folder / part
            shutil.copytree(source, target) if source.is_dir() else shutil.copy2(source, target)
        paths = os.pathsep.join([str(folder / "service"), str(folder / "tests")])
        environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", "XDG_CACHE_HOME": str(cache)}
        command = [sys.executable, "-m", "virtual_gpu.planted.warm"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._warm = subprocess.Popen(command, cwd=folder, env=environment, **pipes)

    def run(self, tests: Iterable[str], seconds: float = MOST_SECONDS) -> tuple[int, str]:
        """Return pytest's exit code (0 passed, 1 failed, else nothing learnt) and output; the first failure ends it."""
        assert self._warm.stdin is not None
        output = self.root / "output.txt"
        arguments = ["-x", "--durations=0", "-p", "no:cacheprovider", "-rN", *tests]
        print(json.dumps([arguments, str(output)]), file=self._warm.stdin, flush=True)
        child = int(self._answer())
        timer = threading.Timer(seconds, os.killpg, (child, signal.SIGKILL))
        timer.start()
        code = int(self._answer())
        timer.cancel()
        return code, output.read_text(errors="replace")

    def _answer(self) -> str:
        assert self._warm.stdout is not None
        line = self._warm.stdout.readline().split()
        if not line:
            raise RuntimeError("the process that runs the tests has ended")
        return line[1]

    def close(self) -> None:
        """End the warm process."""
        assert self._warm.stdin is not None
        assert self._warm.stdout is not None
        self._warm.stdin.close()
        self._warm.wait()
        self._warm.stdout.close()

    def __enter__(self) -> Tree:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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
    if code < 0:
        return Outcome("broken", seconds, f"the tests were ended by signal {-code}; they may run for ever")
    if code != 1:
        return Outcome("broken", seconds, f"pytest ended with {code}: {output.strip().splitlines()[-1:]}")
    failed = [line for line in output.splitlines() if line.startswith("E ")]
    return Outcome("caught", seconds, failed[0][1:].strip() if failed else "")
