"""What the unit tests of plugins share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from decodekit.config.plugins import installed as plugins
from decodekit.config.plugins.installed import ENTRY_POINT_GROUP, installed
from tests.support.entries import Entry


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def install_only(*entries: Entry) -> None:
        monkeypatch.setattr(
            plugins, "entry_points", lambda *, group: {ENTRY_POINT_GROUP: entries}[group]
        )
        installed.cache_clear()

    yield install_only
    monkeypatch.undo()
    installed.cache_clear()
