"""A beginning that several requests share is computed once, and nobody's tokens change by it."""

import pytest

from attend.model.engine.blocks import BlockPool
from tests.model.checkpoints import tiny_config, tiny_decoder
from tests.model.engine.integrity import check_integrity
from tests.model.engine.machines import answers, ask, fake_answer, fake_engine, run, tiny_engine, told

SIZE = 4
PROMPT = tuple(range(1, 12))  # two blocks and three tokens


def engine(**changes):
    return fake_engine(prefix_caching=True, block_size=SIZE, **changes)


def computed(machine) -> list[tuple[str, int, int]]:
    """(request, first token, tokens) of everything that was computed, step by step."""
    return [item for plan in machine.runner.plans for item in plan]


# The pool.


def test_a_block_is_found_by_exactly_its_tokens_and_what_came_before():
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    number = pool.remember("", [1, 2], first)
    pool.remember(number, [3, 4], second)
    assert (first, number) == pool.find("", [1, 2])
    assert second == pool.find(number, [3, 4])[0]
    for parent, tokens in [("", [1, 3]), ("salt", [1, 2]), ("", [3, 4]), (number, [1, 2]), (number + 1, [3, 4]), ("", [1])]:
        assert pool.find(parent, tokens) is None


def test_a_known_block_outlives_its_holder_until_the_pool_needs_it():
    pool = BlockPool(2)
    block, other = pool.allocate(2)
    pool.remember("", [7], block)
    pool.free([block, other])
    assert 2 == pool.num_free
    assert [other] == pool.allocate(1), "an unknown block is given out before a known one"
    assert block == pool.find("", [7])[0]
    assert [block] == pool.allocate(1)
    assert pool.find("", [7]) is None


def test_the_longest_unused_text_goes_first_and_its_end_before_its_beginning():
    pool = BlockPool(4)
    tables = [pool.allocate(2), pool.allocate(2)]
    for name, (head, tail) in zip("ab", tables, strict=True):
        pool.remember(pool.remember(name, [1], head), [2], tail)
    for table in tables:
        pool.free(table)
    pool.share(tables[0])
    pool.free(tables[0])  # used again: now b is the older one
    assert [*reversed(tables[1]), *reversed(tables[0])] == pool.allocate(4)


# The scheduler.


def test_answers_to_one_prompt_compute_it_once_even_in_one_step():
    machine = engine()
    requests = [ask(f"r{at}", PROMPT, 3, seed=5, answer_index=at) for at in range(8)]
    found = answers(machine, requests)
    assert [("r0", 0, 11), *((f"r{at}", 8, 3) for at in range(1, 8))] == computed(machine)[:8]
    assert all(
        found[request.request_id] == fake_answer(ask("", PROMPT, 3, seed=5, answer_index=request.answer_index))
        for request in requests
    )
    assert [0] + [8] * 7 == [request.num_cached for request in requests]
    assert (88, 56) == (machine.stats().num_prefix_queries, machine.stats().num_prefix_hits)


@pytest.mark.parametrize(("length", "found"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
def test_at_least_the_last_token_is_computed(length, found):
    machine = engine()
    run(machine, [ask("a", PROMPT[:length], 1)])
    again = ask("b", PROMPT[:length], 1)
    run(machine, [again])
    assert found == again.num_cached
    assert ("b", found, length - found) == computed(machine)[-1]


def test_a_conversation_goes_on_from_its_own_answer():
    machine = engine()
    first = ask("a", PROMPT, 6)
    reply, _ = told(run(machine, [first])["a"])
    second = ask("b", [*PROMPT, *reply, 1, 2], 2)
    run(machine, [second])
    assert 16 == second.num_cached, "the last token of an answer is never computed; the four blocks before it are"


def test_a_request_that_wants_its_prompt_scored_computes_all_of_it():
    machine = tiny_engine(tiny_decoder(tiny_config()), prefix_caching=True, block_size=SIZE)
    for name in "ab":
        request = ask(name, PROMPT, 1, prompt_logprobs=0)
        outputs = run(machine, [request])[name]
        assert (0, 10) == (request.num_cached, len(outputs[0].prompt_logprobs))
    assert (0, 0) == (machine.stats().num_prefix_queries, machine.stats().num_prefix_hits)


# A request that waits.

LONG = tuple(range(200))  # 50 blocks


def step(machine) -> None:
    machine.step()
    check_integrity(machine.scheduler)


def waiting(kind: str):
    """An engine, and a long request that waits in it: one whose prompt the cache knows, or one that was preempted."""
    machine, request = engine(num_blocks=67, max_model_len=264), ask("long", LONG, 60)
    if kind == "known":
        run(machine, [ask("before", LONG, 1)])
        machine.add(ask("large", range(500, 580), 60))
        step(machine)
        machine.add(request)
    else:
        machine.add(ask("old", [7], 150))
        machine.add(request)
        while not request.num_preemptions:
            step(machine)
    step(machine)
    return machine, request


@pytest.mark.parametrize("kind", ["known", "preempted"])
def test_what_a_step_costs_does_not_depend_on_the_length_of_a_request_that_waits(kind):
    machine, request = waiting(kind)
    pool = machine.scheduler.tables.groups[0].pool
    seen, find = [], pool.find
    pool.find = lambda parent, tokens: seen.append(tokens) or find(parent, tokens)
    for _ in range(20):
        step(machine)
    assert not request.reserved_tokens
    assert len(seen) <= 20


def test_a_request_that_waits_starts_once_the_blocks_it_shares_have_become_known():
    """Answers to one prompt that fits the cache once: they run side by side as soon as the first has computed it."""
    machine = engine(num_blocks=70, max_model_len=264, max_batch_tokens=40)
    requests = [ask(f"r{at}", LONG, 8, answer_index=at) for at in range(4)]
    for request in requests:
        machine.add(request)
    most = 0
    while machine.has_work:
        step(machine)
        most = max(most, machine.stats().num_running)
    assert 4 == most
    assert [196] * 3 == [request.num_cached for request in requests[1:]]
    assert [fake_answer(ask("", LONG, 8, answer_index=at))[0] for at in range(4)] == [request.output for request in requests]


# The network.
