"""What a model is named by on the command line."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Final

from pagedkv.errors import InvalidArgument

SMOLLM2: Final = "smollm2"
_HUB_NAME: Final = re.compile(r"[\w.-]+/[\w.-]+")


def check_model(model: str) -> None:
    """Raise InvalidArgument for what is neither a known name nor there, with a hint how to get it."""
    if model != SMOLLM2 and not Path(model).exists():
        raise InvalidArgument(
            f'is neither "{SMOLLM2}" nor an existing file or directory: {model!r}{_hint(model)}',
            field="model",
            value=model,
        )


def model_name(model: str) -> str:
    """Return a model's name for people: that of its file or directory."""
    path = Path(model)
    return path.stem if path.suffix == ".gguf" else path.name


def _hint(model: str) -> str:
    if difflib.get_close_matches(model.lower(), [SMOLLM2], cutoff=0.6):
        return f'; did you mean "{SMOLLM2}"?'
    if _HUB_NAME.fullmatch(model) and not Path(model).parent.is_dir():
        name = model.rpartition("/")[2]
        return (
            f"; names of the Hugging Face hub are not fetched: "
            f"`hf download {model} --local-dir {name}`, then `pagedkv serve {name}`"
        )
    return ""
