"""What the users ask: prompts whose lengths, and whose place in the prefix cache, are known."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

from loadtest.lengths import Lengths
from loadtest.traces import Call

MIXES = {
    "short": {"short": 1.0},
    "long": {"long": 1.0},
    "shared": {"shared": 1.0},
    "mixed": {"short": 0.6, "long": 0.2, "shared": 0.2},
}
"""Share of each kind of prompt, by the name of the mix."""

SHORT = "def fibonacci(n):\n"
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}


@dataclass(frozen=True)
class Ask:
    """One request before it is asked."""

    kind: str
    """Its row in the statistics."""
    prompt: str | list[int]
    """Text, or token ids where the length is given in tokens."""
    max_tokens: int
    model: str = ""
    """The model or LoRA adapter; empty: the server's own."""
    tools: bool = False


@dataclass(frozen=True)
class Workload:
    """What is drawn for each request. `token_ids` are those that prompts of a length in tokens consist of."""

    mix: str = "mixed"
    long_chars: int = 1400
    max_tokens: int = 64
    prompt_tokens: Lengths | None = None
    output_tokens: Lengths | None = None
    prefixes: int = 1
    """Shared prefixes; the first is the most frequent, the n-th n times rarer (Zipf)."""
    models: tuple[str, ...] = ()
    tools: float = 0.0
    """Share of chats that bring a tool."""
    token_ids: Sequence[int] = ()
    chars_a_token: float = 4.0
    """Of the server's tokenizer, in code."""
    block: int = 512
    """Tokens of a block of a trace."""

    def draw(self, dice: random.Random) -> Ask:
        """The next request, the same for dice of the same seed."""
        kind, text = draw(dice, self.mix, self.long_chars, self._prefix(dice))
        prompt = text if self.prompt_tokens is None else self._ids(dice, kind, self.prompt_tokens.draw(dice))
        most = self.max_tokens if self.output_tokens is None else self.output_tokens.draw(dice)
        model = dice.choice(self.models) if self.models else ""
        return Ask(kind, prompt, most, model, bool(self.tools) and dice.random() < self.tools)

    def replay(self, call: Call) -> Ask:
        """The request of a trace's call."""
        return Ask("trace", call.prompt(self.token_ids, self.block), call.output_tokens)

    def system(self, dice: random.Random) -> list[dict[str, str]]:
        """The messages that a chat begins with: one of several shared system prompts."""
        return [{"role": "system", "content": f"You help with module {self._prefix(dice)}.\n{code(self.long_chars)}"}]

    def message(self, dice: random.Random, ask: Ask) -> str:
        """What the user of a chat says: a line of its own, or as long as --prompt-tokens says."""
        own = f"# {dice.getrandbits(32):08x}\n"
        return own + (SHORT if isinstance(ask.prompt, str) else code(round(len(ask.prompt) * self.chars_a_token)))

    def _prefix(self, dice: random.Random) -> int:
        if self.prefixes == 1:
            return 0
        return dice.choices(range(self.prefixes), weights=[1 / (rank + 1) for rank in range(self.prefixes)])[0]

    def _ids(self, dice: random.Random, kind: str, length: int) -> list[int]:
        """So many token ids: all of one's own, or of a shared kind the first seven eighths of one of the prefixes."""
        shared = length * 7 // 8 if kind == "shared" else 0
        number = self._prefix(dice)
        return [
            *random.Random(f"prefix {number}").choices(self.token_ids, k=shared),
            *dice.choices(self.token_ids, k=length - shared),
        ]


def draw(dice: random.Random, mix: str, long_chars: int, prefix: int = 0) -> tuple[str, str]:
    """(kind, text) of the next prompt, the same for dice of the same seed.

    `short` is a line, `long` is `long_chars` characters of code; each begins with a line of its own, so that no prompt is in
    the prefix cache. `shared` is as long as `long`, but the same for everybody with the same `prefix` up to its last line.
    """
    shares = MIXES[mix]
    kind = dice.choices(list(shares), weights=list(shares.values()))[0]
    own = f"# {dice.getrandbits(32):08x}\n"
    first = f"# module {prefix}\n" if prefix else ""
    texts = {"short": own + SHORT, "long": own + code(long_chars), "shared": first + code(long_chars) + own}
    return kind, texts[kind]


def code(chars: int) -> str:
    """The same `chars` characters of Python at each call."""
    text, numbers = "", count()
    while len(text) < chars:
        number = next(numbers)
        text += f"def step_{number}(state):\n    state.total += {number}\n    return state.total\n\n\n"
    return text[:chars]
