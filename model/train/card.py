"""The measured sections of a model card, as markdown."""

from collections.abc import Mapping, Sequence

from attend.model.train.command import QUICK_TOKENS
from attend.model.train.headers import MAX_TOKENS, Header, Verdict, count_verdicts

NUM_SAMPLES = 10
SAMPLE_TOKENS = 64


def quality_section(bits: Mapping[str, float], context: int, verdicts: Sequence[Verdict]) -> str:
    """The section on held-out text: bits per byte of each row's coder, and what became of the completed headers."""
    rows = "\n".join(f"| {name} | {value:.3f} |" for name, value in bits.items())
    ended, parsed = count_verdicts(verdicts)
    return f"""## Quality

| on the held-out files | bits per byte |
| --- | --- |
{rows}

Windows of {context} tokens overlap by half; each token but the first is scored once. The plot's held-out curve
is over the first {QUICK_TOKENS:,} of those tokens.

Of {len(verdicts)} function headers of the held-out files, completed greedily and cut at the dedent, **{parsed}** are Python,
header and body together. {ended} end within {MAX_TOKENS} tokens; one that does not counts as failed. A header counts if it is
one line in column 0, if `pass` as its body makes it Python, and if it is new; the first of each file come first, in the
order of their paths, then the second of each, and so on.
"""


def samples(headers: Sequence[Header], texts: Sequence[str]) -> str:
    """The section of completions, each of SAMPLE_TOKENS tokens, under the path of its header's file."""
    shown = "\n".join(
        f"`{header.path}`\n\n```python\n{header.text}{text.rstrip()}\n```\n"
        for header, text in zip(headers, texts, strict=True)
    )
    return f"""## Samples

Not chosen: the first {len(headers)} of those headers, continued greedily for {SAMPLE_TOKENS} tokens
(`attend generate --max-tokens {SAMPLE_TOKENS} --temperature 0 --dtype float32 HEADER`).

{shown}"""
