"""The laws that need a GPU, as sets of tests, each with a limit of its own."""

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from loadtest.bench.machine import threads
from loadtest.bench.on_gpu.session import Left, Session, run, tail

WORKERS = 8
"""Processes that compile kernels at the same time, and share the GPU, at most."""
TEST_SECONDS = 90
"""A test that hangs in a kernel ends its process; the other tests go on."""
SHOWN = 5
TRITON = "tests/model/net/triton"
INTERPRETED = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@dataclass(frozen=True)
class Law:
    """`words` name the tests for pytest. Seconds: `least` is what they need, `most` is when they are cut."""

    what: str
    words: tuple[str, ...]
    least: float
    most: float
    devices: int = 1
    wide: bool = False
    """Many: on all cores."""


SMOKE = Law("laws of the kernels at the sizes of 8B", (f"{TRITON}/smoke_laws.py",), 20, 60)
STEPS = Law(
    "laws of recorded steps, and of steps ahead",
    (*(f"tests/model/engine/test_{name}.py" for name in ("graphs", "piecewise_graphs", "async_scheduling")), "-k", "on_a_gpu"),
    15,
    60,
)
RANKS = Law("laws of ranks on GPUs of their own", ("tests/model/parallel/test_ranks.py", "-k", "on_gpus"), 20, 60, devices=2)
WIDE = (
    Law("laws of attention, every way on this device", ("tests/model/net/laws", "-k", "cuda"), 20, 100, wide=True),
    Law(
        "laws of the kernels, all of them",
        tuple(
            f"{TRITON}/{name}.py"
            for name in ("laws", "decoder_laws", "delta_laws", "sampling_laws", "codes_laws", "ranks_laws", "startup_laws")
        ),
        50,
        240,
        wide=True,
    ),
)


def hold(session: Session, law: Law, folder: Path, left: Left, more: Mapping[str, str] | None = None) -> None:
    """Run a set of tests, and note how many passed; what failed, was cut, or did not run at all is noted as failed."""
    log, told = (folder / f"{re.sub('[^a-z0-9]+', '-', law.what.lower())}.{end}" for end in ("log", "jsonl"))
    told.unlink(missing_ok=True)
    spread = ["-n", min(WORKERS, threads()), "--dist", "load"] if law.wide and find_spec("xdist") else []
    plugins = ["no:cacheprovider", "loadtest.bench.on_gpu.report"]
    if more is INTERPRETED:
        plugins.append("tests.model.net.triton.interpreting")
    command = [sys.executable, "-m", "pytest", "-q", "-W", "default", *(word for name in plugins for word in ("-p", name))]
    limit = [f"--timeout={TEST_SECONDS}", "--timeout-method=thread"]
    began = session.clock()
    code = run([*command, *limit, *spread, *law.words], log, left, {"BENCH_REPORT": str(told), **(more or {})})
    seconds = session.clock() - began
    text = told.read_text() if told.is_file() else ""
    lines = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]  # the last may be cut
    counts = Counter(line["outcome"] for line in lines)
    shown = f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped, {seconds:.0f} s"
    cut = "; CUT: its time was over" if code is None else ""
    values = {"what": law.what, "seconds": round(seconds, 1), "cut": code is None, **counts}
    session.note("law", f"{law.what}: {shown}{cut}", **values)
    bad = [f"{line['test']}: {line['why']}" for line in lines if line["outcome"] == "failed"]
    if bad:
        session.lose(law.what, "; ".join([*bad[:SHOWN], *([f"and {len(bad) - SHOWN} more"] if len(bad) > SHOWN else [])]))
    elif code is None:
        session.lose(law.what, f"cut after {seconds:.0f} s, {counts['passed']} passed")
    elif code != 0 or not counts["passed"]:
        session.lose(law.what, f"pytest ended with {code}, {counts['passed']} passed; the end of {log}:\n{tail(log)}")
