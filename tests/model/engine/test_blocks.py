"""The block pool gives every block to one owner at a time, all or nothing, and takes back only what it gave."""

import pytest

from attend.model.engine.blocks import BlockPool
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
