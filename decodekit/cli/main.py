"""The command line: ``decodekit strategy=lookahead model=smollm2-135m prompt="..."``.

Answers go to standard output, everything else to standard error. Exit codes: 0 for success, 1 for
an error at run time, texts that differ under ``compare=true`` or a defect under ``job=verify``,
2 for a mistake in the settings, 130 after Ctrl-C, 143 after SIGTERM.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from decodekit.cli.pinning import restart_pinned
from decodekit.cli.signals import exit_code, termination_raises
from decodekit.decoder.versions import check_versions
from decodekit.errors import ConfigError, DecodekitError, in_one_line

if TYPE_CHECKING:
    from decodekit.config.schema import RunConfig

__all__ = ["main"]

_HELP = """\
decodekit [key=value ...]: the same text as token by token, in fewer steps.

  decodekit prompt="Why is the sky blue?"
  decodekit strategy=lookahead model=smollm2-135m prompt="..." compare=true
  decodekit job=bench bench.prompts=prompts.jsonl bench.limit=5

what to decode
  prompt=TEXT            the prompt, taken as it is; prompt=- reads standard input
  prompt_file=PATH       a file with the prompt
  chat=true|false        use the model's chat template (default: if it has one)
  chat_template_kwargs.NAME=VALUE   a variable of the template: enable_thinking=false
  max_new_tokens=N       most tokens of the answer (256)
  stop=TEXT              end before this text (a newline is $'\\n'); stop=[a,b] for several
  stop_token_ids=[2,7]   end with one of these tokens; [[5,7]] is a run of them
  constraint.regex=TEXT  the whole answer matches this regular expression
  constraint.json_schema=FILE   the whole answer is JSON that satisfies this schema
how
  strategy=NAME          {strategy}
  strategy.KEY=VALUE     its settings: {settings}
  strategy.model=NAME    the draft of strategy=draft_model, as model=NAME
  sampling=NAME          greedy, or sample with sampling.temperature, .top_k, .top_p, .min_p
                         .repetition_penalty, .presence_penalty, .frequency_penalty,
                         .no_repeat_ngram_size, .min_new_tokens, .bad_words=[a,b],
                         .logit_bias.TOKEN=NUMBER, .suppress_tokens=[5,7]
  seed=N                 the same seed gives the same text, whatever the strategy
  verifier=NAME          {verifier} (another text, of the same distribution)
with what
  model=NAME             {model}
                         or a directory, a .gguf file, or owner/name on the hub
  model.revision=NAME    a branch, tag or commit on the hub
  model.trust_remote_code=true   run the Python files that this checkpoint brings (never asked);
                         on the hub with model.revision=COMMIT
  dtype=NAME             auto, float32, bfloat16, float16, float64
  device=NAME            auto, cpu, cuda
  backend=NAME           {backend}
  adapter=NAME           {adapter} (auto: llama where it fits, else hf)
  execution=NAME         auto, eager, native (C++, compiled once), packed (weights packed for the
                         CPU), compiled (torch.compile; the first start waits for it), graphs
                         (CUDA graphs)
output
  format=text|json       stream the text, or print one JSON object at the end
  compare=true           run autoregressive too; compare speed and tokens
  logprobs=K             with format=json: log-probabilities, and the K most probable tokens
  job=bench              compare bench.strategies on bench.prompts, a file of JSON lines with a
                         prompt, turns, messages or input_ids each; bench.reference=NAME is what
                         the others are compared with, bench.output=FILE.jsonl keeps the figures
  job=profile            measure the time of a step by its rows; profile.rows=[1,2,4],
                         profile.contexts=[256,1024], profile.repeats=N, profile.output=FILE.json
  job=verify             compare the tokens with autoregressive decoding, on verify.prompts or the
                         prompt: equal, a numerical tie, or a defect; verify.limit=N of each
                         category, verify.tolerance=GAP of a tie, verify.backend=NAME of the
                         reference

  --help, --version, --cfg (print the settings and exit)
  decodekit report FILE  the tables of a bench.output or a profile.output again
  decodekit plugins      what is installed, from which package, and what is broken (format=json)
                         DECODEKIT_DISABLE_PLUGINS=NAME,NAME in the environment switches some off
"""


def main(arguments: Sequence[str] | None = None, *, is_program: bool | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        arguments: The words; None for those that the process was started with.
        is_program: Whether this is all that the process is for, so that a job that measures time
            may start it anew with its threads pinned. None means if ``arguments`` is None.
    """
    if is_program is None:
        is_program = arguments is None
    args = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that cannot show a character gets a replacement, not an exception.
        sys.stdout.reconfigure(errors="replace")
    try:
        with termination_raises():
            code = _dispatch(args, is_program=is_program)
            sys.stdout.flush()
            return code
    except ConfigError as error:
        return _fail(error, code=2)
    except DecodekitError as error:
        return _fail(error, code=1)
    except KeyboardInterrupt as interruption:
        return exit_code(interruption)
    except BrokenPipeError:
        # Whoever read our output has closed it; there is nobody to tell.
        _drop_output()
        return 1
    except OSError as error:
        _drop_output()
        return _fail(f"input or output failed: {error.strerror or error}", code=1)


def _drop_output() -> None:
    """Send what is still to be written nowhere, so that the interpreter can end quietly."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(args: list[str], *, is_program: bool) -> int:
    if "--version" in args:
        print(f"decodekit {version('decodekit')}")
        return 0
    check_versions()
    if "--help" in args or "-h" in args:
        print(_help(), end="")
        return 0
    if args[:1] == ["plugins"]:
        from decodekit.cli.plugins import run_plugins

        return run_plugins(args[1:])
    if args[:1] == ["report"]:
        from decodekit.cli.report import run_report

        return run_report(args[1:])
    flags = [arg for arg in args if arg.startswith("-") and arg != "--cfg"]
    if flags:
        raise ConfigError(f"unknown option {flags[0]}: settings are key=value, see --help")
    # Hydra takes a moment; --version must not.
    from decodekit.config.compose import compose_config, to_yaml

    config = compose_config([arg for arg in args if arg != "--cfg"])
    if "--cfg" in args:
        print(to_yaml(config), end="")
        return 0
    if is_program and _is_timed(config):
        restart_pinned()
    return _run(config)


def _is_timed(config: RunConfig) -> bool:
    """Return whether the job measures times that need pinned threads."""
    return (config.job == "bench" and config.bench.pin) or (
        config.job == "profile" and config.profile.pin
    )


def _run(config: RunConfig) -> int:
    if config.job == "bench":
        from decodekit.cli.bench.run import run_bench

        return run_bench(config)
    if config.job == "profile":
        from decodekit.cli.profile.run import run_profile

        return run_profile(config)
    if config.job == "verify":
        from decodekit.cli.verify.job import run_verify

        return run_verify(config)
    from decodekit.cli.generate import run_generate

    return run_generate(config)


def _help() -> str:
    from dataclasses import fields

    from decodekit.config.compose import group_options
    from decodekit.strategies.lookahead.proposer import LookaheadConfig

    names = {
        group: ", ".join(group_options(group))
        for group in ("strategy", "backend", "adapter", "verifier")
    }
    models = group_options("model")
    half = (len(models) + 1) // 2
    indent = ",\n" + " " * 25
    return _HELP.format(
        **names,
        model=indent.join([", ".join(models[:half]), ", ".join(models[half:])]),
        settings=", ".join(
            field.name for field in fields(LookaheadConfig) if field.name.endswith("size")
        )
        + ", ... (see --cfg)",
    )


def _fail(error: Exception | str, *, code: int) -> int:
    print(f"decodekit: {in_one_line(error)}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
