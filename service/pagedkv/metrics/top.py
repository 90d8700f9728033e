"""The page map of a running service as text for a terminal, fed by the same stream as the page."""

from __future__ import annotations

import base64
import json
import urllib.request
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import BadStatusLine, HTTPException
from typing import Any, Final
from urllib.error import HTTPError
from urllib.parse import urlsplit

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pagedkv.config import require
from pagedkv.errors import InvalidArgument
from pagedkv.loopback import is_loopback

_STYLES: Final = ("bright_black", "cyan", "blue", "yellow", "magenta", "red")  # by BlockState, as the glyphs


@dataclass(frozen=True, slots=True)
class _Look:
    """What a terminal draws with."""

    glyphs: str  # by BlockState: distinct without colour too
    sparks: str  # from nothing to all
    separator: str


_UNICODE: Final = _Look("·░▓█P~", " ▁▂▃▄▅▆▇█", " · ")
_ASCII: Final = _Look(".:o#P~", " .:-=+*#@", " | ")
_MAP_ROWS, _HISTORY = 16, 60
_STREAM_SECONDS: Final = 15.0
_DEFAULT_PORT: Final = 9400

Frame = dict[str, Any]


class PoolView:
    """What the stream's frames add up to."""

    def __init__(self) -> None:
        self.pool: Frame = {}
        self.figures: Frame = {}
        self.states = bytearray()
        self.tokens: dict[str, int] = {}
        self.swapped: set[str] = set()
        self.rates: deque[float] = deque(maxlen=_HISTORY)

    def apply(self, frame: Frame) -> bool:
        """Take a frame in; False for a heartbeat."""
        if "type" not in frame:
            return False
        if frame["type"] == "snapshot":
            self.pool, self.tokens, self.swapped = frame["pool"], {}, set()
        else:
            self._note_rate(frame)
        if "states" in frame:
            self.states = bytearray(base64.b64decode(frame["states"]))
        for start, count, state in frame.get("runs", ()):
            self.states[start : start + count] = bytes([state]) * count
        for change in frame["sequences"]:
            self.tokens[change["id"]] = change["tokens"]
            has_table = change["keep"] or change["table"] or not change["tokens"]
            (self.swapped.discard if has_table else self.swapped.add)(change["id"])
        for name in frame.get("gone", ()):
            self.tokens.pop(name, None)
            self.swapped.discard(name)
        self.figures = frame
        return True

    def _note_rate(self, frame: Frame) -> None:
        seconds = frame["time"] - self.figures.get("time", frame["time"])
        if seconds > 0:
            self.rates.append((frame["generated_tokens"] - self.figures["generated_tokens"]) / seconds)


def service_url(address: str) -> str:
    """Return the URL of a metrics server given as a URL, host:port or host. Raises InvalidArgument."""
    url = address if "://" in address else f"http://{address}"
    try:
        parts = urlsplit(url.rstrip("/"))
        port = parts.port
    except ValueError as error:
        raise InvalidArgument(f"is no URL or host:port: {error}", field="url", value=address) from error
    require(parts.scheme in ("http", "https") and bool(parts.hostname), "url", "must be http://HOST:PORT", address)
    is_bare = "://" not in address and port is None
    return f"{url}:{_DEFAULT_PORT}" if is_bare else parts.geturl()


def stream_frames(url: str) -> Iterator[Frame]:
    """Yield the service's frames as they come. Raises InvalidArgument if no service of ours answers."""
    try:
        with _opener(url).open(url.rstrip("/") + "/api/events", timeout=_STREAM_SECONDS) as response:
            for line in response:
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
    except (OSError, ValueError, HTTPException) as error:
        raise InvalidArgument(_explain(url, error), field="url", value=url) from error


def _explain(url: str, error: Exception) -> str:
    """Say what is wrong with an address, and what to do."""
    if isinstance(error, HTTPError):
        with error:
            is_loading = error.code == 503
        return f"the service at {url} is still loading" if is_loading else f"no service of ours is at {url}: {error}"
    if isinstance(error, BadStatusLine | ConnectionResetError):
        return f"{url} does not speak HTTP: it may be the gRPC port; the metrics port is {_DEFAULT_PORT} by default"
    reason = getattr(error, "reason", error)
    reason = getattr(reason, "strerror", None) or reason
    return f"no service answers at {url} ({reason}); start one with `pagedkv serve`"


def _opener(url: str) -> urllib.request.OpenerDirector:
    """Return what opens a page, past the environment's proxy where that could not reach it."""
    is_here = is_loopback(urlsplit(url).hostname or "")
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_here else []))


