"""Tiny random checkpoints, written by `transformers` itself, and the tiny configs and tokenizers beside them."""

import json
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor, nn

from attend.model.config import ModelConfig
from attend.model.net.transformer import Decoder
from attend.model.text.tokenizer import Tokenizer
from attend.model.train.corpus import train_tokenizer

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
torch.set_num_threads(1)  # on tensors this small a second thread only waits: six times slower on a busy machine

VOCAB = 96
POSITIONS = 128

_LLAMA_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GPT2_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def _llama(**more: Any) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_LLAMA_SHAPE | more))


def _qwen2(**more: Any) -> nn.Module:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_LLAMA_SHAPE | more))


def _qwen3(**more: Any) -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_LLAMA_SHAPE | more))


def _gpt2(**more: Any) -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**_GPT2_SHAPE | more))


def shaped(family: str, **more: Any) -> nn.Module:
    """A model of a family whose config has the same keys as Llama's."""
    config = getattr(transformers, f"{family}Config")(**_LLAMA_SHAPE | {"num_hidden_layers": 4, "pad_token_id": 0} | more)
    return getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config)


_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "original_max_position_embeddings": 32}
_LONG = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.5, 2.0, 3.0],
    "long_factor": [1.5, 2.5, 5.0, 9.0],
    "original_max_position_embeddings": 32,
}
_WINDOW: dict[str, Any] = {"sliding_window": 7, "query_pre_attn_scalar": 11}

_QWEN_EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 20}

_GPT_OSS: dict[str, Any] = {"num_local_experts": 5, "num_experts_per_tok": 3, "sliding_window": 7, "head_dim": 16}
_GPT_OSS |= {"rope_parameters": _YARN | {"truncate": False}}

_DELTA: dict[str, Any] = {"head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_DELTA |= {"linear_key_head_dim": 8, "linear_value_head_dim": 12}
_ODD_DELTA: dict[str, Any] = {"linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_conv_kernel_dim": 2}
_ODD_DELTA |= {"layer_types": ["full_attention", "linear_attention", "linear_attention"], "num_hidden_layers": 3}
_ODD_DELTA |= {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1}


def _with_images(family: str, **more: Any) -> nn.Module:
    """A text model beside one of images."""
    config, text = (getattr(transformers, f"{family}{kind}Config") for kind in ("", "Text"))
    eyes = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32, "patch_size": 2}
    shape = _LLAMA_SHAPE | {"num_hidden_layers": 4, "pad_token_id": 0} | more
    model = getattr(transformers, f"{family}ForConditionalGeneration")
    return model(config(text_config=text(**shape).to_dict(), vision_config=eyes | {"num_position_embeddings": 4}))


def _beside(family: str, vision: dict[str, Any], inner: str | None = None, tied: bool = False, **more: Any) -> nn.Module:
    """The same, of a family whose model of images has another config; `inner`: the family of its text model."""
    config = getattr(transformers, f"{family}Config")
    text = getattr(transformers, f"{inner or f'{family}Text'}Config")
    shape = _LLAMA_SHAPE | {"num_hidden_layers": 4, "pad_token_id": 0} | more
    model = getattr(transformers, f"{family}ForConditionalGeneration")
    beside = {"mm_tokens_per_image": 4, "out_hidden_size": 64, "projector_hidden_size": 16, "tie_word_embeddings": tied}
    return model(config(text_config=text(**shape).to_dict(), vision_config=vision, **beside))


_EYES: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_EYES |= {"image_size": 28, "patch_size": 14}
_QWEN_EYES = {"depth": 1, "hidden_size": 16, "embed_dim": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
_QWEN_EYES |= {"patch_size": 2}
_MROPE = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [2, 1, 1]}
_BETA = {"llama_4_scaling_beta": 0.7}
_HUNYUAN_ROPE = {"rope_type": "dynamic", "rope_theta": 500.0, "alpha": 50.0, "factor": 1.0}

_OTHER_LAYERS = ["full_attention", "sliding_attention", "full_attention", "full_attention"]

