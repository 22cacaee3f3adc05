"""What a GPU shows in ten minutes: right answers, laws of its kernels, tokens/s: attend bench gpu --minutes 9 --json gpu.jsonl

--smoke does what fits into 90 seconds: what is here, the answers of the shipped model, the laws of the kernels at the sizes of
8B, and one decode and one prompt of 8B. Begin with it: model/net/triton/GPU.md says what to expect, and how to send it.

In this order: what is here; answers, compared with float32 on the CPU; laws of the kernels at the sizes of 8B; speed of Attend,
8B first, each with its share of what the device was measured to do; speed of `transformers` (compiled, static cache); all other
laws. Weights are random, drawn on the device. Each row is printed and filed as soon as it is known. A part that fails, or is
cut, costs no other part. All ends before --minutes, and at SIGTERM, with a table of what there is.

Needs torch, Triton and numpy; what else is missing is named, and what needs it is left out. It runs from a tree that is not
installed: python -m loadtest.bench.gpu

Exit code 0: everything ran, and is right. 3: something failed, was wrong, or was left out. 2: nothing can run here.
"""

import argparse
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from attend.model.config import DEFAULT_MODEL
from attend.model.shapes import SHAPES
from loadtest.bench.contestant import OURS, TREE
from loadtest.bench.figures import table
from loadtest.bench.on_gpu import here, laws, rates
from loadtest.bench.on_gpu.session import Left, Session, json_lines, module, run, say, tail
from loadtest.bench.shapes import FOLDER, write_config

RESERVE = 45
"""Seconds before the end of --minutes at which everything is over, or a tenth of them: whoever set the limit kills at it."""
LOOK, SMOKE_LOOK = 60, 20
"""Seconds that looking at what is here may take."""
MINUTES, SMOKE_MINUTES = 9, 1.5
SMOKE_MEASURING = 12
"""Seconds of a contestant's time that are not for its start."""
SMOKE_SECONDS = {
    "answers of the shipped model": (10, 25),
    laws.SMOKE.what: (10, 25),
    "speed of the device": (4, 10),
    f"8B, {OURS}": (30, 60),
    f"S, {OURS}": (30, 60),
}
"""The parts of --smoke: the seconds that each needs, and when it is cut; more --minutes are more of both. No GPU has shown yet
what they take.
"""
PEER = "transformers"
ROWS = TREE / "loadtest" / "out" / "gpu.jsonl"
ON_GPU = ["8B", "1B", "Q"]
"""The most telling first."""


@dataclass(frozen=True)
class Part:
    """`run` is given what is left of its seconds, which are `most`. With less than `least` it does not begin.

    All but the `first` parts leave the `last` ones their `least`. `needs` are packages.
    """

    what: str
    run: Callable[[Left], None]
    least: float
    most: float
    needs: tuple[str, ...]
    place: Literal["first", "middle", "last"]


def perform(session: Session, parts: Sequence[Part], lacking: Mapping[str, str]) -> None:
    """One part after the other. `lacking`: packages that cannot be used, and why."""
    ready = [part for part in parts if not set(part.needs) & set(lacking)]
    for part in parts:
        if part not in ready:
            why = "; ".join(f"{name} {lacking[name]}" for name in part.needs if name in lacking)
            session.lose(part.what, f"not run: {why}")
    for at, part in enumerate(ready):
        kept = sum(each.least for each in ready[at + 1 :] if each.place == "last" and part.place != "first")
        given = min(part.most, session.left - kept)
        if given < part.least:
            session.lose(part.what, f"not run: {max(0.0, given):.0f} s were left for it, and it needs {part.least:.0f}")
            continue
        try:
            part.run(session.time_left(given))
        except Exception as error:  # a fault of this program costs the other parts nothing either
            session.lose(part.what, f"{type(error).__name__}: {error}")
            traceback.print_exc()


