"""Random weights for measurements, and the loads that all benchmarks have: attend bench shapes qwen3-4b FOLDER --format q4_0

Writes a model of a known shape with the default model's tokenizer, and prints where it is: a checkpoint folder in bfloat16, or
a GGUF file. Engines make int8 and int4 of the folder when they load it: attend serve --quantize int4.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from attend.model.errors import SettingError
from attend.model.shapes import SHAPES, config_text, known_shape

FOLDER = Path(tempfile.gettempdir()) / "attend-shapes"
PROMPT, OUTPUT, AT_ONCE, LONG = 128, 128, 16, 1024
"""W1: PROMPT -> OUTPUT tokens of one request; W2: of AT_ONCE; W3: a prompt of LONG tokens."""
FILES = ("q8_0", "q4_0", "q4_k_m")
"""Formats of GGUF files."""


def parameters(shape: str) -> int:
    """Of the matrices that a token is multiplied by, of a shape without experts."""
    sizes = dict[str, int](SHAPES[shape])
    hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
    head = sizes.get("head_dim", hidden // heads)
    layer = hidden * (2 * head * (heads + sizes["num_key_value_heads"]) + 3 * sizes["intermediate_size"])
    return sizes["num_hidden_layers"] * layer + sizes["vocab_size"] * hidden


def shape(text: str) -> str:
    """A known shape, of the command line."""
    try:
        return known_shape(text)
    except SettingError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def write_shape(name: str, form: str = "bf16", folder: Path = FOLDER) -> Path:
    """A shape's checkpoint folder, or with a form of FILES its GGUF file; written where it is not there as it should be."""
    target = folder / (name if form == "bf16" else f"{name}-{form}.gguf")
    said, text = target / "config.json", config_text(name)
    if target.is_file() or (said.is_file() and said.read_text(encoding="utf-8") == text):
        return target
    from loadtest.bench import random_weights  # whoever draws weights of its own may lack what it needs

    print(f"writing {target}", file=sys.stderr, flush=True)
    part = folder / f"{target.name}.part"
    folder.mkdir(parents=True, exist_ok=True)
    if form != "bf16":
        random_weights.write_gguf(name, SHAPES[name], part, form)
        return part.replace(target)
    target.mkdir(exist_ok=True)
    random_weights.write_folder(SHAPES[name], target)
    said.write_text(text, encoding="utf-8")
    return target


def main(words: list[str] | None = None) -> None:
    """Write one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", type=shape, help=f"one of {', '.join(SHAPES)}")
    parser.add_argument("folder", type=Path, nargs="?", default=FOLDER, help=f"where it is written (default {FOLDER})")
    parser.add_argument("--format", choices=("bf16", *FILES), default="bf16", help="default bf16, which is a folder")
    options = parser.parse_args(words)
    print(write_shape(options.shape, options.format, options.folder))


if __name__ == "__main__":
    main()
