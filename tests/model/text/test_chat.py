"""Chat templates: a checkpoint's own words around the messages, as transformers renders them, and nothing that runs away."""

import json
import time
import tracemalloc
from datetime import datetime
from pathlib import Path

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from attend.model.errors import CheckpointError, InvalidRequest
from attend.model.text import chat_sandbox
from attend.model.text.chat import ChatTemplate
from attend.model.text.chat_sandbox import MAX_CHARACTERS

SHIPPED = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" + system_message + "<|eot_id|>" }}
{%- if tools is not none %}{{ raise_exception("no tools") }}{% endif %}
{%- for message in messages %}
    {%- if message.role not in ['user', 'assistant'] %}{% continue %}{% endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
ALTERNATING = (
    "{% set ns = namespace(last='') %}{% for m in messages %}{% if m.role == ns.last %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}{% set ns.last = m.role %}"
    "{{ loop.index ~ '/' ~ loop.length ~ ':' ~ m.content ~ (eos_token if loop.last else '') }}{% endfor %}"
)
TRAINING = (
    "{% macro turn(m) -%}[{{ m.role | upper }}] {{ m | tojson }}{%- endmacro %}"
    "{% for m in messages %}{% generation %}{{ turn(m) }}{% endgeneration %}\n"
    "{{ messages | map(attribute='role') | join(', ') }} {{ m.content.split('a') | length }} {{ '%s!' % m.role }}\n{% endfor %}"
)
USER = [{"role": "user", "content": "hello"}]
TALK = [
    {"role": "system", "content": " Be <brief> & \"kind\". "},
    {"role": "user", "content": "héllo 😀 {{7*7}} {% for x in ().__class__ %}"},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "a\nb <|im_end|>"},
]  # fmt: skip


def frozen() -> float:
    return 0.0


def render(source: str, messages=None, **variables) -> str:
    return ChatTemplate(source, bos_token="<s>", eos_token="</s>", clock=frozen).render(messages or USER, **variables)


