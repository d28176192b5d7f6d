"""How long a step takes outside the model: propose, mask, verify, commit, observe, detokenize.

    python scripts/host_work.py PROMPTS.jsonl [key=value ...]

Runs real steps of a strategy and subtracts the time in the model's forward pass. The mask is built
inside that pass, so it is timed on its own, at the median number of rows, and added.
"""

from __future__ import annotations

import sys
import time
from statistics import median

import torch

from decodekit import Decoder
from decodekit.cli.prompt_files import read_prompts
from decodekit.config.compose import compose_config
from decodekit.interfaces.plan import StepPlan
from decodekit.interfaces.tree import TokenTree


def main(path: str, overrides: list[str]) -> None:
    """Print the figures."""
    config = compose_config(overrides)
    decoder = Decoder.from_config(config)
    host: list[float] = []
    rows: list[int] = []
    for prompt in read_prompts(path, limit=2, key="PROMPTS"):
        stream = decoder.stream(prompt.prompt, max_new_tokens=96, chat=prompt.chat)
        seen = stream.result.stats
        start = time.perf_counter()
        for number, _ in enumerate(stream):
            stats = stream.result.stats
            spent = time.perf_counter() - start - (stats.forward_seconds - seen.forward_seconds)
            if number:  # the first step has the prompt in it
                host.append(spent * 1e3)
                rows.append(1 + stats.nodes - seen.nodes)
            seen = stats
            start = time.perf_counter()
    size = int(median(rows)) - 1
    model = decoder.adapter.model
    tree = TokenTree((0,) * size, tuple(range(-1, size - 1)))
    masks = []
    for _ in range(200):
        start = time.perf_counter()
        plan = StepPlan(300, (0,), TokenTree(tree.tokens, tree.parents))
        decoder.adapter.backend.lower(
            [plan.mask()], window=None, dtype=model.dtype, device=torch.device(model.device)
        )
        masks.append((time.perf_counter() - start) * 1e3)
    print(f"{config.strategy}")
    print(f"rows a step: median {size + 1}, steps: {len(host)}")
    print(f"host work without the mask: median {median(host):.2f} ms, worst {max(host):.2f} ms")
    print(f"the mask of {size + 1} rows after 300: median {median(masks):.2f} ms")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
