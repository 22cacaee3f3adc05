"""llama.cpp itself reads the same GGUF files: its logits, its tokens and its texts are ours.

It runs where `ATTEND_TEST_LLAMA_CPP` names an interpreter that has llama-cpp-python.
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any
from unicodedata import normalize

import pytest
import torch

from attend.model.gguf.splits import SPLITS
from attend.model.net.checkpoint import load
from attend.model.text.tokenizer import Tokenizer
from tests.model import tokenizers
from tests.model.gguf.test_vocabulary import BYTE_LEVEL, SCORED, vocabulary
from tests.model.gguf_files import MADE, Type, byte_level, make, stored_as, write_gguf
from tests.model.net.formats.test_gguf import QUANTISED, TOKENS, our_logits, random_blocks, wide  # noqa: F401 - a fixture
from tests.model.text.test_tokenizer_kinds import NASTY

PYTHON = os.environ.get("ATTEND_TEST_LLAMA_CPP", "")
CHILD = Path(__file__).with_name("llama_cpp_child.py")
pytestmark = pytest.mark.skipif(not PYTHON, reason="ATTEND_TEST_LLAMA_CPP names no interpreter that has llama-cpp-python")

NOT_ITS = {"gpt_oss": "it rounds the columns of YaRN", "starcoder2-unbiased": "it asks for biases"}
ROUTED = ("glm4_moe", "glm4_moe-plain", "ernie4_5_moe", "minimax_m2", "olmoe", "granitemoe", "granitemoeshared")
NOT_ITS |= dict.fromkeys((*ROUTED, "granitemoehybrid", "granitemoehybrid-dense"), "not tried")
GELU = ("gemma", "gemma2", "gemma3_text", "starcoder2")
"""Its GELU is a table in float16."""


def ask(path: Path, **question: Any) -> dict[str, Any]:
    command = [PYTHON, str(CHILD)]
    question["path"] = str(path)
    answer = subprocess.run(command, input=json.dumps(question), stdout=subprocess.PIPE, text=True, check=True, timeout=200)
    found: dict[str, Any] = json.loads(answer.stdout)
    return found


def difference(path: Path, tokens: list[int]) -> tuple[float, float]:
    """Of our logits from llama.cpp's: the largest as a share of the largest logit, and the mean as a share of the mean."""
    theirs = torch.tensor(ask(path, tokens=tokens)["logits"])
    ours = our_logits(load(path, torch.float32, "cpu", context=64), tokens)
    return ((ours - theirs).abs().max() / theirs.abs().max()).item(), ((ours - theirs).norm() / theirs.norm()).item()


def its_texts(pre: str = "") -> list[str]:
    """Texts that it takes; where characters are composed first, such as are composed: it leaves that out."""
    composed = pre in SPLITS and SPLITS[pre].composed
    return [text for text in NASTY if text and "\0" not in text and not (composed and normalize("NFC", text) != text)]


@pytest.mark.parametrize("kind", [kind for kind in MADE if kind not in NOT_ITS])
def test_a_file_has_its_logits(kind, tmp_path):
    """Also beyond the window, and where a text is longer than what a stretched rope has learned."""
    path = write_gguf(make(kind, tmp_path / "theirs"), tmp_path / "tiny.gguf")
    assert difference(path, TOKENS * 3)[0] <= (5e-3 if kind in GELU else 1e-5)


@pytest.mark.parametrize("kind", [Type.F16, Type.BF16, *QUANTISED], ids=lambda kind: kind.name)
def test_a_file_of_a_type_has_its_logits(kind, wide, tmp_path):  # noqa: F811
    """It multiplies blocks by activations that it rounds to 8 bits, or to the file's type, so it is only near."""
    blocks = stored_as(kind) if kind in (Type.F16, Type.BF16) else random_blocks(kind)
    path = write_gguf(wide, tmp_path / "tiny.gguf", blocks)
    assert difference(path, TOKENS)[1] <= 0.03


@pytest.mark.parametrize("kind", [*BYTE_LEVEL, *SCORED])
def test_a_text_has_its_tokens_and_tokens_have_its_text(kind, tmp_path):
    path = write_gguf(make("llama", tmp_path / "theirs"), tmp_path / "tiny.gguf", tokens=vocabulary(kind))
    texts = its_texts(BYTE_LEVEL.get(kind, ""))
    tokenizer, found = Tokenizer.load(path), ask(path, texts=texts)
    for text, ids in zip(texts, found["ids"], strict=True):
        assert tokenizer.encode(text) == ids, text


@pytest.mark.parametrize("pre", list(SPLITS))
def test_a_split_makes_its_words(pre, tmp_path):
    tokens = byte_level(tokenizers.KINDS["gpt2"](), pre, add_bos_token=False)
    path = write_gguf(make("llama", tmp_path / "theirs"), tmp_path / "tiny.gguf", tokens=tokens)
    texts = its_texts(pre)
    tokenizer, found = Tokenizer.load(path), ask(path, texts=texts)
    for text, ids in zip(texts, found["ids"], strict=True):
        assert tokenizer.encode(text) == ids, text
