"""What is half done when a signal ends the process is undone, the last first; files appear whole or not at all."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pagedkv.unfinished import replace_file, undone_if_ended

ENDS = """
import threading, sys
from pagedkv.unfinished import end_process, undone_if_ended

def fail():
    raise OSError("the disk is gone")

threading.Thread(target=threading.Event().wait).start()  # nobody waits for it
with undone_if_ended(lambda: print("over")):
    pass
with undone_if_ended(lambda: print("first")), undone_if_ended(fail), undone_if_ended(lambda: print("second", end=" ")):
    end_process(143)
"""


def test_what_is_half_done_is_undone_the_last_first_and_a_failure_stops_nothing():
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (143, "second first\n", "")


def test_a_block_that_raises_is_no_longer_half_done():
    undone = []
    with pytest.raises(ValueError, match="a"):
        with undone_if_ended(lambda: undone.append(1)):
            raise ValueError("a")
    done = subprocess.run(
        [sys.executable, "-c", "from pagedkv.unfinished import end_process; end_process(3)"], timeout=60
    )
    assert (done.returncode, undone) == (3, [])


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "file"
    for data in (b"old", b"new" * 1000):
        replace_file(path, data)
        assert path.read_bytes() == data
    assert list(tmp_path.iterdir()) == [path]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "file"
    replace_file(path, b"old")
    with pytest.raises(TypeError):
        replace_file(path, "text")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


WRITES_FOR_EVER = """
import os, signal, sys, threading
from pathlib import Path
from pagedkv.unfinished import end_process, replace_file

signal.signal(signal.SIGTERM, lambda number, frame: end_process(143))

def write(name):
    while True:
        replace_file(Path(sys.argv[1]) / f"{name}.kernel", os.urandom(1 << 20))

threads = [threading.Thread(target=write, args=(name,), daemon=True) for name in "abc"]
[thread.start() for thread in threads]
print("writing", flush=True)
threads[0].join()
"""


@pytest.mark.parametrize("attempt", range(5))
def test_nc10_a_signal_amid_writing_leaves_whole_files_only(tmp_path, attempt):
    command = [sys.executable, "-c", WRITES_FOR_EVER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "writing\n"
        process.terminate()
        assert process.wait(60) == 143
    assert {path.suffix for path in tmp_path.iterdir()} <= {".kernel"}
    assert {path.stat().st_size for path in tmp_path.iterdir()} <= {1 << 20}
