"""The measured sections of a checkpoint's model card, as markdown: python -m attend.model [FOLDER] [--original FOLDER]"""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from attend.model.config import DEFAULT_MODEL
from attend.model.engine.build import build_engine
from attend.model.engine.options import EngineOptions
from attend.model.engine.request import FinishReason, Request, TokenEngine
from attend.model.errors import EngineFailed
from attend.model.net.checkpoint import read_config
from attend.model.params import SamplingParams
from attend.model.text.tokenizer import Tokenizer
from attend.model.train import card, corpus
from attend.model.train.evaluate import bzip2_bits_per_byte, evaluate_checkpoint, xz_bits_per_byte
from attend.model.train.headers import MAX_TOKENS, Header, choose_headers, judge

MEMORY = 1 << 28
"""Bytes of KV cache: a hundred short texts of the default model."""


@dataclass(slots=True)
class Completion:
    """What the engine wrote below one prompt."""

    token_ids: list[int] = field(default_factory=list)
    ended_by_model: bool = False
    """The model ended the text itself."""


async def complete_prompts(engine: TokenEngine, prompts: Sequence[list[int]], max_tokens: int) -> list[Completion]:
    """The greedy completions of prompts, side by side. Raises EngineFailed where one ends with an error."""
    stop = frozenset(engine.info.eos_token_ids)
    greedy = SamplingParams(temperature=0)
    requests = [Request(str(at), prompt, max_tokens, greedy, stop_token_ids=stop) for at, prompt in enumerate(prompts)]
    completions = {request.request_id: Completion() for request in requests}
    async for outputs in engine.generate(requests):
        for output in outputs:
            if output.finish_reason is FinishReason.ERROR:
                raise EngineFailed(f"prompt {output.request_id}: {output.error}")
            completion = completions[output.request_id]
            completion.token_ids += output.token_ids
            completion.ended_by_model = output.finish_reason is FinishReason.STOP
    return list(completions.values())


def complete_headers(folder: Path, tokenizer: Tokenizer, headers: Sequence[Header]) -> list[Completion]:
    """What a checkpoint writes below each header, in float32, through the engine that serves it."""
    engine = build_engine(folder, EngineOptions(device="cpu", dtype="float32", kv_cache_memory=MEMORY))
    engine.start()
    try:
        return asyncio.run(complete_prompts(engine, [tokenizer.encode(header.text) for header in headers], MAX_TOKENS))
    finally:
        engine.close()


def main() -> None:
    """Read the flags, measure, print the sections."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m attend.model")
    parser.add_argument("folder", type=Path, nargs="?", default=DEFAULT_MODEL)
    parser.add_argument("--original", type=Path, help="checkpoint of `attend train --original`, trained on the same tokens")
    parser.add_argument("--root", type=Path, default=corpus.standard_library(), help="the Python files; default: the stdlib")
    options = parser.parse_args()
    tokenizer, headers = Tokenizer.load(options.folder), choose_headers(options.root)
    completions = complete_headers(options.folder, tokenizer, headers)
    verdicts = [
        judge(header.text, tokenizer.decode(done.token_ids), is_complete=done.ended_by_model)
        for header, done in zip(headers, completions, strict=True)
    ]
    bits = {"this model": evaluate_checkpoint(options.folder, options.root)}
    if options.original is not None:
        bits["the same size with the choices of 2017, on the same tokens"] = evaluate_checkpoint(options.original, options.root)
    texts = corpus.read_texts(options.root, held_out=True)
    bits |= {"xz -9e, as one stream": xz_bits_per_byte(texts), "bzip2, as one stream": bzip2_bits_per_byte(texts)}
    shown = [tokenizer.decode(done.token_ids[: card.SAMPLE_TOKENS]) for done in completions[: card.NUM_SAMPLES]]
    print(card.quality_section(bits, read_config(options.folder).max_positions, verdicts))
    print(card.samples(headers[: card.NUM_SAMPLES], shown), end="")


if __name__ == "__main__":
    main()
