"""Our HTTP application over a model that plays a part: it reads a file with the agent's own tool, and says what stands there.

`python -m tests.clients.agents.scripted PORT FILE WORD` serves on 127.0.0.1 and prints one JSON line for each call.
"""

import json
import sys
from typing import Any

import uvicorn

from attend.model.engine.request import Request
from attend.model.text.chat import ChatTemplate
from attend.service.chat.forms import form_of
from tests.fakes import END, FakeEngine, build_server, info

TEMPLATE = ChatTemplate(
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[call {{ c.function.name }}]{% endfor %};{% endfor %}<assistant>"
)
HELLO = "Hello from the scripted model."


def calls(file: str) -> list[tuple[str, dict[str, Any]]]:
    """How the agents' own tools read a file, by the tool's name."""
    return [
        ("read_file", {"absolute_path": file, "file_path": file}),  # qwen-code
        ("Read", {"file_path": file}),  # Claude Code
        ("read", {"filePath": file}),  # opencode
        ("exec_command", {"cmd": f"cat {file}"}),  # Codex
        ("shell", {"command": ["cat", file]}),
    ]


class Script:
    """What the model writes: by its prompt, since it remembers nothing."""

    def __init__(self, file: str, word: str) -> None:
        self.calls = calls(file)
        self.word = word
        self._written: dict[str, tuple[int, ...]] = {}

    def __call__(self, request: Request) -> int:
        """The next token."""
        if request.request_id not in self._written:
            prompt = bytes(token for token in request.prompt if token < 256).decode(errors="replace")
            self._written[request.request_id] = (*self.answer(prompt).encode(), END)
        tokens = self._written[request.request_id]
        return tokens[min(len(request.output), len(tokens) - 1)]

    def answer(self, prompt: str) -> str:
        """The word once it has been read; else a call that reads it, where the user asks for it."""
        if self.word in prompt:
            return f"The secret word is {self.word}."
        known = [call for call in self.calls if f'"name": "{call[0]}"' in prompt]
        if not known or "secret word" not in prompt:
            return HELLO
        name, arguments = known[0]
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def main() -> None:
    """Serve until the process is ended."""
    port, file, word = sys.argv[1:]
    engine = FakeEngine(Script(file, word), info=info(max_model_len=1 << 20, num_blocks=1 << 17), burst=8)
    server = build_server(engine, template=TEMPLATE, form=form_of("", "hermes", "think"))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async def told(message: Any) -> None:
            if message["type"] == "http.response.start":
                said = {name.decode(): value.decode() for name, value in message["headers"] if name.startswith(b"x-attend")}
                print(json.dumps({"path": scope["path"], "status": message["status"]} | said), flush=True)
            await send(message)

        await server.app(scope, receive, told if scope["type"] == "http" else send)

    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="warning", lifespan="off")


if __name__ == "__main__":
    main()
