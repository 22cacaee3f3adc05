"""Everything that only a GPU can show, in one command: attend bench gpu --minutes 9 --json gpu.json

First the laws: kernels, recorded steps, steps ahead, faults of the device. Then the engine's speed beside `transformers`
(compiled, static cache) at contexts of 1024: decode tokens/s of 1, 64 and 256 requests, prompt tokens/s of 16. Each part is a
process with a limit; the loss of one costs no other. At the end stands what failed. Exit code 3 where something did.

Shares are of a roofline: a decode reads the weights and all keys and values once a step, a prompt multiplies each weight by
each token. The device's own speed of both is measured first.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest.bench.contestant import OURS, TREE, Contestant, PeerError, installed
from loadtest.bench.engine import listed, parameters
from loadtest.bench.figures import Figure, file, table
from loadtest.bench.shapes import FOLDER, SHAPES, write_shape

Run = Callable[[int, int, int], float]
"""(requests, prompt tokens, output tokens) -> seconds."""
LAWS = {
    "laws of the kernels": ["tests/model/net/triton/test_triton.py"],
    "laws of recorded steps": ["tests/model/engine/test_graphs.py", "tests/model/engine/test_pieces.py"],
    "laws of steps ahead": ["tests/model/engine/test_async_scheduling.py"],
    "laws of ranks, where there are two GPUs": ["tests/model/parallel/test_ranks.py", "-k", "gpus"],
    "laws of faults": ["tests/model/engine/test_engine.py", "-k", "device or memory"],
}
LAW_SHARE = 0.4
"""Of the time, at most, for all laws together."""
CONTEXT, OUTPUT, BATCHES, PROMPTS = 1024, 128, (1, 64, 256), 16
PEER = "transformers"
HEADER = ("shape", "work", "Attend, tokens/s", "share of the roofline", PEER)
SPEED = """
import json, sys, time, torch
device, size = sys.argv[1], int(sys.argv[2])
wait = torch.cuda.synchronize if device == "cuda" else lambda: None
def seconds(work):
    work(); wait()
    begun = time.perf_counter()
    for _ in range(10): work()
    wait()
    return (time.perf_counter() - begun) / 10
