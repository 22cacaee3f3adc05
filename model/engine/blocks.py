"""The pool of KV blocks: who owns which. Plain bookkeeping; the tensors are the cache's."""

from collections.abc import Iterable


class BlockPool:
    """Blocks 1 .. num_blocks, each free or owned once. Block 0 is reserved for padding and never given out."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks, 0, -1))
        self._owned: set[int] = set()

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks, or None and no change where fewer are free."""
        if count > len(self._free):
            return None
        blocks = [self._free.pop() for _ in range(count)]
        self._owned.update(blocks)
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Give blocks back. Freeing what is not owned is our bug, and changes nothing."""
        blocks = list(blocks)
        assert self._owned.issuperset(blocks) and len(set(blocks)) == len(blocks), f"blocks {blocks} are not all owned"
        self._owned.difference_update(blocks)
        self._free.extend(reversed(blocks))

    def check_integrity(self, held: Iterable[int]) -> None:
        """free + held == all, and nothing twice, where `held` are the blocks that requests say they own."""
        held = list(held)
        assert sorted(held) == sorted(self._owned), f"requests hold {sorted(held)}, the pool gave {sorted(self._owned)}"
        assert sorted([*self._free, *held]) == list(range(1, self.num_blocks + 1)), "blocks are lost or doubled"
