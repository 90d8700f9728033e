"""Driver results, probing, compiling, threads and argument widths."""

from __future__ import annotations

import gc
import os
import re
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cuda.bindings import nvrtc

from helpers.attention_cases import make_layout
from helpers.cuda import SMALL, make_virtual_backend
from pagedkv.compute.cuda.compiler import Compiler, Target, choose_target, source_directory
from pagedkv.compute.cuda.doctor import Verdict, examine_cuda
from pagedkv.compute.cuda.driver import Driver, probe, unwrap
from pagedkv.compute.cuda.kernels import Variant, all_variants, plain_variant
from pagedkv.config import KvShape
from pagedkv.dtypes import DType
from pagedkv.errors import DeviceError
from virtual_gpu import VirtualDriver
from virtual_gpu.cublas import VirtualCublas

SUPPORTED = [75, 80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121]


def test_unwrap_returns_nothing_one_value_or_a_tuple():
    assert unwrap((0,), "f") is None
    assert unwrap((0, 7), "f") == 7
    assert unwrap((0, 7, 8), "f") == (7, 8)


def test_unwrap_of_a_failure_names_call_and_status():
    with pytest.raises(DeviceError, match=r"cuMemAlloc.*CUDA_ERROR_INVALID_VALUE"):
        Driver(_ready()).call("cuMemAlloc", 0)


def _ready() -> VirtualDriver:
    driver = VirtualDriver()
    driver.cuInit(0)
    driver.cuCtxSetCurrent(driver.cuDevicePrimaryCtxRetain(driver.cuDeviceGet(0)[1])[1])
    return driver


def test_probe_finds_the_devices_of_a_driver():
    found = probe(VirtualDriver())
    assert [device.capability for device in found.devices] == [(8, 0)]
    assert found.reason == ""


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has a GPU driver")
def test_probe_without_a_driver_gives_the_reason_and_does_not_raise():
    found = probe()
    assert found.devices == ()
    assert found.reason == "no NVIDIA driver here"


@pytest.mark.parametrize(
    ("capability", "target"),
    [
        ((8, 0), Target(80)),
        ((8, 7), Target(87)),
        ((9, 0), Target(90)),
        ((10, 1), Target(100)),
        ((12, 3), Target(121)),
        ((13, 0), Target(121, is_ptx=True)),
    ],
)
def test_rt09_an_unknown_architecture_takes_the_nearest_lower_target_or_ptx(capability, target):
    assert choose_target(capability, SUPPORTED) == target


def test_rt09_a_device_too_old_or_a_compiler_too_new_is_refused_clearly():
    with pytest.raises(DeviceError, match=r"7\.5 is too old"):
        choose_target((7, 5), SUPPORTED)
    with pytest.raises(DeviceError, match="supports none"):
        choose_target((8, 0), [90, 100])


def test_rt02_no_kernel_includes_a_header_that_is_not_its_own():
    names = {path.name for path in source_directory().iterdir()}
    for path in source_directory().glob("*.cu*"):
        assert set(re.findall(r'#include [<"](.*)[>"]', path.read_text())) <= names


def test_a_source_that_does_not_compile_reports_source_options_and_log(tmp_path):
    with pytest.raises(DeviceError, match=r"(?s)attend.cu does not compile with .*sm_90.*HEAD_DIM") as caught:
        Compiler(cache_dir=tmp_path).compile(Variant("attend", (("STORAGE", 0),)), Target(90))
    assert caught.value.details["source"] == "attend.cu"


def test_a_compiled_kernel_is_found_on_disk_by_the_next_process(tmp_path: Path):
    first, second = Compiler(cache_dir=tmp_path), Compiler(cache_dir=tmp_path)
    variant = plain_variant("add")
    assert first.compile(variant, Target(90)).image == second.compile(variant, Target(90)).image
    assert (first.num_compiled, second.num_compiled) == (1, 0)
    first.compile(variant, Target(80))
    assert first.num_compiled == 2


def test_cu01_a_compile_leaves_the_interpreters_constants_as_they_are(tmp_path: Path):
    for target in (Target(90), Target(90, is_ptx=True)):  # PTX has an empty log: NVRTC writes one byte
        Compiler(cache_dir=tmp_path).compile(plain_variant("add"), target)
    assert [bytes([value])[0] for value in range(256)] == list(range(256))


def test_a_damaged_cache_entry_is_compiled_again(tmp_path: Path):
    Compiler(cache_dir=tmp_path).compile(plain_variant("add"), Target(90))
    for path in tmp_path.glob("*.bin"):
        path.write_bytes(b"")
    again = Compiler(cache_dir=tmp_path)
    assert again.compile(plain_variant("add"), Target(90)).image
    assert again.num_compiled == 1


class MeetingNvrtc:
    """NVRTC in which no compilation ends before another one has begun."""

    def __init__(self):
        self._meeting = threading.Barrier(2, timeout=600)

    def __getattr__(self, name):
        return getattr(nvrtc, name)

    def nvrtcCompileProgram(self, *args):
        self._meeting.wait()
        return nvrtc.nvrtcCompileProgram(*args)


def test_different_variants_compile_at_the_same_time_and_each_is_heard_of_in_order(tmp_path: Path):
    compiler, heard = Compiler(MeetingNvrtc(), cache_dir=tmp_path), []
    variants = [plain_variant("add"), plain_variant("split"), plain_variant("silu_mul"), Variant("echo", (("int", 0),))]
    wrong = compiler.compile_all(variants, Target(90), lambda *call: heard.append(call))
    assert [call[0] for call in heard] == [0, 1, 2, 3, 4]
    assert heard[-1] == (4, 4, "")
    assert compiler.num_compiled == 3
    assert list(wrong) == ["echo int=0"]
    assert "echo.cu does not compile" in wrong["echo int=0"].message


