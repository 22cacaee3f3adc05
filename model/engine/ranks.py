"""Tensor parallelism in the engine: every rank computes each step with its part of the decoder, rank 0 schedules and draws.

Rank 0 sends each step to the others before it begins it: a head in JSON, and behind it the numbers that may be many, int64.
All ranks run the same code on it, so their collectives meet. What fails on one rank within a step fails all of them: the others
wait for it there.

Shapes: T tokens · E model width · R rows that draw · V vocabulary.
"""

import json
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, chain, pairwise

import torch
from torch import Tensor

from attend.model.config import ModelConfig
from attend.model.engine.graphs import GraphOutput
from attend.model.engine.options import EngineOptions
from attend.model.engine.plan import PromptScores, StepInput
from attend.model.engine.runner import ModelRunner, PendingStep
from attend.model.errors import DeviceFailed, SettingError
from attend.model.net.paged_attention import Row
from attend.model.parallel.group import ProcessGroup
from attend.model.parallel.shards import check_shards
from attend.model.params import SamplingParams
from attend.model.sampling_plan import Draw, SamplingPlan
from attend.model.transfer import HostToDeviceCopy

BEAT_SECONDS = 1.0
"""How often rank 0 asks the others whether they are there and have computed the same."""
FACTOR = 0x5851F42D4C957F2D
"""Factor of the digest (Knuth's MMIX): with it the digest depends on the order of the steps."""
BEAT, HURRY = b"beat", b"hurry"
"""What rank 0 sends in the place of a step."""
TOLD = Draw(SamplingPlan(SamplingParams(), seed=0), position=0)
"""Stands for each draw on the other ranks: rank 0 draws."""


def check_shared(config: ModelConfig, options: EngineOptions, ranks: int) -> None:
    """Refuse by name what is not supported with so many ranks: SettingError."""
    changes = {
        "quantize": options.quantize != "none",
        "adapters": options.adapters,
        "load_format": options.load_format != "auto",
        "kv_disk_folder": bool(options.kv_disk_folder),
    }
    for name, is_set in changes.items():
        if ranks > 1 and is_set:
            raise SettingError(f"tensor_parallel is {ranks}, but {name} is set, which tensor parallelism does not support yet")
    check_shards(config, ranks)


class ShardRunner(ModelRunner):
    """`ModelRunner` with a part of the decoder. All ranks must be given the same steps, in the same order."""

    def __init__(self, runner: ModelRunner, group: ProcessGroup) -> None:
        """What `runner` would compute by itself."""
        super().__init__(
            runner.net,
            runner.backend,
            runner.cache,
            runner.device,
            graphs=runner.graphs,
            draw=runner.draw,
            pieces=runner.pieces,
            record=runner.record,
        )
        self.group = group
        self._digest = torch.zeros(1, dtype=torch.int64, device=group.device)

    def _draws_from_scores(self, draws: Sequence[Draw], rows: Sequence[Row]) -> bool:
        """See `ModelRunner`."""
        return self.group.rank == 0 and super()._draws_from_scores(draws, rows)

    def _compute_hidden(
        self, step: StepInput, rows: Sequence[Row], h2d_copy: HostToDeviceCopy
    ) -> tuple[Tensor, GraphOutput | None]:
        """See `ModelRunner`. Adds the bits of the hidden states to the digest."""
        hidden_TE, decoded = super()._compute_hidden(step, rows, h2d_copy)
        words = hidden_TE.view(torch.int32 if hidden_TE.itemsize == 4 else torch.int16)
        self._digest.mul_(FACTOR).add_(words.sum(dtype=torch.int64))
        return hidden_TE, decoded

    def _draw_from(self, logits_RV: Tensor, draws: Sequence[Draw]) -> Tensor:
        """Rank 0 draws; the others learn the tokens."""
        if self.group.rank == 0:
            return self.group.share(super()._draw_from(logits_RV, draws))
        return self.group.share(torch.empty(len(draws), dtype=torch.int64, device=logits_RV.device))

    def agree(self) -> None:
        """Raise DeviceFailed where a rank has computed other bits than rank 0."""
        first, *others = (int(part) for part in self.group.gather(self._digest))
        for rank, other in enumerate(others, start=1):
            if other != first:
                raise DeviceFailed(f"rank {rank} computed other hidden states than rank 0")


