"""The files that loading is measured with are files that are served."""

import pytest

from attend.model.net.checkpoint import inspect
from loadtest.bench import gguf_shapes
from loadtest.bench.shapes import SHAPES


@pytest.mark.parametrize("kind", gguf_shapes.KINDS)
def test_a_file_of_random_blocks_is_a_checkpoint_of_its_shape(kind, tmp_path, monkeypatch):
    monkeypatch.setitem(SHAPES, "tiny", {**SHAPES["S"], "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2})
    monkeypatch.setitem(SHAPES["tiny"], "num_attention_heads", 4)
    monkeypatch.setitem(SHAPES["tiny"], "num_key_value_heads", 2)
    config = inspect(gguf_shapes.write_gguf("tiny", kind, tmp_path))
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (8192, 256, 2)