def look(session: Session, device: str, folder: Path, seconds: float) -> dict[str, str]:
    """Note what is here; returns the packages that cannot be used, and why."""
    session.facts = here.plain()
    session.note("here", f"Here: {session.facts}")
    lacking = dict.fromkeys(here.missing(), "is missing")
    for name in lacking:
        session.note("missing", f"{name} is missing: it is needed for {here.NEEDED[name]}", what=name)
    log = folder / "here.log"
    code = run(module("here", device), log, session.time_left(seconds))
    for found in json_lines(log):
        session.facts |= found
        session.note("here", f"Here: {found}")
    if code != 0:
        session.lose("what is here", f"it took over {seconds:g} s" if code is None else tail(log))
    lacking |= {name.split()[0]: str(why) for name, why in session.facts.items() if name.endswith(" error")}
    if "kernel" in lacking:
        lacking["triton"] = f"compiles no kernel: {lacking.pop('kernel')}"
    return lacking


def hopeless(facts: Mapping[str, Any], lacking: Mapping[str, str], device: str) -> str:
    """Why nothing can run here, in a sentence; nothing where something can."""
    for name in ("torch", "numpy"):
        if name in lacking:
            return f"nothing can run here: {name} {lacking[name]}"
    if device == "cuda" and "device" not in facts:
        why = facts.get("no device", "looking for one did not end")
        return f"nothing can run here: torch {facts.get('torch')} sees no CUDA device: {why} (--device cpu tries the command)"
    return ""


def compare(session: Session, name: str, target: Path, load_format: str, device: str, folder: Path, left: Left) -> None:
    """Compare the answers of a model with the equation's: a row, `WRONG` where a token is not excused by rounding."""
    log = folder / f"answers-{name.replace(' ', '-')}.log"
    code = run(module("answers", target, device, load_format), log, left)
    if code != 0:
        session.lose(f"answers of {name}", "it took too long" if code is None else tail(log))
        return
    [found] = json_lines(log)
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
    log = folder / "speed.log"
    if (code := run(module("speed", device, size), log, left)) != 0:
        session.lose("speed of the device", "it took too long" if code is None else tail(log))
        return
    [found] = json_lines(log)
    clocks = found.get("clocks shown", "no clocks")
    shown = f"{found['bytes'] / 1e9:.0f} GB/s, {found['flops'] / 1e12:.1f} TFLOP/s in bfloat16, {clocks}"
    session.note("speed", f"speed of the device: {shown}", **found)


def plan(session: Session, options: argparse.Namespace) -> list[Part]:
    """All parts, the most telling first: answers before any speed, ours before any peer, the many laws last."""
    device, folder, cuda = options.device, options.folder, options.device == "cuda"
    triton = ("triton",) if cuda else ()
    engine = (*here.ENGINE, *triton)
    works = (
        (rates.GPU_WORKS if cuda else rates.CPU_WORKS) if not options.smoke else rates.GPU_SMOKE if cuda else rates.CPU_SMOKE
    )
    measuring = SMOKE_MEASURING if options.smoke else rates.MEASURING

    def answers(name: str, target: Path, load_format: str, least: float, most: float) -> Part:
        action = partial(compare, session, name, target, load_format, device, folder)
        return Part(f"answers of {name}", action, least, most, engine, "first")

    def law(each: laws.Law, more: Mapping[str, str] | None = None) -> Part:
        action = partial(laws.hold, session, each, folder, more=more)
        return Part(each.what, action, each.least, each.most, here.LAWS, "last" if each.wide else "first")

    def speed(
        shape: str, who: str, needs: tuple[str, ...], seconds: float = 100, place: Literal["first", "middle"] = "middle"
    ) -> Part:
        action = partial(rates.measure, session, shape, who, works, folder, device=device, measuring=measuring)
        return Part(f"{shape}, {who}", action, 50, seconds, needs, place)

    drawn = "Q" if cuda else "S"
    parts = [
        answers("the shipped model", DEFAULT_MODEL, "auto", 25, 70),
        answers(f"shape {drawn}", write_config(drawn, folder), "dummy", 30, 90),
    ]
    if not options.no_laws:
        parts.append(law(laws.SMOKE) if cuda else law(replace(laws.SMOKE, most=240), laws.INTERPRETED))
    size = 8192 if cuda else 512
    parts.append(
        Part("speed of the device", partial(weigh, session, size, device, folder), 10, 40, ("torch", "numpy"), "first")
    )
    parts.append(speed(options.shape[0], OURS, engine, 200, "first"))
    if cuda and not options.no_laws:
        parts.append(law(laws.STEPS))
    parts += [speed(shape, OURS, engine) for shape in options.shape[1:]]
    parts += [speed(shape, PEER, here.PEER) for shape in options.shape]
    if cuda and not options.no_laws:
        parts += [law(each) for each in (laws.RANKS, *laws.WIDE) if session.facts.get("devices", 1) >= each.devices]
    return in_short(parts, options.minutes / SMOKE_MINUTES) if options.smoke else parts


