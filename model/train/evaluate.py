"""Bits per byte of a checkpoint on the held-out files: python -m model.train.evaluate [FOLDER]"""

import argparse
from pathlib import Path

import numpy as np
import torch

from model.config import DEFAULT_MODEL
from model.net.checkpoint import load
from model.tokenizer import Tokenizer
from model.train import corpus
from model.train.loss import bits_per_byte


def main() -> None:
    """Read the flags, print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--root", type=Path, default=corpus.standard_library(), help="the Python files; default: the stdlib")
    options = parser.parse_args()
    net, tokenizer = load(options.folder, torch.float32, "cpu"), Tokenizer.load(options.folder)
    texts = corpus.read_texts(options.root, held_out=True)
    tokens = torch.from_numpy(corpus.encode_texts(tokenizer, texts).astype(np.int64))
    num_bytes = sum(len(text.encode()) for text in texts)
    bits = bits_per_byte(net, tokens, num_bytes, net.config.max_positions)
    print(
        f"{bits:.4f} bits per byte: {len(texts)} held-out files of {options.root}, {num_bytes:,} bytes, {len(tokens):,} tokens"
    )


if __name__ == "__main__":
    main()
