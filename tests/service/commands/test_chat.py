"""Chats at the terminal: what the model is told in each turn, what lines mean, and what Ctrl-C ends."""

import contextlib
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from attend.model.engine.request import FinishReason
from attend.service.commands import chat
from attend.service.records import Chunk
from attend.service.runtime.checkpoint import was_taught
from tests.model.checkpoints import write_checkpoint, write_letters

TEMPLATE = "{% for m in messages %}[{{ m.role[0] }}]{{ m.content }}{% endfor %}[a]"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A tiny model with a context of 128 characters, and no chat template."""
    return write_letters(write_checkpoint("llama-tied", tmp_path_factory.mktemp("models") / "plain"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same with a chat template."""
    folder = write_letters(write_checkpoint("llama-tied", tmp_path_factory.mktemp("models") / "tiny"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture
def talk(attend, monkeypatch, folder):
    """A chat in which these lines are typed: (status, what was printed, what was said of it, the prompts of the turns)."""

    def run(*lines, flags=(), model=folder):
        typed, prompts, honest = iter(lines), [], chat.to_chat

        def read():
            line = next(typed, EOFError)
            if isinstance(line, type):
                raise line
            return line

        def spy(*given):
            prompts.append(given[-1]["messages"])
            return honest(*given)

        monkeypatch.setattr(chat, "read_message", read)
        monkeypatch.setattr(chat, "to_chat", spy)
        monkeypatch.setattr("sys.stdin.isatty", lambda: True)
        return *attend("chat", model, "--temperature", "0", "--max-tokens", "4", "--dtype", "float32", *flags), prompts

    return run


def test_each_turn_tells_the_model_what_was_said_before_it(talk):
    status, out, err, prompts = talk("hello", "more")
    first, second = out.strip().splitlines()
    assert status == 0 and "/help" in err
    user = {"role": "user", "content": "hello"}
    assert prompts == [[user], [user, {"role": "assistant", "content": first}, {"role": "user", "content": "more"}]]
    assert len(first) == 4 and second


def test_commands_change_what_the_model_is_told_and_are_never_said_to_it(talk):
    _, out, err, prompts = talk("/system be brief", "a", "/reset", "b", "/help", "/byee", "/bye", "c")
    assert prompts == [[{"role": "system", "content": "be brief"}, {"role": "user", "content": text}] for text in ("a", "b")], (
        "/reset forgets the turns and keeps the system prompt; after /bye nothing is read"
    )
    assert "there is no /byee" in err and "Ctrl-C" in err
    assert len(out.strip().splitlines()) == 2


def test_a_path_and_a_quoted_slash_are_messages(talk):
    *_, prompts = talk("/etc/hosts is what?", '"""/bye"""', "", "  ")
    assert [turn[-1]["content"] for turn in prompts] == ["/etc/hosts is what?", "/bye"]


def test_where_the_context_is_full_the_oldest_rounds_are_forgotten_and_that_is_said(talk):
    *_, err, prompts = talk("x" * 60, "y" * 50, "z")
    assert "the context of 128 tokens is full: the oldest round was forgotten" in err
    assert prompts[-1][0]["content"] == "y" * 50, "the latest round that fits is kept"
    assert prompts[-1][-1]["content"] == "z"


def test_a_message_that_cannot_be_answered_is_one_sentence_and_is_not_remembered(talk):
    status, out, err, prompts = talk("x" * 200, "a")
    assert "attend: the message is too long" in err and "Traceback" not in err
    assert (status, prompts[-1]) == (0, [{"role": "user", "content": "a"}])
    assert len(out.strip().splitlines()) == 1


def test_a_message_whose_answer_never_began_is_not_remembered(talk, monkeypatch):
    """Two messages of the user in a row are more than many chat templates take."""
    honest, stops = chat.run_chat, iter([True])

    async def stopped(*given):
        if next(stops, False):
            raise KeyboardInterrupt
        return await honest(*given)

    monkeypatch.setattr(chat, "run_chat", stopped)
    *_, err, prompts = talk("a", "b")
    assert "the answer was stopped" in err
    assert prompts[-1] == [{"role": "user", "content": "b"}]


def test_ctrl_c_leaves_at_the_empty_prompt_alone(talk, monkeypatch):
    status, *_, prompts = talk("a", KeyboardInterrupt, "b")
    assert (status, len(prompts)) == (130, 1)
    monkeypatch.setattr(chat, "_has_typed", lambda: True)
    status, *_, prompts = talk("a", KeyboardInterrupt, "b")
    assert (status, len(prompts)) == (0, 2), "a line that was begun is given up"


def test_control_tokens_that_are_typed_are_plain_text(talk, monkeypatch):
    sizes = []
    honest = chat.run_chat

    async def spy(service, asked, write):
        tokens = await service.tokens_of(asked[1].prompts[0])
        sizes.append(len(tokens))
        return await honest(service, asked, write)

    monkeypatch.setattr(chat, "run_chat", spy)
    talk("<|endoftext|>")
    assert sizes == [len("[u]<|endoftext|>[a]")]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["hello"], "hello"),
        (['"""a', "b", '"""'], '"""a\nb\n"""'),
        (['"""a"""'], '"""a"""'),
    ],
)
def test_a_message_may_have_several_lines(typed, message, monkeypatch):
    lines = iter(typed)
    monkeypatch.setattr(chat, "_read", lambda prompt: next(lines))
    assert chat.read_message() == message


