"""A service's first and last moments, as a supervisor sees them: ports, probes, signals, exit codes."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from helpers.process import PAGEDKV, ServiceProcess
from helpers.tiny_models import make_tiny_model
from helpers.waiting import PATIENCE, until
from pagedkv.cli.assemble import build_service
from pagedkv.cli.front import open_front
from pagedkv.cli.options import ServeOptions
from pagedkv.cli.serve import FAILURE_EXIT_CODE
from pagedkv.client import AsyncClient
from pagedkv.config import KvShape
from pagedkv.errors import DeviceError, Draining

BARE = ("serve", "--no-model", "--layers", "2", "--heads", "8", "--kv-heads", "2", "--head-dim", "64", "--blocks", "32")
SIGNALS = {signal.SIGTERM: 143, signal.SIGINT: 130}


@contextlib.contextmanager
def cold_start(caches: Path, *arguments, before=()):
    """Start a service whose caches are empty; yield when it has said something, and so compiles its kernels."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(caches / "numba"), "XDG_CACHE_HOME": str(caches / "xdg")}
    command = [*before, str(PAGEDKV), *BARE, *(arguments or ("--port", "0", "--metrics-port", "0"))]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        assert "backend" in process.stderr.readline()
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE)
        process.stderr.close()


def free_port() -> int:
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        return place.getsockname()[1]


def http_status(url):
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE) as response:
            return response.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def assert_nothing_half_written(caches: Path):
    files = [path for path in caches.rglob("*") if path.is_file()]
    assert [path for path in files if path.suffix != ".kernel"] == []


@pytest.mark.parametrize("number", SIGNALS)
def test_nc10_a_signal_while_kernels_compile_ends_the_process_at_once(tmp_path, number):
    with cold_start(tmp_path) as process:
        process.send_signal(number)
        assert process.wait(PATIENCE) == SIGNALS[number]
        assert "Traceback" not in process.stderr.read()
    assert_nothing_half_written(tmp_path)


def can_unshare() -> bool:
    with contextlib.suppress(FileNotFoundError):
        return subprocess.run(["unshare", "--pid", "--fork", "true"], capture_output=True, check=False).returncode == 0
    return False


@pytest.mark.skipif(not can_unshare(), reason="a pid namespace cannot be made here")
@pytest.mark.parametrize("number", SIGNALS)
def test_nc10_a_signal_to_process_1_while_kernels_compile_ends_it_at_once(tmp_path, number):
    """In a pid namespace of its own, where no signal ends a process that does not ask for it."""
    with cold_start(tmp_path, before=("unshare", "--pid", "--fork", "--kill-child")) as process:
        (child,) = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(child), number)
        assert process.wait(PATIENCE) == SIGNALS[number]
    assert_nothing_half_written(tmp_path)


def processes_that_mention(text: str) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes() if entry.name.isdecimal() else b""
            found += [entry.name] if text.encode() in command else []
    return found


def test_nc10_a_signal_while_the_model_is_fetched_leaves_no_file_and_no_process(tmp_path):
    """From an index that takes connections and never answers, by pip or without it."""
    with socket.create_server(("127.0.0.1", 0)) as index:
        url = f"http://127.0.0.1:{index.getsockname()[1]}/simple"
        environment = {**os.environ, "PIP_INDEX_URL": url, "PAGEDKV_CACHE_DIR": str(tmp_path)}
        command = [PAGEDKV, "serve", "smollm2", "--port", "0", "--metrics-port", "0"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        with process:
            assert "Downloading" in process.stderr.readline()
            index.accept()[0].close()
            process.send_signal(signal.SIGTERM)
            assert process.wait(PATIENCE) == 143
    assert [path.suffix for path in (tmp_path / "models").iterdir()] == [".lock"]
    assert processes_that_mention(str(tmp_path)) == []


def test_nc15_both_ports_answer_while_kernels_compile(tmp_path):
    port, metrics_port = free_port(), free_port()
    with cold_start(tmp_path, "--port", str(port), "--metrics-port", str(metrics_port)):
        url = f"http://127.0.0.1:{metrics_port}"
        statuses = {path: http_status(url + path) for path in ("/health", "/ready", "/metrics", "/api/events")}
        assert statuses == {"/health": 200, "/ready": 503, "/metrics": 503, "/api/events": 503}
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=PATIENCE)
        assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.mark.parametrize(("option", "field"), [("--port", "port"), ("--metrics-port", "metrics_port")])
