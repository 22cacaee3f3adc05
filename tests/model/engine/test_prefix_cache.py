"""A beginning that several requests share is computed once, and nobody's tokens change by it."""

import random

import pytest

from attend.model.engine.blocks import BlockPool
from attend.model.engine.plan import StepResult
from attend.model.params import SamplingParams
from tests.model.checkpoints import VOCAB, tiny_config, tiny_decoder
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


def test_a_shared_block_is_free_only_when_its_last_holder_lets_go():
    pool = BlockPool(2)
    block = pool.allocate(1)
    pool.remember("", [1], *block)
    pool.share(block)
    pool.free(block)
    assert 1 == pool.num_free
    pool.check_integrity(block)
    pool.free(block)
    assert 2 == pool.num_free
    with pytest.raises(AssertionError, match="not all held"):
        pool.free(block)


def test_the_older_of_two_blocks_with_the_same_text_is_the_known_one():
    pool = BlockPool(3)
    first, second = pool.allocate(2)
    assert pool.remember("", [1], first) == pool.remember("", [1], second)
    pool.free([second])
    pool.check_integrity([first])
    assert first == pool.find("", [1])[0]


def test_what_became_known_since_a_number_can_be_forgotten():
    pool = BlockPool(3)
    blocks = pool.allocate(3)
    pool.remember("a", [1], blocks[0])
    since = pool.next_number
    pool.remember("b", [1], blocks[1])
    pool.remember("c", [1], blocks[2])
    pool.forget_since(since)
    assert [True, False, False] == [pool.find(name, [1]) is not None for name in "abc"]
    pool.check_integrity(blocks)


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


def test_requests_share_only_within_one_salt():
    machine = engine()
    for name, salt, found in [("a", "", 0), ("b", "x", 0), ("c", "x", 8), ("d", "", 8), ("e", "y", 0)]:
        request = ask(name, PROMPT, 1, cache_salt=salt)
        run(machine, [request])
        assert found == request.num_cached


def test_a_request_that_wants_its_prompt_scored_computes_all_of_it():
    machine = tiny_engine(tiny_decoder(tiny_config()), prefix_caching=True, block_size=SIZE)
    for name in "ab":
        request = ask(name, PROMPT, 1, prompt_logprobs=0)
        outputs = run(machine, [request])[name]
        assert (0, 10) == (request.num_cached, len(outputs[0].prompt_logprobs))
    assert (0, 0) == (machine.stats().num_prefix_queries, machine.stats().num_prefix_hits)


def test_a_preempted_request_finds_what_is_left_of_its_blocks():
    machine = engine(num_blocks=8, max_model_len=32)
    old, young = ask("old", range(4), 25), ask("young", [9] * 13, 10)
    answered = answers(machine, [old, young])
    assert 1 <= young.num_preemptions
    assert 0 == young.num_cached, "it counts what was found at the first admission"
    assert answered == {"old": fake_answer(ask("", range(4), 25)), "young": fake_answer(ask("", [9] * 13, 10))}
    returns = [start for name, start, _ in computed(machine) if name == "young"]
    assert any(start > 0 and start % SIZE == 0 and start < max(returns[:at]) for at, start in enumerate(returns) if at)


def test_what_a_failed_step_should_have_written_is_not_found():
    machine = engine()
    machine.runner.error = RuntimeError("a step fell over")
    run(machine, [ask("a", PROMPT, 1)])
    machine.runner.error = None
    request = ask("b", PROMPT, 1)
    assert fake_answer(ask("", PROMPT, 1)) == answers(machine, [request])["b"]
    assert 0 == request.num_cached


def test_a_failed_step_is_forgotten_also_of_a_request_that_was_aborted_meanwhile():
    scheduler = engine().scheduler
    scheduler.add(ask("a", PROMPT, 1))
    plan = scheduler.schedule()
    scheduler.abort("a")
    scheduler.commit(plan, StepResult(errors={"a": "the step failed"}))
    scheduler.add(again := ask("b", PROMPT, 1))
    scheduler.schedule()
    assert 0 == again.num_cached


def test_a_waiting_request_holds_none_of_the_blocks_it_has_found():
    machine = engine(num_blocks=8, max_model_len=32)
    run(machine, [ask("a", PROMPT, 1)])
    machine.add(ask("large", range(20, 45), 7))  # seven blocks
    machine.step()
    machine.add(ask("b", PROMPT, 1))
    machine.step()
    machine.scheduler.check_integrity()
    assert 1 == machine.stats().num_waiting


# A request that waits.

LONG = tuple(range(200))  # 50 blocks


def step(machine) -> None:
    machine.step()
    machine.scheduler.check_integrity()


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
    assert not request.room
    assert len(seen) <= 20


@pytest.mark.parametrize("kind", ["known", "preempted"])
def test_a_request_that_waited_gets_its_own_tokens_whatever_was_lost_meanwhile(kind):
    """The other's growth takes known blocks: what is found at the admission counts, not what was found before."""
    machine, request = waiting(kind)
    before = machine.stats().num_prefix_hits
    while machine.has_work:
        step(machine)
    assert fake_answer(ask("", LONG, 60))[0] == request.output
    assert kind == "preempted" or 0 < machine.stats().num_prefix_hits - before == request.num_cached < 196


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


def test_nothing_is_looked_up_where_it_is_switched_off():
    machine = fake_engine(prefix_caching=False)
    requests = [ask(name, PROMPT, 1) for name in "ab"]
    run(machine, requests)
    assert [0, 0] == [request.num_cached for request in requests]
    assert (0, 0) == (machine.stats().num_prefix_queries, machine.stats().num_prefix_hits)


# The network.


@pytest.mark.parametrize("budget", [5, 256])
def test_tokens_are_the_same_cold_and_warm_in_any_batch(budget):
    net, dice = tiny_decoder(tiny_config()), random.Random(3)
    stem = dice.choices(range(VOCAB), k=40)
    prompts = [stem[: dice.randint(1, 40)] + dice.choices(range(VOCAB), k=dice.randint(0, 3)) for _ in range(24)]
    sampling = [SamplingParams(temperature=at % 2) for at in range(24)]
    asked = [(f"r{at}", prompt, 6, how) for at, (prompt, how) in enumerate(zip(prompts, sampling, strict=True))]

    def crowd():
        return [ask(name, prompt, tokens, sampling=how, seed=9) for name, prompt, tokens, how in asked]

    sizes = {"block_size": SIZE, "max_batch_tokens": budget}
    cold = {request.request_id: answers(tiny_engine(net, **sizes), [request])[request.request_id] for request in crowd()}
    warm = tiny_engine(net, prefix_caching=True, num_blocks=40, max_model_len=60, **sizes)
    assert cold == answers(warm, crowd())
    assert cold == answers(warm, reversed(crowd()))
    assert 200 < warm.stats().num_prefix_hits


def test_who_shares_what_a_failed_step_should_have_written_computes_it_anew():
    machine = engine(max_batch_tokens=4 * SIZE, chunk_size=SIZE, num_blocks=64)
    writer = ask("writer", [1, 2, 3, 4, 5, 6], 5)
    machine.add(writer)
    machine.step()
    machine.add(ask("turn", [7], 1))  # the next step's prompts go by age
    machine.step()
    late = ask("late", [*writer.prompt, *writer.output, *[3] * 8], 4)
    machine.add(ask("long", [9] * 60, 2))
    machine.add(late)
    machine.runner.error = RuntimeError("a step fell over")
    assert {"writer", "long"} == {output.request_id for output in machine.step()}
    machine.runner.error = None
    assert answers(machine, [])["late"] == fake_answer(late)
