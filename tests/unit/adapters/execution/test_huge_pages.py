"""Huge pages: what is asked of the system, and that nothing changes but the pages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from decodekit.adapters.execution import huge_pages, packed
from decodekit.adapters.execution.huge_pages import ask_for_huge_pages, use_huge_pages
from decodekit.adapters.execution.packed import can_pack, pack_linears

MIB = 1 << 20
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked for on Linux")


def on_huge_pages() -> int:
    """Return how many bytes of this process are on huge pages."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("AnonHugePages:"):
            return int(line.split()[1]) << 10
    return 0


def span(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes


@on_linux
def test_memory_in_use_is_moved_and_keeps_its_values() -> None:
    block = torch.arange(4 * MIB)  # 32 MiB
    before = on_huge_pages()
    moved = use_huge_pages([span(block)])
    if not moved:
        pytest.skip("this system has no huge pages to give")
    assert moved % (2 * MIB) == 0
    assert block.nbytes - 4 * MIB <= moved <= block.nbytes
    assert on_huge_pages() >= before + moved // 2  # some may have been on huge pages already
    assert torch.equal(block, torch.arange(4 * MIB))


@on_linux
def test_fresh_memory_comes_in_huge_pages() -> None:
    block = torch.empty(64 * MIB, dtype=torch.uint8)
    before = on_huge_pages()
    ask_for_huge_pages(block)
    block.fill_(3)
    if on_huge_pages() == before:
        pytest.skip("this system has no huge pages to give")
    assert block.min() == block.max() == 3


def test_what_fills_no_huge_page_stays_where_it_is() -> None:
    small = torch.ones(1000)
    assert use_huge_pages([span(small)]) == 0
    ask_for_huge_pages(small)
    assert use_huge_pages([]) == 0


def test_another_system_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "libc", lambda: None)
    block = torch.ones(4 * MIB)
    assert use_huge_pages([span(block)]) == 0
    ask_for_huge_pages(block)


def test_neighbours_are_moved_together() -> None:
    gap = 64 << 10
    spans = [(10 * MIB, 11 * MIB), (0, MIB), (MIB + gap, 2 * MIB), (20 * MIB, 21 * MIB)]
    assert huge_pages._joined(spans) == [
        (0, 2 * MIB),
        (10 * MIB, 11 * MIB),
        (20 * MIB, 21 * MIB),
    ]
    assert huge_pages._joined([(0, MIB), (MIB + gap + 1, 2 * MIB)]) == [
        (0, MIB),
        (MIB + gap + 1, 2 * MIB),
    ]


@pytest.mark.skipif(not can_pack(torch.float32), reason="float32 cannot be packed here")
def test_all_packed_weights_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[int, int]] = []
    monkeypatch.setattr(packed, "use_huge_pages", given.extend)
    pack_linears(nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 64)))
    sizes = sorted(last - first for first, last in given)
    assert sizes[0] >= 512 * 64 * 4
    assert sizes[1] >= 256 * 512 * 4
    assert len(sizes) == 2
