"""`pagedkv top`: the page map of a running service in a terminal, fed by the same stream as the page."""

from __future__ import annotations

import base64
import json
import urllib.request
from collections import deque
from collections.abc import Iterator
from typing import Any, Final
from urllib.parse import urlsplit

from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pagedkv.errors import InvalidArgument
from pagedkv.loopback import is_loopback

_GLYPHS: Final = (  # by BlockState: distinct without colour too
    ("·", "bright_black"),
    ("░", "cyan"),
    ("▓", "blue"),
    ("█", "yellow"),
    ("P", "magenta"),
    ("~", "red"),
)
_SPARKS: Final = " ▁▂▃▄▅▆▇█"
_MAP_ROWS, _HISTORY = 16, 60
_STREAM_SECONDS: Final = 15.0

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


def run_top(url: str) -> None:
    """Show a service's page pool until interrupted. Raises InvalidArgument if nothing answers at `url`."""
    view = PoolView()
    with Live(Text(f"connecting to {url} ..."), screen=True, refresh_per_second=10) as live:
        try:
            for frame in stream_frames(url):
                if view.apply(frame) and view.pool:
                    live.update(render(view, live.console.width))
        except KeyboardInterrupt:
            return


def stream_frames(url: str) -> Iterator[Frame]:
    """Yield the service's frames as they come. Raises InvalidArgument if nothing answers."""
    try:
        with _opener(url).open(url.rstrip("/") + "/api/events", timeout=_STREAM_SECONDS) as response:
            for line in response:
                if line.startswith(b"data: "):
                    yield json.loads(line[6:])
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"no service answers at {url}: {error}", field="url", value=url) from error


def _opener(url: str) -> urllib.request.OpenerDirector:
    """Return what opens a page, past the environment's proxy where that could not reach it."""
    is_here = is_loopback(urlsplit(url).hostname or "")
    return urllib.request.build_opener(*([urllib.request.ProxyHandler({})] if is_here else []))


def render(view: PoolView, width: int) -> RenderableType:
    """Draw a view for a terminal of this width."""
    pool = view.pool
    title = (
        f"pagedkv · {pool['backend']} · {pool['num_blocks']} blocks of {pool['block_size']} tokens ({pool['dtype']})"
    )
    return Group(
        Panel(_map(view, max(20, width - 4)), title=title, border_style="bright_black"),
        _legend(view.figures),
        _figures(view),
        _memory(view.figures),
        _sequences(view, width),
    )


def _map(view: PoolView, width: int) -> Text:
    """One glyph a block, or for a large pool one for several blocks: the state most of them are in."""
    per_cell = -(-len(view.states) // (width * _MAP_ROWS))
    text = Text()
    for column, start in enumerate(range(0, len(view.states), per_cell)):
        cell = view.states[start : start + per_cell]
        glyph, style = _GLYPHS[max(range(len(_GLYPHS)), key=lambda state: (cell.count(state), state))]
        text.append(glyph, style)
        if column % width == width - 1:
            text.append("\n")
    if per_cell > 1:
        text.append(f"\none cell is {per_cell} blocks", "bright_black")
    return text


def _legend(figures: Frame) -> Columns:
    return Columns(
        [
            Text.assemble((glyph, style), f" {state.replace('_', ' ')} {count}")
            for (state, count), (glyph, style) in zip(figures["blocks"].items(), _GLYPHS, strict=True)
        ],
        padding=(0, 2),
    )


def _figures(view: PoolView) -> Table:
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
        f"{view.rates[-1] if view.rates else 0:.0f} tokens/s {_sparkline(view.rates)}",
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


def _sparkline(values: deque[float]) -> str:
    highest = max(values, default=0.0) or 1.0
    return "".join(_SPARKS[round(value / highest * (len(_SPARKS) - 1))] for value in values)


def size_text(num_bytes: float) -> str:
    """Return a size with a binary unit, as "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
