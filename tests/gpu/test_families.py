"""Every kind of layer on a GPU that keeps account: its steps are recorded and computed without waiting."""

from importlib.util import find_spec

import pytest

from attend.model.sublayers import DeltaSpec
from tests.gpu.steps import item, machine
from tests.model.checkpoints import tiny_config

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")

FAMILIES = {
    "llama": {},
    "windows": {"sliding_window": 40, "window_layers": (1,)},
    "experts and sinks": {"num_experts": 5, "experts_per_token": 3, "shared_expert_size": 32, "mlp_bias": True, "sinks": True},
    "routed experts": {"num_experts": 8, "experts_per_token": 3, "expert_groups": 4, "groups_per_token": 2}
    | {"scoring_func": "sigmoid", "score_correction": True, "shared_expert_size": 32, "shared_expert_gate": False},
    "norms of sums": {"norm_place": "post", "norm": "layernorm", "gated_mlp": False, "activation": "gelu"},
    "parallel": {"norm_place": "parallel"},
    "shared keys": {"num_layers": 4, "kv_shared_layers": 2, "sliding_window": 40, "window_layers": (0, 2), "layer_scale": True}
    | {"global_head_size": 64, "global_kv_heads": 1, "keys_are_values": True, "value_norm": True, "per_layer_input_size": 16},
    "experts beside an MLP": {"num_experts": 5, "experts_per_token": 3, "experts_beside_mlp": True, "norm_place": "sandwich"},
    "states": {"delta": DeltaSpec(key_heads=2, value_heads=4, key_size=32, value_size=32, kernel=4), "delta_layers": (0,)},
    "convolutions": {"conv_kernel": 3, "conv_layers": (0,)},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_records_and_computes_its_steps_without_waiting(family):
    config = tiny_config(**{"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "num_layers": 2} | FAMILIES[family])
    has_states = config.state_bytes > 0
    with machine(config, requests=4, tokens=0 if has_states else 64) as made:
        runner = made.runner
        for items in ([item(runner, "a", 40, 1)], [item(runner, "a", 40, 1), item(runner, "b", 0, 50)]):
            cost = made.step(*items)
            assert (set(), set()) == (cost["waits"], cost["late"])
        assert 3 == len(runner.graphs._replays)
        assert (runner.pieces is None) == has_states
        assert [] == made.device.faults
