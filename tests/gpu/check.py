"""`./run gpu-check`: the kernels on a real GPU against the oracle, then their times. The table comes last.

Needs PyTorch (for the peers; optional), cuda-python, NVRTC and numpy. `--virtual` runs a tiny form on the virtual GPU,
which tests this script and says nothing about speed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import types
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

from pagedkv.compute.cuda.driver import probe  # noqa: E402
from pagedkv.dtypes import DType  # noqa: E402
from tests.gpu import peers, timing  # noqa: E402
from tests.gpu.problem import Problem, attention_error, correctness_problems  # noqa: E402

CORES_TOLERANCE, TENSOR_TOLERANCE = 5e-6, 2e-3  # a real GPU's exp2 and tanh err by a few units in the last place


def timed_problems(tiny: bool) -> list[Problem]:
    """Return decode and prefill shapes; each decode shape also with an identity table."""
    if tiny:
        return [Problem((32, 32), (1, 1), 4, 2, 64), Problem((32,), (32,), 4, 2, 64)]
    decode = [(1, 4096), (16, 2048), (64, 2048), (64, 8192)]
    shapes = [Problem((n,) * b, (1,) * b, dtype=d) for d in (DType.FLOAT16, DType.BFLOAT16) for b, n in decode]
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


def time_all(options: dict[str, Any], tiny: bool) -> dict[str, Any]:
    """Return every figure: limits measured in this run, then each shape beside the peers."""
    flush, repeats = (1 << 12, 1) if tiny else (256 << 20, 15)
    torch = None if tiny else peers.load_torch()
    small = timed_problems(tiny)[0]
    limit = timing.bandwidth(small, flush, repeats, 1 << 12 if tiny else 1 << 30, **options)
    rate = peers.matrix_rate(torch, repeats)
    rows = [time_one(problem, flush, repeats, torch, (limit, rate), options) for problem in timed_problems(tiny)]
    big = Problem((32,), (1,), 4, 2, 64) if tiny else Problem((32768,) * 4, (1,) * 4)
    for name, (seconds, moved) in timing.pool_seconds(big, flush, repeats, **options).items():
        rows.append(
            {"what": name, "shape": f"{moved >> 20} MiB moved", "seconds": seconds, "share": moved / seconds / limit}
        )
    return {"copy_bytes_per_second": limit, "matrix_flops": rate, "rows": rows}


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
    """Print errors that matter, then the table of times."""
    wrong = [row for row in result["correctness"] if not row["ok"]]
    print(f"correctness: {len(result['correctness']) - len(wrong)} of {len(result['correctness'])} within tolerance")
    for row in wrong:
        print(f"  WRONG {row['problem']} {row['path']}: {row['error']:.2e}")
    times = result.get("times")
    if times is None:
        return
    rate = times["matrix_flops"]
    print(f"copy bandwidth {times['copy_bytes_per_second'] / 1e9:.0f} GB/s, matrix rate {_cell(rate, 1e-12)} TFLOP/s")
    print(f"{'what':12}{'shape':50}{'us':>10}{'share':>8}{'identity':>10}{'SDPA':>10}{'FlashInfer':>11}")
    for row in times["rows"]:
        peer = [_cell(row.get(f"{name}_seconds"), 1e6) for name in ("identity", "sdpa", "flashinfer")]
        share = _cell(row["share"], 100)
        cells = f"{row['seconds'] * 1e6:>10.1f}{share:>7}%{peer[0]:>10}{peer[1]:>10}{peer[2]:>11}"
        print(f"{row['what']:12}{row['shape']:50}{cells}")


def _cell(value: float | None, factor: float) -> str:
    return "-" if value is None else f"{value * factor:.1f}"


def open_options(virtual: bool) -> tuple[dict[str, Any], str]:
    """Return the backend's options and the device's name. Raises SystemExit where there is no device."""
    if virtual:
        sys.path.insert(0, str(_ROOT / "tests"))
        from virtual_gpu import Profile, VirtualDriver

        driver = VirtualDriver(Profile(memory_bytes=64 << 20, host_bytes=64 << 20))
        return {"driver_module": driver, "emit_ptx": True}, "virtual GPU"
    found = probe()
    if not found.devices:
        raise SystemExit(f"no GPU here: {found.reason}")
    return {}, found.devices[0].name


def main(argv: list[str] | None = None) -> int:
    """Run the check; 0 if every result is within its tolerance."""
    parser = argparse.ArgumentParser(prog="./run gpu-check", description=__doc__)
    parser.add_argument("--virtual", action="store_true", help="tiny, on the virtual GPU")
    parser.add_argument("--out", type=Path, default=None, help="where the JSON goes")
    parser.add_argument("--no-times", action="store_true", help="correctness alone")
    args = parser.parse_args(argv)
    started = time.monotonic()
    options, device = open_options(args.virtual)
    result: dict[str, Any] = {"device": device, "correctness": check_correctness(options, args.virtual)}
    if not args.no_times:
        result["times"] = time_all(options, args.virtual)
    result["wall_seconds"] = time.monotonic() - started
    out = args.out or Path(__file__).parent / "results" / f"{device.replace(' ', '_')}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print_report(result)
    return 0 if all(row["ok"] for row in result["correctness"]) else 1


if __name__ == "__main__":
    sys.exit(main())