def in_short(parts: Sequence[Part], times: float) -> list[Part]:
    """The parts of --smoke, with so many times their seconds. Each leaves all later ones what they need."""
    chosen = [(part, *SMOKE_SECONDS[part.what]) for part in parts if part.what in SMOKE_SECONDS]
    return [replace(part, least=least * times, most=most * times, place="last") for part, least, most in chosen]


def finish(session: Session, sentence: str = "") -> int:
    """Print the table, what is wrong first, and file it; returns the exit code."""
    answers, failed = session.of("answers"), session.of("failed")
    wrong = [f"WRONG {each['shown']}" for each in answers if not each["right"]]
    ended = [f"Ended by {session.ended_by}."] if session.ended_by else []
    rows = rates.rows(session)
    shown = [*wrong, *([table(rates.HEADER, rows)] if rows else [])]
    shown += [f"right: {each['shown']}" for each in answers if each["right"]]
    shown += [f"{each['what']}: {each.get('passed', 0)} passed{', CUT' if each['cut'] else ''}" for each in session.of("law")]
    shown += ["Failed:", *(f"{each['what']}: {each['why']}" for each in failed)] if failed else []
    shown += [*ended, sentence] if sentence or ended else []
    bad = bool(wrong or failed or ended)
    code = 2 if sentence else 3 if bad else 0
    text = "\n".join(["", *shown, *([] if bad or sentence else ["Nothing failed."])])
    session.note("end", text, code=code, ended_by=session.ended_by, table=text)
    return code


def shape_names(text: str) -> list[str]:
    """Names of shapes between commas."""
    names = text.split(",")
    if wrong := [name for name in names if name not in SHAPES]:
        raise argparse.ArgumentTypeError(f"there is no {wrong[0]!r}")
    return names


def read_flags(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="what fits into 90 s; of a GPU the first thing to run")
    parser.add_argument("--minutes", type=float, help=f"for everything (default {MINUTES}, with --smoke {SMOKE_MINUTES})")
    parser.add_argument("--shape", type=shape_names, help=f"of {', '.join(SHAPES)}; default {','.join(ON_GPU)}, on a CPU S")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries the command itself")
    parser.add_argument("--no-laws", action="store_true", help="answers and speed alone")
    parser.add_argument("--folder", type=Path, default=FOLDER / "gpu", help="for the logs of all parts")
    parser.add_argument("--json", type=Path, default=ROWS, help="rows are appended here (default loadtest/out/gpu.jsonl)")
    options = parser.parse_args(words)
    options.shape = options.shape or (ON_GPU if options.device == "cuda" else ["S"])
    if options.smoke:
        options.shape = ["8B" if options.device == "cuda" else "S"]
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
    seconds_to_look = SMOKE_LOOK * options.minutes / SMOKE_MINUTES if options.smoke else LOOK
    lacking = look(session, options.device, options.folder, seconds_to_look)
    if sentence := hopeless(session.facts, lacking, options.device):
        sys.exit(finish(session, sentence))
    perform(session, plan(session, options), lacking)
    code = finish(session)
    say(f"Every row is in {options.json}, the logs are in {options.folder}.")
    sys.exit(code)


if __name__ == "__main__":
    main()
