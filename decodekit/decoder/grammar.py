"""Constraints from a regular expression or a JSON schema, on the library ``llguidance``.

The library follows a grammar byte by byte and walks a tree of the vocabulary's bytes to find the
tokens that fit. It is imported only when a constraint is made: ``pip install
"decodekit[constraints]"``.

Two things are done here and not there:

* Every tokenization of an allowed text is allowed. By default the library narrows its mask to one
  tokenization where the next bytes are forced, but does not refuse the others.
* The end of the text. Any of the model's end-of-text tokens is allowed where the grammar may end,
  and such a token never counts as text.
* The start of the text. Some tokenizers drop the space of a text's first token. What has to match
  is what the user gets, so at the start such a token stands for its text without the space.

Measured on one core of an AMD EPYC, a vocabulary of 49,152 tokens: 0.35 s for the table of a
tokenizer, once; 1 to 7 ms for a grammar; then 25 µs a mask, 10 µs a fork and 5 µs an advance. The
first mask in a new state of a large grammar can take 3 ms.

Shapes: V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from decodekit.decoder.grammar_tokens import GrammarTokens, grammar_tokens, reason_of
from decodekit.decoder.versions import check_optional
from decodekit.errors import ConfigError, GenerationError
from decodekit.interfaces.logits import Constraint

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

__all__ = ["json_schema_constraint", "regex_constraint"]

# Separators are regular expressions.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


def regex_constraint(
    pattern: str,
    tokenizer: Any,
    *,
    vocab_size: int,
    eos_token_ids: Collection[int],
    fresh: bool = False,
) -> Constraint:
    r"""Return a constraint under which the whole generated text matches ``pattern``.

    Args:
        pattern: A regular expression in the syntax of Rust's ``regex`` crate: nearly that of
            Python, without look-around, back-references and ``\b``; ``\d`` is ``[0-9]``. As with
            ``re.fullmatch``, all of the text has to match; ``^`` and ``$`` at the ends change
            nothing.
        tokenizer: A fast ``transformers`` tokenizer. Its special tokens are never text.
        vocab_size: V, the number of the model's logits.
        eos_token_ids: The model's end-of-text tokens.
        fresh: Whether the generated text is a text of its own, and does not follow another.

    Raises:
        ConfigError: The pattern cannot be compiled or no text matches it, the tokenizer cannot be
            used, there is no end-of-text token, or the library is missing.
    """
    key = "constraint.regex"
    _require_library()
    from llguidance import regex_to_lark

    if not isinstance(pattern, str):
        raise ConfigError(f"a regex must be a text, not {pattern!r}", key=key, value=pattern)
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        # The library would drop it.
        message = f"the regex {pattern!r} cannot be used: it ends in a single backslash"
        raise ConfigError(message, key=key, value=pattern)
    try:
        rule = f"/{regex_to_lark(pattern, use_ascii='d')}/"
    except UnicodeEncodeError as error:
        message = f"the regex {pattern!r} cannot be used: {error.reason}"
        raise ConfigError(message, key=key, value=pattern) from error
    table, tokens = grammar_tokens(tokenizer, vocab_size, eos_token_ids, fresh=fresh)
    return _compile(rule, pattern, table, tokens, key)


def json_schema_constraint(
    schema: str | Mapping[str, Any],
    tokenizer: Any,
    *,
    vocab_size: int,
    eos_token_ids: Collection[int],
    fresh: bool = False,
) -> Constraint:
    """Return a constraint under which the whole generated text is JSON that satisfies ``schema``.

    There may be one space after each comma and colon, as ``json.dumps`` writes it, and no other
    whitespace outside of strings: a weak model could go on with blanks for ever. A key
    ``x-guidance`` of the schema can ask for another form, see the library's documentation.
    Properties come in the order of the schema. A keyword of JSON Schema that the library knows but
    does not implement is an error; a word that it does not know has no effect.

    Args:
        schema: A JSON schema (Draft 2020-12), an object or its text.
        tokenizer: A fast ``transformers`` tokenizer. Its special tokens are never text.
        vocab_size: V, the number of the model's logits.
        eos_token_ids: The model's end-of-text tokens.
        fresh: Whether the generated text is a text of its own, and does not follow another.

    Raises:
        ConfigError: The schema is no JSON, cannot be compiled or nothing satisfies it, the
            tokenizer cannot be used, there is no end-of-text token, or the library is missing.
    """
    key = "constraint.json_schema"
    _require_library()
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(parsed, Mapping):
            raise ValueError("it is no JSON object")
        options = parsed.get("x-guidance", {})
        if not isinstance(options, Mapping):
            raise ValueError("x-guidance is no JSON object")
        text = json.dumps({**parsed, "x-guidance": {**_SPACING, **options}}, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        message = f"the JSON schema cannot be used: {error}"
        raise ConfigError(message, key=key, value=schema) from error
    table, tokens = grammar_tokens(tokenizer, vocab_size, eos_token_ids, fresh=fresh)
    return _compile(f"%json {text}", schema, table, tokens, key)


class _GrammarConstraint:
    """A matcher of the library, with the start and the end of the text added; see ``Constraint``.

    Threads may share one: the lock keeps its matcher from being used twice at a time, which the
    library answers with an error.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        tokens: GrammarTokens,
        *,
        begun: bool = False,
        ended: bool = False,
    ) -> None:
        self._matcher = matcher
        self._tokens = tokens
        self._begun = begun
        self._ended = ended
        self._lock = Lock()

    def fork(self) -> _GrammarConstraint:
        """Return an independent copy in the same state; see ``Constraint.fork``."""
        with self._lock:
            return _GrammarConstraint(
                self._matcher.deep_copy(), self._tokens, begun=self._begun, ended=self._ended
            )

    def advance(self, token: int) -> bool:
        """Take in a token and return whether it is allowed; see ``Constraint.advance``."""
        with self._lock:
            if token in self._tokens.ends:
                self._ended = self._may_end()
                return self._ended
            # An id out of range would break the matcher, not only be refused.
            if self._ended or not 0 <= token < self._tokens.texts:
                return False
            if not self._begun and token in self._tokens.blank:
                self._begun = self._may_go_on(self._bits())
                return self._begun
            known = token if self._begun else self._tokens.starts.get(token, token)
            taken: int = self._matcher.try_consume_tokens([known])
            self._check()
            self._begun = self._begun or taken == 1
            return taken == 1

    def mask(self) -> Tensor:
        """Return which tokens may come next, [V]; see ``Constraint.mask``."""
        mask_V = np.zeros(self._tokens.size, dtype=np.bool_)
        texts, ends = self._tokens.texts, list(self._tokens.ends)
        with self._lock:
            if not self._ended:
                bits = self._bits()
                mask_V[:texts] = bits[:texts]
                if not self._begun:
                    mask_V[self._tokens.starting] = bits[self._tokens.starting_as]
                    mask_V[list(self._tokens.blank)] = self._may_go_on(bits)
            mask_V[ends] = self._may_end()
        return torch.from_numpy(mask_V)

    def _bits(self) -> NDArray[np.uint8]:
        """Return for each token that the library has whether it may come next."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        return np.unpackbits(bits, bitorder="little")

    def _may_go_on(self, bits: NDArray[np.uint8]) -> bool:
        """Return whether anything may follow a first token without text."""
        return bool(bits[: self._tokens.texts].any()) or self._may_end()

    def _may_end(self) -> bool:
        return self._ended or bool(self._matcher.is_accepting())

    def _check(self) -> None:
        """Raise if the matcher gave up, for example because a limit of the library was reached."""
        if self._matcher.is_error():
            reason = reason_of(self._matcher.get_error())
            raise GenerationError(f"the constraint cannot be followed any further: {reason}")


def _compile(
    rule: str, source: object, table: LLTokenizer, tokens: GrammarTokens, key: str
) -> _GrammarConstraint:
    """Return the constraint of a grammar with one rule.

    Args:
        rule: The right side of the rule in the library's syntax.
        source: What the caller gave, for errors.
        table: The library's table of the tokenizer.
        tokens: The tokens in it.
        key: The name of the setting, for errors.

    Raises:
        ConfigError: See the callers.
    """
    from llguidance import LLMatcher, LLParserLimits

    what = "regex" if key.endswith("regex") else "JSON schema"
    matcher = LLMatcher(
        table,
        f'%llguidance {{"no_forcing": true}}\nstart: {rule}\n',
        log_level=0,
        limits=LLParserLimits(verbose_errors=False),
    )
    # That no text fits shows only in the first mask.
    matcher.compute_bitmask()
    if matcher.is_error():
        message = f"the {what} cannot be used: {reason_of(matcher.get_error())}"
        raise ConfigError(message, key=key, value=source)
    return _GrammarConstraint(matcher, tokens)


def _require_library() -> None:
    """Raise if the library is missing or too old.

    Raises:
        ConfigError: It is missing.
        DependencyError: It is of a version that does not work.
    """
    try:
        import llguidance  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            'a constraint needs the library llguidance: pip install "decodekit[constraints]"',
            key="constraint",
        ) from error
    check_optional("llguidance")
