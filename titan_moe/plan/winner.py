"""What a search is asked for: the fastest layout that leaves some memory free, stripped of what does not pay, and a
reason for each setting in which it differs from the file.

The fastest job of a front may differ from the file in settings that gain nothing, or less than anyone can measure. So
as long as less than `WORTH` of its throughput is lost in all, settings are set back to the file's values, one or a
group at a time, the cheapest first. What is left has a reason: without it the run is slower, or does not fit. Imports
no torch.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from titan_moe.config import Config
from titan_moe.config_keys import get
from titan_moe.plan import diff, report, search
from titan_moe.plan.check import plan_problems
from titan_moe.plan.choices import Choice, changed
from titan_moe.plan.diff import Diff
from titan_moe.plan.improve import WORTH
from titan_moe.plan.job import Job
from titan_moe.plan.memory import GIB
from titan_moe.plan.report import Plan
from titan_moe.plan.search import Found
from titan_moe.plan.space import ConfigSpace, Node

HEADROOM = 0.10
"""Share of the memory that stays free, for routing that is less even than the planner takes it to be; the shipped
configurations leave as much"""

PIPELINE = (
    "parallelism.pipeline_parallel_degree",
    "parallelism.pipeline_parallel_schedule",
    "parallelism.pipeline_parallel_layers_per_stage",
    "parallelism.pipeline_parallel_microbatch_size",
    "parallelism.fsdp_reduce_every_microbatch",
    "parallelism.fsdp_reshard_after_forward",
    "training.local_batch_size",
)
ROUTE = ("moe.dispatcher", "moe.ranks_per_node", "moe.hop_chunks", "moe.te_ep_payload", "moe.overlap", "moe.experts")
RECOMPUTE = ("activation_checkpoint.mode", "activation_checkpoint.recompute", "moe.redispatch")
GROUPS = (
    PIPELINE,
    ROUTE,
    (*ROUTE, "parallelism.expert_parallel_degree"),
    RECOMPUTE,
    (*RECOMPUTE, "activation_offload.tensors"),
)
"""Settings that make sense together alone"""


@dataclass(frozen=True, kw_only=True)
class Searched:
    """The answer. `given` is the plan of the file; the others are absent if nothing fits."""

    given: Plan
    space: ConfigSpace
    limit: float
    """Bytes that a layout may need"""
    found: Found
    config: Config | None = None
    """Of the winner"""
    best: Plan | None = None
    diff: Diff | None = None
    reasons: dict[str, str] | None = None
    """By key that differs from the file"""


def run(config: Config, name: str) -> Searched:
    """Search for `config`, which errors call `name`. Raises ConfigError with all that keeps it from being planned."""
    given = diff.plain(report.job_of(config, name))
    limit = (1 - HEADROOM) * given.memory.capacity
    space = ConfigSpace(config, limit)
    given_node = Node(
        level=search.EXACT,
        job=given.job,
        choice={},
        rate=given.speed.tokens_per_s_per_gpu,
        memory=given.memory.needed,
    )
    found = search.search(space, limit, known=given_node)
    if not found.front:
        space = ConfigSpace(config, float("inf"))
        found.nearest = search.least(space)
        return Searched(given=given, space=space, limit=limit, found=found)
    best = _stripped(space, found.front[0].choice, found.front[0].rate)
    after = changed(space.config, best)
    job = space.job(best)
    assert job is not None
    plan = diff.plain(job)
    return Searched(
        given=given,
        space=space,
        limit=limit,
        found=found,
        config=after,
        best=plan,
        diff=diff.of_plans(given, plan, (config, after)),
        reasons=_reasons(space, best, plan),
    )


def _differs(space: ConfigSpace, choice: Choice) -> Choice:
    """What of a choice is not as the file has it."""
    return {key: value for key, value in choice.items() if value != get(space.config, key)}


def _set_back(space: ConfigSpace, choice: Choice) -> Iterator[Choice]:
    """The choice with one setting, or one group, as the file has it; with one element of a list less or more."""
    for keys in (*((key,) for key in choice), *GROUPS):
        if any(key in choice for key in keys):
            yield {key: value for key, value in choice.items() if key not in keys}
    for key, value in choice.items():
        if isinstance(value, list) and key in ("activation_checkpoint.recompute", "activation_offload.tensors"):
            for element in value:
                if element not in get(space.config, key):
                    yield choice | {key: [one for one in value if one != element]}


def _plan(space: ConfigSpace, choice: Choice) -> Plan | None:
    """The plan of a choice that training accepts, and that trains on the same batch."""
    if plan_problems(changed(space.config, choice)):
        return None
    job = space.job(choice)
    return None if job is None or job.global_batch_size != space.batch else diff.plain(job)


def _stripped(space: ConfigSpace, choice: Choice, rate: float) -> Choice:
    choice = _differs(space, choice)
    while True:
        tried = []
        for fewer in _set_back(space, choice):
            plan = _plan(space, fewer)
            if plan is None or plan.memory.needed > space.limit:
                continue
            if plan.speed.tokens_per_s_per_gpu >= (1 - WORTH) * rate:
                tried.append((plan.speed.tokens_per_s_per_gpu, -len(tried), fewer))
        if not tried:
            return choice
        choice = max(tried, key=lambda one: one[:2])[2]


def _reasons(space: ConfigSpace, choice: Choice, best: Plan) -> dict[str, str]:
    """By key: what the file's value would cost in the place of the winner's."""
    found = {}
    for key in choice:
        alone = _plan(space, {other: value for other, value in choice.items() if other != key})
        found[key] = "goes with the others" if alone is None else _cost(space, alone, best)
    return found


def _cost(space: ConfigSpace, plan: Plan, best: Plan) -> str:
    slower = plan.speed.tokens_per_s_per_gpu / best.speed.tokens_per_s_per_gpu - 1
    over = (plan.memory.needed - space.limit) / GIB
    return f"{slower:+.1%}" + (f", and {over:,.1f} GiB too much" if over > 0 else "")


# ---------------------------------------------------------------------------------------------------------------------
# Text


def layout(job: Job) -> str:
    """One line."""
    shards = f"HSDP {job.dp_replicate} x {job.dp_shard}" if job.dp_replicate > 1 else f"FSDP {job.dp_shard}"
    degrees = {"TP": job.tp, "CP": job.cp, "PP": job.pp, "VP": job.vp, "EP": job.ep}
    words = [shards, *(f"{name} {n}" for name, n in degrees.items() if n > 1)]
    if job.pp > 1:
        words.append(job.schedule)
    words.append(f"MBS {job.micro_batch_size}")
    words += [job.dispatcher] if job.ep > 1 else []
    words += [job.overlap] if job.overlap != "none" else []
    words += [job.precision]
    again = "+".join(sorted(job.recompute)) or job.recompute_mode
    words += [f"recompute {again}"] if again != "none" else []
    words += [f"offload {'+'.join(sorted(job.offload))}"] if job.offload else []
    words += ["sends again"] if job.redispatch else []
    if job.pp == 1 and job.microbatches > 1 and job.sharding == "fsdp":
        words.append("reduces each" if job.reduce_every_microbatch else "reduces once")
    if job.sharding == "fsdp" and job.reshard_after_forward != (job.pp == 1):
        words.append("gathers again" if job.reshard_after_forward else "gathers once")
    return ", ".join(words)


def to_text(searched: Searched, name: str, toml: str) -> str:
    """`toml`: the file of the winner, as text."""
    lines = [_counts(searched), ""]
    if searched.best is None:
        return "\n".join([*lines, *_nothing_fits(searched)])
    assert searched.diff is not None
    lines += report.summary(searched.best)
    lines += ["", f"Front: nothing else that fits is faster and smaller, down to {search.BAND:.0%} below the best"]
    rows = [(f"{node.rate:,.0f}", f"{node.memory / GIB:,.1f}", layout(node.job)) for node in searched.found.front]
    rows.insert(0, ("tokens/s per GPU", "GiB", "layout"))
    wide = [max(len(row[i]) for row in rows) for i in range(2)]
    lines += [f"  {a:>{wide[0]}}  {b:>{wide[1]}}  {c}" for a, b, c in rows]
    if not searched.diff.settings or not toml:
        lines += ["", f"{name} is that layout: nothing gains more than {WORTH:.1%}."]
    else:
        lines += ["", diff.to_text(searched.diff, (name, "the winner")), "", toml.rstrip()]
    return "\n".join(line.rstrip() for line in lines)


def _counts(searched: Searched) -> str:
    counts = searched.found.counts
    levels = ", ".join(f"{counts[level]:,} {level}" for level in search.LEVELS)
    dropped = sum(counts[why] for why in ("memory", "slow", "dominated"))
    return f"Search   looked at {levels} nodes; {dropped:,} of them bound to be too large, too slow or dominated"


def _nothing_fits(searched: Searched) -> list[str]:
    of = f"{searched.limit / GIB:,.1f} GiB ({1 - HEADROOM:.0%} of {searched.given.memory.capacity / GIB:,.1f})"
    near = searched.found.nearest
    if near is None:
        return [f"NOTHING FITS into {of}, and no layout is one that training accepts."]
    return [
        f"NOTHING FITS into {of}. Nearest:",
        f"  {near.memory / GIB:,.1f} GiB, {(near.memory - searched.limit) / GIB:,.1f} GiB too much; "
        f"{near.rate:,.0f} tokens/s per GPU: {layout(near.job)}",
        "More GPUs, a shorter sequence or a smaller batch would need less; so would, changing the numbers, "
        'optimizer.moments_dtype = "bfloat16".',
    ]


def to_json(searched: Searched) -> dict[str, Any]:
    found = {
        "limit_bytes": searched.limit,
        "counts": dict(searched.found.counts),
        "front": [
            {"tokens_per_s_per_gpu": n.rate, "needed_bytes": n.memory, "layout": layout(n.job)}
            for n in searched.found.front
        ],
    }
    if searched.best is None or searched.diff is None:
        near = searched.found.nearest
        nearest = near and {"needed_bytes": near.memory, "tokens_per_s_per_gpu": near.rate, "layout": layout(near.job)}
        return found | {"best": None, "nearest": nearest}
    return found | {
        "best": report.to_json(searched.best),
        "change": diff.to_json(searched.diff),
        "reasons": searched.reasons,
    }
