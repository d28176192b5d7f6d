"""Step observers: plugins that are told what every finished step did. They never change a text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decodekit.errors import in_one_line
from decodekit.interfaces.events import StepEvent

__all__ = ["Observer", "Observers"]

_LOG = logging.getLogger("decodekit.plugins")


@dataclass(frozen=True, slots=True)
class Observer:
    """One plugin's implementation of ``decodekit_step_finished``.

    Attributes:
        plugin: The plugin's name.
        notify: Called with each event.
    """

    plugin: str
    notify: Callable[[StepEvent], object]


class Observers:
    """The observers of one request.

    One that raises is not called again for this request. The failure is logged as one error of the
    logger ``decodekit.plugins`` that names the plugin, and the text goes on: whoever waits for it
    must not lose it to somebody who only watches.

    Args:
        observers: In the order in which they are called.
    """

    def __init__(self, observers: Sequence[Observer] = ()) -> None:
        self._active = list(observers)

    def __bool__(self) -> bool:
        """Return whether anybody listens."""
        return bool(self._active)

    def notify(self, event: StepEvent) -> None:
        """Tell every observer."""
        for observer in tuple(self._active):
            try:
                observer.notify(event)
            except (Exception, SystemExit) as error:
                self._active.remove(observer)
                _LOG.error(
                    "plugin %r failed in decodekit_step_finished at step %d and is not told of "
                    "further steps of this request: %s: %s",
                    observer.plugin,
                    event.step,
                    type(error).__name__,
                    in_one_line(error),
                    exc_info=_LOG.isEnabledFor(logging.DEBUG),
                )
