"""What the users ask: prompts whose lengths, and whose place in the prefix cache, are known."""

import random
from itertools import count

MIXES = {
    "short": {"short": 1.0},
    "long": {"long": 1.0},
    "shared": {"shared": 1.0},
    "mixed": {"short": 0.6, "long": 0.2, "shared": 0.2},
}
"""Share of each kind of prompt, by the name of the mix."""

SHORT = "def fibonacci(n):\n"


def draw(dice: random.Random, mix: str, long_chars: int) -> tuple[str, str]:
    """(kind, text) of the next prompt, the same for dice of the same seed.

    `short` is a line, `long` is `long_chars` characters of code; each begins with a line of its own, so that no prompt is in
    the prefix cache. `shared` is as long as `long`, but the same for everybody up to its last line.
    """
    shares = MIXES[mix]
    kind = dice.choices(list(shares), weights=list(shares.values()))[0]
    own = f"# {dice.getrandbits(32):08x}\n"
    texts = {"short": own + SHORT, "long": own + code(long_chars), "shared": code(long_chars) + own}
    return kind, texts[kind]


def code(chars: int) -> str:
    """The same `chars` characters of Python at each call."""
    text = ""
    for number in count():
        text += f"def step_{number}(state):\n    state.total += {number}\n    return state.total\n\n\n"
        if len(text) >= chars:
            return text[:chars]