def test_nc15_a_port_in_use_is_one_line_before_anything_is_made(tmp_path, option, field):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path)}
    environment["PAGEDKV_CACHE_DIR"] = str(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        other = {"--port": "--metrics-port", "--metrics-port": "--port"}[option]
        command = [PAGEDKV, "serve", "smollm2", option, str(port), other, "0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 2
    assert done.stderr == f"error INVALID_ARGUMENT {field}: cannot listen on 127.0.0.1:{port}: in use\n"
    assert list(tmp_path.iterdir()) == []


async def test_a_start_that_fails_leaves_no_port_open(monkeypatch):
    options = ServeOptions(model=None, shape=KvShape(1, 8, 2, 64), blocks=2, port=0, metrics_port=0, backend="cpu")
    front = await open_front(options)
    service = await asyncio.to_thread(build_service, options)
    monkeypatch.setattr("pagedkv.cli.assemble.ServiceMetrics", lambda *arguments, **options: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await service.start(front)
    for port in (front.listener.port, front.metrics_server.port):
        socket.create_server(("127.0.0.1", port)).close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


async def collect(stream):
    return [chunk async for chunk in stream]


async def test_rl07_fifty_streams_end_complete_or_cancelled_and_probes_and_new_calls_are_told_at_once(model):
    """The first SIGTERM begins a long grace, the second one ends it; half of the streams are short."""
    options = ("--blocks", "2000", "--max-num-seqs", "50", "--drain-seconds", "600")
    with ServiceProcess("serve", str(model), *options) as service:
        async with AsyncClient(service.address) as client, AsyncClient(service.address) as other:
            lengths = [(30, 1900)[at % 2] for at in range(50)]
            streams = [
                client.generate(token_ids=[5, 6, 7 + at], max_tokens=n, ignore_eos=True) for at, n in enumerate(lengths)
            ]
            firsts = [await anext(stream) for stream in streams]
            service.process.send_signal(signal.SIGTERM)
            reading = [asyncio.ensure_future(collect(stream)) for stream in streams]
            ready = f"{service.metrics_url}/ready"
            while await asyncio.to_thread(http_status, ready) == 200:
                await asyncio.sleep(0.01)
            assert await asyncio.to_thread(http_status, ready) == 503
            assert await asyncio.to_thread(http_status, f"{service.metrics_url}/health") == 200
            with pytest.raises(Draining):
                await other.allocate("late")
            await until(lambda: all(task.done() for task in reading[::2]), "end of the short streams")
            service.process.send_signal(signal.SIGTERM)
            ended = await asyncio.wait_for(asyncio.gather(*reading), PATIENCE)
        assert await asyncio.to_thread(service.process.wait, PATIENCE) == 0
    for first, rest, length in zip(firsts, ended, lengths, strict=True):
        count = sum(len(chunk.token_ids) for chunk in (first, *rest))
        reason = (first, *rest)[-1].finish_reason
        assert (reason, count) == ("length", length) or (reason == "cancelled" and length == 1900 and count < length)


def start_generating(service, *arguments):
    """Start the command line's stream; return its process and what it printed first."""
    command = [PAGEDKV, "generate", "a", "--target", service.address, "--max-tokens", "1900", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return process, process.stdout.read(1)


def test_rl07_the_command_line_says_that_the_server_cut_an_answer_off(model):
    with ServiceProcess("serve", str(model), "--blocks", "2000", "--drain-seconds", "0") as service:
        process, first = start_generating(service)
        service.process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=PATIENCE)
    assert (first + output).endswith(b"\n")
    assert errors == b"cancelled by the server: this is not the whole answer\n"
    assert process.returncode == 1


def test_an_interrupted_streams_error_is_on_a_line_of_its_own(model):
    with ServiceProcess("serve", str(model), "--blocks", "2000") as service:
        process, _ = start_generating(service)
        service.process.kill()
        output, errors = process.communicate(timeout=PATIENCE)
    assert output.endswith(b"\n")
    assert errors.startswith(b"error ")
    assert errors.count(b"\n") == 1
    assert process.returncode == 1


def test_an_interrupt_ends_the_command_line_with_130_and_its_line(model):
    with ServiceProcess("serve", str(model), "--blocks", "2000") as service:
        process, _ = start_generating(service)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=PATIENCE)
    assert output.endswith(b"\n")
    assert (process.returncode, errors) == (130, b"")


async def attend_for_ever(step, query):
    while True:
        await step.attend(["a"], query, layer=1)


async def test_rl07_a_step_stream_goes_on_in_the_grace_and_a_second_signal_ends_it_with_draining():
    with ServiceProcess(*BARE, "--drain-seconds", "600") as service:
        async with AsyncClient(service.address) as client:
            await client.allocate("a")
            rows = np.ones((2, 3, 2, 64), np.float32)
            await client.append("a", rows, rows)
            async with client.step() as step:
                query = np.ones((1, 8, 64), np.float32)
                await step.attend(["a"], query, layer=0)
                service.process.send_signal(signal.SIGTERM)
                await until(lambda: any("draining" in line for line in service.output), "drain")
                await step.attend(["a"], query, layer=1)
                service.process.send_signal(signal.SIGTERM)
                with pytest.raises(Draining):
                    await attend_for_ever(step, query)
        assert await asyncio.to_thread(service.process.wait, PATIENCE) == 0


LOSES_ITS_DEVICE = """
from pagedkv.cli.main import main
from pagedkv.compute.cpu.backend import CpuBackend
from pagedkv.errors import DeviceLost

def attend(*arguments, **options):
    raise DeviceLost("the card fell out")

CpuBackend.attend = attend
main()
"""


async def test_a_lost_device_ends_the_process_with_a_code_of_its_own_so_that_it_is_started_anew():
    with ServiceProcess(*BARE, program=(sys.executable, "-c", LOSES_ITS_DEVICE)) as service:
        async with AsyncClient(service.address) as client:
            await client.allocate("a")
            rows = np.ones((2, 3, 2, 64), np.float32)
            await client.append("a", rows, rows)
            with pytest.raises(DeviceError):
                await client.attend(["a"], np.ones((1, 8, 64), np.float32), layer=0)
        assert await asyncio.to_thread(service.process.wait, PATIENCE) == FAILURE_EXIT_CODE == 70
