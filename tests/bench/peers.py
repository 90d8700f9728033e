"""The peers' own environment (.venv-peers) and the subprocess in which a peer is timed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".venv-peers"
TORCH = "torch==2.13.0"


def make_environment() -> Path:
    """Return the Python of the peers' environment; make it, with PyTorch in it, if it is not there."""
    python = FOLDER / "bin" / "python"
    probe = [str(python), "-c", "import torch"]
    if not python.exists() or subprocess.run(probe, capture_output=True, check=False).returncode:
        print(f"Installing {TORCH} into {FOLDER.name} ...", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
        pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, TORCH, "numpy"], check=True)
    return python


class TorchPeer:
    """PyTorch's scaled_dot_product_attention in its subprocess."""

    def __init__(self) -> None:
        command = [str(make_environment()), str(Path(__file__).with_name("attention_peer.py"))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.name = self._read()["name"]

    def prepare(self, shape: dict[str, Any], num_threads: int) -> None:
        """Build the tensors of a shape and run once, untimed."""
        self._ask({"shape": shape, "num_threads": num_threads})

    def seconds(self) -> float:
        """Return the time of one call."""
        return float(self._ask({})["seconds"])

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the peer's process ended")
        return dict(json.loads(line))
