"""The real `cuda.bindings.driver` between the backend and the virtual GPU: arguments cross as C has them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
COMPILER = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
SCRIPT = """
import sys
from pathlib import Path
from virtual_gpu import VirtualDriver
from virtual_gpu.cublas import VirtualCublas
from virtual_gpu.libcuda import Library
from pagedkv.compute.cuda.driver import probe
from tests.gpu import compare, generation
from tests.gpu.work import virtual_options

driver = VirtualDriver()
library = Library(Path(sys.argv[1]), driver)
options = {"emit_ptx": True, "cublas": VirtualCublas(driver)}  # no stand-in for the bindings
assert probe().devices[0].name == driver.profile.name
rows = compare.compare(options, compare.results(virtual_options()))
assert len(rows) > 90 and all(row["ok"] for row in rows), rows
generation.measure(True, options)  # by captured graphs
driver.assert_clean()
print("all is right")
"""


@pytest.mark.skipif(COMPILER is None, reason="no C compiler here to make a stand-in libcuda.so.1")
@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has a GPU driver")
def test_every_operation_and_captured_steps_through_the_real_bindings_are_right(tmp_path: Path):
    library = tmp_path / "libcuda.so.1"
    subprocess.run([str(COMPILER), "-shared", "-fPIC", "-o", library, TESTS / "virtual_gpu/libcuda.c"], check=True)
    path = os.pathsep.join(str(TESTS.parent / part) for part in (".", "tests", "service"))
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": path}
    command = [sys.executable, "-c", SCRIPT, str(library)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=850)
    assert done.stdout == "all is right\n", done.stdout + done.stderr
