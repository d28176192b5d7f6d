"""Drafts of a second model: their trees, their probabilities, and what is refused."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from decodekit import Decoder
from decodekit.decoder.build import build_strategy
from decodekit.engine.rejection import RejectionVerifier
from decodekit.engine.sampling import make_sampler
from decodekit.errors import CheckpointError, ConfigError, GenerationError, ModelSupportError
from decodekit.interfaces import Budget, Proposal
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.interfaces.tree import ROOT
from decodekit.strategies.draft_model import DraftModel, DraftModelConfig
from tests.support.fakes import ToyAdapter, plain_decode
from tests.support.tiny import greedy_loop, random_prompt, tiny_model

PROMPT = [3, 1, 4, 1, 5]
AMPLE = Budget(nodes=99, depth=99, tokens=99)


class Shelf:
    """Gives out models that are there already."""

    def __init__(self, adapter: Any, tokenizer: Any = None) -> None:
        self.given = (adapter, tokenizer)
        self.asked: list[tuple[Any, str]] = []

    def load_model(self, model: Any, *, backend: str, like: Any) -> tuple[Any, Any]:
        self.asked.append((model, backend))
        return self.given


class Words:
    """A tokenizer of which only the vocabulary is looked at."""

    def __init__(self, *words: str) -> None:
        self.words = words

    def get_vocab(self) -> dict[str, int]:
        return {word: token for token, word in enumerate(self.words)}


def strategy(draft: ToyAdapter, **settings: Any) -> DraftModel:
    return DraftModel(DraftModelConfig(model="draft", **settings), Shelf(draft))  # type: ignore[arg-type]


def attached(draft: ToyAdapter, **settings: Any) -> DraftModel:
    made = strategy(draft, **settings)
    return made.attached(ToyAdapter(draft.vocab_size), None)


def proposal(
    draft: ToyAdapter,
    params: SamplingParams | None = None,
    budget: Budget = AMPLE,
    **settings: Any,
) -> Proposal:
    return (
        attached(draft, **settings).new_proposer(params or SamplingParams()).propose(PROMPT, budget)
    )


def test_a_greedy_chain_is_what_the_draft_says() -> None:
    draft = ToyAdapter()
    tree = proposal(draft, num_tokens=4, drafts="greedy").tree
    assert list(tree.tokens) == plain_decode(draft, PROMPT, max_new_tokens=4)
    assert tree.parents == (ROOT, 0, 1, 2)
    # The prompt and then one row more for each level.
    assert [plan.rows for (plan,) in draft.forwards] == [5, 2, 3, 4]


def test_a_tree_holds_the_most_probable_children() -> None:
    draft = ToyAdapter()
    tree = proposal(draft, num_tokens=3, branches=[3, 2], drafts="greedy").tree
    assert tree.parents == (-1, -1, -1, 0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8)
    for node, parent in enumerate(tree.parents):
        path = [*PROMPT, *tree.path_tokens(parent)]
        siblings = tree.children[parent]
        best = draft.logits_after(path).topk(len(siblings)).indices.tolist()
        assert tree.tokens[node] == best[siblings.index(node)]


@pytest.mark.parametrize("model", [5, object(), ["a"]])
def test_what_is_no_draft_is_named(model: Any) -> None:
    built = build_strategy({"name": "draft_model", "model": model})
    with pytest.raises(ConfigError, match="the draft must be a name, a directory or a loaded") as e:
        Decoder.from_model(tiny_model(), strategy=built)
    assert e.value.key == "strategy.model"


def test_a_draft_that_is_not_there_is_blamed_on_its_own_setting(tmp_path: Path) -> None:
    for model in (str(tmp_path / "nowhere"), tmp_path / "nowhere"):
        with pytest.raises(CheckpointError, match=r"^strategy.model: .*nowhere does not exist"):
            Decoder.from_model(tiny_model(), strategy={"name": "draft_model", "model": model})


def test_a_coupled_draft_draws_as_the_target_does() -> None:
    draft = ToyAdapter()
    params = SamplingParams(temperature=1.2, seed=8)
    made = proposal(draft, params, num_tokens=5)
    sampler = make_sampler(params)
    text = list(PROMPT)
    for token in made.tree.tokens:
        assert sampler.choose(draft.logits_after(text)[None], [len(text)]) == [token]
        text.append(token)
    assert made.draft_probs is None
    twice = proposal(draft, params, num_tokens=1, branches=[3])
    assert twice.tree.tokens[0] == made.tree.tokens[0]
    assert len(set(twice.tree.tokens)) == 3


def test_sampled_drafts_come_with_the_probabilities_that_they_were_drawn_with() -> None:
    draft = ToyAdapter()
    params = SamplingParams(temperature=0.8, top_k=6, seed=3)
    made = proposal(draft, params, num_tokens=2, branches=[3, 2], drafts="sampled")
    tree, probs = made.tree, made.draft_probs
    assert probs is not None
    assert probs.shape == (len(tree), draft.vocab_size)
    for parent, siblings in tree.children.items():
        path = [*PROMPT, *tree.path_tokens(parent)]
        left = (
            make_sampler(params)
            .probabilities(draft.logits_after(path)[None], [len(path)])[0]
            .double()
        )
        for node in siblings:  # without replacement: no two are alike
            left = left / left.sum()
            assert torch.allclose(probs[node], left)
            assert probs[node][tree.tokens[node]] > 0
            left[tree.tokens[node]] = 0


def test_sampled_drafts_have_the_distribution_of_the_draft() -> None:
    draft = ToyAdapter(5)
    (exact,) = make_sampler(SamplingParams(temperature=1.0)).probabilities(
        draft.logits_after([0, 1, 2])[None], [3]
    )
    counts: Counter[int] = Counter()
    made = attached(draft, num_tokens=1, drafts="sampled")
    total = 4000
    for seed in range(total):
        params = SamplingParams(temperature=1.0, seed=seed)
        counts[made.new_proposer(params).propose([0, 1, 2], AMPLE).tree.tokens[0]] += 1
    statistic = sum(
        (counts[token] - total * p) ** 2 / (total * p) for token, p in enumerate(exact.tolist())
    )
    assert statistic < 33.38  # one in a million, 4 degrees of freedom


def test_a_filter_may_leave_fewer_children_than_were_asked_for() -> None:
    params = SamplingParams(temperature=1.0, top_k=2)
    assert (
        len(proposal(ToyAdapter(), params, num_tokens=1, branches=[5], drafts="sampled").tree) == 2
    )
    greedy = proposal(ToyAdapter(), num_tokens=1, branches=[5], drafts="sampled")
    assert len(greedy.tree) == 1
    assert len(proposal(ToyAdapter(3), num_tokens=1, branches=[5], drafts="greedy").tree) == 3


@pytest.mark.parametrize(
    ("budget", "nodes", "depth"),
    [
        (Budget(nodes=0, depth=9, tokens=9), 0, 0),
        (Budget(nodes=4, depth=9, tokens=9), 4, 2),
        (Budget(nodes=99, depth=2, tokens=9), 9, 2),
        (Budget(nodes=99, depth=9, tokens=1), 0, 0),
        (Budget(nodes=99, depth=9, tokens=2), 3, 1),
    ],
)
def test_it_keeps_to_its_budget(budget: Budget, nodes: int, depth: int) -> None:
    tree = proposal(ToyAdapter(), budget=budget, num_tokens=4, branches=[3, 2]).tree
    assert (len(tree), max(tree.depths, default=0)) == (nodes, depth)


@pytest.mark.parametrize(("limit", "depth"), [(4, 0), (5, 1), (6, 2), (7, 3), (20, 3)])
def test_a_draft_with_a_shorter_context_stops_in_time(limit: int, depth: int) -> None:
    draft = ToyAdapter(max_positions=limit)
    assert len(proposal(draft, num_tokens=3).tree) == depth


def test_max_nodes_is_the_size_of_the_largest_tree() -> None:
    made = attached(ToyAdapter(), num_tokens=4, branches=[3, 2])
    assert made.max_nodes == 3 + 6 + 6 + 6
    assert len(made.new_proposer(SamplingParams()).propose(PROMPT, AMPLE).tree) == made.max_nodes


@pytest.mark.parametrize("drafts", ["greedy", "coupled", "sampled"])
@pytest.mark.parametrize("verifier", [None, RejectionVerifier()], ids=["exact", "rejection"])
def test_a_draft_that_is_the_target_is_always_right(
    drafts: str, verifier: RejectionVerifier | None
) -> None:
    model = ToyAdapter()
    decoder = Decoder(
        model, strategy=strategy(ToyAdapter(), num_tokens=4, drafts=drafts), verifier=verifier
    )
    result = decoder.generate(PROMPT, max_new_tokens=20)
    assert result.tokens == plain_decode(model, PROMPT, max_new_tokens=20)
    assert result.stats.steps == 4  # four accepted and one bonus a step


def test_a_coupled_draft_is_right_under_sampling_too() -> None:
    decoder = Decoder(ToyAdapter(), strategy=strategy(ToyAdapter(), num_tokens=4))
    assert decoder.generate(PROMPT, max_new_tokens=20, temperature=1.5, seed=4).stats.steps == 4


@pytest.mark.parametrize("drafts", ["greedy", "coupled", "sampled"])
@pytest.mark.parametrize("branches", [[], [2, 2]])
def test_another_draft_changes_no_token_under_exact_match(drafts: str, branches: list[int]) -> None:
    model, prompt = tiny_model(), random_prompt(12)
    settings = {
        "name": "draft_model",
        "model": tiny_model(seed=1),
        "drafts": drafts,
        "branches": branches,
    }
    decoder = Decoder.from_model(model, strategy=settings)
    assert decoder.generate(prompt, max_new_tokens=24).tokens == greedy_loop(model, prompt, 24)
    plain = Decoder.from_model(model, strategy="autoregressive")
    options: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.9, "seed": 2}
    assert decoder.generate(prompt, **options).tokens == plain.generate(prompt, **options).tokens


def test_sampled_drafts_under_rejection_have_the_distribution_of_the_target() -> None:
    """Chi-squared over the first two tokens, at one in a million."""
    model, draft = ToyAdapter(3), ToyAdapter(3, seed=1)
    params = SamplingParams(temperature=1.0)
    sampler = make_sampler(params)

    def exact(text: list[int]) -> list[float]:
        return sampler.probabilities(model.logits_after(text)[None], [len(text)])[0].tolist()

    decoder = Decoder(
        model,
        strategy=strategy(draft, num_tokens=2, branches=[2], drafts="sampled"),
        verifier=RejectionVerifier(),
    )
    total = 3000
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(total):
        result = decoder.generate([0, 1, 2], max_new_tokens=2, temperature=1.0, seed=seed)
        counts[tuple(result.tokens)] += 1
    statistic = 0.0
    for first, p in enumerate(exact([0, 1, 2])):
        for second, q in enumerate(exact([0, 1, 2, first])):
            statistic += (counts[first, second] - total * p * q) ** 2 / (total * p * q)
    assert statistic < 45.1  # 8 degrees of freedom


def test_a_long_prompt_is_read_in_pieces_and_only_once() -> None:
    draft = ToyAdapter()
    decoder = Decoder(ToyAdapter(), strategy=strategy(draft, num_tokens=2), prefill_chunk=512)
    prompt = [token % 11 for token in range(1500)]
    result = decoder.generate(prompt, max_new_tokens=9)
    assert result.tokens == plain_decode(ToyAdapter(), prompt, max_new_tokens=9)
    assert sum(plan.rows for (plan,) in draft.forwards) < 1600


# --- refusals ------------------------------------------------------------------------------------


def test_a_draft_with_another_number_of_tokens_is_refused() -> None:
    with pytest.raises(ModelSupportError) as caught:
        Decoder(ToyAdapter(11), strategy=strategy(ToyAdapter(12)))
    assert str(caught.value) == (
        "the draft model 'draft' cannot draft for this model: it has 12 tokens and the model 11"
    )
    assert caught.value.reason == "it has 12 tokens and the model 11"


def test_a_draft_with_another_vocabulary_of_one_size_is_refused() -> None:
    shelf = Shelf(ToyAdapter(), Words("a", "b"))
    made = DraftModel(DraftModelConfig(model="draft"), shelf)  # type: ignore[arg-type]
    with pytest.raises(ModelSupportError, match="its tokenizer has another vocabulary"):
        made.attached(ToyAdapter(), Words("b", "a"))
    made.attached(ToyAdapter(), Words("a", "b"))
    assert shelf.asked == [("draft", "auto")]  # loaded once


def test_tokenizers_without_a_vocabulary_are_compared_by_their_kind() -> None:
    """As an adapter that loads its own models may have them."""

    class Bytes:
        pass

    shelf = Shelf(ToyAdapter(), Bytes())
    made = DraftModel(DraftModelConfig(model="draft"), shelf)  # type: ignore[arg-type]
    with pytest.raises(ModelSupportError, match="its tokenizer is of another kind"):
        made.attached(ToyAdapter(), Words("a"))
    with pytest.raises(ModelSupportError, match="it has 11 tokens and the model 12"):
        made.attached(ToyAdapter(12), Bytes())
    made.attached(ToyAdapter(), Bytes())


@pytest.mark.parametrize("sizes", [(11, 14), (14, 11)])
def test_vocabularies_that_differ_by_padding_fit(sizes: tuple[int, int]) -> None:
    """As those of the models of one family often do."""
    ours, other = sizes
    model, words = ToyAdapter(ours), Words("a")
    shelf = Shelf(ToyAdapter(other, seed=2), words)
    config = DraftModelConfig(model="draft", num_tokens=3, drafts="sampled")
    made = DraftModel(config, shelf)  # type: ignore[arg-type]
    made = made.attached(model, words)
    decoder = Decoder(model, strategy=strategy(ToyAdapter(ours)), verifier=RejectionVerifier())
    decoder.strategy = made
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "seed": 1}
    assert all(0 <= token < ours for token in decoder.generate(PROMPT, **options).tokens)


@pytest.mark.parametrize("drafts", ["greedy", "coupled", "sampled"])
@pytest.mark.parametrize("sizes", [(14, 11), (11, 14), (14, 14)])
@pytest.mark.parametrize("own_tokenizer", [True, False])
def test_a_draft_with_a_padded_vocabulary_fits_loaded_or_by_name_and_guesses_no_padding(
    drafts: str, sizes: tuple[int, int], own_tokenizer: bool
) -> None:
    words = Words(*"abcdefgh")
    config = DraftModelConfig(model="draft", num_tokens=5, branches=[9, 2], drafts=drafts)
    shelf = Shelf(ToyAdapter(sizes[1], seed=2), words if own_tokenizer else None)
    model = ToyAdapter(sizes[0])
    made = DraftModel(config, shelf).attached(model, words)  # type: ignore[arg-type]
    for prompt in range(8):
        proposer = made.new_proposer(SamplingParams(temperature=1.0, seed=prompt))
        proposal = proposer.propose([prompt, sizes[0] - 1], AMPLE)
        assert set(proposal.tree.tokens) <= set(range(8))
        assert len(proposal.tree) > 30
        if proposal.draft_probs is not None:
            assert proposal.draft_probs.shape[1] == sizes[0]
            assert not proposal.draft_probs[:, 8:].any()
    decoder = Decoder(model, tokenizer=None, strategy=strategy(ToyAdapter(sizes[0])))
    decoder.strategy = made
    if drafts != "sampled":
        expected = plain_decode(ToyAdapter(sizes[0]), PROMPT, max_new_tokens=20)
        assert decoder.generate(PROMPT, max_new_tokens=20).tokens == expected


def test_a_loaded_draft_that_lacks_tokens_is_refused() -> None:
    shelf = Shelf(ToyAdapter(7))
    made = DraftModel(DraftModelConfig(model="draft"), shelf)  # type: ignore[arg-type]
    with pytest.raises(ModelSupportError, match="it has 7 tokens and the model's tokenizer 8"):
        made.attached(ToyAdapter(14), Words(*"abcdefgh"))


def test_a_draft_whose_tokenizer_lacks_some_added_tokens_fits_and_another_does_not() -> None:
    shelf = Shelf(ToyAdapter(), Words(*"abcdefgh"))
    made = DraftModel(DraftModelConfig(model="draft"), shelf)  # type: ignore[arg-type]
    tree = (
        made.attached(ToyAdapter(), Words(*"abcdefgh", "<tool>"))
        .new_proposer(SamplingParams())
        .propose(PROMPT, AMPLE)
        .tree
    )
    assert set(tree.tokens) <= set(range(8))
    for words in (Words(*"abcdefgi", "<tool>"), Words()):
        with pytest.raises(ModelSupportError, match="its tokenizer has another vocabulary"):
            made.attached(ToyAdapter(), words)


def test_a_strategy_that_is_not_attached_says_so() -> None:
    with pytest.raises(GenerationError, match="has to be attached"):
        strategy(ToyAdapter()).new_proposer(SamplingParams())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "name the draft model: strategy.model=NAME, a directory or owner/name"),
        ({"model": "m", "num_tokens": 0}, "num_tokens must be 1 or more, not 0"),
        ({"model": "m", "branches": [2, 0]}, "branches must be 1 or more, not 0"),
        (
            {"model": "m", "num_tokens": 1, "branches": [2, 2]},
            "branches names 2 levels; num_tokens has 1",
        ),
        (
            {"model": "m", "drafts": "wild"},
            "drafts must be one of greedy, coupled, sampled, not 'wild'",
        ),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DraftModel(DraftModelConfig(**settings), Shelf(ToyAdapter()))  # type: ignore[arg-type]
    assert str(caught.value) == message
