"""A family beside plain Llama of the same cost, on the native decoder: attend bench family gemma2 mixtral; with no name all

Both have random weights and the sizes of shape M. Llama has the family's heads, and an MLP so wide that a step of both moves
the same bytes (W1: one stream decodes; W2: 16 streams), or a token of both needs as many operations (W3: a prompt of 1024
tokens). Of experts those count that a step is expected to need; a state is read and written. Windows are wider than the
texts. The two take turns, a step each; a ratio is the median of the quotients of neighbours.
"""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from attend.model.config import ModelConfig
from attend.model.net.families.table import FAMILIES
from attend.model.net.kv_cache import KVCache
from attend.model.net.native.decoder import NativeBackend, NativeDecoder
from attend.model.net.paged_attention import BatchLayout, PagedAttention, Row
from attend.model.net.transformer import Decoder
from attend.model.shapes import SHAPES
from loadtest.bench.figures import Comparison, Figure, file, options_of, table, take_turns
from loadtest.bench.limits import CONTEXT, decode_bytes, prompt_operations
from loadtest.bench.machine import threads
from loadtest.bench.shapes import AT_ONCE, LONG

POSITIONS, BLOCK, FILLING = 2048, 32, 1 << 20
WORKS = {"W1": 1, "W2": AT_ONCE, "W3": LONG}
"""Tokens of a step."""
GOAL = 0.9
SIZES = SHAPES["M"] | {"head_dim": 64, "max_position_embeddings": POSITIONS, "tie_word_embeddings": True}
SIZES |= {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
_GPT2 = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
}
_WINDOW = {"sliding_window": POSITIONS}
_YARN = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 64}
_MIXTURE = {"num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 192}
_DELTA = {"linear_num_key_heads": 9, "linear_num_value_heads": 9}
_SHARED = {"linear_num_key_heads": 3, "linear_num_value_heads": 9, "shared_expert_intermediate_size": 192}
_ROUTED = {"num_experts": 32, "n_routed_experts": 32, "num_local_experts": 32, "moe_num_experts": 32}
_ROUTED |= {"num_experts_per_tok": 4, "moe_k": 4, "moe_intermediate_size": 192, "n_group": 4, "topk_group": 2}
_ROUTED |= {"n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1, "norm_topk_prob": True}
_FEW = {"num_local_experts": 32, "num_experts_per_tok": 4, "intermediate_size": 192}
_CONVS = {"layer_types": ["conv", "conv", "full_attention"] * 10, "conv_L_cache": 3, "block_auto_adjust_ff_dim": False}
_MULTIPLIED = {"residual_multiplier": 0.2, "attention_multiplier": 0.1, "embedding_multiplier": 12.0}
SWITCHES: dict[str, dict[str, Any]] = {
    "arcee": {},
    "cohere": {},
    "dots1": _ROUTED,
    "ernie4_5": {},
    "ernie4_5_moe": _ROUTED,
    "exaone4": _WINDOW,
    "exaone_moe": _WINDOW | _ROUTED,
    "gemma3": _WINDOW | {"query_pre_attn_scalar": 64},
    "glm": {},
    "glm4_moe": _ROUTED,
    "granite_swa": _WINDOW | _MULTIPLIED,
    "granitemoe": _FEW | _MULTIPLIED,
    "granitemoehybrid": _FEW | _MULTIPLIED | {"layer_types": ["attention"] * 30, "shared_intermediate_size": 768},
    "granitemoeshared": _FEW | _MULTIPLIED | {"shared_intermediate_size": 768},
    "helium": {},
    "hunyuan_v1_dense": {},
    "lfm2": _CONVS,
    "lfm2_moe": _CONVS | _ROUTED,
    "lfm3": _WINDOW | {"layer_types": ["conv", "sliding_attention", "full_attention"] * 10},
    "minimax_m2": _FEW,
    "ministral": _WINDOW,
    "ministral3": {"rope_parameters": _YARN | {"llama_4_scaling_beta": 0.1}},
    "mistral3": _WINDOW,
    "muse_glimmer": _WINDOW | {"tie_word_embeddings": False},
    "nanochat": {"tie_word_embeddings": False},
    "nemotron": {},
    "olmo": {},
    "olmo_hybrid": _DELTA | {"layer_types": [*["linear_attention"] * 2, "full_attention"] * 10},
    "olmoe": _FEW | {"num_experts": 32},
    "qwen2_5_vl": {},
    "qwen2_vl": {},
    "qwen3_vl": {},
    "qwen3_vl_moe": _MIXTURE,
    "seed_oss": {},
    "stablelm": {},
    "vaultgemma": _WINDOW | {"query_pre_attn_scalar": 64},
    "cohere2": _WINDOW,
    "gemma": {},
    "gemma2": _WINDOW | {"query_pre_attn_scalar": 64},
    "gemma3_text": _WINDOW | {"query_pre_attn_scalar": 64},
    "gemma4": _WINDOW | {"global_head_dim": 128, "hidden_size_per_layer_input": 64, "vocab_size_per_layer_input": 49152},
    "glm4": {},
    "gpt2": {"n_positions": POSITIONS},
    "gpt_neox": {},
    "gpt_oss": _WINDOW
    | {"num_local_experts": 16, "num_experts_per_tok": 4, "intermediate_size": 288, "rope_parameters": _YARN},
    "granite": {"residual_multiplier": 0.2, "attention_multiplier": 0.1, "embedding_multiplier": 12.0},
    "mistral": _WINDOW,
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 768},
    "olmo2": {},
    "olmo3": _WINDOW,
    "phi3": {},
    "qwen2": {},
    "qwen2_moe": {"num_experts": 16, "moe_intermediate_size": 192, "shared_expert_intermediate_size": 768},
    "qwen3": {},
    "qwen3_5": _DELTA,
    "qwen3_5_moe": _MIXTURE | _SHARED,
    "qwen3_moe": _MIXTURE | {"norm_topk_prob": True},
    "qwen3_next": _MIXTURE | _SHARED,
    "smollm3": {},
    "starcoder2": _WINDOW,
}
"""Keys of config.json, beside the sizes of shape M."""


def config_of(name: str) -> ModelConfig:
    """A family's model of shape M."""
    raw = SIZES | SWITCHES[name] | {"model_type": name}
    return FAMILIES[name].read(raw | {theirs: raw[ours] for theirs, ours in _GPT2.items()} if name == "gpt2" else raw)


def cost(config: ModelConfig, work: str) -> float:
    """What the two are alike in: bytes of a decode step, operations of a prompt's token."""
    return prompt_operations(config, LONG) if work == "W3" else decode_bytes(config, WORKS[work])


def llama_beside(config: ModelConfig, work: str) -> ModelConfig:
    """Plain Llama of the same heads and of the same cost, up to 16 rows of an MLP."""
    same = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_size", "max_positions", "tied_head")
    plain = ModelConfig("llama", mlp_size=16, **{name: getattr(config, name) for name in same})
    lacking = cost(config, work) - cost(plain, work)
    wider = lacking / (2 * 3 * config.hidden_size * config.num_layers * 16)  # two bytes, or two operations
    return replace(plain, mlp_size=16 * (1 + round(wider)))


def random_decoder(config: ModelConfig) -> NativeDecoder:
    """With the same million of numbers again and again: drawing takes longer than all else."""
    with torch.device("meta"):
        net = Decoder(config, config.max_positions)
    net = net.bfloat16().to_empty(device="cpu").requires_grad_(False)
    net.reach(config.max_positions)
    if config.tied_head:
        net.head.weight = net.embedding.tokens.weight  # type: ignore[assignment]  # a parameter
    numbers = torch.randn(FILLING, generator=torch.Generator().manual_seed(0)).mul_(0.04).bfloat16()
    for name, parameter in net.named_parameters():
        if parameter.dim() > 1:
            for part in torch.split(parameter.view(-1), FILLING):
                part.copy_(numbers[: len(part)])
        else:
            parameter.fill_(1.0 if ("norm" in name and name.endswith("weight")) or name.endswith(("gain", "scale")) else 0.0)
    return NativeDecoder(net, spend=True)


class Contestant:
    """A decoder with a cache, and a step of each work that can be repeated."""

    def __init__(self, config: ModelConfig, clock: Callable[[], float] = time.perf_counter) -> None:
        self.net, self.clock = random_decoder(config), clock
        self.backend = NativeBackend(config.attention_variants)
        blocks = -(-CONTEXT // BLOCK)
        counts = [AT_ONCE if group.has_state else max(AT_ONCE * blocks, LONG // BLOCK) for group in config.memory_groups]
        self.cache = KVCache.allocate(config, counts, BLOCK, torch.bfloat16, "cpu")
        self.rows = {
            "W1": [Row(range(1, 1 + blocks), CONTEXT - 1, 1)],
            "W2": [Row(range(1 + at * blocks, 1 + (at + 1) * blocks), CONTEXT - 1, 1) for at in range(AT_ONCE)],
            "W3": [Row(range(1, 1 + LONG // BLOCK), 0, LONG)],
        }

    @torch.inference_mode()
    async def step(self, work: str) -> float:
        """Tokens/s of one step; scores are computed for the last token of each request."""
        count, rows = WORKS[work], self.rows[work]
        tokens = torch.randint(2048, (count,), generator=torch.Generator().manual_seed(1))
        layout = BatchLayout.build(rows, BLOCK, "cpu", states=range(1, 1 + len(rows)))
        started = self.clock()
        hidden = self.net(tokens, layout.positions_T, PagedAttention(self.backend, self.cache, layout))
        self.net.logits(hidden[-len(rows) :])
        return count / (self.clock() - started)


def measure(name: str, turns: Mapping[str, int]) -> Iterator[Comparison]:
    """The family and the Llama of each work."""
    config = config_of(name)
    family, llamas = Contestant(config), dict[ModelConfig, Contestant]()
    for work in WORKS:
        plain = llama_beside(config, work)
        llama = llamas.get(plain) or llamas.setdefault(plain, Contestant(plain))
        steps = {name: partial(family.step, work), "llama": partial(llama.step, work)}
        warm_up = 0 if work == "W3" else 1  # a prompt takes so long that its first pages are nothing
        yield Comparison(f"{name} {work}", "tokens/s", asyncio.run(take_turns(steps, turns[work], warm_up)))


def cells(name: str, comparisons: list[Comparison]) -> list[str]:
    """A family's row: what it reaches, and that over what Llama does."""
    found = [name]
    for each in comparisons:
        found += [f"{each.figure(name).median:.4g}", each.ratio("llama").short()]
    return found


def main(words: list[str] | None = None) -> None:
    """Measure, print the table."""
    parser = options_of(__doc__, turns=25)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SWITCHES)}; default: all")
    parser.add_argument("--prompts", type=int, default=3, help="measurements of a prompt (default 3)")
    options = parser.parse_args(words)
    if unknown := set(options.names) - set(SWITCHES):
        parser.error(f"there is no {unknown.pop()!r}")
    torch.set_num_threads(threads())
    turns = {"W1": options.turns, "W2": options.turns, "W3": options.prompts}
    found = {}
    for name in options.names or SWITCHES:
        found[name] = list(measure(name, turns))
        print(" · ".join(cells(name, found[name])), file=sys.stderr, flush=True)
    head = ["family", *(cell for work in WORKS for cell in (f"{work} tok/s", f"{work} / Llama"))]
    shown = table(head, (cells(name, comparisons) for name, comparisons in found.items()))
    figures: list[Figure] = [each for comparisons in found.values() for one in comparisons for each in one.figures()]
    file(options.json, shown, figures, bench="family", goal=GOAL)


if __name__ == "__main__":
    main()
