"""The command: what it tells a person who asks, one JSON object for a program, and a sentence for a mistake."""

import errno
import io
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.main import get_command

from attend.model.engine.build import build_engine, size_engine
from attend.model.engine.options import EngineOptions
from attend.model.engine.request import Request
from attend.model.engine.tables import BlockTables
from attend.model.net.checkpoint import read_config
from attend.model.params import SamplingParams
from attend.service.commands import bench, cli
from attend.service.commands import inspect as inspect_cli
from attend.service.commands.flags import GROUPS
from attend.service.settings import PREFIX, Settings
from tests.model.adapters import linears, merge, write_adapter
from tests.model.checkpoints import VOCAB, edit_config, write_checkpoint, write_letters, write_tokenizer
from tests.model.net.formats.writing import GPTQ, gptq, is_matrix, pack_folder, plain_folder

COMMANDS = tuple(get_command(cli.app).commands)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny checkpoint with a token for each printable character."""
    return write_letters(write_checkpoint("llama-tied", tmp_path_factory.mktemp("models") / "tiny"))


def test_serve_help_lists_every_setting_with_its_default_under_what_it_is_about(attend):
    status, out, _ = attend("serve", "--help")
    words = " " + " ".join(re.sub(r"-\n +", "-", out.partition("\nModel:")[2]).split())  # lines end after hyphens too
    assert status == 0
    assert sorted(name for names in GROUPS.values() for name in names.split()) == sorted(Settings.model_fields)
    assert all(f"\n{group}:\n" in out for group in GROUPS)
    assert "--max-model-len is ATTEND_MAX_MODEL_LEN" in out
    for name, field in Settings.model_fields.items():
        (about,) = re.findall(rf" --{name.replace('_', '-')} .*?(?= --\w|$)", re.sub(r" / --no-\S+", "", words))
        assert field.description in about
        if field.default not in (None, ""):
            assert f"(default {field.default})" in about


def test_no_flag_is_cut_in_a_narrow_terminal(attend, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    out = attend("serve", "--help")[1]
    assert "…" not in out
    assert all(f"--{name.replace('_', '-')}" in out for name in Settings.model_fields)


def test_the_shell_completes_commands_flags_and_those_of_serve(tmp_path):
    """As bash does, by the script that the command itself prints."""
    script = Path(sys.executable).with_name("attend")
    named = os.environ | {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}  # this process may be no child of a shell
    made = subprocess.run([script, "--show-completion", "bash"], capture_output=True, text=True, check=True, env=named).stdout

    def completed(*words):
        code = f'{made}\nCOMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); _attend_completion "{script}"; echo "${{COMPREPLY[@]}}"'
        done = subprocess.run(["bash", "-c", code, "bash", *words], capture_output=True, text=True, check=True)
        return done.stdout.split()

    assert completed("attend", "ch") == ["chat", "check"]
    assert completed("attend", "serve", "--max-mo") == ["--max-model-len"]
    assert completed("attend", "serve", "--single", "--kv-d") == ["--kv-dtype", "--kv-disk-folder", "--kv-disk-bytes"]


def test_help_is_instant_because_it_loads_no_model_code():
    code = "import sys, attend.service.commands.cli; print(sorted({'torch', 'ray', 'grpc', 'fastapi'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("command", ["serve", "generate"])
@pytest.mark.parametrize(
    ("name", "value"), [("port", "eighty"), ("block_size", "17"), ("device", "tpu"), ("drain_seconds", "nan")]
)
def test_a_bad_variable_stops_the_start_with_a_sentence_that_names_it(attend, monkeypatch, command, name, value):
    monkeypatch.setenv(PREFIX + name.upper(), value)
    status, out, err = attend(command)
    assert (status, out) == (2, "")
    assert err.startswith(f"attend: {PREFIX}{name.upper()} = {value!r} cannot be used: ")
    assert err.count("\n") == 1


def test_generate_json_prints_one_completion_and_nothing_else_and_the_text_is_streamed(attend, folder):
    words = ("generate", "hello", "--model", folder, "--max-tokens", "5", "--dtype", "float32", "--n", "2", "--seed", "3")
    status, out, _ = attend(*words, "--json")
    document = json.loads(out)
    assert status == 0
    assert (document["object"], document["model"], document["seed"]) == ("text_completion", "tiny", 3)
    assert (document["usage"]["prompt_tokens"], document["usage"]["completion_tokens"]) == (5, 10)
    first, second = (choice["text"] for choice in document["choices"])
    assert attend(*words, "--raw")[1] == f"{first}\n--- answer 1\n{second}\n"


def test_generate_with_an_adapter_says_what_the_merged_model_says(attend, monkeypatch, folder, tmp_path):
    """Its folder is given, or its name in a variable or in a folder; others are not loaded."""
    modules = linears(folder, ["q_proj", "v_proj", "down_proj"])
    adapter = write_adapter(tmp_path / "lora" / "tone", modules)
    merged = merge(folder, adapter, tmp_path / "merged", dict.fromkeys(modules, 2.0))

    def said(*words):
        status, out, err = attend("generate", "hello", "--max-tokens", "12", "--dtype", "float32", "--json", *words)
        assert status == 0, err
        document = json.loads(out)
        return document["choices"][0]["text"], document["model"], document["system_fingerprint"]

    wanted, plain = said("--model", merged)[0], said("--model", folder)
    ways = [{}, {"ATTEND_ADAPTER": f"tone={adapter},other=/nowhere"}, {"ATTEND_ADAPTERS_FOLDER": str(tmp_path / "lora")}]
    for way in ways:
        with monkeypatch.context() as variables:
            for name, value in way.items():
                variables.setenv(name, value)
            found = said("--model", folder, "--adapter", "tone" if way else f"tone={adapter}")
        assert found[:2] == (wanted, "tone") != plain[:2]
        assert found[2].startswith(f"{plain[2]}-"), "other weights have another fingerprint"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("tone", "--adapter must be one adapter, NAME=FOLDER or a known NAME; got 'tone', and known are: none"),
        ("a=/x,b=/y", "got 'a,b', and known are: a, b"),
        ("tone=", "adapter = 'tone=' cannot be used: "),
        ("tone=/nowhere", "/nowhere is not a folder"),
        ("tiny=/nowhere", "another has the name 'tiny'"),
    ],
)
def test_generate_refuses_an_adapter_that_it_cannot_use(attend, folder, given, told):
    status, out, err = attend("generate", "hello", "--model", folder, "--adapter", given)
    assert (status, out) == (2, "")
    assert err.startswith("attend: ") and told in err and "Traceback" not in err


def test_generate_refuses_what_is_no_text(attend, folder):
    status, out, err = attend("generate", "a\udcff", "--model", folder)
    assert (status, out) == (2, "")
    assert "the prompt on the command line is not UTF-8" in err


NO_MEMORY = (
    r"attend: there is not enough memory: [\d.]+ GB are free(, and .*)?; a smaller model, --quantize int8 or int4, .* less"
)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "attend: No space left on device"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/gone"), "attend: No such file or directory: /gone"),
        (MemoryError(), NO_MEMORY),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), NO_MEMORY),
    ],
    ids=["a full disk", "a folder that is gone", "no memory", "no memory of the system"],
)
def test_what_the_system_refuses_is_a_sentence(attend, monkeypatch, error, told):
    def refused(*given: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(cli, "app", refused)
    status, _, err = attend("inspect")
    assert status == 1 and re.fullmatch(told, err.strip())


@pytest.mark.parametrize(("target", "status", "told"), [("/dev/full", 1, "attend: No space left on device\n"), (None, 0, "")])
def test_output_that_is_full_is_a_sentence_and_a_character_that_the_locale_lacks_is_escaped(folder, target, status, told):
    code = "import typer; from attend.service.commands import cli; cli.app = lambda words, **_: print('é'); cli.main()"
    with open(target or os.devnull, "w") as output:
        where = output if target else subprocess.PIPE
        env = os.environ | {"PYTHONIOENCODING": "ascii"}
        done = subprocess.run([sys.executable, "-c", code], stdout=where, stderr=subprocess.PIPE, env=env, timeout=60)
    assert (done.returncode, done.stderr.decode()) == (status, told)
    assert target or done.stdout == b"\\xe9\n"


@pytest.mark.parametrize(
    ("work", "status", "told"), [("None", 0, ""), ("open('/gone')", 1, "No such file or directory: /gone")]
)
def test_a_command_whose_output_is_closed_ends_as_others(work, status, told):
    code = f"from attend.service.commands import cli; cli.app = lambda words, **_: {work}; cli.main()"
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-c", code]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr.strip()) == (status, f"attend: {told}" if told else "")


def test_generate_takes_its_model_and_dtype_from_the_variables_too(attend, monkeypatch, folder, tmp_path):
    """A setting comes from a flag, else from its variable, else from its default."""
    monkeypatch.setenv("ATTEND_MODEL", str(tmp_path / "absent"))
    status, _, err = attend("generate", "hello")
    assert status == 2
    assert str(tmp_path / "absent") in err
    monkeypatch.setenv("ATTEND_DTYPE", "float8")
    status, _, err = attend("generate", "hello", "--model", folder)
    assert status == 2
    assert "ATTEND_DTYPE" in err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--n", "9"), "n must be an integer from 1 to 8"),
        (("--temperature", "3"), "temperature must be a number from 0 to 2"),
        (("--max-tokens", "1000"), "maximum context length is 128 tokens"),
    ],
)
def test_a_mistake_in_generate_is_a_sentence_and_no_output(attend, folder, words, told):
    status, out, err = attend("generate", "hello", "--model", folder, "--json", *words)
    assert (status, out) == (2, "")
    assert told in err
    assert err.startswith("attend: ")
    assert "Traceback" not in err


def copied(folder, to):
    for source in folder.iterdir():
        (to / source.name).write_bytes(source.read_bytes())
    return to


def cut(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


DAMAGE = [
    (lambda folder: (folder / "config.json").unlink(), "config.json"),
    (lambda folder: (folder / "config.json").write_text("{"), "config.json"),
    (lambda folder: edit_config(folder, model_type="mamba"), "mamba"),
    (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
    (cut, "model.safetensors"),
    (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json"),
    (lambda folder: (folder / "tokenizer.json").write_text("[]"), "tokenizer.json"),
    (lambda folder: write_tokenizer(folder), "tokenizer.json has token 31"),
]


def test_inspect_tells_what_the_engine_would_be(attend, folder):
    status, out, _ = attend("inspect", folder, "--json")
    found = json.loads(out)
    info = build_engine(folder, EngineOptions(device="cpu", dtype="float32", kv_cache_memory=1 << 20)).info
    assert status == 0
    assert found["parameters"] == info.num_parameters
    assert (found["family"], found["vocab_size"], found["max_model_len"]) == (info.family, info.vocab_size, info.max_model_len)
    assert found["weights"] == {
        "files": 1, "bytes": (folder / "model.safetensors").stat().st_size, "dtypes": ["float32"]
    }  # fmt: skip
    # Two layers; keys and values of two heads of 8.
    assert {name: memory["kv_bytes_per_token"] for name, memory in found["memory"].items()} == {
        "float32": 256, "bfloat16": 128, "float16": 128
    }  # fmt: skip
    assert found["memory"]["bfloat16"]["kv_tokens_in_gib"] == 64 * 128, "64 requests of 128 tokens need less than a GiB"
    assert found["kv_int8"]["kv_bytes_per_token"] == 2 * 2 * 2 * (8 + 2), "a scale of two bytes beside each head"
    assert found["memory"]["float32"]["weights_bytes"] == 4 * info.num_parameters
    assert found["tokenizer"]["size"] == VOCAB
    assert (found["chat_template"], found["supported"]) == (False, True)
    shown = attend("inspect", folder)[1]
    assert "KV cache per token 256 bytes" in shown and "safetensors, not quantised" in shown


def test_inspect_tells_how_weights_are_quantised_and_what_their_codes_take(attend, tmp_path):
    """A byte and, for 32 of them, a scale of two, for what is packed; four for the row of each matrix; two for the rest."""
    plain = write_letters(plain_folder(tmp_path / "plain", tie_word_embeddings=True))
    outside = ("model.embed_tokens.weight",)
    folder = pack_folder(
        plain,
        gptq(8, 128, zeros=False),
        GPTQ | {"bits": 8, "group_size": 128},
        lambda name, each: is_matrix(name, each) or name in outside,
    )
    found = json.loads(attend("inspect", folder, "--json")[1])
    assert found["format"] == "GPTQ (gptq), 8 bits, a scale for 128 columns of a row"
    assert found["parameters"] == json.loads(attend("inspect", plain, "--json")[1])["parameters"]
    held = [each for name, each in load_file(plain / "model.safetensors").items() if is_matrix(name, each) or name in outside]
    packed, rows = sum(each.numel() for each in held), sum(map(len, held))
    rest = found["parameters"] - packed
    assert found["memory"]["bfloat16"]["weights_bytes"] == packed + packed // 16 + 4 * rows + 2 * rest


def test_inspect_tells_what_the_states_of_a_request_take(attend, tmp_path):
    """Three of four layers: heads of 8 by 12 numbers, four of them, and 3 inputs of a convolution of 80 columns."""
    folder = write_letters(write_checkpoint("qwen3_5_text", tmp_path / "tiny"))
    size = 3 * 4 * (4 * 8 * 12 + 3 * 80)
    memory = json.loads(attend("inspect", folder, "--json")[1])["memory"]["bfloat16"]
    assert (memory["state_bytes"], memory["kv_bytes_per_token"]) == (size, 2 * 2 * 16 * 2)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "qwen3_5_text"])
def test_inspect_tells_how_many_tokens_a_cache_of_a_gib_holds(attend, monkeypatch, tmp_path, kind):
    """So many find room, of one request or of all together, and not one more, also where layers have windows or states."""
    memory = 1 << 24
    monkeypatch.setattr(inspect_cli, "GIB", memory)
    folder = write_letters(write_checkpoint(kind, tmp_path / "tiny"))
    edit_config(folder, max_position_embeddings=1 << 16)
    told = json.loads(attend("inspect", folder, "--json")[1])["memory"]["bfloat16"]
    tokens, requests = told["kv_tokens_in_gib"], told["requests_in_gib"]
    model = read_config(folder)
    config = size_engine(model, torch.bfloat16, "cpu", EngineOptions(kv_cache_memory=memory))
    blocks = [
        model.block_bytes(group, config.block_size, 2) * (size.num_blocks + 1)  # and the reserved one
        for group, size in zip(model.memory_groups, config.groups, strict=True)
    ]
    assert 0 <= memory - sum(blocks) < told["kv_bytes_per_token"] * config.block_size, "the next block would not fit"
    tables = BlockTables(config)
    one, *several = (Request(str(at), [1], 1, SamplingParams()) for at in range(1 + requests))
    for request in (one, *several):
        request.tables = tables.new()
    assert tables.grow(one, tokens) and not tables.grow(one, tokens + 1)
    tables.free(one)
    assert all(tables.grow(request, tokens // requests // config.block_size * config.block_size) for request in several)


def test_inspect_without_a_folder_is_of_the_shipped_model(attend):
    found = json.loads(attend("inspect", "--json")[1])
    assert (found["family"], found["chat_template"], found["weights"]["dtypes"]) == ("qwen3", True, ["bfloat16"])


def test_inspect_tells_what_ranks_cannot_share(attend, monkeypatch):
    """In a pod it runs before Ray does, with the pod's settings."""
    monkeypatch.setenv("ATTEND_TENSOR_PARALLEL", "4")
    status, _, error = attend("inspect")
    assert status == 2
    assert "tensor_parallel is 4, but 6 heads are not divisible by it" in error


