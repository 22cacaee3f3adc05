"""A checkpoint, and a compressor beside it, are measured in bits for each byte of the held-out files."""

import json

import numpy as np
import pytest
import torch

from attend.model.net.checkpoint import save
from attend.model.train import corpus
from attend.model.train.evaluate import count_bytes, evaluate_checkpoint, through_8_bits, xz_bits_per_byte
from attend.model.train.loss import bits_per_byte, hidden_states
from tests.model.checkpoints import byte_level_tokenizer, tiny_config, tiny_decoder, write_tokenizer


def test_a_compressor_is_measured_in_bits_of_output_for_each_byte_of_input():
    """Zeros cost next to nothing; a text twice in one stream costs little more than once; bytes count, not characters."""
    text = "".join(chr(0x400 + (at * 7919) % 64) for at in range(20_000))
    assert xz_bits_per_byte(["\0" * 1_000_000]) < 0.01
    assert 0 < xz_bits_per_byte([text]) < 8
    assert xz_bits_per_byte([text, text]) < xz_bits_per_byte([text]) * 1.01
    assert count_bytes([text, "x"]) == 2 * 20_000 + 1


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
    plain, coarse = (evaluate_checkpoint(folder, root, 40, hidden) for hidden in (hidden_states, through_8_bits))
    assert plain == pytest.approx(bits_per_byte(net, tokens, len("".join(texts)), 40), rel=1e-6)
    assert 0 < abs(coarse - plain) < 0.01 * plain, "8 bits cost something, and little"
