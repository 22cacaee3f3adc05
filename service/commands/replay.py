"""`attend replay`: asks for an answer again, with its seed, and compares the tokens.

The file is one JSON object: `{"request": ..., "response": ...}` as POST /v1/completions took and gave them, or the response
alone with its request in another file.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from attend.model.errors import SettingError

MOST_BYTES = 64 << 20
"""Of a file: more than any answer has."""
WHOLE = ("stop", "length")
"""The finish reasons that the tokens alone decide. The others depend on when they came."""
EXACT = "float32"

Outcome = Literal["same", "different", "impossible"]
STATUS: dict[Outcome, int] = {"same": 0, "different": 1, "impossible": 3}
Ask = Callable[[dict[str, Any]], dict[str, Any]]
"""The response to the body of a completion."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a replay has found."""

    outcome: Outcome
    detail: str


class Impossible(Exception):
    """The answer cannot be asked for again. The sentence says why."""


def read_exchange(answer: Path, request: Path | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """The request and the response. Raises SettingError for files that hold something else."""
    document = _object(answer)
    if request is None and not isinstance(document.get("request"), dict):
        raise SettingError(f'{answer} has no "request": give it, or name the file of the request with --request')
    asked = document["request"] if request is None else _object(request)
    response = document.get("response", document)
    kind = response.get("object") if isinstance(response, dict) else None
    if kind != "text_completion" or not isinstance(response.get("choices"), list) or not response["choices"]:
        raise SettingError(f"{answer} must hold what POST /v1/completions answered without stream; its object is {kind!r}")
    return asked, response


def replay(request: Mapping[str, Any], response: Mapping[str, Any], ask: Ask, precise: Callable[[], bool]) -> Verdict:
    """Ask again and compare. `precise` tells whether who answers computes the same bits in any batch."""
    try:
        body = _body(request, response)
        again = ask(body)
        _check_weights(response, again)
    except Impossible as why:
        return Verdict("impossible", str(why))
    differences = [text for old, new in _pairs(response, again) if (text := _difference(old, new))]
    if not differences:
        by_text = any("token_ids" not in choice for choice in response["choices"])
        what = "the text is the same (the answer has no token_ids)" if by_text else "all tokens are the same"
        return Verdict("same", f"{what}, with the seed {body['seed']}")
    if not precise():
        text = "matrix products there are not batch-invariant, so another token with nearly the same score may be sampled"
        return Verdict("impossible", f"{text}; {differences[0]}")
    return Verdict("different", differences[0])


def _object(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise SettingError(f"{path} must be at most {MOST_BYTES} bytes; it has {path.stat().st_size}")
        document = json.loads(path.read_bytes())
    except OSError as error:
        raise SettingError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise SettingError(f"{path} is not JSON: {error}") from error
    if not isinstance(document, dict):
        raise SettingError(f"{path} must hold a JSON object; it holds a {type(document).__name__}")
    return document


def _end_of(choice: Mapping[str, Any]) -> Any:
    """Why an answer ended: also what cut it, which older servers wrote as `finish_reason`."""
    reason, cut = choice.get("finish_reason"), choice.get("stop_reason")
    return cut if reason == "length" and cut in ("deadline", "abort") else reason


def _body(request: Mapping[str, Any], response: Mapping[str, Any]) -> dict[str, Any]:
    """The request of the second answer. Raises Impossible."""
    seed = response.get("seed")
    if type(seed) is not int:
        raise Impossible("the answer has no seed: another seed samples other tokens")
    if request.get("seed") not in (None, seed):
        raise Impossible(f"the request has the seed {request['seed']}, and the answer {seed}: they do not belong together")
    reasons = [_end_of(choice) for choice in response["choices"]]
    for reason in reasons:
        if reason not in WHOLE:
            raise Impossible(f"the answer ended with {reason!r}, which depends on the time that it took")
    left_out = ("stream", "stream_options", "deadline_ms", "request_id")
    same = {name: value for name, value in request.items() if name not in left_out}
    return {**same, "seed": seed, "return_token_ids": True}


def _check_weights(response: Mapping[str, Any], again: Mapping[str, Any]) -> None:
    old, new = response.get("system_fingerprint"), again["system_fingerprint"]
    if old != new:
        raise Impossible(
            f"the answer has the system_fingerprint {old!r}, but what answers now has {new!r}: other weights or configuration"
        )


def _pairs(response: Mapping[str, Any], again: Mapping[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    old, new = response["choices"], again["choices"]
    if len(old) != len(new):
        raise SettingError(
            f"the answer has {len(old)} choices, and its request asks for {len(new)}: they do not belong together"
        )
    return list(zip(old, new, strict=True))


def _difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> str:
    """Where two choices differ; empty where they do not. Without token ids their texts are compared."""
    name, unit = ("token_ids", "token") if "token_ids" in old else ("text", "character")
    before, after, where = old.get(name) or [], new[name], f"choice {new['index']}"
    for place, (one, other) in enumerate(zip(before, after, strict=False)):
        if one != other:
            return f"{where}: {unit} {place} was {one!r} and is {other!r}"
    if len(before) != len(after):
        return f"{where}: there were {len(before)} {unit}s and are {len(after)}"
    ends = [choice.get("finish_reason") for choice in (old, new)]
    return "" if ends[0] == ends[1] else f"{where}: it ended with {ends[0]!r} and ends with {ends[1]!r}"


def online(url: str, key: str | None) -> tuple[Ask, Callable[[], bool]]:
    """Asks a running server. Raises SettingError for what is no URL."""
    import http.client

    from attend.service.commands.probe import CheckFailed, check_target

    probe = check_target(url, "none", key)

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        try:
            document: dict[str, Any] = probe.post("/v1/completions", body).json()
        except CheckFailed as error:
            raise SettingError(f"{probe.url} refused the request: {error}") from error
        except (OSError, http.client.HTTPException) as error:
            raise SettingError(f"no server answers at {probe.url}: {error}") from error
        return document

    return ask, lambda: is_precise(probe.get("/version").json())


def offline(settings: Any) -> tuple[Ask, Callable[[], bool]]:
    """Asks a model in this process, loaded for it."""
    from attend.service.commands.offline import offline_service, run_completion

    facts: dict[str, str] = {}

    def ask(body: dict[str, Any]) -> dict[str, Any]:
        own = {name: value for name, value in body.items() if name != "model"}
        with offline_service(settings) as (engine, service):
            facts.update(dtype=engine.info.dtype, backend=engine.info.backend)
            engine.start()
            return asyncio.run(run_completion(service, own))

    return ask, lambda: is_precise(facts)


def is_precise(facts: Mapping[str, str]) -> bool:
    """Whether answers have the same bits in any batch: in float32, and by the native decoder in any form."""
    return facts["dtype"] == EXACT or facts["backend"].startswith("native-")
