"""What a profile needs. See config_check.py. No torch."""

from collections.abc import Set

from titan_moe.config import Config


def check(config: Config, world_size: int, unsound: Set[str]) -> list[str]:
    """Why the [profiling] section of `config` cannot be followed."""
    chosen, steps, found = config.profiling, config.training.steps, []
    if chosen.step is not None and chosen.step > steps and not unsound & {"training.steps", "profiling.step"}:
        found.append(
            f"profiling.step = {chosen.step}: is behind the last step, training.steps = {steps}; choose one of 1 .. "
            f"{steps}, or train longer"
        )
    needed = chosen.profiler_warmup + chosen.profiler_active
    if chosen.enable_profiling and needed > chosen.profile_freq:
        found.append(
            f"profiling.profile_freq = {chosen.profile_freq}: profiler_warmup = {chosen.profiler_warmup} and "
            f"profiler_active = {chosen.profiler_active} steps, {needed}, must fit between two traces; raise the one "
            "or lower the others"
        )
    if strangers := [rank for rank in chosen.ranks if not 0 <= rank < world_size]:
        found.append(
            f"profiling.ranks = {chosen.ranks}: {', '.join(map(str, strangers))} is not among the ranks 0 .. "
            f"{world_size - 1} of this run; leave it out for all"
        )
    return found
