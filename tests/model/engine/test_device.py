"""A GPU that torch cannot use is told with torch's own reason, such as the driver's version."""

import pytest
import torch

from attend.model.engine import device
from attend.model.errors import SettingError

OLD = "The NVIDIA driver on your system is too old (found version 12020). Please update your GPU driver\nby downloading"


@pytest.fixture
def old_driver(monkeypatch, tmp_path):
    def init() -> None:
        raise RuntimeError(OLD)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(device, "DRIVER", tmp_path / "nvidiactl")
    return tmp_path / "nvidiactl"


def test_cuda_is_refused_with_torchs_reason(old_driver):
    with pytest.raises(SettingError, match=r"sees no CUDA device: The NVIDIA driver .*found version 12020.* GPU driver$"):
        device.choose_device("cuda")


def test_auto_serves_on_the_cpu_and_says_why_where_a_gpu_is_there(old_driver, caplog):
    assert device.choose_device("auto") == "cpu" and caplog.messages == []
    old_driver.touch()
    assert device.choose_device("auto") == "cpu"
    [line] = caplog.messages
    assert line.startswith("a GPU is here (") and line.endswith("Please update your GPU driver")
    assert device.choose_device("cpu") == "cpu" and len(caplog.messages) == 1, "who asked for the CPU is told nothing"
