"""Tokens a second of contestants: each figure is noted as it is measured, with its share of what the device can do."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from attend.model.shapes import SHAPES, write_config
from loadtest.bench.contestant import OURS, Contestant, PeerError
from loadtest.bench.on_gpu.device import Clocks
from loadtest.bench.on_gpu.session import Left, Session
from loadtest.bench.shapes import parameters

Run = Callable[[int, int, int], float]
"""(requests, prompt tokens, output tokens) -> seconds."""


@dataclass(frozen=True)
class Work:
    """`requests` at once with prompts of `context` tokens; a decode goes on for `output` more, a prompt ends with its first."""

    requests: int
    context: int
    output: int = 0

    @property
    def name(self) -> str:
        """As rows call it."""
        return f"decode of {self.requests} at {self.context}" if self.output else f"prompt of {self.context}"

    def rate(self, run: Run) -> float:
        """Tokens a second: of a decode without its prompts and first tokens. Each run is made twice, and the second counts.

        Raises PeerError where a decode seems to take no time.
        """
        first = self._second(run, 1)
        if not self.output:
            return self.requests * self.context / first
        seconds = self._second(run, self.output + 1) - first
        if seconds <= 0:
            raise PeerError(f"{self.name}: {self.output} more tokens took no longer than none")
        return self.requests * self.output / seconds

    def _second(self, run: Run, output: int) -> float:
        run(self.requests, self.context, output)  # whoever compiles for these sizes does so now
        return run(self.requests, self.context, output)

    def limit(self, shape: str, speed: Mapping[str, float]) -> float:
        """Tokens a second that a device of this speed cannot exceed, for weights, keys and values in bfloat16.

        A decode reads the weights and all keys and values once a step; of a prompt each token is multiplied by each weight, and
        by half of the keys and of the values.
        """
        count, sizes = parameters(shape), dict[str, int](SHAPES[shape])
        heads, layers = sizes["num_attention_heads"], sizes["num_hidden_layers"]
        head = sizes.get("head_dim", sizes["hidden_size"] // heads)
        if not self.output:
            each = count - sizes["vocab_size"] * sizes["hidden_size"] + layers * heads * head * self.context
            return speed["flops"] / (2 * each)
        token = 4 * layers * sizes["num_key_value_heads"] * head  # its key and value in all layers, two bytes each
        return self.requests * speed["bytes"] / (2 * count + self.requests * (self.context + self.output / 2) * token)


GPU_WORKS = (Work(1, 1024, 128), Work(32, 1024, 128), Work(1, 8192), Work(256, 1024, 128))
CPU_WORKS = (Work(1, 64, 8), Work(4, 64, 8), Work(1, 256))
"""The most telling first."""


def measure(session: Session, shape: str, peer: str, works: tuple[Work, ...], folder: Path, device: str, left: Left) -> None:
    """Start a contestant, which draws its weights on the device, and note what it does; what it cannot do is lost.

    The start has half of the time.
    """
    what, made = f"{shape}, {peer}", 0
    log = folder / f"{peer}-{shape}.log"
    try:
        start = session.time_left(left() / 2)
        contestant = Contestant(peer, write_config(shape, folder), log, load="dummy", left=start)
    except (PeerError, OSError, ValueError) as error:
        session.lose(what, f"its start: {error}")
        return
    try:
        about = contestant.facts
        session.note("start", f"{what}: {about}", shape=shape, who=peer, about=about)
        if peer == OURS and device == "cuda" and (about.get("backend"), about.get("recorded")) != ("triton", True):
            session.lose(what, f"backend is {about.get('backend')}, steps are recorded: {about.get('recorded')}")
        contestant.left = left
        contestant(1, 64, 2)
        for work in works:
            with Clocks(device == "cuda") as clocks:
                rate = work.rate(contestant)
            speeds = session.of("speed")
            share = f"{rate / limit:.0%} of {limit:.0f}" if speeds and (limit := work.limit(shape, speeds[-1])) else "not known"
            shown = f"{shape}, {work.name}, {peer}: {rate:.1f} tokens/s, {share}; {clocks.summary}"
            values = {"unit": "tokens/s", "value": rate, "share": share, "clocks": clocks.told}
            session.note("figure", shown, shape=shape, work=work.name, who=peer, **values)
            made += 1
    except (PeerError, OSError, ValueError) as error:
        session.lose(what, f"{', '.join(work.name for work in works[made:])}: {error}")
    finally:
        contestant.close()


HEADER = ("shape", "work", "who", "tokens/s", "share of the roofline")


def rows(session: Session) -> list[list[str]]:
    """A row of each figure, the peers' beside ours."""
    found = sorted(session.of("figure"), key=lambda each: (each["shape"], each["work"]))
    return [[each["shape"], each["work"], each["who"], f"{each['value']:.1f}", each["share"]] for each in found]
