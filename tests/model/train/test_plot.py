"""The plot shows each run once, under its name, against the tokens it has seen."""

import matplotlib
import pytest

from attend.model.train.plot import plot_losses
from attend.model.train.trainer import Progress

RUNS = {
    "one": Progress(losses=[(1_000_000, 5.0), (2_000_000, 3.0)], held_out=[(2_000_000, 1.5)]),
    "other": Progress(losses=[(1_000_000, 6.0)], held_out=[(1_000_000, 2.5), (2_000_000, 2.125)]),
}


@pytest.fixture
def figures(monkeypatch) -> list:
    """The figures that were drawn, kept from being closed until they were looked at."""
    matplotlib.use("Agg")
    from matplotlib import pyplot

    seen, close = [], pyplot.close
    monkeypatch.setattr(pyplot, "close", seen.append)
    yield seen
    close("all")


@pytest.mark.parametrize("names", [["one"], ["one", "other"]])
def test_each_run_is_a_labelled_curve(figures, tmp_path, names):
    plot_losses({name: RUNS[name] for name in names}, 1.34, tmp_path / "loss.png")
    ((losses, bits),) = (figure.axes for figure in figures)
    assert names == [text.get_text() for text in losses.get_legend().get_texts()]
    assert [[value for _, value in RUNS[name].losses] for name in names] == [list(line.get_ydata()) for line in losses.lines]
    *curves, xz = bits.lines
    assert [[seen / 1e6 for seen, _ in RUNS[name].held_out] for name in names] == [list(line.get_xdata()) for line in curves]
    assert [1.34, 1.34] == list(xz.get_ydata())
    shown = [text.get_text() for text in bits.get_legend().get_texts()]
    assert [name in text and f"{RUNS[name].held_out[-1][1]:.3f}" in text for name, text in zip(names, shown, strict=False)]
    assert "1.34" in shown[-1]
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_was_never_measured_can_be_drawn(figures, tmp_path):
    plot_losses({"new": Progress()}, 1.34, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").is_file()
