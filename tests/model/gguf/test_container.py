"""GGUF files that are cut, damaged or built to exhaust a reader: one sentence that names the file, in bounded time and room."""

import random
import struct
import tracemalloc
from pathlib import Path

import numpy
import pytest
import torch

from attend.model.errors import CheckpointError
from attend.model.gguf.container import read_container
from attend.model.net.checkpoint import inspect, load_decoder
from attend.model.text.tokenizer import Tokenizer
from tests.conftest import examples
from tests.model.gguf_files import Type, make, write_gguf

U32, STRING, ARRAY = 4, 8, 9


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sound")
    return write_gguf(make("llama", folder / "theirs"), folder / "tiny.gguf")


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        read_container(path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    return str(error.value).removeprefix(f"{path}: ").removeprefix(f"{path} ")


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def pair(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def tensor(name: bytes, sizes: list[int], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def built(
    path: Path, pairs: list[bytes], tensors: list[bytes], *, counts: tuple[int, int] | None = None, more: int = 0
) -> Path:
    """A file of these parts, with `more` bytes of numbers; `counts` of tensors and metadata may be false."""
    head = b"GGUF" + struct.pack("<IQQ", 3, *(counts or (len(tensors), len(pairs)))) + b"".join(pairs) + b"".join(tensors)
    path.write_bytes(head + bytes(-len(head) % 32) + bytes(more))
    return path


@pytest.mark.parametrize("part", range(40))
def test_a_file_that_is_cut_anywhere_is_refused(part, sound, tmp_path):
    whole = sound.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: len(whole) * part // 40])
    assert "cut off" in refusal(cut)
    cut.write_bytes(whole[: 24 + part * 7])
    refusal(cut)


def test_a_damaged_file_is_a_sentence_and_never_a_traceback(sound, tmp_path):
    whole, chance = sound.read_bytes(), random.Random(5)
    broken = tmp_path / "broken.gguf"
    for _ in range(examples(300)):
        spoiled = bytearray(whole)
        for _ in range(chance.choice([1, 1, 2, 8])):
            spoiled[chance.randrange(5500)] = chance.choice([0, 1, 9, 127, 128, 255, chance.randrange(256)])
        broken.write_bytes(spoiled)
        for read in (inspect, Tokenizer.load):
            said = ""
            try:
                read(broken)
            except CheckpointError as error:
                said = str(error)
            assert not said or ("broken.gguf" in said and len(said) < 2000)


HUGE = (1 << 60, (1 << 63) - 1, (1 << 64) - 1, 10**9)
BOMBS = {
    "metadata": lambda path, count: built(path, [], [], counts=(0, count), more=1 << 12),
    "tensors": lambda path, count: built(path, [], [], counts=(count, 0), more=1 << 12),
    "the name of a value": lambda path, count: built(path, [struct.pack("<Q", count)], [], more=1 << 12),
    "a": lambda path, count: built(path, [pair(b"a", STRING, struct.pack("<Q", count))], [], more=1 << 12),
    "strings of a": lambda path, count: built(path, [pair(b"a", ARRAY, struct.pack("<IQ", STRING, count))], [], more=1 << 12),
    "elements of a": lambda path, count: built(path, [pair(b"a", ARRAY, struct.pack("<IQ", U32, count))], [], more=1 << 12),
}


@pytest.mark.parametrize("count", HUGE)
@pytest.mark.parametrize("what", list(BOMBS))
def test_a_number_that_promises_more_than_the_file_has_is_refused_before_memory_is_taken(what, count, tmp_path):
    path = BOMBS[what](tmp_path / "bomb.gguf", count)
    tracemalloc.start()
    try:
        assert what in refusal(path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


WRONG = {
    "type": (tensor(b"w", [4], kind=77), "tensor w is of the unknown type 77"),
    "offset": (tensor(b"w", [4], offset=32), "tensor w has the offset 32, expected 0"),
    "beyond": (tensor(b"w", [1 << 40]), "tensor w ends 4398046511040 bytes beyond the file: it is cut off"),
    "block": (tensor(b"w", [33, 2], kind=8), "tensor w has rows of 33 elements, which is not a multiple of the block size 32"),
    "dimensions": (tensor(b"w", [1] * 9), "tensor w has 9 dimensions, expected 1 to 4"),
}


@pytest.mark.parametrize("what", list(WRONG))
def test_a_tensor_that_cannot_be_is_named(what, tmp_path):
    described, sentence = WRONG[what]
    assert sentence in refusal(built(tmp_path / "bad.gguf", [], [described], more=64))


HEADS = {
    b"GGML": "it does not begin with GGUF",
    b"GGUF\1\0\0\0": "version 1 of the format is not read; known: versions 2 and 3, little-endian",
    b"GGUF\0\0\0\3": "a big-endian file is not read; known: versions 2 and 3, little-endian",
    b"GGUF\x09\0\0\0": "version 9 of the format is not read; known: versions 2 and 3, little-endian",
}


@pytest.mark.parametrize("head", list(HEADS))
def test_another_format_is_named(head, tmp_path):
    path = tmp_path / "other.gguf"
    path.write_bytes(head + bytes(64))
    assert refusal(path) == HEADS[head]


def split(sound: Path, folder: Path, count: int) -> list[Path]:
    """The parts of a file, as `gguf-split` writes them: the first has the metadata and no tensor, each says which it is."""
    from gguf import GGUFWriter

    whole = read_container(sound)
    paths = [folder / f"tiny-{at:05}-of-{count:05}.gguf" for at in range(1, count + 1)]
    held = list(whole.tensors.items())
    for at, path in enumerate(paths):
        writer = GGUFWriter(path, "llama", use_temp_file=False)
        if at == 0:
            for key, value in whole.metadata.items():
                if key != "general.architecture":
                    add_any(writer, key, value)
        writer.add_uint16("split.no", at)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(held))
        for name, stored in held[at - 1 :: count - 1] if at else []:
            numbers = numpy.fromfile(stored.file, numpy.uint8, stored.size, offset=stored.start)
            writer.add_tensor(name, numbers.view(numpy.float32).reshape(stored.shape), raw_dtype=Type.F32)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return paths


def add_any(writer, key, value) -> None:
    from tests.model.gguf_files import add

    add(writer, key, value)


def test_the_parts_of_a_file_are_the_file(sound, tmp_path):
    parts = split(sound, tmp_path, 3)
    whole, parted = (load_decoder(path, torch.float32, "cpu") for path in (sound, parts[0]))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), parted.parameters(), strict=True))