def folder(path: Path, template=None, jinja: str | None = None, **config) -> Path:
    named = {} if template is None else {"chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(config | named), encoding="utf-8")
    if jinja is not None:
        (path / "chat_template.jinja").write_text(jinja, encoding="utf-8")
    return path


# --- what a template says


@pytest.mark.parametrize("source", [SHIPPED, CHATML, LLAMA3, ALTERNATING, TRAINING])
@pytest.mark.parametrize("messages", [USER, TALK])
@pytest.mark.parametrize("prompted", [True, False])
def test_a_prompt_is_what_transformers_renders(source, messages, prompted):
    theirs, _ = render_jinja_template(
        [messages], chat_template=source, add_generation_prompt=prompted, bos_token="<s>", eos_token="</s>"
    )
    assert render(source, messages, add_generation_prompt=prompted) == theirs[0]


def test_what_a_caller_writes_is_never_a_template():
    for text in (
        "{{7*7}}",
        "{% for x in ().__class__.__base__.__subclasses__() %}{% endfor %}",
        "{# x #}",
        "{{ raise_exception('') }}",
    ):
        assert render(SHIPPED, [{"role": "user", "content": text}]) == text + "\n"


def test_a_further_variable_reaches_a_template_that_reads_it_and_is_else_refused_by_name():
    assert render("{{ 'T' if enable_thinking is not defined or enable_thinking else 'F' }}", enable_thinking=False) == "F"
    assert render(SHIPPED, add_generation_prompt=True) == "hello\n"
    for name in ("enable_thinking", "messages_", "eos_token", "tools", "raise_exception", "chat_template", "range"):
        with pytest.raises(InvalidRequest, match=f"^chat_template_kwargs: '{name}' \\(string\\) is not an option") as caught:
            render("{{ messages }}{{ eos_token }}{{ tools }}{{ raise_exception }}{{ range(2) }}", **{name: 1})
        assert caught.value.field == "chat_template_kwargs"


def test_the_templates_own_refusal_is_passed_on_and_cut_short():
    with pytest.raises(InvalidRequest, match=r"^messages: .*Conversation roles must alternate$") as caught:
        render("{{ raise_exception('Conversation roles must alternate') }}")
    assert caught.value.field == "messages"
    with pytest.raises(InvalidRequest) as caught:
        render("{{ raise_exception('x' * 100000) }}")
    assert len(str(caught.value)) < 600


# --- what a template may not do

ATTACKS = [
    "{{ cycler.__init__.__globals__ }}",
    "{{ ''.__class__.__mro__[1] }}",
    "{{ ().__class__.__base__.__subclasses__()[0] }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='x') }}",
    "{{ messages[0].pop('role') }}",
    "{{ (messages|attr('__class__')).__name__ }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}",
    "{{ raise_exception.__globals__.keys() }}",
    "{% include 'x' %}",
    "{% extends '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ nothing.at.all }}",
    "{{ 1 / 0 }}",
    "{{ '\\ud800' }}",
    "{{ lipsum() }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{% set ns = namespace() %}{% set ns.a = ns %}{{ [ns] | tojson }}",
    "{{ messages | tojson(indent='x') }}",
]


@pytest.mark.parametrize("source", ATTACKS)
def test_an_attack_gets_a_sentence_that_says_nothing_of_the_inside(source):
    messages = [{"role": "user", "content": "hello"}]
    error = None
    try:
        said = render(source, messages)
    except InvalidRequest as refused:
        error, said = refused, str(refused)
    assert error is None or (error.field == "messages" and said.startswith("messages: "))
    assert not any(word in said for word in ("object", "class '", "__", "Error", "jinja", "/", "unsafe", "root:"))
    assert messages == USER


LOOPS = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in s %}{% for b in s %}{% for c in s %}{% endfor %}{% endfor %}{% endfor %}",
    "{% for a in s %}{% for b in s if false %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% continue %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) recursive %}{{ loop([]) }}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% macro w(n) %}{{ caller() }}{% endmacro %}"
    "{% for a in s %}{% for b in s %}{% call w(1) %}{% endcall %}{% endfor %}{% endfor %}",
    "{% set x %}{% for a in s %}{% for b in s %}{% endfor %}{% endfor %}{% endset %}",
]
LARGE = [
    "{{ 'a' * 10**9 }}",
    "{{ ([0] * 10**9) | length }}",
    "{{ 9**9**9 }}",
    "{% set ns = namespace(x=7) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x.replace('a', ns.x) %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x | replace('a', ns.x) %}{% endfor %}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ (7).to_bytes(10**9) }}",
    "{{ s | indent(10**9, first=true) }}",
    "{% for i in range(99999) %}{{ s * 1000 }}{% endfor %}",
    "{% macro m() %}{% for i in range(99999) %}{{ s * 1000 }}{% endfor %}{% endmacro %}{{ m() | length }}",
    "{% set x %}{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}{% endset %}",
]

CONTENT = [{"role": "user", "content": "hello" * 1000}]


@pytest.mark.parametrize("source", LOOPS, ids=lambda source: source[:60])
def test_no_loop_runs_for_ever(source, monkeypatch):
    monkeypatch.setattr(chat_sandbox, "MAX_SECONDS", 0.05)
    with pytest.raises(InvalidRequest, match=r"^messages: the chat template ran for more than 0.05 seconds") as caught:
        ChatTemplate("{% set s = messages[0].content %}" + source).render(CONTENT)
    assert caught.value.field == "messages"


@pytest.mark.parametrize("source", LARGE, ids=lambda source: source[:60])
def test_no_template_makes_something_huge(source):
    """Refused before it is made: memory stays small, and a clock that stands still does not matter."""
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match=r"^messages: the chat template|cannot render") as caught:
            render("{% set s = messages[0].content %}" + source, CONTENT)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert caught.value.field == "messages"
    assert peak < 128 << 20


