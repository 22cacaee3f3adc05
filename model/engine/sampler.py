"""`attend.model.sampling.sample` on a GPU: a step's parameters go to it with the step's other numbers, and Triton draws.

What a step copies is a record for each row, its biases and bans, a bit for each token of a mask, and what is new in the texts
that penalties look at: their counts stay on the device.

Shapes: R rows · V vocabulary.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attend.model.net.triton import limits
from attend.model.net.triton import sampling as kernels
from attend.model.params import SamplingParams
from attend.model.sampling_plan import LEAST_TEMPERATURE, Draw, SamplingPlan, TextCounts, reach
from attend.model.transfer import HostToDeviceCopy

CHUNK = 4096
"""Scores that one program takes."""
TILE = 1024
"""Scores that the search for a border takes at once."""
ROOM = 8192
"""Scores of a row that may be collected for that search: where more lie about the border, the whole row is searched."""
MAX_PLANS = 4096
"""Plans whose records are remembered."""
OPTIONS = {"num_warps": 8, "enable_fp_fusion": False}
"""Nothing is contracted: a product that is added to a number is rounded first, as torch rounds it."""
TEXTS = 8
"""Texts that there is room for at first, where penalties are asked for."""
NO_BORDER = kernels.NO_BORDER.value
KEY, MAY_EXCLUDE, TEXT, WORDS, BIASES, BANS, END, NUMBERS = (
    column.value
    for column in (
        *(kernels.KEY, kernels.MAY_EXCLUDE, kernels.TEXT, kernels.WORDS),
        *(kernels.BIASES, kernels.BANS, kernels.END, kernels.NUMBERS),
    )
)


@dataclass(slots=True)
class _Text:
    """A text whose token counts lie on the device."""

    text: TextCounts
    line: int
    num_seen: int = 0
    counts: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    """The counts that the device has."""

    def news(self) -> dict[int, int]:
        """What to write for each token whose count has changed; then they count as sent."""
        text, counts = self.text, np.array(self.text.counts)
        new = dict.fromkeys(text.seen_tokens[self.num_seen :], 1)
        before = np.zeros_like(counts)
        before[: len(self.counts)] = self.counts
        changed = np.flatnonzero(counts != before)
        new.update({text.output_tokens[at]: 1 + int(counts[at]) for at in changed})
        self.num_seen, self.counts = len(text.seen_tokens), counts
        return new


class Texts:
    """How often each token is in the texts of some requests, on the device. A text that is not asked for gives way."""

    def __init__(self, vocab_size: int, device: str | torch.device) -> None:
        self.counts = torch.zeros(0, vocab_size, dtype=torch.int32, device=device)
        """int32 [texts, V]: 0 where a token is not in the text, else 1 and how often it is in the output."""
        self._known: dict[int, _Text] = {}
        """By the text's identity, those that were asked for last at the end. Each is held, so no other has its identity."""

    def lines(self, texts: Sequence[TextCounts]) -> tuple[list[int], "array[int]"]:
        """The line of each text; and pairs of a place in `counts` and what it is to hold, one after the other."""
        wanted = {id(text.seen_tokens): text for text in texts}
        self._make_room(len(wanted))
        for name in wanted.keys() & self._known.keys():
            self._known[name] = self._known.pop(name)  # to the end, so that no new one takes its line
        news = array("q")
        for name, text in wanted.items():
            if name not in self._known:
                self._known[name] = self._take_line(text)
            known = self._known[name]
            for token, value in known.news().items():
                news.extend((known.line * self.counts.shape[1] + token, value))
        return [self._known[id(text.seen_tokens)].line for text in texts], news

    def forget(self) -> None:
        """Know no text any more, as after a draw of which nobody knows whether it has written its news."""
        self._known.clear()
        self.counts = self.counts[:0]

    def _make_room(self, num_texts: int) -> None:
        room = max(TEXTS, _power_of_2(num_texts))
        if num_texts and room > len(self.counts):
            more = self.counts.new_zeros(room - len(self.counts), self.counts.shape[1])
            self.counts = torch.cat((self.counts, more))

    def _take_line(self, text: TextCounts) -> "_Text":
        """A line for a new text: a free one, or that of the text that was asked for longest ago."""
        if len(self._known) < len(self.counts):
            return _Text(text, len(self._known))
        line = self._known.pop(next(iter(self._known))).line
        self.counts[line].zero_()
        return _Text(text, line)


