"""Bits per byte of a checkpoint on the held-out files: python -m attend.model.train.evaluate [FOLDER]"""

import argparse
import lzma
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from attend.model.config import DEFAULT_MODEL
from attend.model.net.checkpoint import load_decoder
from attend.model.net.kv_cache import KVCache
from attend.model.net.paged_attention import BatchLayout, PagedAttention, Row, TorchBackend
from attend.model.net.transformer import Decoder
from attend.model.text.tokenizer import Tokenizer
from attend.model.train import corpus
from attend.model.train.loss import Hidden, bits_per_byte, hidden_states

BLOCK = 32


def through_8_bits(net: Decoder, tokens_BL: Tensor) -> Tensor:
    """Hidden states [B * L, E] with keys and values in 8 bits, each text with a cache of its own."""
    return torch.cat([_through_8_bits(net, tokens_L) for tokens_L in tokens_BL])


def _through_8_bits(net: Decoder, tokens_L: Tensor) -> Tensor:
    blocks = -(-len(tokens_L) // BLOCK)
    cache = KVCache.allocate(net.config, blocks, BLOCK, torch.int8, "cpu")
    layout = BatchLayout.build([Row(range(1, 1 + blocks), 0, len(tokens_L))], BLOCK, "cpu", states=[1])
    return net(tokens_L, layout.positions_T, PagedAttention(TorchBackend(net.config.attention_variants), cache, layout))


def evaluate_checkpoint(folder: Path, root: Path, context: int | None = None, hidden: Hidden = hidden_states) -> float:
    """Bits per byte, in float32, of a checkpoint on all held-out files of `root`; in windows as long as the model knows,
    or of `context` tokens.
    """
    net, tokenizer = load_decoder(folder, torch.float32, "cpu"), Tokenizer.load(folder)
    texts = corpus.read_texts(root, held_out=True)
    tokens = torch.from_numpy(corpus.encode_texts(tokenizer, texts).astype(np.int64))
    return bits_per_byte(net, tokens, count_bytes(texts), context or net.config.max_positions, hidden)


def count_bytes(texts: list[str]) -> int:
    """Total length of the texts in UTF-8, in bytes."""
    return sum(len(text.encode()) for text in texts)


def xz_bits_per_byte(texts: list[str]) -> float:
    """What `xz -9e` needs for each byte of the texts as one stream."""
    stream = "".join(texts).encode()
    return 8 * len(lzma.compress(stream, preset=9 | lzma.PRESET_EXTREME)) / len(stream)


def main() -> None:
    """Read the flags, print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--root", type=Path, default=corpus.standard_library(), help="the Python files; default: the stdlib")
    parser.add_argument("--context", type=int, help="tokens of a window; default: as many as the model knows")
    parser.add_argument("--kv-dtype", choices=["auto", "int8"], default="auto", help="data type of the KV cache")
    options = parser.parse_args()
    texts = corpus.read_texts(options.root, held_out=True)
    hidden = through_8_bits if options.kv_dtype == "int8" else hidden_states
    bits = evaluate_checkpoint(options.folder, options.root, options.context, hidden)
    print(f"{bits:.4f} bits per byte: {len(texts)} held-out files of {options.root}, {count_bytes(texts):,} bytes")


if __name__ == "__main__":
    main()
