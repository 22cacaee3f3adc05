"""What a GPU shows in ten minutes: right answers, laws of its kernels, tokens/s: attend bench gpu --minutes 9 --json gpu.jsonl

--smoke does what fits into 90 seconds: what is here, the answers of the shipped model, the laws of the kernels at the sizes of
8B, and one decode and one prompt of 8B. Begin with it: model/net/triton/GPU.md says what to expect, and how to send it.

In this order: what is here; answers, compared with float32 on the CPU; laws of the kernels at the sizes of 8B; speed of Attend,
8B first, each with its share of what the device was measured to do; speed of `transformers` (compiled, static cache); all other
laws. Weights are random, drawn on the device. Each row is printed and filed as soon as it is known. A part that fails, or is
cut, costs no other part. All ends before --minutes, and at SIGTERM, with a table of what there is.

Needs torch, Triton and numpy. It runs from a tree that is not installed: python -m loadtest.bench.gpu

Exit code 0: everything ran, and is right. 3: something failed, was wrong, or was left out. 2: nothing can run here.
"""

import argparse
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from attend.model.config import DEFAULT_MODEL
from attend.model.shapes import write_config
from loadtest.bench.contestant import OURS, TREE
from loadtest.bench.figures import table
from loadtest.bench.machine import threads
from loadtest.bench.on_gpu import rates
from loadtest.bench.on_gpu.session import Left, Session, ask, run, say, tail
from loadtest.bench.shapes import FOLDER
from loadtest.provenance import own_version

RESERVE = 45
"""Seconds before the end of --minutes at which everything is over, or a tenth of them: whoever set the limit kills at it."""
MINUTES, SMOKE_MINUTES = 9, 1.5
PEER = "transformers"
ROWS = TREE / "loadtest" / "out" / "gpu.jsonl"
ON_GPU = ["llama-8b", "llama-1b", "Q"]
"""The most telling first."""
WORKERS = 8
"""Processes that compile kernels at the same time, and share the GPU, at most."""
TEST_SECONDS = 90
"""A test that hangs in a kernel ends its process; the other tests go on."""
TRITON, ENGINE = "tests/model/net/triton", "tests/model/engine/test_"
INTERPRETED = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
SMOKE_LAWS = (f"{TRITON}/smoke_laws.py",)
LAWS = {
    "laws of recorded steps, and of steps ahead": (
        *(f"{ENGINE}{name}.py" for name in ("graphs", "piecewise_graphs", "async_scheduling")),
        *("-k", "on_a_gpu"),
    ),
    "laws of ranks on GPUs of their own": ("tests/model/parallel/test_ranks.py", "-k", "on_gpus"),
    "laws of attention, every way on this device": ("tests/model/net/laws", "-k", "cuda"),
    "laws of the kernels, all of them": tuple(
        f"{TRITON}/{name}.py"
        for name in ("laws", "decoder_laws", "delta_laws", "sampling_laws", "codes_laws", "ranks_laws", "startup_laws")
    ),
}
"""The words that name each for pytest."""


@dataclass(frozen=True)
class Part:
    """`run` is given what is left of its seconds, which are `most`; parts before it leave it its `least`."""

    what: str
    run: Callable[[Left], None]
    least: float
    most: float


def perform(session: Session, parts: Sequence[Part]) -> None:
    """One part after the other."""
    for at, part in enumerate(parts):
        given = min(part.most, session.left - sum(each.least for each in parts[at + 1 :]))
        if given < part.least / 2:
            session.lose(part.what, f"not run: {max(0.0, given):.0f} s were left for it")
            continue
        try:
            part.run(session.time_left(given))
        except Exception as error:  # a fault of this program costs the other parts nothing either
            session.lose(part.what, f"{type(error).__name__}: {error}")


