"""A machine of CPUs, learnt from runs on it: how long a step of another job takes there.

A phase of a step takes

    crowd x (factor x (FLOPs / F + bytes / B + operations x o) + bytes from other ranks x l)

F, B and o are the machine's: three numbers for all phases of all runs, by least squares, none of them negative. They
tell how a phase grows: with arithmetic, with memory traffic or not at all. `factor` is a phase's own: what the counts
of work.py miss in it. l is the link's, of dispatch and combine and of FSDP separately: what is left in a run with
several ranks. A run on one rank tells the two apart; without one all of it counts as the link's.

Ranks share cores: crowd = max(1, ranks x threads / cores). The scheduler gives each its part, and what one waits for
the others another one uses. That is a model of a machine that does nothing else.
"""

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from titan_moe.plan import work
from titan_moe.plan.calibrate import Measured
from titan_moe.plan.fit import solve
from titan_moe.plan.hardware import HARDWARE
from titan_moe.plan.job import Job
from titan_moe.plan.work import PHASES, Work

ANY = HARDWARE["H100"]  # a Job has to name a GPU; nothing here asks it


@dataclass(frozen=True, kw_only=True)
class Machine:
    """See above. Seconds for one unit each."""

    cores: int
    threads: int
    """Of each rank"""
    flop: float
    byte: float
    operation: float
    factors: Mapping[str, float]
    links: Mapping[str, float]
    """Seconds per byte, of phases with bytes on the wire in some run"""

    def crowd(self, ranks: int) -> float:
        return crowd(ranks, self.threads, self.cores)

    def computing(self, done: Work) -> float:
        return done.flops * self.flop + done.moved * self.byte + done.operations * self.operation

    def predict(self, job: Job) -> dict[str, float]:
        """Seconds of a step by phase. Raises ValueError for a job whose work is not counted, or whose ranks talk where
        no run's did."""
        found = {}
        for phase, done in work.of_job(job).items():
            link = 0.0
            if done.wire:
                if not self.links:
                    raise ValueError(
                        f"{job.gpus} ranks: no run had ranks that talk to each other; calibrate from one on two, too"
                    )
                link = self.links.get(phase, max(self.links.values()))
            seconds = self.factors[phase] * self.computing(done) + link * done.wire
            found[phase] = self.crowd(job.gpus) * seconds
        return found


def crowd(ranks: int, threads: int, cores: int) -> float:
    """How many times as long all takes on ranks that share cores."""
    return max(1.0, ranks * threads / cores)


def job_of(run: Measured) -> Job:
    return Job.from_config(run.config, run.ranks, ANY)


def learn(runs: Sequence[Measured]) -> Machine:
    """The machine that these runs were on. Raises ValueError for a run whose work is not counted."""
    cores, threads = runs[0].cores, runs[0].threads
    crowds = [crowd(run.ranks, threads, cores) for run in runs]
    done = []
    for run in runs:
        try:
            done.append(work.of_job(job_of(run)))
        except ValueError as error:
            raise ValueError(f"{run.folder}: {error}") from error
    seen = [
        {phase: sum(run.phases.get(name, 0.0) for name in names) / shared for phase, names in PHASES.items()}
        for run, shared in zip(runs, crowds)
    ]
    alone = [
        (each[phase], of[phase])
        for of, each in zip(done, seen)
        for phase in PHASES
        if each[phase] > 0 and not of[phase].wire
    ]
    flop, byte, operation = _rates(alone)
    rough = Machine(cores=cores, threads=threads, flop=flop, byte=byte, operation=operation, factors={}, links={})
    factors, links = {}, {}
    for phase in PHASES:
        ratios = [
            each[phase] / rough.computing(of[phase])
            for of, each in zip(done, seen)
            if each[phase] > 0 and rough.computing(of[phase]) > 0 and not of[phase].wire
        ]
        factors[phase] = statistics.geometric_mean(ratios) if ratios else 1.0
        left = [
            max(each[phase] - factors[phase] * rough.computing(of[phase]), 0.0) / of[phase].wire
            for of, each in zip(done, seen)
            if of[phase].wire
        ]
        if left:
            links[phase] = statistics.fmean(left)
    return Machine(
        cores=cores, threads=threads, flop=flop, byte=byte, operation=operation, factors=factors, links=links
    )


def _rates(seen: Sequence[tuple[float, Work]]) -> tuple[float, float, float]:
    """Seconds per FLOP, byte and operation that make the squares of errors smallest, none negative: of all sets of
    units with positive rates the one that fits best. Errors in seconds, so that long phases count most."""
    columns, seconds = [[done.units[i] for _, done in seen] for i in range(3)], [s for s, _ in seen]
    best, least = (0.0, 0.0, 0.0), math.inf
    for count in (3, 2, 1):
        for chosen in itertools.combinations(range(3), count):
            scales = [max(columns[i], default=0.0) for i in chosen]
            if not all(scales):
                continue
            scaled = [[x / scale for x in columns[i]] for i, scale in zip(chosen, scales)]
            try:
                found = solve([[_dot(a, b) for b in scaled] for a in scaled], [_dot(a, seconds) for a in scaled])
            except ZeroDivisionError:  # two units grow alike
                continue
            misfit = sum((_dot(found, row) - s) ** 2 for row, s in zip(zip(*scaled), seconds))
            if min(found) >= 0 and misfit < least:
                rates = dict(zip(chosen, (f / scale for f, scale in zip(found, scales))))
                best, least = (rates.get(0, 0.0), rates.get(1, 0.0), rates.get(2, 0.0)), misfit
    return best


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b))
