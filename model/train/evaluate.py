"""Bits per byte of a checkpoint on the held-out files: python -m model.train.evaluate [FOLDER]"""

import argparse
import bz2
import lzma
from pathlib import Path

import numpy as np
import torch

from model.config import DEFAULT_MODEL
from model.net.checkpoint import load
from model.tokenizer import Tokenizer
from model.train import corpus
from model.train.loss import bits_per_byte


def measure(folder: Path, root: Path) -> float:
    """Bits per byte, in float32, of a checkpoint on all held-out files of `root`."""
    net, tokenizer = load(folder, torch.float32, "cpu"), Tokenizer.load(folder)
    texts = corpus.read_texts(root, held_out=True)
    tokens = torch.from_numpy(corpus.encode_texts(tokenizer, texts).astype(np.int64))
    return bits_per_byte(net, tokens, count_bytes(texts), net.config.max_positions)


def count_bytes(texts: list[str]) -> int:
    """Length of texts in UTF-8."""
    return sum(len(text.encode()) for text in texts)


def xz_bits_per_byte(texts: list[str]) -> float:
    """What `xz -9e` needs for each byte of the texts as one stream."""
    stream = "".join(texts).encode()
    return 8 * len(lzma.compress(stream, preset=9 | lzma.PRESET_EXTREME)) / len(stream)


def bzip2_bits_per_byte(texts: list[str]) -> float:
    """What `bzip2 -9` needs for each byte of the texts as one stream."""
    stream = "".join(texts).encode()
    return 8 * len(bz2.compress(stream)) / len(stream)


def main() -> None:
    """Read the flags, print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--root", type=Path, default=corpus.standard_library(), help="the Python files; default: the stdlib")
    options = parser.parse_args()
    texts = corpus.read_texts(options.root, held_out=True)
    bits = measure(options.folder, options.root)
    print(f"{bits:.4f} bits per byte: {len(texts)} held-out files of {options.root}, {count_bytes(texts):,} bytes")


if __name__ == "__main__":
    main()
