"""The laws of the gated delta rule and of the short convolution in Triton. Run as those of attention are, see `laws.py`."""

import pytest
import torch
from torch import nn

from attend.model.engine.config import GroupSize
from attend.model.engine.cuda_recorder import CudaRecorder
from attend.model.engine.engine import Engine
from attend.model.engine.graphs import DecodeGraphs
from attend.model.engine.runner import ModelRunner
from attend.model.engine.scheduler import Scheduler
from attend.model.net.delta import GatedDelta
from attend.model.net.paged_attention import BatchLayout, KVCache, PagedAttention, ReferenceBackend, Row, TorchBackend
from attend.model.net.short_conv import ShortConv
from attend.model.net.triton import delta
from attend.model.net.triton.backend import INTERPRETED, TritonBackend
from attend.model.net.triton.decoder import TritonDecoder
from attend.model.sublayers import ConvSpec, DeltaSpec
from attend.model.transfer import integers
from tests.model.checkpoints import tiny_config, tiny_decoder
from tests.model.engine.machines import Clock, answers, ask, sizes
from tests.model.net.triton.decoder_laws import decoder_of, distance

DEVICE = "cpu" if INTERPRETED else "cuda"
SPECS = {
    "a head for each key": DeltaSpec(key_heads=2, value_heads=2, key_size=8, value_size=5, kernel=4),
    "shared keys": DeltaSpec(key_heads=2, value_heads=4, key_size=6, value_size=12, kernel=2),
    "no past inputs": DeltaSpec(key_heads=1, value_heads=1, key_size=5, value_size=4, kernel=1),
    "rates up to 2": DeltaSpec(key_heads=1, value_heads=1, key_size=6, value_size=4, kernel=2, negative_eigenvalues=True),
    "convolution": ConvSpec(channels=20, kernel=3, bias=False),
    "biased convolution": ConvSpec(channels=20, kernel=7, bias=True),
}
SPEC = DeltaSpec(key_heads=1, value_heads=2, key_size=6, value_size=12, kernel=4)
CONV = SPECS["convolution"]
LENGTHS = (5, 1, 7)
WHOLE = [[(1, 0, 1), (0, 0, 5), (2, 0, 7)]]
"""Steps of (text, start, count), rows of one token first."""
CHUNKS = [[(2, 0, 1), (0, 0, 3)], [(0, 3, 1), (2, 1, 5)], [(1, 0, 1), (2, 6, 1), (0, 4, 1)]]
SLOTS = (3, 5, 1)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Borders between tiles at lengths that the interpreter bears."""
    monkeypatch.setattr(delta, "TOKENS", 4)
    monkeypatch.setattr(delta, "COLUMNS", 16)


class Columns(nn.Module):
    """In place of a matrix: the product is given as a part of x, and has the same bits in any batch."""

    def __init__(self, first, parts):
        super().__init__()
        self.first, self.parts = first, parts

    def forward(self, x):
        return x[:, self.first : self.first + sum(self.parts)].contiguous()


class Scene:
    """A layer, the products of some texts, and states in whose slots lies what is not a number."""

    def __init__(self, spec=SPEC, dtype=torch.float32):
        switches = {"delta": spec, "delta_layers": (0,)}
        if isinstance(spec, ConvSpec):
            switches = {"conv_kernel": spec.kernel, "conv_bias": spec.bias, "conv_layers": (0,), "hidden_size": spec.channels}
        self.config = tiny_config(**switches)
        self.layer: GatedDelta | ShortConv = tiny_decoder(self.config).blocks[0].attention.requires_grad_(False)
        widths, gates = [spec.channels] * 3, 0
        if isinstance(spec, DeltaSpec):
            self.layer.log_speed.copy_(torch.linspace(-3, 0, spec.value_heads))  # or a state would fade at once
            widths, gates = [spec.channels, spec.value_width], 2 * spec.value_heads
            self.layer.gates = Columns(sum(widths), [spec.value_heads] * 2)
        self.layer.inputs, self.layer.merge = Columns(0, widths), nn.Identity()
        self.layer.to(DEVICE, dtype)
        dice = torch.Generator().manual_seed(0)
        width = sum(widths) + gates
        self.texts = [torch.randn(length, width, generator=dice).to(DEVICE, dtype) for length in LENGTHS]
        self.cache = KVCache.allocate(self.config, 6, 8, dtype, DEVICE)
        for part in self.cache.states[0]:
            part.fill_(torch.nan)

    def computed(self, steps, way=TritonBackend, slots=SLOTS, sources=None):
        """The outputs of each text [L, H V] after these steps; as torch computes them with another backend."""
        found = [[] for _ in self.texts]
        for step in steps:
            rows = [Row([1, 2], start, count) for _, start, count in step]
            places = [None if some is None else [some[text] for text, _, _ in step] for some in (slots, sources)]
            layout = BatchLayout.build(rows, 8, DEVICE, (), *places)
            x_TE = torch.cat([self.texts[text][start : start + count] for text, start, count in step])
            paged = PagedAttention(way(), self.cache, layout)
            if way is not TritonBackend:
                out = self.layer(x_TE, None, 0, paged)
            elif isinstance(self.layer, ShortConv):
                out = delta.convolve(self.layer, x_TE, 0, paged)
            else:
                out = delta.recur(self.layer, x_TE, 0, paged, "silu")
            assert out.dtype == x_TE.dtype
            for (text, _, _), part in zip(step, out.split([count for _, _, count in step]), strict=True):
                found[text].append(part)
        return [torch.cat(parts) if parts else None for parts in found]

    def states(self, slots=SLOTS):
        return [part[list(slots)] for part in self.cache.states[0]]


def assert_close(found, wanted):
    for one, other in zip(found, wanted, strict=True):
        assert (one - other).abs().max() <= 2e-5 * other.abs().max()


def assert_same(found, wanted):
    assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_the_layer_and_its_states_are_torchs(spec, monkeypatch):
    """Also of texts that come in parts, and in slots where others have left what is not a number."""
    monkeypatch.setattr(delta, "HELD", 64)  # or one program had all columns of a state
    ours, theirs = Scene(spec), Scene(spec)
    assert_close(ours.computed(CHUNKS), theirs.computed(CHUNKS, TorchBackend))
    assert_close(ours.states()[spec.kernel == 1 :], theirs.states()[spec.kernel == 1 :])  # without past inputs none are kept


@pytest.mark.parametrize("spec", [SPEC, CONV], ids=["delta", "convolution"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_text_has_the_same_bits_in_any_parts_and_beside_any_others(dtype, spec):
    whole, parts = Scene(spec, dtype), Scene(spec, dtype)
    wanted = whole.computed(WHOLE)
    assert_same(wanted, parts.computed(CHUNKS))
    assert_same(whole.states(), parts.states())
    for text, length in enumerate(LENGTHS):
        alone = Scene(spec, dtype)
        assert torch.equal(wanted[text], alone.computed([[(text, 0, length)]])[text])


@pytest.mark.parametrize("spec", [SPEC, CONV], ids=["delta", "convolution"])
def test_a_step_may_write_to_another_slot_than_it_reads(spec):
    moves, stays = Scene(spec), Scene(spec)
    for at in (moves, stays):
        at.computed(CHUNKS[:1])
    before, others = moves.states(), (4, 0, 2)
    found, wanted = moves.computed(CHUNKS[1:2], slots=others, sources=SLOTS), stays.computed(CHUNKS[1:2])
    assert_same((found[0], found[2]), (wanted[0], wanted[2]))
    assert_same([part[[0, 2]] for part in moves.states(others)], [part[[0, 2]] for part in stays.states()])
    assert_same([part[[0, 2]] for part in moves.states()], [part[[0, 2]] for part in before])


@pytest.mark.parametrize("spec", [SPEC, CONV], ids=["delta", "convolution"])
def test_a_state_that_is_not_a_number_stays_its_requests_own(spec):
    clean, at = Scene(spec), Scene(spec)
    wanted = clean.computed(CHUNKS)
    first = at.computed(CHUNKS[:1])
    for part in at.cache.states[0]:
        part[SLOTS[2]] = torch.nan
    found = at.computed(CHUNKS[1:])
    seen = len(found[2]) if isinstance(spec, DeltaSpec) else spec.kernel - 1
    assert found[2].isnan().any(-1)[:seen].all()
    assert_same([torch.cat((first[0], found[0])), found[1]], wanted[:2])


def test_a_weak_decay_keeps_its_digits():
    """Where log(1 + exp(x)) is small beside 1, and a long text multiplies what is wrong with it."""
    at = Scene()
    at.computed(WHOLE)
    before, heads = at.states([1])[1].double(), SPEC.value_heads
    at.layer.log_speed.fill_(6.0)
    at.layer.step_bias.copy_(torch.linspace(-14, -8, heads))
    at.texts[2][6, -2 * heads : -heads] = -80.0  # a rate of nought
    at.texts[2][6, -heads:] = 0.0
    at.computed([[(2, 6, 1)]])
    left = torch.exp(-torch.tensor(6.0).double().exp() * torch.log1p(at.layer.step_bias.double().exp()))
    torch.testing.assert_close(at.states([1])[1].double(), before * left[:, None, None], rtol=2e-6, atol=0)


@pytest.mark.parametrize("spec", [SPEC, CONV], ids=["delta", "convolution"])
def test_the_layer_in_bfloat16_is_no_farther_from_float32_than_torchs(spec):
    half, theirs, whole = Scene(spec, torch.bfloat16), Scene(spec, torch.bfloat16), Scene(spec)
    whole.layer.load_state_dict({name: tensor.float() for name, tensor in half.layer.state_dict().items()})
    whole.texts = [text.float() for text in half.texts]
    wanted = torch.cat(whole.computed(WHOLE, TorchBackend))
    bound = min(0.01, distance(torch.cat(theirs.computed(WHOLE, TorchBackend)), wanted))
    assert distance(torch.cat(half.computed(WHOLE)), wanted) <= bound


def recorder():
    return (lambda step: step) if INTERPRETED else CudaRecorder()


def test_a_recorded_step_moves_the_same_states():
    """Two requests and padding in a graph for four, one of them at its first token in a slot that another has left."""
    net = decoder_of("qwen3_5")
    backend, form = TritonBackend(net.config.attention_variants), TritonDecoder(net)
    caches = [KVCache.allocate(net.config, 8, 8, torch.float32, DEVICE) for _ in range(2)]
    recorded = DecodeGraphs(form, backend, caches[0], max_model_len=32, max_batch_requests=4, record=recorder())
    dice = torch.Generator().manual_seed(0)
    for layer, (kept, states) in caches[0].states.items():
        for part, same in zip((kept, states), caches[1].states[layer], strict=True):
            part.copy_(torch.randn(part.shape, generator=dice))
            part[[0, 4, 5, 6, 7, 8]] = torch.nan
            same.copy_(part)
    rows, states, tokens_T = [Row([1], 5, 1), Row([2], 0, 1), Row([3], 7, 1)], [3, 4, 2], integers([7, 8, 9], DEVICE)
    sources = [3, 4, 1]
    layout = BatchLayout.build(rows, 8, DEVICE, (), states, sources)
    with torch.inference_mode():
        plain = PagedAttention(ReferenceBackend(net.config.attention_variants), caches[1], layout)
        wanted = net.logits(net(tokens_T, layout.positions_T, plain))
    found = recorded.run(rows, tokens_T, states=states, sources=sources).logits_TV
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    for ours, theirs in zip(caches[0].states.values(), caches[1].states.values(), strict=True):
        for part, same in zip(ours, theirs, strict=True):
            torch.testing.assert_close(part[1:], same[1:], atol=1e-5, rtol=1e-5, equal_nan=True)


def engine(net, backend, form):
    """With recorded steps on Triton. Places for states are few, so that one is taken over."""
    groups = GroupSize(16), GroupSize(2, has_state=True)
    settings = sizes(num_blocks=16, block_size=8, max_model_len=32, max_batch_requests=2, groups=groups)
    cache = KVCache.allocate(net.config, [group.num_blocks for group in groups], 8, torch.float32, DEVICE)
    for state in cache.states.values():
        for part in state:
            part.fill_(torch.nan)
    graphs = DecodeGraphs(form, backend, cache, 32, 2, recorder()) if backend.name == "triton" else None
    clock = Clock()
    return Engine(Scheduler(settings, clock), ModelRunner(form, backend, cache, DEVICE, graphs), clock)


def test_an_engine_of_recorded_steps_answers_as_one_on_torch():
    net = decoder_of("qwen3_5")
    variants = net.config.attention_variants
    pairs = (TorchBackend(variants), net), (TritonBackend(variants), TritonDecoder(net))
    prompts = {"whole": [5, 6, 7, 8], "one token": [9], "waits": [3, 4]}
    found = [answers(engine(net, *pair), [ask(name, prompt, 3) for name, prompt in prompts.items()]) for pair in pairs]
    assert found[0] == found[1]
