"""Writes into docs/planner_search.md and README.md, between their marks, what searches find: for one of the shipped
configurations and for published runs. Takes a minute or two.

    python scripts/search_docs.py            rewrite the pages
    python scripts/search_docs.py --check    say whether one is out of date; exit status 1 if it is
"""

import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts import planner_docs  # noqa: E402
from titan_moe import config_file  # noqa: E402
from titan_moe.plan import diff, published, published_space, winner, winner_toml  # noqa: E402
from titan_moe.plan.published_space import Compared  # noqa: E402

PAGES = (ROOT / "docs" / "planner_search.md", ROOT / "README.md")
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


@cache
def report() -> str:
    found = winner.run(config_file.load([str(ROOT / EXAMPLE)]), EXAMPLE)
    return winner.to_text(found, EXAMPLE, winner_toml.text(found, str(ROOT / EXAMPLE), ROOT))


def example() -> str:
    return f"```\n{report()}\n```"


def changes() -> str:
    """What of the report says which settings change, and what that gains."""
    settings, rest = report().split("\nSettings\n")[1].split("\n\n", 1)
    return f"```\n{settings}\n\n{rest.splitlines()[0]}\n```"


BLOCKS: dict[str, Callable[[], str]] = {"runs": runs, "beyond": beyond, "example": example, "changes": changes}


def main(arguments: list[str]) -> int:
    stale = 0
    for page in PAGES:
        before = page.read_text()
        after = planner_docs.fill(before, "search", BLOCKS)
        if arguments != ["--check"]:
            page.write_text(after)
        elif after != before:
            stale = 1
            print(f"{page.name}: is not what searches find; run python scripts/search_docs.py", file=sys.stderr)
    return stale


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