def eight_bits(folder):
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    save_file(tensors | {name: tensors[name].to(torch.float8_e4m3fn)}, folder / "model.safetensors")


@pytest.mark.parametrize(("damage", "named"), [*DAMAGE, (eight_bits, "up_proj.weight is F8_E4M3")])
def test_inspect_ends_what_cannot_be_served_with_status_two_and_the_reason(attend, folder, tmp_path, damage, named):
    damage(copied(folder, tmp_path))
    status, out, err = attend("inspect", tmp_path)
    assert (status, out) == (2, "")
    assert err.startswith("attend: ")
    assert named in err
    status, out, err = attend("inspect", tmp_path, "--json")
    document = json.loads(out)
    assert (status, err, document["supported"]) == (2, "", False)
    assert named in document["error"]


def test_a_benchmark_is_run_with_its_own_flags_and_another_name_is_refused(attend):
    status, out, _ = attend("bench", "limits", "--shape", "S")
    assert status == 0
    assert "roofline W1" in out
    for name in ("nothing", "../engine"):
        status, _, err = attend("bench", name)
        assert status == 2
        assert f"there is no benchmark '{name}' here" in err


@pytest.mark.parametrize("words", [(), ("-h",), ("--help",)])
def test_the_benchmarks_are_listed_with_what_each_measures(attend, words):
    status, out, err = attend("bench", *words)
    lines = dict(line.split("  ", 1) for line in out.splitlines()[2:])
    assert (status, err) == (0, "")
    assert {"engine", "gpu", "limits", "serve"} <= lines.keys() and "client" not in lines
    assert lines["engine"].startswith(" Throughput of the engine")
    assert all(text.strip() and "attend bench" not in text for text in lines.values())


