"""What happens to a simulated service: events, made of a seed before the life begins, so that some can be left out."""

import random
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Literal

from attend.model.engine.config import EngineConfig
from attend.model.errors import InvalidRequest
from attend.model.params import NO_CHANGE, DecodingParams, SamplingParams, StopRules
from attend.model.pooling import EmbeddingRules, Pooling
from attend.model.text.caller_marks import ChatText
from attend.service.access.quota import Limits
from attend.service.chat.tools import Calling
from attend.service.records import ChatPrompt, ChatRules, Command
from tests.model.engine.windows import with_groups
from tests.service.contract.asked import calling_of
from tests.simulation.model import END, FORM, LETTERS, SPECIAL, SPECS, VOCAB, WORDS
from tests.simulation.oracle import encoded, expected

TOOL = {"type": "object", "properties": {}, "additionalProperties": False}
Route = tuple[str, str]
GROUPS = ("full", "windows", "states")
"""Of layers, by turns of the seeds."""


@dataclass(frozen=True)
class Setting:
    """The server of a life."""

    config: EngineConfig
    queued: int
    asynchronous: bool
    timeout: float
    """Seconds that any call may take."""
    inline: int
    large: int
    """Work up to `inline` characters is done at once, and from `large` on by one thread: `generation/thread_pools.py`."""
    most_large: int
    keys: tuple[Limits, ...]
    """No keys: nobody asks for one."""
    embedding: EmbeddingRules
    adapters: bool
    most_tokens: int
    """Of a step for which the memory suffices."""


@dataclass(frozen=True)
class Call:
    """Somebody calls."""

    at: float
    number: int
    route: Route
    command: Command
    stream: bool
    key: int | None = None
    pause: float = 0.0
    """Seconds between two reads of a stream."""
    leaves: float | None = None
    """Seconds after which the connection is cut."""
    reads: int | None = None
    """Batches after which the reader closes the stream."""
    broken: tuple[int, int] | None = None
    """Answer and position at which it fails in the engine."""
    breaks_step: bool = False
    """It fails all of its step."""
    dimensions: int | None = None
    adapter: str = ""
    """The digest of its adapter; "" for none."""


@dataclass(frozen=True)
class Fault:
    """The next step fails, or the device, or somebody ends the server."""

    at: float
    kind: Literal["step", "device", "drain", "close"]
    seconds: float = 0.0


Event = Call | Fault


def setting_of(seed: int) -> Setting:
    """A small server: blocks, places and limits run out."""
    dice = random.Random(f"server {seed}")
    block_size, num_blocks = dice.randint(1, 4), dice.randint(8, 30)
    config = EngineConfig(
        max_model_len=dice.randint(min(16, block_size * num_blocks), min(64, block_size * num_blocks)),
        num_blocks=num_blocks,
        block_size=block_size,
        max_batch_requests=dice.randint(1, 6),
        max_batch_tokens=dice.choice([2, 8, 40, 40]),
        chunk_size=dice.choice([1, 2, 4]),
        step_goal=0.0,
        prefix_caching=dice.random() < 0.7,
        draft_tokens=dice.choice([0, 3, 15]),
    )
    groups = GROUPS[seed % len(GROUPS)]
    if groups != "full":
        config = with_groups(config, dice, states=groups == "states")
    limits = Limits(dice.choice([None, 8, 100]), dice.choice([None, 100, 1000]), dice.choice([None, 2, 8]))
    return Setting(
        config,
        queued=dice.choice([0, 8, 32, 32]),
        asynchronous=dice.random() < 0.4,
        timeout=dice.choice([0.7, 60.0, 60.0, 60.0]),
        inline=dice.choice([0, 0, 100, 1024]),
        large=dice.choice([20, 200, 64 << 10]),
        most_large=dice.choice([1, 3, 64]),
        keys=dice.choice([(), (), (limits, Limits()), (limits, Limits(), Limits(concurrent=4))]),
        embedding=EmbeddingRules(dice.choice([*Pooling]), dice.choice([None, 6]), ""),
        adapters=dice.random() < 0.3,
        most_tokens=dice.choice([1000, 1000, 6]),
    )