def look(session: Session, device: str, folder: Path, seconds: float) -> str:
    """Note what is here; returns why nothing can run, in a sentence, or nothing where something can."""
    session.facts = {"attend": own_version()}
    for found in ask(session, "what is here", folder / "here.log", session.time_left(seconds), "device", "here", device):
        session.facts |= found
        session.note("here", f"Here: {found}")
    version = str(session.facts.get("torch"))
    if device == "cpu" and version[:1].isdigit():
        return ""
    if "device" not in session.facts:
        why = session.facts.get("no device", "looking for one did not end")
        return f"nothing can run here: torch {version} sees no CUDA device: {why} (--device cpu tries the command)"
    return ""


def compare(session: Session, name: str, target: Path, load_format: str, device: str, folder: Path, left: Left) -> None:
    """Compare the answers of a model with the equation's: a row, `WRONG` where a token is not excused by rounding."""
    log = folder / f"answers-{name.replace(' ', '-')}.log"
    for found in ask(session, f"answers of {name}", log, left, "answers", target, device, load_format):
        wrong = found["wrong"]
        if device == "cuda" and (found["backend"], found["recorded"]) != ("triton", True):
            wrong.append(f"backend is {found['backend']}, steps are recorded: {found['recorded']}")
        same = f"{found['tokens'] - found['other']} of {found['tokens']} tokens are the best of float32"
        near = f"the others at most {found['margin']:.3g} below it, where rounding explains {found['allowed']:.3g}"
        about = f"answers of {name} ({found['backend']}, {found['dtype']}, recorded: {found['recorded']})"
        shown = f"{about}: {same}, {near}" + (f"; {wrong[0]}, {len(wrong)} in all" if wrong else "")
        session.note("answers", f"{'WRONG' if wrong else 'right'} {shown}", what=name, right=not wrong, shown=shown, **found)


def weigh(session: Session, size: int, device: str, folder: Path, left: Left) -> None:
    """Measure the device itself."""
    for found in ask(session, "speed of the device", folder / "speed.log", left, "device", "speed", device, size):
        shown = f"{found['bytes'] / 1e9:.0f} GB/s, {found['flops'] / 1e12:.1f} TFLOP/s in bfloat16"
        session.note("speed", f"speed of the device: {shown}, {found.get('clocks shown', '')}", **found)


def hold(session: Session, what: str, words: Sequence[str], folder: Path, device: str, left: Left) -> None:
    """Run a set of tests, and note what pytest says at its end."""
    log = folder / f"{re.sub('[^a-z0-9]+', '-', what.lower())}.log"
    spread = ["-n", str(min(WORKERS, threads())), "--dist", "load"] if find_spec("xdist") else []
    plugins = ["no:cacheprovider", *(["tests.model.net.triton.interpreting"] if device == "cpu" else [])]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rfE",
        "-W",
        "default",
        *(word for name in plugins for word in ("-p", name)),
    ]
    limit = [f"--timeout={TEST_SECONDS}", "--timeout-method=thread"]
    code = run([*command, *limit, *spread, *words], log, left, INTERPRETED if device == "cpu" else None)
    said = tail(log, 1) if code is not None else "CUT: its time was over"
    session.note("law", f"{what}: {said}", what=what, said=said)
    if code != 0 or "passed" not in said:
        session.lose(what, f"{said}; the end of {log}:\n{tail(log)}")


