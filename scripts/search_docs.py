"""Writes into docs/planner_search.md, between its marks, what searches find, for a shipped configuration and
for published runs. Takes a minute or two.

    python scripts/search_docs.py            rewrite the page
    python scripts/search_docs.py --check    say whether it is out of date; exit status 1 if it is
"""

import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from titan_moe import config_file  # noqa: E402
from titan_moe.plan import diff, published, published_space, winner, winner_toml  # noqa: E402
from titan_moe.plan.published_space import Compared  # noqa: E402

PAGE = ROOT / "docs" / "planner_search.md"
HARDWARE = ("H800", "GB200", "GB300")
EXAMPLE = "train_configs/deepseek_v3_671b.toml"
WORTH_A_TABLE = 0.05


@cache
def compared() -> list[Compared]:
    runs = published.runs_of(published.read(published.RUNS))
    return [published_space.compare(run) for run in runs if run.job.hardware.name in HARDWARE]


def runs() -> str:
    lines = [
        "| line | run | release | published layout | tokens/s per GPU, predicted | best layout | best over published |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in compared():
        job, same = each.run.job, each.best is each.given
        cells = [str(each.run.row.line), f"{job.model_name}, {job.gpus:,} {job.hardware.name}", job.release]
        cells += [winner.layout(job), f"{each.given.rate:,.0f}"]
        cells += ["the same", "0"] if same else [winner.layout(each.best.job), f"{each.gain:+.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def beyond() -> str:
    """Term by term, where a published layout is further from the best."""
    found = []
    for each in compared():
        if each.gain > WORTH_A_TABLE:
            terms = diff.of_plans(diff.plain(each.given.job), diff.plain(each.best.job))
            found.append(f"```\n{diff.to_text(terms, (f'line {each.run.row.line}', 'the best'))}\n```")
    return "\n".join(found) or f"None is more than {WORTH_A_TABLE:.0%} below the best."


def example() -> str:
    found = winner.run(config_file.load([str(ROOT / EXAMPLE)]), EXAMPLE)
    toml = winner_toml.text(found, str(ROOT / EXAMPLE), ROOT)
    return f"```\n{winner.to_text(found, EXAMPLE, toml)}\n```"


BLOCKS: dict[str, Callable[[], str]] = {"runs": runs, "beyond": beyond, "example": example}


def fill(text: str) -> str:
    def replaced(match: re.Match[str]) -> str:
        return f"<!-- search: {match[1]} -->\n{BLOCKS[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- search: ([\w ]+) -->.*?<!-- end -->", replaced, text, flags=re.DOTALL)


def main(arguments: list[str]) -> int:
    before = PAGE.read_text()
    after = fill(before)
    if arguments == ["--check"]:
        if after != before:
            print(f"{PAGE.name}: is not what searches find; run python scripts/search_docs.py", file=sys.stderr)
        return int(after != before)
    PAGE.write_text(after)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
