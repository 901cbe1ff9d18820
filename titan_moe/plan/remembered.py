"""Results remembered by the fields of a job that they follow from: a search asks for the same layer under many meshes,
each of which is another job. Imports no torch."""

from collections.abc import Callable
from functools import wraps
from operator import attrgetter
from typing import Any, Concatenate, ParamSpec, TypeVar

from titan_moe.plan.job import Job

MOST = 1 << 17
"""Results of one function; then it begins anew"""
P = ParamSpec("P")
R = TypeVar("R")
OfJob = Callable[Concatenate[Job, P], R]


def by(names: tuple[str, ...]) -> Callable[[OfJob[P, R]], OfJob[P, R]]:
    """For a function that reads of its job `names` and nothing else. Its other arguments count whole, by position."""
    read = attrgetter(*names)

    def decorate(function: OfJob[P, R]) -> OfJob[P, R]:
        found: dict[tuple[Any, ...], R] = {}

        @wraps(function)
        def remembered(job: Job, *others: P.args, **named: P.kwargs) -> R:
            assert not named
            key = (read(job), *others)
            try:
                return found[key]
            except KeyError:  # hashing a job's sizes takes longest, so once if it is there
                if len(found) >= MOST:
                    found.clear()
                result = found[key] = function(job, *others, **named)
                return result

        return remembered

    return decorate
