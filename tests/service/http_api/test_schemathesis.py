"""What schemathesis makes of /openapi.json: bodies within the schemas and beside them, every method, at every route."""

import copy
import re

import pytest
from hypothesis import HealthCheck, settings
from pydantic import TypeAdapter

from attend.service.contract.answers import Error
from attend.service.contract.anthropic import AnthropicError
from tests.conftest import examples
from tests.fakes import MODEL, VOCAB
from tests.service.http_api.described import chatting_server, document

schemathesis = pytest.importorskip("schemathesis", minversion="4")
schemathesis.checks.load_all_checks()
checks = pytest.importorskip("schemathesis.specs.openapi.checks")
from schemathesis.generation.feedback import FeedbackSources  # noqa: E402 - after the skip
from schemathesis.pytest._test_builder import build_operation_test  # noqa: E402
from schemathesis.python._constants.orchestrator import make_constants_value_source  # noqa: E402

SLOW = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]

RELATIONS = re.compile(
    r"stream_options is only allowed when stream is true|top_logprobs is only allowed when logprobs is true|"
    r"dimensions must be an integer from 1 to \d+|"
    r"(prompt|answer|input|layers|heads) must hold .*integers from 0 to \d+; got|"
    r"best_of must equal n|max_completion_tokens must equal max_tokens|"
    r"max_tokens must be at least 1 without echo|n times the number of prompts|dimensions must be an integer from 1 to 4|"
    r"min_tokens must be an integer from 0 to \d+|min_tokens cannot be combined with structured output|"
    r"response_format and structured_outputs cannot both|structured_outputs must hold one of|"
    r"resume_token_ids (needs|holds|must hold fewer|does not follow)|.*maximum context length is|"
    r"(structured_outputs|response_format|(text|output_config)\.format)\.\w+\b|tools\b.*:|"
    r"chat_template_kwargs: .* is not an option|"
    r".*this server takes no other input; got|prompt is too long|input length and `max_tokens` exceed|"
    r"tool_choice[\w.\[\]]* (must be the name of|is required)|tool_choice: a call is required, which needs|"
    r"tools\[\d+\].*(of no other tool|no JSON schema)|"
    r"messages\[\d+\]\.((content|tool_call_id) is required|\w+ is not (supported in|a field of) a message with this role)|"
    r"messages\[\d+\].*(the id of a call|JSON object in a string)|reasoning_effort: this model|"
    r"\w+ must hold token ids of the vocabulary|.* is not a field of this request|the last message must be an assistant's|"
    r"input\[\d+\].*(the call_id of|items are not kept)|messages\[\d+\].*(the id of a tool_use|reads text alone)|"
    r"(input|messages) holds nothing|text.format and structured_outputs|"
    r"(suffix|resume_token_ids) needs a single prompt|[a-z_]+ needs (messages|tools)|[a-z_.]+ and [a-z_]+ cannot both be given|"
    r"prompt is required, or messages|add_generation_prompt cannot be true|"
    r"[a-z_0-9]+ may hold at most \d+ texts together|"
    r"text_[12] is required|[a-z_1]+ must hold 1 text, or as many|[a-z]+ is another name of|instruction is for models that|"
    r"(query|queries|documents|text_[12])(\[\d+\])?: this model embeds texts of at most|"
    r"[a-z_]+(\[\d+\])? must be .*integer.*; got .*\d\.0\b"
)
"""What a body that fits its schema is refused for: how fields go together, what a grammar or a template says, and 3.0."""


def of_this_replica():
    """The document, with the model and the vocabulary of the fake: no body is wasted on names and ids that it lacks."""
    mine = copy.deepcopy(document())
    schemas = mine["components"]["schemas"]
    for name in (
        *("CompletionRequest", "ChatRequest", "TokenizeRequest", "DetokenizeRequest"),
        *("ResponsesRequest", "MessagesRequest", "CountTokensRequest"),
    ):
        schemas[name]["properties"]["model"] = {"enum": [MODEL, None]}
        schemas[name] = _bounded(schemas[name])
    return mine


def _bounded(schema):
    """The same schema with an end to its token ids, which are the integers that have none."""
    if isinstance(schema, list):
        return [_bounded(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    endless = schema.get("type") == "integer" and "maximum" not in schema
    return {name: _bounded(item) for name, item in schema.items()} | ({"maximum": VOCAB - 1} if endless else {})


def failures_have_our_shape(ctx, response, case):
    """Every failure of a JSON route is an Error, methods that are not offered too."""
    if response.status_code >= 400:
        shape = AnthropicError if case.path.startswith("/v1/messages") else Error
        TypeAdapter(shape).validate_python(response.json())


def what_fits_is_refused_for_its_meaning_alone(ctx, response, case):
    """A body within its schema is answered, or refused for what no schema of one field can say."""
    if response.status_code == 400 and case.meta.generation.mode is schemathesis.GenerationMode.POSITIVE:
        assert RELATIONS.match(response.json()["error"]["message"]), response.text


def no_failure_is_ours(ctx, response, case):
    """A deadline of a millisecond may pass before the first token; nothing else is a 5xx."""
    assert response.status_code < 500 or (response.status_code == 504 and case.body["deadline_ms"]), response.text


def conforms(case):
    case.call_and_validate(
        # Ours know which refusals are right.
        excluded_checks=[checks.positive_data_acceptance, schemathesis.checks.not_a_server_error],
        additional_checks=[failures_have_our_shape, what_fits_is_refused_for_its_meaning_alone, no_failure_is_ours],
    )


@pytest.mark.parametrize("operation", [f"{method} {path}" for path, each in document()["paths"].items() for method in each])
def test_every_call_is_answered_as_the_document_says(operation):
    """Built when it runs: what `parametrize` of schemathesis builds of all operations takes ten seconds to collect."""
    method, path = operation.split()
    api = schemathesis.openapi.from_dict(of_this_replica())
    api.app = chatting_server().app
    few = settings(max_examples=examples(25), deadline=None, derandomize=True, database=None, suppress_health_check=SLOW)
    feedback = FeedbackSources(constants_value_source=make_constants_value_source(api))
    given = {"given_kwargs": {}, "feedback": feedback, "explicit_settings": few}
    build_operation_test(config=api.config, operation=api[path][method], test_func=conforms, **given)()