def plan(session: Session, options: argparse.Namespace) -> list[Part]:
    """All parts, the most telling first: answers before any speed, ours before any peer, the many laws last."""
    device, folder, cuda = options.device, options.folder, options.device == "cuda"
    works: tuple[rates.Work, ...] = rates.GPU_WORKS if cuda else rates.CPU_WORKS
    works = works[::2][:2] if options.smoke else works  # a decode of one request, and a prompt

    def law(what: str, words: Sequence[str], least: float, most: float) -> list[Part]:
        action = partial(hold, session, what, words, folder, device)
        return [] if options.no_laws else [Part(what, action, least, most)]

    def speed(shape: str, who: str, least: float, most: float) -> Part:
        action = partial(rates.measure, session, shape, who, works, folder, device)
        return Part(f"{shape}, {who}", action, least, most)

    def answers(name: str, target: Path, load_format: str, least: float, most: float) -> Part:
        action = partial(compare, session, name, target, load_format, device, folder)
        return Part(f"answers of {name}", action, least, most)

    times = options.minutes / SMOKE_MINUTES if options.smoke else 1.0
    shipped = answers("the shipped model", DEFAULT_MODEL, "auto", 10 * times, 25 * times)
    smoke = law("laws of the kernels at the sizes of 8B", SMOKE_LAWS, 10 * times, 25 * times if options.smoke or cuda else 240)
    size, drawn = (8192, "Q") if cuda else (512, "S")
    weighed = Part("speed of the device", partial(weigh, session, size, device, folder), 4 * times, 10 * times)
    if options.smoke:
        return [shipped, *smoke, weighed, speed(options.shape[0], OURS, 30 * times, 60 * times)]
    parts = [shipped, answers(f"shape {drawn}", write_config(drawn, folder), "dummy", 30, 90), *smoke, weighed]
    parts += [speed(shape, OURS, 50, 100) for shape in options.shape]
    parts += [speed(shape, PEER, 20, 100) for shape in options.shape]
    for what, words in LAWS.items() if cuda else ():
        if "ranks on GPUs" not in what or session.facts.get("devices", 1) > 1:
            parts += law(what, words, 20, 240)
    return parts


def finish(session: Session, sentence: str = "") -> int:
    """Print the table, what is wrong first, and file it; returns the exit code."""
    answers, failed = session.of("answers"), session.of("failed")
    wrong = [f"WRONG {each['shown']}" for each in answers if not each["right"]]
    ended = [f"Ended by {session.ended_by}."] if session.ended_by else []
    shown = [*wrong, table(rates.HEADER, rates.rows(session))]
    shown += [f"right: {each['shown']}" for each in answers if each["right"]]
    shown += [f"{each['what']}: {each['said']}" for each in session.of("law")]
    shown += ["Failed:", *(f"{each['what']}: {each['why']}" for each in failed)] if failed else []
    shown += [*ended, *([sentence] if sentence else [])]
    bad = bool(wrong or failed or ended)
    code = 2 if sentence else 3 if bad else 0
    text = "\n".join(["", *shown, *([] if code else ["Nothing failed."])])
    session.note("end", text, code=code, ended_by=session.ended_by, table=text)
    return code


def read_flags(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="what fits into 90 s; of a GPU the first thing to run")
    parser.add_argument("--minutes", type=float, help=f"for everything (default {MINUTES}, with --smoke {SMOKE_MINUTES})")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries the command itself")
    parser.add_argument("--no-laws", action="store_true", help="answers and speed alone")
    parser.add_argument("--folder", type=Path, default=FOLDER / "gpu", help="for the logs of all parts")
    parser.add_argument("--json", type=Path, default=ROWS, help="rows are appended here (default loadtest/out/gpu.jsonl)")
    options = parser.parse_args(words)
    options.shape = ON_GPU if options.device == "cuda" else ["S"]
    options.minutes = options.minutes or (SMOKE_MINUTES if options.smoke else MINUTES)
    for folder in (options.folder, options.json.parent):
        folder.mkdir(parents=True, exist_ok=True)
    return options


def main(words: list[str] | None = None) -> None:
    """Run everything."""
    began, options = time.monotonic(), read_flags(words)
    seconds = 60 * options.minutes
    session = Session(began + seconds - min(RESERVE, seconds / 10), options.json)
    session.listen()
    sentence = look(session, options.device, options.folder, 20 * options.minutes / SMOKE_MINUTES if options.smoke else 60)
    if not sentence:
        perform(session, plan(session, options))
    code = finish(session, sentence)
    say(f"Every row is in {options.json}, the logs are in {options.folder}.")
    sys.exit(code)


if __name__ == "__main__":
    main()
