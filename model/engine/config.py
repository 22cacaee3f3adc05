"""The sizes of an engine, as frozen, validated, torch-free records. vLLM calls two of them max_num_seqs (`max_batch_requests`)
and max_num_batched_tokens (`max_batch_tokens`)."""

import math
from dataclasses import dataclass

from attend.model.errors import SettingError

LONGEST_DRAFT = 15
"""Guessed tokens of one request: with the next token they fill the 16 rows of a matrix unit's tile."""


@dataclass(frozen=True, slots=True)
class GroupSize:
    """The blocks of one group of layers, as the scheduler hands them out. See `MemoryGroup`."""

    num_blocks: int
    """Blocks that can be allocated: the reserved block 0 is not counted."""
    window: int | None = None
    """A block goes back once all its tokens are out of sight of later queries; None: at the request's end."""
    has_state: bool = False
    """A block is a slot of states, of whatever size: a request holds one from its admission to its end. The others are for
    snapshots.
    """


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Sizes of one engine. Tokens are counted per step, blocks per KV cache."""

    max_model_len: int
    """Prompt plus output tokens that one request may hold."""
    num_blocks: int
    """KV blocks of the first group of layers, without the reserved block 0."""
    block_size: int = 16
    max_batch_requests: int = 64
    max_batch_tokens: int = 1024
    chunk_size: int = 32
    """A part of a prompt ends at a multiple of so many tokens, counted from the prompt's beginning, where the budget allows."""
    step_goal: float = 0.01
    """Seconds: parts of prompts may fill a step beside running streams up to here, however short it is without them."""
    stream_turns: bool = True
    """True if streams of an owner with many are left out of some steps: where a step's time grows with its streams."""
    prefix_caching: bool = True
    """True if a prompt may begin with blocks that an earlier request has computed."""
    num_snapshots: int = 0
    """Slots of states beside one for each request, where layers keep states: without them prefixes are seldom reused."""
    draft_tokens: int = 0
    """Guessed tokens of a step: the streams share them, and where there are more streams there are none."""
    groups: tuple[GroupSize, ...] = ()
    """In the order of the model's `memory_groups`; empty: one group of full attention."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "groups", self.groups or (GroupSize(self.num_blocks),))
        for name in ("max_model_len", "num_blocks", "block_size", "max_batch_requests", "max_batch_tokens", "chunk_size"):
            if getattr(self, name) < 1:
                raise SettingError(f"{name} must be at least 1; got {getattr(self, name)}")
        assert self.groups[0].num_blocks == self.num_blocks, "num_blocks are those of the first group"
        for group in self.groups:
            self._check_group(group)

    def _check_group(self, group: GroupSize) -> None:
        """Each group holds a request of max_model_len tokens, or with a window what one holds at a time."""
        if group.window is not None:
            assert group.num_blocks >= self.window_blocks(group.window) + self.step_blocks, "a window without room for a step"
        elif not group.has_state and self.max_model_len > group.num_blocks * self.block_size:
            raise SettingError(
                f"max_model_len is {self.max_model_len} tokens, but the KV cache holds {group.num_blocks * self.block_size}: "
                "raise kv_cache_memory or lower max_model_len"
            )

    def window_blocks(self, window: int) -> int:
        """Blocks that a request holds at most under a window, beside `step_blocks` that all requests of a step share.

        A query sees window - 1 tokens before itself. They lie in one block more than they fill, and the next token may
        begin another one.
        """
        guesses = min(self.draft_tokens, LONGEST_DRAFT)
        return -(-(window - 1 + guesses) // self.block_size) + 2

    @property
    def reach(self) -> float:
        """Tokens that a query attends to at most, in the layers that see most."""
        windows = (group.window for group in self.groups if not group.has_state)
        return max((math.inf if window is None else window for window in windows), default=0)

    @property
    def step_blocks(self) -> int:
        """Blocks that the tokens of a step fill: under a window its first ones are out of sight only at its end."""
        return self.max_batch_tokens // self.block_size
