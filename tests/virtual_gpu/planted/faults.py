"""The planted faults as data, and where their texts are in the sources."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Fault:
    """One mutation: `text`, which is in `file` exactly once, becomes `replacement`; some of `tests` must fail."""

    name: str
    what: str
    file: str
    text: str
    replacement: str
    tests: tuple[str, ...]  # files or ids, as pytest takes them

    def occurrences(self, root: Path = ROOT) -> int:
        """Return how often the text is in the file; 1 is right."""
        path = root / self.file
        return path.read_text().count(self.text) if path.is_file() else 0

    def plant(self, root: Path) -> None:
        """Change the file under `root`."""
        path = root / self.file
        path.write_text(path.read_text().replace(self.text, self.replacement, 1))


def load_faults() -> list[Fault]:
    """Return all faults, by file name and in the order of the file. Names are unique."""
    found: list[Fault] = []
    for path in sorted(FOLDER.glob("*.toml")):
        for entry in tomllib.loads(path.read_text())["fault"]:
            found.append(Fault(**{**entry, "tests": tuple(entry["tests"])}))
    assert len({fault.name for fault in found}) == len(found), "two faults have one name"
    return found


def stale(faults: list[Fault], root: Path = ROOT) -> list[str]:
    """Return a line for each fault whose text is not in its file exactly once: it must be written anew."""
    counts = [(fault, fault.occurrences(root)) for fault in faults]
    return [
        f"{fault.name}: found {count} times in {fault.file}: {fault.text!r}" for fault, count in counts if count != 1
    ]
