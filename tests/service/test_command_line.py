"""The commands of the README, run as a person runs them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest

from helpers.process import PAGEDKV, ServiceProcess
from pagedkv.cli.options import ServeOptions, parse_memory
from pagedkv.client import Client
from pagedkv.errors import InvalidArgument

README = (Path(__file__).parents[2] / "README.md").read_text()
BARE = ("serve", "--no-model", "--layers", "2", "--heads", "8", "--kv-heads", "2", "--head-dim", "64", "--blocks", "32")


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [PAGEDKV, *arguments], capture_output=True, text=True, timeout=240, env={**os.environ, **environment}
    )


def test_demo_ends_with_a_right_streamed_answer_and_a_summary():
    done = run("demo")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert re.search(r"\d+ tokens/s, first token after \d+ and \d+ ms, \d+ of \d+ blocks used", done.stdout)
    assert int(re.search(r"(\d+) prefix tokens of the follow-up hit", done.stdout.replace("\n", " ")).group(1)) > 0


def test_doctor_ends_well_and_says_how_to_get_what_is_missing():
    done = run("doctor")
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stdout + done.stderr
    assert any(re.match(r"ok cuda kernels \d+ variants for sm_\d+ in [\d.]+ s", line) for line in lines), done.stdout
    assert lines[-1] in ("pagedkv serve takes the CPU", "pagedkv serve takes the GPU")
    if any(line.startswith("-- cublas") for line in lines):
        assert "install pagedkv[cuda]" in done.stdout


def test_generate_streams_from_a_running_service(smollm2_service):
    done = run("generate", "The capital of France is", "--target", smollm2_service.address, "--max-tokens", "2")
    assert done.stdout == " Paris.\n", done.stderr


def test_readme_client_example_runs_against_a_bare_cache():
    (example,) = [code for code in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "Client(" in code]
    with ServiceProcess(*BARE) as service:
        exec(
            example.replace("127.0.0.1:50051", service.address),
            {"print": lambda *args: printed.extend(args)} | {"printed": (printed := [])},
        )
        assert printed[0] == (2, 8, 64)
        with Client(service.address) as client:
            assert client.usage().free == 32


def test_serve_reports_metrics_health_and_drains_on_sigterm():
    with ServiceProcess(*BARE) as service:
        for path, text in (("/metrics", "pagedkv_"), ("/health", ""), ("/ready", "")):
            with urllib.request.urlopen(service.metrics_url + path, timeout=60) as response:
                assert response.status == 200
                assert text in response.read().decode()
        assert service.stop(signal.SIGTERM) == 0
    assert any("draining" in line for line in service.output)


def test_flags_win_over_environment_over_file(tmp_path):
    config = tmp_path / "pagedkv.toml"
    config.write_text('blocks = 11\nblock_size = 32\ndtype = "float16"\n')
    arguments = [argument for argument in BARE if argument not in ("--blocks", "32")]
    environment = {"PAGEDKV_BLOCK_SIZE": "64", "PAGEDKV_DTYPE": "bfloat16"}
    os.environ.update(environment)
    try:
        with ServiceProcess(*arguments, "--config", str(config), "--dtype", "float32") as service:
            with Client(service.address) as client:
                info = client.info()
    finally:
        for name in environment:
            del os.environ[name]
    assert (info.num_blocks, info.block_size, str(info.dtype)) == (11, 64, "float32")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("serve", "no-such-model"), "model: is neither"),
        (("serve", "--no-model", "--head-dim", "63"), "head_dim: must be one of"),
        (("serve", "--no-model", "--heads", "9", "--kv-heads", "2"), "num_kv_heads: must divide"),
        (("serve", "--no-model", "--memory", "lots"), "memory: is not a size"),
        (("serve", "--no-model", "--memory", "1k"), "memory: 1024 bytes do not hold one block"),
        (("serve", "--no-model", "--memory", "900GiB"), "memory"),
        (("serve", "--no-model", "--blocks", "4", "--host", "0.0.0.0"), "insecure"),
        (("serve",), "model: is needed"),
        (("serve", "--no-model", "--blocks", "4", "--backend", "tpu"), "backend: must be auto, cpu or cuda"),
        (("serve", __file__), "GGUF"),
    ],
)
def test_bad_options_are_one_line_that_names_the_field(arguments, message):
    done = run(*arguments)
    assert done.returncode != 0
    assert message.lower() in " ".join(done.stderr.split()).lower(), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2GiB", 2**31), ("512m", 2**29), ("1024", 1024), ("0.5", 500), ("50%", 500), (".25", 250), ("1.5k", 1536)],
)
def test_parse_memory_takes_sizes_and_fractions(text, expected):
    assert parse_memory(text, 1000) == expected


@pytest.mark.parametrize("field", ["port", "backend", "blocks", "threads", "activations", "drain_seconds"])
def test_serve_options_out_of_range_are_refused_by_name(field):
    bad = {"port": 65536, "backend": "tpu", "blocks": 0, "threads": 0, "activations": "int3", "drain_seconds": -1.0}
    with pytest.raises(InvalidArgument) as caught:
        ServeOptions(model="smollm2", shape=None, **{field: bad[field]})
    assert caught.value.field == field
