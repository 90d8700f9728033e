"""`./run gpu-check`: kernels on a real GPU against the oracle and the virtual GPU, then times. The table comes last.

Needs cuda-python, NVRTC and numpy; the peers need PyTorch, whole generations need the packages of a tokenizer. What
is missing is said in the place of its figures. `--virtual` runs a tiny form on the virtual GPU, which tests this
script and says nothing about speed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_ROOT = Path(__file__).resolve().parents[2]
for _path in (str(_ROOT / "service"), str(_ROOT)):
    if _path not in sys.path:
        sys.path.insert(0, _path)
try:
    import ml_dtypes  # noqa: F401
except ImportError:  # a bare image: bfloat16 arrays never leave the device here
    _shim = types.ModuleType("ml_dtypes")
    _shim.bfloat16 = np.dtype("V2")  # type: ignore[attr-defined]
    sys.modules["ml_dtypes"] = _shim

from pagedkv.compute.cuda.driver import Context, Driver, probe  # noqa: E402
from pagedkv.dtypes import DType  # noqa: E402
from pagedkv.errors import UnsupportedModel  # noqa: E402
from tests.gpu import compare, cublas, peers, timing  # noqa: E402
from tests.gpu.problem import Problem, attention_error, correctness_problems  # noqa: E402

CORES_TOLERANCE, TENSOR_TOLERANCE = 5e-6, 2e-3  # a real GPU's exp2 and tanh err by a few units in the last place


def timed_problems(tiny: bool) -> list[Problem]:
    """Return decode and prefill shapes; each decode shape also with an identity table."""
    if tiny:
        return [Problem((32, 32), (1, 1), 4, 2, 64), Problem((32,), (32,), 4, 2, 64)]
    decode = [(1, 4096), (16, 2048), (64, 2048), (64, 8192)]
    shapes = [Problem((n,) * b, (1,) * b, dtype=d) for d in (DType.FLOAT16, DType.BFLOAT16) for b, n in decode]
    shapes += [Problem((n,) * b, (1,) * b, dtype=DType.FLOAT8_E4M3) for b, n in ((16, 2048), (64, 8192))]
    shapes += [Problem((2048,) * 16, (1,) * 16, 64, 8), Problem((2048,) * 16, (1,) * 16, 64, 8, tensor_cores=True)]
    return shapes + [Problem((n,), (n,), dtype=DType.BFLOAT16) for n in (2048, 8192)]


def check_correctness(options: dict[str, Any], tiny: bool) -> list[dict[str, Any]]:
    """Return label, error and verdict of every problem."""
    rows = []
    for problem in correctness_problems(tiny):
        uses_cores = problem.dtype is DType.FLOAT32 or problem.tensor_cores is False
        tolerance = CORES_TOLERANCE if uses_cores else TENSOR_TOLERANCE
        error = attention_error(problem, min_partition=64, **options)
        path = "cores" if uses_cores else "tensor"
        rows.append({"problem": problem.label, "path": path, "error": error, "ok": bool(error <= tolerance)})
    return rows


def check_against_virtual(options: dict[str, Any], virtual: bool) -> list[dict[str, Any]]:
    """Return a row for each operation, compared with the virtual GPU's result; there with another order of streams."""
    reference = virtual_options(schedule=7 if virtual else "lazy")
    return compare.compare(options, reference)


def attempt(work: Callable[[], Any]) -> Any:
    """Return what `work` returns, or why not: `is_missing` tells a part that is not there from one that failed."""
    try:
        return work()
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        return {"not_measured": reason, "is_missing": isinstance(error, ImportError | UnsupportedModel)}


class Clock:
    """Says when to leave out what is left, so that the table is printed in time."""

    def __init__(self, seconds: float) -> None:
        self._ends = time.monotonic() + seconds

    @property
    def is_up(self) -> bool:
        """Whether the time is over."""
        return time.monotonic() > self._ends