def test_what_is_piped_in_is_one_message(attend, folder):
    words = ("--temperature", "0", "--max-tokens", "4", "--dtype", "float32")
    status, out, err = attend("chat", folder, *words, piped=b"two\nlines\n")
    assert (status, err, out[-1:]) == (0, "", "\n")
    assert attend("run", folder, "two\nlines", *words) == (0, out, "")
    assert attend("generate", "two\nlines", "--model", folder, "--max-tokens", "4", "--dtype", "float32")[:2] == (0, out)
    raw = attend("generate", "[u]two lines[a]", "--raw", "--model", folder, "--max-tokens", "4", "--dtype", "float32")
    assert raw[2] == "", "as it stands, without a word"


def test_nothing_to_say_is_a_sentence(attend, folder):
    for words, piped in ((("chat", folder), b""), (("run", folder, " "), None)):
        status, out, err = attend(*words, piped=piped)
        assert (status, out) == (2, "") and "message" in err


def test_a_model_without_a_chat_template_continues_one_text_and_does_not_chat(attend, talk, plain):
    words = ("--temperature", "0", "--max-tokens", "4", "--dtype", "float32")
    status, out, err = attend("run", plain, "hello", *words)
    assert (status, out[-1:]) == (0, "\n")
    assert err == "attend: plain has no chat template: the text is continued as it stands\n"
    assert "--system needs a chat" in attend("run", plain, "hello", "--system", "s", *words)[2]
    status, out, err, _ = talk("hello", model=plain)
    assert (status, out) == (2, "")
    assert "has no chat template: `attend generate` continues" in err and "--chat-template FILE" in err


def test_generate_says_that_it_chats_and_keeps_its_json(attend, folder, plain):
    words = ("generate", "hello", "--max-tokens", "4", "--dtype", "float32", "--model")
    assert attend(*words, folder)[2] == "attend: used the chat template of tiny: --raw continues the text itself\n"
    whole = json.loads(attend(*words, folder, "--json")[1])
    talked = json.loads(attend(*words, folder, "--json", "--chat", "--logprobs", "0", "--system", "s")[1])
    assert (whole["object"], whole["usage"]["prompt_tokens"]) == ("text_completion", 5)
    assert (talked["object"], talked["usage"]["prompt_tokens"]) == ("chat.completion", len("[s]s[u]hello[a]"))
    assert len(talked["choices"][0]["logprobs"]["content"]) == talked["usage"]["completion_tokens"]
    for flags, told in (
        (["--chat"], "has no chat template"),
        (["--system", "s"], "--system needs a chat"),
    ):
        status, out, err = attend(*words, plain, *flags)
        assert (status, out) == (2, "") and told in err


