"""Every block is free or held, as often as requests hold it, and every request is in one place."""

from collections import Counter
from collections.abc import Iterable, Sequence

from attend.model.engine.blocks import BlockPool
from attend.model.engine.groups import FullGroup, KVCacheGroup, StateGroup, WindowGroup
from attend.model.engine.request import Request
from attend.model.engine.scheduler import Scheduler
from attend.model.engine.tables import BlockTables


def check_pool(pool: BlockPool, blocks: Iterable[int]) -> None:
    """`blocks` are those that are held."""
    counts = Counter(blocks)
    assert counts == pool._holders, f"requests hold {dict(counts)}, the pool gave {dict(pool._holders)}"
    assert sorted([*pool._free, *counts]) == list(range(1, pool.num_blocks + 1)), "blocks are lost or doubled"
    assert {block: key for key, block in pool._known.items()} == pool._keys, "a block is known under another's text"
    assert pool._keys.keys() == pool._numbers.keys(), "a known block has no number"
    assert set(pool._numbers.values()) == pool._alive, "a number without a block"


def check_group(group: KVCacheGroup, requests: Sequence[Request]) -> None:
    """Requests hold what they need in a group, and no more than they may."""
    tables = [request.tables[group._at] for request in requests]
    held = [{block for block in table if block} for table in tables]
    for request, table, own in zip(requests, tables, held, strict=True):
        if isinstance(group, FullGroup):
            assert len(table) * group._block_size >= request.reserved_tokens, f"{request.request_id} lacks blocks"
        elif isinstance(group, WindowGroup):
            assert len(own) <= group._claim(request.reserved_tokens), f"{request.request_id} holds {len(own)} blocks"
        elif isinstance(group, StateGroup):
            assert table and request.slot and 0 not in table, "a request without a state"
            own.add(request.slot)
    if isinstance(group, StateGroup):
        assert len({request.slot for request in requests}) == len(requests), "two requests with one state"
    if isinstance(group, WindowGroup):
        claims = sum(group._claim(request.reserved_tokens) for request in requests)
        assert group._claimed == claims <= group._claimable, "lost claims"
    check_pool(group.pool, [block for own in held for block in own])


def check_tables(tables: BlockTables, running: Sequence[Request]) -> None:
    """The blocks of all groups are free, or these requests'."""
    for group in tables.groups:
        check_group(group, running)


def check_integrity(scheduler: Scheduler) -> None:
    """Every request is in one place, and its blocks are its own and enough."""
    running, waiting, requests = scheduler._running, scheduler._waiting, scheduler._by_id.values()
    assert len(requests) == len(waiting) + len(running)
    assert not any(request.reserved_tokens or any(request.tables) or request.num_computed for request in waiting)
    assert all(request.num_known * scheduler.config.block_size <= request.reserved_tokens for request in requests)
    assert all(request.reserved_tokens >= request.num_computed for request in running)
    check_tables(scheduler.tables, running)
