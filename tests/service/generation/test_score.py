"""POST /v1/rerank and /v1/score: the scores of transformers and of numpy, in their order, on one command of the engine."""

import json
import math
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from attend.model.engine.build import build_engine
from attend.model.engine.options import EngineOptions
from attend.model.pooling import NO_EMBEDDINGS, EmbeddingRules, Pooling
from attend.model.scoring import COSINE, NO_SCORES, ScoreRules, ScoreWay, score_rules
from attend.model.text.tokenizer import Tokenizer
from attend.model.train.corpus import train_tokenizer
from attend.service.generation.prepare import Preparation
from attend.service.generation.score import AFTER, BEFORE, INSTRUCTION, pair_probability
from tests.fakes import FakeEngine, Server, build_server, byte_tokenizer, info
from tests.model.checkpoints import edit_config, shaped, spread, their_model, write_checkpoint
from tests.model.gguf_files import make, write_gguf
from tests.model.test_pooling import written
from tests.service.generation.test_embed import Watched

RERANK, SCORE, EMBEDDINGS = "/v1/rerank", "/v1/score", "/v1/embeddings"
YES, NO = ord("y"), ord("n")
ANSWERS = ScoreRules(ScoreWay.YES_NO, (YES, NO), "")
QUERY = "which cat?"
DOCUMENTS = ["the cat sat on the mat", "def attend(q)", "the cat sat on the mat", "naïve café 日本語", ""]


def post(server: Server, path: str, **body: Any) -> httpx.Response:
    return server.post(body, path)


