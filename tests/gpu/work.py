"""What the GPU check does, task by task, in a process that may end at any of them."""

from __future__ import annotations

import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from pagedkv.compute.cuda.compiler import Compiler, Target, choose_target
from pagedkv.compute.cuda.driver import Context, Driver, probe
from pagedkv.compute.cuda.kernels import all_variants, choose_attention, write_variant
from pagedkv.config import KvShape
from pagedkv.dtypes import DType
from tests.gpu import compare, cublas, peers, timing
from tests.gpu.problem import Problem, attention_error, correctness_problems

CORES_TOLERANCE, TENSOR_TOLERANCE = 5e-6, 2e-3  # a real GPU's exp2 and tanh err by a few units in the last place
DECODE_TOLERANCE = 5e-5  # in two parts of 16 bits; bfloat16's have 16 bits of mantissa together
_ROOT = Path(__file__).resolve().parents[2]


def timed_problems(tiny: bool) -> list[Problem]:
    """Return decode and prefill shapes."""
    if tiny:
        return [Problem((32, 32), (1, 1), 4, 2, 64), Problem((32,), (32,), 4, 2, 64)]
    decode = [(1, 4096), (16, 2048), (64, 2048), (64, 8192)]
    shapes = [Problem((n,) * b, (1,) * b, dtype=d) for d in (DType.FLOAT16, DType.BFLOAT16) for b, n in decode]
    shapes += [Problem((n,) * b, (1,) * b, dtype=DType.FLOAT8_E4M3) for b, n in ((16, 2048), (64, 8192))]
    shapes += [Problem((2048,) * 64, (1,) * 64, tensor_cores=False), Problem((2048,) * 16, (1,) * 16, 64, 8)]
    shapes += [Problem((2048,) * 16, (1,) * 16, 32, 32), Problem((1024,) * 16, (1,) * 16, 9, 3, 64)]
    return shapes + [Problem((n,), (n,), dtype=d) for d in (DType.FLOAT16, DType.BFLOAT16) for n in (2048, 8192)]


def virtual_options(schedule: str | int = "lazy") -> dict[str, Any]:
    """Return a backend's options for the virtual GPU."""
    tests = str(_ROOT / "tests")
    if tests not in sys.path:
        sys.path.insert(0, tests)
    from virtual_gpu import Profile, VirtualDriver
    from virtual_gpu.cublas import VirtualCublas

    driver = VirtualDriver(Profile(memory_bytes=64 << 20, host_bytes=64 << 20), schedule=schedule)
    return {"driver_module": driver, "cublas": VirtualCublas(driver), "emit_ptx": True}


def load_reference(path: Path | None) -> compare.Results:
    """Return the virtual GPU's results, from a file if there is one."""
    if path is None:
        return compare.results(virtual_options())
    with np.load(path) as stored:
        return dict(stored)


