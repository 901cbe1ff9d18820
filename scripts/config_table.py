"""What the planner says of the shipped configurations: `python -m scripts.config_table` renews the line `# Plan:` in
the header of each file; planner_docs.py writes README's table of them. Tests notice when one is out of date.
"""

import re
from pathlib import Path

from titan_moe import config_file
from titan_moe.plan import report
from titan_moe.plan.job import Job
from titan_moe.plan.memory import GIB
from titan_moe.plan.report import Plan

FOLDER = Path(__file__).parents[1] / "train_configs"
LINE = re.compile(r"^# Plan: .*$", re.MULTILINE)


def planned() -> dict[Path, Plan]:
    """The plan of each shipped file that has a [plan] section."""
    configs = {path: config_file.load([str(path)]) for path in sorted(FOLDER.glob("*.toml"))}
    return {path: report.make(config, path.name) for path, config in configs.items() if config.plan.hardware}


def line(plan: Plan) -> str:
    speed, memory = plan.speed, plan.memory
    low, high = speed.band
    return (
        f"# Plan: {speed.tokens_per_s_per_gpu:,.0f} tokens/s per GPU (80 % of runs: {low:,.0f} to {high:,.0f}), "
        f"{memory.needed / GIB:,.1f} of {memory.capacity / GIB:,.1f} GiB."
    )


def layout(job: Job) -> str:
    degrees = {"HSDP": job.dp_replicate, "FSDP": job.dp_shard, "TP": job.tp, "CP": job.cp, "PP": job.pp, "EP": job.ep}
    shown = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
    return ", ".join([*shown, "MTP"] if job.num_mtp_layers else shown)


def table() -> str:
    """In Markdown."""
    lines = [
        "| file | model | GPUs | layout | sequence | memory, GiB | planned tokens/s per GPU | status |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for path, plan in planned().items():
        job, memory = plan.job, plan.memory
        cells = [f"[{path.stem}](train_configs/{path.name})", job.model_name, f"{job.gpus:,} {job.hardware.name}"]
        cells += [layout(job), f"{job.seq_len:,}", f"{memory.needed / GIB:,.1f} of {memory.capacity / GIB:,.1f}"]
        cells += [f"{plan.speed.tokens_per_s_per_gpu:,.0f}", "dry run; twin run on CPUs"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    for path, plan in planned().items():
        path.write_text(LINE.sub(line(plan), path.read_text()))
