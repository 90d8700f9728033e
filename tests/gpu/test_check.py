"""The GPU check's script itself, on the virtual GPU."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.cuda import SMALL
from pagedkv.errors import DeviceError, UnsupportedModel
from tests.gpu import check, compare, cublas
from tests.gpu.isolate import Clock, attempt, has_failed, run_tasks
from tests.gpu.work import Work
from virtual_gpu import VirtualDriver
from virtual_gpu.cublas import VirtualCublas

# What a CUDA image with PyTorch may lack: the check does without. (The virtual GPU itself needs numba.)
HIDDEN = (
    "gguf",
    "google",
    "grpc",
    "grpc_health",
    "hypothesis",
    "nvmath",
    "opentelemetry",
    "prometheus_client",
)
RUN_WITHOUT = """
import runpy, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {hidden}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
runpy.run_module("tests.gpu.check", run_name="__main__", alter_sys=True)
"""


def run_check_without(hidden: tuple[str, ...], out: Path) -> tuple[dict[str, Any], list[str]]:
    """Run the script on the virtual GPU with these packages out of reach; return its JSON and its lines."""
    command = [sys.executable, "-c", RUN_WITHOUT.format(hidden=hidden), "--virtual", "--out", str(out)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(out.read_text())
    assert len(result["operations"]) > 90
    assert all(row["ok"] for row in result["correctness"] + result["operations"])
    assert {row["what"] for row in result["rows"]} == {"decode", "prefill", "write_kv", "copy_blocks"}
    return result, done.stdout.rstrip().splitlines()


def test_gpu_check_on_the_virtual_gpu_is_right_and_prints_its_table_last(tmp_path: Path):
    result, lines = run_check_without(HIDDEN, tmp_path / "check.json")
    assert [row["tokens_per_second"] > 0 for row in result["rows"] if "tokens_per_second" in row] == [True] * 3
    assert lines[-1].startswith("decode      2 at once")
    assert (tmp_path / "check.json").stat().st_size < 1 << 20


def test_gpu_check_without_a_tokenizers_packages_says_so_and_measures_the_rest(tmp_path: Path):
    result, lines = run_check_without((*HIDDEN, "tokenizers", "jinja2"), tmp_path / "check.json")
    assert "No module named" in result["not_measured"]["generation"]
    assert any(line.startswith("generation: not measured: ModuleNotFoundError") for line in lines)


def test_tasks_after_the_time_is_up_are_not_begun_and_no_failure():
    answers = dict(run_tasks(["bandwidth", "attention 0"], lambda task: 1.0, Clock(-1.0)))
    assert {answer["not_measured"] for answer in answers.values()} == {"the time was up"}
    assert check.is_right(answers)
    assert [row["seconds"] for row in check.assemble(answers, True)["rows"]] == [None, None]


def misbehave(task: str) -> Any:
    """A task that is right, or raises, or ends its process, or hangs; a failure spoils its process."""
    if task == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if task == "hang":
        time.sleep(1000)
    if task.startswith("raise"):
        misbehave.is_spoilt = True  # type: ignore[attr-defined]
        raise (ImportError if task == "raise missing" else DeviceError)(task)
    return "spoilt" if getattr(misbehave, "is_spoilt", False) else task


def test_a_task_that_fails_crashes_or_hangs_costs_only_itself():
    tasks = ["a", "die", "b", "raise", "c", "hang", "d"]
    answers = dict(run_tasks(tasks, misbehave, Clock(60), most_seconds=2))
    assert [answers[task] for task in "abcd"] == ["a", "b", "c", "d"]
    assert answers["die"]["not_measured"] == "the process ended with code -9"
    assert answers["raise"]["not_measured"].startswith("DeviceError: raise")
    assert answers["hang"]["not_measured"] == "not done in 2 s"
    assert [has_failed(answers[task]) for task in ("die", "raise", "hang", "a")] == [True, True, True, False]


def test_what_is_missing_leaves_its_process_alive():
    answers = dict(run_tasks(["raise missing", "a"], misbehave, Clock(60)))
    assert answers["a"] == "spoilt"  # by the first task: so the same process
    assert not has_failed(answers["raise missing"])


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has a GPU driver")
def test_gpu_check_without_a_gpu_says_why():
    with pytest.raises(SystemExit, match="no GPU here: no NVIDIA driver"):
        check.main([])


def test_a_result_that_differs_from_the_virtual_gpus_is_not_right(monkeypatch):
    rows = [{"operation": "add", "error": 1.0, "ok": False}]
    assert check.is_right({"operations": [], "bandwidth": 1.0})
    assert not check.is_right({"operations": rows})
    assert not check.is_right({"correctness 0": {"ok": False}})
    wanted = {"copy_blocks": np.zeros(4, np.uint8), "add": np.ones(3, np.float32), "attend tensor": np.ones(2)}
    given = {
        "copy_blocks": np.array([0, 0, 1, 0], np.uint8),
        "add": np.array([1, 1, np.nan]),
        "attend tensor": np.ones(2),
    }
    monkeypatch.setattr(compare, "results", lambda options: options)
    assert [row["ok"] for row in compare.compare(given, wanted)] == [False, False, True]


def test_a_reference_file_stands_for_the_virtual_gpu(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(compare, "results", lambda options: {"add": np.ones(3, np.float32)})
    path = tmp_path / "reference.npz"
    assert check.main(["--save-reference", str(path)]) == 0
    monkeypatch.setattr(compare, "results", lambda options: {"add": np.full(3, 2, np.float32)})
    rows = Work(virtual=True, reference=path).perform("operations")
    assert rows == [{"operation": "add", "error": 1.0, "ok": False}]


@pytest.mark.parametrize(
    ("error", "is_right"),
    [
        (ImportError("x"), True),
        (UnsupportedModel("no cuBLAS"), True),
        (DeviceError("x"), False),
        (ValueError("x"), False),
    ],
)
def test_a_part_that_is_not_there_is_no_failure_but_one_that_fails_is(error, is_right):
    def work():
        raise error

    part = attempt(work)
    assert str(error) in part["not_measured"]
    assert check.is_right({"generation": part}) == is_right
    assert check.is_right({"sdpa 0": part})  # a peer's failure is not ours


class FakeLibrary:
    """cuBLAS' C functions, which note their arguments and fail on demand."""

    def __init__(self):
        self.calls, self.status = [], 0
        for name in ("Create_v2", "Destroy_v2", "SetStream_v2", "SetWorkspace_v2", "GemmEx"):
            setattr(self, f"cublas{name}", self._function(name))

    def _function(self, name):
        def call(*args):
            self.calls.append((name, *args))
            return self.status

        return call