def render(view: PoolView, width: int, *, ascii_only: bool = False) -> RenderableType:
    """Draw a view for a terminal of this width, which may show no more than ASCII."""
    pool, look = view.pool, _ASCII if ascii_only else _UNICODE
    name = pool.get("model") or ("a model" if pool["has_engine"] else "no model")
    size = f"{pool['num_blocks']} blocks of {pool['block_size']} tokens ({pool['dtype']})"
    title = Text(look.separator.join(("pagedkv", name, pool["backend"], size)))
    return Group(
        Panel(
            _map(view, max(20, width - 4), look),
            title=title,
            subtitle="q or Ctrl-C: quit",
            subtitle_align="right",
            border_style="bright_black",
        ),
        _legend(view.figures, look),
        _figures(view, look),
        _memory(view.figures),
        _sequences(view, width),
    )


def _map(view: PoolView, width: int, look: _Look) -> Text:
    """One glyph a block, or for a large pool one for several blocks: the state most of them are in."""
    per_cell = -(-len(view.states) // (width * _MAP_ROWS))
    text = Text()
    for column, start in enumerate(range(0, len(view.states), per_cell)):
        cell = view.states[start : start + per_cell]
        most = max(range(len(look.glyphs)), key=lambda state: (cell.count(state), state))
        text.append(look.glyphs[most], _STYLES[most])
        if column % width == width - 1:
            text.append("\n")
    if per_cell > 1:
        text.append(f"\none cell is {per_cell} blocks", "bright_black")
    return text


def _legend(figures: Frame, look: _Look) -> Columns:
    return Columns(
        [
            Text.assemble((glyph, style), f" {state.replace('_', ' ')} {count}")
            for (state, count), glyph, style in zip(figures["blocks"].items(), look.glyphs, _STYLES, strict=True)
        ],
        padding=(0, 2),
    )


def _figures(view: PoolView, look: _Look) -> Table:
    figures = view.figures
    hit_rate = figures["hit_tokens"] / figures["queried_tokens"] if figures["queried_tokens"] else 0.0
    table = Table.grid(padding=(0, 3), expand=True)
    for _ in range(3):
        table.add_column()
    table.add_row(
        f"usage           [bold]{figures['usage']:.1%}[/]",
        f"internal frag.  [bold]{figures['internal_fragmentation']:.1%}[/]",
        f"prefix hit rate [bold]{hit_rate:.1%}[/]",
    )
    table.add_row(
        f"token occupancy [bold]{figures['token_occupancy']:.1%}[/]",
        f"external frag.  [bold]{figures['external_fragmentation']:.1%}[/]",
        f"sharing saves   [bold]{figures['memory_saved']:.1%}[/]",
    )
    if view.pool["num_host_blocks"]:
        host = figures["host_blocks"]
        total = view.pool["num_host_blocks"]
        table.add_row(
            f"swapped out {figures['num_swapped']}",
            f"host blocks {total - host['free']} of {total} used, {host['shared']} shared",
            f"{figures['swapped_tokens']} tokens in host memory",
        )
    table.add_row(
        f"running {figures['running']}, waiting {figures['waiting']}",
        f"generated {figures['generated_tokens']}",
        f"{view.rates[-1] if view.rates else 0:.0f} tokens/s {_sparkline(view.rates, look.sparks)}",
    )
    return table


def _memory(figures: Frame) -> Columns:
    """What is held, and what the same sequences would take in contiguous memory."""
    sizes = {name: size_text(size) for name, size in figures["contiguous"].items()}
    return Columns(
        [
            Text(f"held {sizes['paged']}"),
            Text("in contiguous memory:", "bright_black"),
            Text(f"max {sizes['max']}"),
            Text(f"pow2 {sizes['pow2']}"),
            Text(f"exact {sizes['oracle']}"),
        ],
        padding=(0, 2),
    )


def _sequences(view: PoolView, width: int) -> Table:
    table = Table(title=f"{len(view.tokens)} sequences, the longest first", title_justify="left", expand=True)
    table.add_column("sequence", overflow="ellipsis", no_wrap=True, max_width=max(20, width // 2))
    table.add_column("tokens", justify="right")
    table.add_column("blocks", justify="right")
    block_size = view.pool["block_size"]
    for name, count in sorted(view.tokens.items(), key=lambda item: -item[1])[:10]:
        blocks = "swapped out" if name in view.swapped else str(-(-count // block_size))
        table.add_row(Text(name), str(count), blocks)
    return table


def _sparkline(values: deque[float], sparks: str) -> str:
    highest = max(values, default=0.0) or 1.0
    return "".join(sparks[round(value / highest * (len(sparks) - 1))] for value in values)


def size_text(num_bytes: float) -> str:
    """Return a size with a binary unit, as "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
