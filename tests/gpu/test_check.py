"""The GPU check's script itself, on the virtual GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from helpers.cuda import SMALL
from pagedkv.errors import DeviceError, UnsupportedModel
from tests.gpu import check, compare, cublas
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
    assert len(result["virtual"]) > 90
    assert all(row["ok"] for row in result["correctness"] + result["virtual"])
    assert {row["what"] for row in result["times"]["rows"]} == {"decode", "prefill", "write_kv", "copy_blocks"}
    return result, done.stdout.rstrip().splitlines()


def test_gpu_check_on_the_virtual_gpu_is_right_and_prints_its_table_last(tmp_path: Path):
    result, lines = run_check_without(HIDDEN, tmp_path / "check.json")
    assert [row["tokens_per_second"] > 0 for row in result["generation"]["rows"]] == [True] * 3
    assert lines[-1].startswith("decode      2 at once")
    assert (tmp_path / "check.json").stat().st_size < 1 << 20


def test_gpu_check_without_a_tokenizers_packages_says_so_and_measures_the_rest(tmp_path: Path):
    result, lines = run_check_without((*HIDDEN, "tokenizers", "jinja2"), tmp_path / "check.json")
    assert "No module named" in result["generation"]["not_measured"]
    assert any(line.startswith("generation: not measured: ModuleNotFoundError") for line in lines)


def test_attention_shapes_are_left_out_and_counted_when_the_time_is_up(capsys):
    times = check.time_all(check.virtual_options(), True, check.Clock(-1.0))
    assert {row["what"] for row in times["rows"]} == {"write_kv", "copy_blocks"}
    check.print_report(
        {"correctness": [], "virtual": [], "cublas": "", "times": times, "generation": {"not_measured": "no time"}}
    )
    printed = capsys.readouterr().out
    assert "attention shapes left out, for the time was up: 2" in printed
    assert "generation: not measured: no time" in printed


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has a GPU driver")
def test_gpu_check_without_a_gpu_says_why():
    with pytest.raises(SystemExit, match="no GPU here: cuInit"):
        check.main([])


def test_a_result_that_differs_from_the_virtual_gpus_is_not_right(monkeypatch):
    rows = [{"operation": "add", "error": 1.0, "ok": False}]
    assert check.is_right({"correctness": [], "virtual": []})
    assert not check.is_right({"correctness": [], "virtual": rows})
    assert not check.is_right({"correctness": [{"ok": False}], "virtual": []})
    wanted = {"copy_blocks": np.zeros(4, np.uint8), "add": np.ones(3, np.float32), "attend tensor": np.ones(2)}
    given = {
        "copy_blocks": np.array([0, 0, 1, 0], np.uint8),
        "add": np.array([1, 1, np.nan]),
        "attend tensor": np.ones(2),
    }
    monkeypatch.setattr(compare, "results", lambda options: options)
    assert [row["ok"] for row in compare.compare(given, wanted)] == [False, False, True]


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

    part = check.attempt(work)
    assert str(error) in part["not_measured"]
    assert check.is_right({"correctness": [], "virtual": [], "generation": part}) == is_right


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
