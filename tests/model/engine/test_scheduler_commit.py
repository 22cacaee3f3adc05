"""What a step's result comes to, with the results written by hand: scores, sums, ends, put off, fewer tokens in a step."""

from array import array

import pytest

from attend.model.engine.plan import Plan, StepResult
from attend.model.engine.request import FinishReason, Output, Request, TokenLogprob
from attend.model.engine.scheduler import Scheduler
from attend.model.errors import EngineFailed
from attend.model.pooling import Pooling
from tests.model.engine.integrity import check_integrity
from tests.model.engine.machines import Clock, ask, sizes


def machine(*requests: Request, **changes) -> Scheduler:
    scheduler = Scheduler(sizes(**changes), Clock())
    for request in requests:
        scheduler.add(request)
    return scheduler


def parts(plan: Plan) -> list[tuple[str, int, int]]:
    return [(item.request.request_id, item.start, item.count) for item in plan.scheduled_tokens]


def drawn(plan: Plan, token: int = 7, **more) -> StepResult:
    """Everybody who draws gets the same token."""
    return StepResult(tokens={item.request.request_id: token for item in plan.scheduled_tokens if item.draws}, **more)


def step(scheduler: Scheduler, token: int = 7, **more) -> list[Output]:
    plan = scheduler.schedule()
    return scheduler.commit(plan, drawn(plan, token, **more))


def check_all_gone(scheduler: Scheduler, ended: int) -> None:
    check_integrity(scheduler)
    scheduler.tables.check_all_free()
    assert (0, 0, ended) == (scheduler.num_running, scheduler.num_waiting, scheduler.num_ended)


def test_a_token_carries_its_score_where_asked_for_and_no_other():
    scheduler = machine(ask("asks", logprobs=0, max_tokens=2), ask("not", max_tokens=2))
    for reason in (None, FinishReason.LENGTH):
        score = TokenLogprob(7, -0.5)
        outputs = step(scheduler, logprobs={"asks": score})
        assert [("asks", (7,), reason, (score,)), ("not", (7,), reason, ())] == [
            (output.request_id, output.token_ids, output.finish_reason, output.logprobs) for output in outputs
        ]
    check_all_gone(scheduler, 2)


@pytest.mark.parametrize("max_tokens", [0, 1, 2])
def test_the_scores_of_a_prompt_come_once_in_its_order_with_the_first_output(max_tokens):
    scheduler = machine(ask("a", range(6), max_tokens, prompt_logprobs=0), max_batch_tokens=2)
    scores = [TokenLogprob(at, -float(at)) for at in range(1, 6)]
    outputs = [step(scheduler, prompt_logprobs={"a": scores[at : at + 2]}) for at in (0, 2, 4)]
    assert [[], []] == outputs[:2]
    [first] = outputs[2]
    assert tuple(scores) == first.prompt_logprobs
    for _ in range(max_tokens - 1):
        [later] = step(scheduler)
        assert () == later.prompt_logprobs
    check_all_gone(scheduler, 1)


@pytest.mark.parametrize(("pooling", "hidden"), [(Pooling.MEAN, [2.0, 4.0]), (Pooling.LAST, [8.0, 16.0])])
def test_a_vector_is_the_last_sum_of_the_prompts_parts_by_its_tokens_and_an_end(pooling, hidden):
    """The sum of a part holds those before it."""
    request = ask("a", range(4), 0, pooling=pooling)
    scheduler = machine(request, max_batch_tokens=2)
    assert [] == step(scheduler, hidden_sums={"a": array("d", [1, 1])})
    assert (2, array("d", [1, 1])) == (request.num_summed, request.hidden_sum)
    [output] = step(scheduler, hidden_sums={"a": array("d", [8, 16])})
    assert (FinishReason.STOP, (), array("d", hidden)) == (output.finish_reason, output.token_ids, output.hidden)
    check_all_gone(scheduler, 1)


@pytest.mark.parametrize(("failed", "learned"), [({}, 1), ({"errors": {"a": "no"}}, 0), ({"put_off": {"a": "no"}}, 0)], ids=str)
def test_what_a_step_costs_is_learned_of_whole_steps_alone(failed, learned):
    scheduler = machine(ask("a"), ask("b"))
    scheduler.commit(Plan(()), StepResult())
    assert 0 == scheduler.cost.num_steps
    step(scheduler, **failed)
    assert learned == scheduler.cost.num_steps


def test_who_is_put_off_begins_again_and_nobody_else():
    requests = [ask(name, [at, 1, 2]) for at, name in enumerate("ab")]
    scheduler = machine(*requests)
    for times in (1, 2):
        assert ["b"] == [output.request_id for output in step(scheduler, put_off={"a": "no memory"})]
        assert [times, 0] == [request.num_preemptions for request in requests]
    assert [("a", 0, 3), ("b", 4, 1)] == sorted(parts(scheduler.schedule()))
    assert 0 == scheduler.num_preemptions, "nobody took its blocks"


