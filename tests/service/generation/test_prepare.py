"""Preparing a call holds the event loop for no longer than a millisecond or so, whatever the call asks for.

Work is counted, not timed: the calls that the loop's thread makes without a pause, and the characters it tokenizes and decodes.
"""

import asyncio
import sys
import threading
from asyncio import events
from functools import cache

import pytest

from attend.model.errors import ContextTooLong, InvalidRequest, NotSupported
from attend.model.params import DecodingParams, SamplingParams, StopRules
from attend.model.text.caller_marks import ChatText
from attend.model.text.chat import ChatTemplate
from attend.model.text.grammar import GrammarSpec
from attend.model.text.tokenizer import Tokenizer
from attend.service.chat.forms import CALLS, REASONING, AnswerFormat
from attend.service.chat.parts import Tool
from attend.service.chat.tools import NO_CALLS, Calling
from attend.service.generation.answer import Answer
from attend.service.generation.prepare import INLINE_CHARACTERS, Preparation
from attend.service.records import ChatPrompt, ChatRules, Command
from tests.fakes import END, LAST_TOKEN, byte_tokenizer, info
from tests.model.gguf.test_vocabulary import with_all_merges
from tests.model.gguf_files import byte_level, make, scored, write_gguf
from tests.model.tokenizers import KINDS, complete

LONG = 50_000
MAX_CALLS = 2000
"""Of Python and of C, at some 0.3 us each."""


def preparation(limit: int = LONG) -> Preparation:
    return Preparation(info(max_model_len=limit, num_blocks=100_000), byte_tokenizer())


def command(*prompts, rules: dict | None = None, **more) -> Command:
    stops = StopRules(**{"max_tokens": 4} | (rules or {}))
    given = {"prompts": prompts or ("a",), "stops": stops, "sampling": SamplingParams(seed=1), "request_id": "test"}
    return Command(**given | more)


class Watch:
    """What the thread of the event loop does: the most calls in one turn of it, and all characters through the tokenizer."""

    def __init__(self, monkeypatch):
        self.most = self.calls = self.characters = 0
        self.encoded = []
        """Every text that was tokenized, in whatever thread."""
        self._thread = threading.get_ident()
        monkeypatch.setattr(Tokenizer, "encode", self._counting(Tokenizer.encode))
        monkeypatch.setattr(Tokenizer, "decode", self._counting(Tokenizer.decode))
        genuine = events.Handle._run

        def turn(handle):
            self.calls = 0
            genuine(handle)
            self.most = max(self.most, self.calls)

        monkeypatch.setattr(events.Handle, "_run", turn)

    def _counting(self, genuine):
        def counted(tokenizer, given, **more):
            self.encoded += [given] if isinstance(given, str) else []
            self.characters += len(given) * (threading.get_ident() == self._thread)
            return genuine(tokenizer, given, **more)

        return counted

    def _count(self, frame, event, argument):
        self.calls += event in ("call", "c_call")

    def prepare(self, asked: Command, by: Preparation) -> dict[str, Answer]:
        async def prepared():
            sys.setprofile(self._count)
            try:
                return await by.answers(asked)
            finally:
                sys.setprofile(None)

        return asyncio.run(prepared())


@pytest.fixture
def watch(monkeypatch):
    return Watch(monkeypatch)


WORDS = tuple(f"{number:02}" + "x" * 254 for number in range(64))
HOSTILE = {
    "bad words of many answers": command(*["a"] * 16, n=8, decoding=DecodingParams(bad_words=WORDS)),
    "bad words of one": command(decoding=DecodingParams(bad_words=WORDS)),
    "texts, each of which is short": command(*["a" * (INLINE_CHARACTERS - 1)] * 128),
    "one long text": command("a" * 40_000),
    "token ids": command((97,) * 40_000),
    "lists of token ids": command(*[(97,) * 4000] * 128),
    "an echo of token ids": command((97,) * 4000, echo=True),
    "echoes of token ids": command(*[(97,) * 1000] * 128, echo=True),
    "a text that is cut and echoed": command("a" * 40_000, echo=True, truncate_prompt_tokens=30_000),
    "token ids that are cut": command((97,) * 400_000, truncate_prompt_tokens=3),
    "allowed tokens": command(decoding=DecodingParams(allowed_token_ids=tuple(range(257)))),
    "stop strings": command(*["a"] * 16, n=8, rules={"stop": tuple(f"{n}" + "ab" * 127 for n in range(4))}),
    "stop tokens": command(*["a"] * 16, n=8, rules={"stop_token_ids": tuple(range(250))}),
    "biases": command(*["a"] * 16, n=8, decoding=DecodingParams(logit_bias=dict.fromkeys(range(257), 1.0))),
    "tokens received": command(resume_token_ids=(97,) * 20_000, rules={"max_tokens": 30_000, "stop": ("ab" * 127,)}),
    "answers": command(*["a"] * 128),
    "a conversation": command(ChatPrompt(lambda: ChatText("a" * 40_000))),
}


