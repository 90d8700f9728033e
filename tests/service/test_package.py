"""What is shipped: the wheel, what it needs, and that none of it needs a GPU's packages until a GPU is asked for."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel, built from this checkout without a network, unpacked; returns its folder."""
    target = tmp_path_factory.mktemp("wheel")
    build = "import sys; from hatchling.build import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(target)], cwd=ROOT, check=True, capture_output=True, timeout=850)
    (path,) = target.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(target / "unpacked")
    return target / "unpacked"


def test_wheel_holds_the_package_and_the_kernels_and_nothing_of_the_tests(wheel):
    names = {path.relative_to(wheel).as_posix() for path in wheel.rglob("*") if path.is_file()}
    assert {name.split("/")[0] for name in names} == {"pagedkv", f"pagedkv-{PROJECT['project']['version']}.dist-info"}
    sources = {path.name for path in (ROOT / "cudasrc").glob("*.cu*")}
    assert {name.rsplit("/")[-1] for name in names if "/cudasrc/" in name} >= sources
    assert not [name for name in names if re.search(r"(^|/)(tests?|virtual_gpu|helpers|conftest)(/|\.)", name)]


def test_protos_of_the_wheel_are_those_of_the_checkout_and_compile_where_they_lie(wheel, tmp_path):
    protos = {path.relative_to(ROOT / "protos"): path.read_text() for path in (ROOT / "protos").rglob("*.proto")}
    there = wheel / "pagedkv" / "protos"
    assert {path.relative_to(there): path.read_text() for path in there.rglob("*.proto")} == protos
    compiler = [sys.executable, "-m", "grpc_tools.protoc", f"-I{there}", f"--descriptor_set_out={tmp_path}/all"]
    subprocess.run([*compiler, *map(str, protos)], cwd=tmp_path, check=True, timeout=850)


def test_wheel_imports_nothing_of_the_tests(wheel):
    pattern = re.compile(
        r"^\s*(?:from|import)\s+(tests|helpers|virtual_gpu|conftest|pytest|hypothesis)\b", re.MULTILINE
    )
    assert {str(path): found for path in wheel.rglob("*.py") if (found := pattern.findall(path.read_text()))} == {}


WITHOUT_CUDA = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cuda", "nvmath", "nvidia"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
sys.path.insert(0, sys.argv[1])
import numpy as np
import pagedkv
assert pagedkv.__file__.startswith(sys.argv[1]), pagedkv.__file__
from pagedkv.cli.assemble import build_service
from pagedkv.cli.options import ServeOptions
from pagedkv.compute.cuda.doctor import examine_cuda
from pagedkv.config import KvShape
from pagedkv.errors import DeviceError

said = []
options = {"model": None, "shape": KvShape(1, 8, 2, 64), "blocks": 2}
service = build_service(ServeOptions(**options, backend="auto"), say=said.append)
backend, rows = service.backend, np.ones((16, 2, 64), np.float32)
backend.submit(lambda: backend.write_kv(0, rows, rows, np.arange(16))).result()
assert backend.name == "cpu" and backend.read_block(0).any()
assert "No module named" in said[0], said
try:
    build_service(ServeOptions(**options, backend="cuda"))
except DeviceError as error:
    assert "No module named" in error.message
else:
    raise AssertionError("CUDA without its packages")
print([(finding.subject, str(finding.verdict)) for finding in examine_cuda()])
"""


def test_wheel_serves_on_the_cpu_with_every_cuda_package_hidden(wheel):
    command = [sys.executable, "-c", WITHOUT_CUDA, str(wheel)]
    done = subprocess.run(command, cwd=wheel, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[('cuda driver', '--'), ('nvrtc', '--'), ('cublas', '--')]"


@pytest.mark.parametrize(("lock", "extras"), [("core", []), ("cuda", ["cuda"])])
def test_lock_fixes_a_version_of_everything_that_the_project_names(lock, extras):
    text = (ROOT / "requirements" / f"{lock}.lock").read_text()
    fixed = dict(re.findall(r"^([a-z0-9-]+)==([^\s;]+)", text, re.MULTILINE))
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *(line for extra in extras for line in project["optional-dependencies"][extra])]
    for requirement in map(Requirement, wanted):
        assert Version(fixed[requirement.name]) in requirement.specifier, requirement
    dev = dict(re.findall(r"^([a-z0-9-]+)==([^\s;]+)", (ROOT / "requirements/dev.lock").read_text(), re.MULTILINE))
    assert {name: version for name, version in fixed.items() if dev.get(name, version) != version} == {}
