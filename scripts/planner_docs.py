"""Writes what the planner says into README.md and docs/planner.md, between their marks.

    python scripts/planner_docs.py            rewrite both files and the two pictures
    python scripts/planner_docs.py --check    say which are out of date; exit status 1 if any is

A block is everything between `<!-- planner: NAME -->` and `<!-- end -->`. Its text comes from the code that a user
calls, so documentation cannot say what the planner does not.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from titan_moe import config_file  # noqa: E402
from titan_moe.plan import memory_runs, pictures, published, report, validate  # noqa: E402

FILES = ("README.md", "docs/planner.md")
PICTURES = ROOT / "docs" / "planner"

COMMAND = """./run_train.sh train_configs/debug_model.toml --plan --plan.hardware=GB300 --plan.gpus=256 \\
    --model.flavor=671B --training.seq_len=4096 --training.local_batch_size=1 --training.global_batch_size=4096 \\
    --parallelism.expert_parallel_degree=64 --activation_checkpoint.mode=selective"""


def plan() -> report.Plan:
    """Of COMMAND's run."""
    words = COMMAND.replace("\\\n", " ").split()
    arguments = [word for word in words[1:] if word != "--plan"]
    return report.make(config_file.load([str(ROOT / arguments[0]), *arguments[1:]]), arguments[0])


def command() -> str:
    return f"```bash\n{COMMAND}\n```"


def whole_report() -> str:
    return f"```\n{report.to_text(plan())}\n```"


def short_report() -> str:
    """The answer and the advice; the tables in between are left to docs/planner.md."""
    answer, _, rest = report.to_text(plan()).partition("\n\nStep time")
    return f"```\n{answer}\n...\n{rest.rpartition(chr(10) * 2)[2]}\n```"


def validation() -> str:
    return f"```\n{validate.report(validate.validate(published.read(published.RUNS)))}\n```"


def headline() -> str:
    """Errors by hardware, and the three ways of counting them."""
    found = validate.validate(published.read(published.RUNS))
    lines = [
        "| hardware | runs | mean error | largest | with its own runs left out of the fit |",
        "|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(each.run.job.hardware.name for each in found.scored):
        runs = [each for each in found.scored if each.run.job.hardware.name == name]
        errors, left_out = ([abs(getattr(each, which)) for each in runs] for which in ("error", "left_out_error"))
        mean, out = sum(errors) / len(runs), sum(left_out) / len(runs)
        lines.append(f"| {name} | {len(runs)} | {mean:.1%} | {max(errors):.1%} | {out:.1%} |")
    for which, name in (("error", "all"), ("tables_only_error", "all, nothing fitted")):
        s = found.summary(which)
        out = found.summary("left_out_error").mean if which == "error" else None
        lines.append(
            f"| {name} | {len(found.scored)} | {s.mean:.1%} | {s.largest:.1%} | {'' if out is None else f'{out:.1%}'} |"
        )
    return "\n".join(lines)


def memory() -> str:
    return "\n".join(memory_runs.table())


BLOCKS: dict[str, Callable[[], str]] = {
    "command": command,
    "report": whole_report,
    "short report": short_report,
    "validation": validation,
    "headline": headline,
    "memory": memory,
}


def fill(text: str) -> str:
    """`text` with every marked block as it should be."""

    def replaced(match: re.Match[str]) -> str:
        return f"<!-- planner: {match[1]} -->\n{BLOCKS[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- planner: ([\w ]+) -->.*?<!-- end -->", replaced, text, flags=re.DOTALL)


def stale() -> list[str]:
    """Files whose blocks or pictures are not what the planner says now."""
    found = [name for name in FILES if fill((ROOT / name).read_text()) != (ROOT / name).read_text()]
    now = plan()
    return found + [path.name for path in pictures.paths(PICTURES) if pictures.shown_in(path) != pictures.summary(now)]


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        for name in (out := stale()):
            print(f"{name}: is not what the planner says; run python scripts/planner_docs.py", file=sys.stderr)
        return 1 if out else 0
    for name in FILES:
        (ROOT / name).write_text(fill((ROOT / name).read_text()))
    pictures.draw(plan(), str(PICTURES))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