@pytest.mark.parametrize(("name", "again"), [("a", ["a", "b"]), ("b", ["b"]), ("c", ["c"])])
def test_who_begins_after_a_block_that_was_not_filled_begins_again_too(name, again):
    """Both find the block of the first four tokens, which the first of them was to fill; c is alone."""
    requests = [ask("a", [*range(4), 5]), ask("b", [*range(4), 6]), ask("c", [9] * 5)]
    scheduler = machine(*requests, prefix_caching=True)
    plan = scheduler.schedule()
    assert [("a", 0, 5), ("b", 4, 1), ("c", 0, 5)] == parts(plan)
    outputs = scheduler.commit(plan, drawn(plan, put_off={name: "no memory"}))
    assert again == [request.request_id for request in requests if request.num_preemptions]
    assert [each for each in "abc" if each not in again] == [output.request_id for output in outputs]
    assert again == [request.request_id for request in requests if not request.num_computed]
    check_integrity(scheduler)


class Grammar:
    """Is complete after so many tokens, or raises."""

    def __init__(self, length: int = 1, error: Exception | None = None) -> None:
        self.left, self.error = length, error

    def advance(self, token: int) -> None:
        if self.error is not None:
            raise self.error
        self.left -= 1

    @property
    def is_finished(self) -> bool:
        return self.left == 0


def test_a_stop_token_is_none_of_the_grammars_business():
    scheduler = machine(ask("a", grammar=Grammar(error=ValueError("no end")), stop_token_ids=frozenset({7})))
    [output] = step(scheduler)
    assert ((7,), FinishReason.STOP) == (output.token_ids, output.finish_reason)


@pytest.mark.parametrize(
    ("error", "told"), [(EngineFailed("out of fuel"), "out of fuel"), (KeyError("secret"), "the grammar failed: KeyError")]
)
def test_a_grammar_that_fails_ends_its_request_without_the_token(error, told):
    """What another library says may quote a caller's text: only its kind is told."""
    scheduler = machine(ask("a", grammar=Grammar(error=error)), ask("b"))
    ended, other = step(scheduler)
    assert ("a", (), FinishReason.ERROR, told) == (ended.request_id, ended.token_ids, ended.finish_reason, ended.error)
    assert ("b", (7,), None) == other[:3]


@pytest.mark.parametrize(
    ("changes", "budgets"),
    [
        ({"max_batch_tokens": 67, "chunk_size": 8, "max_batch_requests": 2}, [33, 16, 8, 8]),
        ({"max_batch_tokens": 64, "chunk_size": 1, "max_batch_requests": 20}, [32, 20, 20]),
        ({"max_batch_tokens": 5, "chunk_size": 8, "max_batch_requests": 2}, [5, 5]),
    ],
)
def test_a_step_is_halved_down_to_a_chunk_and_to_a_token_for_everybody(changes, budgets):
    scheduler = machine(**changes)
    assert scheduler.budget == changes["max_batch_tokens"]
    assert budgets[-1] == scheduler.least_budget
    for budget in budgets:
        scheduler.shrink()
        assert budget == scheduler.budget


@pytest.mark.parametrize(("budget", "least"), [(64, 4), (256, 8), (512, 16)])
def test_beside_a_stream_a_prompt_moves_by_a_thirty_second_of_the_budget_however_slow_a_token_is(budget, least):
    scheduler = machine(ask("stream", [1], 9), max_batch_tokens=budget, chunk_size=4, block_size=4, num_blocks=256)
    step(scheduler)
    scheduler.cost.prompt_budget = lambda *_: 0.0
    scheduler.add(ask("prompt", range(200)))
    assert [("stream", 1, 1), ("prompt", 0, least)] == parts(scheduler.schedule())


REPEATED = [1, 2, 3] * 3
"""After it, and a 1, the first guess is 2, 3, 1, 2."""


def drafts(plan: Plan) -> dict[str, list[int]]:
    return {item.request.request_id: list(item.draft) for item in plan.scheduled_tokens if item.draft}


@pytest.mark.parametrize(("draft_tokens", "length"), [(1, 0), (2, 1), (5, 2), (8, 4)])
def test_streams_share_the_guesses_evenly_or_have_none(draft_tokens, length):
    scheduler = machine(ask("a", REPEATED, 30), ask("b", REPEATED, 30), draft_tokens=draft_tokens)
    step(scheduler, 1)
    plan = scheduler.schedule()
    assert 2 * length == plan.num_drafted == sum(map(len, drafts(plan).values()))
    assert {length} == {len(item.draft) for item in plan.scheduled_tokens}


@pytest.mark.parametrize(
    ("fields", "tokens", "reason"),
    [
        ({"stop_token_ids": frozenset({3})}, (2, 3), FinishReason.STOP),
        ({"stop_token_ids": frozenset({2})}, (2,), FinishReason.STOP),
        ({"max_tokens": 4}, (2, 3, 1), FinishReason.LENGTH),
    ],
)
def test_nothing_follows_the_token_that_ends_an_answer_however_right_it_is(fields, tokens, reason):
    scheduler = machine(ask("a", REPEATED, **{"max_tokens": 30} | fields), draft_tokens=4)
    step(scheduler, 1)
    plan = scheduler.schedule()
    [output] = scheduler.commit(plan, StepResult(tokens={"a": 2}, more={"a": [3, 1][: plan.num_drafted]}))
    assert (tokens, reason) == (output.token_ids, output.finish_reason)
    check_all_gone(scheduler, 1)
