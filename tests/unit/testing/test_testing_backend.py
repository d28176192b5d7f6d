"""``check_backend``: the built-in backends pass, and each law catches one that breaks it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from decodekit.backends.eager import EagerBackend
from decodekit.backends.sdpa import SDPABackend
from decodekit.config.plugins.installed import registry
from decodekit.errors import BackendError
from decodekit.interfaces import AttentionBackend
from decodekit.interfaces.plan import StepPlan
from decodekit.testing import check_backend


@pytest.mark.parametrize("name", registry().names("backend"))
def test_the_built_in_backends_keep_every_law(name: str) -> None:
    component = registry().get("backend", name)
    # Interpreted and uncompiled kernels are slow; test_backends.py has them in every dtype.
    slow = name in ("flex", "triton")
    half = () if slow else (torch.float64, torch.float16, torch.bfloat16)
    settings = {"compile": False} if name == "flex" else {}
    check_backend(component.build(component.config(**settings)), dtypes=(torch.float32, *half))


class Causal(SDPABackend):
    """Takes every tree for a chain."""

    def lower(self, masks: Any, **form: Any) -> Any:
        plans = [StepPlan(mask.prefix, (0,) * mask.rows) for mask in masks]
        return super().lower([plan.mask() for plan in plans], **form)


class NoWindow(SDPABackend):
    def lower(self, masks: Any, *, window: int | None, **form: Any) -> Any:
        return super().lower(masks, window=None, **form)


class NoScale(EagerBackend):
    def attend(self, *given: Any, scale: float, **more: Any) -> Tensor:
        return super().attend(*given, scale=1.0, **more)


class NoSinks(EagerBackend):
    def attend(self, *given: Any, sinks: Any = None, **more: Any) -> Tensor:
        return super().attend(*given, **more)


class RepeatsHeads(EagerBackend):
    """Takes the query heads of a kv head to be those far apart."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any) -> Tensor:
        groups = query.shape[1] // key.shape[1]
        wide = [states.repeat(1, groups, 1, 1) for states in (key, value)]
        return super().attend(query, *wide, *rest, **more)


class WritesInPlace(EagerBackend):
    def attend(self, query: Tensor, *given: Any, scale: float, **more: Any) -> Tensor:
        query.mul_(scale)
        return super().attend(query, *given, scale=1.0, **more)


class UsedUp(EagerBackend):
    """Changes the lowered mask when it is used."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, lowered: Any, **o: Any) -> Tensor:
        out = super().attend(query, key, value, lowered, **o)
        lowered[..., 0] = float("-inf") if lowered.shape[-1] > 1 else 0.0
        return out


class OtherShape(EagerBackend):
    def attend(self, *given: Any, **more: Any) -> Tensor:
        return super().attend(*given, **more).transpose(1, 2)


class OtherDtype(EagerBackend):
    def attend(self, *given: Any, **more: Any) -> Tensor:
        return super().attend(*given, **more).double()


class Crashes(EagerBackend):
    def attend(self, *given: Any, softcap: Any = None, **more: Any) -> Tensor:
        if softcap is not None:
            raise NotImplementedError("softcap")
        return super().attend(*given, **more)


class Refuses(EagerBackend):
    says: str | None = "eager"

    def lower(self, *given: Any, **form: Any) -> Any:
        raise BackendError("no", backend=self.says)


class Anonymous(Refuses):
    says = None


class Nameless(EagerBackend):
    name = ""


class OwnScale(EagerBackend):
    """Scales as attention usually is."""

    def attend(self, query: Tensor, *given: Any, scale: float, **more: Any) -> Tensor:
        return super().attend(query, *given, scale=query.shape[-1] ** -0.5, **more)


class OneOfTwo(EagerBackend):
    """Forgets the sinks where there is a softcap."""

    def attend(self, *given: Any, softcap: Any = None, sinks: Any = None, **more: Any) -> Tensor:
        sinks = None if softcap is not None else sinks
        return super().attend(*given, softcap=softcap, sinks=sinks, **more)


class LastLowered(EagerBackend):
    """Takes the mask that was lowered last, whichever it is given."""

    def lower(self, *given: Any, **form: Any) -> Any:
        self.last = super().lower(*given, **form)
        return self.last

    def attend(self, query: Tensor, key: Tensor, value: Tensor, lowered: Any, **o: Any) -> Tensor:
        return super().attend(query, key, value, self.last, **o)


class OneShapeOneMask(EagerBackend):
    """Lowers the first mask for all that have one shape."""

    def lower(self, masks: Any, **form: Any) -> Any:
        same = len({(mask.prefix, mask.rows) for mask in masks}) == 1
        return super().lower([masks[0]] * len(masks) if same else masks, **form)


class Packed(EagerBackend):
    """Reads the memory of the keys as if nothing were between a head's rows and the next."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **o: Any) -> Tensor:
        dense = torch.empty_strided(key.shape, (1, 1, 1, 1)).to(key.device).contiguous().stride()
        return super().attend(query, key.as_strided(key.shape, dense), value, *rest, **o)


class SmallBlock(EagerBackend):
    """Right in its first block of 32 rows only."""

    def attend(self, *given: Any, **more: Any) -> Tensor:
        out = super().attend(*given, **more)
        out[:, 32:] = 0
        return out


class NaNPadding(EagerBackend):
    """Rows that pad a narrow sequence have no mask at all."""

    def lower(self, masks: Any, **form: Any) -> Any:
        lowered = super().lower(masks, **form)
        for index, mask in enumerate(masks):
            lowered[index, ..., mask.rows :, :] = float("-inf")
        return lowered


@pytest.mark.parametrize(
    ("broken", "expected"),
    [
        (object, "a backend is an AttentionBackend|a backend has name"),
        (Nameless, "a backend says its name"),
        (Causal, "it equals eager"),
        (NoWindow, "it equals eager"),
        (NoScale, "it equals eager"),
        (NoSinks, "it equals eager"),
        (RepeatsHeads, "it equals eager"),
        (OwnScale, "it equals eager"),
        (OneOfTwo, "it equals eager"),
        (LastLowered, "a lowered mask serves every layer"),
        (OneShapeOneMask, "it equals eager"),
        (Packed, "it equals eager"),
        (SmallBlock, "it equals eager"),
        (WritesInPlace, "query, key and value are not written to"),
        (UsedUp, "a lowered mask serves every layer|the output is finite"),
        (OtherShape, r"the output is \[B, R, H, D\] in the dtype"),
        (OtherDtype, r"the output is \[B, R, H, D\] in the dtype"),
        (NaNPadding, "the output is finite, padding included"),
        (Crashes, "what is not supported is refused with a BackendError"),
        (Refuses, "full attention over a tree is supported"),
        (Anonymous, "a refusal names its backend"),
    ],
)
def test_a_broken_backend_is_caught_by_the_law_that_it_breaks(broken: Any, expected: str) -> None:
    with pytest.raises(AssertionError, match=f"^broken law: ({expected})"):
        check_backend(broken())


class Leaks(EagerBackend):
    """Equal to eager for numbers of the usual size; a large hidden value shines through."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, lowered: Any, **o: Any) -> Tensor:
        weak = torch.where(lowered.isinf(), torch.full_like(lowered, -40.0), lowered)
        return super().attend(query, key, value, weak, **o)


def test_a_mask_that_is_only_large_is_caught() -> None:
    backend: AttentionBackend = Leaks()
    with pytest.raises(AssertionError, match="what a row must not see does not move it"):
        check_backend(backend)
