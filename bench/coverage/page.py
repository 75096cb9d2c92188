"""docs/models.md and, beside it, the results that it is made of."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import msgspec

from bench.coverage.row import Result, Row
from graphllm.config.vllm.table import table as markdown

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
RESULTS = PAGE.with_name("models.json")


class Table(msgspec.Struct):
    """All rows by model type, measured with a version of transformers."""

    transformers: str = ""
    rows: dict[str, Row] = {}

    @classmethod
    def read(cls) -> Table:
        """What is there; an empty table where nothing is."""
        return msgspec.json.decode(RESULTS.read_bytes(), type=cls) if RESULTS.exists() else cls()

    def write(self) -> None:
        """Put it beside the page."""
        rows = dict(sorted(self.rows.items()))
        text = msgspec.json.format(msgspec.json.encode(Table(self.transformers, rows)), indent=1)
        RESULTS.write_bytes(text + b"\n")


def page(table: Table) -> str:
    """The page in Markdown."""
    rows = [row for _, row in sorted(table.rows.items())]
    tried = [row for row in rows if not row.untried]
    ours, traced = [r for r in tried if r.ours is not None], [r for r in tried if r.ours is None]
    counts = Counter(best(row).state for row in tried)
    parts = [
        _HEAD.format(
            version=table.transformers, types=len(rows), works=counts["works"], ours=_working(ours),
            traced=_working(traced), refused=counts["refused"], wrong=counts["wrong"] + counts["fails"],
            both=sum(r.traced is not None and r.traced.state == "works" for r in ours), families=len(ours),
            untried=len(rows) - len(tried),
        ),
        markdown(("model_type", "architecture", "code", "result", "ordinary ops"), map(_cells, tried)),
        "\n## Reasons\n\nWhy transformers' code is refused, whether a family here runs the type or not.\n",
        markdown(("reason", "types"), _reasons(tried)),
        "\n## No tiny model\n\nTransformers makes no small model of these types, or cannot run it.\n",
        markdown(("model_type", "why"), [(f"`{r.model_type}`", _short(r.untried)) for r in rows if r.untried]),
    ]  # fmt: skip
    return "\n".join(parts) + "\n"


_HEAD = """# Models

<!-- written by python -m bench.coverage -->

Every type of causal language model of transformers {version}, {types} in all. A family of `model_defs/` runs where
there is one. Transformers' own code runs otherwise, traced at compile time ([`--model-impl`](settings.md)); no code of
a repository ever runs.

Each type was measured with a tiny random checkpoint, in float32 on the eager backend: prompts in one batch, a prompt
in chunks, and one that goes on where that ended. "works" says that all greedy tokens are those of transformers'
`generate`, or of its forward passes over the whole text where the two differ.

- {works} types work: {ours} of {families} by a family here, {traced} by transformers' code, which also works for
  {both} of those {families}.
- {refused} are refused with a reason; {wrong} give other tokens or fail, which are bugs.
- {untried} have no tiny model to measure.

The last column has what became no op of graphllm, with its share of the bytes of a step of one token. Inductor
compiles it.
"""


def best(row: Row) -> Result:
    """Of the implementation that is taken without --model-impl."""
    found = row.ours or row.traced
    assert found is not None
    return found


def _working(rows: list[Row]) -> int:
    return sum(best(row).state == "works" for row in rows)


def _reasons(rows: list[Row]) -> list[tuple[str, str]]:
    """Types by why they are refused, the most frequent reason first."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.traced is not None and row.traced.state == "refused":
            found.setdefault(_reason(row.traced.why), []).append(f"`{row.model_type}`")
    return [(reason, " ".join(names)) for reason, names in sorted(found.items(), key=lambda r: (-len(r[1]), r[0]))]


def _reason(text: str) -> str:
    """Without what is the type's own: the name of its class, and a line of code."""
    text = _short(text)
    own = re.match(r"transformers' \w+ has (.*?)(?: \(|: |$)", text)
    if "not used by the model" in text or ": missing" in text:
        return "a checkpoint with tensors that nothing reads, or without some that are read"
    return own[1] if own else text


def _cells(row: Row) -> tuple[str, ...]:
    found = best(row)
    code = "transformers" if row.ours is None else f"`{found.code.name}`" if found.code else "graphllm"
    result = found.state if not found.why else f"{found.state}: {_short(found.why)}"
    if row.ours is not None and row.traced is not None:
        why = f" ({_short(row.traced.why)})" if row.traced.why else ""
        result += f"; transformers' code: {row.traced.state}{why}"
    return f"`{row.model_type}`", f"`{row.architecture}`", code, result, _ordinary(row.traced)


def _ordinary(result: Result | None) -> str:
    """Their names, with times and share."""
    if result is None or result.code is None:
        return ""
    share = sum(o.share or 0 for o in result.code.ordinary)
    found = Counter[str]()
    for o in result.code.ordinary:
        found[o.what] += o.times
    named = ", ".join(f"{n} x {what}" for what, n in found.items())
    return f"{named} ({share:.0%})" if named else "none"


def _short(text: str) -> str:
    """A reason, for Markdown, without folders and the remedy that all have."""
    text = re.sub(r"/tmp/\S+", "the checkpoint", " ".join(text.split()))
    text = text.removeprefix("model_impl is 'transformers': ").partition("; docs/adding-a-model.md")[0]
    text = text.partition("; use auto")[0].partition(", so it is not served")[0][:220]
    return text.replace("](", "] (")  # code, not a link
