"""Generate service/pagedkv/v1 from protos/: `./run generate`, or with --check only compare."""

from __future__ import annotations

import filecmp
import sys
import tempfile
from importlib.resources import files
from pathlib import Path

from grpc_tools import protoc

ROOT = Path(__file__).parents[2]
PROTOS = ROOT / "protos"
PACKAGE = ROOT / "service"
VENV_BIN = Path(sys.executable).parent


def generate(out: Path) -> list[Path]:
    """Write the modules and their stubs under out/pagedkv/v1 and return them."""
    sources = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    command = [
        "protoc",
        f"-I{PROTOS}",
        f"-I{files('grpc_tools') / '_proto'}",
        f"--plugin=protoc-gen-mypy={VENV_BIN / 'protoc-gen-mypy'}",
        f"--python_out={out}",
        f"--grpc_python_out={out}",
        f"--mypy_out=quiet:{out}",
        *sources,
    ]
    if protoc.main(command) != 0:
        raise RuntimeError("protoc failed")
    package = out / "pagedkv" / "v1"
    for path in package.glob("tensor_pb2_grpc.py"):  # no service, no stub
        path.unlink()
    (package / "__init__.py").write_text('"""Generated from protos/ by ./run generate; never edited."""\n')
    return sorted(package.iterdir())


def find_stale() -> list[str]:
    """Return the names of committed files that differ from freshly generated ones, both ways."""
    committed = PACKAGE / "pagedkv" / "v1"
    with tempfile.TemporaryDirectory() as folder:
        fresh = {path.name: path for path in generate(Path(folder))}
        names = {path.name for path in committed.iterdir() if path.is_file()} | set(fresh)
        return sorted(
            name
            for name in names
            if name not in fresh
            or not (committed / name).exists()
            or not filecmp.cmp(fresh[name], committed / name, False)
        )


def main() -> int:
    """Generate, or with --check compare."""
    if "--check" in sys.argv:
        stale = find_stale()
        print(f"stale: {', '.join(stale)}" if stale else "fresh")
        return bool(stale)
    generate(PACKAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
