"""Where the parts of a prompt end, for sizes that do not divide each other."""

import pytest

from tests.model.engine.machines import ask, fake_engine


def parts_of(lengths: list[int], **sizes) -> list[list[tuple[str, int, int]]]:
    """The steps that compute prompts of these lengths, which come together and want one token each."""
    engine = fake_engine(num_blocks=400, **sizes)
    for at, length in enumerate(lengths):
        engine.add(ask(f"r{at}", range(length), 1))
    while engine.has_work:
        engine.step()
    return [plan for plan in engine.runner.plans if plan]


@pytest.mark.parametrize("chunk", [1, 3, 4, 7, 64])
@pytest.mark.parametrize("budget", [1, 2, 10, 13, 64])
def test_a_prompt_that_fits_its_share_exactly_is_one_part(chunk, budget):
    sizes = {"max_batch_tokens": budget, "chunk_size": chunk}
    assert parts_of([budget], **sizes) == [[("r0", 0, budget)]]
    if budget > 4:
        assert parts_of([4, budget - 4], **sizes) == [[("r0", 0, 4), ("r1", 0, budget - 4)]]


@pytest.mark.parametrize("chunk", [1, 3, 4, 7])
@pytest.mark.parametrize("budget", [7, 10, 13])
@pytest.mark.parametrize("length", [8, 11, 14, 23, 50])
def test_a_longer_one_is_cut_at_multiples_of_the_chunk_and_into_no_more_parts_than_that_takes(chunk, budget, length):
    steps = parts_of([length], max_batch_tokens=budget, chunk_size=chunk)
    ends = [start + count for ((_, start, count),) in steps]
    assert ends[-1] == length
    assert all(end % chunk == 0 for end in ends[:-1])
    whole = budget // chunk * chunk
    assert all(count >= min(whole, length - start) for ((_, start, count),) in steps)
    assert len(steps) <= -(-length // whole)


def test_only_the_first_part_of_a_step_ends_within_a_chunk_and_only_where_the_budget_is_smaller():
    assert parts_of([6, 6], max_batch_tokens=4, chunk_size=5) == [
        [("r0", 0, 4)],
        [("r0", 4, 2)],
        [("r1", 0, 4)],
        [("r1", 4, 2)],
    ]
