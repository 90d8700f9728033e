"""Run one benchmark by name: `./run bench NAME [OPTIONS]`. Each lives in tests/bench/NAME_bench.py as main(argv)."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def main() -> int:
    sys.path.insert(0, str(Path(__file__).parents[1]))  # for the tests' helpers
    names = sorted(path.stem.removesuffix("_bench") for path in Path(__file__).parent.glob("*_bench.py"))
    name = sys.argv[1].replace("-", "_") if len(sys.argv) > 1 else ""
    if name not in names:
        print(f"usage: ./run bench {{{'|'.join(names).replace('_', '-')}}} [OPTIONS]", file=sys.stderr)
        return 2
    return importlib.import_module(f"tests.bench.{name}_bench").main(sys.argv[2:]) or 0


if __name__ == "__main__":
    sys.exit(main())
