"""The loss curve as a PNG."""

import math
from pathlib import Path

from model.train.trainer import Progress

XZ_BITS_PER_BYTE = 1.34
"""What `xz -9e` needs on the held-out files of CPython 3.11.7, as one stream: a line to beat."""


def plot_losses(progress: Progress, final_bits: float, path: Path) -> None:
    """Training loss and held-out bits per byte against the tokens seen."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4), layout="constrained")
    left.plot([tokens / 1e6 for tokens, _ in progress.losses], [loss for _, loss in progress.losses], linewidth=0.8)
    left.set(title="Training loss", xlabel="million tokens", ylabel="nats per token", ylim=(0, math.log(8192)))
    right.plot([tokens / 1e6 for tokens, _ in progress.held_out], [bits for _, bits in progress.held_out], marker=".")
    right.axhline(XZ_BITS_PER_BYTE, linestyle="--", color="grey", label=f"xz -9e: {XZ_BITS_PER_BYTE} bits per byte")
    right.set(title=f"Held-out text, part of it; all of it at the end: {final_bits:.3f}", xlabel="million tokens")
    right.set(ylabel="bits per byte", ylim=(0, None))
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
