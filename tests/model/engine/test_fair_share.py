"""Owners take turns: however much one asks for, another's call waits for a few steps, and both get their shares."""

from collections import Counter
from itertools import count

import pytest

from attend.model.engine.engine import Engine
from tests.model.engine.machines import ask, run, told
from tests.model.engine.test_fairness import chunks, machine, steps_until_first

BATCH = {"max_batch_requests": 16, "num_blocks": 4096, "max_model_len": 4096}


def calls(owner: str, number: int, prompt: int, answer: int, **fields) -> list:
    """Requests of one owner with prompts of their own."""
    return [ask(f"{owner}{at}", [at % 16] * prompt, answer, owner=owner, **fields) for at in range(number)]


def served(engine: Engine, steps: int, top_up=lambda: None) -> Counter[str]:
    """Tokens of steps by owner."""
    tokens = Counter[str]()
    for _ in range(steps):
        top_up()
        engine.step()
        for name, _, number in engine.runner.plans[-1]:
            tokens[name.rstrip("0123456789")] += number
    return tokens


@pytest.mark.parametrize(("prompt", "answer"), [(8, 900), (500, 900), (2000, 1)])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_three_calls_without_limits_delay_another_owner_by_two_steps_and_one_part(prompt, answer, async_scheduling):
    """The step under way, and one in which both have a part."""
    engine = machine(**BATCH)
    engine.async_scheduling = async_scheduling
    for request in calls("alice", 320, prompt, answer, priority=9):
        engine.add(request)
    for _ in range(50):
        engine.step()
    assert engine.scheduler.num_running == 16
    engine.add(ask("bob", [1, 2, 3], 1, owner="bob", priority=0))
    assert steps_until_first(engine, "bob") <= 3 + async_scheduling


def test_blocks_are_given_up_for_an_owner_who_has_none():
    engine = machine(max_batch_requests=64, num_blocks=100, max_model_len=400)
    alice = calls("alice", 8, 90, 200)
    for request in alice:
        engine.add(request)
    for _ in range(60):
        engine.step()
    assert engine.scheduler.tables.num_free < 20
    bob = ask("bob", [5] * 150, 3, owner="bob")
    engine.add(bob)
    assert steps_until_first(engine, "bob") <= 2 * chunks(150)
    outputs = run(engine, [])
    assert all(told(outputs[request.request_id])[1] is not None for request in alice)


def test_who_asks_for_more_than_others_hold_waits_for_room():
    """Nobody is stopped for a prompt that is larger than all that the others have."""
    engine = machine(max_batch_requests=64, num_blocks=100, max_model_len=790)
    for request in calls("alice", 8, 20, 60):
        engine.add(request)
    for _ in range(30):
        engine.step()
    engine.add(ask("bob", [5] * 700, 3, owner="bob"))
    outputs = run(engine, [])
    assert engine.scheduler.num_preemptions == 0
    assert len(outputs) == 9


@pytest.mark.parametrize("weight", [1.0, 3.0])
@pytest.mark.parametrize("kind", ["streams", "prompts"])
def test_two_owners_who_ask_without_end_are_served_by_their_weights(weight, kind):
    """However many requests each has, and however long they are."""
    engine, numbers = machine(**BATCH), count()

    def top_up() -> None:
        have = Counter(request.owner for request in engine.scheduler._by_id.values())
        for owner, most, share in (("alice", 60, weight), ("bob", 20, 1.0)):
            for _ in range(most - have[owner]):
                prompt, answer = (
                    (4, 40 if owner == "alice" else 15) if kind == "streams" else (300 if owner == "alice" else 120, 1)
                )
                engine.add(ask(f"{owner}{next(numbers)}", [3] * prompt, answer, owner=owner, weight=share))

    served(engine, 200, top_up)
    tokens = served(engine, 1000, top_up)
    assert tokens["alice"] / tokens["bob"] == pytest.approx(weight, rel=0.15)


def test_idleness_saves_up_nothing():
    engine = machine(**BATCH)
    for request in calls("alice", 100, 4, 100):
        engine.add(request)
    served(engine, 300)
    for request in calls("bob", 100, 4, 100):
        engine.add(request)
    tokens = served(engine, 300)
    assert tokens["bob"] < 1.3 * tokens["alice"]


def test_a_request_is_let_in_at_others_cost_once():
    """One that must give its room back then waits for its turn."""
    engine = machine(max_batch_requests=2, num_blocks=64, max_model_len=256)
    for request in calls("alice", 10, 4, 30):
        engine.add(request)
    for request in calls("bob", 10, 4, 30):
        engine.add(request)
    run(engine, [])
    assert engine.scheduler.num_preemptions <= 20
