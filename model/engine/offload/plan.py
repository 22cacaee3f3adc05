"""Which blocks of a text are in memory, which on disk, and which are worth reading. Plain bookkeeping, from any thread.

The step thread changes the prefix cache meanwhile. So what is found here is checked there before it is used.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from attend.model.engine.blocks import Parent
from attend.model.engine.offload.store import BlockStore, Key
from attend.model.engine.request import Request
from attend.model.engine.tables import BlockTables


@dataclass(slots=True, eq=False)
class Load:
    """Blocks of a waiting request that are read from disk."""

    request: Request
    known: list[tuple[int, int]]
    """Block and number of the blocks of full attention that are in memory, from the first on."""
    computed: int
    """Blocks of the prefix that could be used without reading."""
    num_blocks: int
    """And once all is read."""
    wanted: list[tuple[int, int, Key]]
    """Group, place in the text, and key of each that is to be read."""
    lent: dict[tuple[int, int], int] = field(default_factory=dict)
    """Where each goes, by group and place."""
    filled: set[tuple[int, int]] = field(default_factory=set)
    is_held: bool = False
    """Whether the blocks of `known` and `lent` are held for it."""


def root_digest(root: str) -> bytes:
    """The digest that a request's texts begin with, see `Request.root`."""
    return blake2b(root.encode(), digest_size=16).digest()


def next_digest(digest: bytes, tokens: Sequence[int]) -> bytes:
    """The digest of a text and the block of tokens after it."""
    return blake2b(digest + array("I", tokens).tobytes(), digest_size=16).digest()


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


def in_memory(tables: BlockTables, known: tuple[int, int]) -> Iterator[tuple[int, int, int]]:
    """Group, block and number there of what is in memory at the end of a known text."""
    if tables.full is not None:
        yield 0, *known
    for at, group in tables.others:
        if (found := group.pool.find(known[1], ())) is not None:
            yield at, *found


def unwritten(
    tables: BlockTables, store: BlockStore, root: str, tokens: Sequence[int], num_blocks: int
) -> list[list[tuple[int, int, Key]]]:
    """For each group: block, number and key of a text's blocks that are in memory, and not on disk. Blocks that the step under
    way fills are known already; whoever has it fill them brings them here.
    """
    found: list[list[tuple[int, int, Key]]] = [[] for _ in tables.groups]
    filled = tables.known_before
    for _, digest, known in walk(tables, root, tokens, num_blocks):
        if known is None:
            break
        for at, block, number in in_memory(tables, known):
            if number < filled[at] and not store.has((digest, at)):
                found[at].append((block, number, (digest, at)))
    return found


def plan(tables: BlockTables, store: BlockStore, request: Request, least_tokens: int) -> Load | None:
    """What is to be read for a request, so that `least_tokens` more of its text are known; None where there are not so many."""
    size, others = tables.config.block_size, tables.others
    known_blocks: list[tuple[int, int]] = []
    keys: list[tuple[bytes, set[int]]] = []  # by place: its digest, and the groups that have it in memory
    usable = computed = 0
    either, memory = [0] * len(others), [0] * len(others)  # for how many blocks in a row each group has it
    for place, digest, known in walk(
        tables, request.root, request.tokens(0, request.num_tokens), (request.num_tokens - 1) // size
    ):
        have = set() if known is None else {at for at, _, _ in in_memory(tables, known)}
        if tables.full is not None and known is None and not store.has((digest, 0)):
            break
        keys.append((digest, have))
        known_blocks += [] if known is None else [known]
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
    spans = [group.span for group in tables.groups]
    wanted = [
        (at, place, (digest, at))
        for place, (digest, have) in enumerate(keys[:usable])
        for at, span in enumerate(spans)
        if at not in have and place >= usable - span
    ]
    return Load(request, known_blocks[:usable] if tables.full is not None else [], computed, usable, wanted)
