"""The query of a URL: parameters by name, each at most once."""

from collections.abc import Iterable, Sequence

from attend.model.errors import InvalidRequest
from attend.model.params import describe


class Query:
    """The parameters `known_names` of a query. Raises InvalidRequest for another name, and for one that is given twice."""

    def __init__(self, pairs: Iterable[tuple[str, str]], known_names: Sequence[str]) -> None:
        self._given: dict[str, str] = {}
        for name, text in pairs:
            if name not in known_names:
                raise InvalidRequest(
                    f"{describe(name)} is not a parameter of this route; known: {', '.join(known_names)}", name[:64]
                )
            if name in self._given:
                raise InvalidRequest(f"{name} is given more than once", name)
            self._given[name] = text

    def text(self, name: str) -> str | None:
        """The value, if there is one."""
        return self._given.get(name) or None

    def one_of(self, name: str, values: tuple[str, ...]) -> str | None:
        """One of these values, or none."""
        value = self.text(name)
        if value is not None and value not in values:
            raise InvalidRequest(f"{name} must be {' or '.join(map(repr, values))}; got {describe(value)}", name)
        return value

    def integer(self, name: str, default: int, most: int, least: int = 1) -> int:
        """The value as an integer from `least` to `most`. Raises InvalidRequest."""
        text = self._given.get(name)
        if text is None:
            return default
        # int() takes more than digits, such as 1_000, and refuses very long ones
        value = int(text) if text.isascii() and text.isdecimal() and len(text) < 20 else -1
        if not least <= value <= most:
            raise InvalidRequest(f"{name} must be an integer from {least} to {most}; got {describe(text)}", name)
        return value
