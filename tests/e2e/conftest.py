"""What the end-to-end tests share: the real small model, and real prompts if they are there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from decodekit import Decoder, DecoderConfig
from decodekit.decoder.build import load

# Real prompts from public benchmarks; they are not part of the repository.
DATA = Path(os.environ.get("DECODEKIT_PROMPTS", Path(__file__).parents[2].parent / "shared/data"))


def read_data(name: str) -> list[dict[str, Any]]:
    """Return the lines of a file of prompts; skip the test where there is none."""
    file = DATA / f"{name}.jsonl"
    if not file.exists():
        pytest.skip(f"no {file.name}: set DECODEKIT_PROMPTS to a directory with it")
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="session")
def decoder() -> Decoder:
    """Return a decoder over SmolLM2-135M-Instruct in float32, as a user gets it."""
    return Decoder.from_config(model="smollm2-135m", dtype="float32")


@pytest.fixture(scope="session")
def plain_model() -> Any:
    """Return the same model as transformers loads it."""
    model, _ = load(DecoderConfig(dtype="float32"))
    return model
