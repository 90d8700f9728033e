"""Fixtures of the model tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from pagedkv.model.hub import fetch_smollm2


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real model's file, downloaded once into the user's cache."""
    return fetch_smollm2()
