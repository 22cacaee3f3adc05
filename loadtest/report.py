"""What is written of a run: percentiles and sums as JSON."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from loadtest.measures import PERCENTILES, Row, Rows, total, used_transports
from loadtest.provenance import identity, provenance
from loadtest.stream import ITL, REFUSED, TOTAL, TPOT, TTFT

LOAD = ("loop", "prompts", "long_chars", "max_tokens", "source_rate", "num_users")
"""Options that a summary repeats."""


def write(options: argparse.Namespace, rows: Rows, misses: Sequence[str]) -> None:
    """Write summary.json into the folder that was asked for; times in milliseconds."""
    folder = Path(options.report)
    folder.mkdir(parents=True, exist_ok=True)
    summary = {
        "provenance": provenance(options.seed, {"HTTP": identity(options.host, options.ca_file)} if options.host else {}),
        "load": {name: getattr(options, name) for name in LOAD},
        "missed": list(misses),
        "failed": total(rows, TOTAL).failures,
        "answers": total(rows, TOTAL).count,
        "refused": total(rows, REFUSED).count,
        "transports": {
            transport: {
                measure: {"count": row.count} | {f"p{percent}": row.percentile(percent) for percent in PERCENTILES}
                for measure in (TTFT, ITL, TPOT, TOTAL)
                for row in [rows.get((measure, transport), Row())]
            }
            for transport in used_transports(rows)
        },
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
