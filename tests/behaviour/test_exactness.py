"""What a model ignores, and what is changed behind an adapter's back: never another text silently.

The reference is the model's own forward pass, a token at a time, or ``generate``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama import modeling_llama

from decodekit import Decoder
from decodekit.adapters.hf import HFAdapter
from decodekit.adapters.llama import LlamaAdapter, obstacle
from decodekit.backends.eager import EagerBackend
from decodekit.decoder.build import build_adapter
from decodekit.errors import GenerationError, ModelSupportError
from decodekit.interfaces.plan import StepPlan
from tests.support.tiny import greedy_loop, own_model, random_prompt, tiny_model

PROMPT = random_prompt(17)
STRATEGIES = ("autoregressive", "lookahead")


class Research(LlamaForCausalLM):
    """A model whose forward takes anything, as those of research code do.

    What it does with it is the tests' business: ``hands_on`` of it goes to the layers.
    """

    hands_on = ("position_ids", "cache", "past_key_values", "use_cache", "attention_mask")

    def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
        given = {name: kwargs[name] for name in self.hands_on if name in kwargs}
        output = self.model(input_ids=input_ids, **given)
        return CausalLMOutputWithPast(logits=self.lm_head(output.last_hidden_state))


def research(*, without: str = "", of: type[Research] = Research) -> Research:
    """Return a research model with the weights of the tiny one that ignores an argument."""
    plain = tiny_model()
    names = {"cache", "past_key_values"} if without == "cache" else {without}
    kind = type(of.__name__, (of,), {"hands_on": tuple(set(of.hands_on) - names)})
    model = kind(plain.config)
    model.load_state_dict(plain.state_dict())
    return model.eval()


# --- what a forward ignores ----------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_forward_that_ignores_logits_to_keep_gives_its_own_text(strategy: str) -> None:
    model = research()
    expected = greedy_loop(tiny_model(), PROMPT, 20)
    decoder = Decoder.from_model(model, strategy=strategy, prefill_chunk=7)
    assert decoder.adapter_name == "hf"
    assert decoder.generate(PROMPT, max_new_tokens=20).tokens == expected
    texts = [PROMPT, PROMPT[:4]]
    together = decoder.generate(texts, max_new_tokens=9)
    assert [one.tokens for one in together] == [greedy_loop(tiny_model(), p, 9) for p in texts]


def test_a_forward_that_keeps_logits_without_naming_it_is_asked_for_few() -> None:
    """As a wrapper does that hands everything on."""
    rows: list[int] = []

    class Wrapper(Research):
        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
            output = LlamaForCausalLM.forward(self, input_ids, **kwargs)
            rows.append(output.logits.shape[1])
            return output

    decoder = Decoder.from_model(research(of=Wrapper), adapter="hf", strategy="autoregressive")
    decoder.generate(PROMPT, max_new_tokens=1)  # the first text looks at the model again
    rows.clear()
    tokens = decoder.generate(PROMPT, max_new_tokens=3).tokens
    assert tokens == greedy_loop(tiny_model(), PROMPT, 3)
    assert rows == [1, 1, 1]


def test_a_forward_that_returns_a_tuple_is_understood() -> None:
    class Tuple(Research):
        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
            return (super().forward(input_ids, **kwargs).logits,)

    tokens = Decoder.from_model(research(of=Tuple)).generate(PROMPT, max_new_tokens=9).tokens
    assert tokens == greedy_loop(tiny_model(), PROMPT, 9)


@pytest.mark.parametrize(
    ("ignored", "reason"),
    [
        ("position_ids", "with a tree's mask it gives other results than without"),
        ("cache", "with a tree's mask it"),
    ],
)
def test_a_forward_that_ignores_what_a_tree_needs_is_refused(ignored: str, reason: str) -> None:
    with pytest.raises(ModelSupportError, match=reason) as caught:
        Decoder.from_model(research(without=ignored))
    assert "its forward does not name position_ids and attention_mask" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_forward_that_returns_too_few_logits_is_refused() -> None:
    class Last(Research):
        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:  # type: ignore[override]
            output = super().forward(input_ids, **kwargs)
            output.logits = output.logits[:, -1:]
            return output

    with pytest.raises(ModelSupportError, match="returned logits of 1 rows where"):
        Decoder.from_model(research(of=Last))


def test_only_so_many_layers_attend_as_others_do_and_the_refusal_counts_them() -> None:
    """One layer of four attends by itself."""

    class Own(modeling_llama.LlamaAttention):
        def forward(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
            return hidden_states, None

    model = own_model()
    model.model.layers[2].self_attn = Own(model.config, 2).eval()
    with pytest.raises(ModelSupportError, match="only 3 of its 4 layers attend as others do"):
        HFAdapter(model, EagerBackend())


# --- code of somebody else's ---------------------------------------------------------------------


def twice(module: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
    """An attention that changes results."""
    return sdpa_attention_forward(module, 2 * query, *args, **kwargs)


@pytest.fixture
def registered() -> Iterator[Callable[[str, Any], None]]:
    before = dict(AttentionInterface._global_mapping)
    masks = dict(AttentionMaskInterface._global_mapping)
    yield AttentionInterface.register
    for mapping, held in (
        (AttentionInterface._global_mapping, before),
        (AttentionMaskInterface._global_mapping, masks),
    ):
        mapping.clear()
        mapping.update(held)


@pytest.mark.parametrize("adapter", ["auto", "hf", "llama"])
@pytest.mark.parametrize(("name", "used"), [("mine", "mine"), ("sdpa", "sdpa"), ("eager", "eager")])
def test_a_registered_attention_is_refused_by_name(
    registered: Callable[[str, Any], None], adapter: str, name: str, used: str
) -> None:
    registered(name, twice)
    model = own_model()
    model.config._attn_implementation = used
    with pytest.raises(
        ModelSupportError, match=rf"its attention '{used}' is \S*test_exactness\.twice"
    ):
        build_adapter(model, adapter=adapter)


def test_an_attention_that_is_registered_later_is_refused_when_the_next_text_begins(
    registered: Callable[[str, Any], None],
) -> None:
    for adapter in ("hf", "llama"):
        decoder = Decoder.from_model(own_model(), adapter=adapter)
        decoder.generate(PROMPT, max_new_tokens=2)
        registered("sdpa", twice)
        with pytest.raises(
            ModelSupportError, match=r"its attention 'sdpa' is \S*test_exactness\.twice"
        ):
            decoder.generate(PROMPT, max_new_tokens=2)
        registered("sdpa", sdpa_attention_forward)
        decoder.generate(PROMPT, max_new_tokens=2)


def test_another_name_for_the_attention_of_transformers_is_fine(
    registered: Callable[[str, Any], None],
) -> None:
    registered("mine", sdpa_attention_forward)
    model = own_model()
    model.config._attn_implementation = "mine"
    expected = greedy_loop(model, PROMPT, 6)
    assert Decoder.from_model(model).generate(PROMPT, max_new_tokens=6).tokens == expected


def test_a_registered_mask_is_refused_by_name(registered: object) -> None:
    def masked(*args: Any, **kwargs: Any) -> None:
        """No mask at all."""

    AttentionMaskInterface.register("sdpa", masked)
    with pytest.raises(ModelSupportError, match=r"its mask 'sdpa' is made by \S*masked"):
        HFAdapter(own_model(), EagerBackend())


def reversed_rope(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
    """A RoPE that turns the other way."""
    return _rope(q, k, cos, -sin, unsqueeze_dim)


_rope = modeling_llama.apply_rotary_pos_emb


def test_a_patched_rope_is_refused_by_the_adapter_that_replaces_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", reversed_rope)
    model = own_model()
    reason = obstacle(model)
    assert reason is not None
    assert "apply_rotary_pos_emb of transformers.models.llama.modeling_llama was replaced" in reason
    # The other one runs the model's own code, whatever that is.
    decoder = Decoder.from_model(model)
    expected = greedy_loop(model, PROMPT, 9)
    assert expected != greedy_loop_of_the_plain_one(9)
    assert decoder.adapter_name == "hf"
    assert decoder.generate(PROMPT, max_new_tokens=9).tokens == expected


def greedy_loop_of_the_plain_one(count: int) -> list[int]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(modeling_llama, "apply_rotary_pos_emb", _rope)
        return greedy_loop(tiny_model(), PROMPT, count)


def test_a_rope_that_is_patched_later_is_refused_when_the_next_text_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decoder = Decoder.from_model(own_model(), adapter="llama")
    decoder.generate(PROMPT, max_new_tokens=2)
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", reversed_rope)
    with pytest.raises(ModelSupportError, match=r"apply_rotary_pos_emb of .* was replaced by "):
        decoder.generate(PROMPT, max_new_tokens=2)


def test_what_no_check_knows_the_trial_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight that is read through a property, say: here the norms of a forward pass of ours."""
    model = own_model()
    plain = type(model.model.norm).forward

    def louder(self: Any, states: Any) -> Any:
        return 1.5 * plain(self, states)

    louder.__module__ = type(model.model.norm).__module__
    monkeypatch.setattr("decodekit.adapters.llama.support.foreign_part", lambda _: None)
    monkeypatch.setattr(type(model.model.norm), "forward", louder)
    assert obstacle(model) is None
    with pytest.raises(ModelSupportError, match="its own forward pass gives other results"):
        LlamaAdapter(model, EagerBackend())
    assert Decoder.from_model(model).adapter_name == "hf"


