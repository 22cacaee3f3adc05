"""A checkpoint is measured in bits for each byte of the held-out files."""

import json

import numpy as np
import pytest
import torch

from attend.model.net.checkpoint import save
from attend.model.train import corpus
from attend.model.train.evaluate import evaluate_checkpoint
from attend.model.train.loss import bits_per_byte
from tests.model.checkpoints import byte_level_tokenizer, tiny_config, tiny_decoder, write_tokenizer


def test_a_checkpoint_is_measured_on_every_held_out_file(tmp_path):
    """Bits per byte over all of them, from what stands in the folder; files to train on have no say."""
    tokenizer, folder, root = byte_level_tokenizer(), write_tokenizer(tmp_path / "model"), tmp_path / "root"
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": corpus.END_OF_TEXT}))
    net = tiny_decoder(tiny_config(family="qwen3", qk_norm="head", vocab_size=tokenizer.size))
    save(net, folder, torch.float32)
    root.mkdir()
    for at in range(200):
        (root / f"{at}.py").write_text(f"x = {at}\n" * (1 + at % 3))
    texts = corpus.read_texts(root, held_out=True)
    tokens = torch.from_numpy(corpus.encode_texts(tokenizer, texts).astype(np.int64))
    assert len(texts) > 1
    expected = bits_per_byte(net, tokens, len("".join(texts)), net.config.max_positions)
    assert evaluate_checkpoint(folder, root) == pytest.approx(expected, rel=1e-6)
    assert evaluate_checkpoint(folder, root, 40) == pytest.approx(bits_per_byte(net, tokens, len("".join(texts)), 40), rel=1e-6)
