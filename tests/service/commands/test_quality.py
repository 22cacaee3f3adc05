"""`attend quality` measures forms as they are served; what it cannot read is refused with a sentence."""

import json

import pytest
import torch

from attend.model.errors import SettingError
from attend.model.net import quantised
from attend.model.net.checkpoint import load_decoder
from attend.model.net.formats.codes import quantise
from attend.model.text.tokenizer import Tokenizer
from attend.model.train.corpus import encode_texts
from attend.model.train.loss import bits_per_byte
from attend.service.commands.quality import Text, names_of, read_text, show, table
from attend.service.settings import Settings
from tests.model.checkpoints import write_checkpoint, write_letters
from tests.model.gguf_files import Type
from tests.service.test_gguf import write


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny checkpoint of 128 positions with a token for each printable character, and one that starts a text."""
    folder = write_letters(write_checkpoint("llama-tied", tmp_path_factory.mktemp("models") / "tiny"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<|endoftext|>"}', encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "some.txt"
    dice = torch.randint(32, 126, (500,), generator=torch.Generator().manual_seed(0))
    path.write_bytes(bytes(dice.tolist()))
    return path


@pytest.fixture
def forms(folder, text, capsys):
    """Run the command: its forms by name."""

    def run(**changes):
        settings = Settings(model=str(folder), **changes.pop("settings", {}))
        given = {"quantize": "int8,int4", "text": text, "num_bytes": None, "outliers": None, "as_json": True}
        show(settings, **given | changes)
        return {row["form"]: row for row in json.loads(capsys.readouterr().out)["forms"]}

    return run


def test_the_model_as_it_is_has_the_bits_per_byte_of_an_evaluation(folder, text, forms, tmp_path, monkeypatch):
    """In float32 it is the same sum, over the same windows."""
    (tmp_path / "text.py").write_bytes(text.read_bytes())
    monkeypatch.setattr("attend.model.train.corpus.is_held_out", lambda path: True)
    found = forms(settings={"dtype": "float32"})["float32"]
    net, tokens = load_decoder(folder, torch.float32, "cpu"), encode_texts(Tokenizer.load(folder), [text.read_text()])
    expected = bits_per_byte(net, torch.from_numpy(tokens.astype("int64")), text.stat().st_size, net.config.max_positions)
    assert found["bits_per_byte"] == pytest.approx(expected, rel=1e-5)
    assert (found["ratio"], found["kl_divergence"], found["agreement"]) == (1.0, 0.0, 1.0)


def test_fewer_bits_are_farther_from_the_model_as_it_is(forms):
    found = forms()
    assert list(found) == ["bfloat16" if "bfloat16" in found else "float32", "int8", "int4"]
    assert 0 < found["int8"]["kl_divergence"] < 0.1 * found["int4"]["kl_divergence"]
    assert found["int4"]["agreement"] < found["int8"]["agreement"] < 1


def test_a_worse_quantiser_shows(forms, monkeypatch):
    before = forms(quantize="int8")["int8"]
    monkeypatch.setattr(
        quantised, "quantise", lambda matrix, kind: (codes := quantise(matrix, kind))._replace(scales_OG=codes.scales_OG * 1.5)
    )
    after = forms(quantize="int8")["int8"]
    assert after["kl_divergence"] > 10 * before["kl_divergence"]
    assert after["agreement"] < before["agreement"]


def test_outliers_make_whole_numbers_coarser(forms):
    before, after = (forms(outliers=factor)["int8"]["kl_divergence"] for factor in (1.0, 256.0))
    assert after > 2 * before


def test_a_person_gets_a_table(folder, text, capsys):
    show(Settings(model=str(folder)), quantize="int4", text=text, num_bytes=300, outliers=None, as_json=False)
    out = capsys.readouterr().out
    assert "tiny, " in out
    assert f"300 bytes of {text}, 300 positions" in out
    assert "\n| int4 | " in out


def test_a_table_has_a_row_for_each_form():
    row = {"bits_per_byte": 1.5, "ratio": 1.0, "ratio_error": 0.0, "kl_divergence": 0.0, "agreement": 1.0}
    other = {"bits_per_byte": 1.8, "ratio": 1.2, "ratio_error": 0.00123, "kl_divergence": 0.0123, "agreement": 0.875}
    assert table({"forms": [{"form": "a", **row}, {"form": "b", **other}]}).splitlines() == [
        "| weights | bits per byte | over a | KL divergence, nats a token | same most likely token |",
        "| --- | --- | --- | --- | --- |",
        "| a | 1.5000 | 1 | 0 | 100.00% |",
        "| b | 1.8000 | 1.2000 ± 0.0012 | 0.0123 | 87.50% |",
    ]


def test_a_text_is_cut_at_bytes_and_keeps_whole_characters():
    text = Text("some", ["aé", "ü", "bc"])
    assert [list(text.truncate(size).parts) for size in (1, 2, 3, 4, 5, 6, 99)] == [
        ["a"], ["a"], ["aé"], ["aé", ""], ["aé", "ü"], ["aé", "ü", "b"], ["aé", "ü", "bc"]
    ]  # fmt: skip
    assert (text.num_bytes, text.truncate(4).num_bytes) == (7, 3)


def test_each_part_of_a_text_begins_with_the_token_that_starts_a_text(folder):
    tokenizer, text = Tokenizer.load(folder), Text("some", ["ab", "", "c"])
    letters = tokenizer.encode("abc")
    assert text.tokens(tokenizer, None) == letters
    assert text.tokens(tokenizer, 95) == [95, *letters[:2], 95, 95, letters[2]]
    assert text.tokens(tokenizer, letters[0]) == [*letters[:2], letters[0], letters[0], letters[2]], "it may be there already"


def test_without_a_file_the_held_out_files_are_read():
    text = read_text(None)
    assert "held-out" in text.name
    assert text.num_bytes > 100_000


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"plain \xff\xfe", "is not UTF-8: byte 6 is 0xff"),
        (b"cut \xc3", "is not UTF-8: byte 4 is 0xc3"),
        (b"", r"has 1 tokens in the 0 bytes .* more than one window of 128"),
        (b"too short", r"has 10 tokens in the 9 bytes .* more than one window of 128"),
    ],
)
def test_a_text_that_cannot_be_measured_is_refused(forms, tmp_path, content, sentence):
    path = tmp_path / "text"
    path.write_bytes(content)
    with pytest.raises(SettingError, match=sentence):
        forms(text=path)


def test_what_is_not_a_file_is_refused(forms, tmp_path):
    for path, why in ((tmp_path / "absent", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(SettingError, match=f"text {path} cannot be read: {why}"):
            forms(text=path)


@pytest.mark.parametrize("wanted", ["int5", "int8,", "", "bfloat16"])
def test_an_unknown_form_is_refused(wanted):
    with pytest.raises(SettingError, match="it takes int8, int4, kv-int8, with commas between them"):
        names_of(wanted)
    assert names_of("int4, int8,int4") == ["int4", "int8"]


@pytest.mark.parametrize("factor", [0.5, float("nan"), float("inf"), -1.0])
def test_a_bad_factor_of_outliers_is_refused(forms, factor):
    with pytest.raises(SettingError, match="outliers must be a factor from 1 to 65536"):
        forms(outliers=factor)


def test_a_bad_number_of_bytes_is_refused(forms):
    with pytest.raises(SettingError, match="bytes must be at least 1; got 0"):
        forms(num_bytes=0)


def test_of_a_quantised_checkpoint_its_own_numbers_are_told(attend, text, tmp_path):
    """No other form is made of its codes; one that is asked for is still refused by name."""
    file = write(tmp_path / "small.gguf", Type.Q8_0)
    status, out, err = attend("quality", file, "--bytes", "9000", "--json")
    assert status == 0, err
    assert len(json.loads(out)["forms"]) == 1
    status, out, err = attend("quality", file, "--bytes", "9000", "--quantize", "int8")
    assert (status, out) == (2, "") and "is already quantised" in err


def test_the_command_prints_one_json_object(attend, folder, text):
    status, out, _ = attend("quality", folder, "--text", text, "--bytes", "200", "--quantize", "int4", "--json")
    found = json.loads(out)
    assert status == 0
    assert (found["model"], found["bytes"], found["positions"], found["outliers"]) == ("tiny", 200, 200, None)
    assert [row["form"] for row in found["forms"]][1:] == ["int4"]
    status, out, err = attend("quality", folder, "--quantize", "int5")
    assert (status, out) == (2, "")
    assert err == "attend: quantize has 'int5'; it takes int8, int4, kv-int8, with commas between them\n"