def answering(engine: FakeEngine | None = None) -> Server:
    """A reranker that answers yes or no."""
    return build_server(engine or FakeEngine(info=info(max_model_len=600)), scoring=ANSWERS, embedding=NO_EMBEDDINGS)


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Two servers of one tiny Qwen3 with a tokenizer that has yes and no: by answers and by embeddings; and the folder."""
    folder: Path = tmp_path_factory.mktemp("qwen3")
    texts = ["yes no yes no ", "the cat sat on the mat which cat? ", BEFORE, AFTER, INSTRUCTION]
    tokenizer = train_tokenizer(texts * 4, 512)
    torch.manual_seed(3)
    theirs = shaped("Qwen3", vocab_size=512, max_position_embeddings=1024)
    spread(theirs)
    theirs.save_pretrained(folder)
    tokenizer.raw.save(str(folder / "tokenizer.json"))
    options = EngineOptions(device="cpu", dtype="float32", backend="torch", max_batch_tokens=64, kv_cache_memory=1 << 23)
    engine = build_engine(folder, options)
    engine.start()
    embedding = EmbeddingRules(Pooling.MEAN, None, "")
    servers = {}
    for choice in ("yes_no", "cosine"):
        rules = score_rules(folder, "tiny", choice, embedding, tokenizer)
        servers[choice] = build_server(engine, embedding=embedding, scoring=rules)
        servers[choice].service.tokenizer = servers[choice].service.preparation.tokenizer = tokenizer
    yield servers, folder, tokenizer
    assert engine.stats().num_free_blocks == engine.info.num_blocks
    engine.close()


def wanted_of(folder: Path, tokenizer: Tokenizer, query: str, document: str, instruction: str = INSTRUCTION) -> float:
    """As the model card of Qwen3-Reranker computes it, with transformers."""
    prompt = BEFORE.format(instruction=instruction, query=query) + document + AFTER
    ids = tokenizer.raw.encode(prompt, add_special_tokens=False).ids
    yes, no = (tokenizer.raw.token_to_id(word) for word in ("yes", "no"))
    with torch.no_grad():
        logits_V = their_model(folder)(torch.tensor([ids])).logits[0, -1]
    return float(torch.log_softmax(torch.stack([logits_V[no], logits_V[yes]]), dim=0)[1].exp())


def test_a_score_is_the_probability_of_yes_beside_no_as_transformers_computes_it(served):
    servers, folder, tokenizer = served
    answer = post(servers["yes_no"], SCORE, text_1=QUERY, text_2=DOCUMENTS).json()
    wanted = [wanted_of(folder, tokenizer, QUERY, document) for document in DOCUMENTS]
    assert [each["score"] for each in answer["data"]] == [pytest.approx(score, abs=1e-4) for score in wanted]
    assert max(wanted) - min(wanted) > 1e-3, "the scores are all alike"
    prompts = [BEFORE.format(instruction=INSTRUCTION, query=QUERY) + document + AFTER for document in DOCUMENTS]
    assert answer["usage"]["prompt_tokens"] == sum(len(tokenizer.raw.encode(prompt).ids) for prompt in prompts)


def test_an_instruction_stands_in_place_of_the_usual_one(served):
    servers, folder, tokenizer = served
    answer = post(servers["yes_no"], RERANK, query=QUERY, documents=DOCUMENTS[:1], instruction="Find cats").json()
    wanted = wanted_of(folder, tokenizer, QUERY, DOCUMENTS[0], "Find cats")
    assert answer["results"][0]["relevance_score"] == pytest.approx(wanted, abs=1e-4)


def test_a_cosine_is_that_of_the_vectors_of_embeddings(served):
    servers, _, _ = served
    vectors = [each["embedding"] for each in post(servers["cosine"], EMBEDDINGS, input=[QUERY, *DOCUMENTS]).json()["data"]]
    query, *others = map(np.array, vectors)
    answer = post(servers["cosine"], SCORE, queries=QUERY, documents=DOCUMENTS).json()
    assert [each["score"] for each in answer["data"]] == [pytest.approx(float(query @ other), abs=1e-6) for other in others]


@pytest.mark.parametrize("choice", ["yes_no", "cosine"])
def test_pairs_have_the_scores_that_they_have_alone(served, choice):
    server, queries = served[0][choice], ["which cat?", "what code?", "no", "yes", "the"]
    together = post(server, SCORE, text_1=queries, text_2=DOCUMENTS).json()
    alone = [post(server, SCORE, text_1=q, text_2=d).json()["data"][0] for q, d in zip(queries, DOCUMENTS, strict=True)]
    assert [(each["index"], each["object"]) for each in together["data"]] == [(at, "score") for at in range(5)]
    assert [each["score"] for each in together["data"]] == [pytest.approx(each["score"], abs=1e-5) for each in alone]


@pytest.mark.parametrize("choice", ["yes_no", "cosine"])
def test_documents_come_by_their_scores_and_equal_ones_in_their_order(served, choice):
    server = served[0][choice]
    scores = [each["score"] for each in post(server, SCORE, text_1=QUERY, text_2=DOCUMENTS).json()["data"]]
    answer = post(server, RERANK, query=QUERY, documents=[*DOCUMENTS[:4], {"text": ""}], return_documents=True).json()
    order = [each["index"] for each in answer["results"]]
    found = [each["relevance_score"] for each in answer["results"]]
    assert found == sorted(found, reverse=True) == [pytest.approx(scores[at], abs=1e-5) for at in order]
    assert order.index(0) < order.index(2)
    assert [each["document"] for each in answer["results"]] == [{"text": DOCUMENTS[at]} for at in order]
    best = post(server, RERANK, query=QUERY, documents=DOCUMENTS, top_n=2).json()["results"]
    assert [(each["index"], "document" in each) for each in best] == [(at, False) for at in order[:2]]


@pytest.mark.parametrize("choice", ["yes_no", "cosine"])
def test_a_document_is_cut_after_its_first_tokens_where_that_is_asked_for(served, choice):
    servers, _, tokenizer = served
    long = "the cat sat on the mat which cat? " * 60
    kept = tokenizer.first(long, 7)
    assert 0 < len(kept) < 40 and long.startswith(kept)
    cut, short = (
        post(servers[choice], SCORE, text_1=QUERY, text_2=[text], max_tokens_per_doc=most).json()
        for text, most in ((long, 7), (kept, None))
    )
    assert cut["data"] == short["data"] and cut["usage"] == short["usage"]


def test_a_document_that_is_too_long_is_refused_by_its_place():
    for server, words in ((answering(), "reads texts of at most 599 tokens"), (build_server(), "embeds texts of at most 100")):
        error = post(server, RERANK, query="a", documents=["b", "c" * 300]).json()["error"]
        assert (error["param"], "documents[1]: " in error["message"], words in error["message"]) == ("documents", True, True)
        error = post(server, SCORE, queries=["a" * 300, "b"], documents=["b", "c"]).json()["error"]
        place = "documents[0]: " if words.startswith("reads") else "queries[0]: "
        assert error["message"].startswith(place), error
        assert post(server, RERANK, query="a", documents=["b", "c" * 300], max_tokens_per_doc=9).status_code == 200


CARD = """\
<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. Note that the answer can only \
be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: Given a web search query, retrieve relevant passages that answer the query
<Query>: q
<Document>: d<|im_end|>
<|im_start|>assistant
<think>

