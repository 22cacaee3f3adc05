"""llama.cpp by itself, in an interpreter that has llama-cpp-python: reads a question as JSON, answers with JSON.

    {"path": FILE, "tokens": [5, 17], "texts": ["a b"]}  ->  {"logits": [[...], ...], "ids": [[...]], "texts": ["a b"]}

`ids` are the tokens of each text, `texts` what those tokens say.
"""

import json
import sys

from llama_cpp import Llama


def main():
    """Answer one question."""
    ask = json.load(sys.stdin)
    found = {"ids": [], "texts": []}
    tokens = ask.get("tokens", [])
    size = max(64, len(tokens))
    options = {"n_ctx": size, "n_batch": size, "n_threads": 1, "logits_all": True, "verbose": False}
    options |= {"type_k": 0, "type_v": 0}  # keys and values in float32, as they are where we compare
    llama = Llama(ask["path"], vocab_only=not tokens, **options)
    for text in ask.get("texts", []):
        ids = llama.tokenize(text.encode(), add_bos=True, special=True)
        found["ids"].append(ids)
        found["texts"].append(llama.detokenize(ids, special=True).decode(errors="replace"))
    if tokens:
        llama.eval(tokens)
        found["logits"] = llama.scores[: len(tokens)].tolist()
    json.dump(found, sys.stdout)


main()
