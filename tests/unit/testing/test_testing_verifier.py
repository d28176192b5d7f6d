"""``check_verifier``: the built-in verifiers pass, and each law catches one that breaks it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from decodekit.config.plugins.installed import registry
from decodekit.decoder.build import build_verifier
from decodekit.engine.exact_match import ExactMatchVerifier
from decodekit.engine.rejection import RejectionVerifier
from decodekit.interfaces import Accepted, Proposal, TargetTokens
from decodekit.interfaces.tree import ROOT
from decodekit.testing import check_verifier


@pytest.mark.parametrize("name", registry().names("verifier"))
def test_the_built_in_verifiers_keep_every_law(name: str) -> None:
    check_verifier(build_verifier(name))


class Edited(ExactMatchVerifier):
    """Exact match whose run is edited by ``edit``."""

    def verify(self, proposal: Proposal, target: TargetTokens) -> Iterator[Accepted]:
        yield from self.edit(list(super().verify(proposal, target)), proposal, target)

    def edit(self, run: Any, proposal: Proposal, target: TargetTokens) -> Any:
        return run


class Eager(Edited):
    """Walks to the end before it gives a token."""


class BatchAsker(ExactMatchVerifier):
    """Asks about all nodes at once."""

    def verify(self, proposal: Proposal, target: TargetTokens) -> Iterator[Accepted]:
        target.after_many([ROOT, *range(len(proposal.tree))])
        return super().verify(proposal, target)


class Lazy(ExactMatchVerifier):
    """A lazy walk that is edited token by token."""

    def verify(self, proposal: Proposal, target: TargetTokens) -> Iterator[Accepted]:
        for one in super().verify(proposal, target):
            yield from self.edit(one, proposal)

    def edit(self, one: Accepted, proposal: Proposal) -> list[Accepted]:
        return [one]


class NoBonus(Lazy):
    def edit(self, one: Accepted, proposal: Proposal) -> list[Accepted]:
        return [one] if one.node is not None else []


class TwoBonuses(Lazy):
    def edit(self, one: Accepted, proposal: Proposal) -> list[Accepted]:
        return [one] if one.node is not None else [one, one]


class WrongToken(Lazy):
    def edit(self, one: Accepted, proposal: Proposal) -> list[Accepted]:
        return [Accepted((one.token + 1) % 5, one.node)]


class WrongNode(Lazy):
    def edit(self, one: Accepted, proposal: Proposal) -> list[Accepted]:
        node = None if one.node is None else (one.node + 1) % len(proposal.tree)
        return [Accepted(one.token, node)]


class Shy:
    """Accepts nothing."""

    def verify(self, proposal: Proposal, target: TargetTokens) -> Iterator[Accepted]:
        yield Accepted(target.after(ROOT), None)


class Gullible(RejectionVerifier):
    """Accepts a first guess half of the time, whatever the model says."""

    def verify(self, proposal: Proposal, target: TargetTokens) -> Iterator[Accepted]:
        if proposal.draft_probs is not None and target.uniform(ROOT, 9) < 0.5:
            yield Accepted(proposal.tree.tokens[0], 0)
        yield from super().verify(proposal, target)


class Certain(RejectionVerifier):
    """Under sampling always the same token."""

    def verify(self, proposal: Proposal, target: TargetTokens) -> Iterator[Accepted]:
        probabilities = target.probabilities(ROOT)
        if float(probabilities.max()) < 1:
            yield Accepted(int(probabilities.argmax()), None)
        else:
            yield from super().verify(proposal, target)


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (object, "a verifier has verify"),
        (Eager, "the model is asked about the accepted path only"),
        (BatchAsker, "the model is asked about the accepted path only"),
        (NoBonus, "a run ends with the bonus"),
        (TwoBonuses, "the bonus comes last, and once"),
        (WrongToken, "the tokens are the model's own"),
        (WrongNode, "an accepted node stands for the accepted path"),
        (Shy, "what the model agrees with is accepted"),
        (Gullible, "the text has the model's distribution; .*drawn guesses"),
        (Certain, "the text has the model's distribution; .*certain guesses"),
    ],
)
def test_a_broken_verifier_is_caught_by_the_law_that_it_breaks(broken: Any, expected: str) -> None:
    with pytest.raises(AssertionError, match=f"^broken law: {expected}"):
        check_verifier(broken())
