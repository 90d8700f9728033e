"""Start the command line in a process of its own, as a person would."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

PAGEDKV = Path(sys.executable).parent / "pagedkv"


class ServiceProcess:
    """`pagedkv serve ...` on free ports; entering waits until it says that it is ready."""

    def __init__(self, *arguments: str, start_seconds: float = 800.0, program: Sequence[str] = (str(PAGEDKV),)) -> None:
        self._command = [*program, *arguments, "--port", "0", "--metrics-port", "0"]
        self._start_seconds = start_seconds
        self.output: list[str] = []
        self.address = ""
        self.metrics_url = ""

    def __enter__(self) -> ServiceProcess:
        self.process = subprocess.Popen(self._command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._ready.wait(self._start_seconds) or not self.address:
            self.__exit__()
            raise RuntimeError("the service did not start:\n" + "".join(self.output))
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal and return the exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(180)
        finally:
            self.process.kill()
            self._reader.join(10)
            assert self.process.stderr is not None
            self.process.stderr.close()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.output.append(line)
            if found := re.search(r"gRPC on (\S+)", line):
                self.address = found.group(1)
            if found := re.search(r"page map on (http://\S+?)/?\s*$", line):
                self.metrics_url = found.group(1)
                self._ready.set()
        self._ready.set()
