"""Groups streamed outputs before they are handed to their readers: a message costs more than the token in it.

A stream that runs alone gets each token at once. The more streams there are, the longer tokens may wait for each other, up to
a delay that no reader notices. First tokens and ends do not wait, and all waiting outputs go with them.
"""

from collections.abc import Sequence

from attend.model.engine.request import Output

SECONDS_OF_A_STREAM = 0.6e-3
"""Seconds that tokens may wait for each running stream: five times the CPU time of a message on its way to its client."""
MAX_SECONDS = 10e-3
"""The longest delay of an output: 100 messages a second of an answer are more than a screen shows."""


class OutputCoalescer:
    """Holds a step's outputs until they are due. Times are seconds on one clock."""

    def __init__(self) -> None:
        self._held: list[Output] = []
        self._begun: set[str] = set()
        self._last = 0.0
        """When outputs were last due."""

    def due(self, outputs: Sequence[Output], now: float, step_seconds: float) -> list[Output]:
        """All held outputs with `outputs`, or none, if they may wait for another step that takes as long as this one."""
        self._held += outputs
        urgent = False
        for output in outputs:
            if output.finish_reason is not None:
                self._begun.discard(output.request_id)
                urgent = True
            elif output.request_id not in self._begun:
                self._begun.add(output.request_id)
                urgent = True
        most = min(MAX_SECONDS, SECONDS_OF_A_STREAM * len(self._begun))
        if not urgent and now - self._last + step_seconds <= most:
            return []
        self._last = now
        return self.all()

    def all(self) -> list[Output]:
        """All that is held, due or not."""
        held, self._held = self._held, []
        return held