def test_the_shipped_model_was_not_taught_to_chat(tmp_path):
    from attend.model.config import DEFAULT_MODEL
    from attend.model.text.chat import ChatTemplate

    assert not was_taught(ChatTemplate.load(DEFAULT_MODEL))
    assert was_taught(ChatTemplate(TEMPLATE))


@pytest.mark.parametrize(
    ("flags", "config", "drawn"),
    [
        ([], None, {"temperature": 0.7, "top_p": 0.95}),
        (["--temperature", "0"], None, {"temperature": 0.0}),
        (["--top-p", "0.5"], None, {"top_p": 0.5}),
        ([], {"temperature": 0.3}, {}),
    ],
    ids=str,
)
def test_how_a_chat_draws_is_the_callers_the_models_or_calm(folder, attend, monkeypatch, tmp_path, flags, config, drawn):
    asked, real = [], chat.to_chat
    monkeypatch.setattr(chat, "to_chat", lambda *given: asked.append(given[-1]) or real(*given))
    if config is not None:
        folder = shutil.copytree(folder, tmp_path / "model")
        (folder / "generation_config.json").write_text(json.dumps(config))
        monkeypatch.setenv("ATTEND_GENERATION_CONFIG", "model")
    status, *_ = attend("run", folder, "hello", "--max-tokens", 2, "--dtype", "float32", *flags)
    assert status == 0
    assert {name: value for name, value in asked[0].items() if name in ("temperature", "top_p")} == drawn


def test_at_a_terminal_ctrl_c_stops_an_answer_and_the_chat_goes_on(folder):
    """A real terminal: an answer that would go on for ever is stopped, the next one is made, and an empty line leaves."""
    ours, theirs = pty.openpty()
    code = (
        "import time; from attend.service.commands import chat; plain = chat.plain\n"
        "chat.plain = lambda chunk: (plain(chunk), print(end='\\a', flush=True), time.sleep(1))\n"
        "from attend.service.commands.main import main; main()"
    )
    words = ["chat", str(folder), "--max-tokens", "60", "--dtype", "float32", "--temperature", "0"]
    child = subprocess.Popen(
        [sys.executable, "-c", code, *words],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    )
    seen = ""

    def until(text: str, count: int = 1) -> None:
        nonlocal seen
        deadline = time.monotonic() + 90
        while seen.count(text) < count and time.monotonic() < deadline:
            if select.select([ours], [], [], 0.2)[0]:
                seen += os.read(ours, 4096).decode(errors="replace")
        assert seen.count(text) >= count, seen

    try:
        until(">>> ")
        os.write(ours, b"hello\n")
        until("\a")  # before the first token readline may still hold the terminal, and then a signal is lost
        child.send_signal(signal.SIGINT)
        until(">>> ", 2)
        assert "the answer was stopped" in seen and "tokens/s" not in seen and "Traceback" not in seen
        os.write(ours, b"/reset\n")
        until("the conversation is forgotten")
        until(">>> ", 3)
        for _ in range(100):  # readline may miss a signal that comes just as it begins to wait
            child.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(0.3)
                break
        assert child.returncode in (130, -signal.SIGINT), seen  # the second where it was told twice
    finally:
        child.kill()
        child.wait()
        os.close(ours)
        os.close(theirs)


def test_the_speed_is_that_of_the_tokens_after_the_first(monkeypatch):
    times = iter([100.0, 103.0, 107.0])  # asked, the first chunk, the last one
    monkeypatch.setattr(chat, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    answer = chat.Answer()
    answer.take(Chunk(0, "a", (1,), 1, 5, 0))
    answer.take(Chunk(0, "bc", (2, 3), 9, 5, 0, FinishReason.STOP))
    assert answer.speed() == "[9 tokens, 2.0 tokens/s, the first after 3.00 s]"
