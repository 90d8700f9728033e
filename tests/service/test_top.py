"""`pagedkv top` in a terminal of its own: keys, size, name, and the terminal as it was afterwards."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time

import pytest

from helpers.process import PAGEDKV, ServiceProcess
from helpers.tiny_models import make_tiny_model
from helpers.waiting import PATIENCE
from pagedkv.cli.models import model_name
from pagedkv.errors import InvalidArgument
from pagedkv.metrics.top import service_url


class Terminal:
    """A program in a pseudo terminal: what it wrote, its size, its keys."""

    def __init__(self, *command, columns=100, **environment):
        self._ours, theirs = pty.openpty()
        self.resize(columns)
        self.usual = termios.tcgetattr(theirs)
        self._theirs = theirs
        env = {**os.environ, "TERM": "xterm-256color", **environment}
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=env)
        self.text = ""

    def resize(self, columns):
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))

    def read_until(self, pattern):
        """Read on until what came since the last call matches."""
        ends, new = time.monotonic() + PATIENCE, ""
        while not re.search(pattern, new):
            assert time.monotonic() < ends, new
            if select.select([self._ours], [], [], 0.1)[0]:
                new += re.sub(r"\x1b\[[0-9;]*[A-Zm]", "", os.read(self._ours, 65536).decode(errors="replace"))
        self.text += new
        return new

    def press(self, keys):
        os.write(self._ours, keys.encode())

    def wait(self):
        """Return the exit code; the terminal must be as it was."""
        code = self.process.wait(PATIENCE)
        assert termios.tcgetattr(self._theirs) == self.usual
        return code

    def close(self):
        self.process.kill()
        self.process.wait(PATIENCE)
        os.close(self._ours)
        os.close(self._theirs)


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with ServiceProcess("serve", str(make_tiny_model(tmp_path_factory.mktemp("tiny"))), "--blocks", "300") as service:
        yield service


@pytest.fixture
def watch(service):
    opened = []

    def start(*arguments, **options):
        opened.append(Terminal(PAGEDKV, "top", *arguments, **options))
        return opened[-1]

    yield start
    for terminal in opened:
        terminal.close()


def top_line(columns):
    """The map's upper edge over all columns."""
    return rf"(?m)[╭+][─-][^\r\n]{{{columns - 4}}}[─-][╮+]"


@pytest.mark.parametrize("key", ["q", "Q"])
def test_top_shows_its_keys_and_the_model_and_ends_on_them(service, watch, key):
    terminal = watch(service.metrics_url)
    assert "q or Ctrl-C: quit" in terminal.read_until(r"quit ─╯")
    assert "pagedkv · tiny-llama · cpu" in terminal.text
    terminal.press(key)
    assert terminal.wait() == 0


def test_top_takes_a_bare_host_and_port_also_from_its_variable(service, watch):
    address = service.metrics_url.removeprefix("http://")
    for terminal in (watch(address), watch(PAGEDKV_METRICS_URL=address)):
        terminal.read_until("300 blocks")
        terminal.press("q")
        assert terminal.wait() == 0


def test_top_follows_the_size_of_its_terminal(service, watch):
    terminal = watch(service.metrics_url, columns=100)
    terminal.read_until(top_line(100))
    for columns in (60, 120):
        terminal.resize(columns)
        terminal.process.send_signal(signal.SIGWINCH)
        terminal.read_until(top_line(columns))
    terminal.press("q")
    assert terminal.wait() == 0


def test_top_draws_with_ascii_where_the_terminal_knows_no_more(service, watch):
    terminal = watch(service.metrics_url, PYTHONIOENCODING="ascii")
    terminal.read_until(r"quit -\+")
    terminal.press("q")
    assert terminal.wait() == 0
    assert terminal.text.isascii()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_top_gives_the_terminal_back_when_it_is_ended(service, watch, number, code):
    terminal = watch(service.metrics_url)
    terminal.read_until("300 blocks")
    terminal.process.send_signal(number)
    assert terminal.wait() == code
    terminal.read_until(r"\[\?1049l.*\[\?25h|\[\?25h.*\[\?1049l")  # the usual screen, the cursor


@pytest.mark.parametrize(
    ("address", "url"),
    [
        ("host:1", "http://host:1"),
        ("host", "http://host:9400"),
        ("[::1]:9400", "http://[::1]:9400"),
        ("[::1]", "http://[::1]:9400"),
        ("http://host/", "http://host"),
        ("https://host:1", "https://host:1"),
    ],
)
def test_an_address_becomes_a_url(address, url):
    assert service_url(address) == url


@pytest.mark.parametrize("address", ["", "http://", "ftp://host", "::1:9400", "host:port", "host:99999"])
def test_what_is_no_address_is_refused_by_name(address):
    with pytest.raises(InvalidArgument) as caught:
        service_url(address)
    assert caught.value.field == "url"


@pytest.mark.parametrize(
    ("model", "name"), [("smollm2", "smollm2"), ("/a/b.Q4_1.gguf", "b.Q4_1"), ("/a/Llama-3.2-1B/", "Llama-3.2-1B")]
)
def test_a_model_is_named_by_its_file_or_directory(model, name):
    assert model_name(model) == name
