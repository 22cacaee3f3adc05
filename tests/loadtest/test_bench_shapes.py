"""Random weights of known shapes: the sizes are the published ones, and what is written is read and answers."""

import copy
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from attend.model.engine.speed_estimate import count_parameters
from attend.model.net.checkpoint import inspect, load_decoder
from attend.model.net.families.table import family_of, read_checked
from attend.model.net.rope import frequencies_of
from attend.model.shapes import SHAPES
from attend.model.train.loss import hidden_states
from loadtest.bench import engine, shapes
from tests.model.checkpoints import their_logits, their_model
from tests.model.net.test_published_configs import LLAMA, LLAMA3, PUBLISHED, QWEN3

LARGE = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "rope_theta": 5e5,
    "rope_scaling": LLAMA3 | {"factor": 8.0},
}
SIZES = {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32}
MODELS = {
    "llama-1b": (PUBLISHED["Llama-3.2-1B"], 1_235_814_400),
    "llama-8b": (LLAMA | LARGE, 8_030_261_248),
    "qwen3-4b": (QWEN3 | SIZES, 4_022_468_096),
    "qwen3-30b-a3b": (PUBLISHED["Qwen3-30B-A3B"], 30_532_122_624),
    "gemma3-4b": (PUBLISHED["gemma-3-4b-it"], 3_880_263_168),
    "lfm2-1.2b": (PUBLISHED["LFM2-1.2B"], 1_170_340_608),
}
"""The published config.json of a shape, and the parameters that the model is known to have."""
FAMILIES = [*MODELS, "S"]
TOKENS = list(range(300, 348))


def read(raw):
    return read_checked(family_of(raw), raw)


def without_ends(config, **more):
    return replace(config, eos_token_ids=(), bos_token_id=None, **more)


@pytest.mark.parametrize("name", MODELS)
def test_a_shape_has_the_sizes_of_the_published_model(name):
    published, parameters = MODELS[name]
    ours, theirs = (without_ends(read(raw)) for raw in (SHAPES[name], published))
    assert ours == replace(theirs, family=ours.family)
    assert count_parameters(ours) == parameters


@pytest.fixture
def tiny(monkeypatch):
    """All shapes with fewer and smaller layers; rows are whole blocks of 256."""
    small = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 7, "num_attention_heads": 4}
    small |= {"num_key_value_heads": 2, "max_position_embeddings": 4096}
    others = {"head_dim": 64, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256, "sliding_window": 16}
    others |= {"block_ff_dim": 512, "full_attn_idxs": [1, 6], "query_pre_attn_scalar": 64}
    for name, raw in copy.deepcopy(SHAPES).items():
        monkeypatch.setitem(SHAPES, name, raw | small | {key: value for key, value in others.items() if key in raw})


@torch.no_grad()
def scores_of(path, dtype=torch.float32):
    net = load_decoder(path, dtype, "cpu", context=len(TOKENS))
    return net.logits(hidden_states(net, torch.tensor([TOKENS])))


@pytest.mark.parametrize("form", ["bf16", *shapes.FILES])
@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_written_has_the_sizes_and_answers_with_many_tokens(tiny, tmp_path, name, form):
    path = shapes.write_shape(name, form, tmp_path)
    found, wanted = inspect(path), read(SHAPES[name])
    assert without_ends(found, rope_scaling=None) == without_ends(wanted, rope_scaling=None)
    for ours, theirs in zip(found.layers, wanted.layers, strict=True):
        assert (ours.rope is None) == (theirs.rope is None)
        if ours.rope and theirs.rope:
            assert torch.allclose(frequencies_of(ours.rope, 99)[0], frequencies_of(theirs.rope, 99)[0])
    scores_TV = scores_of(path)
    assert scores_TV.isfinite().all()
    assert 0.1 < scores_TV.std() < 10
    best_T = scores_TV.argmax(-1)
    assert len(best_T.unique()) >= 10
    assert (best_T == torch.tensor(TOKENS)).float().mean() < 0.5, "a token is followed by itself"


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_reads_the_folder_as_we_do(tiny, tmp_path, name):
    folder = shapes.write_shape(name, folder=tmp_path)
    theirs = their_logits(their_model(folder), TOKENS)
    assert (scores_of(folder) - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_a_model_is_written_again_only_where_it_is_not_as_it_should_be(tiny, tmp_path, monkeypatch, capsys):
    for form in ("bf16", "q4_0"):
        assert shapes.write_shape("S", form, tmp_path) == shapes.write_shape("S", form, tmp_path)
    assert capsys.readouterr().err.count("writing") == 2
    monkeypatch.setitem(SHAPES, "S", SHAPES["S"] | {"num_hidden_layers": 2})
    assert inspect(shapes.write_shape("S", folder=tmp_path)).num_layers == 2


def test_a_file_is_written_by_a_command_and_answers(tiny, tmp_path, capsys):
    shapes.main(["qwen3-4b", str(tmp_path), "--format", "q4_0"])
    path = tmp_path / "qwen3-4b-q4_0.gguf"
    assert capsys.readouterr().out == f"{path}\n"
    words = ["-m", "attend.service.commands.cli", "generate", "--model", str(path), "--max-tokens", "8", "Hello"]
    assert subprocess.run([sys.executable, *words], check=True, capture_output=True, text=True).stdout.strip()


@pytest.mark.parametrize("main", [shapes.main, lambda words: engine.main(["--shape", *words])])
def test_an_unknown_shape_names_the_nearest(main, capsys):
    with pytest.raises(SystemExit):
        main(["Qwen3_4B"])
    assert "there is no shape 'Qwen3_4B'; the nearest is qwen3-4b" in capsys.readouterr().err