@pytest.mark.parametrize("arch", [80, 90, 100, 120])
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(64, DType.FLOAT32), (128, DType.FLOAT16), (256, DType.BFLOAT16), (128, DType.FLOAT8_E4M3)]
)
def test_kernels_compile_without_spills_or_stack(arch, head_dim, dtype):
    compiler = Compiler()
    variants = all_variants(KvShape(1, 8, 1, head_dim, dtype))
    chosen = [
        v for v in variants if v.name in ("attend", "attend_decode", "attend_mma", "write_kv", "merge_states", "rope")
    ]
    for variant in chosen:
        resources = compiler.compile(variant, Target(arch)).resources
        assert (resources.spilled_bytes, resources.stack_bytes) == (0, 0), variant.label
        assert 0 < resources.registers <= 255
        assert variant.shared_bytes + resources.shared_bytes <= 99 << 10  # the least of these architectures


def test_rt04_arguments_of_every_width_arrive_as_sent_from_four_threads():
    backend, driver = make_virtual_backend(make_layout(num_blocks=2))
    device = backend.device
    values = (2**31 - 1, 2**40 + 3, 1.5, -1)
    wrong: list[object] = []

    def job():
        out = device.scratch.empty((5,), np.int64)
        device.launch(plain_variant("echo"), (1, 1, 1), out.pointer, *values)
        gc.collect(0)
        return out.pointer, backend.to_host(out)

    def run():
        for _ in range(10):
            pointer, got = backend.submit(job).result()
            exact = [values[0], values[1], int(np.float32(1.5).view(np.int32)), values[3], pointer]
            if got.tolist() != exact:
                wrong.append((got.tolist(), exact))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    backend.close()
    driver.assert_clean()


def test_rt01_first_use_from_any_thread_binds_the_context():
    opened: list[object] = []
    thread = threading.Thread(target=lambda: opened.append(make_virtual_backend(make_layout(num_blocks=2))))
    thread.start()
    thread.join()
    backend, driver = opened[0]
    data = np.arange(backend.layout.block_bytes, dtype=np.uint32).astype(np.uint8)
    users = [
        threading.Thread(target=lambda: backend.submit(lambda: backend.write_block(0, data)).result()),
        threading.Thread(target=lambda: backend.submit(lambda: backend.copy_blocks([(0, 1)])).result()),
    ]
    for user in users:
        user.start()
        user.join()
    np.testing.assert_array_equal(backend.submit(lambda: backend.read_block(1)).result(), data)
    backend.close()
    driver.assert_clean()


def verdicts(findings):
    return {finding.subject: finding.verdict for finding in findings}


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has a GPU driver")
def test_doctor_without_a_driver_compiles_every_kernel_and_finds_nothing_failed():
    findings = examine_cuda()
    found = verdicts(findings)
    assert found["cuda driver"] is Verdict.MISSING
    assert [found[subject] for subject in ("nvrtc", "cuda sources", "cuda kernels")] == [Verdict.OK] * 3
    text = next(finding.text for finding in findings if finding.subject == "cuda kernels")
    assert int(re.match(r"(\d+) variants for sm_90 in", text).group(1)) > 50
    assert Verdict.FAILED not in found.values()


def test_doctor_with_a_device_moves_a_block_on_it():
    driver = VirtualDriver(SMALL)
    findings = examine_cuda(driver_module=driver, cublas=VirtualCublas(driver), emit_ptx=True)
    assert set(verdicts(findings).values()) == {Verdict.OK}
    assert "Virtual GPU (sm_80) (sm_80, 108 SMs" in findings[0].text
    assert findings[-1].text == "a block written, copied, read back in float32, float16, bfloat16"
    driver.assert_clean()


def test_doctor_with_a_device_that_lacks_its_driver_version_or_cublas_finds_that_failed():
    old = VirtualDriver(replace(SMALL, driver_version=12_040))
    found = verdicts(examine_cuda(driver_module=old, emit_ptx=True))
    assert [found[subject] for subject in ("nvrtc", "cublas", "cuda device")] == [Verdict.FAILED] * 3


def test_doctor_names_each_kernel_that_does_not_compile(monkeypatch, tmp_path):
    def compile_all_but_one(self, variant, target):
        if variant.name == "rope":
            raise DeviceError("rope.cu does not compile with -x: the log")

    monkeypatch.setattr(Compiler, "compile", compile_all_but_one)
    (kernels,) = [finding for finding in examine_cuda() if finding.subject == "cuda kernels"]
    assert kernels.verdict is Verdict.FAILED
    assert re.match(r"1 of \d+ variants do not compile for sm_90:\nrope: rope.cu does not", kernels.text)


def test_doctor_without_nvrtc_goes_on_to_the_rest(monkeypatch):
    def no_compiler(self, **options):
        raise DeviceError("NVRTC is not there")

    monkeypatch.setattr(Compiler, "__init__", no_compiler)
    assert verdicts(examine_cuda())["nvrtc"] is Verdict.MISSING
    driver = VirtualDriver(SMALL)
    assert verdicts(examine_cuda(driver_module=driver))["nvrtc"] is Verdict.FAILED
