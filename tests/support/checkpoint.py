"""A tiny checkpoint on disk: a random model, a word tokenizer and a chat template."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.support.tiny import VOCABULARY, tiny_model

WORDS = ["<unk>", "<s>", "<u>", "<a>", *(chr(ord("a") + i) for i in range(26))]
TEMPLATE = (
    "{% for m in messages %}<u> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


def save_checkpoint(directory: Path, *, kind: str = "llama") -> str:
    """Write a model, a tokenizer and a template to ``directory`` and return its path."""
    words = WORDS + [f"w{i}" for i in range(VOCABULARY - len(WORDS))]
    inner = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", bos_token="<s>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    tiny_model(kind).save_pretrained(directory)
    return str(directory)
