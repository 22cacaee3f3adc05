"""The constructs of the published families' chat templates: a prompt is, byte for byte, what `transformers` makes of it."""

import json
import re
from datetime import datetime
from functools import cache
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from attend.model.errors import CheckpointError, InvalidRequest
from attend.model.text.chat import ChatTemplate
from tests.model.chat_templates import ASK, CONVERSATIONS, EXTRAS, PAPERS, TEMPLATES, TOOLS
from tests.model.tokenizers import complete

NAMES = {"bos_token": "<s>", "eos_token": "</s>"}
TOKENIZER = PreTrainedTokenizerFast(tokenizer_object=complete("gpt2"), **NAMES)
NOON = datetime(2026, 3, 9, 12)
templates = pytest.mark.parametrize("name", list(TEMPLATES))


class Noon:
    """`datetime` as transformers' module has it, standing still."""

    @staticmethod
    def now() -> datetime:
        return NOON


@pytest.fixture(autouse=True)
def _standing_clock(monkeypatch):
    monkeypatch.setattr(chat_template_utils, "datetime", Noon)


@cache
def compiled(source: str) -> ChatTemplate:
    return ChatTemplate(source, **NAMES, clock=lambda: 0.0, now=Noon.now)


def ours(source: str, messages, **more) -> str:
    return rendered(compiled(source), messages, **more)


def rendered(template: ChatTemplate, messages, *, tools=None, documents=None, **options) -> str:
    """Tools and documents have places of their own, where no caller's option can reach them."""
    return template.render(messages, tools, documents, **options)


def theirs(source: str, messages, **more) -> str:
    given = {"add_generation_prompt": True} | more
    return TOKENIZER.apply_chat_template(messages, chat_template=source, tokenize=False, **given)


def said_by_transformers(source: str, messages, **more) -> tuple[str | None, str]:
    """The prompt; or None, and the sentence of the template's own refusal, empty where it failed in another way."""
    try:
        return theirs(source, messages, **more), ""
    except Exception as error:
        return None, str(error) if type(error).__name__ == "TemplateError" else ""


@templates
@pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS.keys())
@pytest.mark.parametrize("talk", [name for name in CONVERSATIONS if name != "parts"])
def test_a_prompt_is_the_one_of_transformers_or_refused_with_the_same_sentence(name, talk, extra):
    source, messages = TEMPLATES[name], CONVERSATIONS[talk]
    wanted, sentence = said_by_transformers(source, messages, **extra)
    if wanted is not None:
        assert wanted == ours(source, messages, **extra)
        return
    with pytest.raises(InvalidRequest) as caught:
        ours(source, messages, **extra)
    assert str(caught.value).startswith("messages: ")
    assert str(caught.value).endswith(sentence or "cannot render these messages")


OPTIONS = [
    *(("headers", {"date_string": "1 May 2025"}), ("headers", {"custom_tools": TOOLS}), ("marks", {"enable_thinking": False})),
    *(("trained", {"enable_thinking": False}), ("trained", {"xml_tools": TOOLS}), ("channels", {"reasoning_effort": "high"})),
    *(
        ("channels", {"model_identity": "You."}),
        ("documents", {"controls": {"length": "long"}}),
        ("tagged", {"safety_mode": "none"}),
    ),
    *(("documents", {"controls": ["citations"], "documents": PAPERS}), ("documents", {"controls": "citations"})),
]


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_the_options_of_a_template_are_those_of_transformers(name, options):
    for messages in (ASK, CONVERSATIONS["talk"]):
        assert theirs(TEMPLATES[name], messages, **options) == ours(TEMPLATES[name], messages, **options)


# --- parts of a text


def test_whether_parts_are_written_is_found_out_for_each_role():
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{% for p in m.content %}[{{ p.text }}]{% endfor %}"
        "{% elif m.role == 'assistant' %}{{ m.content | tojson }}{% elif m.role == 'tool' %}{{ m.content }}"
        "{% else %}{{ m.content[0].text }}{% endif %}{% endfor %}"
    )
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    said = {
        role: ours(source, [*ASK[:0], {"role": role, "content": parts}]) for role in ("user", "assistant", "tool", "system")
    }
    assert said == {"user": "[a][b]", "assistant": '"a\\nb"', "tool": "a\nb", "system": ""}


