"""One decoder for thousands of requests: what it holds does not grow."""

from __future__ import annotations

import gc
import tracemalloc

import pytest
import torch

from decodekit import Decoder
from tests.support.tiny import random_prompt, tiny_model

pytestmark = pytest.mark.e2e

REQUESTS = 3_000


def test_thousands_of_requests_hold_no_memory() -> None:
    decoder = Decoder.from_model(tiny_model(), strategy="lookahead")
    first = decoder.generate(random_prompt(9, seed=3), max_new_tokens=8)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    objects = held = 0
    try:
        for number in range(REQUESTS):
            sampled = {"temperature": 0.8 * (number % 2), "seed": number}
            prompt = random_prompt(5 + number % 20, seed=number % 50)
            decoder.generate(prompt, max_new_tokens=2 + number % 4, **sampled)
            if number == 500:
                gc.collect()
                objects = len(gc.get_objects())
            if number == REQUESTS - 200:
                tracemalloc.start()
        gc.collect()
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
        torch.set_num_threads(threads)
    assert len(gc.get_objects()) - objects < 200
    assert held < 500_000  # of the last 200 requests, the last one's included
    assert len(decoder._idle) == 1
    again = decoder.generate(random_prompt(9, seed=3), max_new_tokens=8)
    assert again.tokens == first.tokens
