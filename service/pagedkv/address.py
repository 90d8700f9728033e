"""Addresses to listen on: how they are written, and whether they can be had."""

from __future__ import annotations

import errno
import os
import socket
import stat
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from pagedkv.errors import InvalidArgument

_UNIX: Final = "unix:"
_MAX_UNIX_PATH_BYTES: Final = 107  # of Linux: 108 with the NUL
_NOT_IN_TARGETS: Final = frozenset("?#,%")


def address_text(host: str, port: int) -> str:
    """Return an address as it is printed and can be given back as a target: IPv6 in brackets, sockets by path."""
    if host.startswith(_UNIX):
        return host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def unix_path(host: str) -> Path | None:
    """Return the path of "unix:/path" or "unix:///path", None for a host of the network."""
    if not host.startswith(_UNIX):
        return None
    path = host.removeprefix(_UNIX)
    return Path("/" + path.lstrip("/") if path.startswith("///") else path)


class Hold:
    """A place to listen at, taken for this process before it has a server: nobody else gets it meanwhile.

    The socket does not listen, so that a server of this process takes the port over without a gap; then `release`.
    """

    def __init__(self, host: str, port: int, *, field: str) -> None:
        """Raise InvalidArgument naming the field if the port is taken, or the host is none of this machine."""
        self._sockets = ExitStack()
        self.port = port
        if (path := unix_path(host)) is not None:
            clear_unix_path(path)
            return
        try:
            self._bind(host)
        except OSError as error:
            self.release()
            is_about_host = isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL
            raise InvalidArgument(
                f"cannot listen on {address_text(host, port)}: {_reason(error)}",
                field="host" if is_about_host else field,
                value=host if is_about_host else port,
            ) from error

    def release(self) -> None:
        """Give the place free again. Idempotent."""
        self._sockets.close()

    def _bind(self, host: str) -> None:
        found = socket.getaddrinfo(host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            place = self._sockets.enter_context(socket.socket(family, kind, protocol))
            place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                place.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            place.bind((address[0], self.port, *address[2:]))
            self.port = place.getsockname()[1]


def clear_unix_path(path: Path) -> None:
    """Make room for a socket at a path: what a server of this user left behind is removed, anything else stays.

    Raises InvalidArgument for a path that is too long, in no directory, or taken.
    """
    size = len(os.fsencode(path))
    if size > _MAX_UNIX_PATH_BYTES:
        raise _bad_path(f"is a path of {size} bytes, a socket's has at most {_MAX_UNIX_PATH_BYTES}", path)
    if bad := sorted(_NOT_IN_TARGETS & set(str(path))):
        raise _bad_path(f"holds {bad[0]!r}, which means something else in a target of gRPC", path)
    if not path.name or not path.parent.is_dir():
        raise _bad_path("is not in an existing directory", path)
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise _bad_path("is in a directory that cannot be written to", path)
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        raise _bad_path("is another's file, and is not replaced", path)
    if not _is_abandoned(path):
        raise _bad_path("is in use by another server", path)
    path.unlink()


def _is_abandoned(path: Path) -> bool:
    """Whether nobody listens at a socket file, which is known from being refused there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) == errno.ECONNREFUSED


def _bad_path(message: str, path: Path) -> InvalidArgument:
    return InvalidArgument(f"{path} {message}", field="host", value=path, limit=_MAX_UNIX_PATH_BYTES)


def _reason(error: OSError) -> str:
    return "in use" if error.errno == errno.EADDRINUSE else (error.strerror or str(error)).lower()
