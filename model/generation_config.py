"""generation_config.json: where a checkpoint's answers end, and how its makers want its tokens drawn."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from attend.model.errors import CheckpointError, InvalidRequest
from attend.model.gguf.paths import is_gguf
from attend.model.params import DecodingParams, SamplingParams, describe
from attend.model.weights import read_json

log = logging.getLogger("attend.model")
NAME = "generation_config.json"
SAMPLING = ("temperature", "top_k", "top_p", "min_p")
DECODING = ("repetition_penalty",)
CARRIED = (*SAMPLING, *DECODING, "do_sample", "suppress_tokens", "eos_token_id")
OFF: dict[str, tuple[Any, ...]] = {
    **{"num_beams": (1,), "num_beam_groups": (1,), "penalty_alpha": (0,), "guidance_scale": (1,), "typical_p": (1,)},
    **{"no_repeat_ngram_size": (0,), "epsilon_cutoff": (0,), "eta_cutoff": (0,), "min_length": (0,), "min_new_tokens": (0,)},
    **{"begin_suppress_tokens": ([],), "bad_words_ids": ([],), "sequence_bias": ([], {}), "stop_strings": ([], "")},
    **{"forced_bos_token_id": (), "forced_eos_token_id": (), "exponential_decay_length_penalty": (), "top_h": ()},
    **{"encoder_repetition_penalty": (1,), "encoder_no_repeat_ngram_size": (0,), "token_healing": (False,), "max_time": ()},
    **{"watermarking_config": (), "dola_layers": (), "constraints": ([],), "force_words_ids": ([],)},
    **{"general.sampling.mirostat": (0,), "general.sampling.xtc_probability": (0,), "general.sampling.sequence": ()},
    "general.sampling.penalty_last_n": (-1, 0),
}
"""What else draws tokens otherwise, or ends an answer, for `transformers` or llama.cpp, and the values, beside null, with which
it does not.
"""
HARMLESS = frozenset((
    *("max_length", "max_new_tokens", "num_return_sequences"),  # the call's own: max_tokens, n
    *("early_stopping", "length_penalty", "diversity_penalty"),  # of beams
    *("bos_token_id", "pad_token_id", "decoder_start_token_id"),  # of config.json, of batches, and of encoders
    *("renormalize_logits", "remove_invalid_values"),  # the same draw
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "low_memory"),
    *("compile_config", "disable_compile", "continuous_batching_config", "return_dict_in_generate"),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    # guesses of a second model, or of the prompt, change no token
    *("use_mtp", "speculation_type", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("assistant_confidence_threshold", "assistant_early_exit", "assistant_lookbehind", "target_lookbehind"),
    *("assistant_ensemble_weight", "prompt_lookup_num_tokens", "max_matching_ngram_size"),
    *("_from_model_config", "transformers_version"),
    *("general.sampling.mirostat_tau", "general.sampling.mirostat_eta", "general.sampling.xtc_threshold"),
))  # fmt: skip
"""Keys that change no token of an answer to one call."""


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a call that does not say otherwise gets, by the names of `SamplingParams` and `DecodingParams`."""

    sampling: Mapping[str, Any] = field(default_factory=dict)
    decoding: Mapping[str, Any] = field(default_factory=dict)
    suppress_tokens: tuple[int, ...] = ()
    """Tokens that no call draws, whatever it says."""

    def values(self) -> dict[str, float]:
        """All of them, those that no file changes included."""
        sampling, decoding = SamplingParams(**self.sampling), DecodingParams(**self.decoding)
        return {name: getattr(sampling, name) for name in SAMPLING} | {name: getattr(decoding, name) for name in DECODING}


NO_DEFAULTS = Defaults()


def read_defaults(folder: Path, source: str = "model") -> Defaults:
    """The defaults that a folder's file sets, or none where `source` is none.

    Raises CheckpointError for a bad value, and for one that would draw tokens otherwise and is not carried out.
    """
    if source == "none":
        return NO_DEFAULTS
    path = f"{folder}: its metadata as a {NAME}" if is_gguf(folder) else folder / NAME
    raw = {name: value for name, value in _read(folder).items() if value is not None}
    if unknown := sorted(raw.keys() - OFF.keys() - HARMLESS - {*CARRIED}):
        log.warning("%s: %s is not known, and changes nothing", path, ", ".join(unknown)[:500])
    for name in OFF.keys() & raw.keys():
        if raw[name] not in OFF[name]:
            raise CheckpointError(
                f"{path}: {name} is not supported; got {describe(raw[name])} (--generation-config none leaves the file out)"
            )
    samples = raw.get("do_sample", True)
    if not isinstance(samples, bool):
        raise CheckpointError(f"{path}: do_sample must be true or false; got {describe(samples)}")
    sampling = {name: raw[name] for name in SAMPLING if name in raw} | ({} if samples else {"temperature": 0.0})
    decoding = {name: raw[name] for name in DECODING if name in raw}
    banned = raw.get("suppress_tokens", [])
    if not isinstance(banned, list) or not all(type(token) is int and token >= 0 for token in banned):
        raise CheckpointError(f"{path}: suppress_tokens must be a list of token ids; got {describe(banned)}")
    defaults = Defaults(sampling, decoding, tuple(dict.fromkeys(banned)))
    if defaults.suppress_tokens:
        log.info("%s: suppress_tokens: no call draws %s", path, describe(list(defaults.suppress_tokens)))
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
    return read_json(folder, NAME) if is_gguf(folder) or (folder / NAME).is_file() else {}
