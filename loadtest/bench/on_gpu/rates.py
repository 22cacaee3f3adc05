"""Tokens a second of contestants: each figure is noted as it is measured, with its share of what the device can do."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from attend.model.shapes import SHAPES
from loadtest.bench.contestant import OURS, Contestant, PeerError
from loadtest.bench.on_gpu.clocks import Clocks
from loadtest.bench.on_gpu.session import Left, Session
from loadtest.bench.shapes import parameters, write_config

Run = Callable[[int, int, int], float]
"""(requests, prompt tokens, output tokens) -> seconds."""
MEASURING = 60
"""Seconds of a contestant's time that are not for its start, or half of the time."""


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
        count, sizes = parameters(shape), SHAPES[shape]
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
GPU_SMOKE, CPU_SMOKE = (GPU_WORKS[0], GPU_WORKS[2]), (CPU_WORKS[0], CPU_WORKS[2])
"""A decode of one request, and a prompt."""


def measure(
    session: Session,
    shape: str,
    peer: str,
    works: tuple[Work, ...],
    folder: Path,
    left: Left,
    device: str,
    measuring: float = MEASURING,
) -> None:
    """Start a contestant, which draws its weights on the device, and note what it does; what it cannot do is lost.

    What is measured has `measuring` seconds, or half of what there is, however long the start was.
    """
    what, given, made = f"{shape}, {peer}", left(), 0
    measuring = min(measuring, given / 2)
    log = folder / f"{peer}-{shape}.log"
    try:
        contestant = Contestant(peer, write_config(shape, folder), log, load="dummy", left=session.time_left(given - measuring))
    except (PeerError, OSError, ValueError) as error:
        session.lose(what, f"its start: {error}")
        return
    try:
        session.note("start", f"{what}: {contestant.facts}", shape=shape, who=peer, about=contestant.facts)
        check(session, what, peer, contestant.facts, device)
        contestant.left = session.time_left(measuring)
        contestant(1, 64, 2)
        for work in works:
            with Clocks(device == "cuda") as clocks:
                rate = work.rate(contestant)
            note(session, shape, peer, work, rate, clocks)
            made += 1
    except (PeerError, OSError, ValueError) as error:
        session.lose(what, f"{', '.join(work.name for work in works[made:])}: {error}")
    finally:
        contestant.close()


def check(session: Session, what: str, peer: str, facts: Mapping[str, object], device: str) -> None:
    """On a GPU Attend is what it is measured as: Triton's kernels, and recorded steps."""
    if peer == OURS and device == "cuda" and (facts.get("backend"), facts.get("recorded")) != ("triton", True):
        session.lose(what, f"backend is {facts.get('backend')}, steps are recorded: {facts.get('recorded')}")


def note(session: Session, shape: str, peer: str, work: Work, rate: float, clocks: Clocks) -> None:
    """A figure, beside the clocks at which it was measured: one that other clocks made cannot be compared with it."""
    speeds = session.of("speed")
    limit = work.limit(shape, speeds[-1]) if speeds else None
    share = "" if limit is None else f", {rate / limit:.0%} of {limit:.0f}"
    shown = f"{shape}, {work.name}, {peer}: {rate:.1f} tokens/s{share}" + (f"; {clocks.summary}" if clocks.summary else "")
    values = {"unit": "tokens/s", "value": rate, "limit": limit, "clocks": clocks.told}
    session.note("figure", shown, shape=shape, work=work.name, who=peer, **values)


HEADER = ("shape", "work", "Attend, tokens/s", "share of the roofline", "beside it")


def rows(session: Session) -> list[list[str]]:
    """A row for each work that somebody did, in the order of the first who did."""
    found: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for each in session.of("figure"):
        found.setdefault((each["shape"], each["work"]), {})[each["who"]] = each
    shown = []
    for (shape, work), values in found.items():
        ours = values.get(OURS)
        mine = "not measured" if ours is None else f"{ours['value']:.1f}"
        share = f"{ours['value'] / ours['limit']:.0%} of {ours['limit']:.0f}" if ours and ours["limit"] else "not known"
        others = []
        for who, each in values.items():
            if who != OURS:
                others.append(
                    f"{who}: {each['value']:.1f}" + ("" if ours is None else f", {ours['value'] / each['value']:.2f}")
                )
        shown.append([shape, work, mine, share, "; ".join(others) or "nobody"])
    return shown