# --- what changes later --------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", ["hf", "llama"])
@pytest.mark.parametrize("part", ["", "model.layers.2", "model.layers.1.self_attn"])
def test_a_model_in_training_mode_is_refused_when_the_next_text_begins(
    adapter: str, part: str
) -> None:
    model = own_model()
    decoder = Decoder.from_model(model, adapter=adapter)
    before = decoder.generate(PROMPT, max_new_tokens=5).tokens
    model.get_submodule(part).train()
    with pytest.raises(ModelSupportError, match=r"training mode.*call model\.eval\(\)"):
        decoder.generate(PROMPT, max_new_tokens=5)
    model.eval()
    assert decoder.generate(PROMPT, max_new_tokens=5).tokens == before


def _window(model: Any) -> None:
    model.config.sliding_window = 5


def _fewer_layers(model: Any) -> None:
    model.config.num_hidden_layers = 2


def _double(model: Any) -> None:
    model.double()


def _bfloat16_and_back(model: Any) -> None:
    model.to(torch.bfloat16).float()


def _scale(model: Any) -> None:
    model.model.layers[2].self_attn.scaling *= 1.5


def _hook(model: Any) -> None:
    model.model.layers[1].register_forward_hook(lambda *given: 1.1 * given[-1])


def _other_attention(model: Any) -> None:
    model.set_attn_implementation("eager")


