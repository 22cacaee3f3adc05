"""Bits per byte of a checkpoint on the held-out files: python -m attend.model.train.evaluate [FOLDER]"""

import argparse
from pathlib import Path

import numpy as np
import torch

from attend.model.config import DEFAULT_MODEL
from attend.model.net.checkpoint import load_decoder
from attend.model.text.tokenizer import Tokenizer
from attend.model.train import corpus
from attend.model.train.loss import bits_per_byte


def evaluate_checkpoint(folder: Path, root: Path, context: int | None = None) -> float:
    """Bits per byte, in float32, of a checkpoint on all held-out files of `root`; in windows as long as the model knows,
    or of `context` tokens.
    """
    net, tokenizer = load_decoder(folder, torch.float32, "cpu"), Tokenizer.load(folder)
    texts = corpus.read_texts(root, held_out=True)
    tokens = torch.from_numpy(corpus.encode_texts(tokenizer, texts).astype(np.int64))
    return bits_per_byte(net, tokens, count_bytes(texts), context or net.config.max_positions)


def count_bytes(texts: list[str]) -> int:
    """Total length of the texts in UTF-8, in bytes."""
    return sum(len(text.encode()) for text in texts)


def main() -> None:
    """Read the flags, print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--root", type=Path, default=corpus.standard_library(), help="the Python files; default: the stdlib")
    parser.add_argument("--context", type=int, help="tokens of a window; default: as many as the model knows")
    options = parser.parse_args()
    texts = corpus.read_texts(options.root, held_out=True)
    bits = evaluate_checkpoint(options.folder, options.root, options.context)
    print(f"{bits:.4f} bits per byte: {len(texts)} held-out files of {options.root}, {count_bytes(texts):,} bytes")


if __name__ == "__main__":
    main()
