"""The field's words lead to the code: a term of vLLM stands in a name or a docstring, or GLOSSARY.md says where it is."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TERMS = """
continuous batching, chunked prefill, prefill, decode, preemption, prefix caching, paged attention, KV cache block, block pool,
block table, slot mapping, block size, eviction, token budget, max_num_batched_tokens, max_num_seqs, max_model_len,
gpu_memory_utilization, request queue, admission control, backpressure, load shedding, asynchronous scheduling,
fair scheduling, speculative decoding, draft tokens, prompt lookup, rejection sampling, acceptance rate, tensor parallelism,
pipeline parallelism, all-reduce, CUDA graph, split-KV, attention backend, model runner, executor, engine core,
sampling metadata, sampling parameters, logits processor, top-p, min-p, repetition penalty, logit bias, log probabilities,
stop strings, detokenizer, guided decoding, structured output, bitmask, quantization, dequantization, weight-only, LoRA adapter,
mixture of experts, sliding window, attention sinks, latent attention, batch invariance, beam search, pooling, tool call,
reasoning parser, time to first token, inter-token latency, goodput, KV offloading, KV connector, head-of-line blocking,
graceful shutdown, tool parser, function calling, multi-LoRA, weight loader, memory profiling, radix tree, data parallelism,
expert parallelism, disaggregated prefill, draft model, EAGLE, Medusa, enforce_eager, n-gram, flash decoding, flash attention,
nucleus, KV cache utilization, prefix cache hit rate, swap space, block manager, attention metadata, ragged batch, cross-encoder
"""


def pattern(term: str) -> re.Pattern[str]:
    """A term in any spelling: with spaces, hyphens, underscores, or over the end of a line."""
    return re.compile(r"[\s_\-`]*".join(map(re.escape, re.split(r"[ _-]+", term))), re.IGNORECASE)


def terms() -> list[str]:
    return [" ".join(term.split()) for term in TERMS.split(",")]


def said() -> str:
    """All names and docstrings of the code."""
    words: list[str] = []
    for room in ("model", "service"):
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    words.append(node.value)
                words += [
                    value for value in (getattr(node, "name", None), getattr(node, "arg", None)) if isinstance(value, str)
                ]
    return "\n".join(words)


def tables() -> tuple[list[list[str]], list[list[str]]]:
    """The rows of the two tables of GLOSSARY.md: the concepts, and other terms of the field."""
    parts = (ROOT / "GLOSSARY.md").read_text(encoding="utf-8").split("\n## ")[1:]
    found = [[line for line in part.splitlines() if line.startswith("|")][2:] for part in parts]
    concepts, others = ([[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines] for lines in found)
    return concepts, others


def test_a_term_of_the_field_leads_to_the_code():
    known = "\n".join([said(), *(row[0] for table in tables() for row in table)])
    assert [term for term in terms() if not pattern(term).search(known)] == [], "in no docstring and not in GLOSSARY.md"


def test_there_are_sixty_concepts_at_most_and_a_page_tells_each():
    concepts, _ = tables()
    assert 40 < len(concepts) <= 60 and len({row[0] for row in concepts}) == len(concepts)
    for _, where, page in concepts:
        paths = re.findall(r"`([^`]+)`", where)
        assert paths and re.fullmatch(r"\[[\w ]+\]\([\w/]+\.md(#[\w-]+)?\)", page), where
        assert all((ROOT / path).exists() or (ROOT / paths[0]).with_name(path).exists() for path in paths), where


def test_every_word_of_the_other_terms_stands_in_the_files_that_it_names():
    missing = []
    for _, words, where in tables()[1]:
        paths = [ROOT / path for path in re.findall(r"`([^`]+)`", where)]
        files = [each for path in paths for each in (path.rglob("*.py") if path.is_dir() else [path])]
        text = "\n".join(f"{path}\n{path.read_text(encoding='utf-8')}" for path in files)
        names = (name.removeprefix("attend_").removesuffix("_total") for name in re.findall(r"`(\w+)`", words))
        missing += [(name, where) for name in names if files and name not in text]
    assert missing == []
