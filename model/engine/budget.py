"""The token budget of a step: how many prefill tokens it takes, beside decodes or alone, by a learned model of its time."""

import math
from collections import deque

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

MAX_SECONDS = 2.0
"""A step without streams may take so long, and a chunk: who arrives behind it waits no longer for the next one. Where reading
the weights takes seconds, it may take LONGEST_FACTOR of that."""
LEAST_SECONDS = 0.1
"""A step beside streams may compute parts of prompts for so long at least, however slow it is: no prompt waits for ever, and
small parts cost more for each token than large ones."""
FEW = 8
"""Where a chunk takes longer than LEAST_SECONDS, a prompt's part is a multiple of so many tokens."""
FIRST_CONTEXT = 1024
"""The first guess of the context in which a prompt token takes twice the seconds of one without: of small models on a CPU."""


class StepCost:
    """Predicts a step's seconds as `fixed_seconds + stream_seconds * streams + token_seconds * prompt tokens + pair_seconds *
    pairs`, where each prompt token pairs with each token before it that it attends to.

    A measured step corrects the four by factors, each by its part in the prediction (normalised least mean squares on
    the logarithms). So a step without prompts does not change `token_seconds`, a large part of a prompt hardly changes the
    others, no estimate becomes zero or negative, and a long run of equal steps does not undo what other steps have taught.
    """

    def __init__(self, scale: int, reach: float = math.inf) -> None:
        """`reach`: tokens that a query attends to at most, in the layers that see most."""
        self.reach = reach
        self.scale = scale
        """The first guess of fixed_seconds / token_seconds; a small one is safe. stream_seconds / token_seconds begins at 1."""
        self.fixed_seconds = 0.0
        self.stream_seconds = 0.0
        self.token_seconds = 0.0
        self.pair_seconds = 0.0
        self.num_steps = 0
        self._factors: deque[float] = deque([1.0], maxlen=2)
        """By which the last steps without streams were slower than predicted: the four learn slowly, and these take seconds."""

    def learn(self, streams: int, tokens: int, pairs: float, seconds: float) -> None:
        """Learn from a measured step of so many streams, prompt tokens and pairs. If it took no time, it is only counted."""
        self.num_steps += 1
        if seconds <= 0:
            return
        if self.token_seconds == 0:
            self.stream_seconds = self.token_seconds = seconds / (self.scale + streams + tokens)
            self.fixed_seconds = self.token_seconds * self.scale
            self.pair_seconds = self.token_seconds / FIRST_CONTEXT
            return
        parts = self._parts(streams, tokens, pairs)
        predicted = sum(parts)
        error = min(math.log(seconds / predicted), MAX_LOG_ERROR)
        step = error * (GAIN_IF_SLOWER if error > 0 else GAIN_IF_FASTER) * predicted / sum(part * part for part in parts)
        costs = self.fixed_seconds, self.stream_seconds, self.token_seconds, self.pair_seconds
        self.fixed_seconds, self.stream_seconds, self.token_seconds, self.pair_seconds = (
            cost * math.exp(step * part) for cost, part in zip(costs, parts, strict=True)
        )
        if not streams and tokens:
            self._factors.append(seconds / sum(self._parts(streams, tokens, pairs)))

    def _parts(self, streams: int, tokens: int, pairs: float) -> tuple[float, float, float, float]:
        return self.fixed_seconds, self.stream_seconds * streams, self.token_seconds * tokens, self.pair_seconds * pairs

    def pairs(self, start: int, count: int) -> float:
        """Query/key pairs that attention computes for `count` tokens of a prompt, the first at position `start`."""
        return count * min(start + count / 2, self.reach)

    def weight(self, start: int) -> float:
        """What the prompt token at `start` costs, in tokens at the beginning of a prompt."""
        return 1 + min(start, self.reach) * self.pair_seconds / self.token_seconds if self.token_seconds else 1.0

    def share(self, start: int, room: float, least: int, chunk: int, *, brief: bool = True) -> float:
        """Tokens of a prompt from `start` on that are worth `room` tokens at its beginning, rounded up to a chunk; or `least`.
        If it is to be `brief`, only where LEAST_SECONDS suffice for so many, and of less than a chunk in multiples of FEW.
        """
        weight = self.weight(start)
        share, floor = room / weight, self.brief / weight if brief else math.inf
        if floor >= chunk:
            least = least if least <= floor else int(floor // chunk * chunk)
            return max(math.ceil(share / chunk) * chunk, least) if share < math.inf else share
        few = int(max(share, min(floor, least)))
        return max(few - few % FEW if few > FEW else few, min(1, least))

    def worth(self, start: int, end: int) -> float:
        """What the tokens of a prompt from `start` on, up to `end`, cost, in tokens at its beginning."""
        return (end - start) * self.weight((start + end) // 2)

    @property
    def brief(self) -> float:
        """Prompt tokens, at the beginning of a prompt, that take LEAST_SECONDS. Infinite if nothing is known."""
        return LEAST_SECONDS / self.token_seconds if self.token_seconds else math.inf

    def prompt_budget_alone(self) -> float:
        """Prompt tokens, at the beginning of a prompt, that a step without streams may compute. Infinite if nothing is known.

        Of the last two steps the one that was less slow counts: steps may be slow by accident.
        """
        if self.token_seconds == 0:
            return math.inf
        longest_seconds = max(MAX_SECONDS / max(1.0, min(self._factors)), LONGEST_FACTOR * self.fixed_seconds)
        return (longest_seconds - self.fixed_seconds) / self.token_seconds

    def prompt_budget(self, streams: int, prompts: int, goal_seconds: float) -> float:
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
