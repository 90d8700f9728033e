"""The generated code is that of the protos, and the protos keep the house rules."""

import itertools
import subprocess

from helpers.generate_protos import PROTOS, VENV_BIN, find_stale
from pagedkv.v1 import generation_pb2, kv_cache_pb2


def test_generated_code_is_that_of_the_protos():
    assert find_stale() == []


def test_protos_pass_the_linter():
    done = subprocess.run([VENV_BIN / "buf", "lint", PROTOS], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr


def test_protos_comment_every_method_field_and_value():
    for path in PROTOS.rglob("*.proto"):
        lines = [line.strip() for line in path.read_text().splitlines()]
        for before, line in itertools.pairwise(lines):
            opens = line.startswith(("rpc ", "message ", "enum ", "service ")) or (line.endswith(";") and "=" in line)
            is_syntax = line.startswith(("syntax", "package", "import"))
            assert is_syntax or not opens or before.startswith("//") or before.endswith("{}"), f"{path.name}: {line}"


def test_protos_hold_the_two_services():
    assert list(kv_cache_pb2.DESCRIPTOR.services_by_name) == ["KvCache"]
    assert list(generation_pb2.DESCRIPTOR.services_by_name) == ["Generation"]
