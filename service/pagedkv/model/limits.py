"""What one call may bring: stated in the proto, checked before anything is counted, copied or computed."""

from __future__ import annotations

from typing import Final

MAX_TEXT_BYTES: Final = 2**20  # of UTF-8: a text, or the contents of all messages; 250,000 tokens of English
MAX_TOKEN_IDS: Final = 2**18  # to be turned into text at once
MAX_MESSAGES: Final = 4_096
MAX_ROLE_LENGTH: Final = 64  # characters
MAX_DECODED_BYTES: Final = 8 * 2**20  # of UTF-8: what these ids may stand for
