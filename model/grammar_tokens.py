"""A tokenizer.json as llguidance must read it, so that a grammar sees the texts that tokens have here."""

import json
from typing import Any

from model.tokenizer import Tokenizer


def described_for_grammars(tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokenizer.json of a tokenizer, with a token for every id, and added tokens by their own texts."""
    described = json.loads(tokenizer.raw.to_str())
    if isinstance(described["model"]["vocab"], dict):  # an added token that is not in it gets its id from the vocabulary's size
        described["model"]["vocab"] |= {token["content"]: token["id"] for token in described["added_tokens"]}
    return _without_gaps(_with_texts(described, tokenizer), tokenizer)


def _without_gaps(described: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """A tokenizer.json for the library, which wants a token for every id: where there is none, a special one, never text."""
    tokens = [token for token in range(tokenizer.size) if tokenizer.raw.id_to_token(token) is None]
    filled = {f"<|no token {token}|>": token for token in tokens}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False) | {"special": True}
    if filled:
        described["model"]["vocab"] |= filled
        described["added_tokens"] += [{"id": token, "content": text, **flags} for text, token in filled.items()]
    return described | {"truncation": None, "padding": None}  # they concern prompts


def _with_texts(described: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """A tokenizer.json whose added tokens are spelled in letters of bytes, as the library reads them.

    Where another token has this spelling, or merges need the word, the token is special: the others spell its text.
    """
    own = [token for token in described["added_tokens"] if token["id"] in tokenizer.own_texts and not token["special"]]
    model = described["model"]
    pairs = (pair.split(" ") if isinstance(pair, str) else pair for pair in model.get("merges", ()) if own)
    merged = {part for pair in pairs for part in pair}
    for token in own:
        word, spelled = token["content"], tokenizer.letters_of(token["content"])
        if model["type"] != "BPE" or spelled in model["vocab"] or word in merged:
            token["special"] = True
        else:
            model["vocab"].pop(word, None)
            model["vocab"][spelled] = token["id"]
            token["content"] = spelled
    return described