def time_all(options: dict[str, Any], tiny: bool, clock: Clock) -> dict[str, Any]:
    """Return every figure: limits measured in this run, then each shape beside the peers."""
    flush, repeats = (1 << 12, 1) if tiny else (256 << 20, 15)
    torch = None if tiny else peers.load_torch()
    small = timed_problems(tiny)[0]
    limit = timing.bandwidth(small, flush, repeats, 1 << 12 if tiny else 1 << 30, **options)
    rate = peers.matrix_rate(torch, repeats)
    rows = []
    big = Problem((32,), (1,), 4, 2, 64) if tiny else Problem((32768,) * 4, (1,) * 4)
    for name, (seconds, in_order, moved) in timing.pool_seconds(big, flush, repeats, **options).items():
        row = {"what": name, "shape": f"{moved >> 20} MiB moved", "seconds": seconds, "identity_seconds": in_order}
        rows.append({**row, "share": moved / seconds / limit})
    skipped = 0
    for problem in timed_problems(tiny):
        if clock.is_up:
            skipped += 1
        else:
            rows.append(time_one(problem, flush, repeats, torch, (limit, rate), options))
    return {"copy_bytes_per_second": limit, "matrix_flops": rate, "rows": rows, "left_out": skipped}


def time_generation(options: dict[str, Any], tiny: bool, model: Path | None, limit: float) -> dict[str, Any]:
    """Return end-to-end figures; `share` is of the copy bandwidth, if each step of a decode read every weight once."""
    from tests.gpu import generation  # needs what a bare CUDA image lacks: a tokenizer's packages

    found = generation.measure(tiny, options, model)
    for row in found["rows"]:
        row["share"] = found["weight_bytes"] / row["seconds"] / limit if row["what"] == "decode" else None
    return found


def time_one(
    problem: Problem, flush: int, repeats: int, torch: Any, limits: tuple[float, float | None], options: dict[str, Any]
) -> dict[str, Any]:
    """Return one attention shape's figures. `share` is of the copy bandwidth (decode) or matrix rate (prefill)."""
    is_decode = max(problem.query_lens) == 1
    seconds = timing.attend_seconds(problem, flush, repeats, **options)
    ordered = Problem(**{**_fields(problem), "shuffled": False})
    work, limit = (problem.kv_bytes, limits[0]) if is_decode else (problem.flops, limits[1])
    return {
        "what": "decode" if is_decode else "prefill",
        "shape": problem.label + (" tensor" if problem.tensor_cores else ""),
        "seconds": seconds,
        "share": None if limit is None else work / seconds / limit,
        "identity_seconds": timing.attend_seconds(ordered, flush, repeats, **options),
        "sdpa_seconds": peers.sdpa_seconds(torch, problem, repeats),
        "flashinfer_seconds": peers.flashinfer_seconds(torch, problem, repeats),
    }


def _fields(problem: Problem) -> dict[str, Any]:
    return {name: getattr(problem, name) for name in problem.__dataclass_fields__}


def print_report(result: dict[str, Any]) -> None:
    """Print what is wrong, what is missing, then the table of times."""
    print_verdicts("correctness, against the oracle", result["correctness"], "problem")
    print_verdicts("operations, against the virtual GPU", result["virtual"], "operation")
    print(f"cuBLAS: {result['cublas']}")
    if "times" not in result:
        return
    times, whole = result["times"], result["generation"]
    for title, part in (("times", times), ("generation", whole)):
        if "not_measured" in part:
            print(f"{title}: not measured: {part['not_measured']}")
    if "rows" in times:
        rate = _cell(times["matrix_flops"], 1e-12)
        print(f"copy bandwidth {times['copy_bytes_per_second'] / 1e9:.0f} GB/s, matrix rate {rate} TFLOP/s")
        print(f"attention shapes left out, for the time was up: {times['left_out']}")
    if "rows" in whole:
        print(f"model of the tokens/s: {whole['model']}")
    print(
        f"{'what':12}{'shape':44}{'us':>11}{'share':>8}{'identity':>10}{'SDPA':>10}{'FlashInfer':>11}{'tokens/s':>10}"
    )
    for row in [*times.get("rows", []), *whole.get("rows", [])]:
        print_row(row)


def is_right(result: dict[str, Any]) -> bool:
    """Whether everything compared is within its tolerance and nothing failed; what is not there is no failure."""
    parts = [part for part in result.values() if isinstance(part, dict) and "not_measured" in part]
    compared = [] if isinstance(result["virtual"], dict) else result["virtual"]
    return all(part["is_missing"] for part in parts) and all(row["ok"] for row in [*result["correctness"], *compared])


