"""`./run gpu-check`: kernels on a real GPU against the oracle and the virtual GPU, then times. The table comes last.

Needs cuda-python, NVRTC and numpy; the peers need PyTorch, whole generations need the packages of a tokenizer, the
virtual GPU needs numba and ml_dtypes, or `--reference` a file that `--save-reference` wrote elsewhere. What is missing
is said in the place of its figures. Tasks run in a child process: one that crashes, hangs or spoils the device's
context costs its own figures only. `--virtual` runs a tiny form on the virtual GPU, which tests this
script and says nothing about speed.
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

from tests.gpu.isolate import Clock, has_failed, not_measured, run_tasks  # noqa: E402
from tests.gpu.work import Work, load_reference, timed_problems  # noqa: E402

Answers = dict[str, Any]
PEERS = ("matrix_rate", "sdpa", "flashinfer")  # whose failures are not ours


def assemble(answers: Answers, tiny: bool) -> dict[str, Any]:
    """Return the report's parts from the answers of the tasks."""
    return {
        "correctness": [answer for task, answer in answers.items() if task.startswith("correctness ")],
        "operations": answers.get("operations", not_measured("not begun", is_missing=True)),
        "copy_bytes_per_second": _number(answers.get("bandwidth")),
        "matrix_flops": _number(answers.get("matrix_rate")),
        "model": _model(answers),
        "rows": [*pool_rows(answers), *attention_rows(answers, tiny), *generation_rows(answers)],
        "not_measured": {
            task: answer["not_measured"]
            for task, answer in answers.items()
            if isinstance(answer, dict) and "not_measured" in answer
        },
    }


def pool_rows(answers: Answers) -> list[dict[str, Any]]:
    """Return rows for write_kv and copy_blocks; `share` is of the copy bandwidth."""
    rows = []
    for name in ("write_kv", "copy_blocks"):
        if isinstance(answers.get(name), list):
            seconds, in_order, moved = answers[name]
            share = _share(moved, seconds, answers.get("bandwidth"))
            shape = f"{int(moved) >> 20} MiB moved"
            rows.append({"what": name, "shape": shape, "seconds": seconds, "share": share, "ordered_seconds": in_order})
    return rows


def attention_rows(answers: Answers, tiny: bool) -> list[dict[str, Any]]:
    """Return a row for each shape; `share` is of the copy bandwidth (decode) or of the matrix rate (prefill)."""
    rows = []
    for at, problem in enumerate(timed_problems(tiny)):
        is_decode = max(problem.query_lens) == 1
        work, limit = (problem.kv_bytes, "bandwidth") if is_decode else (problem.flops, "matrix_rate")
        seconds = _number(answers.get(f"attention {at}"))
        label = problem.label + (" cores" if problem.tensor_cores is False else "")
        row = {"what": "decode" if is_decode else "prefill", "shape": label, "seconds": seconds}
        row["share"] = _share(work, seconds, answers.get(limit))
        rows.append(
            row | {f"{k}_seconds": _number(answers.get(f"{k} {at}")) for k in ("ordered", "sdpa", "flashinfer")}
        )
    return rows


def generation_rows(answers: Answers) -> list[dict[str, Any]]:
    """Return end-to-end rows; `share` is of the copy bandwidth, if each step of a decode read every weight once."""
    found = answers.get("generation", {})
    for row in found.get("rows", []):
        is_decode = row["what"] == "decode"
        row["share"] = _share(found["weight_bytes"], row["seconds"], answers.get("bandwidth")) if is_decode else None
    return list(found.get("rows", []))


def _model(answers: Answers) -> str | None:
    return answers.get("generation", {}).get("model")


def _number(answer: Any) -> float | None:
    return answer if isinstance(answer, float) else None


def _share(work: float, seconds: float | None, limit: Any) -> float | None:
    return None if seconds is None or _number(limit) is None else work / seconds / limit


def is_right(answers: Answers) -> bool:
    """Whether all that was compared is within its tolerance and nothing of ours failed; what is not there is fine."""
    rows = [row for answer in answers.values() for row in (answer if isinstance(answer, list) else [answer])]
    wrong = [row for row in rows if isinstance(row, dict) and not row.get("ok", True)]
    failed = [task for task, answer in answers.items() if has_failed(answer) and not task.startswith(PEERS)]
    return not wrong and not failed


