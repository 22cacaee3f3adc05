"""generation_config.json: where a checkpoint's answers end, and how its makers want its tokens drawn."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attend.model.errors import CheckpointError, InvalidRequest
from attend.model.params import DecodingParams, SamplingParams, describe
from attend.model.weights import read_json

NAME = "generation_config.json"
SAMPLING = ("temperature", "top_k", "top_p", "min_p")
DECODING = ("repetition_penalty",)
OFF: dict[str, tuple[Any, ...]] = {
    **{"num_beams": (1,), "num_beam_groups": (1,), "penalty_alpha": (0,), "guidance_scale": (1,), "typical_p": (1,)},
    **{"no_repeat_ngram_size": (0,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "min_length": (0,), "min_new_tokens": (0,)},
    **{"suppress_tokens": ([],), "begin_suppress_tokens": ([],), "bad_words_ids": ([],), "sequence_bias": ([], {})},
    **{"forced_bos_token_id": (), "forced_eos_token_id": (), "exponential_decay_length_penalty": (), "top_h": ()},
}
"""What else draws tokens otherwise for `transformers`, and the values, beside null, with which it does not."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a call that does not say otherwise gets, by the names of `SamplingParams` and `DecodingParams`."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    decoding: Mapping[str, Any] = field(default_factory=dict)

    def values(self) -> dict[str, float]:
        """All of them, those that no file changes included."""
        sampling, decoding = SamplingParams(**self.sampling), DecodingParams(**self.decoding)
        return {name: getattr(sampling, name) for name in SAMPLING} | {name: getattr(decoding, name) for name in DECODING}

    def non_default_values(self) -> dict[str, float]:
        """The parameters whose values differ from those without a file."""
        return {name: value for name, value in self.values().items() if value != NO_DEFAULTS.values()[name]}


NO_DEFAULTS = Defaults()


def read_defaults(folder: Path, source: str = "model") -> Defaults:
    """The defaults that a folder's file sets, or none where `source` is none.

    Raises CheckpointError for a bad value, and for one that would draw tokens otherwise and is not carried out.
    """
    if source == "none":
        return NO_DEFAULTS
    path = folder / NAME
    raw = {name: value for name, value in _read(folder).items() if value is not None}
    for name in OFF.keys() & raw.keys():
        if raw[name] not in OFF[name]:
            raise CheckpointError(
                f"{path}: {name} is not supported; got {describe(raw[name])} (--generation-config none leaves the file out)"
            )
    samples = raw.get("do_sample", True)
    if not isinstance(samples, bool):
        raise CheckpointError(f"{path}: do_sample must be true or false; got {describe(samples)}")
    sampling = {name: raw[name] for name in SAMPLING if name in raw} | ({} if samples else {"temperature": 0.0})
    defaults = Defaults(sampling, {name: raw[name] for name in DECODING if name in raw})
    try:
        defaults.values()
    except InvalidRequest as error:
        raise CheckpointError(f"{path}: {error}") from error
    return defaults


def stop_tokens(folder: Path) -> tuple[int, ...]:
    """The end tokens that the file names: chat models name those of their turns nowhere else. Raises CheckpointError."""
    value = _read(folder).get("eos_token_id")
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(token) is int for token in values):
        raise CheckpointError(f"{folder / NAME}: eos_token_id must be a token id, or a list of them; got {describe(value)}")
    return tuple(values)


def _read(folder: Path) -> dict[str, Any]:
    return read_json(folder, NAME) if (folder / NAME).is_file() else {}