def events_of(seed: int, num_calls: int = 30) -> list[Event]:
    """The events of a life, in order."""
    dice, setting = random.Random(f"events {seed}"), setting_of(seed)
    stems = ["".join(dice.choices(LETTERS, k=40)) for _ in range(2)]
    hurry = dice.choice([0.02, 0.1, 0.3])
    events: list[Event] = []
    now = 0.0
    for number in range(num_calls):
        now += dice.expovariate(1 / hurry) if dice.random() < 0.7 else 0.0
        events.append(_call(random.Random(f"call {seed} {number}"), now, number, setting, stems))
        if any(group.has_state for group in setting.config.groups) and dice.random() < 0.6:
            events[-1] = _next_turn(events[-1], dice.choice(events), setting.config.max_model_len)
    faults = [Fault(dice.uniform(0, now), "step") for _ in range(dice.choice([0, 1, 2, 4]))]
    end = dice.choice([None, None, None, "drain", "close", "device"])
    if end is not None:
        faults.append(Fault(now * dice.choice([dice.uniform(0, 1), 0.9, 1.0, 1.05]), end, dice.choice([0.0, 0.3, 5.0])))
    return sorted([*events, *faults], key=lambda event: event.at)


def _next_turn(call: Call, earlier: Call, context: int) -> Call:
    """A call that goes on after the answer to an earlier one, where both are plain."""
    for each in (call, earlier):
        command = each.command
        if command.chat or command.embedding or command.resume_token_ids or command.num_answers > 1:
            return call
        if command.sampling.seed is None or command.truncate_prompt_tokens or command.stops.max_tokens == 0:
            return call
    command, answer = (
        call.command,
        expected(earlier.command, 0, earlier.command.sampling.seed, context, adapter=earlier.adapter),
    )
    text = (*answer.prompt, *answer.tokens, call.number % VOCAB)[: context // 2]
    prompt = replace(command, prompts=(text,), cache_salt=earlier.command.cache_salt, echo=False)
    return replace(call, command=prompt, adapter=earlier.adapter)


@cache
def calling(choice: str, parallel: bool) -> Calling:
    """One tool, which takes no arguments."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": TOOL}}]
    return calling_of(tools, choice, parallel, FORM)


def _call(dice: random.Random, at: float, number: int, setting: Setting, stems: list[str]) -> Call:
    """A call; if what was drawn is refused before it reaches the service, a plainer one."""
    for _ in range(8):
        try:
            return _drawn(dice, at, number, setting, stems)
        except InvalidRequest:
            continue
    raise AssertionError("no call can be drawn")


def _drawn(dice: random.Random, at: float, number: int, setting: Setting, stems: list[str]) -> Call:
    transport = dice.choice(["http", "grpc"])
    kind = dice.choices(["text", "chat", "embed"], [6, 3, 1])[0]
    stream = dice.random() < 0.65 and kind != "embed"
    command = {"text": _text, "chat": _chat, "embed": _embed}[kind](dice, number, setting, stems)
    routes = {
        "http": {"text": "/v1/completions", "chat": "/v1/chat/completions", "embed": "/v1/embeddings"},
        "grpc": {"text": "Generate", "chat": "Chat", "embed": "Embed"},
    }
    route = routes[transport][kind] + ("Stream" if transport == "grpc" and stream else "")
    call = Call(at, number, (transport, route), command, stream)
    broken = None
    if dice.random() < 0.06 and command.sampling.seed is not None and command.embedding is None:
        broken = (dice.randrange(command.num_answers), dice.randint(1, 20))
    return replace(
        call,
        key=dice.randrange(len(setting.keys)) if setting.keys else None,
        pause=dice.choice([0.0, 0.0, 0.0, 0.02, 0.3]) if stream else 0.0,
        leaves=dice.choice([0.001, 0.1, dice.uniform(0, 2)]) if dice.random() < 0.12 else None,
        reads=dice.randint(1, 6) if stream and dice.random() < 0.12 else None,
        broken=broken,
        breaks_step=broken is not None and dice.random() < 0.4,
        dimensions=dice.choice([None, 2]) if kind == "embed" else None,
        adapter=dice.choice(["", "", "", "one", "two"]) if setting.adapters else "",
    )


def _common(dice: random.Random, number: int) -> dict:
    seed = None if dice.random() < 0.08 else 3 * number + dice.choice([0, 1, 2, 2])
    return {
        "sampling": SamplingParams(temperature=0, seed=seed),
        "request_id": f"call-{number}",
        "deadline_ms": dice.choice([1, 30, 200, dice.randint(1, 3000)]) if dice.random() < 0.25 else None,
        "cache_salt": dice.choice(["", "", "salt"]),
        "priority": dice.choice([5, 5, dice.randint(0, 9)]),
        "truncate_prompt_tokens": dice.choice([1, 3, 8]) if dice.random() < 0.1 else None,
    }


def _prompt(dice: random.Random, setting: Setting, stems: list[str]) -> str:
    most = setting.config.max_model_len
    size = dice.randint(1, most // 2) if dice.random() < 0.95 else dice.randint(1, most + 4)
    stem = dice.choice(stems)[: dice.choice([0, size, dice.randint(0, size)])]
    text = stem + "".join(dice.choices(LETTERS, k=size - len(stem)))
    return "" if dice.random() < 0.02 else text


def _stops(dice: random.Random, setting: Setting, *, formed: bool) -> StopRules:
    most = dice.randint(1, max(1, setting.config.max_model_len // 2))
    words = ["ab", "a", "é", "\n", "xy", 'f"', "bab", "dd", "aba"]
    return StopRules(
        max_tokens=None if dice.random() < 0.08 else most,
        min_tokens=dice.randint(0, most) if dice.random() < 0.25 and not formed else 0,
        stop=tuple(dice.sample(words, dice.choice([1, 2, 4]))) if dice.random() < 0.4 else (),
        stop_token_ids=tuple(dice.sample(range(len(WORDS)), dice.choice([1, 3]))) if dice.random() < 0.3 else (),
        include_stop_str_in_output=dice.random() < 0.3,
        ignore_eos=dice.random() < 0.3,
    )


def _text(dice: random.Random, number: int, setting: Setting, stems: list[str]) -> Command:
    formed = dice.random() < 0.12
    stops = _stops(dice, setting, formed=formed)
    prompts = [_prompt(dice, setting, stems) for _ in range(dice.choice([1, 1, 1, 2, 3]))]
    command = Command(
        prompts=tuple(tuple(encoded(text)) if text and dice.random() < 0.4 else text for text in prompts),
        stops=stops,
        n=dice.choice([1, 1, 1, 2, 3]),
        grammar=dice.choice(SPECS) if formed else None,
        logprobs=dice.choice([0, 2]) if dice.random() < 0.2 else None,
        prompt_logprobs=dice.choice([0, 2]) if dice.random() < 0.12 else None,
        echo=dice.random() < 0.12,
        skip_special_tokens=dice.random() < 0.8,
        decoding=_decoding(dice),
        **_common(dice, number),
    )
    if command.computes_prompts and dice.random() < 0.3 and not formed:
        return replace(command, stops=StopRules(max_tokens=0))
    seed = command.sampling.seed
    if seed is None or command.num_answers > 1:
        return command
    if seed % 3 == 2 and dice.random() < 0.5:  # a prompt in the answer's own words, which can be guessed
        rules = StopRules(max_tokens=dice.randint(1, setting.config.max_model_len // 2), ignore_eos=True)
        own = replace(command, prompts=((dice.randrange(VOCAB),),), stops=rules, grammar=None)
        command = replace(command, prompts=((*own.prompts[0], *expected(own, 0, seed, setting.config.max_model_len).tokens),))
    if dice.random() < 0.2:
        tokens = expected(command, 0, seed, setting.config.max_model_len).tokens
        kept = dice.randint(0, len(tokens)) if dice.random() < 0.1 else dice.randint(0, max(0, len(tokens) - 1))
        return replace(command, resume_token_ids=tuple(tokens[:kept]))
    return command


def _decoding(dice: random.Random) -> DecodingParams:
    if dice.random() < 0.85:
        return NO_CHANGE
    if dice.random() < 0.5:
        return DecodingParams(bad_words=tuple(dice.sample(["a", "ab", "b", "xy", "dd"], 2)))
    return DecodingParams(
        allowed_token_ids=tuple(dice.sample(range(VOCAB), dice.choice([1, 4, 12])) + dice.choice([[], [END]]))
    )


def _chat(dice: random.Random, number: int, setting: Setting, stems: list[str]) -> Command:
    rules = dice.choice([None, None, "auto", "required", "required"])
    chat = ChatRules(FORM) if rules is None else ChatRules(FORM, calling(rules, dice.random() < 0.5))
    formed = chat.calling.is_enforced
    grammar = dice.choice(SPECS) if dice.random() < 0.1 and rules is None else None
    stops = _stops(dice, setting, formed=formed or grammar is not None)
    text = _prompt(dice, setting, stems) + dice.choice(["", "", SPECIAL[0]])
    return Command(
        prompts=(ChatPrompt(partial(ChatText, text or "a")),),
        stops=replace(stops, max_tokens=None) if formed else stops,
        n=dice.choice([1, 1, 2]),
        chat=chat,
        grammar=grammar,
        logprobs=dice.choice([0, 2]) if dice.random() < 0.1 else None,
        **_common(dice, number),
    )


def _embed(dice: random.Random, number: int, setting: Setting, stems: list[str]) -> Command:
    return Command(
        prompts=tuple(_prompt(dice, setting, stems) for _ in range(dice.choice([1, 2, 4, 4, 30]))),
        stops=StopRules(max_tokens=0),
        embedding=setting.embedding,
        **_common(dice, number),
    )
