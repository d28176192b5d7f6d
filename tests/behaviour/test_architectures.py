"""Every architecture of the table gives its own tokens, whatever the strategy; the others say why.

The references are a loop of full forward passes and ``transformers``' ``generate``, which share no
code with the adapter.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from decodekit import Decoder, Request
from decodekit.adapters.hf import HFAdapter
from decodekit.adapters.hf.longrope import LongRope
from decodekit.backends.eager import EagerBackend
from decodekit.decoder.build import build_adapter
from decodekit.engine.sampling import PositionSampler
from decodekit.errors import BackendError, GenerationError, ModelSupportError
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.interfaces.tree import TokenTree
from decodekit.testing import check_adapter
from tests.support.tiny import (
    TRANSFORMERS,
    built,
    logits_after,
    own_model,
    random_prompt,
    tiny_model,
)
from tests.support.zoo import DOCS, REFUSED, WINDOW, ZOO, documented

COUNT = 24
PROMPTS = (random_prompt(WINDOW * 2 + 3, seed=1), random_prompt(5, seed=2))  # beyond it, across it
SAMPLED: dict[str, Any] = {"temperature": 0.9, "top_p": 0.9, "seed": 3}
STRATEGIES = ["autoregressive", "jacobi", "prompt_lookup", "lookahead"]

every_kind = pytest.mark.parametrize("kind", list(ZOO))


@cache
def generated(kind: str, number: int) -> list[int]:
    """Return what ``generate`` says."""
    return generated_after(kind, PROMPTS[number], COUNT)


def generated_after(kind: str, prompt: list[int], count: int) -> list[int]:
    """Return what ``generate`` says after ``prompt``.

    Before 5.20 it goes on from the last token alone where a text grows over LongRoPE's border, if
    it has a cache.
    """
    tokens = tiny_model(kind).generate(
        torch.tensor([prompt]),
        max_new_tokens=count,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
        use_cache=TRANSFORMERS >= (5, 20) or kind not in LONG_ROPES,
    )
    result: list[int] = tokens[0, len(prompt) :].tolist()
    return result


@every_kind
def test_greedy_equals_generate_and_a_loop(kind: str) -> None:
    model = tiny_model(kind)
    for number, prompt in enumerate(PROMPTS):
        expected = generated(kind, number)
        assert len(set(expected)) > 3, "a text that says nothing tests nothing"
        text = list(prompt)
        for token in expected:
            assert int(logits_after(model, text).argmax()) == token
            text.append(token)
        for strategy in STRATEGIES:
            result = Decoder.from_model(model, strategy=strategy, backend="eager").generate(
                prompt, max_new_tokens=COUNT
            )
            assert result.tokens == expected, strategy


@every_kind
def test_sampled_equals_a_loop(kind: str) -> None:
    model, prompt = tiny_model(kind), PROMPTS[0]
    sampler = PositionSampler(SamplingParams(**SAMPLED))
    text = list(prompt)
    for _ in range(COUNT):
        text += sampler.choose(logits_after(model, text)[None], [len(text)])
    for strategy in ("jacobi", "lookahead"):
        result = Decoder.from_model(model, strategy=strategy, backend="eager").generate(
            prompt, max_new_tokens=COUNT, **SAMPLED
        )
        assert result.tokens == text[len(prompt) :], strategy


@every_kind
def test_a_ragged_batch_in_small_chunks_equals_generate(kind: str) -> None:
    backend = "sdpa" if ZOO[kind].sdpa else "eager"
    decoder = Decoder.from_model(tiny_model(kind), backend=backend, prefill_chunk=7)
    results = decoder.generate(list(PROMPTS), max_new_tokens=COUNT)
    assert [result.tokens for result in results] == [generated(kind, n) for n in (0, 1)]


# Those whose attention, cache or positions are of a kind of their own; the others differ in what
# lies between, for which their texts in trees, batches and pieces are enough.
OF_THEIR_OWN = [
    "llama",
    "mistral",
    "jetmoe",
    "gemma2",
    "gemma3",
    "phi3-longrope",
    "phimoe",
    "gpt2",
    "gpt_bigcode",
    "opt",
    "falcon",
    "stablelm",
    "gpt_oss",
    "deepseek_v2",
    "deepseek_v3",
]


@pytest.mark.parametrize("kind", OF_THEIR_OWN)
def test_the_laws_of_an_adapter(kind: str) -> None:
    """Rows are those of their paths, memory beyond them is not read, and all that a cache does."""
    model = tiny_model(kind)
    adapter = build_adapter(model, adapter="hf", backend="eager")
    check_adapter(adapter, reference=lambda tokens: logits_after(model, tokens), atol=1e-3)


@pytest.mark.parametrize("kind", [kind for kind, entry in ZOO.items() if not entry.sdpa])
def test_what_sdpa_cannot_do_it_refuses(kind: str) -> None:
    with pytest.raises(BackendError, match=r"backend 'sdpa' cannot do .*; use backend=eager"):
        Decoder.from_model(tiny_model(kind), backend="sdpa")


@pytest.mark.parametrize("name", list(REFUSED))
def test_what_cannot_be_decoded_exactly_is_refused_with_the_reason(name: str) -> None:
    kind, reason = REFUSED[name]
    if kind.type not in CONFIG_MAPPING:
        pytest.skip("this transformers has no such model")
    model = built(kind)
    with pytest.raises(ModelSupportError) as caught:
        HFAdapter(model, EagerBackend())
    assert caught.value.reason.startswith(reason)
    assert str(caught.value) == (
        f"{type(model).__name__} cannot be decoded by the 'hf' adapter: {caught.value.reason}"
    )
    assert "\n" not in str(caught.value)


def test_the_table_of_the_documentation_is_that_of_the_tests() -> None:
    assert DOCS.read_text(encoding="utf-8") == documented(), "run python -m tests.support.zoo"


# --- LongRoPE ------------------------------------------------------------------------------------

LONG_ROPES = ["phi3-longrope", "phimoe"]
BORDER = 32

every_long_rope = pytest.mark.parametrize("kind", LONG_ROPES)


@pytest.mark.parametrize(
    ("kind", "length"),
    [*(("phi3-longrope", length) for length in (20, 31, 32, 33, 40)), ("phimoe", 31)],
)
def test_longrope_on_both_sides_of_its_border(kind: str, length: int) -> None:
    """Prompts that end before it, at it and beyond it."""
    model = tiny_model(kind)
    prompt = random_prompt(length, seed=length)
    expected = generated_after(kind, prompt, 30)
    for strategy in STRATEGIES:
        for chunk in (512, 10):
            decoder = Decoder.from_model(model, strategy=strategy, prefill_chunk=chunk)
            assert decoder.generate(prompt, max_new_tokens=30).tokens == expected, strategy


@every_long_rope
def test_longrope_in_a_batch_that_straddles_its_border(kind: str) -> None:
    """One sequence is beyond it, one crosses it, one stays before it; one leaves early."""
    decoder = Decoder.from_model(tiny_model(kind))
    prompts = [random_prompt(length, seed=length) for length in (40, 6, 25, 3)]
    counts = [8, 40, 20, 9]
    alone = [
        decoder.generate(prompt, max_new_tokens=count).tokens
        for prompt, count in zip(prompts, counts, strict=True)
    ]
    together = decoder.generate(
        [Request(p, max_new_tokens=n) for p, n in zip(prompts, counts, strict=True)]
    )
    assert [result.tokens for result in together] == alone


@every_long_rope
def test_longrope_is_not_looked_at_again_for_texts_of_either_length(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass exchanges the frequencies, which is no change of the model."""
    decoder = Decoder.from_model(own_model(kind))
    short, long = random_prompt(5), random_prompt(BORDER + 6)
    decoder.generate(short, max_new_tokens=2)
    monkeypatch.setattr(HFAdapter, "_check", lambda _: pytest.fail("looked at again"))
    for prompt in (long, short, long):
        decoder.generate(prompt, max_new_tokens=2)


