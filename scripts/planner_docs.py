"""Writes what the planner says into README.md, docs/planner.md and docs/scaling.md, between their marks.

    python scripts/planner_docs.py            rewrite the files and the pictures
    python scripts/planner_docs.py --check    say which are out of date; exit status 1 if any is

A block is everything between `<!-- planner: NAME -->` and `<!-- end -->`. Its text comes from the code that a user
calls, so documentation cannot say what the planner does not.
"""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from scripts import config_table  # noqa: E402
from titan_moe import config_file  # noqa: E402
from titan_moe.plan import (  # noqa: E402
    constants,
    memory_runs,
    pictures,
    published,
    report,
    scaling,
    scaling_chart,
    scaling_report,
    validate,
)
from titan_moe.plan.step import tokens_per_s  # noqa: E402

FILES = ("README.md", "docs/planner.md", "docs/scaling.md")
PICTURES = ROOT / "docs" / "planner"
SCALING_PICTURE = PICTURES / "scaling.png"

COMMAND = """./run_train.sh train_configs/debug_model.toml --plan --plan.hardware=GB300 --plan.gpus=256 \\
    --model.flavor=671B --training.seq_len=4096 --training.local_batch_size=1 --training.global_batch_size=4096 \\
    --training.mixed_precision_param=bfloat16 --activation_checkpoint.mode=selective \\
    --parallelism.expert_parallel_degree=64"""


SCALING = "./run_train.sh train_configs/deepseek_v3_671b.toml --plan --plan.scale=1024,16384"


def plan(command: str = COMMAND) -> report.Plan:
    """Of a command's run."""
    words = command.replace("\\\n", " ").split()
    arguments = [word for word in words[1:] if word != "--plan"]
    return report.make(config_file.load([str(ROOT / arguments[0]), *arguments[1:]]), arguments[0])


def command() -> str:
    return f"```bash\n{COMMAND}\n```"


def whole_report() -> str:
    return f"```\n{report.to_text(plan())}\n```"


def short_report() -> str:
    """The command and its answer; the tables and the advice are left to docs/planner.md."""
    answer = report.to_text(plan()).split("\n\n")[1]
    return f"{command()}\n```\n{answer}\n```"


def validation() -> str:
    return f"```\n{validate.report(validate.validate(published.read(published.RUNS)))}\n```"


def headline() -> str:
    """The errors in one sentence."""
    found = validate.validate(published.read(published.RUNS))
    fitted, out = found.summary("error"), found.summary("left_out_error")
    assert fitted.mean is not None and fitted.largest is not None and out.mean is not None
    low, high = constants.band()
    return (
        f"Errors of tokens per second on {len(found.scored)} published runs: {fitted.mean:.1%} in the mean, "
        f"{fitted.largest:.1%} at most; {out.mean:.1%} where the fit has not seen\nthe model on that hardware; 80 % of "
        f"new runs are expected within {low:+.0%} to {high:+.0%}. Memory: three published peaks within 4 %."
    )


def scaling_shown() -> str:
    """The command, and what it adds to a plan."""
    added = "\n".join(scaling_report.text(plan(SCALING).scaling)).strip("\n")
    return f"```bash\n{SCALING}\n```\n```\n{added}\n```"


def four_times() -> str:
    """Weak scaling of the shipped files to four times their GPUs, in Markdown."""
    lines = ["| file | GPUs | layout | tokens/s per GPU kept | more time per token |", "|---|---|---|---|---|"]
    for path in config_table.planned():
        config = config_file.load([str(path)])
        assert config.plan.gpus is not None
        config.plan.scale = [4 * config.plan.gpus]
        row = scaling.scale(config)[1]
        assert isinstance(row, scaling.Scaled)
        lost = ", ".join(f"{part} {share:.1%}" for part, share in row.lost[:2])
        gpus = f"{config.plan.gpus:,} to {row.gpus:,} {row.job.hardware.name}"
        lines.append(f"| {path.stem} | {gpus} | {config_table.layout(row.job)} | {row.efficiency:.1%} | {lost} |")
    return "\n".join(lines)


def published_four_times() -> str:
    """The same of the published runs on 256 GPUs, in one sentence."""
    kept: dict[str, list[float]] = {}
    for run in published.runs_of(published.read(published.RUNS)):
        job = run.job
        if job.gpus == 256:
            four = replace(job, gpus=1024, dp_shard=4 * job.dp_shard, global_batch_size=4 * job.global_batch_size)
            kept.setdefault(job.hardware.name, []).append(tokens_per_s(four) / tokens_per_s(job))
    each = ", ".join(f"{name} {min(e):.1%} to {max(e):.1%}" for name, e in sorted(kept.items()))
    return f"Layouts of the {sum(map(len, kept.values()))} published runs on 256 GPUs, at 1,024: {each}."


def memory() -> str:
    return "\n".join(memory_runs.table())


BLOCKS: dict[str, Callable[[], str]] = {
    "command": command,
    "report": whole_report,
    "short report": short_report,
    "validation": validation,
    "headline": headline,
    "configurations": config_table.table,
    "memory": memory,
    "scaling": scaling_shown,
    "four times": four_times,
    "published four times": published_four_times,
}


def fill(text: str, mark: str = "planner", blocks: Mapping[str, Callable[[], str]] = BLOCKS) -> str:
    """`text` with every block of this mark as it should be."""

    def replaced(match: re.Match[str]) -> str:
        return f"<!-- {mark}: {match[1]} -->\n{blocks[match[1]]()}\n<!-- end -->"

    return re.sub(rf"<!-- {mark}: ([\w ]+) -->.*?<!-- end -->", replaced, text, flags=re.DOTALL)


def stale() -> list[str]:
    """Files whose blocks or pictures are not what the planner says now."""
    found = [name for name in FILES if fill((ROOT / name).read_text()) != (ROOT / name).read_text()]
    now, scaled = plan(), plan(SCALING)
    found += [SCALING_PICTURE.name] * (pictures.shown_in(SCALING_PICTURE) != scaling_chart.summary(scaled))
    return found + [path.name for path in pictures.paths(PICTURES) if pictures.shown_in(path) != pictures.summary(now)]


def main(arguments: list[str]) -> int:
    if arguments == ["--check"]:
        for name in (out := stale()):
            print(f"{name}: is not what the planner says; run python scripts/planner_docs.py", file=sys.stderr)
        return 1 if out else 0
    for name in FILES:
        (ROOT / name).write_text(fill((ROOT / name).read_text()))
    pictures.draw(plan(), str(PICTURES))
    scaling_chart.draw(plan(SCALING), SCALING_PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
