"""The Berkeley function calling leaderboard against a server: python -m tests.clients.bfcl URL [--each N]

It runs where bfcl-eval is installed (README.md says how), with its own handler of chat completions and the samples that
it brings. Its score is not looked at: the shipped model means nothing by a call. Looked at is the protocol: each request is
answered with 200, and each call that was enforced and not cut has arguments that its tool's schema allows.
"""

import argparse
import collections
import json
import os
import sys
import tempfile
from typing import Any

MODEL = "attend-default"
CONTEXT = 1024
ROOM = {"auto": 24, "required": 200}
"""Tokens of an answer, by how tools may be chosen."""
MAX_TURNS = 2
"""Of a conversation of several."""


def categories() -> list[str]:
    """All that ask for nothing of the web and for no other model."""
    from bfcl_eval.constants import category_mapping

    return [*category_mapping.SINGLE_TURN_CATEGORY, *category_mapping.MULTI_TURN_CATEGORY]


def handler(url: str, choice: str, counts: collections.Counter[str]) -> Any:
    """BFCL's handler of chat completions, which counts what comes back."""
    import jsonschema
    from bfcl_eval.model_handler.api_inference.openai_completion import OpenAICompletionsHandler

    class Handler(OpenAICompletionsHandler):
        def generate_with_backoff(self, **kwargs: Any) -> Any:
            room = ROOM[choice]
            kwargs |= {"max_tokens": room, "extra_body": {"truncate_prompt_tokens": CONTEXT - room}}
            if kwargs.get("tools"):
                kwargs |= {"tool_choice": choice, "parallel_tool_calls": choice == "auto"}
            answer, seconds = OpenAICompletionsHandler.generate_with_backoff(self, **kwargs)
            counts["answers"] += 1
            said = answer.choices[0]
            assert said.finish_reason in ("stop", "length", "tool_calls"), said
            calls = said.message.tool_calls or []
            assert bool(calls) or choice == "auto" or not kwargs.get("tools"), said
            if said.finish_reason == "length":
                counts["cut"] += 1
                said.message.tool_calls = None  # as a client does that cannot read it: half a call has no answer
                return answer, seconds
            schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in kwargs.get("tools", ())}
            for call in calls:
                jsonschema.validate(json.loads(call.function.arguments), schemas[call.function.name])
                counts["calls"] += 1
            return answer, seconds

    os.environ |= {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": "none"}
    return Handler(MODEL, 0.001, f"{MODEL}-FC", True)


def run(url: str, each: int) -> dict[str, collections.Counter[str]]:
    """Counts by category, of its first samples. A request that is refused raises the client's own exception."""
    from bfcl_eval.utils import load_dataset_entry

    found: dict[str, collections.Counter[str]] = {}
    for category in categories():
        counts = found[category] = collections.Counter()
        for entry in load_dataset_entry(category)[:each]:
            entry["question"] = entry["question"][:MAX_TURNS]
            for choice in ROOM:
                handler(url, choice, counts).inference(json.loads(json.dumps(entry)), False, True)
                counts["samples"] += 1
        print(category, dict(counts), flush=True)
    return found


def main() -> None:
    """Run, and print a total."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", help="http://host:port of a server of the shipped model")
    parser.add_argument("--each", type=int, default=2, help="samples of each category")
    options = parser.parse_args()
    total = sum(run(options.url, options.each).values(), start=collections.Counter())
    print("in all", dict(total))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        os.environ["BFCL_PROJECT_ROOT"] = folder  # where it would write
        sys.exit(main())
