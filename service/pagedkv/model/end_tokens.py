"""Tokens that end a turn in every runtime, known by their text."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

_END_TEXTS: Final = frozenset(
    (
        "</s>",
        "<eos>",
        "<EOT>",
        "_<EOT>",
        "[EOT]",
        "[EOS]",
        "<|eos|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|im_end|>",
        "<|end|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<|end_of_turn|>",
        "<|endofturn|>",
        "[|endofturn|]",
        "<|END_OF_TURN_TOKEN|>",
        "<end_of_turn>",
        "<turn|>",
        "<end_of_utterance>",
        "<｜end▁of▁sentence｜>",
    )
)
_HARMONY: Final = frozenset(("<|return|>", "<|call|>"))  # where both are there, <|end|> ends a part of a turn only
_LOOKS_LIKE_CONTROL: Final = re.compile(r"_?<.+>|\[.+\]|<\|.+|.+\|>")


def end_texts_of(vocabulary: Iterable[str]) -> frozenset[str]:
    """Return the well-known end texts that a vocabulary holds, of whatever type it says that they are."""
    found = _END_TEXTS.intersection(vocabulary)
    return found - {"<|end|>"} if found >= _HARMONY else found


def looks_like_control(text: str) -> bool:
    """Whether a named token can be a control token though its type does not say so; never one character."""
    return len(text) > 1 and _LOOKS_LIKE_CONTROL.fullmatch(text) is not None
