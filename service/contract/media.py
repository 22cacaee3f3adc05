"""Parts of a message that are no text, such as pictures: no model here reads them.

They are refused in what the user says last. In what was said before, and in what tools answer, they are left out, and said,
since a conversation that holds one could not go on otherwise.
"""

from collections.abc import Iterable
from typing import Any, Literal, get_args, get_type_hints

from typing_extensions import TypedDict

from attend.model.errors import NotSupported
from attend.model.params import describe
from attend.service.contract.shapes import open_to_more
from attend.service.remarks import Remarks

BLOCKS = ("image", "document", "search_result", "container_upload")
"""Anthropic's names of such blocks."""


@open_to_more
class MediaPart(TypedDict):
    """Input that is no text. It is refused in the user's last message, and elsewhere left out."""

    type: Literal["image_url", "input_image", "input_audio", "input_video", "video_url", "input_file", "file"]
    """What kind of part it is."""


_PARTS = get_args(get_type_hints(MediaPart)["type"])
_KINDS = (*_PARTS, *BLOCKS)


def kind_of_part(part: Any) -> str:
    """For a Discriminator: the tag of a part of a text, a refusal, or media."""
    kind = part.get("type") if isinstance(part, dict) else None
    return "a refusal" if kind == "refusal" else "media" if kind in _PARTS else "a text"


def refuse_media(parts: Iterable[Any], place: str, sentence: str) -> None:
    """Raise NotSupported for the first part that is media. `sentence` says why, with `{kind}` in it."""
    for index, part in enumerate(parts):
        if part["type"] in _KINDS:
            where = f"{place}[{index}].type"
            raise NotSupported(f"{where}{sentence.format(kind=part['type'], got=describe(part['type']))}", where)


def without_media(parts: Iterable[Any], remarks: Remarks) -> list[Any]:
    """The parts, with a note to the model in place of each that is media. That it is left out is said."""
    made = []
    for part in parts:
        kind = part["type"]
        if kind in _KINDS:
            remarks.ignore(f"content.{kind}")
            part = {"type": "text", "text": f"[{kind} left out: this model reads text alone]"}
        made.append(part)
    return made
