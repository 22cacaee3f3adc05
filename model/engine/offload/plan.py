"""Which blocks of a text are in memory, which on disk, and which are to be read. Plain bookkeeping, from any thread: the step
thread changes the prefix cache meanwhile.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from attend.model.engine.blocks import Parent
from attend.model.engine.offload.store import BlockStore, Key
from attend.model.engine.request import Request
from attend.model.engine.tables import BlockTables

if TYPE_CHECKING:
    from attend.model.engine.offload.writer import Text


class WantedBlocks(NamedTuple):
    """A KV block that is to be read from disk."""

    place: int
    """Number of the block in its text, from 0."""
    group: int
    key: Key
    num_bytes: int
    is_full: bool
    """True if the text cannot go on without it: it is of full attention."""


@dataclass(slots=True, eq=False)
class Load:
    """Blocks of a waiting request that are read from disk."""

    request: Request
    num_computed_blocks: int
    """Blocks of the prefix that can be used without reading."""
    num_blocks: int
    """Blocks of the prefix that can be used once all is read."""
    wanted_blocks: list[WantedBlocks]
    """Blocks to read, in the order of their places in the text."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the records that are still to be read."""
        return sum(wanted.num_bytes for wanted in self.wanted_blocks)

    def in_pieces(self, num_bytes: int) -> Iterator[list[WantedBlocks]]:
        """The blocks to read, in pieces of about so many bytes."""
        piece, size = list[WantedBlocks](), 0
        for wanted in self.wanted_blocks:
            if piece and size + wanted.num_bytes > num_bytes:
                yield piece
                piece, size = [], 0
            piece.append(wanted)
            size += wanted.num_bytes
        if piece:
            yield piece


def root_digest(root: str) -> bytes:
    """The digest that a request's texts begin with, see `Request.root`."""
    return blake2b(root.encode(), digest_size=16).digest()


def next_digest(digest: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a text and the block of tokens after it."""
    return blake2b(digest + array("I", tokens).tobytes(), digest_size=16).digest()


def is_on_disk(tables: BlockTables, store: BlockStore, request: Request) -> bool:
    """True if anything may be on disk of a request's text: its first block, where there is full attention."""
    if tables.full is None:
        return len(store) > 0
    return store.has((next_digest(root_digest(request.root), request.tokens(0, tables.config.block_size)), 0))


def walk(
    tables: BlockTables, root: str, tokens: Sequence[int], num_blocks: int
) -> Iterator[tuple[int, bytes, tuple[int, int] | None]]:
    """Of each block of a text: its place, its digest, and its block and number in memory, None where they are not known."""
    size, digest = tables.config.block_size, root_digest(root)
    parent: Parent | None = root
    for place in range(num_blocks):
        some = tokens[place * size : place * size + size]
        digest = next_digest(digest, some)
        known = None if parent is None else tables.texts.find(parent, some)
        parent = None if known is None else known[1]
        yield place, digest, known


def in_memory(tables: BlockTables, last_block: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
    """Group, block and number there of what is in memory at the end of a known text, which has its last block and number in the
    first group."""
    if tables.full is not None:
        yield 0, *last_block
    for at, group in tables.others:
        if (found := group.pool.find(last_block[1], ())) is not None:
            yield at, *found


def unwritten(tables: BlockTables, store: BlockStore, text: "Text") -> list[list[tuple[int, int, Key]]]:
    """For each group: block, number and key of a text's blocks that are in memory, and not on disk. Blocks that the step under
    way fills are known already; whoever has it fill them brings them here. What is on disk counts as used.
    """
    found: list[list[tuple[int, int, Key]]] = [[] for _ in tables.groups]
    filled = tables.known_before
    for _, digest, known in walk(tables, text.root, text.tokens, text.num_blocks):
        if known is None:
            break
        for at, block, number in in_memory(tables, known):
            if store.has((digest, at)):
                store.note_use((digest, at))
            elif number < filled[at]:
                found[at].append((block, number, (digest, at)))
    return found


def plan(tables: BlockTables, store: BlockStore, sizes: Sequence[int], request: Request, least_tokens: int) -> Load | None:
    """What is to be read for a request, so that `least_tokens` more of its text are known; None where there are not so many.
    `sizes`: bytes of a block of each group.
    """
    size, others = tables.config.block_size, tables.others
    keys: list[tuple[bytes, set[int]]] = []  # by place: its digest, and the groups that have it in memory
    usable = computed = 0
    either, memory = [0] * len(others), [0] * len(others)  # for how many blocks in a row each group has it
    tokens = request.tokens(0, request.num_tokens)
    for place, digest, known in walk(tables, request.root, tokens, (len(tokens) - 1) // size):
        have = set() if known is None else {at for at, _, _ in in_memory(tables, known)}
        if tables.full is not None and known is None and not store.has((digest, 0)):
            break
        keys.append((digest, have))
        for row, (at, _) in enumerate(others):
            memory[row] = memory[row] + 1 if at in have else 0
            either[row] = either[row] + 1 if at in have or store.has((digest, at)) else 0
        least = [min(place + 1, group.span) for _, group in others]
        if all(map(int.__ge__, either, least)):
            usable = place + 1
        if known is not None and all(map(int.__ge__, memory, least)):
            computed = place + 1
    if (usable - computed) * size < least_tokens:
        return None
    wanted = [
        WantedBlocks(place, at, (digest, at), sizes[at], at == 0 and tables.full is not None)
        for place, (digest, have) in enumerate(keys[:usable])
        for at, group in enumerate(tables.groups)
        if at not in have and place >= usable - group.span
    ]
    return Load(request, computed, usable, wanted)
