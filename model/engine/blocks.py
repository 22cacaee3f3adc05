"""The block pool of the KV cache: which blocks are held, by reference counts, and which hold a known text. Plain bookkeeping;
`KVCache` has the tensors.

A full block whose tokens are known can still be found after its last holder has freed it, until the pool evicts it,
to allocate it again: that is the prefix cache. A block is known by its tokens and by the blocks before it, so a lookup compares
token ids and does not depend on a hash.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

Parent = str | int
"""The predecessor of a block's text: the number of the block before it, or for a first block its adapter and salt."""


class BlockPool:
    """Blocks 1 .. num_blocks, each free or held by some requests. Block 0 is reserved for padding and never given out."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._holders: Counter[int] = Counter()
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks + 1))
        """The first is given out next."""
        self._known: dict[tuple[Parent, tuple[int, ...]], int] = {}
        self._keys: dict[int, tuple[Parent, tuple[int, ...]]] = {}  # the inverse of _known
        self._numbers: dict[int, int] = {}  # of the known blocks
        self._alive: set[int] = set()  # the same numbers
        self.next_number = 1
        """Known blocks are numbered in the order in which they became known; no number is used twice."""
        self.on_forget: Callable[[int], None] = lambda number: None
        """Called for each block that becomes unfindable, with its number."""

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, known ones among them."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, or None and no change where fewer are free. Known blocks are taken last, the longest unused first."""
        if count > len(self._free):
            return None
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        self.forget(blocks)
        self._holders.update(blocks)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Hold known blocks once more."""
        for block in blocks:
            assert block in self._keys, f"block {block} has no known text"
            self._free.pop(block, None)
            self._holders[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Give a request's blocks back. Freeing a block that is not held is a bug of ours: it raises, and changes nothing."""
        blocks = list(blocks)
        assert set(blocks) <= self._holders.keys() and len(set(blocks)) == len(blocks), f"blocks {blocks} are not all held"
        for block in reversed(blocks):  # the end of a text is given up before its beginning
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]
                self._free[block] = None
                self._free.move_to_end(block, last=block in self._keys)

    def find(self, parent: Parent, tokens: Sequence[int]) -> tuple[int, int] | None:
        """(block, its number) of the block that holds exactly `tokens` after `parent`. From any thread."""
        block = self._known.get((parent, tuple(tokens)))
        number = None if block is None else self._numbers.get(block)
        return None if block is None or number is None else (block, number)

    def holds(self, block: int, number: int) -> bool:
        """True if the block has the text of this number still. From any thread."""
        return self._numbers.get(block) == number

    def is_known(self, number: int) -> bool:
        """True if a block has the text of this number."""
        return number in self._alive

    def remember(self, parent: Parent, tokens: Sequence[int], block: int) -> int:
        """Make a held block findable; returns the number of the block that holds this text, which may be an older one."""
        key = (parent, tuple(tokens))
        if key not in self._known:
            self._known[key], self._keys[block], self._numbers[block] = block, key, self.next_number
            self._alive.add(self.next_number)
            self.next_number += 1
        return self._numbers[self._known[key]]

    def forget(self, blocks: Iterable[int]) -> None:
        """Make blocks unfindable; requests that hold them keep them."""
        for block in blocks:
            key = self._keys.pop(block, None)
            if key is not None:
                del self._known[key]
                number = self._numbers.pop(block)
                self._alive.remove(number)
                self.on_forget(number)

    def forget_since(self, number: int, but: range = range(0)) -> set[int]:
        """Make every block unfindable that became known as `number` or later, `but` as some of them; returns them."""
        blocks = {block for block, its in self._numbers.items() if its >= number and its not in but}
        self.forget(blocks)
        return blocks

    def check_all_free(self) -> None:
        """Assert that no block is held and none is lost. It only counts, since an engine that goes idle checks it each time."""
        assert not self._holders and len(self._free) == self.num_blocks, "blocks are lost or doubled"


class Texts:
    """Numbers of texts, as `BlockPool` gives them, without blocks: a text is known after its first blocks were reused."""

    def __init__(self, most: int) -> None:
        self._numbers: OrderedDict[tuple[Parent, tuple[int, ...]], int] = OrderedDict()
        self._most = most
        self._next = 1

    def find(self, parent: Parent, tokens: Sequence[int]) -> tuple[int, int] | None:
        """(0, its number) of the text that has `tokens` after `parent`; None where it was not seen lately. From any thread."""
        key = (parent, tuple(tokens))
        number = self._numbers.get(key)
        if number is None:
            return None
        with suppress(KeyError):  # another thread asks, and it was forgotten meanwhile
            self._numbers.move_to_end(key)
        return 0, number

    def remember(self, parent: Parent, tokens: Sequence[int], block: int) -> int:
        """The number of a text. Where there are too many, the one that was seen the longest ago is forgotten."""
        known = self.find(parent, tokens)
        if known is not None:
            return known[1]
        self._numbers[parent, tuple(tokens)] = self._next
        self._next += 1
        if len(self._numbers) > self._most:
            self._numbers.popitem(last=False)
        return self._next - 1
