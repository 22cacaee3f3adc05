"""A contestant in a process of its own, which stands still whenever it is not its turn."""

import contextlib
import json
import math
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from loadtest.bench.machine import threads

TREE = Path(__file__).parents[2]
OURS = "attend"
PACKAGES = {"transformers": "transformers", "openvino": "openvino_genai", "llamacpp": "llama_cpp"}
"""The package that each peer's interpreter must have."""
FORMS: dict[str, dict[str, list[str]]] = {
    "bf16": {"transformers": ["bf16"], "openvino": ["bf16"], "llamacpp": ["bf16"]},
    "int8": {"openvino": ["int8"], "llamacpp": ["Q8_0"]},
    "int4": {"openvino": ["int4"], "llamacpp": ["Q4_0", "Q4_K_M"]},
    **{form.lower(): {"llamacpp": [form]} for form in ("Q8_0", "Q4_0", "Q4_K_M")},
}
"""How peers call the forms of weights that ours is compared with; with the last ones both read the same GGUF file."""
KEEPS_CONTEXT = ("openvino", "llamacpp")
"""Peers that compute a context once for several calls."""
TICK = 0.2
"""Seconds between two looks at the time that is left."""
ENDED = 5
"""Seconds until a process that was killed is gone."""


class PeerError(Exception):
    """A contestant, `who` if it had a name, that did not start, or ended before its time."""

    who: str | None = None


def is_installed(peer: str, python: str) -> bool:
    """True if an interpreter has the peer's package."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({PACKAGES[peer]!r}) is None)"
    return subprocess.run([python, "-c", code], cwd="/", check=False, capture_output=True).returncode == 0


class Contestant:
    """Answers with seconds. Stopped between its turns: threads that spin for the next work would take the others' cores.

    `tree` is the source tree whose adapters are used; Attend itself is imported from it. `log` gets what the process prints.
    `form`: how weights are kept, in the peer's own words. `load`: `dummy` where the folder has no weights, and each draws its
    own. `context`: tokens that there must be room for behind a context which is kept between calls; 0: nothing is kept. `left`
    tells the seconds that it has for its next answer, the first one too; it may be set anew between two of them.
    """

    def __init__(
        self,
        peer: str,
        folder: Path,
        log: Path,
        python: str = sys.executable,
        tree: Path = TREE,
        *,
        form: str = "bf16",
        load: str = "auto",
        context: int = 0,
        left: Callable[[], float] = lambda: math.inf,
    ) -> None:
        script = Path("loadtest/bench/peers/child.py")
        here = tree if (tree / script).is_file() else TREE
        environment = os.environ | {"OMP_NUM_THREADS": str(threads()), "BENCH_FORM": form, "BENCH_LOAD": load}
        environment |= {"BENCH_CONTEXT": str(context)}
        environment |= {"PYTHONPATH": str(tree)} if peer == OURS else {}
        self.log, self.left = log, left
        with log.open("wb") as errors:
            self.command = [python, str(here / script), peer, str(folder), str(threads())]
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
                start_new_session=True,
            )
        try:
            self.facts: dict[str, Any] = json.loads(self._line())
        except PeerError:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    @property
    def name(self) -> str:
        """As tables call it."""
        return str(self.facts["name"])

    def __call__(self, requests: int, prompt: int, output: int, *, do_sample: bool = False, depth: int = 0) -> float:
        """Seconds of so many requests at once, each of so many tokens. Raises PeerError.

        `do_sample`: drawn with temperature 0.7 and top_p 0.95, instead of greedily, by those whose facts say `samples`.
        `depth`: tokens of the context that stands before all prompts, the same for all.
        """
        self._signal(signal.SIGCONT)
        assert self.process.stdin is not None
        self.process.stdin.write(
            f"{requests} {prompt} {output}{' sampled' if do_sample else ''}{f' {depth}' if depth else ''}\n"
        )
        self.process.stdin.flush()
        seconds = float(self._line())
        self._signal(signal.SIGSTOP)
        return seconds

    def _line(self) -> str:
        assert self.process.stdout is not None
        while not select.select([self.process.stdout], [], [], max(0.0, min(TICK, self.left())))[0]:
            if self.left() <= 0:
                raise PeerError(f"{' '.join(self.command)} gave no answer in its time; its log is {self.log}")
        line = self.process.stdout.readline()
        if not line:
            last = "\n".join(self.log.read_text(errors="replace").splitlines()[-10:])
            raise PeerError(f"{' '.join(self.command)} ended; the end of {self.log}:\n{last}")
        return line

    def _signal(self, number: int) -> None:
        os.killpg(self.process.pid, number)

    def close(self) -> None:
        """End the process, and what it started. One that hangs in a driver cannot be ended: it is not waited for."""
        with contextlib.suppress(ProcessLookupError):
            self._signal(signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=ENDED)


@contextlib.contextmanager
def start_all(starts: Sequence[Callable[[], Contestant]], *, all_must: bool = True) -> Iterator[list[Contestant]]:
    """The contestants that these calls start, one after the other; all end with the block. Who does not start is told of and
    left out, but not the first, and with `all_must` nobody.
    """
    with contextlib.ExitStack() as stack:
        contestants = []
        for start in starts:
            try:
                contestants.append(start())
            except PeerError as error:
                if all_must or not contestants:
                    raise
                print(f"left out: {error}", file=sys.stderr, flush=True)
                continue
            stack.callback(contestants[-1].close)
        yield contestants
