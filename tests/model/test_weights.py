"""A folder's files: where its weights are, what they may not be, and how weights of other kinds become what is read."""

import os
import struct
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from attend.model.errors import CheckpointError
from attend.model.net.checkpoint import inspect, load_decoder
from attend.model.weights import INDEX, MAX_JSON, WHOLE, weight_files
from tests.model.checkpoints import write_checkpoint
from tests.model.net.test_checkpoint import shard


@pytest.fixture
def folder(tmp_path) -> Path:
    return write_checkpoint("llama-tied", tmp_path / "a 'quoted' folder")


def refusal(folder: Path) -> str:
    """The one sentence with which loading and inspection both refuse a folder."""
    said = set()
    for check in (inspect, lambda path: load_decoder(path, torch.float32, "cpu")):
        with pytest.raises(CheckpointError) as caught:
            check(folder)
        said.add(str(caught.value))
    (sentence,) = said
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "weights.pth"])
def test_pickled_weights_are_refused(folder, name):
    (folder / WHOLE).rename(folder / name)
    (folder / "training_args.bin").write_bytes(b"no weights")
    assert f"{folder / WHOLE} is missing; {name} is a pickle, which Attend never opens: " in refusal(folder)


LINKED = ["config.json", "generation_config.json", WHOLE, "tokenizer.json", "chat_template.jinja"]


@pytest.mark.parametrize("name", LINKED)
def test_a_link_out_of_the_folder_is_refused_with_its_target(folder, tmp_path, name):
    outside = tmp_path / f"outside-{name}"
    (folder / name).touch()
    (folder / name).rename(outside)
    (folder / name).symlink_to(outside)
    assert refusal(folder).startswith(f"{folder / name} is a link to {outside}, outside the folder")


@pytest.mark.parametrize("shared", [False, True])
def test_links_of_the_hub_s_cache_are_followed(folder, tmp_path, shared):
    """From snapshots/COMMIT to blobs/HASH, which may be a link itself, to a blob that repositories share."""
    repository = tmp_path / "hub" / "models--org--tiny"
    snapshot, blob = repository / "snapshots" / "c0", repository / "blobs" / "b0"
    for path in (snapshot, blob.parent):
        path.mkdir(parents=True)
    (snapshot / "config.json").write_bytes((folder / "config.json").read_bytes())
    store = blob
    if shared:
        store = tmp_path / "hub" / "blobs" / "s0"
        store.parent.mkdir()
        blob.symlink_to(store)
    store.write_bytes((folder / WHOLE).read_bytes())
    (snapshot / WHOLE).symlink_to(Path("../../blobs/b0"))
    assert inspect(snapshot) == inspect(folder)
    (snapshot / WHOLE).unlink()
    (snapshot / WHOLE).symlink_to(folder / WHOLE)
    assert "outside the folder" in refusal(snapshot)


def test_a_header_too_long_to_read_is_refused_before_it_is_read(folder):
    path = folder / WHOLE
    path.write_bytes(struct.pack("<Q", 99_000_000))
    os.truncate(path, 200_000_000)  # a hole: it takes no disk
    assert refusal(folder) == f"{path} has a header of 99000000 bytes, but at most {MAX_JSON} are read"


@pytest.mark.long
def test_a_header_of_very_many_tensors_is_refused_in_few_words_and_seconds(folder):
    entries = ",".join(f'"t{i}":{{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}' for i in range(400_000))
    header = f"{{{entries}}}".encode()
    assert 20_000_000 < len(header) < MAX_JSON
    (folder / WHOLE).write_bytes(struct.pack("<Q", len(header)) + header)
    started = time.process_time()
    assert len(refusal(folder)) < 1000
    assert time.process_time() - started < 60


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", INDEX])
def test_a_json_file_too_long_to_read_is_refused_before_it_is_read(folder, name):
    if name == INDEX:
        (folder / WHOLE).unlink()
    (folder / name).touch()
    os.truncate(folder / name, MAX_JSON + 1)
    assert refusal(folder) == f"{folder / name} has {MAX_JSON + 1} bytes, but at most {MAX_JSON} are read"


@pytest.mark.parametrize("shards", [True, False])
def test_a_whole_file_is_taken_beside_an_index_and_the_log_names_what_is_not(folder, caplog, shards):
    """As `transformers` does: whoever saves anew to a folder of shards leaves their index there."""
    fresh = load_file(folder / WHOLE)
    table = shard(folder)
    if not shards:
        for name in set(table.values()):
            (folder / name).unlink()
    fresh["model.norm.weight"] = fresh["model.norm.weight"] + 1
    save_file(fresh, folder / WHOLE, {"format": "pt"})
    (folder / "consolidated.safetensors").write_bytes(b"not read")
    caplog.set_level("INFO", "attend.model")
    net = load_decoder(folder, torch.float32, "cpu")
    assert torch.equal(net.norm.weight, fresh["model.norm.weight"]) and inspect(folder) == net.config
    others = ["consolidated.safetensors", *(sorted(set(table.values())) if shards else [])]
    said = f"{folder}: {WHOLE} is read, {INDEX}, {', '.join(others)} are ignored"
    assert [record.getMessage() for record in caplog.records] == [said]


def rename(folder: Path, *names: str) -> None:
    """Put the weights into files of these names, without an index."""
    tensors = load_file(folder / WHOLE)
    (folder / WHOLE).unlink()
    for number, name in enumerate(names):
        part = {key: value for i, (key, value) in enumerate(tensors.items()) if i % len(names) == number}
        save_file(part, folder / name, {"format": "pt"})


@pytest.mark.parametrize("count", [1, 3])
def test_all_shards_of_one_set_are_taken_without_an_index(folder, count):
    whole = load_decoder(folder, torch.float32, "cpu")
    rename(folder, *(f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)))
    loaded = load_decoder(folder, torch.float32, "cpu")
    assert inspect(folder) == whole.config
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), loaded.parameters(), strict=True))


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (["model-00001-of-00003.safetensors", "model-00003-of-00003.safetensors"], "not all shards of a set"),
        (["model-00001-of-00001.safetensors", "model-00001-of-00002.safetensors"], "not all shards of a set"),
        (["weights.safetensors"], "not all shards of a set"),
        (["consolidated.safetensors"], "there, but not all shards of a set"),
    ],
)
def test_files_that_are_not_surely_the_weights_are_named(folder, names, why):
    rename(folder, *names)
    sentence = refusal(folder)
    assert sentence.startswith(f"{folder / WHOLE} is missing; {', '.join(names)}") and why in sentence


def test_a_tensor_in_two_shards_is_named_with_both(folder):
    shard(folder)
    first, second = weight_files(folder)
    second.write_bytes(first.read_bytes())
    assert f"tensor model.embed_tokens.weight is in {first.name} and in {second.name}" in refusal(folder)
