"""How many prompt tokens a step may compute beside running streams: a prediction of what a step costs, learned from steps."""

import math

GAIN_IF_FASTER, GAIN_IF_SLOWER = 0.5, 0.2
"""Part of an error that the estimates take over: no step is fast by accident, but some are slow by accident."""
MAX_LOG_ERROR = math.log(2)
"""A step counts as at most twice as slow as was predicted."""
SHORT_FACTOR, SHORT_SECONDS = 2.0, 0.02
LONGEST_FACTOR, LASTING_FACTOR = 3.6, 1.2
"""The bounds of `StepCost.room`: factors of a predicted step's seconds, and seconds."""


class StepCost:
    """Predicts a step's seconds as `fixed + per_stream * streams + per_token * prompt tokens`.

    A measured step corrects the three by factors, each by its part in the prediction (normalised least mean squares on
    the logarithms). So a step without prompts says nothing of `per_token`, a large part of a prompt says little of the
    others, nothing ever becomes zero or negative, and no long run of equal steps wears away what other steps have taught.
    """

    def __init__(self, scale: int) -> None:
        self.scale = scale
        """The first guess of fixed / per_token, in tokens; a small one is safe. per_stream / per_token begins at 1."""
        self.fixed = 0.0
        self.per_stream = 0.0
        self.per_token = 0.0
        self.num_steps = 0

    def learn(self, streams: int, tokens: int, seconds: float) -> None:
        """Take in a measured step of so many streams and prompt tokens. One that took no time teaches nothing but that."""
        self.num_steps += 1
        if seconds <= 0:
            return
        if self.per_token == 0:
            self.per_stream = self.per_token = seconds / (self.scale + streams + tokens)
            self.fixed = self.per_token * self.scale
            return
        parts = self.fixed, self.per_stream * streams, self.per_token * tokens
        predicted = sum(parts)
        error = min(math.log(seconds / predicted), MAX_LOG_ERROR)
        step = error * (GAIN_IF_SLOWER if error > 0 else GAIN_IF_FASTER) * predicted / sum(part * part for part in parts)
        self.fixed, self.per_stream, self.per_token = (
            value * math.exp(step * part)
            for value, part in zip((self.fixed, self.per_stream, self.per_token), parts, strict=True)
        )

    def room(self, streams: int, prompts: int, goal: float) -> float:
        """Prompt tokens that may go beside so many streams and waiting prompts; `goal` is in seconds. Unknown costs leave none.

        A step may take, in seconds,

            max(goal, min(SHORT_FACTOR * alone, SHORT_SECONDS), LONGEST_FACTOR * fixed,
                min(LONGEST_FACTOR * alone, LASTING_FACTOR * later))

        where `alone` is the step without prompts, `fixed` one that only reads the weights, and `later` the one with all
        these prompts as streams. What is more than `alone` is for prompts. Steps that take no time leave endless room.
        """
        if self.per_token == 0:
            return math.inf if self.num_steps else 0
        alone, later = (self.fixed + self.per_stream * count for count in (streams, streams + prompts))
        short = min(SHORT_FACTOR * alone, SHORT_SECONDS)
        lasting = min(LONGEST_FACTOR * alone, LASTING_FACTOR * later)
        return (max(goal, short, LONGEST_FACTOR * self.fixed, lasting) - alone) / self.per_token