def test_without_a_source_tree_there_are_no_benchmarks_and_a_sentence_says_so(attend, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "FOLDER", tmp_path / "bench")
    status, out, err = attend("bench")
    assert (status, out) == (2, "")
    assert "benchmarks come with the source tree" in err


@pytest.mark.parametrize("command", [*COMMANDS, "keys add"])
def test_every_command_takes_h_and_help_has_its_name(attend, command):
    words = command.split()
    told = [attend(*each) for each in ((*words, "-h"), (*words, "--help"), ("help", *words))]
    assert told[0] == told[1] == told[2]
    assert told[0][0] == 0 and told[0][1]


def test_the_versions_are_told_without_loading_what_they_are_of():
    code = "import sys; sys.argv = ['attend', '--version']; from attend.service.commands.cli import main; "
    code += "import atexit; atexit.register(lambda: print(sorted({'torch', 'ray'} & set(sys.modules)))); main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    line, loaded = done.stdout.splitlines()
    assert line.startswith(f"attend {version('attend-server')}, torch {version('torch')}, ray {version('ray')}, Python 3.")
    assert loaded == "[]"


def piped(monkeypatch, data, terminal=False):
    stdin = io.TextIOWrapper(io.BytesIO(data))
    monkeypatch.setattr(stdin, "isatty", lambda: terminal)
    monkeypatch.setattr(sys, "stdin", stdin)


