"""What loading a checkpoint for the native decoder takes of the memory: the weights once, and little beside them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from attend.model.config import ModelConfig
from attend.model.net.checkpoint import save
from attend.model.net.native import library
from attend.model.net.transformer import Decoder

ROOT = Path(__file__).parents[4]
MOST = 1.15
"""Times the size of the weights, of anonymous memory alone: the pages of a mapped file can be had back at any time."""
SIZES = {"vocab_size": 8192, "hidden_size": 1024, "num_layers": 6, "num_heads": 8, "num_kv_heads": 4, "head_size": 128}
SIZES |= {"mlp_size": 3072, "max_positions": 64}
KINDS = {"tied": {}, "own": {"tied_head": False}, "experts": {"num_experts": 6, "expert_size": 512, "experts_per_token": 2}}
KINDS["experts"] |= {"tied_head": False}
CHILD = """
import sys
from pathlib import Path

import torch

from attend.model.net.checkpoint import load_decoder
from attend.model.net.native import decoder


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


watched = Watched(decoder.native())
decoder.native = lambda: watched
before = anonymous()
loaded = load_decoder(Path(sys.argv[1]), torch.bfloat16, "cpu", keep_mapped=sys.argv[2] == "spend")
watched.most = anonymous()
served = decoder.NativeDecoder(loaded, spend=sys.argv[2] == "spend")
print(watched.most - before, anonymous() - before)
"""


def written(folder: Path, kind: str) -> int:
    """Write a checkpoint of zeros; the bytes of its weights."""
    config = ModelConfig("attend", **SIZES | KINDS[kind])
    with torch.device("meta"):
        net = Decoder(config)
    net = net.bfloat16().to_empty(device="cpu").requires_grad_(False)
    if config.tied_head:
        net.head.weight = net.embedding.tokens.weight  # which were made two
    for parameter in net.parameters():
        parameter.zero_()
    save(net, folder, torch.bfloat16)
    return sum(parameter.numel() * 2 for parameter in net.parameters())


def taken(folder: Path, how: str) -> list[int]:
    """Bytes that loading takes at most, and in the end, in a process of its own."""
    command = [sys.executable, "-c", CHILD, str(folder), how]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.split()]


@pytest.mark.skipif(library.load_library() is None, reason="the native decoder is not built")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kind", KINDS)
def test_loading_holds_the_weights_once(tmp_path, kind):
    """A tied head is the embedding too: the matrix is there once. Those of experts are packed from the file, too."""
    weights = written(tmp_path, kind)
    assert weights > 130 << 20
    assert max(taken(tmp_path, "spend")) < MOST * weights
    if kind == "own":
        assert max(taken(tmp_path, "keep")) > 1.7 * weights, "the measure sees no second copy"
