"""The Python interface: a model and a strategy, ready for many prompts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple, overload

from decodekit.adapters.execution.modes import check_execution
from decodekit.config.option_names import RENAMED
from decodekit.config.plugins.installed import new_observers
from decodekit.config.schema import DecoderConfig
from decodekit.decoder.answer import Answer
from decodekit.decoder.build import (
    build_adapter,
    build_strategy,
    build_verifier,
    load,
    prepare_execution,
)
from decodekit.decoder.callables import check_streamer
from decodekit.decoder.chat import ChatOptions, can_chat
from decodekit.decoder.generation_defaults import GenerationDefaults, defaults_of
from decodekit.decoder.invariance import invariance_obstacle
from decodekit.decoder.padding import take_prompt
from decodekit.decoder.prompt import Prompt, encode_prompt, is_batch, uses_template
from decodekit.decoder.request import Request, prepare, request_of
from decodekit.decoder.result import GenerationResult, TextScore
from decodekit.decoder.stream import GenerationStream
from decodekit.engine.autocast import outside_autocast
from decodekit.engine.loop import StepRecord, decode
from decodekit.engine.runner import LocalRunner
from decodekit.engine.scoring import score_texts
from decodekit.errors import (
    ConfigError,
    DecodekitError,
    GenerationError,
    require_at_least,
    require_true_or_false,
    shortened,
)
from decodekit.interfaces.adapter import Compilation, HasExecution, ModelAdapter
from decodekit.interfaces.sampling_params import SamplingParams
from decodekit.interfaces.strategy import NeedsTarget, Strategy
from decodekit.interfaces.verifier import Verifier

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["Decoder"]

_LOG = logging.getLogger("decodekit")

_OF_REQUESTS = {field.name for field in fields(Request)} - {
    field.name for field in fields(DecoderConfig)
}


class _Group(NamedTuple):
    """The answers to one prompt.

    Attributes:
        answers: One, or ``n`` samples.
        several: Whether ``n`` was given.
    """

    answers: list[Answer]
    several: bool

    @property
    def results(self) -> Any:
        """What there is so far: a result, or a list of them."""
        results = [answer.result for answer in self.answers]
        return results if self.several else results[0]


def _asks_for_several(prompt: Any, options: Mapping[str, Any]) -> bool:
    """Return whether ``n`` is given."""
    given = [value for name, value in options.items() if RENAMED.get(name, name) == "n"]
    return any(value is not None for value in (*given, getattr(prompt, "n", None)))


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
        chat_template_kwargs: Variables of the chat template; those of a request go before them.
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
        chat_template_kwargs: Mapping[str, Any] | None = None,
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
        require_true_or_false(generation_defaults, key="model.generation_defaults")
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
        self.chat = can_chat(tokenizer) if chat is None else chat
        self.chat_template_kwargs = dict(
            ChatOptions(chat_template_kwargs=chat_template_kwargs).chat_template_kwargs or {}
        )
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
            for name in sorted(settings):
                if RENAMED.get(name, name) not in _OF_REQUESTS:
                    continue
                raise ConfigError(
                    f"{name} belongs to a request: Decoder.generate(prompt, {name}=...)", key=name
                )
            from decodekit.config.compose import compose_mapping  # Hydra, only where it is needed

            config = compose_mapping({**(config or {}), **settings})
        elif settings:
            raise TypeError("give a DecoderConfig or settings by keyword, not both")
        # What costs nothing first: a mistake must not wait for a model to be fetched.
        strategy, verifier = build_strategy(config.strategy), build_verifier(config.verifier)
        model, tokenizer = load(config)
        adapter = build_adapter(
            model,
            adapter=config.adapter,
            backend=config.backend,
            max_positions=config.model.max_positions,
        )
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
            chat_template_kwargs=config.chat_template_kwargs,
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
        max_positions: int | None = None,
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
            max_positions: The longest text in tokens, prompt and answer together; None for what
                the model's configuration and its RoPE scaling say.
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
            build_adapter(model, adapter=adapter, backend=backend, max_positions=max_positions),
            tokenizer,
            strategy=built,
            chat=chat,
            **settings,
        )
        # Last: it changes the model.
        decoder.execution = prepare_execution(model, execution, decoder.adapter)
        decoder._tell_what_is_not_done()
        return decoder

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy is made of: it has no caches yet."""
        return {**vars(self), "_idle": []}

    @property
    def adapter_name(self) -> str:
        """The name of the adapter that runs the model: ``auto`` has picked one."""
        return str(getattr(self.adapter, "name", type(self.adapter).__name__))

    @property
    def compilation(self) -> Compilation | None:
        """What compiling has cost so far; None where nothing is compiled."""
        return self.adapter.compilation if isinstance(self.adapter, HasExecution) else None

    @property
    def invariance_obstacle(self) -> str | None:
        """Why a row's last bits may depend on the other rows of a pass; None if they do not.

        If they do not, every strategy gives the same tokens, numerical ties included.
        """
        return invariance_obstacle(self.adapter, self.execution)

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
            chat_template_kwargs=self.chat_template_kwargs,
            execution=self.execution,
            generation_defaults=self.generation_defaults,
        )

    @overload
    def generate(
        self, prompt: list[str] | list[Request] | list[list[Any]], *, n: int, **options: Any
    ) -> list[list[GenerationResult]]: ...

    @overload
    def generate(
        self, prompt: list[str] | list[Request] | list[list[Any]], **options: Any
    ) -> list[GenerationResult]: ...

    @overload
    def generate(
        self, prompt: Prompt | Request, *, n: int, **options: Any
    ) -> list[GenerationResult]: ...

    @overload
    def generate(self, prompt: Prompt | Request, **options: Any) -> GenerationResult: ...

    @overload
    def generate(self, *, input_ids: Any, **options: Any) -> Any: ...

    def generate(self, prompt: Any = None, **options: Any) -> Any:
        """Continue one prompt, or a list of them in one forward pass per step.

        Args:
            prompt: What ``stream`` takes, or a list of such prompts: texts, lists of token ids,
                lists of chat messages or ``Request``s. Each sequence of a batch has its own
                proposer, stops and seed, and gets the tokens that it would get alone. What a
                tokenizer returns is taken, too, as it is or by keyword (``input_ids=...,
                attention_mask=...``); its padding is taken off.
            options: Those of ``stream``; in a batch they hold for every prompt. With ``n`` each
                prompt gets ``n`` answers; sample ``i`` is what ``seed + i`` gives alone.

        Returns:
            The result, or one for each prompt of a list, in its order. With ``n``, a list of ``n``
            results in the place of one.

        Raises:
            ConfigError: An option is out of its range.
            GenerationError: A prompt is empty, has an unknown token or is too long, or the model's
                output is broken.
            Exception: What a processor, a constraint or a criterion of the caller raises.

        Whatever ends a batch under way, Ctrl-C too, has an attribute ``results`` with what all
        prompts had until then, and if it is about one of them, ``sequence`` says which.
        """
        if isinstance(prompt, (list, tuple)) and not prompt:
            raise GenerationError("the list is empty; give a prompt, or a list of prompts")
        streamer = options.get("streamer")
        try:
            prompt = take_prompt(prompt, options)
        except DecodekitError:
            if streamer is not None:
                check_streamer(streamer)
                streamer.end()  # whoever reads from it must not wait for ever
            raise
        many = is_batch(prompt)
        if not many and not _asks_for_several(prompt, options):
            return self.stream(prompt, **options).run()
        if options.pop("streamer", None) is not None:
            raise ConfigError("a streamer shows one prompt, not a batch", key="streamer")
        groups: list[_Group] = []
        for number, one in enumerate(prompt if many else [prompt]):
            try:
                groups.append(self._group(one, options))
            except DecodekitError as error:
                if many and len(prompt) > 1:
                    error.args = (f"prompt {number} of the batch: {error}",)
                raise
        answers = [answer for group in groups for answer in group.answers]
        try:
            for records in self.steps(answers):
                for record in records:
                    answers[record.sequence].add(record)
        except BaseException as error:  # Ctrl-C and what processors raise, too: nothing is lost
            for answer in answers:
                answer.give_up()
            error.results = [group.results for group in groups]  # type: ignore[attr-defined]
            raise
        results = [group.results for group in groups]
        return results if many else results[0]

    def _group(self, prompt: Any, options: Mapping[str, Any]) -> _Group:
        """Return the empty answers to one prompt: one, or ``n`` samples."""
        request, defaults = request_of(prompt, options, self.sampling, self._defaults())
        count = request.n
        if count is None:
            return _Group([self._prepared(request, defaults)], several=False)
        require_at_least(count, 1, key="n")
        sampling = request.sampling
        assert sampling is not None  # request_of has filled it in
        seeds = [(sampling.seed + i) % 2**64 for i in range(count)]
        samples = [replace(request, sampling=replace(sampling, seed=seed)) for seed in seeds]
        return _Group([self._prepared(sample, defaults) for sample in samples], several=True)

    def stream(
        self, prompt: Prompt | Request = None, *, streamer: Any = None, **options: Any
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
            prompt = take_prompt(prompt, options)
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
        self, text: Any = None, *, logprobs: int = 0, chat: bool = False, **tokenized: Any
    ) -> TextScore | list[TextScore]:
        """Return how probable the model holds the tokens of a text; nothing is decoded.

        The log-probabilities are those of the model's own logits. They are found in passes of
        ``prefill_chunk`` tokens at most, so that memory is bounded.

        Args:
            text: Text, token ids or chat messages, or a list of such, which are run together.
                What a tokenizer returns is taken, too, as ``generate`` takes it.
            logprobs: How many of the most probable tokens are reported with each one.
            chat: Whether text is wrapped in the chat template; here it is taken as it is unless
                you say otherwise.
            tokenized: ``input_ids`` and ``attention_mask``.

        Returns:
            The scores of the text, or a list of those of each.

        Raises:
            GenerationError: A text is empty, has an unknown token, or is too long.
        """
        require_at_least(logprobs, 0, key="logprobs")
        require_true_or_false(chat, key="chat")
        if isinstance(text, (list, tuple)) and not text:
            return []
        text = take_prompt(text, tokenized)
        for name in tokenized:
            raise ConfigError(f"score has no option {name!r}; it only reads a text", key=name)
        many = is_batch(text)
        texts = [self._encoded(one, chat=chat, room=0) for one in (text if many else [text])]
        with self._runner() as runner, outside_autocast():
            runner.start(batch=len(texts), capacity=max(map(len, texts)))
            scores = score_texts(runner, texts, [logprobs] * len(texts))
        found = [
            TextScore(tokens=tokens, logprobs=entries)
            for tokens, entries in zip(texts, scores, strict=True)
        ]
        return found if many else found[0]

    def encode(self, prompt: Prompt, *, chat: bool | None = None) -> list[int]:
        """Return the token ids of a prompt.

        Args:
            prompt: Text, token ids or chat messages.
            chat: Whether text is wrapped in the chat template; None as the decoder has it.

        Raises:
            GenerationError: The prompt is empty, has an unknown token, or is too long.
        """
        return self._encoded(prompt, chat=chat, room=1)

    def _encoded(self, prompt: Prompt, *, chat: bool | None, room: int) -> list[int]:
        """Return the token ids of a prompt that leaves ``room`` positions for an answer."""
        return encode_prompt(
            prompt,
            self.tokenizer,
            chat=uses_template(prompt, self.tokenizer, asked=chat, default=self.chat),
            vocab_size=self.adapter.vocab_size,
            max_positions=self.adapter.max_positions,
            room=room,
            template_defaults=self.chat_template_kwargs,
        ).tokens

    def begin(self, prompt: Prompt | Request, **options: Any) -> Answer:
        """Return an empty answer to be decoded by ``steps``; the arguments are ``stream``'s."""
        request, defaults = request_of(prompt, options, self.sampling, self._defaults())
        if request.n is not None:
            raise ConfigError("a stream has one answer; n belongs to Decoder.generate", key="n")
        return self._prepared(request, defaults)

    def _prepared(self, request: Request, defaults: GenerationDefaults) -> Answer:
        """Return the empty answer to what ``request_of`` has returned."""
        return prepare(
            request,
            self.adapter,
            self.tokenizer,
            strategy=self.strategy,
            verifier=self.verifier,
            max_new_tokens=self.max_new_tokens,
            chat=self.chat,
            chat_template_kwargs=self.chat_template_kwargs,
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