@pytest.mark.parametrize("data", [b"hello", b"hello\n"])
def test_without_a_prompt_generate_continues_what_is_piped_into_it(attend, monkeypatch, folder, data):
    words = ("--model", folder, "--max-tokens", "5", "--dtype", "float32", "--json")
    wanted = json.loads(attend("generate", "hello", *words)[1])
    piped(monkeypatch, data)
    status, out, _ = attend("generate", *words)
    found = json.loads(out)
    assert status == 0
    assert (found["choices"], found["usage"]) == (wanted["choices"], wanted["usage"])


@pytest.mark.parametrize("command", ["generate", "explain"])
@pytest.mark.parametrize(
    ("data", "terminal", "told"),
    [
        (b"", False, "give it as an argument, or on standard input"),
        (b"\n", False, "give it as an argument, or on standard input"),
        (b"never read", True, "give it as an argument, or on standard input"),
        (b"\xff", False, "is not UTF-8"),
        (b"x" * ((16 << 20) + 2), False, "more than 16777216 bytes"),
    ],
)
def test_a_call_without_a_text_is_a_sentence(attend, monkeypatch, command, data, terminal, told):
    """As from a terminal, and from cron, whose standard input is empty."""
    piped(monkeypatch, data, terminal)
    status, out, err = attend(command)
    assert (status, out) == (2, "")
    assert told in err and err.startswith("attend: ") and err.count("\n") == 1


def test_variables_that_nobody_reads_are_told_once(attend, monkeypatch, folder):
    monkeypatch.setenv("ATTEND_VERSION", "1")
    status, _, err = attend("inspect", folder)
    assert (status, err) == (0, "attend: ATTEND_VERSION is not a setting, and is ignored\n")


@pytest.mark.parametrize(
    "words",
    ["serve", "run", "explain x --model", "inspect --json", "doctor"],
)
@pytest.mark.parametrize(("name", "why"), [("nowhere", "nowhere does not exist"), ("text.gguf", "it does not begin with GGUF")])
def test_what_is_no_checkpoint_is_told_before_anything_large_is_loaded(words, tmp_path, name, why):
    (tmp_path / "text.gguf").write_text("a text of more than twenty four bytes")
    code = "import sys; sys.argv = ['attend', *sys.argv[1:]]; from attend.service.commands.cli import main\n"
    code += "try: main()\nexcept SystemExit as end: print(end.code, sorted({'torch', 'ray', 'grpc'} & set(sys.modules)))"
    command = [sys.executable, "-c", code, *words.split(), str(tmp_path / name)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL)
    assert done.stdout.endswith("2 []\n"), done.stderr
    assert why in done.stderr + done.stdout