def test_longrope_whose_frequencies_are_changed_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = own_model("phi3-longrope")
    decoder = Decoder.from_model(model)
    decoder.generate(random_prompt(5), max_new_tokens=2)
    seen: list[HFAdapter] = []
    monkeypatch.setattr(HFAdapter, "_check", lambda adapter: seen.append(adapter))
    (rope,) = (module for module in model.modules() if hasattr(module, "original_inv_freq"))
    with torch.no_grad():
        rope.original_inv_freq.mul_(2)
    decoder.generate(random_prompt(5), max_new_tokens=2)
    assert len(seen) == 1


@every_long_rope
def test_longrope_goes_back_when_nothing_is_committed(kind: str) -> None:
    """A pass over the border that is thrown away leaves no keys of a long text behind."""
    model, text = tiny_model(kind), random_prompt(BORDER + 6)
    adapter = HFAdapter(model, EagerBackend())
    cache = adapter.new_cache(batch=1, capacity=64)
    adapter.forward([StepPlan(0, tuple(text[:-8]))], cache)
    cache.commit([range(len(text) - 8)])
    for end in (len(text), BORDER, len(text)):
        (logits,) = adapter.forward([StepPlan(len(text) - 8, tuple(text[-8:end]))], cache)
        expected = logits_after(model, text[:end])
        torch.testing.assert_close(logits[0], expected, atol=1e-3, rtol=1e-4)


