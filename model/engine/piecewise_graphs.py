"""Piecewise CUDA graphs, for steps with prompts: all that lies between the attentions of two layers is recorded.

The launches of attention depend on how many requests a step has and how long they are. What lies between depends on the number
of tokens alone. So there are graphs for each of a few numbers of tokens, and attention is launched between them as it is in a
step that is not recorded. A step between two sizes is filled up with tokens of padding, which write to the reserved block 0;
their results are not read. Larger steps are not recorded: those of a model of some billions of parameters should compute for
longer than their launches take, which no GPU has shown yet.

Shapes: T tokens of a step · E model width · H query heads · D head size · G groups of layers.
"""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attend.model.engine.cuda_recorder import Between, PieceRecorder
from attend.model.net.kv_cache import KVCache
from attend.model.net.paged_attention import AttentionBackend, BatchLayout, PagedAttention, Row
from attend.model.net.progress import ProgressCounter
from attend.model.net.transformer import Decoder
from attend.model.transfer import HostToDeviceCopy

if TYPE_CHECKING:  # triton is not there on every machine
    from attend.model.net.triton.decoder import TritonDecoder

LARGEST = 512
"""Tokens of the largest step that is recorded."""
TOKENS, POSITIONS, FIRST_SLOTS = range(3)
"""Rows of a step's numbers; from the last on, the slots in each group of layers."""


def token_sizes(max_batch_tokens: int) -> list[int]:
    """The numbers of tokens that have graphs: 16, 32, then multiples of 64, up to the first that holds every step."""
    sizes = [16, 32, *range(64, LARGEST + 1, 64)]
    enough = next((size for size in sizes if size >= max_batch_tokens), LARGEST)
    return [size for size in sizes if size <= enough]


@dataclass(frozen=True, slots=True)
class PiecewiseAttention(PagedAttention):
    """The `attention` argument of a step that is recorded: `attend` stands between two pieces, with buffers on both sides."""

    queries: Tensor
    outputs: Tensor
    """Numbers of all heads of all tokens, one after the other: layers may have heads of their own."""
    between: Between

    def __call__(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, *sinks_H: Tensor) -> Tensor:
        """See `PagedAttention`."""
        self.cache.write(layer, k_TKD, v_TKD, self.layout_of(layer).slots_T)
        return self.attend(layer, q_THD, *sinks_H)

    def attend(self, layer: int, q_THD: Tensor, *sinks_H: Tensor, out_THD: Tensor | None = None) -> Tensor:
        """See `PagedAttention`. Queries are read from one buffer, and outputs are written to the other."""
        heads_of(self.queries, *q_THD.shape).copy_(q_THD)
        self.between(layer, *sinks_H)
        return heads_of(self.outputs, *q_THD.shape)


def heads_of(buffer: Tensor, num_tokens: int, heads: int, size: int) -> Tensor:
    """The heads [T, H, D] of some tokens in a buffer for more."""
    return buffer[: num_tokens * heads * size].view(num_tokens, heads, size)


class PiecewiseGraphs:
    """A decoder's step for each of `token_sizes`, over buffers that all of them share."""

    @torch.inference_mode()
    def __init__(
        self,
        net: "Decoder | TritonDecoder",
        backend: AttentionBackend,
        cache: KVCache,
        max_batch_tokens: int,
        record: PieceRecorder,
    ) -> None:
        """The model has no layers with states; `net` must wait for nothing."""
        assert not cache.states, "what moves a state on depends on the requests of a step"
        self._net = net
        self._backend = backend
        self._cache = cache
        self._sizes = token_sizes(max_batch_tokens)
        config, keys, most = net.config, cache.keys[0], self._sizes[-1]
        self._inputs_NT = torch.zeros(FIRST_SLOTS + cache.num_groups, most, dtype=torch.int64, device=keys.device)
        self._heads = [(layer.num_heads, layer.head_size) for layer in config.layers]
        widest = max(heads * size for heads, size in self._heads)
        self._queries, self._outputs = (keys.new_zeros(most * widest) for _ in range(2))
        self._hidden_TE = keys.new_zeros(most, config.hidden_size)
        # the largest first: the others then find their memory in the pool
        self._replays = {size: record(self._step(size)) for size in reversed(self._sizes)}

    def _step(self, size: int) -> Callable[[Between], None]:
        """What is recorded: the first `size` columns of the input buffer to those of the output buffer."""

        def step(between: Between) -> None:
            tokens_T, positions_T, *slots_GT = self._inputs_NT[:, :size].unbind()
            nothing = positions_T[None, :0]  # in the place of tables, which attention alone reads
            layout, *others = (
                BatchLayout((), slots_T, positions_T, nothing, self._cache.block_size, 0) for slots_T in slots_GT
            )
            layout = replace(layout, others=tuple(others))
            attention = PiecewiseAttention(self._backend, self._cache, layout, self._queries, self._outputs, between)
            self._hidden_TE[:size].copy_(self._net(tokens_T, positions_T, attention))

        return step

    def __len__(self) -> int:
        """How many sizes are recorded."""
        return len(self._sizes)

    def fits(self, rows: Sequence[Row]) -> bool:
        """True if there are not too many tokens."""
        return sum(row.count for row in rows) <= self._sizes[-1]

    @torch.inference_mode()
    def run(
        self,
        rows: Sequence[Row],
        tokens_T: "Tensor | array[int]",
        others: Sequence[Sequence[Sequence[int]]] = (),
        h2d_copy: HostToDeviceCopy | None = None,
        progress: ProgressCounter | None = None,
    ) -> Tensor:
        """The hidden states [T, E] of a step that `fits`: see `ModelRunner.hidden`. The next step writes to the same memory.

        The step's numbers go to the device with those in `h2d_copy`. Does not wait: `progress` counts the layers that are
        submitted."""
        h2d_copy = h2d_copy or HostToDeviceCopy(self._inputs_NT.device)
        given = tokens_T if isinstance(tokens_T, Tensor) else h2d_copy.add(tokens_T)
        layout = BatchLayout.build(rows, self._cache.block_size, h2d_copy, others)
        num_tokens = len(layout.positions_T)
        size = next(size for size in self._sizes if size >= num_tokens)
        self._fill(layout, given if isinstance(given, Tensor) else h2d_copy[given], size)
        paged = PagedAttention(self._backend, self._cache, layout, progress=progress or ProgressCounter())

        def attend(layer: int, *sinks_H: Tensor) -> None:
            q_THD, out_THD = (heads_of(part, num_tokens, *self._heads[layer]) for part in (self._queries, self._outputs))
            paged.attend(layer, q_THD, *sinks_H, out_THD=out_THD)

        self._replays[size](attend)
        return self._hidden_TE[:num_tokens]

    def _fill(self, layout: BatchLayout, tokens_T: Tensor, size: int) -> None:
        """Bring a step's numbers to the input buffer. Padding is token 0 at position 0 of block 0."""
        num_tokens = len(layout.positions_T)
        self._inputs_NT[:, num_tokens:size].zero_()
        slots = [layout.of(group).slots_T for group in range(self._cache.num_groups)]
        for held_T, numbers_T in zip(self._inputs_NT[:, :num_tokens], (tokens_T, layout.positions_T, *slots), strict=True):
            held_T.copy_(numbers_T)