# --- where the templates and their tokens come from


def both(folder: Path, messages=ASK, **more) -> str:
    """What the folder's template makes of the messages, which must be what transformers makes of them."""
    template = ChatTemplate.load(folder, clock=lambda: 0.0, now=Noon.now)
    assert template is not None
    loaded = PreTrainedTokenizerFast.from_pretrained(folder)
    prompt = rendered(template, messages, **more)
    assert loaded.apply_chat_template(messages, tokenize=False, **({"add_generation_prompt": True} | more)) == prompt
    return prompt


def write(folder: Path, named=None, jinja=None, more=None, **config) -> Path:
    """A folder with a tokenizer; `named` goes into tokenizer_config.json, `more` into additional_chat_templates/."""
    complete("gpt2").save(str(folder / "tokenizer.json"))
    config |= {} if named is None else {"chat_template": named}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    if jinja is not None:
        (folder / "chat_template.jinja").write_text(jinja, encoding="utf-8")
    for name, source in (more or {}).items():
        (folder / "additional_chat_templates").mkdir(exist_ok=True)
        (folder / "additional_chat_templates" / f"{name}.jinja").write_text(source, encoding="utf-8")
    return folder


LIST = [{"name": "tool_use", "template": "T{{ tools|length }}{{ a }}"}, {"name": "default", "template": "D{{ b }}"}]


def test_of_several_templates_the_one_for_tools_is_taken_where_there_are_tools(tmp_path):
    folder = write(tmp_path, LIST)
    assert [both(folder), both(folder, tools=TOOLS), both(folder, tools=[])] == ["D", "T1", "T0"]
    assert [both(folder, tools=TOOLS, a=1), both(folder, b=2)] == ["T11", "D2"]


def test_the_file_that_older_processors_wrote_is_read_where_there_is_no_other(tmp_path):
    folder = write(tmp_path)
    (folder / "chat_template.json").write_text('{"chat_template": "P{{ messages[0].role }}"}', encoding="utf-8")
    template = ChatTemplate.load(folder)
    assert template is not None and template.render(ASK) == "Puser"
    assert both(write(tmp_path, "C")) == "C"


@pytest.mark.parametrize("text", ["[]", "{", '{"chat_template": 7}', '{"chat_template": "{% if %}"}'])
def test_a_damaged_file_of_older_processors_stops_the_load(text, tmp_path):
    (tmp_path / "chat_template.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path))):
        ChatTemplate.load(tmp_path)


def test_a_template_that_cannot_be_compiled_stops_the_load_also_where_it_is_for_tools(tmp_path):
    with pytest.raises(CheckpointError, match="the chat template cannot be compiled"):
        ChatTemplate.load(write(tmp_path, "D", None, {"default": "D", "tool_use": "{% for %}"}))


TOKENS = "{{ bos_token is defined }}{{ bos_token }}{{ eos_token }}{{ unk_token is defined }}{{ image_token }}{{ audio_token }}"


@pytest.mark.parametrize(
    "config",
    [
        {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}},
        {"eos_token": "</s>", "unk_token": "<s>", "image_token": "<|x|>"},
        {"bos_token": None, "extra_special_tokens": {"audio_token": "<|x|>"}},
    ],
    ids=str,
)
def test_a_template_knows_the_special_tokens_that_transformers_gives_it(config, tmp_path):
    assert both(write(tmp_path, TOKENS, **config))


def test_special_tokens_in_what_a_caller_writes_are_those_tokens_where_the_template_knows_of_none():
    """As for transformers and vLLM: who may chat may end a turn. `special_tokens_in_content` asks for it."""
    text = ours(TEMPLATES["simple"], [{"role": "user", "content": "a</s>b"}])
    ids = TOKENIZER.encode(text, add_special_tokens=False)
    assert TOKENIZER.convert_tokens_to_ids("</s>") in ids
