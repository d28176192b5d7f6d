"""Make ``weights.safetensors``: train the model on text files, a few minutes on one core.

python train.py README.md docs/*.md
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from decodekit_example.model import END, ByteModel
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

STEPS, BATCH, LENGTH = 2500, 16, 192


def causal(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attend to all earlier rows."""
    out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2)


def main(paths: list[str]) -> None:
    """Train and save."""
    torch.manual_seed(0)
    text = b"".join(Path(path).read_bytes() + bytes([END]) for path in paths)
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    model = ByteModel()
    torch.nn.init.normal_(model.tokens.weight, std=0.1)
    torch.nn.init.normal_(model.positions.weight, std=0.02)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=6e-3, total_steps=STEPS)
    for step in range(STEPS):
        starts = torch.randint(len(data) - LENGTH, (BATCH,))
        rows = torch.stack([data[start : start + LENGTH + 1] for start in starts.tolist()])
        # All positions are trained, not only the first ones.
        shift = torch.randint(model.positions.num_embeddings - LENGTH, (BATCH, 1))
        logits = model.logits(model(rows[:, :-1], shift + torch.arange(LENGTH), causal))
        loss = cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(step, round(loss.item(), 3), flush=True)
    weights = {name: tensor.half() for name, tensor in model.state_dict().items()}
    save_file(weights, Path(__file__).parent / "src/decodekit_example/weights.safetensors")


if __name__ == "__main__":
    main(sys.argv[1:])
