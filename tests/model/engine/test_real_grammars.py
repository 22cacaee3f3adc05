"""Real matchers in a real engine: what is drawn follows its grammar, and the same alone, in a crowd, and mask by mask."""

import re
from functools import cache

import pytest

from attend.model.engine.request import FinishReason, Request
from attend.model.net.transformer import Decoder
from attend.model.params import SamplingParams
from attend.model.text import mask
from attend.model.text.grammar import GrammarCompiler, GrammarSpec
from attend.model.text.mask import Matcher, compute_masks
from tests.fakes import END, VOCAB, byte_tokenizer
from tests.model.checkpoints import tiny_config, tiny_decoder
from tests.model.engine.machines import answers, ask, masked_first, tiny_engine

REGEXES = [r"[a-c]{2,3}", r"(ab|ba){3,9};", r"[0-9]{4}-[0-9]{2}", r"[x-z]{12,20}", r"(yes|no|never){1,5}", r"é{1,6}!"]
"""Of different lengths: in the last steps one request draws alone, after steps in which many did."""
each_sampling = pytest.mark.parametrize(
    "sampling", [{"temperature": 0}, {"temperature": 0.5}, {"temperature": 1.0, "top_k": 40}, {"temperature": 2.0}], ids=str
)


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer(), VOCAB, (END,))


@pytest.fixture(scope="module")
def net() -> Decoder:
    return tiny_decoder(tiny_config(vocab_size=VOCAB))


@pytest.fixture(scope="module")
def alone(net):
    """The answers under a sampling, each from an engine of its own."""

    @cache
    def answers_of(*sampling: tuple[str, float]) -> dict[str, tuple[list[int], FinishReason | None]]:
        requests = crowd(**dict(sampling))
        return {name: told for each in requests for name, told in answers(tiny_engine(net), [each]).items()}

    return answers_of


def crowd(max_tokens: int = 24, **sampling) -> list[Request]:
    """A request under each grammar, from the tokens before it: fresh matchers each time."""
    return [
        ask(
            text,
            range(5 + at),
            max_tokens,
            sampling=SamplingParams(**sampling),
            seed=7,
            answer_index=at,
            stop_token_ids=frozenset([END]),
            grammar=compiler().compile(GrammarSpec("regex", text)).start(),
        )
        for at, text in enumerate(REGEXES)
    ]


@each_sampling
def test_every_answer_is_in_its_language(net, sampling):
    for regex, (tokens, reason) in answers(tiny_engine(net), crowd(**sampling)).items():
        text = byte_tokenizer().decode(tokens, skip_special_tokens=True)
        assert reason is FinishReason.STOP
        assert re.fullmatch(regex, text), f"{text!r} is not in {regex}"


@each_sampling
@pytest.mark.parametrize("changes", [{}, {"max_batch_tokens": 5}, {"num_blocks": 12, "max_model_len": 48}], ids=str)
def test_in_a_crowd_an_answer_is_what_it_is_alone(net, alone, sampling, changes, monkeypatch):
    """In a crowd masks are worked out side by side: one is good for one place in its answer."""
    expected = alone(*sampling.items())
    together = 0

    def counted(several):
        nonlocal together
        matchers = list(several)
        assert all(isinstance(each, Matcher) for each in matchers)
        together += len(matchers) > 1
        compute_masks(matchers)

    monkeypatch.setattr(mask, "compute_masks", counted)
    engine = tiny_engine(net, **changes)
    assert expected == answers(engine, crowd(**sampling))
    assert together > 3 or "top_k" in sampling, "no masks were worked out together: the test says little"
    assert (engine.scheduler.num_preemptions > 0) == ("num_blocks" in changes)


@each_sampling
def test_a_token_drawn_before_its_mask_is_the_one_drawn_under_it(net, sampling):
    first = answers(tiny_engine(net), crowd(**sampling))
    assert first == answers(tiny_engine(net), masked_first(crowd(**sampling)))


def test_a_grammar_that_is_cut_off_leaves_a_beginning_of_its_language(net):
    for regex, (tokens, reason) in answers(tiny_engine(net), crowd(max_tokens=2, temperature=1.0)).items():
        assert len(tokens) == 2
        matcher = compiler().compile(GrammarSpec("regex", regex)).start()
        for token in tokens:
            assert matcher.allows(token)
            matcher.advance(token)
        assert matcher.mask().any()
        assert (reason is FinishReason.STOP) == matcher.is_finished