_ANY = (_double, _bfloat16_and_back, _other_attention)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        *(("mistral", change) for change in (_window, _fewer_layers, _scale, _hook, *_ANY)),
        *(("falcon", change) for change in _ANY),
    ],
)
def test_a_model_that_was_changed_between_two_texts(
    kind: str, change: Callable[[Any], None]
) -> None:
    """The next text is that of the model as it is now, from the cache of the one before."""
    model = own_model(kind)
    decoder = Decoder.from_model(model, adapter="hf")
    decoder.generate(PROMPT, max_new_tokens=5)
    change(model)
    expected = greedy_loop(model, PROMPT, 12)
    assert decoder.generate(PROMPT, max_new_tokens=12).tokens == expected


def _mix_rows(module: Any, given: Any) -> Any:
    """A pre-hook under which a row depends on its place in the pass."""
    changed = given[0].clone()
    changed[:, -1] *= -3
    return (changed, *given[1:])


def _mix_what_comes_out(module: Any, given: Any, out: Any) -> Any:
    return out.flip(1)


def _mix_after_a_harmless_hook(model: Any) -> None:
    """The number of hooks stays what it was when the model was looked at."""
    model.handle.remove()
    model.model.layers[1].mlp.register_forward_hook(_mix_what_comes_out)


def _not_causal(model: Any) -> None:
    for layer in model.model.layers:
        layer.self_attn.is_causal = False


