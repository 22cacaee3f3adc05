"""CUDA graphs of decode steps, in which every request has one token: recorded once and replayed, without launches.

A graph has fixed shapes and fixed addresses. So there is one for each of a few batch sizes. The inputs of a step are copied
into the same buffers each time; block tables stay on the device, and a step copies what is new in them (`device_tables.py`).
A batch between two sizes is filled up with rows of padding, which write to the reserved block 0, and to slot 0 of states;
their results are not read.

Shapes: T tokens of a step, one of each request · E model width · V vocabulary · B blocks of a request · G groups of layers.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attend.model.engine.cuda_recorder import Recorder
from attend.model.engine.device_tables import TableLines, Tables
from attend.model.net.kv_cache import KVCache
from attend.model.net.paged_attention import AttentionBackend, BatchLayout, PagedAttention, Row, write_slots
from attend.model.net.transformer import Decoder
from attend.model.sampling import best
from attend.model.transfer import HostToDeviceCopy

if TYPE_CHECKING:  # triton is not there on every machine
    from attend.model.net.triton.decoder import TritonDecoder

LARGEST = 256
"""Rows of the largest graph: a larger batch computes for longer than its launches take."""
TOKENS, POSITIONS, LINES, STATES, SOURCES, FIRST_SLOTS = range(6)
"""Rows of a step's numbers; then the slots of each group of layers."""


class GraphOutput(NamedTuple):
    """What a step computed, for its real rows; without scores only hidden states. The next step writes to the same memory."""

    hidden_TE: Tensor
    logits_TV: Tensor
    greedy_T: Tensor
    """int64: the best token; UNSCORED where the scores are not finite."""


def batch_sizes(max_batch_requests: int) -> list[int]:
    """The batches that have a graph: 1, 2, 4, then multiples of 8, up to the first that holds every batch, or to LARGEST."""
    sizes = [1, 2, 4, *range(8, LARGEST + 1, 8)]
    enough = next((size for size in sizes if size >= max_batch_requests), LARGEST)
    return [size for size in sizes if size <= enough]


