"""Threads, instruction sets, memory limits and the compile cache of the CPU backend."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import numpy as np
import pytest

from helpers.attention_cases import make_layout
from pagedkv.compute.cpu import cgroup, compile_cache, features, pool
from pagedkv.compute.cpu.compile_cache import compile_kernel
from pagedkv.compute.cpu.simd import load_i64
from pagedkv.compute.cpu.threads import WorkerPool, claim, fetch_add
from pagedkv.compute.layout import KvLayout
from pagedkv.config import KvShape
from pagedkv.errors import InvalidArgument


def _count_items(args: int, thread: int) -> None:
    item = claim(args)
    while item >= 0:
        fetch_add(load_i64(args + 16) + 8 * item, 1)
        item = claim(args)


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_worker_pool_runs_each_item_once(num_threads) -> None:
    workers, kernel = WorkerPool(num_threads), compile_kernel(_count_items, "count-items")
    for num_items in (0, 1, 3, 1000):
        hits = np.zeros(num_items + 1, np.int64)
        workers.run(kernel, np.array([0, num_items, hits.ctypes.data], np.int64))
        assert np.array_equal(hits[:num_items], np.ones(num_items))
    workers.close()
    workers.close()


def test_num_threads_defaults_to_the_usable_cores(make_backend) -> None:
    assert make_backend(make_layout()).num_threads == cgroup.usable_cores() <= len(os.sched_getaffinity(0))


def test_num_threads_below_one_is_refused() -> None:
    from pagedkv.compute.cpu.backend import CpuBackend

    with pytest.raises(InvalidArgument, match="num_threads"):
        CpuBackend(make_layout(), num_threads=0)


@pytest.mark.parametrize(("cpu_max", "expected"), [("max 100000", 64), ("150000 100000", 1), ("400000 100000", 4)])
def test_usable_cores_follow_the_cpu_quota(tmp_path, monkeypatch, cpu_max, expected) -> None:
    (tmp_path / "cpu.max").write_text(cpu_max + "\n")
    monkeypatch.setattr(cgroup, "_folders", lambda controller: [tmp_path])
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    assert cgroup.usable_cores() == expected


def test_pool_larger_than_the_control_group_allows_is_refused_with_numbers(tmp_path, monkeypatch) -> None:
    (tmp_path / "memory.max").write_text(f"{8 << 20}\n")
    (tmp_path / "memory.current").write_text(f"{3 << 20}\n")
    monkeypatch.setattr(cgroup, "_folders", lambda controller: [tmp_path])
    layout = KvLayout(KvShape(1, 8, 8, 128), 48, 16)
    with pytest.raises(InvalidArgument, match="needs 6 MiB, 5 MiB of memory are available") as caught:
        pool.allocate_pool(layout)
    assert caught.value.field == "num_blocks"


def test_pool_larger_than_the_machine_is_refused_before_it_is_touched() -> None:
    with pytest.raises(InvalidArgument, match="MiB of memory are available"):
        pool.allocate_pool(KvLayout(KvShape(64, 64, 64, 128), 1 << 20, 128))


def test_missing_huge_pages_are_said_and_the_pool_works(monkeypatch, caplog, tmp_path) -> None:
    switch = tmp_path / "enabled"
    switch.write_text("always madvise [never]\n")
    monkeypatch.setattr(pool, "_HUGE_PAGE_SWITCH", switch)
    with caplog.at_level(logging.WARNING):
        region = pool.allocate_pool(make_layout())
    region[:] = 1
    assert "2 MB pages are not available" in caplog.text


def test_instruction_set_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="isa"):
        features.choose_isa("avx1024")


def test_instruction_set_that_the_host_lacks_is_refused_by_name(monkeypatch) -> None:
    monkeypatch.setattr(features.llvm, "get_host_cpu_features", lambda: {"avx2": True, "fma": True, "f16c": True})
    assert features.choose_isa(None if features.ISA_VARIABLE not in os.environ else "avx2").name == "avx2"
    with pytest.raises(InvalidArgument, match="avx2, portable"):
        features.choose_isa("avx512")


def test_process_held_to_a_set_is_refused_a_larger_one(monkeypatch) -> None:
    everything = {feature: True for isa in features.ISAS.values() for feature in isa.needs}
    monkeypatch.setattr(features.llvm, "get_host_cpu_features", lambda: everything)
    monkeypatch.setenv(features.ISA_VARIABLE, "avx2")
    assert [features.choose_isa(name).name for name in (None, "avx2", "portable")] == ["avx2", "avx2", "portable"]
    with pytest.raises(InvalidArgument, match="avx2, portable"):
        features.choose_isa("avx512")


def test_machine_without_avx2_gets_the_portable_path(monkeypatch) -> None:
    monkeypatch.delenv(features.ISA_VARIABLE, raising=False)
    monkeypatch.setattr(features.llvm, "get_host_cpu_features", dict)
    assert features.choose_isa().name == "portable"


def test_products_of_bytes_need_the_host_and_a_process_that_is_not_held(monkeypatch) -> None:
    needs = ("avx512vnni", "avx512vbmi")
    monkeypatch.delenv(features.ISA_VARIABLE, raising=False)
    monkeypatch.setattr(features.llvm, "get_host_cpu_features", lambda: dict.fromkeys(needs, True))
    assert [features.has_byte_dots(isa) for isa in features.ISAS.values()] == [True, False, False]
    monkeypatch.setenv(features.ISA_VARIABLE, "avx512")
    assert not features.has_byte_dots(features.ISAS["avx512"])
    monkeypatch.delenv(features.ISA_VARIABLE)
    for missing in needs:
        monkeypatch.setattr(
            features.llvm, "get_host_cpu_features", lambda gone=missing: {name: name != gone for name in needs}
        )
        assert not features.has_byte_dots(features.ISAS["avx512"])


def _noop(args: int, thread: int) -> None:
    pass


@pytest.fixture
def private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compile_cache, "_loaded", {})
    monkeypatch.setattr(compile_cache, "_said", set())
    return tmp_path / "pagedkv"


def test_damaged_cache_file_is_rebuilt_and_said_once(private_cache, monkeypatch, caplog) -> None:
    compile_kernel(_noop, "noop")
    (file,) = private_cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    for _ in range(2):
        monkeypatch.setattr(compile_cache, "_loaded", {})
        compile_kernel(_noop, "noop").call(0, 0)
    assert caplog.text.count("cache is damaged") == 1
    assert len(file.read_bytes()) > len(whole) // 2


def test_cache_that_cannot_be_written_is_bypassed_and_said_once(tmp_path, monkeypatch, caplog) -> None:
    monkeypatch.setattr(compile_cache, "_loaded", {})
    monkeypatch.setattr(compile_cache, "_said", set())
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
    for name in ("first", "second"):
        compile_kernel(_noop, name).call(0, 0)
    assert caplog.text.count("kernels are compiled at every start") >= 1


def test_warm_up_tells_of_every_kernel(make_backend) -> None:
    heard: list[tuple[int, int, str]] = []
    make_backend(make_layout(), on_compile=lambda *event: heard.append(event)).warm_up()
    names = [name for _, _, name in heard]
    assert names == ["attend", "write", "merge", ""]
    assert heard[-1][:2] == (3, 3)


_CHECK = """
import sys
sys.path.insert(0, "tests")
import numpy as np
from helpers.attention_cases import *
from pagedkv.compute.cpu.backend import CpuBackend
layout = make_layout(head_dim=80)
backend = CpuBackend(layout)
case = make_case(layout, [1, 33, 50], [1, 1, 20], np.random.default_rng(0))
fill(backend, case, 0)
assert_close(attend(backend, case, 0), expected(case))
print(backend.isa)
backend.close()
"""


@pytest.mark.parametrize("isa", ["avx2", "portable"])
def test_process_held_to_an_instruction_set_computes_right(isa) -> None:
    environment = {**os.environ, features.ISA_VARIABLE: isa}
    done = subprocess.run([sys.executable, "-c", _CHECK], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == isa, done.stderr
