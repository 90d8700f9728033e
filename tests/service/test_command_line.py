"""The commands of the README, run as a person runs them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import urllib.request
from importlib.metadata import version
from pathlib import Path

import pytest
from typer.main import get_command

from helpers.process import PAGEDKV, ServiceProcess
from pagedkv.cli.app import app
from pagedkv.cli.options import ServeOptions, parse_memory
from pagedkv.client import Client
from pagedkv.errors import InvalidArgument

README = (Path(__file__).parents[2] / "README.md").read_text()
BARE = ("serve", "--no-model", "--layers", "2", "--heads", "8", "--kv-heads", "2", "--head-dim", "64", "--blocks", "32")


def run(*arguments: str, text: str | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, **environment}
    return subprocess.run([PAGEDKV, *arguments], input=text, capture_output=True, text=True, timeout=850, env=env)


def test_demo_ends_with_a_right_streamed_answer_and_a_summary():
    done = run("demo")
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    speeds = r"prefill \d+ tokens/s, decode \d+ tokens/s, first token after \d+ and \d+ ms, \d+ of \d+ blocks used"
    assert re.search(speeds, done.stdout)
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


def test_generate_reads_standard_input_and_says_on_request_how_it_went(smollm2_service):
    command = ["generate", "-", "--target", smollm2_service.address, "--max-tokens", "2", "--stats"]
    done = run(*command, text="The capital of France is\n")
    assert done.stdout == " Paris.\n", done.stderr
    assert re.fullmatch(
        r"length: 5 prompt tokens \(\d+ cached\), 2 generated; first after \d+ ms, "
        r"prefill [\d-]+ tokens/s, decode [\d-]+ tokens/s\n",
        done.stderr,
    )


def test_generate_refuses_standard_input_that_is_no_text():
    done = subprocess.run([PAGEDKV, "generate", "-"], input=b"\xff", capture_output=True, timeout=850)
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)
    assert b"prompt: standard input is not UTF-8" in done.stderr


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_version_is_the_packages(flag):
    assert run(flag).stdout == f"pagedkv {version('pagedkv')}\n"


def test_a_terminal_that_knows_no_other_characters_gets_questions_marks_and_no_error(smollm2_service):
    ascii_only = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
    question = ["Repeat: é日 –", "--chat", "--max-tokens", "12", "--target", smollm2_service.address]
    for arguments in (["generate", *question], ["doctor"], ["--help"], ["serve", "né"]):
        done = run(*arguments, **ascii_only)
        assert "UnicodeEncodeError" not in done.stderr
        assert "Traceback" not in done.stderr
        assert done.returncode == (2 if arguments[0] == "serve" else 0)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--backend c", ["cpu", "cuda"]),
        ("--activations i", ["int16", "int8"]),
        ("--preemption ''", ["recompute", "swap"]),
        ("--dtype bf", ["bfloat16"]),
        ("--block-size 1", ["16", "128"]),
        ("--head-dim 9", ["96"]),
    ],
)
def test_options_with_few_values_are_completed_by_the_shell(words, expected):
    asked = {"_PAGEDKV_COMPLETE": "complete_bash", "COMP_WORDS": f"pagedkv serve {words}", "COMP_CWORD": "3"}
    assert run(**asked).stdout.split() == expected


def test_every_option_has_one_variable_and_the_program_itself_none():
    command = get_command(app)
    assert run(PAGEDKV_INSTALL_COMPLETION="1", PAGEDKV_VERSION="1").stdout.startswith(run("--help").stdout[:80])
    helped = run("serve", "--help", COLUMNS="400", TERMINAL_WIDTH="400").stdout
    names = {parameter.name for parameter in command.commands["serve"].params} - {"model", "help"}
    assert set(re.findall(r"PAGEDKV_\w+", helped)) == {f"PAGEDKV_{name.upper()}" for name in names}


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
            with urllib.request.urlopen(service.metrics_url + path, timeout=600) as response:
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
        (
            ("serve", "--no-model", "--blocks", "4", "--host", "0.0.0.0"),
            "host: is not loopback and there is no TLS; say --insecure",
        ),
        (("serve",), "model: is needed"),
        (("serve", "--no-model", "--blocks", "4", "--backend", "tpu"), "backend: must be auto, cpu or cuda"),
        (("serve", "--no-model", "--block-size", "10"), "block_size: must be one of (8, 16, 32, 64, 128), got 10"),
        (("serve", "--no-model", "--port", "65536"), "port: must be in [0, 65535], got 65536"),
        (("serve", "--no-model", "--metrics-port", "70000"), "metrics_port: must be in [0, 65535], got 70000"),
        (("serve", "--no-model", "--port", "9400"), "metrics_port: must differ from the gRPC port"),
        (("serve", "--no-model", "--swap-memory", "lots"), "swap_memory: is not a size"),
        (("serve", "--no-model", "--drain-seconds", "nan"), "drain_seconds: must be finite"),
        (("serve", "--no-model", "--max-batch-tokens", "8"), "max_batch_tokens: must be at least max_num_seqs (64)"),
        (("serve", "--no-model", "--blocks", "many"), "'--blocks'"),
        (("serve", "--no-model", "--blocs", "4"), "No such option: --blocs"),
        (("serve", "--no-model", "smollm2"), "model: and --no-model exclude each other"),
        (("serve", "smolm2"), 'did you mean "smollm2"?'),
        (("serve", "meta-llama/Llama-3.2-1B"), "`hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B`"),
        (("generate", "a", "--target", "127.0.0.1:1"), "UNAVAILABLE"),
        (("top", "127.0.0.1:1"), "no service answers at http://127.0.0.1:1 (Connection refused); start one with"),
        (("top", "ftp://a"), "url: must be http://HOST:PORT"),
        (("top", "::1:9400"), "url: is no URL or host:port"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_field(arguments, message):
    done = run(*arguments)
    assert done.returncode == (1 if arguments[0] == "generate" else 2)
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_file_that_is_no_model_is_refused_in_one_line():
    done = run("serve", __file__, "--port", "0", "--metrics-port", "0")
    assert done.returncode == 1
    assert "not a GGUF file" in done.stderr
    assert done.stderr.count("\n") == 1


def test_top_at_the_grpc_port_says_so(smollm2_service):
    done = run("top", smollm2_service.address)
    assert "does not speak HTTP: it may be the gRPC port" in done.stderr
    assert done.returncode == 2


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
