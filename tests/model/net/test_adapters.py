"""LoRA adapters: each is the merged model, read as PEFT means it, and no token depends on the adapters beside it."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from attend.model.errors import CheckpointError
from attend.model.net.adapters import AdaptedDecoder, Adapter, AdapterBatch, targets_of
from attend.model.net.checkpoint import load_decoder
from attend.model.net.peft import read_config
from attend.model.train.loss import hidden_states
from tests.model.adapters import CONFIG, linears, merge, write_adapter
from tests.model.checkpoints import their_logits, their_model, write_checkpoint

TOKENS = [5, 17, 80, 3, 44, 61, 9, 2]
LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
KINDS = {
    "llama": LLAMA,
    "qwen2": ("q_proj", "v_proj"),
    "gemma2": ("o_proj", "up_proj"),
    "glm4": ("q_proj", "k_proj", "gate_up_proj"),
    "phi3": ("qkv_proj", "gate_up_proj", "down_proj"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "gpt_neox": ("query_key_value", "dense", "dense_4h_to_h"),
    "cohere2": ("k_proj", "down_proj"),
    "mixtral": ("q_proj", "o_proj"),
    "deepseek_v3": ("q_b_proj", "kv_a_proj_with_mqa"),
    "youtu": ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"),
}
"""Kinds of checkpoint, and the modules that an adapter changes: fused here, or there, or turned, or lying the other way."""


@torch.inference_mode()
def logits(folder: Path, adapter: Path | None = None) -> Tensor:
    net = load_decoder(folder, torch.float32, "cpu", keep_codes=True)
    if adapter is not None:
        decoder, read = AdaptedDecoder(net), targets_of(folder).read(adapter)
        decoder.use([AdapterBatch(read, range(len(TOKENS)))], len(TOKENS))
    return net.logits(hidden_states(net, torch.tensor([TOKENS])))


def modules_of(kind: str, folder: Path) -> dict[str, tuple[int, int]]:
    return linears(folder, KINDS[kind], lies=kind == "gpt2")


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_with_an_adapter_is_the_merged_model(tmp_path, kind):
    """That of `transformers`, whatever part of which fused matrix a module is."""
    folder = write_checkpoint(kind, tmp_path / "model")
    modules = modules_of(kind, folder)
    adapter = write_adapter(tmp_path / "adapter", modules)
    merged = merge(folder, adapter, tmp_path / "merged", dict.fromkeys(modules, 2.0), lies=kind == "gpt2")
    found, wanted = logits(folder, adapter), their_logits(their_model(merged), TOKENS)
    assert (found - wanted).abs().max() <= 2e-4 * wanted.abs().max()
    assert (logits(folder) - wanted).abs().max() > 0.05 * wanted.abs().max()  # so a forgotten one would be seen


@pytest.mark.parametrize("kind", ["llama", "gpt_neox", "gpt2"])
@pytest.mark.parametrize("of_base", [True, False])
def test_an_adapter_may_have_been_made_of_the_model_without_its_head(tmp_path, kind, of_base):
    """Its names then lack the prefix, whatever the names of the model that is served."""
    folder = write_checkpoint(kind, tmp_path / "model")
    modules = modules_of(kind, folder)
    whole = write_adapter(tmp_path / "whole", modules)
    start = f"{next(iter(modules)).split('.')[0]}."
    base = write_adapter(tmp_path / "base", {name.removeprefix(start): size for name, size in modules.items()})
    wanted = logits(folder, whole)
    if not of_base:
        tensors = load_file(folder / "model.safetensors")
        save_file({name.removeprefix(start): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    assert torch.equal(wanted, logits(folder, base if of_base else whole))


def test_an_adapter_with_names_of_two_kinds_is_refused(tmp_path, folder):
    modules = linears(folder, ["q_proj"])
    mixed = {name.removeprefix("model.") if ".1." in name else name: size for name, size in modules.items()}
    adapter = write_adapter(tmp_path, mixed)
    with pytest.raises(CheckpointError, match=r"layers\.1.*names of two kinds, with and without 'model\.'") as caught:
        targets_of(folder).read(adapter)
    assert str(adapter) in str(caught.value)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_checkpoint("llama", tmp_path_factory.mktemp("model"))


def test_ranks_and_alphas_hold_by_pattern_and_the_layers_that_are_named_change(folder, tmp_path):
    """rsLoRA too: alpha over the root of the rank."""
    modules = linears(folder, ["q_proj", "down_proj"])
    first = {name: size for name, size in modules.items() if ".layers.1." in name}
    ranks = {name: 2 for name in first if name.endswith("q_proj")}
    changes = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {r"layers\.1\.mlp\.down_proj": 3}, "use_rslora": True}
    adapter = write_adapter(tmp_path / "adapter", first, ranks=ranks, layers_to_transform=[1], **changes)
    scales = {name: 8 / 2**0.5 if name.endswith("q_proj") else 3 / 4**0.5 for name in first}
    merged = merge(folder, adapter, tmp_path / "merged", scales)
    torch.testing.assert_close(logits(folder, adapter), logits(merged), rtol=0, atol=1e-4)


MODULES = ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"]


@pytest.mark.parametrize(
    ("changes", "changed"),
    [
        ({"target_modules": ["q_proj"]}, [True, True, False]),
        ({"target_modules": ["proj"]}, [False, False, False]),
        ({"target_modules": ["self_attn.q_proj", "model.layers.1.mlp.up_proj"]}, [True, True, True]),
        ({"target_modules": r".*\.1\..*_proj"}, [False, True, True]),
        ({"target_modules": "q_proj"}, [False, False, False]),
        ({"target_modules": "all-linear"}, [True, True, True]),
        ({"target_modules": "all-linear", "exclude_modules": ["up_proj"]}, [True, True, False]),
        ({"target_modules": ["q_proj"], "exclude_modules": r".*layers\.0.*"}, [False, True, False]),
        ({"target_modules": ["q_proj", "up_proj"], "layers_to_transform": 1}, [False, True, True]),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": "layers"}, [True, False, False]),
        ({"target_modules": ["q_proj"], "layers_to_transform": [0], "layers_pattern": ["h"]}, [False, False, False]),
        ({"target_modules": ["q_proj"], "layers_to_transform": []}, [True, True, False]),
    ],
    ids=str,
)
def test_the_modules_that_change_are_those_that_peft_would_change(tmp_path, changes, changed):
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG | changes), encoding="utf-8")
    config = read_config(tmp_path)
    assert changed == [config.changes(module) for module in MODULES]


BAD_CONFIGS = {
    "use_dora": (True, "use_dora = True is not supported"),
    "modules_to_save": (["lm_head"], "modules_to_save = .* is not supported"),
    "bias": ("all", "bias must be none; got 'all'"),
    "peft_type": ("IA3", "peft_type must be LORA; got 'IA3'"),
    "target_parameters": (["mlp.experts.down_proj"], "target_parameters = .* is not supported"),
    "something_new": ({"on": 1}, "something_new = .* is not supported"),
    "init_lora_weights": ("pissa_niter_4", "init_lora_weights 'pissa_niter_4' is not supported, for it changes"),
    "r": (0, "r must be a rank from 1 to 512; got '0'"),
    "alpha_pattern": ({"(": 1}, "alpha_pattern '\\(' is no regular expression"),
}


@pytest.mark.parametrize(("key", "value", "sentence"), [(key, *rest) for key, rest in BAD_CONFIGS.items()], ids=BAD_CONFIGS)
def test_what_is_not_carried_out_is_refused_by_its_key(folder, tmp_path, key, value, sentence):
    write_adapter(tmp_path, linears(folder, ["q_proj"]), **{key: value} if key != "r" else {})
    document = json.loads((tmp_path / "adapter_config.json").read_text()) | {key: value}
    (tmp_path / "adapter_config.json").write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(CheckpointError, match=rf"adapter_config\.json: {sentence}") as caught:
        targets_of(folder).read(tmp_path)
    assert "\n" not in str(caught.value)


Q = "base_model.model.model.layers.1.self_attn.q_proj"
BAD_TENSORS = {
    "missing": ({f"{Q}.lora_A.weight": None}, rf"tensor {Q}.lora_A.weight is missing, though adapter_config.json names"),
    "of a wider model": (
        {f"{Q}.lora_A.weight": torch.ones(4, 64)},
        rf"tensor {Q}.lora_A.weight has shape \[4, 64\], expected \[4, 32\]",
    ),
    "of another rank": (
        {f"{Q}.lora_B.weight": torch.ones(32, 8)},
        rf"tensor {Q}.lora_B.weight has shape \[32, 8\], expected \[32, 4\]",
    ),
    "of a deeper model": (
        {Q.replace("1", "7") + ".lora_A.weight": torch.ones(4, 32)},
        r"layers\.7\.self_attn.* matches no weight matrix",
    ),
    "of the head": (
        {"base_model.model.lm_head.lora_A.weight": torch.ones(4, 32)},
        r"lm_head\.lora_A\.weight matches no weight matrix",
    ),
    "no number": ({f"{Q}.lora_B.weight": torch.full((32, 4), torch.nan)}, rf"tensor {Q}.lora_B.weight holds NaN or infinity"),
    "integers": ({f"{Q}.lora_B.weight": torch.ones(32, 4, dtype=torch.int64)}, r"is torch.int64, expected floating point"),
}


@pytest.mark.parametrize(("changes", "sentence"), BAD_TENSORS.values(), ids=BAD_TENSORS)
def test_an_adapter_for_another_model_is_one_sentence_with_file_and_tensor(folder, tmp_path, changes, sentence):
    write_adapter(tmp_path, linears(folder, ["q_proj"]))
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path) | changes
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path)
    with pytest.raises(CheckpointError, match=sentence) as caught:
        targets_of(folder).read(tmp_path)
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_a_file_larger_than_what_its_config_names_is_not_read(folder, tmp_path):
    """Such as a whole model under an adapter's name. A file that is no larger is read whole before it is looked at."""
    path = write_adapter(tmp_path, linears(folder, ["q_proj"])) / "adapter_model.safetensors"
    with path.open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(
        CheckpointError, match=rf"damaged: it has {1 << 40} bytes, but what adapter_config.json names has at most"
    ):
        targets_of(folder).read(tmp_path)