def print_report(result: dict[str, Any]) -> None:
    """Print what is wrong, what is missing, then the table of times."""
    print_verdicts("correctness, against the oracle", result["correctness"], "problem")
    print_verdicts("operations, against the virtual GPU", result["operations"], "operation")
    for task, reason in result["not_measured"].items():
        print(f"{task}: not measured: {reason}")
    bandwidth, rate = _cell(result["copy_bytes_per_second"], 1e-9), _cell(result["matrix_flops"], 1e-12)
    print(f"cuBLAS: {result['cublas']}; copy bandwidth {bandwidth} GB/s, matrix rate {rate} TFLOP/s")
    print(f"model of the tokens/s: {result['model']}")
    print(
        f"{'what':12}{'shape':44}{'us':>11}{'share':>8}{'identity':>10}{'SDPA':>10}{'FlashInfer':>11}{'tokens/s':>10}"
    )
    for row in result["rows"]:
        print_row(row)


def print_verdicts(title: str, rows: Any, name: str) -> None:
    """Print how many of the rows are right, and those that are not."""
    compared = [row for row in rows if "ok" in row] if isinstance(rows, list) else []
    wrong = [row for row in compared if not row["ok"]]
    print(f"{title}: {len(compared) - len(wrong)} of {len(compared)} within tolerance")
    for row in wrong:
        print(f"  WRONG {row[name]} {row.get('path', '')}: {row['error']:.2e}")


def print_row(row: dict[str, Any]) -> None:
    """Print a line of the table."""
    peer = [_cell(row.get(f"{name}_seconds"), 1e6) for name in ("ordered", "sdpa", "flashinfer")]
    cells = f"{_cell(row['seconds'], 1e6):>11}{_cell(row['share'], 100):>7}%{peer[0]:>10}{peer[1]:>10}{peer[2]:>11}"
    print(f"{row['what']:12}{row['shape']:44}{cells}{_cell(row.get('tokens_per_second'), 1):>10}")


def _cell(value: float | None, factor: float) -> str:
    return "-" if value is None else f"{value * factor:.1f}"


def run_check(work: Work, clock: Clock, with_times: bool, out: Path | None) -> tuple[dict[str, Any], Answers]:
    """Return the report's parts and all answers; the JSON is written behind each task. SystemExit without a GPU."""
    started = time.monotonic()
    device = dict(run_tasks(["device"], work.perform, Clock(60)))["device"]
    if device.get("name") is None:
        raise SystemExit(f"no GPU here: {device.get('reason', device)}")
    tasks = [task for task in work.tasks() if with_times or task.startswith(("compile", "correctness", "operations"))]
    path = out or Path(__file__).parent / "results" / f"{device['name'].replace(' ', '_')}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    answers: Answers = {}
    result: dict[str, Any] = {}
    for task, answer in run_tasks(tasks, work.perform, clock, most_seconds=120):
        answers[task] = answer
        result = {"device": device["name"], "cublas": device["cublas"], **assemble(answers, work.virtual)}
        result["wall_seconds"] = time.monotonic() - started
        path.write_text(json.dumps(result, indent=1) + "\n")
    return result, answers


def main(argv: list[str] | None = None) -> int:
    """Run the check; 0 if every result is within its tolerance."""
    parser = argparse.ArgumentParser(prog="./run gpu-check", description=__doc__)
    parser.add_argument("--virtual", action="store_true", help="tiny, on the virtual GPU")
    parser.add_argument("--out", type=Path, default=None, help="where the JSON goes")
    parser.add_argument("--no-times", action="store_true", help="correctness alone")
    parser.add_argument("--model", type=Path, default=None, help="a model's file or directory for the generations")
    parser.add_argument("--seconds", type=float, default=300, help="when to begin nothing more")
    parser.add_argument("--reference", type=Path, default=None, help="results of the virtual GPU, from a file")
    parser.add_argument("--save-reference", type=Path, default=None, help="only write that file")
    args = parser.parse_args(argv)
    if args.save_reference is not None:
        np.savez_compressed(args.save_reference, **load_reference(None))
        return 0
    work = Work(args.virtual, args.model, args.reference)
    result, answers = run_check(work, Clock(args.seconds), not args.no_times, args.out)
    print_report(result)
    return int(not is_right(answers))


if __name__ == "__main__":
    sys.exit(main())
