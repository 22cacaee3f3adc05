"""The block pool gives every block to one owner at a time, all or nothing, and takes back only what it gave."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from attend.model.engine.blocks import BlockPool
from tests.conftest import examples
from tests.model.engine.integrity import check_pool


@pytest.mark.parametrize("wrong", [[0], [9], [4], [-1], [1, 1], [1, 4], [1, 2, 1]], ids=str)
def test_freeing_what_is_not_held_raises_and_changes_nothing(wrong):
    """The reserved block, one beyond the pool, a free one, one twice, and a held one beside a free one."""
    pool = BlockPool(4)
    held = pool.allocate(3)
    assert [1, 2, 3] == sorted(held)
    with pytest.raises(AssertionError, match="not all held"):
        pool.free(wrong)
    assert 1 == pool.num_free
    check_pool(pool, held)


def test_a_table_other_than_the_pools_fails_the_check():
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    for claimed in ([first], [first, second, 3], [first, first, second], [first, 4], []):
        with pytest.raises(AssertionError):
            check_pool(pool, claimed)
    check_pool(pool, [second, first])


def test_a_lost_block_fails_the_check():
    pool = BlockPool(4)
    held = pool.allocate(2)
    pool._free.popitem()
    with pytest.raises(AssertionError, match="lost or doubled"):
        check_pool(pool, held)


def test_the_check_of_an_idle_pool_sees_a_block_that_is_held_and_one_that_is_lost():
    pool = BlockPool(4)
    pool.check_all_free()
    held = pool.allocate(3)
    with pytest.raises(AssertionError, match="lost or doubled"):
        pool.check_all_free()
    pool.free(held)
    pool.check_all_free()
    pool._free.popitem()
    with pytest.raises(AssertionError, match="lost or doubled"):
        pool.check_all_free()


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of allocations and frees, right and wrong, against a list of tables."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(7)
        self.tables: list[list[int]] = []

    @property
    def held(self) -> list[int]:
        return [block for table in self.tables for block in table]

    @rule(count=st.integers(0, 9))
    def allocate(self, count):
        fits = count <= 7 - len(self.held)
        blocks = self.pool.allocate(count)
        assert fits == (blocks is not None)
        if blocks is not None:
            assert count == len(blocks)
            self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def free(self, data):
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.free(table)

    @rule(blocks=st.lists(st.integers(-1, 9), min_size=1, max_size=4))
    def free_wrongly(self, blocks):
        if set(blocks) <= set(self.held) and len(set(blocks)) == len(blocks):
            return
        with pytest.raises(AssertionError):
            self.pool.free(blocks)

    @invariant()
    def every_block_has_one_place(self):
        assert len(self.held) == len(set(self.held))
        assert set(self.held) <= set(range(1, 8))
        assert 7 == self.pool.num_free + len(self.held)
        check_pool(self.pool, self.held)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=examples(40), stateful_step_count=30, derandomize=True, deadline=None)
