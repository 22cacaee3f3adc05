"""model/README.md says which families are served, how far each is checked, and which are refused."""

import json
from pathlib import Path

import pytest
import torch

from attend.model.config import ModelConfig
from attend.model.engine.choice import choose_backend
from attend.model.net.families.strangers import STRANGERS
from attend.model.net.families.table import FAMILIES
from attend.model.net.features import NATIVE, TRITON, features
from tests.model.checkpoints import KINDS

README = (Path(__file__).parents[3] / "model/README.md").read_text(encoding="utf-8")
MODELS = {
    "attend": "our own spelling: every mix of switches",
    "cohere2": "Command R7B",
    "gemma": "Gemma",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3, text alone",
    "glm4": "GLM-4",
    "gpt2": "GPT-2",
    "gpt_neox": "GPT-NeoX, Pythia",
    "gpt_oss": "gpt-oss, in bfloat16 and in MXFP4",
    "granite": "Granite 3",
    "llama": "Llama 2 and 3, and models of their shape",
    "mistral": "Mistral 7B",
    "mixtral": "Mixtral",
    "olmo2": "OLMo 2",
    "olmo3": "OLMo 3",
    "phi3": "Phi-3, Phi-4",
    "qwen2": "Qwen2, Qwen2.5",
    "qwen2_moe": "Qwen1.5-MoE, Qwen2-MoE",
    "qwen3": "Qwen3",
    "qwen3_5": "Qwen3.5, text alone",
    "qwen3_5_moe": "Qwen3.5's mixtures, text alone",
    "qwen3_5_moe_text": "their text models by themselves",
    "qwen3_5_text": "Qwen3.5's text model by itself",
    "qwen3_moe": "Qwen3-MoE",
    "qwen3_next": "Qwen3-Next",
    "smollm3": "SmolLM3",
    "starcoder2": "StarCoder2",
}


def configs() -> dict[str, list[ModelConfig]]:
    """What each tiny checkpoint says of itself, by `model_type`."""
    found: dict[str, list[ModelConfig]] = {}
    for make in KINDS.values():
        raw = json.loads(make().config.to_json_string(use_diff=False))
        found.setdefault(raw["model_type"], []).append(FAMILIES[raw["model_type"]].read(raw))
    return found


def served_table() -> str:
    """The table of families as the README has it."""
    rows, known = ["| model_type | models | tiny checkpoints compared | native (CPU) | Triton (GPU) |"], configs()
    rows.append("| --- | --- | --- | --- | --- |")
    for kind in sorted(FAMILIES):
        asked = [features(config) for config in known.get(kind, ())]
        computed = " | ".join(how_many([needs <= by for needs in asked]) for by in (NATIVE, TRITON))
        rows.append(f"| `{kind}` | {MODELS[kind]} | {len(asked) or 'none'} | {computed} |")
    return "\n".join(rows)


def how_many(which: list[bool]) -> str:
    """A word for all, some or none of the checkpoints."""
    return "as its switches" if not which else "yes" if all(which) else "in part" if any(which) else "no"


def refused_table() -> str:
    """The table of strangers as the README has it."""
    rows = ["| model_type | nearest | what differs |", "| --- | --- | --- |"]
    rows += [f"| `{kind}` | {(near and f'`{near}`') or 'none'} | {differs} |" for kind, (near, differs) in STRANGERS.items()]
    return "\n".join(rows)


def test_the_readme_lists_every_family_that_is_served_and_who_computes_it():
    assert served_table() in README, served_table()


def test_the_readme_lists_every_stranger():
    assert refused_table() in README, refused_table()


def test_a_family_is_compared_unless_its_spelling_is_our_own():
    assert set(FAMILIES) - {"attend"} == set(configs())


def test_every_checkpoint_is_computed_by_triton_on_a_gpu():
    pytest.importorskip("triton")
    for kind, known in configs().items():
        for each in known:
            assert (kind, choose_backend("auto", each, torch.bfloat16, "cuda", 32).name) == (kind, "triton")