def _steer(model: Any) -> None:
    model.model.layers[1].mlp.register_forward_pre_hook(_mix_rows)


@pytest.mark.parametrize("change", [_steer, _mix_after_a_harmless_hook, _not_causal])
@pytest.mark.parametrize("adapter", ["hf", "llama"])
def test_a_change_that_no_tree_survives_is_refused_though_the_model_once_passed(
    change: Callable[[Any], None], adapter: str
) -> None:
    model = own_model("llama")
    if adapter == "hf":
        handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: None)
        object.__setattr__(model, "handle", handle)
    elif change is _mix_after_a_harmless_hook:
        pytest.skip("the llama adapter takes no hooks at all")
    decoder = Decoder.from_model(model, adapter=adapter)
    decoder.generate(PROMPT, max_new_tokens=3)
    change(model)
    with pytest.raises(ModelSupportError):
        decoder.generate(PROMPT, max_new_tokens=3)
    with pytest.raises(ModelSupportError):
        Decoder.from_model(model, adapter=adapter)


def test_a_model_that_is_cast_in_the_middle_of_a_text_ends_it_with_an_error() -> None:
    model = own_model()
    adapter = HFAdapter(model, EagerBackend())
    cache = adapter.new_cache(batch=1, capacity=12)
    adapter.forward([StepPlan(0, tuple(PROMPT[:9]))], cache)
    cache.commit([range(9)])
    model.double()
    with pytest.raises(GenerationError, match="cast or moved in the middle of a text"):
        adapter.forward([StepPlan(9, (1,))], cache)
    cache.reset()
    (rows,) = adapter.forward([StepPlan(0, (1, 2))], cache)
    assert rows.dtype == torch.float64


def test_a_rope_that_is_set_to_move_is_refused_when_the_next_text_begins() -> None:
    model = own_model()
    decoder = Decoder.from_model(model, adapter="hf")
    decoder.generate(PROMPT, max_new_tokens=2)
    model.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    with pytest.raises(ModelSupportError, match="'dynamic' RoPE"):
        decoder.generate(PROMPT, max_new_tokens=2)


# --- weights that are elsewhere ------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accelerates_cpu_offload_decodes_as_it_generates(strategy: str) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = own_model("qwen3")
    accelerate.cpu_offload(model)
    assert model.get_input_embeddings().weight.device.type == "meta"
    decoder = Decoder.from_model(model, strategy=strategy, execution="auto")
    assert decoder.adapter_name == "hf"
    for _ in range(2):
        tokens = decoder.generate(PROMPT, max_new_tokens=8).tokens
        assert tokens == greedy_loop(tiny_model("qwen3"), PROMPT, 8)


def test_accelerates_disk_offload_decodes_too(tmp_path: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = own_model()
    accelerate.disk_offload(model, tmp_path)
    tokens = Decoder.from_model(model).generate(PROMPT, max_new_tokens=8).tokens
    assert tokens == greedy_loop(tiny_model(), PROMPT, 8)


def test_an_offloaded_model_is_not_looked_at_again_for_every_text(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accelerate = pytest.importorskip("accelerate")
    model = own_model()
    accelerate.cpu_offload(model)
    decoder = Decoder.from_model(model)
    decoder.generate(PROMPT, max_new_tokens=2)
    monkeypatch.setattr(HFAdapter, "_check", lambda _: pytest.fail("looked at again"))
    decoder.generate(PROMPT, max_new_tokens=2)


def test_weights_on_meta_without_a_hook_are_refused() -> None:
    with pytest.raises(ModelSupportError, match="on the meta device, so there are none"):
        Decoder.from_model(own_model("qwen3").to("meta"))
