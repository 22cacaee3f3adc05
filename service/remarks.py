"""Remarks on a call in the headers of its answer: ignored fields, a clamped max_tokens."""

import re
from dataclasses import dataclass, field
from typing import Literal

IGNORED, CLAMPED = "x-attend-ignored", "x-attend-clamped"
"""Headers of answers, and trailing metadata of gRPC."""
MAX_HEADER = 1024
"""Bytes of the value of a header."""
MaxTokensPolicy = Literal["", "clamp", "refuse"]
"""What a max_tokens beyond the context leads to; empty where the route decides."""
MAX_IGNORED = 64
"""Names that one call remembers."""
_PLAIN = re.compile(r"[A-Za-z0-9_.-]{1,64}")


@dataclass(slots=True)
class Remarks:
    """Filled while a call is read and prepared."""

    strict: bool = False
    """True if an unknown field is an error, in place of a remark: the setting `strict_fields`."""
    ignored_fields: dict[str, str] = field(default_factory=dict)
    """How headers write the names of fields that were taken and not looked at."""
    near: dict[str, str] = field(default_factory=dict)
    """Known fields, by the unknown ones that resemble them, which are errors."""
    max_model_len: int = 0
    """The model's context length in tokens."""
    clamps: bool = False
    """True if a `max_tokens` beyond the context is clamped, in place of refused."""
    is_clamped: bool = False
    """True if `max_tokens` was clamped."""

    def ignore(self, name: str) -> None:
        """Say that a field was ignored. A name that no header can hold is `?`, and so are all after MAX_IGNORED."""
        if name in self.ignored_fields or len(self.ignored_fields) < MAX_IGNORED:
            self.ignored_fields[name] = name if _PLAIN.fullmatch(name) else "?"
        else:
            self.ignored_fields["?"] = "?"

    def headers(self) -> dict[str, str]:
        """The headers that say it; empty where there is nothing to say."""
        said = {IGNORED: _join_names(self.names)} if self.ignored_fields else {}
        return said | ({CLAMPED: "max_tokens"} if self.is_clamped else {})

    @property
    def names(self) -> list[str]:
        """The ignored fields as headers, log lines and the metric have them, each once."""
        return [*dict.fromkeys(self.ignored_fields.values())]


def clamps(beyond: MaxTokensPolicy, *, by_default: bool) -> bool:
    """True if a max_tokens beyond the context is clamped on a route."""
    return beyond == "clamp" if beyond else by_default


def _join_names(names: list[str]) -> str:
    """The names in one header, as many as fit."""
    text = ", ".join(names)
    if len(text) <= MAX_HEADER:
        return text
    return text[: MAX_HEADER - len(", ...")].rpartition(", ")[0] + ", ..."