def test_the_longest_prompt_is_allowed_and_one_character_more_is_not():
    half = "{{ 'x' * " + str(MAX_CHARACTERS // 2) + " }}"
    assert len(render(half + half)) == MAX_CHARACTERS
    with pytest.raises(InvalidRequest, match=f"more than {MAX_CHARACTERS} characters"):
        render(half + half + "y")


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(9) %}{% endfor %}",
        "{% for i in range(9) %}x{% endfor %}",
        "{{ 1 }}{{ 2 }}",
        "{{ [1] | list | length }}",
    ],
)
def test_a_render_that_takes_longer_than_two_seconds_ends(source):
    times = iter(range(100))
    with pytest.raises(InvalidRequest, match="ran for more than 2 seconds"):
        ChatTemplate(source + source, clock=lambda: float(next(times))).render(USER)


def test_the_time_that_a_machine_stands_still_is_not_the_callers(monkeypatch):
    monkeypatch.setattr(chat_sandbox, "MAX_SECONDS", 0.02)

    def late() -> datetime:
        time.sleep(0.05)
        return datetime(2026, 3, 9)

    template = ChatTemplate("{% for i in range(3) %}{{ strftime_now('%Y') }}{% endfor %}", now=late)
    assert template.render(USER) == "2026" * 3


# --- where it comes from


def test_a_template_comes_from_either_file_and_the_jinja_file_goes_first(tmp_path):
    loaded = ChatTemplate.load(folder(tmp_path, "a{{ bos_token }}", bos_token="<s>"))
    assert loaded is not None and loaded.render(USER) == "a<s>"
    loaded = ChatTemplate.load(folder(tmp_path, "a", "b{{ eos_token }}é", eos_token={"content": "</s>", "special": True}))
    assert loaded is not None and loaded.render(USER) == "b</s>é"
    (tmp_path / "tokenizer_config.json").unlink()
    loaded = ChatTemplate.load(tmp_path)
    assert loaded is not None and loaded.render(USER) == "bé"


def test_a_checkpoint_without_a_template_has_none(tmp_path):
    assert ChatTemplate.load(tmp_path) is None
    assert ChatTemplate.load(folder(tmp_path)) is None
    assert ChatTemplate.load(folder(tmp_path, "")) is None


@pytest.mark.parametrize(
    "template",
    ["{% for %}", "{{ x", "{% endif %}", "{{ x|nosuchfilter }}", 7, {"a": 1}, [1], [{"name": "default"}],
     "{% for a in x %}" * 30 + "{% endfor %}" * 30, "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "x" * (1 << 20) + "y"],
    ids=lambda value: str(value)[:20],
)  # fmt: skip
def test_a_damaged_template_stops_the_load(tmp_path, template):
    with pytest.raises(CheckpointError, match=r"chat.template"):
        ChatTemplate.load(folder(tmp_path, template))


@pytest.mark.parametrize("damage", [b"\xff\xfe", b"{", b"[]", b"[" * 100_000])
def test_a_damaged_file_stops_the_load(tmp_path, damage):
    (tmp_path / "tokenizer_config.json").write_bytes(damage)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        ChatTemplate.load(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        ChatTemplate.load(tmp_path)


def test_a_file_takes_the_place_of_the_folders_template(tmp_path):
    file = tmp_path / "mine.jinja"
    file.write_text("mine{{ bos_token }}", encoding="utf-8")
    where = folder(tmp_path, "theirs", bos_token="<s>")
    assert ChatTemplate.load(where, file).render([]) == "mine<s>"
    file.write_text("{% for %}", encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"mine\.jinja: the chat template cannot be compiled"):
        ChatTemplate.load(where, file)
    with pytest.raises(CheckpointError, match=r"absent\.jinja cannot be read"):
        ChatTemplate.load(where, tmp_path / "absent.jinja")