</think>

"""


def test_the_prompt_is_that_of_the_model_card():
    assert BEFORE.format(instruction=INSTRUCTION, query="q") + "d" + AFTER == CARD


def test_the_engine_gets_one_prompt_for_each_pair_and_reports_two_tokens():
    server = answering()
    answer = post(server, RERANK, query="q", documents=["b", "c"], request_id="mine").json()
    requests = server.engine.requests
    prompts = [bytes(request.prompt).decode() for request in requests]
    assert prompts == [BEFORE.format(instruction=INSTRUCTION, query="q") + text + AFTER for text in "bc"]
    assert {(r.max_tokens, r.logprobs, r.scored_token_ids, r.sampling.temperature) for r in requests} == {(1, 0, (YES, NO), 0)}
    expected = 1 / (1 + math.exp((YES - NO) / 10))
    assert [each["relevance_score"] for each in answer["results"]] == [pytest.approx(expected)] * 2
    assert (answer["id"], answer["model"]) == ("rerank-mine", "fake")


def test_thousands_of_documents_go_to_the_engine_in_parts():
    answer = post(build_server(Watched()), RERANK, query="a", documents=["b"] * 2048).json()
    assert [each["index"] for each in answer["results"]] == [*range(2048)]
    server = build_server(Watched(info=info(max_model_len=600)), scoring=ANSWERS)
    assert post(server, SCORE, text_1="a", text_2=["b"] * 600).status_code == 200
    assert server.engine.shares == [(600, 32)]
    error = post(server, SCORE, text_1="a", text_2=["b"] * 1000).json()["error"]
    assert (error["param"], "at most 300000 tokens in all" in error["message"]) == ("text_2", True)
    both = build_server(Watched())
    assert post(both, SCORE, text_1=["a"] * 2048, text_2=["b"] * 2048).status_code == 200
    assert both.engine.shares == [(4096, 32)]


REFUSED = {
    "no query": (RERANK, {"documents": ["b"]}, "query", "required"),
    "no documents": (RERANK, {"query": "a"}, "documents", "required"),
    "an empty list": (RERANK, {"query": "a", "documents": []}, "documents", "at least 1 item"),
    "too many": (RERANK, {"query": "a", "documents": ["b"] * 2049}, "documents", "at most 2048 items"),
    "a number": (RERANK, {"query": "a", "documents": ["b", 3]}, "documents", "documents[1]"),
    "an object without a text": (RERANK, {"query": "a", "documents": [{"title": "b"}]}, "documents[0].text", "required"),
    "less than none": (RERANK, {"query": "a", "documents": ["b"], "top_n": -1}, "top_n", "from 0"),
    "cut to nothing": (RERANK, {"query": "a", "documents": ["b"], "max_tokens_per_doc": 0}, "max_tokens_per_doc", "from 1"),
    "an instruction": (RERANK, {"query": "a", "documents": ["b"], "instruction": "c"}, "instruction", "yes or no"),
    "another model": (RERANK, {"query": "a", "documents": ["b"], "model": "no"}, "model", "does not exist"),
    "no first text": (SCORE, {"text_2": "b"}, "text_1", "required"),
    "no second text": (SCORE, {"queries": "b"}, "text_2", "required"),
    "both names": (SCORE, {"text_1": "a", "queries": "a", "text_2": "b"}, "queries", "another name of text_1"),
    "lists that do not fit": (SCORE, {"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1", "as many as text_2"),
    "many for one": (SCORE, {"queries": ["a", "b"], "documents": "c"}, "queries", "got 2"),
}


@pytest.mark.parametrize(("path", "body", "param", "words"), REFUSED.values(), ids=REFUSED)
def test_a_refusal_names_the_field(path, body, param, words):
    server = build_server()
    answer = post(server, path, **body)
    error = answer.json()["error"]
    assert answer.status_code in (400, 404)
    assert (error["param"], words in error["message"]) == (param, True), error
    assert not server.engine.requests
    assert server.outcomes() == {("http", path, "invalid"): 1}


@pytest.mark.parametrize("path", [RERANK, SCORE])
def test_a_model_that_does_not_say_how_names_the_flags(path):
    body = {RERANK: {"query": "a", "documents": ["b"]}, SCORE: {"text_1": "a", "text_2": "b"}}[path]
    error = post(build_server(scoring=NO_SCORES), path, **body).json()["error"]
    assert (error["param"], "--score" in error["message"], "--pooling" in error["message"]) == ("model", True, True)


@pytest.mark.parametrize(
    ("count", "place", "words"),
    [(2, "documents[0]", "characters cannot fit"), (100, "query", "counted once for each document")],
)
def test_a_long_query_is_refused_before_it_is_written_for_each_document(monkeypatch, count, place, words):
    """It would be copied, and tokenized, for each of them."""
    monkeypatch.setattr(Preparation, "_read", lambda *given: pytest.fail("tokenized"))
    error = post(answering(), RERANK, query="q" * 100_000, documents=["a"] * count).json()["error"]
    assert error["message"].startswith(place) and words in error["message"]


def test_a_probability_has_no_overflow():
    assert (pair_probability(0.0), pair_probability(2000.0), pair_probability(-2000.0)) == (0.5, 1.0, 0.0)
    assert pair_probability(1.0) == pytest.approx(1 / (1 + math.exp(-1)))


# Which way a model scores


def rules(folder: Path, name: str = "tiny", choice: str = "auto", embedding: EmbeddingRules = NO_EMBEDDINGS) -> ScoreRules:
    return score_rules(folder, name, choice, embedding, worded())


def worded() -> Tokenizer:
    return train_tokenizer(["yes no yes no "] * 8, 300)


LAST = EmbeddingRules(Pooling.LAST, None, "")


def test_a_model_without_a_way_is_refused_and_one_with_embeddings_compares_them(tmp_path):
    write_checkpoint("qwen3", tmp_path)
    assert rules(tmp_path) == NO_SCORES
    assert rules(tmp_path, embedding=LAST) == COSINE == rules(tmp_path, "Qwen3-Reranker", "cosine", LAST)
    assert "--pooling" in rules(tmp_path, choice="cosine").refusal


def logit_score(folder: Path, true: Any, false: Any) -> Path:
    listed = [{"type": "sentence_transformers.base.modules.transformer.Transformer", "path": ""}]
    listed.append({"type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore", "path": "1_LogitScore"})
    (folder / "1_LogitScore").mkdir(exist_ok=True)
    (folder / "1_LogitScore" / "config.json").write_text(json.dumps({"true_token_id": true, "false_token_id": false}))
    return written(folder, listed)


def test_a_reranker_is_known_by_its_name_by_its_files_and_by_the_setting(tmp_path):
    write_checkpoint("qwen3", tmp_path)
    yes, no = (worded().encode(word, add_special_tokens=False)[0] for word in ("yes", "no"))
    wanted = ScoreRules(ScoreWay.YES_NO, (yes, no), "")
    assert rules(tmp_path, choice="yes_no", embedding=LAST) == wanted
    assert rules(tmp_path, "Qwen/Qwen3-Reranker-0.6B") == wanted
    assert rules(logit_score(tmp_path, yes, no)) == wanted
    assert rules(logit_score(tmp_path, yes, None)) == NO_SCORES == rules(logit_score(tmp_path, no, yes))
    edit_config(tmp_path, _name_or_path="Qwen/Qwen3-Reranker-4B")
    assert rules(tmp_path) == wanted


def test_a_gguf_file_of_a_reranker_says_so(tmp_path):
    path = write_gguf(make("qwen3", tmp_path), tmp_path / "tiny.gguf", metadata={"qwen3.pooling_type": 4})
    assert rules(path).way is ScoreWay.YES_NO


def test_a_tokenizer_without_the_two_words_is_told(tmp_path):
    write_checkpoint("qwen3", tmp_path)
    found = score_rules(tmp_path, "tiny", "yes_no", LAST, byte_tokenizer())
    assert (found.way, "lacks a single token" in found.refusal) == (None, True)
