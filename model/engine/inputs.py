"""Converts a scheduler's plan into the runner's input: requests as plain numbers, and how each of them draws."""

from attend.model.engine.plan import HiddenSum, Plan, PromptScores, ScheduledTokens, StepInput
from attend.model.engine.request import Request
from attend.model.pooling import Pooling
from attend.model.sampling_plan import Draw, History, SamplingPlan, TextCounts, completing


def step_input(plan: Plan) -> StepInput:
    """A plan for the runner.

    The block tables and the texts of penalties are the requests' own arrays: they hold until the step has been submitted.
    """
    step, items = StepInput(early=plan.early), plan.scheduled_tokens
    if not plan.is_plain or plan.num_streams < len(items):
        items = tuple(sorted(items, key=lambda item: item.num_rows != 1))
    step.tables = [list(tables) for tables in zip(*(item.request.tables for item in items), strict=True)]
    first = 0
    for item in items:
        request, count = item.request, item.num_rows
        step.request_ids.append(request.request_id)
        step.versions.append(request.version)
        step.starts.append(item.start)
        step.counts.append(count)
        if request.adapter is not None:
            step.adapters[request.request_id] = request.adapter.digest
        if item.input_pending:
            step.pending[request.request_id] = first
            step.tokens.append(0)
        else:
            step.tokens.extend(request.tokens(item.start, item.count))
        if item.draft:
            step.tokens.extend(item.draft)
            step.drafts[request.request_id] = item.draft
        if request.prompt_logprobs is not None:
            _add_prompt_scores(step, item, first, request.prompt_logprobs)
        if request.pooling is not None:
            _add_hidden_sum(step, item, first)
        if item.draws:
            _add_draws(step, item, first + item.count - 1)
        first += count
    return step


def _add_draws(step: StepInput, item: ScheduledTokens, row: int) -> None:
    """A draw after the last of its tokens, and one after each token of its draft."""
    request, plan = item.request, item.request.sampling_plan
    position = request.num_tokens + item.input_pending
    plain = plan.draws_from_scores and len(request.output) >= request.min_tokens
    step.draws.append(Draw(plan, position, plan.banned_tokens) if plain else _draw(request, plan, position))
    step.draw_rows.append(row)
    step.draw_ids.append(request.request_id)
    for place in range(1, len(item.draft) + 1):
        step.draws.append(Draw(plan, position + place, plan.banned_tokens))
        step.draw_rows.append(row + place)
        step.draw_ids.append(request.request_id)


def _draw(request: Request, plan: SamplingPlan, position: int) -> Draw:
    """How a request draws its next token where the tokens before it matter."""
    banned = plan.banned_tokens
    if len(request.output) < request.min_tokens:
        banned += tuple(request.stop_token_ids)
    if plan.has_bad_words:
        banned += completing(request.bad_words, request.output)
    text = _text(request) if plan.penalizes else None
    return Draw(plan, position, banned, text, awaits_mask=request.grammar is not None and not plan.can_sample_unmasked)


def _text(request: Request) -> TextCounts:
    """The token counts that its penalties use."""
    request.history = request.history or History()
    return request.history.follow(request.prompt, request.output)


def _add_prompt_scores(step: StepInput, item: ScheduledTokens, first: int, top: int) -> None:
    """The prompt's tokens that follow a token of this step, but those scored before a preemption."""
    request = item.request
    begin = max(item.start, len(request.prompt_scores)) + 1
    end = min(item.start + item.count + 1, len(request.prompt))
    if begin < end:
        row = first + begin - 1 - item.start
        step.prompt_scores.append(PromptScores(request.request_id, row, request.prompt[begin:end], top))


def _add_hidden_sum(step: StepInput, item: ScheduledTokens, first: int) -> None:
    """The tokens of this step that are pooled, but those summed before a preemption."""
    request = item.request
    begin = max(item.start, len(request.prompt) - 1 if request.pooling is Pooling.LAST else request.num_summed)
    end = 1 if request.pooling is Pooling.CLS else len(request.prompt)
    count = min(item.start + item.count, end) - begin
    if count > 0:
        step.hidden_sums.append(HiddenSum(request.request_id, first + begin - item.start, count, request.hidden_sum))
