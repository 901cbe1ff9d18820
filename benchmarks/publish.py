"""The tables of docs/benchmarks.md and README's headline, made from the records of a run.

README has the headline where its two marks stand; without them it is left alone.
"""

from pathlib import Path

from benchmarks import harness
from benchmarks.harness import Record

RESULTS = harness.ROOT / "benchmarks" / "results.json"
PAGE, README = harness.ROOT / "docs" / "benchmarks.md", harness.ROOT / "README.md"
BEGIN, END = "<!-- made by benchmarks/run.py --docs -->", "<!-- end of what is made -->"
HEADLINE = {  # what README says: suite, how the case begins, metric, against what
    "MoE layer, forward + backward, T 2,048 D 256": ("layer", "debug-2048", "forward + backward", "torchtitan"),
    "the same, bytes kept for backward": ("layer", "debug-2048", "kept for backward", "torchtitan"),
    "the first against transformers": (
        "layer",
        "debug-2048",
        "forward + backward",
        "transformers, grouped_mm",
    ),
    "training step, debug model, 1 x 512 tokens": ("step", "debug, 1 x 512", "whole step", "torchtitan"),
    "training step, debug model, 1 x 2,048 tokens": ("step", "debug, 1 x 2048", "whole step", "torchtitan"),
    "training step, 50M parameters, 1 x 1,024 tokens": ("step", "50M", "whole step", "torchtitan"),
    "command to first step": ("step", "debug", "command to first step", "torchtitan"),
    "bytes of rows to other ranks, 4 ranks": ("dispatch", "4 ranks, D 1024, dedup", "payload each way", "alltoall"),
}


def runs(path: Path) -> dict[tuple[str, str, str], list[Record]]:
    """Records by (machine, what it ran, commit)."""
    found: dict[tuple[str, str, str], list[Record]] = {}
    for record, about in harness.read(path):
        ran = f"{about['threads']} threads, {about['versions']}"
        found.setdefault((about["machine"], ran, about["commit"]), []).append(record)
    return found


def tables(path: Path) -> str:
    """All records as Markdown: for each machine and commit what was aimed at, then a table for each suite."""
    parts = []
    for (machine, ran, commit), records in runs(path).items():
        parts.append(f"## {machine}\n\nCommit {commit}; {ran}.\n\n### Targets\n\n{targets(records)}")
        for suite in dict.fromkeys(record.suite for record in records):
            parts.append(f"### {suite}\n\n{harness.table(r for r in records if r.suite == suite)}")
    return "\n\n".join(parts)


def targets(records: list[Record]) -> str:
    rows = [["suite", "case", "metric", "target", "reached", ""], ["---"] * 6]
    for r in records:
        if r.target:
            reached = harness.number(getattr(r, r.target.split()[0]))
            rows.append([r.suite, r.case, r.metric, r.target, reached, "met" if r.met else "**missed**"])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def headline(path: Path) -> str:
    """A few ratios for README, of the first machine in the file."""
    (machine, _, commit), records = next(iter(runs(path).items()))
    lines = ["| | ours | against | | times better (quartiles) |", "|---|---|---|---|---|"]
    for label, (suite, case, metric, against) in HEADLINE.items():
        found = [r for r in records if (r.suite, r.metric, r.against) == (suite, metric, against)]
        found = [r for r in found if r.case.startswith(case) and r.ratio is not None]
        if not found:
            continue
        r = found[0]
        quartiles = "" if r.low is None else f" ({r.low:.2f} - {r.high:.2f})"
        value, baseline = (f"{harness.number(v)} {r.unit}" for v in (r.value, r.baseline))
        lines.append(f"| {label} | {value} | {against} | {baseline} | {r.ratio:.2f}{quartiles} |")
    return "\n".join([*lines, "", f"{machine}; commit {commit}. All suites: [docs/benchmarks.md](docs/benchmarks.md)."])


def put(page: Path, text: str) -> bool:
    """Put `text` between the marks of a page; False without marks."""
    before, begin, rest = page.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        return False
    page.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}", encoding="utf-8")
    return True


def rewrite(path: Path) -> None:
    assert put(PAGE, tables(path)), f"{PAGE} has lost the marks between which its tables stand"
    put(README, headline(path))
