"""How many prompt tokens a step may compute beside running streams: a prediction of its seconds, learned from steps."""

import math

GAIN_IF_FASTER, GAIN_IF_SLOWER = 0.5, 0.2
"""Part of an error by which the estimates move, for a faster and a slower step: steps may be slow by accident, never fast."""
MAX_LOG_ERROR = math.log(2)
"""A step counts as at most twice as slow as was predicted."""
SHORT_FACTOR, SHORT_SECONDS = 2.0, 0.02
"""A step may take this factor of its streams' time alone, up to so many seconds: no reader notices that."""
LONGEST_FACTOR = 3.6
"""A step may take this factor of the time of a step that only reads the weights. It may take this factor of its streams' time
alone too, as far as LASTING_FACTOR allows.
"""
LASTING_FACTOR = 1.2
"""Factor of the time of a later step, in which all the waiting prompts are streams too: readers will see such steps anyway."""


class StepCost:
    """Predicts a step's seconds as `fixed_seconds + stream_seconds * streams + token_seconds * prompt tokens`.

    A measured step corrects the three by factors, each by its part in the prediction (normalised least mean squares on
    the logarithms). So a step without prompts does not change `token_seconds`, a large part of a prompt hardly changes the
    others, no estimate becomes zero or negative, and a long run of equal steps does not undo what other steps have taught.
    """

    def __init__(self, scale: int) -> None:
        self.scale = scale
        """The first guess of fixed_seconds / token_seconds; a small one is safe. stream_seconds / token_seconds begins at 1."""
        self.fixed_seconds = 0.0
        self.stream_seconds = 0.0
        self.token_seconds = 0.0
        self.num_steps = 0

    def learn(self, streams: int, tokens: int, seconds: float) -> None:
        """Learn from a measured step of so many streams and prompt tokens. If it took no time, it is only counted."""
        self.num_steps += 1
        if seconds <= 0:
            return
        if self.token_seconds == 0:
            self.stream_seconds = self.token_seconds = seconds / (self.scale + streams + tokens)
            self.fixed_seconds = self.token_seconds * self.scale
            return
        parts = self.fixed_seconds, self.stream_seconds * streams, self.token_seconds * tokens
        predicted = sum(parts)
        error = min(math.log(seconds / predicted), MAX_LOG_ERROR)
        step = error * (GAIN_IF_SLOWER if error > 0 else GAIN_IF_FASTER) * predicted / sum(part * part for part in parts)
        self.fixed_seconds, self.stream_seconds, self.token_seconds = (
            value * math.exp(step * part)
            for value, part in zip((self.fixed_seconds, self.stream_seconds, self.token_seconds), parts, strict=True)
        )

    def room(self, streams: int, prompts: int, goal_seconds: float) -> float:
        """Prompt tokens that a step may compute beside so many streams and waiting prompts; 0 while costs are unknown.

        (the seconds that the step may take - those of its streams alone) / the seconds of a prompt token. Infinite if steps
        take no time.
        """
        if self.token_seconds == 0:
            return math.inf if self.num_steps else 0
        alone_seconds = self.fixed_seconds + self.stream_seconds * streams
        later_seconds = self.fixed_seconds + self.stream_seconds * (streams + prompts)
        longest_seconds = max(
            goal_seconds,
            min(SHORT_FACTOR * alone_seconds, SHORT_SECONDS),
            LONGEST_FACTOR * self.fixed_seconds,
            min(LONGEST_FACTOR * alone_seconds, LASTING_FACTOR * later_seconds),
        )
        return (longest_seconds - alone_seconds) / self.token_seconds
