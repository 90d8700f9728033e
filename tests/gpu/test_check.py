"""The GPU check's script itself, on the virtual GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_gpu_check_on_the_virtual_gpu_is_right_and_prints_its_table_last(tmp_path: Path):
    out = tmp_path / "check.json"
    command = [sys.executable, "-m", "tests.gpu.check", "--virtual", "--out", str(out)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert all(row["ok"] for row in result["correctness"])
    assert {row["what"] for row in result["times"]["rows"]} == {"decode", "prefill", "write_kv", "copy_blocks"}
    assert done.stdout.rstrip().splitlines()[-1].startswith("copy_blocks")
