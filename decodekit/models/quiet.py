"""transformers without log lines, progress bars and questions, for a while and not for good."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

__all__ = ["quiet_transformers"]

# The settings are global: two threads that save and restore them in turn would keep each other's.
_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def quiet_transformers(*, bars: bool = False, gguf: bool = False) -> Iterator[None]:
    """Silence transformers inside the ``with`` block; afterwards all is as it was.

    Nor does it ask whether to run a checkpoint's own code, which it does where nobody has told it,
    also of parts of a model, and takes standard input for the answer: that is an error at once.

    Args:
        bars: Whether progress bars are still drawn.
        gguf: Whether a GGUF file is read, which draws a bar of another kind.
    """
    # Any: both leave their types or their exports undeclared.
    hub: Any = importlib.import_module("huggingface_hub.utils")
    logging: Any = importlib.import_module("transformers.utils.logging")
    code: Any = importlib.import_module("transformers.dynamic_module_utils")
    with _ONE_AT_A_TIME:
        verbosity = logging.get_verbosity()
        drawn = logging.is_progress_bar_enabled()
        drawn_by_hub = not hub.are_progress_bars_disabled()
        patience = code.TIME_OUT_REMOTE_CODE
        logging.set_verbosity_error()
        code.TIME_OUT_REMOTE_CODE = 0  # it has no time to ask
        if not bars:
            logging.disable_progress_bar()
        try:
            with _no_gguf_bar() if gguf and not bars else nullcontext():
                yield
        finally:
            code.TIME_OUT_REMOTE_CODE = patience
            logging.set_verbosity(verbosity)
            if not bars:
                if drawn:
                    logging.enable_progress_bar()
                (hub.enable_progress_bars if drawn_by_hub else hub.disable_progress_bars)()


@contextmanager
def _no_gguf_bar() -> Iterator[None]:
    # The GGUF reader draws a plain tqdm bar that heeds no setting of transformers.
    reader: Any = importlib.import_module("transformers.modeling_gguf_pytorch_utils")
    original = reader.tqdm
    reader.tqdm = partial(original, disable=True)
    try:
        yield
    finally:
        reader.tqdm = original
