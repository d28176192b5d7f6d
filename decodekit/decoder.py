"""The Python interface: a model and a strategy, ready for many prompts."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from decodekit.config import DecoderConfig
from decodekit.errors import ConfigError, GenerationError, require_at_least
from decodekit.factory import (
    build_adapter,
    build_strategy,
    build_verifier,
    check_execution,
    load,
    prepare_execution,
)
from decodekit.interfaces import ModelAdapter, Strategy, Verifier
from decodekit.loop import StepRecord, decode
from decodekit.prompts import Prompt, encode_prompt
from decodekit.result import GenerationResult
from decodekit.runner import LocalRunner
from decodekit.sampling import SamplingParams, make_sampler
from decodekit.stopping import StopRules
from decodekit.stream import GenerationStream
from decodekit.text import IncrementalText

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Decoder"]


class Decoder:
    """Decodes with one model and one strategy; made with ``from_config`` or ``from_model``.

    Requests do not influence each other: each has its own proposer, cache and stop rules, so
    streams may be interleaved.

    Args:
        adapter: The model.
        tokenizer: Its tokenizer; None if only token ids go in and out.
        strategy: What is proposed.
        verifier: What is accepted; exact match if None.
        sampling: How tokens are chosen where a request does not say.
        max_new_tokens: Most new tokens where a request does not say.
        prefill_chunk: Most prompt tokens in one forward pass.
        chat: Whether a text prompt is wrapped in the chat template where a request does not say;
            None means if there is one.
    """

    def __init__(
        self,
        adapter: ModelAdapter,
        tokenizer: Any = None,
        *,
        strategy: Strategy,
        verifier: Verifier | None = None,
        sampling: SamplingParams | None = None,
        max_new_tokens: int = 256,
        prefill_chunk: int = 512,
        chat: bool | None = None,
    ) -> None:
        require_at_least(max_new_tokens, 0, key="max_new_tokens")
        require_at_least(prefill_chunk, 1, key="prefill_chunk")
        self.adapter = adapter
        self.tokenizer = tokenizer
        self.strategy = strategy
        self.verifier = verifier or build_verifier("exact_match")
        self.sampling = sampling or SamplingParams()
        self.max_new_tokens = max_new_tokens
        self.prefill_chunk = prefill_chunk
        self.chat = getattr(tokenizer, "chat_template", None) is not None if chat is None else chat
        self._idle: list[LocalRunner] = []  # runners whose cache memory can be taken again

    @classmethod
    def from_config(
        cls, config: DecoderConfig | Mapping[str, Any] | None = None, **settings: Any
    ) -> Decoder:
        """Load a model and make a decoder.

        Args:
            config: A ``DecoderConfig``, a mapping or a ``DictConfig``; what it does not say is as
                in ``conf/config.yaml``. What belongs to a request or to the command line (prompt,
                stop, job, ...) is not looked at.
            settings: Settings by keyword, which go before those of ``config``; for example
                ``strategy="lookahead", model="smollm2-135m"``.

        Raises:
            ConfigError: A name, key or value is unknown or out of range.
            CheckpointError: The model cannot be found, fetched or read.
            ModelSupportError: The model cannot be decoded exactly.
        """
        if not isinstance(config, DecoderConfig):
            if config is not None and not isinstance(config, Mapping):
                raise TypeError(
                    f"settings are a DecoderConfig or a mapping, not a {type(config).__name__}"
                )
            from decodekit.compose import compose_mapping  # Hydra, only where it is needed

            config = compose_mapping({**(config or {}), **settings})
        elif settings:
            raise TypeError("give a DecoderConfig or settings by keyword, not both")
        # What costs nothing first: a mistake must not wait for a model to be fetched.
        strategy, verifier = build_strategy(config.strategy), build_verifier(config.verifier)
        model, tokenizer = load(config)
        adapter = build_adapter(model, adapter=config.adapter, backend=config.backend)
        prepare_execution(model, config.execution)
        return cls(
            adapter,
            tokenizer,
            strategy=strategy,
            verifier=verifier,
            sampling=config.sampling,
            max_new_tokens=config.max_new_tokens,
            prefill_chunk=config.prefill_chunk,
            chat=config.chat,
        )

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        strategy: Any = "lookahead",
        adapter: Any = "hf",
        backend: Any = "sdpa",
        execution: str = "eager",
        chat: bool | None = False,
        **settings: Any,
    ) -> Decoder:
        """Make a decoder over a loaded ``transformers`` model.

        Args:
            model: A causal language model in evaluation mode.
            tokenizer: Its tokenizer; None if only token ids go in and out.
            strategy: A registered name, a mapping with ``name``, a settings dataclass, or a
                strategy of your own.
            adapter: A registered name, a mapping with ``name``, or a settings dataclass.
            backend: Likewise.
            execution: ``eager`` leaves the model as it is. ``packed`` packs its linear layers for
                the CPU in place: faster, but the model can then neither be trained nor saved.
                ``auto`` packs where that works.
            chat: Whether a text prompt is wrapped in the chat template; here text is taken as it is
                unless you say otherwise.
            settings: Further arguments of ``Decoder``.

        Raises:
            ConfigError: A name or a setting is unknown.
            ModelSupportError: The model cannot be decoded exactly.
        """
        check_execution(execution)
        built = build_strategy(strategy)
        decoder = cls(
            build_adapter(model, adapter=adapter, backend=backend),
            tokenizer,
            strategy=built,
            chat=chat,
            **settings,
        )
        prepare_execution(model, execution)  # last: it changes the model
        return decoder

    def with_strategy(self, strategy: Any) -> Decoder:
        """Return a decoder over the same model with another strategy."""
        return Decoder(
            self.adapter,
            self.tokenizer,
            strategy=build_strategy(strategy),
            verifier=self.verifier,
            sampling=self.sampling,
            max_new_tokens=self.max_new_tokens,
            prefill_chunk=self.prefill_chunk,
            chat=self.chat,
        )

    def generate(self, prompt: Prompt, **options: Any) -> GenerationResult:
        """Continue ``prompt`` and return the whole answer; the options are those of ``stream``."""
        return self.stream(prompt, **options).run()

    def stream(
        self,
        prompt: Prompt,
        *,
        max_new_tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        chat: bool | None = None,
    ) -> GenerationStream:
        """Continue ``prompt``, run by run.

        Args:
            prompt: Text, token ids (a sequence or a tensor of one prompt) or chat messages
                (``[{"role": "user", "content": "..."}]``).
            max_new_tokens: Most new tokens.
            temperature: 0 for greedy decoding.
            top_k: Keep the k most probable tokens; 0 keeps all.
            top_p: Keep the most probable tokens with this sum of probabilities.
            min_p: Keep the tokens of at least this share of the best one's probability.
            seed: The same seed gives the same tokens, whatever the strategy.
            stop: Strings that end the text; they are not part of it.
            chat: Whether a text prompt is wrapped in the chat template.

        Returns:
            An iterator over accepted runs; its ``result`` is there when it has ended.

        Raises:
            ConfigError: An option is out of its range.
            GenerationError: The prompt is empty, has an unknown token, or is too long.
        """
        given = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
        }
        started = time.perf_counter()
        params = _override(self.sampling, given)
        chat = self.chat if chat is None else chat
        ids = encode_prompt(prompt, self.tokenizer, chat=chat, vocab_size=self.adapter.vocab_size)
        limit = self.adapter.max_positions
        if limit is not None and len(ids) >= limit:
            raise GenerationError(
                f"the prompt has {len(ids)} tokens and the model's context is {limit}; "
                "shorten the prompt to leave room for an answer"
            )
        # A plain text goes on where the prompt ends; an answer in a chat starts afresh.
        text = self._new_text(
            stop, context=ids[-4:] if isinstance(prompt, str) and not chat else ()
        )
        rules = StopRules(
            max_new_tokens=self.max_new_tokens if max_new_tokens is None else max_new_tokens,
            room=None if limit is None else limit - len(ids),
            eos_token_ids=self.adapter.eos_token_ids,
            text=text,
        )
        return GenerationStream(
            ids, self._records(ids, rules, params), rules=rules, text=text, started=started
        )

    def _new_text(
        self, stop: str | Sequence[str] | None, *, context: Sequence[int]
    ) -> IncrementalText | None:
        strings = [stop] if isinstance(stop, str) else list(stop or ())
        if not all(isinstance(string, str) for string in strings):
            raise ConfigError("stop must be strings", key="stop", value=stop)
        if self.tokenizer is not None:
            return IncrementalText(self.tokenizer, stop=strings, context=context)
        if strings:
            raise GenerationError("stop strings need a tokenizer; give one to the Decoder")
        return None

    def _records(
        self, ids: list[int], rules: StopRules, params: SamplingParams
    ) -> Generator[StepRecord, None, None]:
        """Yield the steps of a request on a runner that no other request uses meanwhile."""
        try:
            runner = self._idle.pop()
        except IndexError:
            runner = LocalRunner(self.adapter, prefill_chunk=self.prefill_chunk)
        usable = True
        try:
            yield from decode(
                ids,
                runner=runner,
                proposer=self.strategy.new_proposer(),
                verifier=self.verifier,
                sampler=make_sampler(params),
                rules=rules,
                max_nodes=self.strategy.max_nodes,
            )
        except Exception:
            usable = False  # its cache may be what failed
            raise
        finally:
            if usable:
                self._idle.append(runner)


def _override(params: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """Return ``params`` with the options that a request gave."""
    return dataclasses.replace(
        params, **{name: value for name, value in given.items() if value is not None}
    )
