"""What a dry run prints: bytes by kind and collectives, beside the planner's figures for the same rank."""

from dataclasses import dataclass, replace

from titan_moe.config import Config
from titan_moe.dry_run.check import left_out
from titan_moe.dry_run.collectives import Collectives
from titan_moe.dry_run.ledger import ACTIVATIONS, GRADIENTS, KINDS, OPTIMIZER, PARAMETERS, WORKING, Ledger
from titan_moe.plan import hardware, memory
from titan_moe.plan.job import Job

MIB = 2**20
STATES = (PARAMETERS, GRADIENTS, OPTIMIZER, ACTIVATIONS)


@dataclass(frozen=True, kw_only=True)
class DryRun:
    config: Config
    """As asked for, with all microbatches of a step"""
    job: Job
    """The same for the planner"""
    rank: int
    place: dict[str, int]
    """The rank's place along each mesh axis of more than one rank"""
    microbatches: int
    """That were run"""
    ledger: Ledger
    collectives: Collectives


def job_of(config: Config, world_size: int) -> Job:
    """For the planner, which needs some hardware: what a rank holds does not depend on it. As a dry run, it keeps on
    the device what would be offloaded."""
    job = Job.from_config(config, world_size, hardware.resolve(config.plan.hardware or "GB300"))
    return replace(job, offload=frozenset())


def to_text(run: DryRun) -> str:
    return "\n".join([*_heading(run), "", *_states(run), "", *_peak(run), "", *_collectives(run), "", *_notes(run)])


def _heading(run: DryRun) -> list[str]:
    job, axes = run.job, ", ".join(f"{axis} {place}" for axis, place in run.place.items())
    lines = [
        f"Dry run  {job.model_name}, rank {run.rank} of {job.gpus:,}{f': {axes}' if axes else ''}",
        f"         {run.microbatches} of {job.microbatches} microbatches of {job.micro_batch_size} x {job.seq_len:,} "
        "tokens, one optimizer step",
    ]
    if job.pp > 1:
        sizes = [str(stage.layers) for stage in job.stages]
        own = ", ".join(f"{i} ({sizes[i]} layers)" for i in job.stage_indices(run.place["pp"]))
        lines.append(f"         {job.schedule}, stages of this rank: {own}")
    return lines


def planned_at_peak(job: Job, pp_rank: int) -> dict[str, float]:
    """The planner's bytes by the ledger's kinds."""
    sums: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for entry in memory.entries_of_rank(job, pp_rank):
        if entry.group != memory.OUTSIDE:
            sums[WORKING if entry.group == "dispatcher" else entry.group] += entry.size
    return sums


def planned_states(job: Job, pp_rank: int) -> dict[str, float]:
    """The planner's bytes of what there is most of at one time or another."""
    sums = {entry.group: entry.size for entry in memory.states(job, pp_rank)}
    return sums | {ACTIVATIONS: sum(entry.size for entry in memory.activations_held(job, pp_rank))}


def _states(run: DryRun) -> list[str]:
    planned = planned_states(run.job, run.place.get("pp", 0))
    lines = [_line(kind, run.ledger.most(kind), planned[kind]) for kind in STATES]
    return [f"{'Most at any time':26}{'dry run, MiB':>14}{'planner, MiB':>14}{'planner is':>12}", *lines]


def _peak(run: DryRun) -> list[str]:
    found, planned = run.ledger.at_peak(), planned_at_peak(run.job, run.place.get("pp", 0))
    kinds = [kind for kind in KINDS if found[kind] or planned[kind]]
    # Not compared one by one: the planner's peak may be at another moment.
    lines = [_line(kind, found[kind], planned[kind], compared=False) for kind in kinds]
    lines = ["At the peak", *lines, _line("together", sum(found.values()), sum(planned.values()))]
    return lines


def _line(name: str, found: float, planned: float, *, compared: bool = True) -> str:
    off = f"{planned / found - 1:+.1%}" if compared and found else ""
    return f"  {name:24}{found / MIB:14,.1f}{planned / MIB:14,.1f}{off:>12}".rstrip()


def _collectives(run: DryRun) -> list[str]:
    lines = [f"{'Collectives':20}{'along':>20}{'ranks':>8}{'calls':>8}{'MiB':>14}"]
    counts = sorted(run.collectives.counts.items(), key=lambda item: -item[1][1])
    for (op, axis, ranks), (calls, size) in counts:
        lines.append(f"  {op:18}{axis:>20}{ranks:8,}{calls:8,}{size / MIB:14,.1f}")
    return lines


def _notes(run: DryRun) -> list[str]:
    return [
        "Every expert gets the mean number of tokens. Bytes are those that tensors ask for: without the allocator's",
        "rounding and fragmentation, without CUDA context, NCCL and cuBLAS, and without what a kernel has for itself.",
        "A collective's MiB are of the larger of what goes in and comes out, of all its calls in the microbatches run.",
        f"Not run: {', '.join(left_out(run.config))}.",
    ]
