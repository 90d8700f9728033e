"""Where a service listens: IPv6, unix sockets, ports from the environment; what it prints can be given back."""

from __future__ import annotations

import os
import re
import socket
import subprocess
from contextlib import closing, suppress

import pytest

from helpers.process import PAGEDKV, ServiceProcess
from helpers.server import serving
from helpers.waiting import PATIENCE
from pagedkv.address import Hold, address_text, clear_unix_path
from pagedkv.cli.environment import drop_platform_variables
from pagedkv.client import AsyncClient, Client
from pagedkv.errors import InvalidArgument
from pagedkv.metrics.top import service_url, stream_frames
from pagedkv.rpc.server import ServerConfig

BARE = ("serve", "--no-model", "--layers", "2", "--heads", "8", "--kv-heads", "2", "--head-dim", "64", "--blocks", "32")
KUBERNETES = "tcp://10.96.12.7:50051"


def has_ipv6() -> bool:
    with suppress(OSError), socket.socket(socket.AF_INET6) as place:
        place.bind(("::1", 0))
        return True
    return False


def leave_socket(path):
    """Leave a socket file behind as a server does that was killed."""
    with socket.socket(socket.AF_UNIX) as place:
        place.bind(str(path))


def run(*arguments, **environment):
    return subprocess.run(
        [PAGEDKV, *arguments], capture_output=True, text=True, timeout=850, env={**os.environ, **environment}
    )


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_nc11_an_ipv6_address_is_printed_in_brackets_and_can_be_given_back(host):
    with ServiceProcess(*BARE, "--host", host) as service:
        assert service.address.startswith("[::1]:")
        assert service.metrics_url.startswith("http://[::1]:")
        with Client(service.address) as client:
            assert client.usage().total == 32
        with closing(stream_frames(service_url(service.metrics_url.removeprefix("http://")))) as frames:
            assert next(frames)["type"] == "snapshot"


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
@pytest.mark.parametrize("option", ["--port", "--metrics-port"])
def test_nc11_an_ipv6_port_in_use_is_named_in_brackets(option):
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = str(taken.getsockname()[1])
        other = {"--port": "--metrics-port", "--metrics-port": "--port"}[option]
        done = run(*BARE, "--host", "::1", option, port, other, "0")
    assert f"cannot listen on [::1]:{port}: in use" in done.stderr


def test_nc16_a_service_on_a_unix_socket_is_reached_by_what_it_prints_and_leaves_no_file(tmp_path):
    path = tmp_path / "pagedkv.sock"
    leave_socket(path)
    with ServiceProcess(*BARE, "--host", f"unix:{path}") as service:
        assert service.address == f"unix:{path}"
        assert service.metrics_url.startswith("http://127.0.0.1:")
        with Client(service.address) as client:
            assert client.usage().total == 32
        assert service.stop() == 0
    assert not path.exists()


@pytest.mark.parametrize("form", ["unix:{}", "unix://{}"])
async def test_nc16_both_forms_of_a_path_work_and_need_no_word_for_being_insecure(tmp_path, form):
    host = form.format(tmp_path / "socket")
    async with serving(host=host), AsyncClient(host, timeout=PATIENCE) as client:
        assert (await client.usage()).total == 64


def make_file(path):
    path.write_text("precious")


def make_link(path):
    leave_socket(path.with_suffix(".target"))
    path.symlink_to(path.with_suffix(".target"))


@pytest.mark.parametrize("make", [make_file, make_link, lambda path: path.mkdir(), os.mkfifo])
def test_nc16_what_is_not_a_socket_of_ours_is_never_replaced(tmp_path, make):
    path = tmp_path / "place"
    make(path)
    before = path.lstat()
    with pytest.raises(InvalidArgument, match="place is another's file") as caught:
        Hold(f"unix:{path}", 0, field="port")
    assert caught.value.field == "host"
    assert path.lstat() == before


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
def test_nc16_a_socket_that_somebody_listens_at_is_in_use(tmp_path, kind):
    path = tmp_path / "place"
    with socket.socket(socket.AF_UNIX, kind) as server:
        server.bind(str(path))
        if kind == socket.SOCK_STREAM:
            server.listen()
        with pytest.raises(InvalidArgument, match="in use by another"):
            clear_unix_path(path)
        assert path.is_socket()