class Work:
    """Performs tasks by name, "kind" or "kind number"; opens the device with the first one that needs it.

    `virtual` is the tiny form on the virtual GPU. `reference` is a file of the virtual GPU's results, for a machine
    without what it needs.
    """

    def __init__(self, virtual: bool, model: Path | None = None, reference: Path | None = None) -> None:
        self.virtual, self._model, self._reference = virtual, model, reference
        self._flush, self._repeats = (1 << 12, 1) if virtual else (256 << 20, 15)
        self._origin = "computed by NumPy"

    def tasks(self) -> list[str]:
        """Return all tasks, the most important first."""
        kinds = ["compile", "bandwidth", "matrix_rate"]
        kinds += [f"correctness {at}" for at in range(len(correctness_problems(self.virtual)))]
        kinds += ["operations", "write_kv", "copy_blocks"]
        shapes = range(len(timed_problems(self.virtual)))
        kinds += [f"attention {at}" for at in shapes] + ["generation"]
        return kinds + [f"{kind} {at}" for kind in ("sdpa", "ordered", "flashinfer") for at in shapes]

    def perform(self, task: str) -> Any:
        """Do a task and return its result, of plain values."""
        kind, _, number = task.partition(" ")
        work = getattr(self, f"do_{kind}")
        return work(int(number)) if number else work()

    @cached_property
    def _options(self) -> dict[str, Any]:
        """A backend's options; the context is held from now on, or each backend would make its own."""
        options: dict[str, Any] = {}
        if self.virtual:
            options = virtual_options()
        else:
            options["cublas"], self._origin = cublas.load_cublas()
        self._held = Context(Driver(options.get("driver_module")))
        return options

    @property
    def _plain(self) -> dict[str, Any]:
        return {**self._options, "cublas": None}

    @cached_property
    def _torch(self) -> Any:
        return None if self.virtual else peers.load_torch()

    def do_device(self) -> dict[str, Any]:
        """Return the device's name and what stands for cuBLAS, or why there is no device."""
        found = probe(virtual_options()["driver_module"] if self.virtual else None)
        if not found.devices:
            return {"name": None, "reason": found.reason}
        assert self._options
        name = "virtual GPU" if self.virtual else found.devices[0].name
        return {"name": name, "cublas": self._origin, "driver_version": found.driver_version}

    def do_compile(self) -> dict[str, Any]:
        """Compile what the other tasks need, on all cores, into the cache on disk."""
        problems = [*correctness_problems(self.virtual), *timed_problems(self.virtual)]
        needed = {
            choose_attention(p.layout.shape, max(p.query_lens) * p.layout.shape.group_size, p.tensor_cores)
            for p in problems
        }
        needed |= {write_variant(p.layout.shape, source) for p in problems for source in (0, 1)}
        if not self.virtual:
            needed |= {v for dtype in DType for v in all_variants(KvShape(1, 8, 2, 64, dtype))}
        compiler = Compiler()
        chosen = choose_target(self._held_capability(), compiler.supported_archs())
        target = Target(chosen.arch, is_ptx=self.virtual or chosen.is_ptx)
        ordered = sorted(needed, key=lambda variant: variant.label)
        wrong = compiler.compile_all(ordered, target, lambda done, total, name: None)
        if wrong:
            raise next(iter(wrong.values()))
        return {"variants": len(needed), "compiled": compiler.num_compiled, "nvrtc": list(compiler.version)}

    def _held_capability(self) -> tuple[int, int]:
        assert self._options
        return self._held.info.capability

    def do_correctness(self, at: int) -> dict[str, Any]:
        """Return a problem's label, error and verdict."""
        problem = correctness_problems(self.virtual)[at]
        rows = max(problem.query_lens) * problem.layout.shape.group_size
        kernel = choose_attention(problem.layout.shape, rows, problem.tensor_cores).name
        tolerance = {"attend": CORES_TOLERANCE, "attend_decode": DECODE_TOLERANCE}.get(kernel, TENSOR_TOLERANCE)
        error = attention_error(problem, **self._plain)
        return {"problem": problem.label, "path": kernel, "error": error, "ok": bool(error <= tolerance)}

    def do_operations(self) -> list[dict[str, Any]]:
        """Return a row for each operation, compared with the virtual GPU's result; there with another order."""
        return compare.compare(virtual_options(7) if self.virtual else self._options, load_reference(self._reference))

    def do_bandwidth(self) -> float:
        """Return the bytes a second of a copy within the device, read and written."""
        size = 1 << 12 if self.virtual else 1 << 30
        return timing.bandwidth(timed_problems(self.virtual)[0], self._flush, self._repeats, size, **self._plain)

    def do_matrix_rate(self) -> float | None:
        """Return the operations a second of PyTorch's float16 product."""
        return peers.matrix_rate(self._torch, self._repeats)

    def do_write_kv(self) -> list[float]:
        """Return its times over a whole pool, shuffled and in order, and the bytes moved."""
        return timing.write_seconds(self._pool(), self._flush, self._repeats, **self._plain)

    def do_copy_blocks(self) -> list[float]:
        """Return its times over half a pool, shuffled and in order, and the bytes moved."""
        return timing.copy_seconds(self._pool(), self._flush, self._repeats, **self._plain)

    def _pool(self) -> Problem:
        return Problem((32,), (1,), 4, 2, 64) if self.virtual else Problem((32768,) * 4, (1,) * 4)

    def do_attention(self, at: int) -> float:
        """Return the seconds of a shape with a shuffled table."""
        return timing.attend_seconds(timed_problems(self.virtual)[at], self._flush, self._repeats, **self._plain)

    def do_ordered(self, at: int) -> float:
        """Return the seconds of a shape with an identity table: the rest is the price of paging."""
        problem = timed_problems(self.virtual)[at]
        ordered = Problem(**{**{f: getattr(problem, f) for f in problem.__dataclass_fields__}, "shuffled": False})
        return timing.attend_seconds(ordered, self._flush, self._repeats, **self._plain)

    def do_sdpa(self, at: int) -> float | None:
        """Return the seconds of PyTorch's attention on contiguous keys and values."""
        return peers.sdpa_seconds(self._torch, timed_problems(self.virtual)[at], self._repeats)

    def do_flashinfer(self, at: int) -> float | None:
        """Return the seconds of FlashInfer's paged decode."""
        return peers.flashinfer_seconds(self._torch, timed_problems(self.virtual)[at], self._repeats)

    def do_generation(self) -> dict[str, Any]:
        """Return end-to-end tokens a second."""
        from tests.gpu import generation  # needs what a bare CUDA image lacks: a tokenizer's packages

        return generation.measure(self.virtual, self._options, self._model)
