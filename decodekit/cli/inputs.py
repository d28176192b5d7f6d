"""The prompt and the options of a request, from the settings of the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from decodekit.config.schema import ConstraintConfig, RunConfig
from decodekit.errors import ConfigError, shortened

__all__ = ["read_prompt", "request_options"]


def request_options(config: RunConfig) -> dict[str, Any]:
    """Return the options of a request that the settings name."""
    return {
        "stop": config.stop,
        "stop_token_ids": config.stop_token_ids,
        "eos_token_id": config.eos_token_id,
        "ignore_eos": config.ignore_eos or None,
        "logprobs": config.logprobs,
        "prompt_logprobs": config.prompt_logprobs,
        "constraint": _constraint(config.constraint),
    }


def _constraint(config: ConstraintConfig) -> dict[str, str] | None:
    if config.regex is not None:
        return {"regex": config.regex}
    schema = config.json_schema
    if schema is None:
        return None
    if not schema.lstrip().startswith("{"):
        try:
            schema = Path(schema).read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
            reason = getattr(error, "strerror", None) or "it is no file of UTF-8 text"
            raise ConfigError(
                f"cannot read the schema {schema!r:.80}: {reason}", key="constraint.json_schema"
            ) from error
    return {"json_schema": schema}


def read_prompt(config: RunConfig) -> str:
    """Return the prompt that the settings name.

    Raises:
        ConfigError: There is none, there are two, or it cannot be read.
    """
    if (config.prompt is None) == (config.prompt_file is None):
        raise ConfigError(
            'give a prompt: prompt="...", prompt=- for standard input, or prompt_file=PATH'
            if config.prompt is None
            else "give prompt or prompt_file, not both",
            key="prompt",
        )
    try:
        if config.prompt_file is not None:
            return Path(config.prompt_file).read_bytes().decode("utf-8-sig")
        if config.prompt == "-":
            return sys.stdin.buffer.read().decode("utf-8-sig") if sys.stdin else ""
    except UnicodeDecodeError as error:
        raise ConfigError(f"the prompt is not UTF-8 text: {error.reason}", key="prompt") from error
    except (OSError, ValueError) as error:  # a name with a null byte is a ValueError
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"cannot read the prompt file {shortened(config.prompt_file)}: {reason}",
            key="prompt_file",
        ) from error
    return str(config.prompt)
