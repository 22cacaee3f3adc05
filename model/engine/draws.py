"""How the requests of a step draw their tokens, and what keeps a draw to its grammar."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from model.engine.plan import Scheduled
from model.engine.request import Request
from model.errors import EngineFailed
from model.mask import Grammar, look_ahead
from model.sampling import EXCLUDED, completing, sample
from model.sampling_plan import Draw, History, TextCounts
from model.transfer import integers

NEXT_BEST = 2
"""Tokens that are tried after a refused one."""


def draws_of(items: Sequence[Scheduled]) -> tuple[list[Request], list[Draw], list[int], dict[str, str]]:
    """The requests that draw a token in this step, how, from the row of which token, and whose grammar failed.

    One with a draft is there again for each token of it.
    """
    drawing: list[Request] = []
    draws: list[Draw] = []
    rows: list[int] = []
    errors: dict[str, str] = {}
    end = 0
    for item in items:
        first, end = end + item.count - 1, end + item.num_rows
        if not item.draws:
            continue
        try:
            draws += [_draw(item.request, item.follows + place) for place in range(end - first)]
        except EngineFailed as error:
            errors[item.request.request_id] = str(error)
            continue
        drawing += [item.request] * (end - first)
        rows += range(first, end)
    return drawing, draws, rows, errors


def keep_to_grammars(
    tokens_R: Tensor,
    logits_RV: Tensor,
    drawing: Sequence[Request],
    draws: Sequence[Draw],
    errors: dict[str, str],
    draw: Callable[[Tensor, Sequence[Draw]], Tensor] = sample,
) -> Tensor:
    """The tokens, drawn again where a grammar does not allow them. Adds to `errors` whose grammar failed.

    The next best tokens are looked at before a mask is worked out: that takes longer, and mostly one of them fits.
    """
    grammars = {
        row: request.grammar for row, request in enumerate(drawing) if request.grammar is not None and draws[row].mask is None
    }
    if not grammars:
        return tokens_R
    drawn, device = tokens_R.tolist(), tokens_R.device
    fitting: dict[int, int] = {}
    wrong = [row for row, grammar in grammars.items() if drawn[row] >= 0 and not grammar.allows(drawn[row])]
    if not wrong:
        return tokens_R
    refused = [drawn[row] for row in wrong]
    scores_WV = logits_RV.index_select(0, integers(wrong, device))
    for _ in range(NEXT_BEST):
        scores_WV.scatter_(1, integers(refused, device)[:, None], -math.inf)
        tokens = draw(scores_WV, [draws[row] for row in wrong]).tolist()
        fitting |= {row: token for row, token in zip(wrong, tokens, strict=True) if token < 0 or grammars[row].allows(token)}
        left = [at for at, row in enumerate(wrong) if row not in fitting]
        wrong, refused = [wrong[at] for at in left], [tokens[at] for at in left]
        if not wrong:
            break
        scores_WV = scores_WV.index_select(0, integers(left, device))
    if wrong:
        fitting |= _drawn_under_masks({row: grammars[row] for row in wrong}, scores_WV, drawing, draws, errors, draw)
    if not fitting:
        return tokens_R
    tokens = [token if token >= 0 else EXCLUDED for token in fitting.values()]  # their scores were finite: they drew once
    return tokens_R.index_copy(0, integers(fitting, device), integers(tokens, device))


def _drawn_under_masks(
    grammars: Mapping[int, Grammar],
    scores_WV: Tensor,
    drawing: Sequence[Request],
    draws: Sequence[Draw],
    errors: dict[str, str],
    draw: Callable[[Tensor, Sequence[Draw]], Tensor],
) -> dict[int, int]:
    """The tokens of some rows under their masks."""
    look_ahead(grammars.values())
    masked, places = {}, []
    for at, (row, grammar) in enumerate(grammars.items()):
        try:
            masked[row] = replace(draws[row], mask=grammar.mask())
            places.append(at)
        except EngineFailed as error:
            errors[drawing[row].request_id] = str(error)
    if not masked:
        return {}
    tokens_M = draw(scores_WV.index_select(0, integers(places, scores_WV.device)), list(masked.values()))
    return dict(zip(masked, tokens_M.tolist(), strict=True))


def _draw(request: Request, num_unread: int = 0) -> Draw:
    """How a request draws its next token, or the one so many places later."""
    plan, position = request.sampling_plan, request.num_tokens + num_unread
    if request.draws_from_scores:
        return Draw(plan, position)
    early = request.stop_token_ids if len(request.output) < request.min_tokens else ()
    banned = (*early, *completing(request.bad_words, request.output))
    mask = None if request.grammar is None or plan.can_sample_unmasked else request.grammar.mask()
    return Draw(plan, position, banned, _text(request) if request.decoding.penalizes else None, mask)


def _text(request: Request) -> TextCounts:
    """What its penalties look at."""
    request.history = request.history or History()
    return request.history.follow(request.prompt, request.output)