class Leader:
    """The runner of rank 0's engine: has all ranks compute each step."""

    def __init__(self, runner: ShardRunner, clock: Callable[[], float]) -> None:
        self.runner = runner
        self._clock = clock
        self._beat = clock()
        self._failure: DeviceFailed | None = None
        """Why the ranks do not compute the same any more."""

    def submit(self, step: StepInput) -> PendingStep:
        """See `ModelRunner.submit`. Whatever it raises ends the engine: DeviceFailed, at every later call too."""
        with self._together():
            self.idle()
            self.runner.group.send(pack_step(step))
            return self.runner.submit(step)

    def hurry(self) -> None:
        """All ranks are prepared: from now on none of them waits long for another, nor the others for rank 0."""
        with self._together():
            self.runner.group.send(HURRY)
            self.runner.group.hurry()

    def idle(self) -> None:
        """Once a second: make sure that all ranks are there and agree. Raises DeviceFailed."""
        if self._clock() - self._beat >= BEAT_SECONDS:
            with self._together():
                self.runner.group.send(BEAT)
                self.runner.agree()
            self._beat = self._clock()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """No step that failed can be repeated: the other ranks are within it. An engine may drop a step unread, so the
        failure is kept.
        """
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except DeviceFailed as error:
            self._failure = error
            raise
        except Exception as error:
            self._failure = DeviceFailed(f"a step failed on rank 0 of the model: {type(error).__name__}: {error}")
            raise self._failure from error


def run_worker_ranks(runner: ShardRunner) -> None:
    """What the other ranks do: compute the steps that rank 0 sends, until it ends or a rank fails: DeviceFailed."""
    runner.prepare()
    while True:
        message = runner.group.receive()
        if message == HURRY:
            runner.group.hurry()
        elif message == BEAT:
            runner.agree()
        else:
            runner.submit(unpack_step(message))


def pack_step(step: StepInput) -> bytes:
    """A step as bytes for the other ranks, which compute it and do not draw: texts, masks and hidden sums stay on rank 0."""
    parts = (step.starts, step.counts, step.versions, step.draw_rows, step.tokens, *chain.from_iterable(step.tables))
    numbers = array("q")
    for part in parts:
        numbers.extend(part)
    head = {
        "early": step.early,
        "pending": step.pending,
        "request_ids": step.request_ids,
        "draw_ids": step.draw_ids,
        "scores": [(each.request_id, each.row, list(each.tokens), each.top) for each in step.prompt_scores],
        "sizes": list(map(len, parts)),
    }
    return json.dumps(head).encode() + b"\n" + numbers.tobytes()


def unpack_step(message: bytes) -> StepInput:
    """The step that `pack_step` has packed."""
    line, _, rest = message.partition(b"\n")
    head, numbers = json.loads(line), array("q")
    numbers.frombytes(rest)
    ends = list(accumulate(head.pop("sizes"), initial=0))
    starts, counts, versions, draw_rows, tokens, *rows = (numbers[begin:end] for begin, end in pairwise(ends))
    num_rows = len(starts)
    return StepInput(
        tables=[rows[at : at + num_rows] for at in range(0, len(rows), num_rows)] if num_rows else [],
        starts=starts.tolist(),
        counts=counts.tolist(),
        versions=versions.tolist(),
        tokens=tokens,
        draws=[TOLD] * len(draw_rows),
        draw_rows=draw_rows.tolist(),
        prompt_scores=[PromptScores(*each) for each in head.pop("scores")],
        **head,
    )