def test_a_folder_that_is_no_adapter_is_a_sentence(folder, tmp_path):
    targets = targets_of(folder)
    with pytest.raises(CheckpointError, match=r"nowhere is not a folder: an adapter is a folder with adapter_config\.json"):
        targets.read(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"adapter_config\.json is missing"):
        targets.read(tmp_path)
    adapter = write_adapter(tmp_path, linears(folder, ["q_proj"]))
    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match=r"adapter_model\.safetensors is damaged"):
        targets.read(adapter)
    weights.rename(adapter / "adapter_model.bin")
    with pytest.raises(
        CheckpointError, match=r"safetensors is missing; adapter_model\.bin is a pickle, which Attend never opens"
    ):
        targets.read(adapter)
    write_adapter(tmp_path, {"model.layers.0.no_proj": (32, 32)})
    with pytest.raises(
        CheckpointError, match=r"adapter_config\.json: target_modules \('no_proj',\) match no weight matrix of this"
    ):
        targets.read(adapter)


def test_an_adapter_is_known_by_what_it_holds(folder, tmp_path):
    """Its weights and its config: a scale makes another one of it, a name does not."""
    modules, targets = linears(folder, ["q_proj"]), targets_of(folder)
    a, b, c, d = (
        targets.read(write_adapter(tmp_path / name, modules, seed, lora_alpha=alpha)).digest
        for name, seed, alpha in (("a", 1, 8), ("b", 1, 8), ("c", 2, 8), ("d", 1, 16))
    )
    assert a == b
    assert len({a, c, d}) == 3


@torch.inference_mode()
def test_tokens_without_an_adapter_have_the_bits_that_they_had(folder, tmp_path):
    """Beside others that have one, and after these have gone."""
    net = load_decoder(folder, torch.float32, "cpu")
    before = hidden_states(net, torch.tensor([TOKENS] * 3))
    decoder, targets = AdaptedDecoder(net), targets_of(folder)
    adapters: list[Adapter] = [targets.read(write_adapter(tmp_path / str(n), linears(folder, LLAMA), n)) for n in range(2)]
    length = len(TOKENS)
    decoder.use(
        [AdapterBatch(adapters[0], range(length)), AdapterBatch(adapters[1], range(2 * length, 3 * length))], 3 * length
    )
    beside = hidden_states(net, torch.tensor([TOKENS] * 3))
    assert torch.equal(before[length : 2 * length], beside[length : 2 * length])
    assert not torch.allclose(before[:length], beside[:length], atol=1e-2)
    assert not torch.allclose(beside[:length], beside[2 * length :], atol=1e-2)
    decoder.use((), 0)
    assert torch.equal(before, hidden_states(net, torch.tensor([TOKENS] * 3)))
