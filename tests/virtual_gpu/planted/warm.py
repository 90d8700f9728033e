"""A process that has imported what no fault changes, and forks a child for each run of tests: seconds saved each.

Reads a line of JSON for each run, [pytest's arguments, file for the output], and answers with the exit code.
"""

from __future__ import annotations

import json
import os
import sys
import traceback


def preload() -> None:
    """Import everything but the project's own code, and load the virtual GPU's compiled loops."""
    import cuda.bindings.nvrtc
    import ml_dtypes
    import pytest

    from virtual_gpu.harness import evaluate

    loaded = (cuda.bindings.nvrtc, ml_dtypes, pytest)
    assert all(loaded)
    evaluate("add.f32 %d, %a, %b;", "f32", a=("f32", [1.0]), b=("f32", [2.0]))
    assert not any(name.split(".")[0] == "pagedkv" for name in sys.modules)


def run_tests(arguments: list[str], output: str) -> None:
    """In the child: run pytest with its output in a file, and end with its code."""
    import pytest

    with open(output, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        code = int(pytest.main(arguments))
    except BaseException:
        traceback.print_exc()
        code = 3
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # what the parent holds is its own to close


def main() -> None:
    """Serve until the input ends."""
    preload()
    for line in sys.stdin:
        arguments, output = json.loads(line)
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            run_tests(arguments, output)
        print(f"began {child}", flush=True)
        _, status = os.waitpid(child, 0)
        print(f"ended {os.waitstatus_to_exitcode(status)}", flush=True)


if __name__ == "__main__":
    main()