def test_a_part_that_is_missing_or_another_one_is_named(sound, tmp_path):
    parts = split(sound, tmp_path, 3)
    alone = tmp_path / "alone.gguf"
    alone.write_bytes(parts[0].read_bytes())
    assert refusal(alone) == "is one of 3 parts: give the first, NAME-00001-of-00003.gguf"
    parts[2].write_bytes(parts[1].read_bytes())
    with pytest.raises(CheckpointError, match=r"tiny-00003-of-00003\.gguf: its metadata does not say that it is part 3 of 3"):
        read_container(parts[0])
    parts[2].unlink()
    with pytest.raises(CheckpointError, match=r"tiny-00003-of-00003\.gguf is missing"):
        read_container(parts[0])


def test_a_large_vocabulary_is_read_in_little_more_memory_than_it_takes(tmp_path):
    """200,000 tokens."""
    words = b"".join(text(b"word%06d" % at) for at in range(200_000))
    path = built(tmp_path / "large.gguf", [pair(b"a", ARRAY, struct.pack("<IQ", STRING, 200_000) + words)], [])
    tracemalloc.start()
    try:
        assert read_container(path).metadata["a"][199_999] == "word199999"
        assert tracemalloc.get_traced_memory()[1] < 200_000 * (8 + 64 + 8) * 2
    finally:
        tracemalloc.stop()