def print_verdicts(title: str, rows: Any, name: str) -> None:
    """Print how many of the rows are right, and those that are not."""
    if isinstance(rows, dict):
        print(f"{title}: not measured: {rows['not_measured']}")
        return
    wrong = [row for row in rows if not row["ok"]]
    print(f"{title}: {len(rows) - len(wrong)} of {len(rows)} within tolerance")
    for row in wrong:
        print(f"  WRONG {row[name]} {row.get('path', '')}: {row['error']:.2e}")


def print_row(row: dict[str, Any]) -> None:
    """Print a line of the table."""
    peer = [_cell(row.get(f"{name}_seconds"), 1e6) for name in ("identity", "sdpa", "flashinfer")]
    cells = f"{row['seconds'] * 1e6:>11.1f}{_cell(row['share'], 100):>7}%{peer[0]:>10}{peer[1]:>10}{peer[2]:>11}"
    print(f"{row['what']:12}{row['shape']:44}{cells}{_cell(row.get('tokens_per_second'), 1):>10}")


def _cell(value: float | None, factor: float) -> str:
    return "-" if value is None else f"{value * factor:.1f}"


def virtual_options(schedule: str | int = "lazy") -> dict[str, Any]:
    """Return a backend's options for the virtual GPU."""
    tests = str(_ROOT / "tests")
    if tests not in sys.path:
        sys.path.insert(0, tests)
    from virtual_gpu import Profile, VirtualDriver
    from virtual_gpu.cublas import VirtualCublas

    driver = VirtualDriver(Profile(memory_bytes=64 << 20, host_bytes=64 << 20), schedule=schedule)
    return {"driver_module": driver, "cublas": VirtualCublas(driver), "emit_ptx": True}


def open_options(virtual: bool) -> tuple[dict[str, Any], str, str]:
    """Return the backend's options, the device's name and what stands for cuBLAS. SystemExit without a device."""
    if virtual:
        return virtual_options(), "virtual GPU", "computed by NumPy"
    found = probe()
    if not found.devices:
        raise SystemExit(f"no GPU here: {found.reason}")
    bindings, origin = cublas.load_cublas()
    return {"cublas": bindings}, found.devices[0].name, origin


def run_check(virtual: bool, with_times: bool, model: Path | None, clock: Clock) -> dict[str, Any]:
    """Return all results. The context is held throughout, or each backend would make its own."""
    options, device, origin = open_options(virtual)
    held = Context(Driver(options.get("driver_module")))
    result: dict[str, Any] = {"device": device, "cublas": origin}
    result["correctness"] = check_correctness({**options, "cublas": None}, virtual)
    result["virtual"] = attempt(lambda: check_against_virtual(options, virtual))
    if with_times:
        result["times"] = times = attempt(lambda: time_all({**options, "cublas": None}, virtual, clock))
        limit = times.get("copy_bytes_per_second", float("nan"))
        result["generation"] = attempt(lambda: time_generation(options, virtual, model, limit))
    held.release()
    return result


def main(argv: list[str] | None = None) -> int:
    """Run the check; 0 if every result is within its tolerance."""
    parser = argparse.ArgumentParser(prog="./run gpu-check", description=__doc__)
    parser.add_argument("--virtual", action="store_true", help="tiny, on the virtual GPU")
    parser.add_argument("--out", type=Path, default=None, help="where the JSON goes")
    parser.add_argument("--no-times", action="store_true", help="correctness alone")
    parser.add_argument("--model", type=Path, default=None, help="a model's file or directory for the generations")
    parser.add_argument("--seconds", type=float, default=240, help="when to leave out the attention shapes to come")
    args = parser.parse_args(argv)
    started = time.monotonic()
    result = run_check(args.virtual, not args.no_times, args.model, Clock(args.seconds))
    result["wall_seconds"] = time.monotonic() - started
    out = args.out or Path(__file__).parent / "results" / f"{result['device'].replace(' ', '_')}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print_report(result)
    return int(not is_right(result))


if __name__ == "__main__":
    sys.exit(main())
