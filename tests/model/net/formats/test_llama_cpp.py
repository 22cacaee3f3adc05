"""llama.cpp itself reads the same GGUF files: its log probabilities and its tokens are ours."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
import torch
from torch import nn

from attend.model.gguf.splits import SPLITS
from attend.model.net.checkpoint import load_decoder
from attend.model.text.tokenizer import Tokenizer
from tests.model import tokenizers
from tests.model.checkpoints import DEEPSEEK, LATENT, VOCAB, shaped
from tests.model.gguf.test_vocabulary import BYTE_LEVEL, MERGED, SCORED, vocabulary
from tests.model.gguf_files import MADE, Type, byte_level, make, stored_as, write_gguf
from tests.model.net.formats.test_gguf import DELTA_KINDS, QUANTISED, TOKENS, our_logits, random_blocks, wide  # noqa: F401 - a fixture
from tests.model.text.test_tokenizer_kinds import NASTY

CHILD = Path(__file__).with_name("llama_cpp_child.py")
pytestmark = pytest.mark.skipif(find_spec("xllamacpp") is None, reason="xllamacpp, which make setup brings, is not here")

NOT_ITS = {"gpt_oss": "it rounds the columns of YaRN", "starcoder2-unbiased": "it asks for biases"}
NOT_ITS |= dict.fromkeys(("qwen3_5_text", "qwen3_5_text-odd", "qwen3_5_moe_text"), "it takes values as wide as keys alone")
NOT_ITS |= {"exaone4": "it takes windows where there are 64 layers alone", "granitemoehybrid": "it asks for a recurrent layer"}
NOT_ITS |= {"deepseek_v2-groups": "it takes a group for its two best experts, as DeepSeek-V3 does"}
ITS: dict[str, Callable[[], nn.Module]] = {
    "arcee": lambda: shaped("Arcee"),
    "deepseek_v2": lambda: shaped("DeepseekV2", **LATENT, **DEEPSEEK),
    "ernie4_5": lambda: shaped("Ernie4_5", tie_word_embeddings=False),
    "hunyuan_v1_dense": lambda: shaped("HunYuanDenseV1"),
    "nemotron": lambda: shaped("Nemotron"),
    "olmoe": lambda: shaped("Olmoe", num_experts=6, num_experts_per_tok=3, num_key_value_heads=4),
}
"""What it takes of kinds that it takes in part: biases, heads and projections that the others have are refused, or left out."""
METADATA: dict[str, dict[str, Any]] = {
    "ernie4_5_moe": {"ernie4_5-moe.expert_shared_feed_forward_length": 40},
    "qwen2_vl": {"qwen2vl.attention.layer_norm_rms_epsilon": 1e-12},  # it reads none
    **{key: {"glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 0} for key in ("glm4_moe", "glm4_moe-plain")},
}
LEAST = -80
"""It takes logarithms of probabilities, which are 0 below some 1e-38."""
GELU = ("gemma", "gemma2", "gemma3_text", "gemma4_text", "gemma4_text-shared", "gemma4_text-experts", "starcoder2")
"""Its GELU is a table in float16."""


def ask(path: Path, **question: Any) -> dict[str, Any]:
    command = [sys.executable, str(CHILD)]
    question["path"] = str(path)
    answer = subprocess.run(command, input=json.dumps(question), stdout=subprocess.PIPE, text=True, check=True, timeout=200)
    found: dict[str, Any] = json.loads(answer.stdout.splitlines()[-1])
    return found


def difference(path: Path, tokens: list[int]) -> tuple[float, float]:
    """Of our log probabilities from llama.cpp's: the largest as a share of the largest, and the mean as a share of the mean."""
    theirs = torch.tensor(ask(path, tokens=tokens, vocab=VOCAB)["logprobs"]).clamp(min=LEAST)
    ours = our_logits(load_decoder(path, torch.float32, "cpu", context=64), tokens).log_softmax(-1).clamp(min=LEAST)
    return ((ours - theirs).abs().max() / theirs.abs().max()).item(), ((ours - theirs).norm() / theirs.norm()).item()


def written(tokens: dict[str, Any], folder: Path) -> Path:
    """A file with a vocabulary, and with a vector for each of its tokens."""
    shaped("Llama", vocab_size=len(tokens["tokens"])).save_pretrained(folder / "theirs")
    return write_gguf(folder / "theirs", folder / "tiny.gguf", tokens=tokens)


def its_texts(pre: str = "") -> list[str]:
    """Texts that it takes; where characters are composed first, such as are composed: it leaves that out."""
    composed = pre in SPLITS and SPLITS[pre].uses_nfc
    return [text for text in NASTY if text and "\0" not in text and not (composed and normalize("NFC", text) != text)]


@pytest.mark.parametrize("kind", [kind for kind in MADE if kind not in NOT_ITS])
def test_a_file_has_its_logits(kind, tmp_path):
    """Also beyond the window, and where a text is longer than what a stretched rope has learned."""

    def all_its(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if "nextn" in name]:
            del tensors[name]

    theirs = make(kind, tmp_path / "theirs", ITS.get(kind))
    path = write_gguf(theirs, tmp_path / "tiny.gguf", metadata=METADATA.get(kind), change=all_its)
    assert difference(path, TOKENS * 3)[0] <= (5e-3 if kind in GELU else 2e-4 if kind in DELTA_KINDS else 1e-5)


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, *QUANTISED], ids=lambda kind: kind.name)
def test_a_file_of_a_type_has_its_logits(kind, wide, tmp_path):  # noqa: F811
    """It multiplies blocks by activations that it rounds to 8 bits, or to the file's type, so it is only near."""
    blocks = stored_as(kind) if kind in (Type.F16, Type.BF16) else random_blocks(kind)
    path = write_gguf(wide, tmp_path / "tiny.gguf", blocks)
    assert difference(path, TOKENS)[1] <= 0.03


@pytest.mark.parametrize("kind", [*BYTE_LEVEL, *SCORED, *MERGED])
def test_a_text_has_its_tokens_and_tokens_have_its_text(kind, tmp_path):
    path = written(vocabulary(kind), tmp_path)
    texts = its_texts(BYTE_LEVEL.get(kind, ""))
    tokenizer, found = Tokenizer.load(path), ask(path, texts=texts)
    for text, ids in zip(texts, found["ids"], strict=True):
        assert tokenizer.encode(text) == ids, text


@pytest.mark.parametrize("pre", list(SPLITS))
def test_a_split_makes_its_words(pre, tmp_path):
    tokens = byte_level(tokenizers.KINDS["gpt2"](), pre, add_bos_token=False)
    path = written(tokens, tmp_path)
    texts = its_texts(pre)
    tokenizer, found = Tokenizer.load(path), ask(path, texts=texts)
    for text, ids in zip(texts, found["ids"], strict=True):
        assert tokenizer.encode(text) == ids, text
