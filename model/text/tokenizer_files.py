"""The files of a tokenizer: tokenizer.json, and what tokenizer_config.json and its elders say beside it.

Read as `transformers` 5 reads them.
"""

import json
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, models
from tokenizers import Tokenizer as RawTokenizer

from attend.model.errors import CheckpointError, is_failure
from attend.model.gguf.paths import is_gguf

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
INFILLED = {
    "<|fim_middle|>": ("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<|file_separator|>"),  # Qwen, CodeGemma
    "<fim_middle>": ("<fim_pad>", "<repo_name>", "<reponame>", "<file_sep>", "<filename>"),  # StarCoder, Granite
    "<fim-middle>": ("<fim-pad>",),  # SantaCoder
    "▁<MID>": ("▁<EOT>",),  # Code Llama
}
"""What models write where the code between a prompt and a suffix is complete, beside their end tokens: padding, or the next
file, or the next repository. By the token after which they fill in.
"""


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
    of_model = {name: value for name, value in facts.items() if name.endswith("_token") and name not in NAMED}
    given = {name: facts.get(name) for name in NAMED} | of_model
    for extra in (facts.get("extra_special_tokens"), facts.get("model_specific_special_tokens")):
        given |= extra if isinstance(extra, dict) else {}
    return {name: text for name, value in given.items() if (text := _content(value)) is not None}


def _content(token: Any) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def end_tokens(folder: Path) -> tuple[int, ...]:
    """The tokens that end an answer by these files: `eos_token`, and what follows infilled code. None where they are damaged:
    whoever loads the tokenizer says so.
    """
    try:
        ids = _ids(folder, facts := read_facts(folder))
    except CheckpointError:
        return ()
    infilled = [end for middle, ends in INFILLED.items() if middle in ids for end in ends]
    found = [ids.get(text or "") for text in (named_tokens(facts).get("eos_token"), *infilled)]
    return tuple(token for token in found if type(token) is int and token >= 0)


def _ids(folder: Path, facts: dict[str, Any]) -> dict[str, int]:
    """The ids of added tokens by their texts, and that of `eos_token`."""
    if is_gguf(folder):
        from attend.model.gguf.documents import token_ids

        return token_ids(folder)
    eos = named_tokens(facts).get("eos_token")
    with suppress(TypeError, ValueError, AttributeError):  # as `read_raw` says where they are loaded
        listed = {_content(token) or "": int(at) for at, token in facts.get("added_tokens_decoder", {}).items()}
        if listed and (eos is None or eos in listed):
            return listed  # a small file says all
    path = folder / "tokenizer.json"
    if not path.is_file():
        return {}
    status = path.stat()
    older = {text: at for text, at in read_object(folder / "added_tokens.json").items() if type(at) is int}
    return {**older, **_ids_of(path, (status.st_size, status.st_mtime_ns), eos)}


@lru_cache(maxsize=2)
def _ids_of(path: Path, stamp: tuple[int, int], eos: str | None) -> dict[str, int]:
    """Those that tokenizer.json has. A start asks for them several times, and the file may be large."""
    document = read_object(path)
    with suppress(TypeError, LookupError, AttributeError):
        added = {token["content"]: token["id"] for token in document.get("added_tokens") or []}
        words = (document.get("model") or {}).get("vocab")
        if isinstance(words, list):  # of Unigram: pairs of a word and its score
            words = {pair[0]: at for at, pair in enumerate(words)}
        return {eos: words[eos], **added} if eos is not None and words and eos in words else added
    return {}


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
    try:
        _frame(raw, facts)
        raw.decode(_encode(raw))
    except BaseException as error:
        if not is_failure(error):
            raise
        raise CheckpointError(f"{folder / 'tokenizer.json'} cannot be used as a tokenizer: {error}") from error
    return raw


def _encode(raw: RawTokenizer) -> list[int]:
    """The ids of a short text; of an empty one where the vocabulary has nothing for a letter."""
    try:
        return raw.encode("x").ids
    except Exception:  # bare, as of any text that has what the vocabulary lacks
        return raw.encode("").ids


def _frame(raw: RawTokenizer, facts: dict[str, Any]) -> None:
    """Put the start and the end token round a text where tokenizer_config.json asks for it and tokenizer.json does not, as
    `transformers` 4 and llama.cpp do.
    """
    ids, named, wanted = _encode(raw), named_tokens(facts), dict[str, int]()
    for name, there in (("bos", ids[:1]), ("eos", ids[1:][-1:])):
        token = raw.token_to_id(named.get(f"{name}_token", ""))
        if facts.get(f"add_{name}_token") is True and token is not None and there != [token]:
            wanted[name] = token
    if not wanted:
        return
    state = None if raw.post_processor is None else json.loads(raw.post_processor.__getstate__())
    chain = [] if state is None else state["processors"] if state["type"] == "Sequence" else [state]
    text = {"Sequence": {"id": "A", "type_id": 0}}
    template = next((each for each in chain if each["type"] == "TemplateProcessing"), None)
    if template is None:  # the library takes no second one
        template = {"type": "TemplateProcessing", "single": [text], "pair": [text], "special_tokens": {}}
        chain.append(template)
    for name, token in wanted.items():
        piece = [{"SpecialToken": {"id": name, "type_id": 0}}]
        template["single"] = piece + template["single"] if name == "bos" else template["single"] + piece
        template["special_tokens"][name] = {"id": name, "ids": [token], "tokens": [raw.id_to_token(token)]}
    bare = json.loads(RawTokenizer(models.BPE()).to_str())
    added = bare | {"post_processor": {"type": "Sequence", "processors": chain}}
    raw.post_processor = RawTokenizer.from_str(json.dumps(added)).post_processor


def _open_tokenizer(folder: Path) -> RawTokenizer:
    if is_gguf(folder):
        from attend.model.gguf.documents import tokenizer_of

        return tokenizer_of(folder)
    path = tokenizer_path(folder)
    try:
        return RawTokenizer.from_file(str(path))
    except BaseException as error:  # the library raises bare Exception for every kind of damage, or panics
        if not is_failure(error):
            raise
        raise CheckpointError(f"{path} cannot be read as a tokenizer: {error}") from error


def tokenizer_path(folder: Path) -> Path:
    """The tokenizer.json of a folder. Raises CheckpointError where there is none."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: `AutoTokenizer.save_pretrained` of transformers makes it of other forms")
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