def test_cublas_over_ctypes_passes_a_products_arguments_as_the_library_wants_them():
    library = FakeLibrary()
    bindings = cublas.CtypesCublas(library)
    pointer, number = cublas._POINTER, cublas._INT
    assert len(library.cublasGemmEx.argtypes) == 19
    assert [at for at, kind in enumerate(library.cublasGemmEx.argtypes) if kind is pointer] == [0, 6, 7, 10, 13, 14]
    assert library.cublasGemmEx.argtypes[1] is number
    arguments = tuple(range(18))
    bindings.gemm_ex(99, *arguments)
    assert library.calls == [("GemmEx", 99, *arguments)]
    library.status = 13
    with pytest.raises(RuntimeError, match="cublasGemmEx: status 13"):
        bindings.gemm_ex(99, *arguments)


def test_every_name_of_cublas_that_the_backend_uses_is_in_each_stand_in():
    """Dense products call the bindings by these names, whichever they are."""
    source = (Path(__file__).parents[2] / "service/pagedkv/compute/cuda/dense_ops.py").read_text()
    driver = VirtualDriver(SMALL)
    for stand_in in (cublas.CtypesCublas(FakeLibrary()), VirtualCublas(driver)):
        missing = [name for name in re.findall(r"cublas\.(\w+)\(", source) if not hasattr(stand_in, name)]
        assert missing == [], type(stand_in)
