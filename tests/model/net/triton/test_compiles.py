"""Every kernel compiles for GPUs of every kind that Attend may meet, within what such a GPU has."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.timeout(900),  # 40 seconds each, where nothing else runs
]
ROOT = Path(__file__).parents[4]
if find_spec("triton") is not None:
    from attend.model.net.triton import backend, kernels
    from attend.model.net.triton.backend import Tiles
    from tests.model.net.triton import compiles
    from tests.model.net.triton.compiles import ARCHITECTURES, Compiled, launch_attention, loops
else:
    ARCHITECTURES = {}
EIGHT = (32, 8, 128, torch.bfloat16)
GEMMA = (32, 1, 256, torch.bfloat16)


@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_every_kernel_compiles(capability, tmp_path):
    """In a process of its own: Triton is chosen to compile when it is imported."""
    given = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.model.net.triton.compiles", str(capability)]
    environment = given | {"TRITON_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 95


def faults(monkeypatch, tmp_path, capability, tiles, shape, **patched):
    """What is said of a prompt in these tiles."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(backend, "shared_memory", lambda: ARCHITECTURES[capability].program)
    monkeypatch.setattr(Tiles, "of", classmethod(lambda kind, *_: kind(*tiles)))
    for name, value in patched.items():
        monkeypatch.setattr(Tiles, name, value)
    for name in ("share_kernel", "decode_kernel", "combine_kernel"):
        monkeypatch.setattr(kernels, name, Nothing())
    stand = Compiled(kernels.prefill_kernel, capability)
    monkeypatch.setattr(kernels, "prefill_kernel", stand)
    with torch.inference_mode():
        launch_attention(*shape, compiles.AttentionVariant())
    return stand.found[0]["faults"]


class Nothing:
    """In a kernel's place."""

    def __getitem__(self, grid):
        return lambda *args, **constants: None


def test_a_tile_that_fits_no_l4_is_told(monkeypatch, tmp_path):
    found = faults(monkeypatch, tmp_path, 89, (64, 32, 64, 8), GEMMA)
    assert "106496 bytes of shared memory, and a program may have 101376" in found


def test_registers_that_are_put_aside_are_told(monkeypatch, tmp_path):
    found = faults(monkeypatch, tmp_path, 80, (32, 32, 128, 4), EIGHT)
    assert any("bytes of registers are put aside" in fault for fault in found)


def test_tiles_that_no_other_is_under_way_beside_are_told(monkeypatch, tmp_path):
    found = faults(monkeypatch, tmp_path, 89, (32, 32, 128, 8), EIGHT, stages=lambda *_: 2)
    assert any(fault.startswith("nothing is on its way") for fault in found)


def test_a_loop_with_more_work_than_there_was_is_told(monkeypatch, tmp_path):
    """Half as many lanes for the same work around them."""
    found = faults(monkeypatch, tmp_path, 90, (16, 32, 64, 8), EIGHT)
    assert any("of the device, and it was" in fault for fault in found)


def test_the_innermost_loops_of_machine_code_are_found_and_counted():
    """One within another one, one after these, and the endless one that ends a kernel."""
    sass = """
        /*0000*/  MOV R1, c[0x0][0x28] ;
        /*0010*/  IADD3 R2, R1, 0x1, RZ ;
        /*0020*/  FFMA R3, R2, R2, R3 ;
        /*0030*/  NOP ;
        /*0040*/  @P0 BRA 0x20 ;
        /*0050*/  @!P1 BRA 0x10 ;
        /*0060*/  FADD R3, R3, R3 ;
        /*0070*/  @P2 BRA 0x60 ;
        /*0080*/  BRA 0x90 ;
        /*0090*/  EXIT ;
        /*00a0*/  BRA 0xa0;
    """
    assert loops(sass) == [2, 2]
