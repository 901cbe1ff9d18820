"""What `--plan --plan.scale=...` prints after the plan, as text and as data."""

from collections.abc import Iterator, Sequence
from typing import Any

from titan_moe.plan.goodput import HOUR
from titan_moe.plan.scaling import Impossible, Scaled

NAMED = 2  # parts that are named as lost
TITLES = {"weak": "Weak scaling: as many sequences per GPU", "strong": "Strong scaling: as many sequences in all"}


def text(rows: Sequence[Scaled | Impossible]) -> Iterator[str]:
    """Lines; none without rows."""
    for how, title in TITLES.items():
        if mine := [row for row in rows if row.how == how]:
            yield from ("", title)
            yield from _speeds(mine)
    if planned := [row for row in rows if isinstance(row, Scaled)]:
        yield ""
        yield from _failures(planned)


def _speeds(rows: Sequence[Scaled | Impossible]) -> Iterator[str]:
    yield (
        f"{'GPUs':>8}  {'data parallel':<17} {'sequences':>9}  {'microbatches':<12} {'s/step':>7} "
        f"{'tokens/s/GPU':>12} {'efficiency':>10} {'memory':>8}  more time per token / limited by"
    )
    for row in rows:
        if isinstance(row, Impossible):
            yield f"{row.gpus:>8,}  {row.why}"
            continue
        job, speed, memory = row.job, row.speed, row.memory
        lost = ", ".join(f"{part.replace('_', ' ')} {share:.1%}" for part, share in row.lost[:NAMED])
        cells = f"{job.microbatches} x {job.micro_batch_size}"
        yield (
            f"{row.gpus:>8,}  {data_parallel(row):<17} {job.global_batch_size:>9,}  {cells:<12} "
            f"{speed.step_seconds:>7,.2f} {speed.tokens_per_s_per_gpu:>12,.0f} {row.efficiency:>10.1%} "
            f"{'fits' if memory.fits else 'TOO MUCH':>8}  {f'{lost} / ' if lost else ''}{speed.limit}"
        )


def data_parallel(row: Scaled) -> str:
    job = row.job
    shards = f"{job.dp_replicate:,} x FSDP {job.dp_shard:,}" if job.dp_replicate > 1 else f"FSDP {job.dp_shard:,}"
    return f"{shards}, CP {job.cp}" if job.cp > 1 else shards


def _failures(rows: Sequence[Scaled]) -> Iterator[str]:
    yield "Failures: the best interval between checkpoints, and what is left (goodput)"
    yield (
        f"{'':<6} {'GPUs':>8} {'fail every':>10} {'save holds up':>13} {'whole after':>11} {'restart':>8}  "
        f"{'best interval':<24} {'goodput':>7} {'as set':>7} {'tokens kept per day':>19}"
    )
    for row in rows:
        f = row.failures
        best = f"{f.steps:,} steps, {f.seconds / 60:,.3g} min"
        own = "-" if f.own_goodput is None else f"{f.own_goodput:.1%}"
        yield (
            f"{row.how:<6} {row.gpus:>8,} {f.saving.mtbf / HOUR:>8,.1f} h {f.saving.held_up:>11,.1f} s "
            f"{f.saving.held_up + f.saving.written:>9,.0f} s {f.saving.restart:>6,.0f} s  {best:<24} "
            f"{f.goodput:>7.1%} {own:>7} {row.tokens_per_day / 1e9:>17,.1f} B"
        )


def data(rows: Sequence[Scaled | Impossible]) -> dict[str, Any]:
    """The same as data: {"scaling": [...]}, or nothing without rows. Seconds and shares."""
    return {"scaling": [_row(row) for row in rows]} if rows else {}


def _row(row: Scaled | Impossible) -> dict[str, Any]:
    found: dict[str, Any] = {"how": row.how, "gpus": row.gpus}
    if isinstance(row, Impossible):
        return {**found, "impossible": row.why}
    job, f = row.job, row.failures
    return {
        **found,
        "layout": {name: getattr(job, name) for name in ("dp_replicate", "dp_shard", "tp", "cp", "pp", "vp", "ep")},
        "global_batch_size": job.global_batch_size,
        "micro_batch_size": job.micro_batch_size,
        "step_seconds": row.speed.step_seconds,
        "tokens_per_s_per_gpu": row.speed.tokens_per_s_per_gpu,
        "efficiency": row.efficiency,
        "fits": row.memory.fits,
        "limit": row.speed.limit,
        "more_time_per_token": dict(row.lost),
        "seconds_between_failures": f.saving.mtbf,
        "seconds_held_up_by_a_save": f.saving.held_up,
        "seconds_until_it_is_whole": f.saving.held_up + f.saving.written,
        "restart_seconds": f.saving.restart,
        "best_checkpoint_interval_steps": f.steps,
        "best_checkpoint_interval_seconds": f.seconds,
        "goodput": f.goodput,
        "goodput_as_set": f.own_goodput,
        "tokens_kept_per_day": row.tokens_per_day,
    }
