"""llama.cpp in a process of its own: reads a question as JSON, answers with JSON in its last line.

    {"path": FILE, "tokens": [5, 17], "vocab": 96, "texts": ["a b"]}  ->  {"logprobs": [[...], ...], "ids": [[...]]}

`logprobs` are the log probabilities after each of the tokens, `ids` the tokens of each text.
"""

import json
import sys
import urllib.request

import xllamacpp


def main():
    """Answer one question."""
    question = json.load(sys.stdin)
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.cpuparams.n_threads = question["path"], 16384, 1, 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32  # as they are where we compare
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    params.warmup = False
    server = xllamacpp.Server(params)

    def ask(route, **body):
        request = urllib.request.Request(server.listening_address + route, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=100) as answer:
            return json.load(answer)

    found = {"logprobs": [], "ids": []}
    for text in question.get("texts", []):
        found["ids"].append(ask("/tokenize", content=text, add_special=True, parse_special=True)["tokens"])
    tokens = question.get("tokens", [])
    for end in range(1, len(tokens) + 1):
        body = {"prompt": tokens[:end], "n_predict": 1, "temperature": 0, "n_probs": question["vocab"], "cache_prompt": False}
        [step] = ask("/completion", **body)["completion_probabilities"]
        said = {each["id"]: each["logprob"] for each in step["top_logprobs"]}
        found["logprobs"].append([said[token] for token in range(question["vocab"])])
    print("\n" + json.dumps(found))


main()
