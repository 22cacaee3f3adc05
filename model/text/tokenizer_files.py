"""The files of a tokenizer: tokenizer.json, and what tokenizer_config.json and its elders say beside it.

Read as `transformers` 5 reads them. What a folder without tokenizer.json lacks is told with the command that makes it.
"""

import json
import shlex
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RawTokenizer

from attend.model.errors import CheckpointError
from attend.model.gguf.paths import is_gguf

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
OTHER_FORMS = (
    *("tekken.json", "tokenizer.model", "tokenizer.model.v*", "spiece.model", "sentencepiece.bpe.model"),
    *("tiktoken.model", "*.tiktoken", "vocab.json", "vocab.txt"),
)
"""Files of tokenizers that are not read."""
CONVERSION = (
    "import sys; from transformers import AutoTokenizer; "
    "AutoTokenizer.from_pretrained(sys.argv[1]).save_pretrained(sys.argv[1])"
)
NEEDED = "transformers sentencepiece protobuf tiktoken"
"""Packages that convert every one of the other forms."""


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file. Raises CheckpointError."""
    if is_gguf(path.parent):
        from attend.model.gguf.documents import json_file  # it needs numpy, and a folder does not

        return json_file(path.parent, path.name)
    if not path.is_file():
        return {}
    try:
        json_file = json.loads(path.read_text(encoding="utf-8"), parse_int=_number)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a JSON object: {error}") from error
    if not isinstance(json_file, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return json_file


def _number(text: str) -> int | float:
    """An integer, or a double for one that not every reader of JSON takes: many files say 10^30 where there is no limit."""
    value = int(text)
    return value if -(2**63) <= value < 2**63 else float(text)


def read_facts(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, with special_tokens_map.json over it where it does not list the added tokens itself."""
    facts = read_object(folder / "tokenizer_config.json")
    return facts if "added_tokens_decoder" in facts else facts | read_object(folder / "special_tokens_map.json")


def named_tokens(facts: dict[str, Any]) -> dict[str, str]:
    """The texts of the special tokens by their names, `bos_token` first. A model may have names of its own."""
    extra = facts.get("extra_special_tokens")
    of_model = {name: value for name, value in facts.items() if name.endswith("_token") and name not in NAMED}
    given = {name: facts.get(name) for name in NAMED} | of_model | (extra if isinstance(extra, dict) else {})
    return {name: text for name, value in given.items() if (text := _content(value)) is not None}


def _content(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def read_raw(folder: Path, facts: dict[str, Any]) -> RawTokenizer:
    """The tokenizer of tokenizer.json, with the added tokens that the other files name. Raises CheckpointError."""
    raw = _open_tokenizer(folder)
    raw.no_truncation()  # a file may be saved with both, as its maker's last batch had them
    raw.no_padding()
    raw.encode_special_tokens = facts.get("split_special_tokens") is True
    try:
        raw.add_tokens(_added_tokens(folder, facts))
        raw.add_tokens(_special_tokens(raw, facts))
    except (TypeError, ValueError, AttributeError, OverflowError) as error:
        raise CheckpointError(f"{folder}: a special token of tokenizer_config.json cannot be read: {error}") from error
    return raw


def _open_tokenizer(folder: Path) -> RawTokenizer:
    if is_gguf(folder):
        from attend.model.gguf.documents import tokenizer_of

        return tokenizer_of(folder)
    path = tokenizer_path(folder)
    try:
        return RawTokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception for every kind of damage
        raise CheckpointError(f"{path} cannot be read as a tokenizer: {error}") from error


def tokenizer_path(folder: Path) -> Path:
    """The tokenizer.json of a folder. Raises CheckpointError where there is none."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: {_way_to_make_it(folder)}")
    return path


def _added_tokens(folder: Path, facts: dict[str, Any]) -> list[AddedToken]:
    """The added tokens with an id in tokenizer_config.json, or in added_tokens.json as older versions wrote it."""
    if "added_tokens_decoder" in facts:
        listed = sorted(facts["added_tokens_decoder"].items(), key=lambda each: int(each[0]))
        return [AddedToken(**token) for _, token in listed]
    special = {*named_tokens(facts).values(), *_missing_names(facts)}
    older = sorted(read_object(folder / "added_tokens.json").items(), key=lambda each: int(each[1]))
    return [AddedToken(text, normalized=text not in special, special=text in special) for text, _ in older]


def _special_tokens(raw: RawTokenizer, facts: dict[str, Any]) -> list[AddedToken]:
    """Tokens of the vocabulary that are special by name alone. One that it does not have has no id, and stays ordinary text."""
    known = {token.content for token in raw.get_added_tokens_decoder().values()}
    texts = dict.fromkeys([*named_tokens(facts).values(), *_missing_names(facts)])
    return [AddedToken(text, special=True) for text in texts if text not in known and raw.token_to_id(text) is not None]


def _missing_names(facts: dict[str, Any]) -> list[str]:
    listed = facts.get("extra_special_tokens") or facts.get("additional_special_tokens")
    return [text for token in listed if (text := _content(token)) is not None] if isinstance(listed, list) else []


def _way_to_make_it(folder: Path) -> str:
    found = [path.name for form in OTHER_FORMS for path in sorted(folder.glob(form))]
    if not found:
        return "Attend needs the tokenizer in the `tokenizers` JSON format"
    command = shlex.join(["python", "-c", CONVERSION, str(folder)])
    return f"this command makes it of {found[0]}: pip install {NEEDED} && {command}"
