"""Snapshots of recurrent states: where in a text they are kept, so that later requests with the same prefix go on from there.

A prefix is reused up to the last block of tokens whose state was kept. That is done
- at the last block of a prompt, and at the last block of its answer so far, from where the next turn of a chat goes on;
- where a prompt leaves a text that the prefix cache knows: other prompts may leave it there too;
- once every `spacing` tokens of a long prompt.
A part of a prompt ends where its state is kept, which costs a step. So the first LEAST blocks after a snapshot have none.
Snapshots are evicted in the order of their last use, or with the block of keys and values before them.
"""

from collections.abc import Sequence

from attend.model.engine.blocks import BlockPool
from attend.model.engine.config import EngineConfig
from attend.model.engine.groups import StateGroup
from attend.model.engine.request import Request

LEAST = 4
"""Blocks of a prompt that are not worth a snapshot."""
SPACING = 64
"""Blocks between two snapshots of a long prompt, at least."""
PART = 4
"""The longest prompt takes about one snapshot of so many for this spacing."""


class Snapshots:
    """Which states are kept."""

    def __init__(self, states: StateGroup, texts: BlockPool, config: EngineConfig) -> None:
        """`texts`: the blocks of full attention, whose numbers tell texts apart."""
        self._states, self._texts, self._size = states, texts, config.block_size
        most = max(1, config.num_snapshots)
        self.spacing = max(SPACING, -(-PART * config.max_model_len // (most * self._size))) * self._size
        """Tokens between two snapshots of a long prompt."""
        self.least = LEAST * self._size
        self._planned: set[int] = set()
        """Numbers of the texts whose states the step under way keeps."""
        texts.on_forget = states.discard

    def begin_step(self) -> None:
        """Start the bookkeeping of the step that is planned next."""
        self._planned.clear()

    def border(self, request: Request) -> int:
        """Where the next part of its prompt ends at the latest, as a number of tokens."""
        least = request.snapshot_at + self.least
        last = (request.num_tokens - 1) // self._size * self._size if request.max_tokens else 0
        borders = (request.known_until, (request.num_computed // self.spacing + 1) * self.spacing, last)
        return min([request.num_tokens, *(end for end in borders if end > request.num_computed and end >= least)])

    def should_keep(self, request: Request, end: int, *, pending: bool) -> bool:
        """True if the state after its tokens before `end`, to where a step computes it, is to be kept. `pending`: the last of
        them is not drawn yet.
        """
        if end % self._size:
            return False
        answers = request.max_tokens > 0 and end >= len(request.prompt)
        if not answers and (end == request.num_tokens or end < self.border(request)):
            return False
        number = request.parent
        if pending or not isinstance(number, int):
            return pending
        if self._states.has(number):
            request.snapshot_at = end
            return False
        return number not in self._planned

    def plan(self, request: Request, end: int) -> None:
        """The step that is planned keeps the state after its tokens before `end`."""
        request.snapshot_at = end
        if isinstance(request.parent, int):
            self._planned.add(request.parent)

    def keep(self, request: Request, slot: int) -> None:
        """Make the state in a slot known, which a step has written there at the end of the request's last known block."""
        number = request.parent
        if not isinstance(number, int) or not self._texts.is_known(number) or not self._states.remember(request, slot, number):
            return
        if request.num_known * self._size >= len(request.prompt):
            if request.last_snapshot not in (0, number):
                self._states.discard(request.last_snapshot)
            request.last_snapshot = number

    def note(self, request: Request, start: int, known_blocks: Sequence[tuple[int, int]], usable: int) -> None:
        """Note that of a text's known blocks from `start` on, only the first `usable` have a snapshot behind them."""
        request.awaits = any(number in self._planned for _, number in known_blocks[usable:])
        if not start:
            request.known_until = len(known_blocks) * self._size
