"""Traces: calls as they once came, one JSON object a line, in the format of Mooncake's published traces.

`timestamp` is when a call came, in milliseconds; `input_length` and `output_length` are tokens; `hash_ids` names the blocks of
the prompt, so that two calls with the same ids at the beginning share that prefix. Source: Qin et al. 2024, "Mooncake: A
KVCache-centric Disaggregated Architecture for LLM Serving". The text of a block is drawn from its id: which words they were is
in no trace.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK = 512
"""Tokens of a block in Mooncake's traces."""
SHIPPED = Path(__file__).parent / "traces" / "chat.jsonl"


class TraceError(Exception):
    """A line that is no call of a trace. The sentence names file and line."""


@dataclass(frozen=True)
class Call:
    """A call of a trace."""

    seconds: float
    """After the first one."""
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]

    def prompt(self, ids: Sequence[int], block: int) -> list[int]:
        """Its token ids, drawn from `ids` block by block: the same block has the same ids in each call."""
        found: list[int] = []
        for number in self.blocks:
            found += random.Random(number).choices(ids, k=block)
        rest = max(0, self.prompt_tokens - len(found))
        return [*found, *random.Random(f"{self.blocks} rest").choices(ids, k=rest)][: self.prompt_tokens]


def read_trace(path: Path, *, scale: float = 1.0) -> list[Call]:
    """The calls in the order of their times. `scale` shortens prompts and answers alike. Raises TraceError."""
    calls = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line)
            prompt, answer = (max(1, round(scale * fields[name])) for name in ("input_length", "output_length"))
            calls.append(Call(fields["timestamp"] / 1000, prompt, answer, tuple(map(int, fields.get("hash_ids", ())))))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TraceError(f"{path}, line {number}: no call of a trace: {type(error).__name__}: {error}") from error
    if not calls:
        raise TraceError(f"{path} has no calls")
    first = min(call.seconds for call in calls)
    moved = (Call(call.seconds - first, call.prompt_tokens, call.output_tokens, call.blocks) for call in calls)
    return sorted(moved, key=lambda call: call.seconds)


def made_trace(seed: int, seconds: float, rate: float, block: int = BLOCK) -> list[dict[str, Any]]:
    """Conversations that begin as a Poisson process, three in four with one of four system prompts, and go on for a few turns.

    A turn has what was said before it, so a conversation shares ever longer prefixes with itself.
    """
    dice = random.Random(seed)
    lines: list[dict[str, Any]] = []
    systems = [tuple(range(1000 * number, 1000 * number + dice.randint(1, 3))) for number in range(1, 5)]
    moment, fresh = 0.0, 10_000
    while (moment := moment + dice.expovariate(rate)) < seconds:
        blocks = list(dice.choice(systems)) if dice.random() < 0.75 else []
        when, said = moment, len(blocks) * block
        for _ in range(1 + min(8, int(dice.expovariate(0.5)))):
            said += max(8, round(dice.lognormvariate(4.4, 0.9)))
            while len(blocks) < said // block:
                blocks.append(fresh)
                fresh += 1
            answer = max(4, min(1024, round(dice.lognormvariate(4.8, 0.7))))
            lines.append(
                {"timestamp": round(when * 1000), "input_length": said, "output_length": answer, "hash_ids": [*blocks]}
            )
            said += answer
            when += 2.0 + dice.expovariate(0.1)
    return sorted(lines, key=lambda line: line["timestamp"])


def main() -> None:
    """Write the shipped trace anew."""
    lines = made_trace(seed=1, seconds=300.0, rate=0.25)
    SHIPPED.parent.mkdir(exist_ok=True)
    SHIPPED.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main()
