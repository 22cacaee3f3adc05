"""What llama.cpp makes of the real models, as `llama_cpp.json`: greedy tokens with their log probabilities, and chats as text.

    python tests/real/record.py FOLDER    # by an interpreter that has xllamacpp; FOLDER: .venv/models, see `models.py`

It says no more than what that build of llama.cpp computes, on one thread, with its cache in float16.
"""

import json
import sys
import urllib.request
from pathlib import Path
from typing import Any

import xllamacpp

FILE = Path(__file__).with_name("llama_cpp.json")
TOKENS = 64
MODELS = {"smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf", "gemma3": "gemma-3-270m-q4_k_m.gguf"}
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n",
    "Once upon a time there was a girl who",
    "Die Hauptstadt von Österreich heißt",
    Path(__file__).parents[2].joinpath("LICENSE").read_text(encoding="utf-8").strip()[:3000],
]
"""The last has some 600 tokens, so that errors of positions show."""
USER = {"role": "user", "content": "Name three colours."}
CHATS = [
    [USER],
    [{"role": "system", "content": "You answer in one word."}, {"role": "user", "content": "What is the capital of France?"}],
    [USER, {"role": "assistant", "content": "Red, green and blue."}, {"role": "user", "content": "And one more? 😀"}],
]
"""Of the model that has a chat template."""


def record(path: Path, chats: list[Any]) -> list[dict[str, Any]]:
    """Each prompt with its ids, its answer, and the log probability of each token of the answer."""
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.cpuparams.n_threads = str(path), 1024, 1, 1
    server = xllamacpp.Server(params)

    def ask(route: str, **body: Any) -> dict[str, Any]:
        request = urllib.request.Request(server.listening_address + route, json.dumps(body).encode())
        with urllib.request.urlopen(request, timeout=300) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    cases: list[dict[str, Any]] = [{"prompt": text} for text in TEXTS]
    cases += [{"messages": chat, "prompt": ask("/apply-template", messages=chat)["prompt"]} for chat in chats]
    for case in cases:
        case["ids"] = ask("/tokenize", content=case["prompt"], add_special=True, parse_special=True)["tokens"]
        answer = ask(
            "/completion",
            prompt=case["ids"],
            n_predict=TOKENS,
            temperature=0,
            n_probs=1,
            return_tokens=True,
            cache_prompt=False,
        )
        case["tokens"] = answer["tokens"]
        case["logprobs"] = [round(each["logprob"], 4) for each in answer["completion_probabilities"]]
    return cases


def main() -> None:
    """Write the file."""
    folder, made_by = Path(sys.argv[1]), f"xllamacpp {xllamacpp.__version__} (llama.cpp), tests/real/record.py"
    found = {name: record(folder / file, CHATS if name == "smollm2" else []) for name, file in MODELS.items()}
    FILE.write_text(json.dumps({"made_by": made_by, **found}, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