KINDS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: _llama(tie_word_embeddings=False),
    "llama-tied": lambda: _llama(tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
    "llama-biased": lambda: _llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=False),
    "llama3-rope": lambda: _llama(rope_parameters=_LLAMA3_ROPE, tie_word_embeddings=False),
    "mistral": lambda: transformers.MistralForCausalLM(transformers.MistralConfig(**_LLAMA_SHAPE, sliding_window=None)),
    "qwen2": lambda: _qwen2(tie_word_embeddings=False),
    "qwen2-tied": lambda: _qwen2(tie_word_embeddings=True),
    "qwen3": lambda: _qwen3(tie_word_embeddings=False),
    "qwen3-tied": lambda: _qwen3(tie_word_embeddings=True, num_key_value_heads=4),
    "llama-yarn": lambda: _llama(rope_parameters={**_YARN}, tie_word_embeddings=False),
    "llama-linear": lambda: _llama(rope_parameters={"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0}),
    "llama-dynamic": lambda: _llama(rope_parameters={"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0}),
    "llama-half-biased": lambda: _llama(attention_bias=True, tie_word_embeddings=False),
    "gemma": lambda: shaped("Gemma"),
    "gemma2": lambda: shaped("Gemma2", **_WINDOW),
    "gemma2-uncapped": lambda: shaped("Gemma2", **_WINDOW, attn_logit_softcapping=None, final_logit_softcapping=3.0),
    "gemma3_text": lambda: shaped("Gemma3Text", **_WINDOW, sliding_window_pattern=3),
    "glm4": lambda: shaped("Glm4", tie_word_embeddings=False, head_dim=16),
    "granite": lambda: shaped(
        "Granite", embedding_multiplier=3.0, logits_scaling=2.0, residual_multiplier=0.4, attention_multiplier=0.2
    ),
    "olmo2": lambda: shaped("Olmo2"),
    "olmo3": lambda: shaped("Olmo3", sliding_window=7),
    "phi3": lambda: shaped("Phi3"),
    "phi3-long": lambda: shaped("Phi3", rope_parameters=_LONG, original_max_position_embeddings=32),
    "phi3-partial": lambda: shaped("Phi3", head_dim=8, rope_parameters={"rope_theta": 500.0, "partial_rotary_factor": 0.5}),
    "smollm3": lambda: shaped("SmolLM3", tie_word_embeddings=False),
    "mixtral": lambda: shaped("Mixtral", num_local_experts=5, rope_parameters={"rope_theta": 500.0}),
    "mixtral-sliding": lambda: shaped("Mixtral", num_local_experts=4, num_experts_per_tok=3, sliding_window=7),
    "qwen3_moe": lambda: shaped("Qwen3Moe", **_QWEN_EXPERTS, norm_topk_prob=True),
    "qwen3_moe-mixed": lambda: shaped("Qwen3Moe", **_QWEN_EXPERTS, decoder_sparse_step=2, mlp_only_layers=[3]),
    "qwen3_moe-sliding": lambda: shaped("Qwen3Moe", **_QWEN_EXPERTS, use_sliding_window=True, sliding_window=9),
    "qwen2_moe": lambda: shaped("Qwen2Moe", **_QWEN_EXPERTS, shared_expert_intermediate_size=20),
    "qwen2_moe-chosen": lambda: shaped(
        "Qwen2Moe", **_QWEN_EXPERTS, shared_expert_intermediate_size=20, qkv_bias=False, norm_topk_prob=True
    ),
    "gpt_neox": lambda: shaped("GPTNeoX"),
    "gpt_neox-tied": lambda: shaped("GPTNeoX", tie_word_embeddings=True, rope_parameters={**_YARN}),
    "gpt_neox-in-turn": lambda: shaped("GPTNeoX", use_parallel_residual=False, attention_bias=False, hidden_act="relu"),
    "cohere2": lambda: shaped("Cohere2", sliding_window=7, logit_scale=3.0),
    "cohere2-biased": lambda: shaped(
        "Cohere2", sliding_window=7, attention_bias=True, layer_types=_OTHER_LAYERS, logit_scale=2.5
    ),
    "starcoder2": lambda: shaped("Starcoder2", sliding_window=7),
    "starcoder2-plain": lambda: shaped("Starcoder2", use_bias=False, hidden_act="gelu", tie_word_embeddings=False),
    "gpt_oss": lambda: shaped("GptOss", **_GPT_OSS),
    "gpt_oss-tight": lambda: shaped("GptOss", **_GPT_OSS, swiglu_limit=0.9, swiglu_alpha=1.2, attention_bias=False),
    "qwen3_5": lambda: _with_images("Qwen3_5", **_DELTA),
    "qwen3_5_text": lambda: shaped("Qwen3_5Text", **_DELTA),
    "qwen3_5_text-odd": lambda: shaped("Qwen3_5Text", **_DELTA | _ODD_DELTA),
    "qwen3_5_moe": lambda: _with_images("Qwen3_5Moe", **_DELTA, **_QWEN_EXPERTS, shared_expert_intermediate_size=20),
    "qwen3_5_moe_text": lambda: shaped("Qwen3_5MoeText", **_DELTA, **_QWEN_EXPERTS, shared_expert_intermediate_size=12),
    "qwen3_next": lambda: shaped(
        "Qwen3Next", **_DELTA, **_QWEN_EXPERTS, shared_expert_intermediate_size=20, mlp_only_layers=[1]
    ),
    "seed_oss": lambda: shaped("SeedOss"),
    "ernie4_5": lambda: shaped("Ernie4_5", use_bias=True, tie_word_embeddings=False),
    "helium": lambda: shaped("Helium", attention_bias=True, mlp_bias=True),
    "exaone4": lambda: shaped("Exaone4", sliding_window=7),
    "exaone4-whole": lambda: shaped("Exaone4", sliding_window=None, layer_types=["full_attention"] * 4),
    "arcee": lambda: shaped("Arcee", mlp_bias=True),
    "hunyuan_v1_dense": lambda: shaped("HunYuanDenseV1", attention_bias=True),
    "hunyuan_v1_dense-alpha": lambda: shaped("HunYuanDenseV1", rope_parameters=_HUNYUAN_ROPE, tie_word_embeddings=True),
    "granite_swa": lambda: shaped(
        "GraniteSWA", sliding_window=7, layer_rope_theta=[0, 500.0, 1e4, 500.0], residual_multiplier=0.4, logits_scaling=2.0
    ),
    "ministral": lambda: shaped("Ministral", sliding_window=7, layer_types=_OTHER_LAYERS),
    "ministral3": lambda: shaped("Ministral3", rope_parameters=_YARN | _BETA | {"original_max_position_embeddings": 9}),
    "cohere": lambda: shaped("Cohere", logit_scale=3.0),
    "glm": lambda: shaped("Glm", head_dim=16),
    "stablelm": lambda: shaped("StableLm", use_qkv_bias=True),
    "stablelm-parallel": lambda: shaped("StableLm", use_parallel_residual=True),
    "vaultgemma": lambda: shaped("VaultGemma", **_WINDOW),
    "olmo": lambda: shaped("Olmo", attention_bias=True),
    "nanochat": lambda: shaped("NanoChat"),
    "nanochat-yarn": lambda: shaped("NanoChat", rope_parameters={**_YARN}, attention_bias=True),
    "nemotron": lambda: shaped("Nemotron", head_dim=16, mlp_bias=True, num_hidden_layers=2),
    "gemma3": lambda: _beside("Gemma3", _EYES | {"model_type": "siglip_vision_model"}, tied=True, **_WINDOW),
    "gemma3-capped": lambda: _beside(
        "Gemma3", _EYES | {"model_type": "siglip_vision_model"}, **_WINDOW, final_logit_softcapping=3.0
    ),
    "mistral3": lambda: _beside("Mistral3", _EYES | {"model_type": "pixtral"}, "Mistral", sliding_window=7),
    "mistral3-scaled": lambda: _beside(
        "Mistral3", _EYES | {"model_type": "pixtral"}, "Ministral3", tied=True, rope_parameters=_YARN | _BETA
    ),
    "qwen2_vl": lambda: _beside("Qwen2VL", _QWEN_EYES, rope_parameters=_MROPE),
    "qwen2_5_vl": lambda: _beside("Qwen2_5_VL", _QWEN_EYES, tied=True, rope_parameters=_MROPE),
    "qwen3_vl": lambda: _beside("Qwen3VL", _QWEN_EYES | {"deepstack_visual_indexes": [0]}, rope_parameters=_MROPE),
    "qwen3_vl_moe": lambda: _beside(
        "Qwen3VLMoe",
        _QWEN_EYES | {"deepstack_visual_indexes": [0]},
        rope_parameters=_MROPE,
        **_QWEN_EXPERTS,
        mlp_only_layers=[1],
    ),
    "qwen3_vl_moe-everywhere": lambda: _beside("Qwen3VLMoe", _QWEN_EYES | {"deepstack_visual_indexes": [0]}, **_QWEN_EXPERTS),
    "muse_glimmer": lambda: _beside("MuseGlimmer", _EYES, sliding_window=7, output_multiplier=2.0),
    "gpt2": lambda: _gpt2(),
    "gpt2-untied": lambda: _gpt2(tie_word_embeddings=False, activation_function="relu"),
}
"""Each kind of checkpoint that must be served, with the model of `transformers` that defines it."""


_WRITTEN = tempfile.TemporaryDirectory(prefix="attend-checkpoints-")
"""What this process has had written by `transformers`; removed at its end."""


@cache
def _written(kind: str) -> Path:
    """The folder of a kind, written at its first use."""
    folder = Path(_WRITTEN.name) / kind
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(len(kind))
        net = KINDS[kind]()
        spread(net)
    net.save_pretrained(folder)
    return folder


def write_checkpoint(kind: str, folder: Path) -> Path:
    """A checkpoint folder of `kind`, float32, its weights spread so that logits are far from flat; the caller may change it."""
    shutil.copytree(_written(kind), folder, dirs_exist_ok=True)
    return folder


def their_model(folder: Path, **options: Any) -> nn.Module:
    """What `transformers` makes of a folder."""
    [name] = json.loads((folder / "config.json").read_text(encoding="utf-8"))["architectures"]
    return getattr(transformers, name).from_pretrained(folder, dtype=torch.float32, **options).eval()


@torch.no_grad()
def their_logits(theirs: nn.Module, tokens: list[int]) -> Tensor:
    """The logits [T, V] of `transformers` for one text."""
    return theirs(torch.tensor([tokens])).logits[0]


@torch.no_grad()
def spread(net: nn.Module) -> None:
    for name, parameter in net.named_parameters():
        if name.endswith("A_log"):  # a state that fades at once leaves outputs near 0, which the norm of a head blows up
            parameter.uniform_(-4.0, 0.0)
        elif parameter.dim() > 1:
            parameter.normal_(0.0, 0.3)
        else:  # gains near 1, biases far from 0: none may be forgotten unseen
            parameter.add_(torch.empty_like(parameter).uniform_(-0.4, 0.4))


def tiny_config(**switches: Any) -> ModelConfig:
    """A config of a few thousand weights, with the given fields changed."""
    values: dict[str, Any] = {
        "family": "attend",
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_size": 8,
        "mlp_size": 48,
        "max_positions": POSITIONS,
    }
    return ModelConfig(**values | switches)


def tiny_decoder(config: ModelConfig, seed: int = 0) -> Decoder:
    """A decoder with weights spread like those of the checkpoints."""
    torch.manual_seed(seed)
    net = Decoder(config)
    torch.empty(config.vocab_size, config.hidden_size).normal_()  # the tests' seeds were chosen while an embedding drew this
    if config.positions == "learned":
        torch.empty(config.max_positions, config.hidden_size).normal_()
    spread(net)
    return net.eval()


def edit_config(folder: Path, name: str = "config.json", **changes: Any) -> None:
    """Change keys of a JSON file of the folder; a value of ... removes its key."""
    path = folder / name
    document = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({key: value for key, value in document.items() if value is not ...}), encoding="utf-8")


def edit_tensors(folder: Path, **changes: Any) -> None:
    """Change tensors of model.safetensors; a value of ... removes its tensor, `__` in a key stands for a dot."""
    path = folder / "model.safetensors"
    tensors = load_file(path) | {key.replace("__", "."): value for key, value in changes.items()}
    save_file({key: value for key, value in tensors.items() if value is not ...}, path, metadata={"format": "pt"})


def byte_level_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer with merges inside words, inside emoji, and one special token."""
    texts = [
        "the cat sat on the mat, then sat there. ",
        "naïve café, 日本語, 😀😁🚀👩‍👩‍👧 ",
        "def attend(q, k, v):\n    return v\n",
    ]
    return train_tokenizer(texts * 4, 320)


def write_tokenizer(folder: Path) -> Path:
    """Write tokenizer.json to a folder, made if absent."""
    folder.mkdir(parents=True, exist_ok=True)
    byte_level_tokenizer().raw.save(str(folder / "tokenizer.json"))
    return folder


def write_letters(folder: Path) -> Path:
    """Write a tokenizer.json of VOCAB tokens to a folder: each printable character, and <|endoftext|>."""
    raw = RawTokenizer(models.BPE({chr(code): i for i, code in enumerate(range(32, 127))}, []))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    raw.decoder = decoders.Fuse()
    raw.add_special_tokens(["<|endoftext|>"])
    assert raw.get_vocab_size() == VOCAB
    raw.save(str(folder / "tokenizer.json"))
    return folder
