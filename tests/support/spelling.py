"""Tokenizers of ``transformers`` as models have them, and a model that says what is written."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from decodekit import Decoder
from decodekit.decoder.build import build_strategy
from tests.support.fakes import ToyAdapter

__all__ = ["SPECIAL", "TEMPLATE", "TOKENIZERS", "Says", "ids_of", "says", "spelled"]

SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
WORDS = ["Paris", "is", "yes", "no", "done", "User", "Par", "the", "The"]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "<|im_end|>\n{% endfor %}{% if tools %}[{{ tools | length }} tools]{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}(no) {% endif %}{% endif %}"
)


def _pieces() -> list[str]:
    letters = [chr(code) for code in range(33, 127)]
    return [*(f"▁{word}" for word in WORDS), *WORDS, "▁", "▁▁", "is</", *letters]


def _sentencepiece() -> Tokenizer:
    """LLaMA 2 and Mistral: a space in front, bytes for what is unknown."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    scores = [(piece, float(len(piece))) for piece in _pieces()]
    vocabulary = [*((text, 0.0) for text in [*SPECIAL, *bytes_]), *scores]
    inner = Tokenizer(models.Unigram(vocabulary, unk_id=0, byte_fallback=True))
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return inner


def _metaspace() -> Tokenizer:
    """The newer form of the same: ``Metaspace``, which drops every space of the first token."""
    inner = _sentencepiece()
    inner.normalizer = None
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="first", split=False)]
    )
    return inner


def _gemma() -> Tokenizer:
    """Gemma: no space in front, none dropped."""
    inner = _sentencepiece()
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return inner


def _byte_level() -> Tokenizer:
    """GPT-2, LLaMA 3 and Qwen: tokens are runs of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {text: i for i, text in enumerate([*SPECIAL, *alphabet])}
    merges = []
    for word in [*(f"\u0120{word}" for word in WORDS), *WORDS, "is</"]:
        for end in range(2, len(word) + 1):
            merge = (word[: end - 1], word[end - 1])
            if word[:end] not in vocabulary:
                vocabulary[word[:end]] = len(vocabulary)
                merges.append(merge)
    inner = Tokenizer(models.BPE(vocabulary, merges))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = decoders.ByteLevel()
    return inner


_KINDS = {
    "sentencepiece": _sentencepiece,
    "metaspace": _metaspace,
    "gemma": _gemma,
    "byte level": _byte_level,
}
TOKENIZERS = list(_KINDS)


@cache
def spelled(kind: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer that puts ``<s>`` in front and has a chat template."""
    inner = _KINDS[kind]()
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    inner.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def ids_of(tokenizer: PreTrainedTokenizerFast, *tokens: str) -> list[int]:
    """Return the ids of tokens by name, with ``▁`` for a space whatever the tokenizer."""
    vocabulary = tokenizer.get_vocab()
    space, newline = ("\u0120", "\u010a") if "\u0120" in vocabulary else ("▁", "<0x0A>")
    return [vocabulary[token.replace("▁", space).replace("\n", newline)] for token in tokens]


class Says(ToyAdapter):
    """A model that says tokens one after the other, and then anything.

    Args:
        tokenizer: Gives the size of the vocabulary.
        tokens: What it says.
        after: Tokens of the prompt.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        tokens: Sequence[int],
        *,
        after: int,
        seed: int = 0,
    ) -> None:
        super().__init__(len(tokenizer), seed, eos=[tokenizer.eos_token_id], context=2)
        self.tokens = list(tokens)
        self.after = after

    def logits_after(self, path: Sequence[int]) -> Tensor:
        """Return the logits [V] after ``path``."""
        logits = super().logits_after(path)
        place = len(path) - self.after
        if place < len(self.tokens):
            logits[self.tokens[place]] = 9.0
        return logits


def says(
    tokenizer: PreTrainedTokenizerFast,
    tokens: Sequence[int],
    *,
    prompt: object,
    strategy: object = "autoregressive",
    **options: object,
) -> Decoder:
    """Return a decoder whose model says ``tokens`` after ``prompt``."""
    probe = Decoder(ToyAdapter(len(tokenizer)), tokenizer, strategy=build_strategy("jacobi"))
    length = len(probe.encode(prompt, **options))
    return Decoder(
        Says(tokenizer, tokens, after=length), tokenizer, strategy=build_strategy(strategy)
    )
