"""What a soak finds: a figure that rises, blocks that are kept, calls that failed; and not what rises at first."""

from collections import Counter
from dataclasses import replace

import pytest

from loadtest.soak import EVERY, GROWTH, Sample, plot, report, slope
from loadtest.troubles import TROUBLES, TroubleCounts

FLAT = [Sample(at * EVERY, 800.0, 600, 250, 40, 8.0, 0.5) for at in range(100)]
IDLE = [*FLAT, replace(FLAT[-1], seconds=101 * EVERY, blocks=0.0)]
NONE_FAILED = {"failed": 0, "refused": 2}
HARMLESS = TroubleCounts(Counter(dict.fromkeys(TROUBLES, 9)), Counter())


def test_what_stays_is_good():
    lines, good = report(IDLE, NONE_FAILED, HARMLESS, 40)
    assert good
    assert len(lines) == len(GROWTH) + 2


@pytest.mark.parametrize("name", GROWTH)
def test_whatever_grows_is_found(name):
    """A little more in a minute than it may, with saw teeth on it."""
    each = 1.2 * GROWTH[name] / 60

    def grown(one: Sample) -> Sample:
        return replace(one, **{name: getattr(one, name) + one.seconds * each + one.seconds % 7})

    samples = [*map(grown, IDLE)]
    lines, good = report(samples, NONE_FAILED, HARMLESS, 40)
    assert not good
    assert [line for line in lines if "GREW" in line] == [line for line in lines if line.startswith(name)]


def test_what_grows_while_the_server_warms_up_is_left_out():
    samples = [replace(one, memory_mb=800 + 50 * min(1, at / 15)) for at, one in enumerate(FLAT)]
    assert slope(samples, "memory_mb") == pytest.approx(0, abs=0.01)


@pytest.mark.parametrize(("samples", "summary"), [(FLAT, NONE_FAILED), (IDLE, NONE_FAILED | {"failed": 1})])
def test_blocks_that_are_kept_and_calls_that_fail_are_found(samples, summary):
    assert not report(samples, summary, HARMLESS, 40)[1]


def test_the_plot_is_an_svg(tmp_path):
    pytest.importorskip("matplotlib")
    plot(IDLE, tmp_path / "soak.svg")
    assert "<svg" in (tmp_path / "soak.svg").read_text(encoding="utf-8")


def test_harm_that_ends_otherwise_is_found():
    assert not report(IDLE, NONE_FAILED, replace(HARMLESS, otherwise=Counter({"deadline passes: OK": 1})), 40)[1]
