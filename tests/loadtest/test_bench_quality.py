"""The benchmark of quality: a peer's scores are read as it writes them, and it works on a copy of the checkpoint."""

import sys

import pytest
import torch

from attend.model.net.checkpoint import load_decoder
from loadtest.bench.contestant import PeerError
from loadtest.bench.quality import Peer, copy_checkpoint
from tests.model.checkpoints import write_checkpoint

PROGRAM = """#!{python}
import json, struct, sys
print(json.dumps({{"vocab_size": 3, "form": sys.argv[4]}}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if 99 in asked["tokens"]:
        sys.exit(7)
    for token in asked["tokens"][asked["first"]:]:
        sys.stdout.buffer.write(struct.pack("3f", token, token + 0.5, -token))
    sys.stdout.buffer.flush()
"""


@pytest.fixture
def peer(tmp_path):
    program = tmp_path / "python"
    program.write_text(PROGRAM.format(python=sys.executable), encoding="utf-8")
    program.chmod(0o755)
    peer = Peer("llamacpp", str(program), tmp_path, "Q8_0")
    yield peer
    peer.close()
    peer.process.stdout.close()


def test_a_peers_scores_are_those_of_the_tokens_that_were_asked_for(peer):
    assert (peer.vocab_size, peer.facts["form"]) == (3, "Q8_0")
    for tokens, first in (([4, 5, 6, 7], 1), ([8], 0), (list(range(98)), 90)):
        wanted = torch.tensor([[token, token + 0.5, -token] for token in tokens[first:]])
        scores, end = peer.read(tokens, first), len(tokens) - first
        assert torch.equal(scores(0, end), wanted)
        assert torch.equal(scores(end - 1, end), wanted[-1:])


def test_a_peer_that_ends_is_told_with_its_log(peer):
    with pytest.raises(PeerError, match=r"a peer ended with 7: see .*llamacpp Q8_0\.log"):
        peer.read([99], 0)


def test_peers_get_a_copy_of_the_checkpoint_once_without_other_engines_files(tmp_path):
    folder = write_checkpoint("llama", tmp_path / "tiny")
    (folder / "other.gguf").touch()
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    plain, changed = (copy_checkpoint(folder, factor, tmp_path / "work") for factor in (None, 8.0))
    assert (plain.name, changed.name) == ("tiny-1", "tiny-8")
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in changed.iterdir()}
    assert not list(plain.glob("*.gguf"))
    gains = [
        load_decoder(each, torch.float32, "cpu").blocks[0].attention_norm.weight.max() for each in (folder, plain, changed)
    ]
    assert gains[0] == gains[1] < gains[2]
    made = plain.stat().st_mtime_ns
    assert (copy_checkpoint(folder, None, tmp_path / "work"), plain.stat().st_mtime_ns) == (plain, made)
