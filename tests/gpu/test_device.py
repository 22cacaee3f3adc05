"""The GPU of these tests sees what it is for: each kind of mistake, planted, is told."""

from weakref import WeakSet

import pytest
import torch

from tests.gpu.device import Device, Event


@pytest.fixture
def device():
    made = Device()
    with torch.inference_mode(), made:
        yield made


def ask(device, values=(1, 2, 3)):
    return torch.tensor(values).pin_memory().to("cuda", non_blocking=True)


def test_pinned_numbers_come_without_waiting(device):
    assert ask(device).is_cuda
    assert not device.waits


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: torch.tensor([1, 2]).to("cuda", non_blocking=True),
        lambda x: torch.tensor([1, 2]).pin_memory().to("cuda"),
        lambda x: torch.tensor([1, 2], device="cuda"),
        lambda x: x.copy_(torch.tensor([1, 2, 3])),
        lambda x: x.cpu(),
        lambda x: x.tolist(),
        lambda x: x[0].item(),
        lambda x: bool(x[0]),
        lambda x: x.nonzero(),
        lambda x: x.unique(),
        lambda x: x[[0, 1]],
        lambda x: x[x > 1],
        lambda x: x.__setitem__([0], 1),
    ],
    ids=[
        *("pageable", "blocking", "tensor", "copy_", "cpu", "tolist", "item", "bool"),
        *("nonzero", "unique", "list", "mask", "setitem"),
    ],
)
def test_what_waits_for_the_device_is_told(device, wait):
    wait(ask(device))
    assert device.waits


@pytest.mark.parametrize("mix", [lambda x: x + torch.ones(3), lambda x: torch.cat([x, torch.zeros(2).long()])])
def test_mixed_devices_are_told(device, mix):
    mix(ask(device))
    assert "mixes devices" in device.faults[0]


def test_a_copy_to_the_host_is_garbage_until_an_event_behind_it(device):
    early, ready = ask(device).to("cpu", non_blocking=True), Event(device)
    ready.record()
    late = (ask(device) * 2).to("cpu", non_blocking=True)
    assert [1, 2, 3] != early.tolist()
    ready.synchronize()
    assert [1, 2, 3] == early.tolist()
    assert [2, 4, 6] != late.tolist()


def test_pinned_memory_that_is_written_too_early_is_told(device):
    pinned = torch.tensor([1, 2, 3]).pin_memory()
    pinned.to("cuda", non_blocking=True)
    pinned[0] = 5
    device.drain()
    assert "pinned memory" in device.faults[0]


def test_memory_is_counted_until_the_last_view_is_gone(device):
    held = torch.zeros(256, device="cuda")
    part = held[:2]
    del held
    assert 1024 == device.allocated == device.peak
    del part
    assert 0 == device.allocated


def test_launches_are_counted_and_views_are_not(device):
    held = torch.zeros(4, 4, device="cuda")
    device.reset()
    held.T[1:].add_(1)
    held.add(1).mul_(2)
    assert {"add_": 1, "add": 1, "mul_": 1} == dict(device.launches)


@pytest.mark.parametrize("act", [lambda x: x.tolist(), lambda x: ask(None), lambda x: x.to("cpu", non_blocking=True)])
def test_a_recording_takes_no_copy_and_no_look(device, act):
    given = ask(device)
    device.recording = WeakSet()
    act(given)
    assert "recording" in device.faults[0]