def test_longrope_refuses_guesses_over_its_border() -> None:
    adapter = HFAdapter(tiny_model("phi3-longrope"), EagerBackend())
    cache = adapter.new_cache(batch=1, capacity=64)
    text = tuple(random_prompt(BORDER - 2))
    assert adapter.horizon(len(text)) == BORDER
    adapter.forward([StepPlan(0, text, TokenTree.chain([5, 6]))], cache)
    with pytest.raises(GenerationError, match=r"after 30 tokens must end before position 32.*"):
        adapter.forward([StepPlan(0, text, TokenTree.chain([5, 6, 7]))], cache)


@every_long_rope
def test_longrope_leaves_the_model_as_it_was(kind: str) -> None:
    model = own_model(kind)
    prompt = torch.tensor([random_prompt(40)])
    before = model(prompt).logits
    Decoder.from_model(model).generate(random_prompt(20), max_new_tokens=30)
    (rotary,) = (module for module in model.modules() if hasattr(module, "rope_type"))
    assert "forward" not in vars(rotary)
    assert torch.equal(model(prompt).logits, before)
    # A forward of its own, as accelerate gives it, stays and is called.
    calls: list[int] = []
    plain = rotary.forward

    def hooked(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return plain(*args, **kwargs)

    rotary.forward = hooked
    Decoder.from_model(model).generate(random_prompt(20), max_new_tokens=3)
    assert calls
    assert vars(rotary)["forward"] is hooked


@pytest.mark.skipif(TRANSFORMERS < (5, 21), reason="before 5.21 transformers does so every time")
def test_longrope_computes_its_frequencies_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    compute = ROPE_INIT_FUNCTIONS["longrope"]

    def counted(*args: Any, **kwargs: Any) -> Any:
        asked.append(1)
        return compute(*args, **kwargs)

    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "longrope", counted)
    decoder = Decoder.from_model(own_model("phi3-longrope"))
    decoder.generate(random_prompt(BORDER + 3), max_new_tokens=10)
    decoder.generate(random_prompt(BORDER - 3), max_new_tokens=10)
    assert len(asked) <= 1


def test_longrope_in_threads_that_share_a_model() -> None:
    """Each pass sees its own texts as long or short, whatever another is about."""
    model = tiny_model("phi3-longrope")
    prompts = [random_prompt(length, seed=length) for length in (BORDER + 8, 6)]
    decoders = [Decoder.from_model(model) for _ in prompts]
    expected = [
        decoder.generate(prompt, max_new_tokens=20).tokens
        for decoder, prompt in zip(decoders, prompts, strict=True)
    ]
    with ThreadPoolExecutor(2) as pool:
        futures = [
            pool.submit(decoder.generate, prompt, max_new_tokens=20)
            for _ in range(4)
            for decoder, prompt in zip(decoders, prompts, strict=True)
        ]
    assert [future.result().tokens for future in futures] == expected * 4


def test_longrope_tells_a_stranger_instead_of_misleading_it() -> None:
    model = own_model("phi3-longrope")
    (rotary,) = (module for module in model.modules() if hasattr(module, "rope_type"))
    rope = LongRope(model)
    with rope.of_lengths([True]), ThreadPoolExecutor(1) as pool:
        stranger = pool.submit(rotary.forward, torch.zeros(1), torch.tensor([[0]]))
        with pytest.raises(BackendError, match="in the middle of a decodekit step"):
            stranger.result()
