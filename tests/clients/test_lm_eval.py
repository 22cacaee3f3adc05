"""EleutherAI's evaluation harness over HTTP alone: the server's tokenizer, its log probabilities, its answers."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.clients.narrow import MODEL, PYTHON
from tests.service.server import Server

lm_eval = pytest.importorskip("lm_eval")
pytestmark = [pytest.mark.ray, pytest.mark.clients]

DATA = Path(__file__).parent / "data"
TASKS = ["attend_choice", "attend_generate"]


def post(server: Server, path: str, **body: object) -> dict[str, Any]:
    """The document that answers a POST."""
    return server.post(path, **body)[2]


@pytest.fixture(scope="module", params=[1, 8])
def samples(request, server: Server, tmp_path_factory: pytest.TempPathFactory):
    """What the harness kept of each document of each task, with one request at a time and with eight."""
    from lm_eval.tasks import TaskManager

    arguments = {"base_url": f"{server.url}/v1/completions", "model": MODEL, "tokenizer_backend": "remote"}
    settings = {"num_concurrent": request.param, "batch_size": 4 if request.param == 1 else 1, "max_retries": 1}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(DATA)
        patch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("datasets")))
        result = lm_eval.simple_evaluate(
            model="local-completions",
            model_args={**arguments, **settings, "max_length": 1024},
            tasks=TASKS,
            task_manager=TaskManager(include_path=str(DATA), include_defaults=False),
            bootstrap_iters=0,
        )
    return {task: sorted(result["samples"][task], key=lambda sample: sample["doc_id"]) for task in TASKS}


def encode(server: Server, context: str, continuation: str) -> list[list[int]]:
    """Both parts in tokens, as the harness cuts them: the whole is encoded, and what is more than the context is the rest."""
    whole, start = (
        post(server, "/tokenize", prompt=text, add_special_tokens=False)["tokens"] for text in (context + continuation, context)
    )
    return [whole[: len(start)], whole[len(start) :]]


def test_every_loglikelihood_is_the_plain_equations(server, samples):
    asked = [call for sample in samples["attend_choice"] for call in sample["arguments"]]
    got = [answer for sample in samples["attend_choice"] for answer in sample["filtered_resps"]]
    pairs = json.dumps([encode(server, *call) for call in asked])
    command = [PYTHON, "-m", "tests.clients.reference"]
    done = subprocess.run(command, input=pairs, capture_output=True, text=True, check=True, timeout=120)
    expected = json.loads(done.stdout)
    assert len(got) == len(expected) == 12
    assert [value for value, _ in got] == pytest.approx([value for value, _ in expected], abs=1e-3)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in expected]
    assert {greedy for _, greedy in got} == {True, False}


def test_a_generated_answer_is_the_greedy_one_up_to_its_stop(server, samples):
    for sample in samples["attend_generate"]:
        ((context, settings),) = sample["arguments"]
        ask = {"prompt": context, "temperature": 0, "max_tokens": settings["max_gen_toks"], "stop": settings["until"]}
        (answer,) = sample["filtered_resps"]
        assert answer == post(server, "/v1/completions", **ask)["choices"][0]["text"]
        assert not any(stop in answer for stop in settings["until"])
    assert len({sample["filtered_resps"][0] for sample in samples["attend_generate"]}) == 4


def test_the_servers_tokenizer_is_enough_for_the_harness(server):
    from lm_eval.utils import RemoteTokenizer, check_remote_tokenizer_support

    url = f"{server.url}/v1/completions"
    tokenizer = RemoteTokenizer(url)
    text = "def f():\n\treturn 'na\u00efve \u65e5\u672c\u8a9e \U0001f600'\n"
    assert check_remote_tokenizer_support(url)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([tokenizer.eos_token_id]) == tokenizer.eos_token
    messages = [{"role": "user", "content": "def f("}]
    whole = post(server, "/v1/chat/completions", messages=messages, max_tokens=1)["usage"]["prompt_tokens"]
    assert len(tokenizer.encode(tokenizer.apply_chat_template(messages))) == whole
