"""Which device serves: a GPU that torch cannot use is named with what to do, an old one has what it computes. No GPU ran."""

import pytest
import torch

from attend.model.devices import choose_device, gpu_dtype, unused_gpu, why_no_cuda
from attend.model.errors import SettingError

OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver by downloading and "
    "installing a new version from the URL: http://www.nvidia.com/Download/index.aspx"
)


def raises(text):
    def init():
        raise RuntimeError(text)

    return init


@pytest.fixture
def driver(monkeypatch, tmp_path):
    """A machine with an NVIDIA driver, which torch, built with CUDA, cannot use."""
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of a compute capability, as torch tells of it."""

    def of(major, minor):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (major, minor))

    return of


def test_a_driver_that_is_too_old_is_named_with_the_cuda_that_it_has(driver, monkeypatch):
    monkeypatch.setattr(torch.cuda, "init", raises(OLD_DRIVER))
    told = unused_gpu(driver)
    assert told.startswith("an NVIDIA GPU is here (/proc/driver/nvidia/version), and torch cannot use it: The NVIDIA driver ")
    assert told.endswith("; update the driver, or install a torch that was built for CUDA 12.4, as the driver has it")
    with pytest.raises(SettingError, match=r"^device is cuda, but this process sees no CUDA device: The NVIDIA driver"):
        choose_device("cuda", driver)


def test_a_torch_without_cuda_is_the_reason(driver, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "was built without CUDA; install a build with it" in unused_gpu(driver)


def test_a_variable_that_hides_the_gpu_is_the_reason(driver, monkeypatch):
    monkeypatch.setattr(torch.cuda, "init", raises("No CUDA GPUs are available"))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert why_no_cuda(driver).startswith("CUDA_VISIBLE_DEVICES is '' and hides it; Ray does so where")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert why_no_cuda(driver).startswith("No CUDA GPUs are available; nvidia-smi must work here")


@pytest.mark.parametrize(
    ("found", "wanted", "family", "dtype"),
    [
        ((7, 5), "auto", "llama", torch.float16),
        ((7, 0), "float32", "gemma3", torch.float32),
        ((7, 5), "float16", "gemma3", torch.float16),
        ((8, 0), "auto", "gemma3", torch.bfloat16),
        ((9, 0), "auto", "llama", torch.bfloat16),
        ((12, 0), "float16", "llama", torch.float16),
    ],
)
def test_a_gpu_computes_in_what_it_has(gpu, found, wanted, family, dtype):
    gpu(*found)
    assert gpu_dtype(wanted, family) == dtype


@pytest.mark.parametrize(("wanted", "family"), [("bfloat16", "llama"), ("auto", "gemma2")])
def test_what_an_old_gpu_cannot_compute_is_refused_with_what_serves(gpu, wanted, family):
    gpu(7, 5)
    with pytest.raises(SettingError, match=rf"^dtype is {wanted}, but this GPU has compute capability 7.5.*: use .*float32"):
        gpu_dtype(wanted, family)
