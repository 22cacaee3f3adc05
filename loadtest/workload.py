"""The workload of a command line, with what only the server's tokenizer knows."""

import json
import ssl
import urllib.request
from functools import cache
from typing import Any

from loadtest.options import api_key
from loadtest.prompts import Workload, code
from loadtest.traces import BLOCK

TEXT = code(4000)
"""Prompts of a length in tokens are drawn from the tokens of this."""


def workload_of(environment: Any) -> Workload:
    """What the options of a run ask for. Raises OSError where lengths are in tokens and the HTTP address does not answer."""
    options = environment.parsed_options
    needs = options.prompt_tokens is not None or options.loop == "trace"
    ids = tokens_of(environment.host, options.ca_file) if needs else ()
    return Workload(
        mix=options.prompts,
        long_chars=options.long_chars,
        max_tokens=options.max_tokens,
        prompt_tokens=options.prompt_tokens,
        output_tokens=options.output_tokens,
        prefixes=options.prefixes,
        models=options.models,
        tools=options.tools,
        token_ids=ids,
        chars_a_token=len(TEXT) / len(ids) if ids else Workload.chars_a_token,
        block=max(1, round(BLOCK * options.trace_scale)),
    )


@cache
def tokens_of(host: str, ca_file: str) -> tuple[int, ...]:
    """The token ids of TEXT, as the server's POST /tokenize gives them."""
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key()}"} if api_key() else {})
    body = json.dumps({"prompt": TEXT, "add_special_tokens": False}).encode()
    trust = ssl.create_default_context(cafile=ca_file) if ca_file else None
    request = urllib.request.Request(f"{host.rstrip('/')}/tokenize", body, headers)
    with urllib.request.urlopen(request, timeout=30, context=trust) as answer:
        return tuple(json.load(answer)["tokens"])
