"""The loss curves of a run, and of a second one beside it, as a PNG: python -m attend.model.train.plot RUN [--original RUN]"""

import argparse
from collections.abc import Mapping
from pathlib import Path

from attend.model.train import corpus
from attend.model.train.evaluate import xz_bits_per_byte
from attend.model.train.trainer import Progress, read_run


def plot_losses(runs: Mapping[str, Progress], xz_bits: float, path: Path) -> None:
    """Training loss and held-out bits per byte against the tokens seen, one labelled curve for each run."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    for label, run in runs.items():
        left.plot(*_curve(run.losses), linewidth=0.8, label=label)
        last = f" ({run.held_out[-1][1]:.3f} at the end)" if run.held_out else ""
        right.plot(*_curve(run.held_out), marker=".", markersize=4, linewidth=1.2, label=label + last)
    left.set(title="Training loss", ylabel="nats per token")
    right.axhline(xz_bits, linestyle="--", color="grey", label=f"xz -9e, all of the held-out text ({xz_bits:.2f})")
    right.set(title="A fixed part of the held-out text", ylabel="bits per byte")
    for axes in (left, right):
        axes.set(xlabel="million tokens", xlim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(loc="upper right")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _curve(points: list[tuple[int, float]]) -> tuple[list[float], list[float]]:
    return [tokens / 1e6 for tokens, _ in points], [value for _, value in points]


def main() -> None:
    """Read the flags and the runs' state files, write the PNG."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, help="folder of `attend train`")
    parser.add_argument("--original", type=Path, help="folder of `attend train --original`, the same tokens")
    parser.add_argument("--root", type=Path, default=corpus.standard_library(), help="the Python files; default: the stdlib")
    parser.add_argument("--out", type=Path, default=Path("loss.png"))
    options = parser.parse_args()
    folders = {"this model": options.run, "the choices of 2017": options.original}
    runs = {label: Progress(**read_run(folder)["progress"]) for label, folder in folders.items() if folder is not None}
    plot_losses(runs, xz_bits_per_byte(corpus.read_texts(options.root, held_out=True)), options.out)


if __name__ == "__main__":
    main()
