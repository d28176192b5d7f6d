"""The Python interface: a model and a strategy, ready for many prompts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, overload

from decodekit.answer import Answer
from decodekit.config import DecoderConfig
from decodekit.errors import (
    ConfigError,
    DecodekitError,
    GenerationError,
    require_at_least,
    shortened,
)
from decodekit.factory import (
    build_adapter,
    build_strategy,
    build_verifier,
    check_execution,
    load,
    prepare_execution,
)
from decodekit.foreign import check_streamer
from decodekit.generation_defaults import GenerationDefaults, defaults_of
from decodekit.interfaces import (
    Compilation,
    HasExecution,
    ModelAdapter,
    NeedsTarget,
    Strategy,
    Verifier,
)
from decodekit.loop import StepRecord, decode
from decodekit.params import SamplingParams
from decodekit.plugins import new_observers
from decodekit.prompts import Prompt, encode_prompt, is_batch
from decodekit.request import Request, prepare, request_of
from decodekit.result import GenerationResult, TextScore
from decodekit.runner import LocalRunner
from decodekit.scoring import score_texts
from decodekit.stream import GenerationStream

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Decoder"]

_LOG = logging.getLogger("decodekit")

_OF_REQUESTS = {field.name for field in fields(Request)} - {
    field.name for field in fields(DecoderConfig)
}


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
        execution: The way of execution that the model was prepared for, for reports.
        generation_defaults: Whether what the model's ``generation_config`` asks for holds where
            neither a request nor ``sampling`` says otherwise; see docs/requests.md.
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
        execution: str = "eager",
        generation_defaults: bool = True,
    ) -> None:
        require_at_least(max_new_tokens, 0, key="max_new_tokens")
        require_at_least(prefill_chunk, 1, key="prefill_chunk")
        if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
            raise ConfigError(
                f"tokenizer must be a transformers tokenizer, not {shortened(tokenizer)}",
                key="tokenizer",
            )
        if not isinstance(generation_defaults, bool):
            raise ConfigError(
                f"generation_defaults must be true or false, not {shortened(generation_defaults)}",
                key="model.generation_defaults",
            )
        self.adapter = adapter
        self.tokenizer = tokenizer
        if not isinstance(strategy, Strategy):
            raise ConfigError(
                f"strategy must be a built strategy, not {shortened(strategy)}; Decoder.from_model "
                "takes a name",
                key="strategy",
            )
        if isinstance(strategy, NeedsTarget):
            strategy = strategy.attached(adapter, tokenizer)
        self.strategy = strategy
        self.verifier = verifier or build_verifier("exact_match")
        self.sampling = sampling or SamplingParams()
        self.max_new_tokens = max_new_tokens
        self.prefill_chunk = prefill_chunk
        self.chat = getattr(tokenizer, "chat_template", None) is not None if chat is None else chat
        self.execution = execution
        self.generation_defaults = generation_defaults
        self._idle: list[LocalRunner] = []  # runners whose cache memory can be taken again

    @classmethod
    def from_config(
        cls, config: DecoderConfig | Mapping[str, Any] | None = None, **settings: Any
    ) -> Decoder:
        """Load a model and make a decoder.

        Args:
            config: A ``DecoderConfig``, a mapping or a ``DictConfig``; what it does not say is as
                in ``conf/config.yaml``. What it says for the command line (prompt, stop, job, ...)
                is not looked at.
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
            for name in sorted(set(settings) & _OF_REQUESTS):
                raise ConfigError(
                    f"{name} belongs to a request: Decoder.generate(prompt, {name}=...)", key=name
                )
            from decodekit.compose import compose_mapping  # Hydra, only where it is needed

            config = compose_mapping({**(config or {}), **settings})
        elif settings:
            raise TypeError("give a DecoderConfig or settings by keyword, not both")
        # What costs nothing first: a mistake must not wait for a model to be fetched.
        strategy, verifier = build_strategy(config.strategy), build_verifier(config.verifier)
        model, tokenizer = load(config)
        adapter = build_adapter(model, adapter=config.adapter, backend=config.backend)
        execution = prepare_execution(model, config.execution, adapter)
        decoder = cls(
            adapter,
            tokenizer,
            strategy=strategy,
            verifier=verifier,
            sampling=config.sampling,
            max_new_tokens=config.max_new_tokens,
            prefill_chunk=config.prefill_chunk,
            chat=config.chat,
            execution=execution,
            generation_defaults=config.model.generation_defaults,
        )
        decoder._tell_what_is_not_done()
        return decoder

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        *,
        strategy: Any = "lookahead",
        adapter: Any = "auto",
        backend: Any = "auto",
        execution: str = "eager",
        chat: bool | None = False,
        **settings: Any,
    ) -> Decoder:
        """Make a decoder over a loaded ``transformers`` model.

        Args:
            model: A causal language model in evaluation mode; for another adapter than ``hf`` what
                that one takes.
            tokenizer: Its tokenizer; None if only token ids go in and out.
            strategy: A registered name, a mapping with ``name``, a settings dataclass, or a
                strategy of your own.
            adapter: A registered name, a mapping with ``name``, or a settings dataclass. ``hf``
                leaves the model untouched; ``llama`` lays some of its weights side by side, with
                the same values; ``auto`` is ``llama`` where that fits and else ``hf``.
            backend: Likewise.
            execution: ``eager`` runs the linear layers as they are. ``packed`` packs them for the
                CPU in place: faster, but the model can then neither be trained nor saved.
                ``native`` runs passes in C++ on a CPU, and leaves the weights as they are.
                ``compiled`` packs where that works and compiles what lies between the layers'
                attention, ``graphs`` records passes on a GPU. These three need ``adapter=llama``.
                ``auto`` is the first of ``native`` and ``packed`` that works on a CPU, else
                ``eager``.
            chat: Whether a text prompt is wrapped in the chat template; here text is taken as it is
                unless you say otherwise.
            settings: Further arguments of ``Decoder``; ``generation_defaults=False`` leaves the
                model's ``generation_config`` alone.

        Raises:
            ConfigError: A name or a setting is unknown.
            ModelSupportError: The model cannot be decoded exactly.
        """
        check_execution(execution)
        if getattr(adapter, "name", adapter) in ("auto", "hf", "llama") and not hasattr(
            model, "config"
        ):
            raise ConfigError(
                f"model must be a loaded transformers model, not {shortened(model)}; "
                "Decoder.from_config(model=...) loads one by name or directory",
                key="model",
            )
        built = build_strategy(strategy)
        if settings.get("verifier") is not None and not isinstance(settings["verifier"], Verifier):
            settings["verifier"] = build_verifier(settings["verifier"])
        decoder = cls(
            build_adapter(model, adapter=adapter, backend=backend),
            tokenizer,
            strategy=built,
            chat=chat,
            **settings,
        )
        # Last: it changes the model.
        decoder.execution = prepare_execution(model, execution, decoder.adapter)
        decoder._tell_what_is_not_done()
        return decoder

    @property
    def adapter_name(self) -> str:
        """The name of the adapter that runs the model: ``auto`` has picked one."""
        return str(getattr(self.adapter, "name", type(self.adapter).__name__))

    @property
    def compilation(self) -> Compilation | None:
        """What compiling has cost so far; None where nothing is compiled."""
        return self.adapter.compilation if isinstance(self.adapter, HasExecution) else None

    @property
    def taken_from_model(self) -> GenerationDefaults:
        """What holds of the model's ``generation_config`` where a request says nothing."""
        return self._defaults().under(self.sampling)

    def with_strategy(self, strategy: Any, *, verifier: Any = None) -> Decoder:
        """Return a decoder over the same model with another strategy.

        Args:
            strategy: As in ``from_model``.
            verifier: A registered name or a settings dataclass; None for the same as here.
        """
        return Decoder(
            self.adapter,
            self.tokenizer,
            strategy=build_strategy(strategy),
            verifier=self.verifier if verifier is None else build_verifier(verifier),
            sampling=self.sampling,
            max_new_tokens=self.max_new_tokens,
            prefill_chunk=self.prefill_chunk,
            chat=self.chat,
            execution=self.execution,
            generation_defaults=self.generation_defaults,
        )

    @overload
    def generate(
        self, prompt: list[str] | list[Request] | list[list[Any]], **options: Any
    ) -> list[GenerationResult]: ...

    @overload
    def generate(self, prompt: Prompt | Request, **options: Any) -> GenerationResult: ...

    def generate(self, prompt: Any, **options: Any) -> GenerationResult | list[GenerationResult]:
        """Continue one prompt, or a list of them in one forward pass per step.

        Args:
            prompt: What ``stream`` takes, or a list of such prompts: texts, lists of token ids,
                lists of chat messages or ``Request``s. Each sequence of a batch has its own
                proposer, stops and seed, and gets the tokens that it would get alone.
            options: Those of ``stream``; in a batch they hold for every prompt.

        Returns:
            The result, or one for each prompt of a list, in its order.

        Raises:
            ConfigError: An option is out of its range.
            GenerationError: A prompt is empty, has an unknown token or is too long, or the model's
                output is broken. If that comes up in a batch under way, its ``sequence`` says for
                which prompt, and its ``results`` hold what all of them had until then.
        """
        if not is_batch(prompt):
            return self.stream(prompt, **options).run()
        if options.pop("streamer", None) is not None:
            raise ConfigError("a streamer shows one prompt, not a batch", key="streamer")
        answers = []
        for number, one in enumerate(prompt):
            try:
                answers.append(self.begin(one, **options))
            except DecodekitError as error:
                if len(prompt) > 1:
                    error.args = (f"prompt {number} of the batch: {error}",)
                raise
        try:
            for records in self.steps(answers):
                for record in records:
                    answers[record.sequence].add(record)
        except GenerationError as error:
            error.results = [answer.result for answer in answers]
            raise
        return [answer.result for answer in answers]

    def stream(
        self, prompt: Prompt | Request, *, streamer: Any = None, **options: Any
    ) -> GenerationStream:
        """Continue ``prompt``, run by run.

        Args:
            prompt: Text, token ids (a sequence or a tensor of one prompt), chat messages
                (``[{"role": "user", "content": "..."}]``) or a ``Request``.
            streamer: A ``transformers`` streamer: gets the tokens of the prompt and of every run.
            options: The fields of ``Request`` and of ``SamplingParams`` by keyword, for example
                ``max_new_tokens=64, temperature=0.8, seed=7, stop="END"``. They go before what a
                ``Request`` says; what neither says is as the decoder has it.

        Returns:
            An iterator over accepted runs, for ``for`` and for ``async for``; its ``result`` is
            there when it has ended.

        Raises:
            ConfigError: An option is unknown or out of its range.
            GenerationError: The prompt is empty, has an unknown token, or is too long.
        """
        if streamer is not None:
            check_streamer(streamer)
        try:
            if is_batch(prompt):
                raise ConfigError(
                    "stream takes one prompt; Decoder.generate takes a list", key="prompt"
                )
            answer = self.begin(prompt, **options)
        except Exception:
            if streamer is not None:
                streamer.end()  # whoever reads from it must not wait for ever
            raise
        return GenerationStream(
            answer, lambda cancelled: self.steps([answer], cancelled), streamer=streamer
        )

    def score(
        self, text: Any, *, logprobs: int = 0, chat: bool = False
    ) -> TextScore | list[TextScore]:
        """Return how probable the model holds the tokens of a text; nothing is decoded.

        The log-probabilities are those of the model's own logits. They are found in passes of
        ``prefill_chunk`` tokens at most, so that memory is bounded.

        Args:
            text: Text, token ids or chat messages, or a list of such, which are run together.
            logprobs: How many of the most probable tokens are reported with each one.
            chat: Whether text is wrapped in the chat template; here it is taken as it is unless
                you say otherwise.

        Returns:
            The scores of the text, or a list of those of each.

        Raises:
            GenerationError: A text is empty, has an unknown token, or is too long.
        """
        require_at_least(logprobs, 0, key="logprobs")
        if isinstance(text, (list, tuple)) and not text:
            return []
        texts = [self.encode(one, chat=chat) for one in (text if is_batch(text) else [text])]
        with self._runner() as runner:
            runner.start(batch=len(texts), capacity=max(map(len, texts)))
            scores = score_texts(runner, texts, [logprobs] * len(texts))
        found = [
            TextScore(tokens=tokens, logprobs=entries)
            for tokens, entries in zip(texts, scores, strict=True)
        ]
        return found if is_batch(text) else found[0]

    def encode(self, prompt: Prompt, *, chat: bool | None = None) -> list[int]:
        """Return the token ids of a prompt.

        Args:
            prompt: Text, token ids or chat messages.
            chat: Whether text is wrapped in the chat template; None as the decoder has it.

        Raises:
            GenerationError: The prompt is empty, has an unknown token, or is too long.
        """
        return encode_prompt(
            prompt,
            self.tokenizer,
            chat=self.chat if chat is None else chat,
            vocab_size=self.adapter.vocab_size,
            max_positions=self.adapter.max_positions,
        )

    def begin(self, prompt: Prompt | Request, **options: Any) -> Answer:
        """Return an empty answer to be decoded by ``steps``; the arguments are ``stream``'s."""
        request, defaults = request_of(prompt, options, self.sampling, self._defaults())
        return prepare(
            request,
            self.adapter,
            self.tokenizer,
            strategy=self.strategy,
            verifier=self.verifier,
            max_new_tokens=self.max_new_tokens,
            chat=self.chat,
            defaults=defaults,
        )

    def _defaults(self) -> GenerationDefaults:
        """Return what the model asks for now: its configuration may be edited at any time."""
        if not self.generation_defaults:
            return GenerationDefaults()
        model = getattr(self.adapter, "model", None)
        return defaults_of(model, vocab_size=self.adapter.vocab_size)

    def _tell_what_is_not_done(self) -> None:
        if unsupported := self._defaults().unsupported:
            _LOG.warning(
                "the model's generation_config sets %s, which decodekit does not do; "
                "model.generate does",
                ", ".join(unsupported),
            )

    def steps(
        self, answers: Sequence[Answer], cancelled: Callable[[], bool] = lambda: False
    ) -> Generator[list[StepRecord], None, None]:
        """Decode answers together, one forward pass a step; see ``loop.decode``.

        Args:
            answers: Made by ``begin``; each must be given its records by ``Answer.add``.
            cancelled: Asked between passes whether to give up.
        """
        with self._runner() as runner:
            yield from decode(
                [answer.state for answer in answers],
                runner=runner,
                max_nodes=self.strategy.max_nodes,
                cancelled=cancelled,
                observers=new_observers(),
            )

    @contextmanager
    def _runner(self) -> Iterator[LocalRunner]:
        """Give a runner that no other request uses meanwhile."""
        try:
            runner = self._idle.pop()
        except IndexError:
            runner = LocalRunner(self.adapter, prefill_chunk=self.prefill_chunk)
        usable = True
        try:
            yield runner
        except Exception:
            usable = False  # its cache may be what failed
            raise
        finally:
            if usable:
                self._idle.append(runner)