class _PlanArrays(NamedTuple):
    """The part of a plan's record that is the same for all its draws."""

    plan: SamplingPlan
    """Referenced, so that no other plan gets its identity (`id`) meanwhile."""
    record: tuple[int, ...]
    biases: "array[int]"
    allowed_tokens: NDArray[np.bool_] | None


class _StagedDraws(NamedTuple):
    """Inputs of the next draw, kept alive until the device has read them."""

    draws: Sequence[Draw]
    h2d_copy: HostToDeviceCopy
    parts: list[int]


class TokenSampler:
    """The same call as `attend.model.sampling.sample`, and the same tokens: see `model/net/triton/sampling.py` for how far."""

    def __init__(self, vocab_size: int, device: str | torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._texts = Texts(vocab_size, device)
        self._plan_arrays: dict[int, _PlanArrays] = {}
        self._staged: _StagedDraws | None = None

    def stage(self, draws: Sequence[Draw], h2d_copy: HostToDeviceCopy) -> None:
        """Put what these draws need into a copy to the device. The next call, with the same list of draws, reads it from
        there."""
        if self._staged is not None:  # an error came before that draw
            self._texts.forget()
        self._staged = _StagedDraws(draws, h2d_copy, [])
        self._staged.parts.extend(map(h2d_copy.add, self._numbers(draws)))

    def __call__(self, logits_RV: Tensor, draws: Sequence[Draw]) -> Tensor:
        """Token ids int64 [R], UNSCORED or EXCLUDED. Does not wait."""
        num_rows, num_chunks = len(draws), -(-self._vocab_size // CHUNK)
        changes = any(draw.may_exclude for draw in draws)
        records, *lists = self._receive(draws)
        scores_RV = logits_RV.new_empty(logits_RV.shape, dtype=torch.float32) if changes else logits_RV
        highest_2RS = logits_RV.new_empty(2, num_rows, num_chunks, dtype=torch.float32)
        best_R, borders_R, tokens_R = (records.new_empty(num_rows) for _ in range(3))
        done_R = torch.empty_like(best_R, dtype=torch.int32)
        sizes = {"V": self._vocab_size, "S": num_chunks, "S_P": _power_of_2(num_chunks)}
        is_limited = any(draw.plan.is_limited for draw in draws)
        bins = records.new_empty(num_rows, kernels.COLUMNS.value) if is_limited else best_R
        kernels.highest_kernel[(num_rows, num_chunks)](
            *(logits_RV, records, *lists, self._texts.counts, scores_RV, highest_2RS, best_R, done_R, borders_R, bins),
            logits_RV.stride(0),
            V=self._vocab_size,
            CHUNK=CHUNK,
            CHANGES=changes,
            LIMITED=is_limited,
            **OPTIONS,
        )
        stride = scores_RV.stride(0)
        if is_limited:
            candidates = highest_2RS.new_empty(num_rows, ROOM)
            given = (scores_RV, records, highest_2RS[int(changes)], bins)
            grid = (num_rows, num_chunks)
            limits.count_kernel[grid](*given, stride, **sizes, CHUNK=CHUNK, **OPTIONS)
            limits.collect_kernel[grid](*given, candidates, stride, **sizes, CHUNK=CHUNK, ROOM=ROOM, **OPTIONS)
            limits.limit_kernel[(num_rows,)](*given, candidates, borders_R, stride, **sizes, TILE=TILE, ROOM=ROOM, **OPTIONS)
        kernels.draw_kernel[(num_rows, num_chunks)](
            *(scores_RV, records, highest_2RS, borders_R, best_R, done_R, tokens_R, stride),
            **sizes,
            CHUNK=CHUNK,
            CHANGES=changes,
            **OPTIONS,
        )
        return tokens_R

    def warm_up(self, dtype: torch.dtype) -> None:
        """Draw in every way from scores of this type, so that no step compiles a kernel."""
        logits_1V = torch.zeros(1, self._vocab_size, dtype=dtype, device=self._device)
        for params in (SamplingParams(), SamplingParams(top_k=1)):
            for banned in ((), (0,)):
                self(logits_1V, [Draw(SamplingPlan(params, seed=0), 0, banned)])

    def _receive(self, draws: Sequence[Draw]) -> list[Tensor]:
        """Records, entries and words on the device; `counts` there is up to date."""
        if self._staged is None or self._staged.draws is not draws:
            self.stage(draws, HostToDeviceCopy(self._device))
        assert self._staged is not None
        records, entries, words, news = (self._staged.h2d_copy[part] for part in self._staged.parts)
        if len(news):
            places, values = news.view(-1, 2).unbind(1)
            self._texts.counts.view(-1)[places] = values.to(torch.int32)
        self._staged = None
        return [records.view(-1, NUMBERS), entries, words.view(torch.int32)]

    def _numbers(self, draws: Sequence[Draw]) -> "list[NDArray[np.int64] | array[int]]":
        """Records, entries, words, and pairs of a place in `counts` and what it is to hold."""
        fixed = [self._fixed_of(draw.plan) for draw in draws]
        records_RN = np.array([each.record for each in fixed])
        keys_R = np.array([each.plan.key for each in fixed], np.uint64)
        keys_R = mix_all(keys_R ^ np.array([draw.position for draw in draws], np.uint64))
        records_RN[:, KEY] = keys_R.view(np.int64)
        entries, words, texts = array("q"), self._words(draws, fixed, records_RN), []
        for at, (draw, each) in enumerate(zip(draws, fixed, strict=True)):
            if not draw.may_exclude:
                continue
            begin = len(entries)
            entries.extend(each.biases)
            entries.extend(draw.banned_tokens)
            records_RN[at, [MAY_EXCLUDE, BIASES, BANS, END]] = 1, begin, begin + len(each.biases), len(entries)
            if draw.plan.penalizes and draw.text is not None:
                texts.append((at, draw.text))
        lines, news = self._texts.lines([text for _, text in texts])
        records_RN[[at for at, _ in texts], TEXT] = lines
        return [records_RN, entries, words, news]

    def _words(self, draws: Sequence[Draw], fixed: Sequence[_PlanArrays], records_RN: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which tokens the rows allow that do not allow all, a bit for each; the records say which line is a row's."""
        size = -(-self._vocab_size // 32)
        lines: list[NDArray[np.uint8]] = []
        for at, (draw, each) in enumerate(zip(draws, fixed, strict=True)):
            masks = [mask for mask in (each.allowed_tokens, draw.mask) if mask is not None]
            if masks:
                records_RN[at, WORDS] = len(lines)
                bits = np.packbits(masks[0] if len(masks) == 1 else masks[0] & masks[1], bitorder="little")
                lines.append(np.pad(bits, (0, 4 * size - len(bits))))
        packed = np.concatenate(lines) if lines else np.empty(0, np.uint8)
        return np.pad(packed, (0, -len(packed) % 8)).view(np.int64)

    def _fixed_of(self, plan: SamplingPlan) -> _PlanArrays:
        known = self._plan_arrays.get(id(plan))
        if known is None:
            if len(self._plan_arrays) == MAX_PLANS:
                self._plan_arrays.clear()
            known = self._plan_arrays[id(plan)] = _make_plan_arrays(plan, self._vocab_size)
        return known


def mix_all(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`attend.model.sampling_plan.mix` of each."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


def _make_plan_arrays(plan: SamplingPlan, vocab_size: int) -> _PlanArrays:
    decoding, params = plan.decoding, plan.params
    top_k, top_p, min_p = (params.top_k, params.top_p, params.min_p) if plan.is_limited else (0, 1.0, 0.0)
    record = (
        0,
        int(not plan.is_greedy),
        _bits(max(params.temperature, LEAST_TEMPERATURE)),
        top_k if 0 < top_k < vocab_size else 0,
        _bits(top_p),
        _bits(reach(min_p)) if min_p else NO_BORDER,
        0,
        _bits(decoding.repetition_penalty),
        _bits(decoding.frequency_penalty),
        _bits(decoding.presence_penalty),
        *(-1, -1, 0, 0, 0),
    )
    biases = array("q", (_bits(bias) << 32 | token for token, bias in decoding.logit_bias.items()))
    allowed = None
    if decoding.allowed_token_ids:
        allowed = np.zeros(vocab_size, np.bool_)
        allowed[np.array(decoding.allowed_token_ids)] = True
    return _PlanArrays(plan, record, biases, allowed)


def _power_of_2(number: int) -> int:
    """The next one that is not smaller."""
    return 1 << (number - 1).bit_length() if number else 0


def _bits(number: float) -> int:
    """The bits of the nearest float32, as a signed integer."""
    return int(np.float32(number).view(np.int32))
