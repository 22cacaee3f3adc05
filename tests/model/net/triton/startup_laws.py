"""The start-up law of Triton's kernels: the right ones are kept, and a wrong one is seen. Run as `laws.py` is."""

import pytest
import torch

from attend.model.backends.triton import Triton
from attend.model.engine import startup
from attend.model.engine.sampler import TokenSampler
from attend.model.engine.startup import check_decoder, check_draws
from attend.model.net.formats.codes import FP8, INT4, MXFP4
from attend.model.net.triton import codes, fused_kernels, kernels, limits
from tests.model.checkpoints import tiny_config
from tests.model.net.triton.laws import DEVICE

CONFIGS = {
    "plain": {},
    "windows and sinks": {"num_layers": 3, "sliding_window": 21, "window_layers": (1,), "sinks": True, "qk_norm": "head"},
    "experts": {"num_experts": 40, "experts_per_token": 3, "expert_size": 24},
}


@pytest.fixture(autouse=True)
def near(monkeypatch):
    """The token that looks back far lies where the interpreter bears it, behind a window and a split of keys."""
    monkeypatch.setattr(startup, "FAR", 300)


def finding(config, kind=None):
    return check_decoder(Triton(config), torch.bfloat16, torch.bfloat16, DEVICE, 32, kind)[0]


@pytest.mark.parametrize("name", CONFIGS)
def test_the_kernels_are_kept(name):
    found = finding(tiny_config(max_positions=512, **CONFIGS[name]))
    assert found.ok, found


@pytest.mark.parametrize("kind", [INT4, MXFP4, FP8], ids=lambda kind: kind.name)
def test_the_kernels_of_codes_are_kept(kind):
    found = finding(tiny_config(), kind)
    assert found.ok, found


class Changed:
    """A kernel that is called with one argument changed."""

    def __init__(self, kernel, change):
        self.kernel, self.change = kernel, change

    def __getitem__(self, grid):
        return lambda *given, **named: self.kernel[grid](*self.change(list(given)), **named)


def with_scale(place, factor):
    def change(given):
        given[place] *= factor
        return given

    return change


@pytest.mark.parametrize(
    ("module", "name", "change"),
    [
        (kernels, "decode_kernel", with_scale(12, 1.5)),
        (kernels, "prefill_kernel", with_scale(13, 1.5)),
        (fused_kernels, "join_kernel", with_scale(9, 1.5)),
    ],
)
def test_a_wrong_kernel_is_seen(monkeypatch, module, name, change):
    monkeypatch.setattr(module, name, Changed(getattr(module, name), change))
    assert finding(tiny_config(max_positions=512)).reason == "kernel_differs"


def test_a_kernel_that_cannot_run_is_told(monkeypatch):
    from triton.runtime.errors import OutOfResources

    def change(given):
        raise OutOfResources(107520, 101376, "shared memory")

    monkeypatch.setattr(codes, "codes_kernel", Changed(codes.codes_kernel, change))
    found = finding(tiny_config(), INT4)
    assert found.reason == "kernel_fails"
    assert found.cause.startswith("OutOfResources: out of resource: shared memory, Required: 107520, Hardware limit: 101376")


def test_draws_are_kept_and_a_wrong_one_is_seen(monkeypatch):
    def made():
        return TokenSampler(300, DEVICE)

    assert check_draws(made, torch.bfloat16, 300, DEVICE).ok

    class Unlimited:
        def __getitem__(self, grid):
            return lambda *given, **named: given[5].fill_(-(1 << 40))  # what its rows leave out: nothing

    monkeypatch.setattr(limits, "limit_kernel", Unlimited())
    found = check_draws(made, torch.bfloat16, 300, DEVICE)
    assert found.reason == "kernel_differs" and "draws token" in found.cause, found
