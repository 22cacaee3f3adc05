"""Answers as families write them, and the parts that they are."""

from attend.service.chat.forms import CALLS, REASONING, AnswerFormat
from attend.service.chat.parts import CallArguments, CallStart, Content, Part, Reasoning, Tool

TOOLS = (
    Tool("weather", {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}),
    Tool("now", {"type": "object", "properties": {}}),
    Tool("write", {"type": "object", "properties": {"text": {"type": "string"}, "lines": {"type": "array"}}}),
)
THINK = REASONING["think"]


def form(calls: str, reasoning: str = "think") -> AnswerFormat:
    return AnswerFormat(CALLS[calls], REASONING[reasoning])


def call(index: int, name: str, arguments: str) -> list[Part]:
    return [CallStart(index, name), CallArguments(index, arguments)]


PARIS = '{"city": "Paris", "days": 3}'
ONE = call(0, "weather", PARIS)
TWO = [*ONE, *call(1, "now", "{}")]

ANSWERS: dict[str, list[tuple[str, list[Part]]]] = {
    "hermes": [
        (f'<tool_call>\n{{"name": "weather", "arguments": {PARIS}}}\n</tool_call>', ONE),
        (f'<tool_call>{{"arguments": {PARIS}, "name": "weather"}}</tool_call>\n<tool_call>{{"name": "now"}}</tool_call>', TWO),
        (
            '<think>\nFirst <b> think.\n</think>\n\nI look.\n\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n',
            [Reasoning("First <b> think."), Content("I look."), *call(0, "now", "{}")],
        ),
        ('<tool_call>\n{"name": "now", "arguments": null}\n</tool_call> Done.', [*call(0, "now", "{}"), Content("Done.")]),
        (f'<tool_call>{{"name": "weather", "arguments": {PARIS}</tool_call>', ONE),
        (f'<tool_call>{{"name": "weather", "arguments": {PARIS}}}{{"name": "now"}}</tool_call>', TWO),
        (
            '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Paris\\"}"}</tool_call>',
            call(0, "weather", '{"city": "Paris"}'),
        ),
        (
            '<think>I ask. <tool_call>{"name": "now", "arguments": {}}</tool_call> So.</think>Noon.',
            [Reasoning("I ask."), *call(0, "now", "{}"), Reasoning("So."), Content("Noon.")],
        ),
        ("a <tool_call> b", [Content("a <tool_call> b")]),
        ("<tool_call><tool_call>" + '{"name": "now"}</tool_call>', [Content("<tool_call>"), *call(0, "now", "{}")]),
        ('<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', None),
        ('<tool_call>{"name": "now", "arguments": [1]}</tool_call>', None),
        ('<tool_call>{"name": "now", "name": "weather"}</tool_call>', None),
        ('<tool_call>{"arguments": {}, "parameters": {}, "name": "now"}</tool_call>', None),
        (
            '<tool_call>{"name": "write", "arguments": {"text": "a\n\tb"}}</tool_call>',
            call(0, "write", '{"text": "a\\u000a\\u0009b"}'),
        ),
        ("x < y </tool_cal", [Content("x < y </tool_cal")]),
        ("  two\n\n\nlines \n", [Content("  two\n\n\nlines \n")]),
    ],
    "llama3_json": [
        (f'{{"name": "weather", "parameters": {PARIS}}}', ONE),
        (
            f'<|python_tag|>{{"type": "function", "name": "weather", "parameters": {PARIS}}}; '
            '{"name": "now", "parameters": {}}',
            TWO,
        ),
        (f'\n {{"name": "weather", "parameters": {PARIS}}}\n{{"name": "now"}}', TWO),
        ('{"city": "Paris"}', None),
        ('{"name": "Alice", "age": 3}', None),
        ('So: {"name": "now", "parameters": {}}', None),
        ('{"name": "now", "parameters": {}} So it is.', [*call(0, "now", "{}"), Content("So it is.")]),
    ],
    "mistral": [
        (f"[TOOL_CALLS]weather[ARGS]{PARIS}", ONE),
        (f"[TOOL_CALLS]weather[CALL_ID]abcdef123[ARGS]{PARIS}[TOOL_CALLS]now[ARGS]{{}}", TWO),
        (f'Well. [TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}}}]', [Content("Well."), *ONE]),
        ("[TOOL_CALLS]nobody[ARGS]{}", None),
    ],
    "mistral_list": [
        (
            f'[TOOL_CALLS] [{{"name": "weather", "arguments": {PARIS}, "id": "abcdef123"}}, '
            '{"name": "now", "arguments": {}}]',
            TWO,
        ),
        ("[TOOL_CALLS] []", None),
    ],
    "phi4": [
        (
            f'<|tool_call|>[{{"name": "weather", "arguments": {PARIS}}}, {{"name": "now", "arguments": {{}}}}]<|/tool_call|>',
            TWO,
        ),
        (f'functools[{{"name": "weather", "arguments": {PARIS}}}]', ONE),
        ("functools.partial is a function", None),
    ],
    "granite": [
        (f'<|tool_call|>[{{"name": "weather", "arguments": {PARIS}}}, {{"name": "now", "arguments": {{}}}}]', TWO),
        (f'<tool_call>[{{"name": "weather", "arguments": {PARIS}}}]', ONE),
    ],
    "glm": [
        (
            "<think></think>\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
            TWO,
        ),
        ("<tool_call>nobody\n</tool_call>", None),
        (
            '<tool_call>write<arg_key>text</arg_key><arg_value>a\n"b"\n</arg_value><arg_key>lines</arg_key>'
            "<arg_value>[1, 2]</arg_value></tool_call>",
            call(0, "write", '{"text": "a\\n\\"b\\"", "lines": [1, 2]}'),
        ),
    ],
    "qwen3_coder": [
        (
            "<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
            "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
            TWO,
        ),
        (
            "<function=write>\n<parameter=text>\nif a < b:\n\n    </p>\n\n</parameter>\n</function>\n</tool_call>",
            call(0, "write", '{"text": "if a < b:\\n\\n    </p>\\n"}'),
        ),
        (
            "<tool_call>\n<function=write>\n<parameter=lines>\nnone of them\n</parameter>\n</function>\n</tool_call>",
            call(0, "write", '{"lines": "none of them"}'),
        ),
        ("<tool_call>\n<function=nobody>\n</function>\n</tool_call>", None),
        (
            '<function=write><parameter=lines>["</parameter>", "\\"</parameter>"]</parameter></function>',
            call(0, "write", '{"lines": ["</parameter>", "\\"</parameter>"]}'),
        ),
        (
            '<function=write><parameter=lines>["a</parameter><parameter=text>b</parameter></function> So.',
            [*call(0, "write", '{"lines": "[\\"a", "text": "b"}'), Content("So.")],
        ),
        ("<tool_call><function=weather><parameter=city>Paris</parameter></tool_call>", call(0, "weather", '{"city": "Paris"}')),
        (
            "<function=weather><parameter=city>Paris</parameter> and <b></function>",
            [*call(0, "weather", '{"city": "Paris"}'), Content("and <b></function>")],
        ),
        ("<function=weather><parameter=city>Paris</parameter>", call(0, "weather", '{"city": "Paris"}')),
    ],
    "pythonic": [
        ("[weather(city='Paris', days=3), now()]", TWO),
        ('<|python_start|>[weather(city="Paris", days=3)]<|python_end|>', ONE),
        ("[write(text='a, (b]', lines=[1, {'c': None}])]", call(0, "write", '{"text": "a, (b]", "lines": [1, {"c": null}]}')),
        ("[1] A note.", None),
        ("[weather](https://example.com)", None),
        ("[weather(days=1+1)]", None),
        ("[weather('Paris')]", None),
    ],
    "gemma": [
        ("```tool_code\nweather(city='Paris', days=3)\nnow()\n```", TWO),
        ("```tool_code\nprint(3)\n```", None),
    ],
    "functiongemma": [
        (
            "<start_function_call>call:weather{city:<escape>Paris<escape>,days:3}<end_function_call>"
            "<start_function_call>call:now{}<end_function_call>",
            [*call(0, "weather", '{"city":"Paris","days":3}'), *call(1, "now", "{}")],
        ),
    ],
    "gemma4": [
        (
            '<|channel>thought\nHm.<channel|><|tool_call>call:write{text:<|"|>a, {b}<|"|>,lines:[1,true,x]}<tool_call|>',
            [Reasoning("Hm."), *call(0, "write", '{"text":"a, {b}","lines":[1,true,"x"]}')],
        ),
    ],
    "harmony": [
        (
            "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
            f"<|constrain|>json<|message|>{PARIS}<|call|>",
            [Reasoning("I look."), *ONE],
        ),
        (f" to=functions.weather<|channel|>commentary json<|message|>{PARIS}", ONE),
        (
            "<|channel|>commentary<|message|>I ask both.<|end|>"
            f"<|start|>assistant to=functions.weather<|channel|>commentary <|message|>{PARIS}<|call|>"
            "<|start|>assistant to=functions.now<|channel|>commentary <|message|>{}<|call|>",
            [Content("I ask both."), *TWO],
        ),
        ("<|channel|>final<|message|>Noon.\n<|return|>", [Content("Noon.")]),
        ("Plain text.", [Content("Plain text.")]),
        ("<|channel|>commentary to=functions.nobody<|message|>{}", [Content("{}")]),
    ],
}
"""By the name of the form. No parts: the text is content from its first character to its last."""


def rows() -> list[tuple[str, str, list[Part]]]:
    """Form, text, parts."""
    return [
        (name, text, [Content(text)] if parts is None else parts)
        for name, answers in ANSWERS.items()
        for text, parts in answers
    ]
