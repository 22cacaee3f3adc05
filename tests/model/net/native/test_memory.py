"""What loading a checkpoint for the native decoder takes of the memory: the weights once, and little beside them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from model.net.native import library

ROOT = Path(__file__).parents[4]
MOST = 1.15
"""Times the size of the weights, of anonymous memory alone: the pages of a mapped file can be had back at any time."""
CHILD = """
import sys
from pathlib import Path

import torch

from model.config import ModelConfig
from model.net.checkpoint import load, save
from model.net.native import decoder
from model.net.transformer import Decoder


def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


class Watched:
    def __init__(self, library):
        self.library, self.most = library, 0

    def __getattr__(self, name):
        run = getattr(self.library, name)
        def watched(*arguments):
            result = run(*arguments)
            self.most = max(self.most, anonymous())
            return result
        return watched


sizes = dict(vocab_size=8192, hidden_size=1024, num_layers=6, num_heads=8, num_kv_heads=4, head_size=128, mlp_size=3072)
experts = dict(num_experts=6, expert_size=512, experts_per_token=2) if sys.argv[3] == "experts" else {}
config, folder = ModelConfig("attend", **sizes | experts, max_positions=64, tied_head=sys.argv[3] == "tied"), Path(sys.argv[1])
with torch.device("meta"):
    net = Decoder(config)
weights = sum(parameter.numel() * 2 for parameter in net.parameters())
if sys.argv[2] == "save":
    net = net.bfloat16().to_empty(device="cpu").requires_grad_(False)
    if config.tied_head:
        net.head.weight = net.embedding.tokens.weight  # which were made two
    for parameter in net.parameters():
        parameter.zero_()
    save(net, folder, torch.bfloat16)
    raise SystemExit
watched = Watched(decoder.native())
decoder.native = lambda: watched
before = anonymous()
loaded = load(folder, torch.bfloat16, "cpu", mapped=sys.argv[2] == "spend")
watched.most = anonymous()
served = decoder.NativeDecoder(loaded, spend=sys.argv[2] == "spend")
print(weights, before, watched.most, anonymous())
"""


def child(folder: Path, what: str, kind: str) -> list[int]:
    command = [sys.executable, "-c", CHILD, str(folder), what, kind]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.split()]


@pytest.mark.skipif(library.load() is None, reason="the native decoder is not built")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", ["tied", "own", "experts"])
def test_loading_holds_the_weights_once(tmp_path, kind):
    """A tied head is the embedding too: the matrix is there once. Those of experts are packed from the file, too."""
    child(tmp_path, "save", kind)
    weights, before, most, after = child(tmp_path, "spend", kind)
    assert weights > 130 << 20
    assert most - before < MOST * weights
    assert after - before < MOST * weights
    _, before, most, _ = child(tmp_path, "keep", kind)
    assert most - before > 1.7 * weights  # so the measure would show it
