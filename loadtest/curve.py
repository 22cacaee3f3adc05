"""A page of latency against load: one figure, and the table that it shows."""

import io
from collections.abc import Mapping
from html import escape
from typing import Any

from loadtest.measures import PERCENTILES
from loadtest.stream import ITL, TOTAL, TTFT

TITLES = {TTFT: "time to the first token", ITL: "time between two messages", TOTAL: "whole answer"}
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>Latency against load</title>
<style>
body{{font:15px sans-serif;margin:2em;max-width:75em}}
td,th{{padding:.2em .8em;text-align:right}}
svg{{max-width:100%;height:auto}}
</style>
<h1>Latency against load</h1>
<p>{load}</p>
<p>{verdict}</p>
{figure}
<table><tr>{head}</tr>
{body}
</table>
<p>Milliseconds. One line is one number of users, without the first seconds of it.</p>
</html>
"""


def page(summary: Mapping[str, Any], limits: Mapping[str, float | None]) -> str:
    """The page of a summary (`report.write`); `limits` are the objectives in milliseconds by measure."""
    phases, transports = summary["phases"], list(summary["transports"])
    measures = [(transport, measure, percent) for transport in transports for measure in (TTFT, ITL) for percent in (50, 95)]
    columns = ["users", "answers_per_s", "tokens_per_s", "failed", "refused"]
    head = columns + [f"{transport} {measure} p{percent}" for transport, measure, percent in measures]
    lines = [[phase[name] for name in columns] + [value(phase, *each) for each in measures] for phase in phases]
    return PAGE.format(
        load=escape(", ".join(f"{name} {what}" for name, what in summary["load"].items())),
        verdict=escape("; ".join(summary["missed"]) or "Every objective was met."),
        figure=figure(phases, transports, limits) if phases else "<p>No phase was long enough for a point.</p>",
        head="".join(f"<th>{escape(name)}</th>" for name in head),
        body="\n".join("<tr>" + "".join(f"<td>{'' if one is None else one}</td>" for one in line) + "</tr>" for line in lines),
    )


def value(phase: Mapping[str, Any], transport: str, measure: str, percent: int) -> float | None:
    """A percentile in milliseconds, where the phase has it."""
    found: float | None = phase.get(transport, {}).get(measure, {}).get(f"p{percent}")
    return found


def figure(phases: list[Mapping[str, Any]], transports: list[str], limits: Mapping[str, float | None]) -> str:
    """An SVG: a row for each measure, a column for each transport, over all answers a second."""
    from matplotlib.figure import Figure  # here, because only a report needs it and it takes a second

    drawing = Figure(figsize=(6 * len(transports), 9), layout="constrained")
    grid = drawing.subplots(len(TITLES), len(transports), squeeze=False, sharex=True)
    ordered = sorted(phases, key=lambda phase: phase["users"])  # beyond the capacity the curve may come back
    for column, transport in enumerate(transports):
        for row, (measure, title) in enumerate(TITLES.items()):
            axes = grid[row][column]
            for percent in PERCENTILES:
                points = [(phase["answers_per_s"], value(phase, transport, measure, percent)) for phase in ordered]
                points = [point for point in points if point[1] is not None]
                axes.plot([x for x, _ in points], [y for _, y in points], marker="o", label=f"p{percent}")
            if limits.get(measure) is not None:
                axes.axhline(limits[measure], linestyle="--", color="grey", label="objective of p95")
            axes.set(title=f"{transport}: {title}", ylabel="ms", ylim=(0, None))
            axes.legend()
        grid[-1][column].set_xlabel("answers/s, both transports together")
    written = io.StringIO()
    drawing.savefig(written, format="svg")
    return written.getvalue()[written.getvalue().index("<svg") :]