a, b = (torch.ones(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
many = torch.ones(16 * size * size, dtype=torch.bfloat16, device=device)
copy = torch.empty_like(many)
facts = {"bytes": 2 * many.nbytes / seconds(lambda: copy.copy_(many)), "flops": 2 * size**3 / seconds(lambda: a @ b)}
if device == "cuda":
    facts |= {"device": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
print(json.dumps(facts))
"""
"""Bytes read and written, and operations, that the device does in a second."""


@dataclass
class Session:
    """The time that is left, and what was lost on the way."""

    end: float
    failed: list[str] = field(default_factory=list)

    @property
    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def run(self, what: str, command: Sequence[str], seconds: float) -> str | None:
        """What a command printed; None where it failed, which is noted with its last lines."""
        try:
            done = subprocess.run(
                command, cwd=TREE, timeout=max(1.0, seconds), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        except subprocess.TimeoutExpired:
            return self.lose(what, f"took longer than {seconds:.0f} s")
        except OSError as error:
            return self.lose(what, str(error))
        if done.returncode:
            return self.lose(what, "\n".join(done.stdout.splitlines()[-15:]))
        print(f"{what}: ok", file=sys.stderr, flush=True)
        return done.stdout

    def lose(self, what: str, why: str) -> None:
        """Note a part that failed."""
        self.failed.append(f"{what}: {why}")
        print(f"{what}: FAILED\n{why}", file=sys.stderr, flush=True)


def laws(session: Session) -> None:
    """Every law that has tests for a GPU, each with an equal part of the time for them."""
    end = time.monotonic() + LAW_SHARE * session.left
    for left, (what, words) in zip(range(len(LAWS), 0, -1), LAWS.items(), strict=True):
        session.run(what, [sys.executable, "-m", "pytest", "-q", *words], (end - time.monotonic()) / left)


def decode(run: Run, requests: int, context: int, output: int) -> float:
    """Tokens a second of so many requests, without their prompts and first tokens."""
    first = run(requests, context, 1)
    return requests * output / (run(requests, context, output + 1) - first)


def prefill(run: Run, requests: int, context: int) -> float:
    """Prompt tokens a second."""
    return requests * context / run(requests, context, 1)


def works(context: int, output: int, batches: Sequence[int], prompts: int) -> dict[str, Callable[[Run], float]]:
    """What is measured, by name."""
    found: dict[str, Callable[[Run], float]] = {
        f"decode of {batch}": lambda run, batch=batch: decode(run, batch, context, output) for batch in batches
    }
    return found | {f"{prompts} prompts": lambda run: prefill(run, prompts, context)}


def roofline(shape: str, work: str, context: int, output: int, speed: Mapping[str, float]) -> float:
    """Tokens a second that this device cannot exceed, for weights, keys and values in bfloat16."""
    count, sizes = parameters(shape), SHAPES[shape]
    if not work.startswith("decode"):
        return speed["flops"] / (2 * (count - sizes["vocab_size"] * sizes["hidden_size"]))
    batch = int(work.split()[-1])
    head = sizes.get("head_dim", sizes["hidden_size"] // sizes["num_attention_heads"])
    each = 4 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * head  # key and value of a token, two bytes each
    return batch * speed["bytes"] / (2 * count + batch * (context + output / 2) * each)


def measured(
    session: Session,
    shape: str,
    peers: Sequence[str],
    asked: Mapping[str, Callable[[Run], float]],
    folder: Path,
    seconds: float,
) -> dict[str, dict[str, float]]:
    """Tokens a second of each contestant, by work. Each has an equal part of so many seconds; what it cannot do is lost."""
    found: dict[str, dict[str, float]] = {}
    for peer in peers:
        end = time.monotonic() + seconds / len(peers)
        try:
            contestant = Contestant(peer, write_shape(shape, folder), folder / f"{peer}-gpu.log")
        except (PeerError, OSError, ImportError, ValueError) as error:
            session.lose(f"{shape}, {peer}", str(error))
            continue
        alarm = threading.Timer(max(1.0, end - time.monotonic()), contestant.process.kill)  # one that hangs then ends
        alarm.start()
        try:
            for name, work in asked.items():
                contestant(1, 64, 2)  # whoever compiles or warms up does so now
                found.setdefault(name, {})[peer] = work(contestant)
        except (PeerError, OSError) as error:
            session.lose(f"{shape}, {peer}", f"{'out of time' if time.monotonic() > end else ''} {error}")
        finally:
            alarm.cancel()
            contestant.close()
    return found


def rows(shape: str, found: Mapping[str, Mapping[str, float]], limits: Mapping[str, float]) -> Iterator[list[str]]:
    """A row for each work that Attend did."""
    for work, values in found.items():
        if (mine := values.get(OURS)) is not None:
            share = f"{mine / limits[work]:.0%} of {limits[work]:.0f}" if limits else "not known"
            peer = f"{values[PEER]:.0f}, {mine / values[PEER]:.2f}" if PEER in values else "not measured"
            yield [shape, work, f"{mine:.0f}", share, peer]


def read_flags(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=9, help="for everything (default 9)")
    parser.add_argument("--shape", type=listed, default=["Q", "1B", "8B"], help=f"of {', '.join(SHAPES)}; default Q,1B,8B")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu tries the command itself")
    parser.add_argument("--context", type=int, default=CONTEXT, help=f"tokens of a prompt (default {CONTEXT})")
    parser.add_argument("--no-laws", action="store_true", help="speed alone")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="for the checkpoints and the contestants' logs")
    parser.add_argument("--json", type=Path, help="write the table here too, with every value")
    options = parser.parse_args(words)
    if wrong := [shape for shape in options.shape if shape not in SHAPES]:
        parser.error(f"there is no {wrong[0]!r}")
    return options


def main(words: list[str] | None = None) -> None:
    """Run everything, print the table, and say what failed."""
    options = read_flags(words)
    session, lines, figures = Session(time.monotonic() + 60 * options.minutes), [], []
    cuda = options.device == "cuda"
    size = "8192" if cuda else "512"
    text = session.run("speed of the device", [sys.executable, "-c", SPEED, options.device, size], 120)
    speed: dict[str, Any] = json.loads(text.splitlines()[-1]) if text else {}
    if not options.no_laws:
        laws(session)
    peers = [OURS, PEER] if installed(PEER, sys.executable) else [OURS]
    asked = works(options.context, OUTPUT if cuda else 8, BATCHES if cuda else (1, 4), PROMPTS if cuda else 2)
    for left, shape in zip(range(len(options.shape), 0, -1), options.shape, strict=True):
        if session.left <= 0:
            session.lose(shape, "no time was left")
            continue
        found = measured(session, shape, peers, asked, options.folder, session.left / left)
        limits = {work: roofline(shape, work, options.context, OUTPUT, speed) for work in asked} if speed else {}
        lines += rows(shape, found, limits)
        figures += [
            Figure(f"{shape}, {work}, {who}", "tokens/s", (value,)) for work in found for who, value in found[work].items()
        ]
    driver = (
        session.run("driver", ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], 30) if cuda else ""
    )
    file(options.json, table(HEADER, lines), figures, speed=speed, driver=driver, failed=session.failed)
    print("\n".join(["", "Failed:", *session.failed] if session.failed else ["", "Nothing failed."]))
    sys.exit(3 if session.failed else 0)


if __name__ == "__main__":
    main()
