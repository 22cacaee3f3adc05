"""What is claimed from repeated measurements: medians, intervals, ratios, verdicts. Made-up numbers, no timing."""

import asyncio
import json
import math
import random

import pytest

from loadtest.bench.figures import Comparison, Figure, Report, interval, take_turns
from loadtest.bench.gate import judge, slower


def covered(count, tries=4000):
    """How often the interval of `count` skewed values holds their true median."""
    chance = random.Random(count)
    found = 0
    for _ in range(tries):
        low, high = interval([chance.expovariate(1) for _ in range(count)])
        found += low <= math.log(2) <= high
    return found / tries


@pytest.mark.parametrize("count", [6, 9, 15, 30])
def test_the_interval_holds_the_true_median_as_often_as_it_says(count):
    assert 0.94 < covered(count)


def test_more_values_make_the_interval_narrower_and_few_leave_the_whole_range():
    assert interval(range(5)) == (0, 4)
    assert interval(range(8)) == (0, 7)
    assert interval(range(9)) == (1, 7)
    assert interval(range(15)) == (3, 11)
    assert interval([3.0]) == (3.0, 3.0)


def test_a_comparison_divides_the_first_by_each_other_turn_by_turn():
    both = Comparison("W1", "tokens/s", {"ours": [4.0, 9.0, 6.0], "theirs": [2.0, 3.0, 2.0], "silent": [0.0, 1.0, 1.0]})
    assert both.ratio("theirs").values == (2, 3, 3)
    assert both.cells() == ("6", "2", "1", "3.00 (2.00 to 3.00)", "")
    assert [figure.what for figure in both.figures()] == ["W1, ours", "W1, theirs", "W1, silent", "W1, ours / theirs"]


@pytest.mark.parametrize("warm_up", [0, 1])
def test_contestants_take_turns_from_either_end_and_warm_up_is_not_counted(warm_up):
    order = []

    def contestant(name):
        async def measure():
            order.append(name)
            return len(order)

        return measure

    found = asyncio.run(take_turns({name: contestant(name) for name in "ab"}, 2, warm_up))
    assert len(order) == 4 + 2 * warm_up and all(len(values) == 2 for values in found.values())
    pairs = ["".join(order[at : at + 2]) for at in range(0, len(order), 2)]
    assert pairs == (["ba", "ab", "ba"] if warm_up else ["ba", "ab"])


def test_each_row_is_printed_and_filed_at_once_with_every_value_and_the_machine(tmp_path, capsys):
    path, said = tmp_path / "deep" / "found.json", ""
    report = Report(path, bench="steps", model="S")
    for at in (1, 2):
        report.add([Figure(f"steps {at}", "ms", (1.0, 2.0))], facts=at)
        said += capsys.readouterr().out
        found = json.loads(path.read_text())
        assert [each["values"] for each in found["figures"]] == [[1.0, 2.0]] * at
        assert said == found["table"] + "\n" and said.count("\n") == 2 + at
        assert (found["bench"], found["model"], found["facts"]) == ("steps", "S", at)
    assert found["provenance"]["machine"]["cores"] >= 1 and found["provenance"]["machine"]["torch"]
    assert [each.name for each in path.parent.iterdir()] == ["found.json"]


def test_a_loss_that_every_pair_shows_closes_the_gate():
    assert slower([0.9, 0.92, 0.95, 0.91, 0.9, 0.93, 0.94, 0.9, 0.96])


@pytest.mark.parametrize(
    "found",
    [
        [0.5, 1.2, 0.6, 1.1, 0.9, 0.8, 1.0, 0.7, 0.95],  # noise
        [0.98] * 9,  # a small loss
        [0.97] * 9,  # exactly at the limit
        [1.3] * 9,  # a gain
        [0.2] + [1.0] * 8,  # one busy moment
    ],
    ids=str,
)
def test_noise_and_small_losses_leave_the_gate_open(found):
    assert not slower(found)


def test_a_work_that_became_slower_is_named():
    base = [100.0] * 9
    kept = Comparison("W1", "tokens/s", {"this tree": base, "HEAD~1": base})
    lost = Comparison("W2", "tokens/s", {"this tree": [90.0] * 9, "HEAD~1": base})
    assert [judge(each, "HEAD~1")[:: len(judge(each, "HEAD~1")) - 1] for each in (kept, lost)] == [
        ("W1", "kept"),
        ("W2", "slower"),
    ]