@pytest.mark.parametrize("asked", HOSTILE.values(), ids=HOSTILE)
def test_no_call_holds_the_event_loop_while_it_is_prepared(watch, asked):
    answers = watch.prepare(asked, preparation())
    assert len(answers) == asked.num_answers
    assert watch.characters <= INLINE_CHARACTERS
    assert watch.most <= MAX_CALLS


def test_the_largest_calls_that_are_prepared_on_the_event_loop_stay_within_the_bound(watch):
    for prompts in range(1, 40):
        watch.characters = 0
        watch.prepare(
            command(*["a" * (INLINE_CHARACTERS // prompts - 40)] * prompts if prompts < 20 else ["a"] * prompts), preparation()
        )
        assert watch.characters <= INLINE_CHARACTERS
        assert watch.most <= MAX_CALLS
    assert watch.most > 100, "the watch does see something"


def test_a_plain_call_is_prepared_without_a_change_of_threads(monkeypatch):
    monkeypatch.setattr("attend.service.generation.prepare.run_in_pool", None)
    assert asyncio.run(preparation().answers(command("def f(x):" * 100, n=2)))


def test_bad_words_are_tokenized_once_for_all_answers_of_a_call(watch):
    watch.prepare(command(*["a"] * 16, n=8, decoding=DecodingParams(bad_words=("x", "y"))), preparation())
    assert sorted(text for text in watch.encoded if text != "a") == [" x", " y", "x", "y"]


def test_a_grammar_follows_received_tokens_beside_the_event_loop(watch):
    asked = command(
        resume_token_ids=(ord("a"),) * 3000,
        rules={"max_tokens": 4000},
        grammar=GrammarSpec("regex", "a{3500}"),
    )
    (answer,) = watch.prepare(asked, preparation()).values()
    assert answer.num_tokens == 3000
    assert watch.most <= MAX_CALLS


@pytest.mark.parametrize(
    ("asked", "error", "field"),
    [
        (command("a" * 100_000), ContextTooLong, "prompt"),
        (command(ChatPrompt(lambda: ChatText("a" * 100_000)), names=("messages",)), ContextTooLong, "messages"),
        (command((97,) * 101), ContextTooLong, "prompt"),
        (command(resume_token_ids=(97,) * 101, rules={"max_tokens": 200}), InvalidRequest, "resume_token_ids"),
        (command(decoding=DecodingParams(allowed_token_ids=(97,) * 258)), InvalidRequest, "allowed_token_ids"),
    ],
)
def test_what_cannot_fit_is_refused_unread(watch, asked, error, field):
    with pytest.raises(error) as caught:
        watch.prepare(asked, preparation(100))
    assert caught.value.field == field
    assert watch.encoded == []


@pytest.mark.parametrize("asks", [True, False, None])
@pytest.mark.parametrize("writes", ["{{ bos_token }}", "\n {{ bos_token }}", ""])
@pytest.mark.parametrize("kind", ["gpt2", "llama2"])
def test_a_chat_of_a_gguf_file_has_the_start_token_once_where_file_or_template_ask_for_it(tmp_path, kind, writes, asks):
    """llama.cpp puts it there, so makers of files leave it out of their templates; a text's is that of /tokenize."""
    raw = KINDS[kind]()
    raw.add_special_tokens(["<s>", "</s>", "<unk>"])
    start = raw.token_to_id("<s>")
    ids = {"bos_token_id": start, "eos_token_id": raw.token_to_id("</s>"), "add_bos_token": asks, "add_eos_token": True}
    tokens = byte_level(raw, "gpt-2", **ids) if kind == "gpt2" else scored(with_all_merges(raw), **ids)
    said = {"tokenizer.chat_template": writes + "{{ messages[0].content }}"}
    path = write_gguf(make("llama", tmp_path), tmp_path / "tiny.gguf", tokens=tokens, metadata=said)
    tokenizer, template = Tokenizer.load(path), ChatTemplate.load(path)
    asks = kind == "llama2" if asks is None else asks  # what files that do not say mean
    prepared = Preparation(info(vocab_size=tokenizer.size), tokenizer)
    answers = asyncio.run(
        prepared.answers(command(ChatPrompt(lambda: template.write([{"role": "user", "content": "the cat"}]))))
    )
    [chat] = [answer.request.prompt for answer in answers.values()]
    begins = "<s>" if asks and not writes else ""
    said = begins + writes.replace("{{ bos_token }}", "<s>") + "the cat"
    assert tokenizer.encode(said, add_special_tokens=False) == chat and chat.count(start) == bool(asks or writes)
    [text] = [answer.request.prompt for answer in asyncio.run(prepared.answers(command("the cat"))).values()]
    assert (text[0] == start) == asks


def test_a_chat_of_a_folder_has_what_its_template_writes(tmp_path):
    """As `transformers` has it, whatever its post-processor does to other texts."""
    complete("gpt2").save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<s>"}')
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.encode("the")[0] == tokenizer.bos_token_id
    prepared = Preparation(info(vocab_size=tokenizer.size), tokenizer)
    [answer] = asyncio.run(prepared.answers(command(ChatPrompt(lambda: ChatText("the cat"))))).values()
    assert answer.request.prompt == tokenizer.encode("the cat", add_special_tokens=False)


def test_every_answer_is_without_the_tokens_that_the_model_suppresses():
    by = Preparation(info(), byte_tokenizer(), suppress_tokens=(7, 10**6))
    asked = command("a", "b", n=2, decoding=DecodingParams(allowed_token_ids=(7, 8)))
    assert {each.request.banned_tokens for each in asyncio.run(by.answers(asked)).values()} == {(7,)}


def test_a_model_without_a_head_embeds_and_refuses_text():
    prepared = Preparation(info(makes_text=False), byte_tokenizer())
    with pytest.raises(NotSupported, match="this model generates no text: its checkpoint has no head"):
        asyncio.run(prepared.answers(command("a")))
    assert asyncio.run(prepared.answers(command("a", embedding=LAST_TOKEN)))


@pytest.mark.parametrize(("whitespace", "fits"), [("compact", False), ("flexible", True)])
def test_white_space_in_json_is_what_the_server_is_set_to(whitespace, fits):
    prepared = Preparation(info(), byte_tokenizer(), whitespace)
    grammar = prepared.grammars.compile(GrammarSpec("json_object", "")).start()
    grammar.advance(ord("{"))
    assert (grammar.allows(ord(" ")), grammar.allows(ord("}"))) == (fits, True)


THINKING = AnswerFormat(CALLS["hermes"], REASONING["think"])
NOW = Tool("now", {"type": "object", "properties": {}, "additionalProperties": False})
SPECS = {
    "json_schema": GrammarSpec("json_schema", '{"type": "object"}'),
    "json_object": GrammarSpec("json_object", ""),
    "regex": GrammarSpec("regex", "[{]+"),
    "choice": GrammarSpec("choice", '["{", "{}"]'),
}


@cache
def served() -> Preparation:
    return preparation()


def chat(prompt: str, spec: GrammarSpec | None, form: AnswerFormat = THINKING, calling: Calling = NO_CALLS, **more) -> Answer:
    """The answer to a conversation that a template wrote so."""
    asked = command(ChatPrompt(lambda: ChatText(prompt)), grammar=spec, chat=ChatRules(form, calling, **more))
    [answer] = asyncio.run(served().answers(asked)).values()
    return answer


def begins(answer: Answer, text: str) -> bool:
    """True if an answer may begin so."""
    grammar = answer.request.grammar
    for byte in text.encode():
        if not grammar.allows(byte):
            return False
        grammar.advance(byte)
    return True


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("name", sorted({*REASONING} - {"harmony"}))
@pytest.mark.parametrize(
    "calling", [NO_CALLS, Calling((NOW,)), Calling((NOW,), choice="required")], ids=["", "tools", "required"]
)
def test_nothing_is_thought_where_the_prompt_has_closed_the_reasoning(name, spec, calling):
    """Templates write so where the caller turned reasoning off; an open block, or none, is as ever."""
    reasoning = REASONING[name]
    form, spec = AnswerFormat(CALLS["hermes"], reasoning), None if calling.choice == "required" else spec
    thought, first = f"hm{reasoning.end}\n", "<tool_call>" if calling.choice == "required" else "{"

    def may_begin(written: str, *texts: str, **more) -> list[bool]:
        return [begins(chat(f"user: hi\nassistant: {written}", spec, form, calling, **more), text) for text in texts]

    for closed in (f"{reasoning.begin}\n\n{reasoning.end}\n\n", f"{reasoning.begin}{reasoning.end}", f"hm {reasoning.end}\n"):
        for budget in (None, 0, 3):
            assert may_begin(closed, first, reasoning.begin, thinking_token_budget=budget) == [True, False]
    for unsaid in ("", f"{reasoning.end} and more"):
        assert may_begin(unsaid, first, f"{reasoning.begin}{thought}{first}") == [True, True]
    for begun in (f"{reasoning.begin}\n", f"{reasoning.end}{reasoning.begin}"):
        assert may_begin(begun, f"{thought}{first}") == [True]
        assert chat(begun, spec, form, calling).parser.in_reasoning


def test_a_row_of_messages_has_no_reasoning_that_a_prompt_could_close():
    form = AnswerFormat(CALLS["harmony"], REASONING["harmony"])
    for written in ("<|start|>user<|message|>hi<|end|>", "<|start|>user<|message|>hi<|end|><|start|>assistant"):
        answer = chat(written, SPECS["json_object"], form)
        assert begins(answer, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>{")


WRONG = [
    GrammarSpec("json_schema", '{"properties": {"a": {"uniqueItems": true}}}'),
    GrammarSpec("json_schema", '{"properties": {"a": {"pattern": "(?!x)"}}}'),
    GrammarSpec("json_schema", '{"properties": {"a": {"enum": [9007199254740993]}}}'),
    GrammarSpec("json_schema", '{"type": "nul"}'),
    GrammarSpec("json_schema", '{"multipleOf": 100000007}'),
    GrammarSpec("json_schema", "[]"),
    GrammarSpec("regex", "a\\b"),
    GrammarSpec("regex", "(?!a)"),
    GrammarSpec("regex", "a**b("),
]


@pytest.mark.parametrize("spec", WRONG, ids=lambda spec: f"{spec.kind} {spec.text}")
@pytest.mark.parametrize("calling", [NO_CALLS, Calling((NOW,))], ids=["", "tools"])
@pytest.mark.parametrize("end", ["", "<think>", "<think></think>"])
def test_a_form_that_is_wrong_is_refused_in_the_same_words_with_reasoning_and_tools(spec, calling, end):
    with pytest.raises(InvalidRequest) as alone:
        asyncio.run(served().answers(command(grammar=spec)))
    with pytest.raises(InvalidRequest) as caught:
        chat(f"assistant: {end}", spec, calling=calling)
    assert (str(caught.value), caught.value.field) == (str(alone.value), spec.kind)
    assert "start:" not in str(alone.value) and " 1(" not in str(alone.value)


def test_a_fault_of_a_tool_is_told_as_the_tools():
    wrong = Calling((Tool("f", {"type": "object", "properties": {"a": {"uniqueItems": True}}}),))
    with pytest.raises(InvalidRequest, match=r"^tools: tools\[0\]\.function\.parameters\.properties\.a\.uniqueItems") as caught:
        chat("assistant: ", SPECS["json_object"], calling=wrong)
    assert caught.value.field == "tools"


def test_a_form_that_is_too_large_beside_reasoning_is_refused_as_what_it_is():
    """Beside reasoning its text is longer."""
    spec = GrammarSpec("json_schema", '{"title": "' + "\u00e9" * 25_000 + '"}')
    assert asyncio.run(served().answers(command(grammar=spec)))
    with pytest.raises(InvalidRequest, match=r"^json_schema must be at most 65536 bytes") as caught:
        chat("assistant: ", spec)
    assert caught.value.field == "json_schema"


@pytest.mark.parametrize("text", ["a/b", "[/]", r"a\/b", "a\nb", "a\\\nb", "a\\", r"\d\w", "\u00e9"])
def test_a_regex_is_the_same_beside_reasoning(text):
    said = {"a/b": "a/b", "[/]": "/", r"a\/b": "a/b", "a\\": "a", r"\d\w": "1a", "\u00e9": "\u00e9"}.get(text, "a\nb")
    for prompt in ("assistant: ", "assistant: <think></think>"):
        answer = chat(prompt, GrammarSpec("regex", text))
        assert begins(answer, said) and answer.request.grammar.mask()[END]
