"""``execution=graphs`` and ``compiled`` on a GPU; skipped without one."""

from __future__ import annotations

import pytest
import torch

from decodekit import Decoder
from decodekit.adapters.llama import LlamaAdapter
from decodekit.backends.sdpa import SDPABackend
from decodekit.decoder.build import build_strategy
from tests.support.executions import REQUESTS, STRATEGIES
from tests.support.tiny import own_model, random_prompt

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


@pytest.mark.parametrize("asked", REQUESTS)
@pytest.mark.parametrize("kind", ["llama", "mistral", "qwen2"])
@pytest.mark.parametrize("mode", ["graphs", "compiled"])
def test_every_strategy_gives_the_tokens_of_eager(mode: str, kind: str, asked: str) -> None:
    # In float64, where no tie is broken by the order of a sum.
    free, fast = (
        LlamaAdapter(own_model(kind, torch.float64).cuda(), SDPABackend()) for _ in range(2)
    )
    fast.use_execution(mode)
    for length in (1, 7, 80):
        options = {"max_new_tokens": 40, **REQUESTS[asked]}
        prompt = random_prompt(length)
        plain = Decoder(free, strategy=build_strategy("autoregressive"))
        expected = plain.generate(prompt, **options).tokens
        for name, strategy in STRATEGIES.items():
            decoder = Decoder(fast, strategy=build_strategy(strategy))
            assert decoder.generate(prompt, **options).tokens == expected, (name, length)


def test_a_batch_and_a_second_request_over_the_same_recordings() -> None:
    model = own_model("llama", torch.float64).cuda()
    decoder = Decoder.from_model(model, adapter="llama", execution="graphs")
    assert decoder.execution == "graphs"
    prompts = [random_prompt(length, seed=length) for length in (1, 60, 20)]
    alone = [decoder.generate(prompt, max_new_tokens=40).tokens for prompt in prompts]
    for _ in range(2):
        results = decoder.generate(prompts, max_new_tokens=40)
        assert [result.tokens for result in results] == alone


def test_auto_is_eager_on_a_gpu() -> None:
    decoder = Decoder.from_model(own_model().cuda(), execution="auto")
    assert decoder.execution == "eager"