@pytest.mark.parametrize("too_many", [0, 1])
def test_nc16_a_path_of_107_bytes_is_the_longest(tmp_path, too_many):
    path = tmp_path / ("x" * (107 + too_many - len(os.fsencode(tmp_path)) - 1))
    if not too_many:
        clear_unix_path(path)
        return
    with pytest.raises(InvalidArgument, match=r"108 bytes.* at most 107") as caught:
        clear_unix_path(path)
    assert caught.value.field == "host"


def test_nc16_a_long_path_is_refused_by_the_command_line_in_one_line(tmp_path):
    done = run(*BARE, "--host", f"unix:{tmp_path}/{'x' * 120}.sock", "--metrics-port", "0")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "at most 107" in done.stderr


@pytest.mark.parametrize("character", "?#,%")
def test_nc16_a_path_that_no_target_can_name_is_refused_by_its_character(tmp_path, character):
    with pytest.raises(InvalidArgument, match=re.escape(f"holds '{character}'")) as caught:
        Hold(f"unix:{tmp_path}/a{character}b", 0, field="port")
    assert caught.value.field == "host"


@pytest.mark.parametrize("name", ["a b", "é日", "a:b", "a'b"])
async def test_nc16_any_other_path_is_reached_by_its_target(tmp_path, name):
    host = f"unix:{tmp_path}/{name}"
    async with serving(host=host), AsyncClient(host, timeout=PATIENCE) as client:
        assert (await client.usage()).total == 64


@pytest.mark.parametrize("host", ["unix:", "unix:/no/such/directory/socket", "unix:/"])
def test_nc16_a_path_that_cannot_hold_a_socket_is_refused_by_name(host):
    with pytest.raises(InvalidArgument, match="not in an existing directory"):
        Hold(host, 0, field="port")


@pytest.mark.parametrize(
    ("host", "port", "text"),
    [
        ("127.0.0.1", 1, "127.0.0.1:1"),
        ("localhost", 1, "localhost:1"),
        ("::", 1, "[::]:1"),
        ("fe80::1%eth0", 1, "[fe80::1%eth0]:1"),
        ("unix:/a", 1, "unix:/a"),
    ],
)
def test_nc11_addresses_are_written_as_targets(host, port, text):
    assert address_text(host, port) == text


def test_a_held_port_is_refused_to_others_only_when_somebody_listens_there():
    hold = Hold("localhost", 0, field="port")
    with socket.create_server(("127.0.0.1", hold.port)) as server:
        hold.release()
        with pytest.raises(InvalidArgument, match="in use") as caught:
            Hold("127.0.0.1", server.getsockname()[1], field="metrics_port")
    assert caught.value.field == "metrics_port"


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])
def test_a_host_that_is_none_of_this_machine_is_refused_by_its_field(host):
    with pytest.raises(InvalidArgument) as caught:
        Hold(host, 0, field="port")
    assert caught.value.field == "host"


def test_a_unix_socket_is_this_machine():
    assert ServerConfig(host="unix:/a").host == "unix:/a"


@pytest.mark.parametrize("value", [KUBERNETES, "udp://10.96.12.7:50051", "sctp://[fd00::7]:50051"])
@pytest.mark.parametrize("name", ["PAGEDKV_PORT", "PAGEDKV_METRICS_PORT"])
def test_nc01_what_kubernetes_sets_for_a_service_of_that_name_is_ignored_with_a_line(name, value):
    done = run(*BARE, "--max-num-seqs", "0", **{name: value})
    ignored, error = done.stderr.splitlines()
    assert ignored == f"{name}={value} is ignored: Kubernetes sets it for a service of that name"
    assert "max_num_seqs: must be at least 1" in error


def test_nc01_variables_of_kubernetes_that_are_no_options_are_dropped_in_silence():
    said, variables = [], {"PAGEDKV_PORT_50051_TCP": KUBERNETES, "PAGEDKV_HOST": "::1", "OTHER_PORT": KUBERNETES}
    drop_platform_variables(said.append, variables)
    assert variables == {"PAGEDKV_HOST": "::1", "OTHER_PORT": KUBERNETES}
    assert said == []


@pytest.mark.parametrize("name", ["PAGEDKV_PORT", "PAGEDKV_METRICS_PORT", "PAGEDKV_BLOCKS", "PAGEDKV_DRAIN_SECONDS"])
def test_nc01_any_other_bad_value_is_shown_in_the_error(name):
    done = run(*BARE[:-2], **{name: "http://10.96.12.7"})
    assert done.returncode == 2
    assert "http://10.96.12.7" in done.stderr
    assert name in done.stderr
    assert "Traceback" not in done.stderr
