"""A contestant's process: child.py PEER FOLDER THREADS, run by the interpreter in which the peer is installed.

Loads the checkpoint through the adapter of that name beside this file, writes what it is as one line of JSON, and then
answers each line `requests prompt_tokens output_tokens` with the seconds that this took. Words behind these: `sampled` goes to
an adapter that knows it, and a number is that of the tokens of a context which stands before all prompts. Imports nothing of
Attend's; only the adapter of Attend itself does.
"""

import ctypes
import importlib.util
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG: a stopped process would never see that its input ended
FOLDER = str(Path(__file__).parent)


def adapter(name):
    """The module of an adapter, by its path: its name may be that of the package that it uses."""
    spec = importlib.util.spec_from_file_location(f"peer_{name}", f"{FOLDER}/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prompts(count, length, depth=0):
    """Lists of token ids, the same for every contestant; a context is the beginning of a longer one."""
    ids, before = random.Random(length), random.Random("context")
    context = [before.randrange(100, 8000) for _ in range(depth)]
    return [context + [ids.randrange(100, 8000) for _ in range(length)] for _ in range(count)]


def main():
    """Answer until standard input ends. What libraries print goes to standard error. Ends with the process that started it."""
    ctypes.CDLL(None).prctl(DIE_WITH_PARENT, signal.SIGKILL)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.path[:] = [path for path in sys.path if path != FOLDER]
    name, folder, threads = sys.argv[1:]
    started = time.perf_counter()
    facts, generate = adapter(name).start(folder, int(threads))
    load = {"load_seconds": round(time.perf_counter() - started, 2), "python": sys.version.split()[0]}
    print(json.dumps(facts | load), file=answers)
    for line in sys.stdin:
        words = line.split()
        count, length, output = map(int, words[:3])
        how = {"do_sample": True} if "sampled" in words else {}
        asked = prompts(count, length, *(int(word) for word in words[3:] if word.isdigit()))
        started = time.perf_counter()
        made = generate(asked, output, **how)
        seconds = time.perf_counter() - started
        assert made == count * output, f"{made} tokens, not {count * output}"
        print(seconds, file=answers)


if __name__ == "__main__":
    main()
