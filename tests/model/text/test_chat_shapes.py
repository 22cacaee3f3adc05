"""What chat templates refuse or leave out is written in a shape that they take: each text and each call is in the prompt."""

from itertools import product

from attend.model.text.chat import ChatTemplate

LOOP = "{% for m in messages %}"
TURN = (
    "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]"
)
TURN += "{% endfor %}"
TEMPLATES = {
    "any order": LOOP + TURN + "{% endfor %}",
    "a system message in front": LOOP
    + "{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    + TURN
    + "{% endfor %}",
    "the first message's system alone": "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}"
    + LOOP
    + "{% if m.role != 'system' %}"
    + TURN
    + "{% endif %}{% endfor %}",
    "the last system alone": "{% set ns = namespace(s='') %}{% for m in messages if m.role == 'system' %}"
    "{% set ns.s = m.content %}{% endfor %}{{ ns.s }}"
    + LOOP
    + "{% if m.role != 'system' %}"
    + TURN
    + "{% endif %}{% endfor %}",
    "no system": LOOP + "{% if m.role == 'system' %}{{ raise_exception('none') }}{% endif %}" + TURN + "{% endfor %}",
    "no system, without a word": LOOP + "{% if m.role != 'system' %}" + TURN + "{% endif %}{% endfor %}",
    "system as parts": LOOP + "{% if m.role == 'system' %}{{ m.content[0].text }}{% else %}" + TURN + "{% endif %}{% endfor %}",
    "parts alone": LOOP + "{% for p in m.content %}{{ p.text }}{% endfor %}{% for c in m.tool_calls or [] %}"
    "{{ c.function | tojson }}{% endfor %}{% endfor %}",
    "turns that alternate": "{% set ns = namespace(n=0) %}"
    + LOOP
    + "{% if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) %}{% if (m.role == 'user') != (ns.n % 2 == 0) %}"
    "{{ raise_exception('alternate') }}{% endif %}{% set ns.n = ns.n + 1 %}{% endif %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}" + TURN + "{% endfor %}",
    "arguments as a text": LOOP
    + "<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}{{ '[' + c.function.name + c.function.arguments + ']' }}"
    "{% endfor %}{% endfor %}",
    "arguments written as they are": LOOP
    + "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name ~ c.function.arguments }}{% endfor %}{% endfor %}",
    "calls or a text": LOOP + "{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
    "{{ c.function.name + c.function.arguments }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}",
    "calls or a content": LOOP + "{% if m.content is defined %}{{ m.content }}{% else %}{% for c in m.tool_calls %}"
    "{{ c.function.name ~ (c.function.arguments | tojson) }}{% endfor %}{% endif %}{% endfor %}",
}


def turn(role: str, content: str, *calls: str, **more):
    made = {"role": role, "content": content, **more}
    if calls:
        functions = [{"name": name, "arguments": {"city": f"Zürich {name}"}} for name in calls]
        made["tool_calls"] = [
            {"id": name, "type": "function", "function": each} for name, each in zip(calls, functions, strict=True)
        ]
    return made


ASK, SAY, RESULT = turn("user", "ask"), turn("assistant", "say"), turn("tool", "result", tool_call_id="f")
FIRST, SECOND, LATE = (turn("system", text) for text in ("be brief", "be kind", "be late"))
TALKS = {
    "two systems": [FIRST, SECOND, ASK],
    "a late system": [ASK, SAY, LATE, turn("user", "again")],
    "front and late systems": [FIRST, SECOND, ASK, LATE, SAY, SECOND, LATE, turn("user", "again")],
    "a system at the end": [FIRST, ASK, SAY, LATE],
    "a system alone": [FIRST],
    "two users": [ASK, turn("user", "again"), turn("user", "once more")],
    "two assistants": [ASK, SAY, turn("assistant", "and say"), turn("user", "again")],
    "a result, then words": [ASK, turn("assistant", "", "f"), RESULT, turn("user", "again"), LATE, turn("user", "and again")],
    "a call": [ASK, turn("assistant", "", "f"), RESULT, SAY],
    "a call without content": [ASK, {k: v for k, v in turn("assistant", "", "f").items() if k != "content"}, RESULT, SAY],
    "a call beside a text": [ASK, turn("assistant", "I look.", "f"), RESULT],
    "two calls beside a text": [FIRST, ASK, turn("assistant", "I look.", "f", "g"), RESULT, RESULT | {"content": "other"}],
}


def written(source: str, messages, **more) -> str:
    return ChatTemplate(source, clock=lambda: 0.0).render(messages, **more)


def test_every_text_and_every_call_of_a_conversation_is_in_its_prompt():
    for (name, source), (kind, talk) in product(TEMPLATES.items(), TALKS.items()):
        prompt = written(source, talk)
        texts = [message.get("content", "") for message in talk]
        assert all(prompt.count(text) >= texts.count(text) for text in texts), (name, kind, prompt)
        calls = [call["id"] for message in talk for call in message.get("tool_calls", ())]
        assert all(call in prompt and f'{{"city": "Zürich {call}"}}' in prompt for call in calls), (name, kind, prompt)


MOVED = [
    ("a system message in front", "two systems", "<system>be brief\n\nbe kind<user>ask"),
    ("a system message in front", "a late system", "<user>ask<assistant>say<user>be late\n\nagain"),
    ("no system", "front and late systems",
     "<user>be brief\n\nbe kind\n\nask\n\nbe late<assistant>say<user>be kind\n\nbe late\n\nagain"),
    ("turns that alternate", "two users", "<user>ask\n\nagain\n\nonce more"),
    (
        "turns that alternate",
        "a result, then words",
        '<user>ask<assistant>[f {"city": "Zürich f"}]<tool>result\n\nagain\n\nbe late\n\nand again',
    ),
    ("calls or a text", "a call beside a text", 'askI look.f{"city": "Zürich f"}result'),
]  # fmt: skip


def test_what_a_template_does_not_take_stands_in_the_turn_beside_it():
    for source, talk, prompt in MOVED:
        assert written(TEMPLATES[source], TALKS[talk]) == prompt


def test_what_a_template_takes_is_found_out_once_and_beside_tools_again():
    """A template for tools may be another."""
    template = ChatTemplate(TEMPLATES["any order"], for_tools=TEMPLATES["a system message in front"])
    assert template.render(TALKS["two systems"], [{}]) == "<system>be brief\n\nbe kind<user>ask"
    assert template.render(TALKS["two systems"]) == "<system>be brief<system>be kind<user>ask"
    known = dict(template.shapes._known)
    template.render(TALKS["two systems"], [{}])
    assert template.shapes._known == known