class DecodeGraphs:
    """A decoder's step for each of `batch_sizes`, over buffers that all of them share."""

    @torch.inference_mode()
    def __init__(
        self,
        net: "Decoder | TritonDecoder",
        backend: AttentionBackend,
        cache: KVCache,
        max_model_len: int,
        max_batch_requests: int,
        record: Recorder,
        *,
        scores: bool = True,
    ) -> None:
        """`net` and `backend` must read positions, pages and places of states from the layout's tensors alone, and wait for
        nothing. Without `scores` a step ends with its hidden states: of ranks, each has scores of some tokens.
        """
        self.has_scores = scores
        self._net = net
        self._backend = backend
        self._cache = cache
        self._max_model_len = max_model_len
        self._sizes = batch_sizes(max_batch_requests)
        most, device = self._sizes[-1], cache.keys[0].device
        width = -(-max_model_len // cache.block_size)
        self._lines = TableLines(cache.num_groups, most, width, device)
        self._inputs_NT = torch.zeros(FIRST_SLOTS + cache.num_groups, most, dtype=torch.int64, device=device)
        """Tokens, positions, lines of tables, slots of states, written and read, and the slots in each group of layers."""
        self._hidden_TE, self._logits_TV = self._outputs(most)
        self._greedy_T = torch.zeros(most, dtype=torch.int64, device=device)
        # the largest first: the others then find their memory in the pool
        self._replays = {size: record(self._step(size)) for size in reversed(self._sizes)}

    def _outputs(self, most: int) -> tuple[Tensor, Tensor]:
        config, dtype = self._net.config, self._cache.keys[0].dtype
        widths = (config.hidden_size, config.vocab_size)
        rows, device = (most, most if self.has_scores else 0), self._inputs_NT.device
        hidden_TE, logits_TV = (torch.zeros(*shape, dtype=dtype, device=device) for shape in zip(rows, widths, strict=True))
        return hidden_TE, logits_TV

    def _step(self, size: int) -> Callable[[], None]:
        """What is recorded: the first `size` rows of the input buffers to those of the output buffers."""

        def step() -> None:
            tokens_T, layout = self._inputs_NT[TOKENS, :size], self._layout(size)
            hidden_TE = self._net(tokens_T, layout.positions_T, PagedAttention(self._backend, self._cache, layout))
            self._hidden_TE[:size].copy_(hidden_TE)
            if not self.has_scores:
                return
            logits_TV = self._net.logits(hidden_TE)
            self._logits_TV[:size].copy_(logits_TV)
            self._greedy_T[:size].copy_(best(logits_TV))

        return step

    def _layout(self, size: int) -> BatchLayout:
        """Layout of the first `size` rows of the input buffers, for requests of any length."""
        rows = [Row((), self._max_model_len - 1, 1)] * size  # the most that a backend makes room for
        _, positions_T, lines_T, states_T, sources_T, *slots_GT = self._inputs_NT[:, :size].unbind()
        layout, *others = (
            BatchLayout(rows, slots_T, positions_T, table_LB.index_select(0, lines_T), self._cache.block_size, size)
            for slots_T, table_LB in zip(slots_GT, self._lines.tables_GLB.unbind(), strict=True)
        )
        return replace(layout, others=tuple(others), states_R=states_T, sources_R=sources_T)

    def __len__(self) -> int:
        """How many sizes are recorded."""
        return len(self._sizes)

    def fits(self, rows: Sequence[Row]) -> bool:
        """True if a graph can compute this step: every row has one token, and there are not too many rows."""
        return len(rows) <= self._sizes[-1] and all(row.count == 1 and row.start < self._max_model_len for row in rows)

    @torch.inference_mode()
    def run(
        self,
        rows: Sequence[Row],
        tokens_T: "Tensor | array[int]",
        others: Sequence[Sequence[Sequence[int]]] = (),
        states: Sequence[int] | None = None,
        versions: Sequence[int] = (),
        h2d_copy: HostToDeviceCopy | None = None,
        sources: Sequence[int] | None = None,
    ) -> GraphOutput:
        """Compute a step that `fits`; one token for each row, on the device or not yet. Does not wait.

        `others`, `states` and `sources` are those of `BatchLayout.build`; `versions` those of `StepInput`. The step's numbers
        go to the device with those in `h2d_copy`.
        """
        h2d_copy = h2d_copy or HostToDeviceCopy(self._inputs_NT.device)
        size = next(size for size in self._sizes if size >= len(rows))
        try:
            tables = [[row.blocks for row in rows], *others]
            if len(tables) < len(self._lines.tables_GLB):  # all groups have the same
                tables *= len(self._lines.tables_GLB)
            slots = () if states is None else (states, sources or states)
            self._fill(rows, tokens_T, tables, slots, versions or [0] * len(rows), size, h2d_copy)
        except BaseException:
            self._lines.forget()
            raise
        self._replays[size]()
        return GraphOutput(*(output[: len(rows)] for output in (self._hidden_TE, self._logits_TV, self._greedy_T)))

    def _fill(
        self,
        rows: Sequence[Row],
        tokens_T: "Tensor | array[int]",
        tables: Tables,
        states: Sequence[Sequence[int]],
        versions: Sequence[int],
        size: int,
        h2d_copy: HostToDeviceCopy,
    ) -> None:
        """Bring a step to the input buffers, and what is new in its tables to these.

        Padding is token 0 at position 0 of block 0, with its state in slot 0.
        """
        news, given = self._lines.news(tables, versions), len(rows)
        numbers = np.zeros((len(self._inputs_NT), size), dtype=np.int64)
        if not isinstance(tokens_T, Tensor):
            numbers[TOKENS, :given] = tokens_T
        numbers[POSITIONS, :given] = [row.start for row in rows]
        numbers[LINES] = self._lines.padding
        numbers[LINES, :given] = news.lines
        for row, slots in zip((STATES, SOURCES), states, strict=False):
            numbers[row, :given] = slots
        for slots_T, table in zip(numbers[FIRST_SLOTS:], tables, strict=True):
            write_slots(rows, table, given, self._cache.block_size, slots_T[:given])
        parts = [h2d_copy.add(part) for part in (numbers, news.places, news.values)]
        here, places, values = (h2d_copy[part] for part in parts)
        self._inputs_NT[:, :size].copy_(here.view(numbers.shape))
        if isinstance(tokens_T, Tensor):
            self._inputs_NT[TOKENS, :given].copy_(tokens_T)
        if len(places):
            self._lines.tables_GLB.view(-1)[places] = values
