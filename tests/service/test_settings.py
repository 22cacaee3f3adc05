"""Settings: a flag wins over a variable, a variable over the default, and a bad value names where it came from."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as law
from hypothesis import strategies as st

from attend.model.engine.options import BATCHES, EngineOptions
from attend.model.errors import SettingError
from attend.service.settings import PREFIX, Settings, read_settings, unknown_variables
from tests.conftest import examples

BAD = {
    "port": ["0", "65536", "eighty", "80.5", "-1"],
    "grpc_port": ["0", "70000"],
    "device": ["gpu", "CUDA"],
    "dtype": ["fp8"],
    "max_model_len": ["0", "many"],
    "max_batch_requests": ["0", "5000"],
    "max_batch_tokens": ["0"],
    "max_queued_requests": ["-1"],
    "max_queued_tokens": ["0"],
    "block_size": ["17", "16", "8"],
    "kv_cache_memory": ["0", "0GB", "4XB", "GB", "1.5", "-1", "1 2", "1KK"],
    "kv_dtype": ["fp8"],
    "num_threads": ["-1"],
    "request_timeout_seconds": ["0", "nan", "inf", "-3", "soon"],
    "drain_seconds": ["-1", "nan", "inf"],
    "replicas": ["0", "91"],
    "max_replicas": ["0", "91", "none"],
    "expose_docs": ["maybe"],
    "log_level": ["loud"],
    "cors_origins": ["foo", "https://a.example/", "https://a.example/path", "https://a.example foo", "https://a.example,foo"],
    "log_format": ["xml"],
}


def test_without_flags_and_variables_everything_is_the_default():
    assert read_settings({}, {}) == Settings()


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_default():
    environment = {"ATTEND_PORT": "1111", "ATTEND_GRPC_PORT": "2222"}
    both = read_settings({"port": 3333}, environment)
    assert (both.port, both.grpc_port, both.replicas) == (3333, 2222, Settings().replicas)


def test_null_and_an_empty_variable_mean_the_default():
    assert read_settings({"port": None}, {"ATTEND_PORT": "", "ATTEND_DEVICE": ""}) == Settings()
    assert read_settings({"port": None}, {"ATTEND_PORT": "77"}).port == 77


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_a_bad_value_names_its_variable_or_its_flag_and_itself(name, value):
    variable = PREFIX + name.upper()
    with pytest.raises(SettingError) as caught:
        read_settings({}, {variable: value})
    assert str(caught.value).startswith(f"{variable} = {value!r} cannot be used: ")
    with pytest.raises(SettingError) as caught:
        read_settings({name: value}, {variable: "1"})
    assert str(caught.value).startswith(f"{name} = {value!r} cannot be used: ")
    assert "\n" not in str(caught.value)


def test_max_replicas_is_at_least_replicas():
    assert read_settings({"replicas": 2, "max_replicas": 2}, {}).max_replicas == 2
    with pytest.raises(SettingError, match=r"^ATTEND_MAX_REPLICAS = '2' cannot be used: it must be at least replicas, 3$"):
        read_settings({"replicas": 3}, {"ATTEND_MAX_REPLICAS": "2"})
    with pytest.raises(SettingError, match=r"^ATTEND_REPLICAS = 'many' cannot be used"):
        read_settings({"max_replicas": 2}, {"ATTEND_REPLICAS": "many"})


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("536870912", 512 << 20),
        ("512MiB", 512 << 20),
        ("1GB", 10**9),
        ("1GiB", 1 << 30),
        ("200M", 200 * 10**6),
        ("1.5gib", 3 << 29),
        ("2 TB", 2 * 10**12),
        ("64Ki", 64 << 10),
        ("7B", 7),
    ],
)
def test_a_size_in_bytes_may_have_a_unit_wherever_it_is_given(text, size):
    assert read_settings({"kv_cache_memory": text}, {}).kv_cache_memory == size
    assert read_settings({}, {"ATTEND_KV_CACHE_MEMORY": text}).kv_cache_memory == size
    assert read_settings({"kv_cache_memory": size}, {}).kv_cache_memory == size


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("API_KEY_FILE", "API_KEYS_FILE"),
        ("KEYS_FILE", "API_KEYS_FILE"),
        ("SINGEL", "SINGLE"),
        ("PROT", "PORT"),
        ("DEVIC", "DEVICE"),
        ("Port", "PORT"),
        ("TENSOR_PARALLEL_SIZE", "TENSOR_PARALLEL"),
        ("KV_CACHE_MEMORY_BYTES", "KV_CACHE_MEMORY"),
    ],
)
def test_a_variable_that_resembles_a_setting_stops_the_start_and_names_the_right_one(given, meant):
    for value in ("1", ""):
        with pytest.raises(SettingError) as caught:
            read_settings({"port": 1}, {PREFIX + given: value})
        assert str(caught.value) == f"{PREFIX}{given} is not a setting: did you mean {PREFIX}{meant}?"


KUBERNETES = ["SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_GRPC", "PORT_8000_TCP", "PORT_8000_TCP_ADDR", "SERVE_SVC_PORT"]


@pytest.mark.parametrize("name", [*KUBERNETES, "VERSION", "HOME", "IMAGE"])
def test_another_unknown_variable_stops_nothing_and_is_listed(name):
    """Also those that Kubernetes sets for a Service of this name."""
    environment = {PREFIX + name: "x", "OTHER": "y", "ATTEND_PORT": "81"}
    assert read_settings({}, environment).port == 81
    assert unknown_variables(environment) == [PREFIX + name]


def test_every_variable_that_our_own_code_reads_is_known():
    """What the tree names: settings, the key of a caller, and marks of tests and benchmarks."""
    root = Path(__file__).parents[2]
    files = [path for room in ("service", "loadtest", "deploy", "tests") for path in (root / room).rglob("*")]
    texts = [path.read_text(encoding="utf-8") for path in files if path.suffix in (".py", ".env", ".yaml", ".yml")]
    read = {
        name
        for text in texts
        for name in re.findall(r"(?:environ(?:\.get)?[\[(]|MARK = |TAG = |FOLDER = |- )\W?(ATTEND_\w+)", text)
    }
    assert {"ATTEND_TEST_SLOWNESS", "ATTEND_TEST_SERVER", "ATTEND_BENCH_SERVER"} <= read
    assert unknown_variables(dict.fromkeys([*read, "ATTEND_API_KEY"], "x")) == []


@pytest.mark.parametrize(("given", "environment"), [({}, {"ATTEND_API_KEYS_FILE": ""}), ({"api_keys_file": ""}, {})])
def test_a_key_file_whose_name_was_lost_does_not_open_the_server(given, environment):
    with pytest.raises(SettingError, match="ATTEND_API_KEYS_FILE, is empty"):
        read_settings(given, environment)
    assert read_settings({"api_keys_file": "keys"}, environment).api_keys_file == "keys"


def test_an_unknown_setting_is_refused_by_name():
    with pytest.raises(SettingError, match=r"^prot = '80' cannot be used"):
        read_settings({"prot": 80}, {})


def test_each_setting_has_a_description_and_a_default_that_can_be_written_as_text():
    for name, field in Settings.model_fields.items():
        assert field.description, name
        if field.default not in (None, ""):
            again = read_settings({}, {PREFIX + name.upper(): str(field.default)})
            assert getattr(again, name) == field.default


@law(derandomize=True, deadline=None, max_examples=examples(50))
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "model": st.text(),
            "served_model_name": st.text(),
            "port": st.integers(1, 65535),
            "max_model_len": st.none() | st.integers(1),
            "drain_seconds": st.floats(0, 86400),
            "expose_docs": st.booleans(),
            "block_size": st.sampled_from([32, 64, 128]),
        },
    )
)
def test_settings_survive_the_way_to_another_process(values):
    try:
        before = Settings(**values)
        text = before.to_json()
    except ValueError:  # a lone surrogate is no text
        assert any("\ud800" <= letter <= "\udfff" for value in values.values() for letter in str(value))
        return
    assert Settings.from_json(text) == before
    assert set(json.loads(text)) == set(Settings.model_fields)


def test_a_model_is_named_after_its_folder_unless_it_has_a_name(tmp_path):
    assert Settings(model=str(tmp_path / "tiny")).name == "tiny"
    assert Settings(model=f"{tmp_path}/tiny/").name == "tiny"
    assert Settings(model=str(tmp_path), served_model_name="other").name == "other"
    assert Settings().name == "attend-default"
    assert Settings().folder.parts[-2:] == ("model", "default")
    assert Settings(model=".").folder.is_absolute()


OF_THE_ENGINE = {
    **{"device": "cpu", "dtype": "float16", "backend": "torch", "kv_dtype": "int8", "quantize": "int4"},
    **{"max_model_len": 77, "max_batch_requests": 5, "max_batch_tokens": 99, "max_queued_requests": 3, "block_size": 64},
    **{
        "max_queued_tokens": 1000,
        "state_cache_share": 0.1,
        "kv_disk_folder": "kv",
        "kv_disk_bytes": 1000,
    },
    **{"kv_cache_memory": 12345, "prefix_caching": False, "draft_tokens": 4, "deterministic": True, "kernel_check": "fail"},
    "num_threads": 3,
}


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # Ray Serve's own models
def test_a_setting_of_the_engine_reaches_it():
    from attend.service.runtime.sizes import engine_options

    assert set(OF_THE_ENGINE) == EngineOptions.__dataclass_fields__.keys() & Settings.model_fields.keys()
    options = engine_options(Settings(**OF_THE_ENGINE))
    assert {name: getattr(options, name) for name in OF_THE_ENGINE} == OF_THE_ENGINE


@pytest.mark.filterwarnings("ignore:Using extra keyword arguments on `Field`")  # Ray Serve's own models
@pytest.mark.parametrize("device", BATCHES)
def test_a_replica_takes_the_calls_that_its_device_runs_at_once(device):
    from attend.service.runtime.sizes import most_calls

    usual, default = BATCHES[device].requests, Settings()
    assert most_calls(default, device) - most_calls(Settings(max_batch_requests=1), device) == 2 * (usual - 1)
    assert most_calls(Settings(max_batch_requests=5), "cpu") == most_calls(Settings(max_batch_requests=5), "cuda")
