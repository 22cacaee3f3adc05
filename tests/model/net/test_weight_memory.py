"""Weights that do not fit into memory are refused by name before they are read."""

import pytest
import torch

import attend.model.net.weight_memory as room
from attend.model.errors import SettingError
from attend.model.net.checkpoint import load_decoder, quantised_decoder, save
from attend.model.net.quantised import count_bytes
from tests.model.checkpoints import tiny_config, tiny_decoder


@pytest.fixture
def folder(tmp_path):
    save(tiny_decoder(tiny_config(head_size=32)), tmp_path, torch.bfloat16)
    return tmp_path


@pytest.mark.parametrize("dummy", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_weights_that_do_not_fit_are_refused_before_they_are_read(folder, dtype, dummy, monkeypatch):
    needed = count_bytes(quantised_decoder(folder), dtype)
    monkeypatch.setattr(room, "available_memory", lambda: needed)
    load_decoder(folder, dtype, "cpu", dummy=dummy)
    monkeypatch.setattr(room, "available_memory", lambda: needed - 1)
    monkeypatch.setattr("attend.model.net.checkpoint.fill", None)
    told = r"does not fit: its weights take 0\.0 GB as \w+, and 0\.0 GB of memory are free; .*=int8 or .*=int4"
    with pytest.raises(SettingError, match=told):
        load_decoder(folder, dtype, "cpu", dummy=dummy)
