"""Layers with a recurrent state: of a fixed size for each sequence, in place of a KV cache.

Such a layer is a `Recurrence`: it knows what its states are and how tokens move them on. Who holds the states, and which
tokens belong to which sequence, is known to the `attention` argument of the decoder.

Shapes: T tokens of this step, or of a batch · R sequences · L tokens of each of them.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from attend.model.config import ModelConfig
from attend.model.transfer import integers

State = tuple[Tensor, ...]
"""What a layer keeps of R sequences: tensors [R, ...], float32."""


def allocate(config: ModelConfig, num_slots: int, device: str) -> dict[int, State]:
    """Room for the states of `num_slots` sequences beside the reserved slot 0, by number of the layer that keeps them."""
    return {
        layer: tuple(torch.zeros(num_slots + 1, *shape, device=device) for shape in spec.recurrence.state_shapes)
        for layer, spec in enumerate(config.layers)
        if spec.recurrence is not None
    }


class Recurrence(Protocol):
    """The recurrence of a layer that keeps a state in place of keys and values."""

    def start(self, count: int) -> State:
        """The states of `count` sequences before their first tokens: zeros."""
        ...

    def advance(self, inputs: Sequence[Tensor], state: State) -> tuple[Tensor, State]:
        """The outputs [R, L, ...] of the next L tokens of each sequence, and the states after them.

        `inputs`: what the layer made of each token by itself, tensors [R, L, ...].
        """
        ...


class Row(Protocol):
    """One sequence's share of a step: tokens `start .. start + count - 1`."""

    start: int
    count: int
    draft: int
    """Draft tokens at the end of the row, which are computed without writing the state."""


class StateBatch(NamedTuple):
    """R sequences that go on by equally many tokens."""

    tokens: slice
    """Their places in T, sequence after sequence."""
    sources_R: Tensor
    """int64: slots from which their states are read."""
    slots_R: Tensor | None
    """int64: slots to which their states are written; None: they are not kept."""
    begins_N: Tensor | None
    """int64: those of the R sequences that have no state yet; None: all have one."""


CACHED = 1 << 21
"""Bytes of states that a CPU moves on together: what it copies of them stays in its caches."""


class StateSlots:
    """How a step moves states on: rows of one token side by side, the others one by one. Made once a step."""

    def __init__(self, rows: Sequence[Row], sources_R: Tensor, slots_R: Tensor) -> None:
        """`rows` have those with one token first. `sources_R` and `slots_R`: int64, where each state is read and written."""
        self._rows, self._sources_R, self._slots_R = rows, sources_R, slots_R
        self._turns: dict[int, list[StateBatch]] = {}

    def of(self, states: State) -> list[StateBatch]:
        """The batches for a layer with these states, at most CACHED bytes in each on a CPU."""
        most = len(states[0]) if states[0].is_cuda else max(1, CACHED // sum(part[0].nbytes for part in states))
        if most not in self._turns:
            self._turns[most] = list(self._make_batches(most))
        return self._turns[most]

    def _make_batches(self, most: int) -> Iterator[StateBatch]:
        single = sum(row.count == 1 for row in self._rows)
        begin, first = 0, 0
        while first < len(self._rows):
            last = min(first + most, single) if first < single else first + 1
            rows = self._rows[first:last]
            begins = [at for at, row in enumerate(rows) if row.start == 0]
            end = begin + len(rows) * (rows[0].count - rows[0].draft)
            begins_N = integers(begins, self._slots_R.device) if begins else None
            slots_R = self._slots_R[first:last]
            yield StateBatch(slice(begin, end), self._sources_R[first:last], slots_R, begins_N)
            if rows[0].draft:
                yield StateBatch(slice(end, end + rows[0].draft), slots_R, None, None)
                end += rows[0].draft
            begin, first = end, last


def advance(recurrence: Recurrence, inputs_T: Sequence[Tensor], states: State, turns: StateSlots) -> Tensor:
    """The outputs [T, ...] of a layer; `states`, its states in all slots, is moved on.

    Of a sequence that begins, what lies in its slot is not read: another request has left it, NaN even.
    """
    outputs = []
    for tokens, sources_R, slots_R, begins_N in turns.of(states):
        state = tuple(part.index_select(0, sources_R) for part in states)
        if begins_N is not None:
            state = tuple(part.index_fill_(0, begins_N, 0) for part in state)
        inputs = [x[tokens].unflatten(0, (len(sources_R), -1)) for x in inputs_T]
        out, after = recurrence.advance(inputs, state)
        for part, new in zip(states, after, strict=True) if slots_R is not None else ():
            part.index_copy_(0, slots_R, new)
        outputs.append(out.flatten(0, 1))
    return torch.cat(outputs)
