"""What keeps a configuration from being planned: all that training would refuse, and what only the planner needs."""

from titan_moe.config import Config
from titan_moe.config_check import check
from titan_moe.config_print import literal
from titan_moe.plan import hardware
from titan_moe.precision.recipes import RECIPES


def plan_problems(config: Config) -> list[str]:
    """Every problem, each with its remedy: those of a training on plan.gpus GPUs in the words of training."""
    plan, found = config.plan, []
    if not plan.hardware:
        found.append(f"plan.hardware: is not set; choose one of {', '.join(hardware.HARDWARE)}, {hardware.REMEDY}")
    else:
        found += _rates(config)
    if config.training.mixed_precision_param != "bfloat16":
        found.append(
            f'training.mixed_precision_param = "{config.training.mixed_precision_param}": has no rates in the planner; '
            'plan with "bfloat16"'
        )
    if config.moe.recv_buffer != "exact" and config.parallelism.expert_parallel_degree > 1:
        found.append(
            f"moe.recv_buffer = {literal(config.moe.recv_buffer)}: the planner counts the rows that arrive, not room "
            'for more of them; plan with "exact"'
        )
    if config.precision.backend == "emulated" and config.precision.recipe in RECIPES:
        found.append(
            'precision.backend = "emulated": saves no time, and what it costs is not in the planner; plan with "auto"'
        )
    if min(plan.scale, default=1) < 1:
        found.append(f"plan.scale = {literal(plan.scale)}: must be numbers of GPUs, at least 1")
    found += _questions(config)
    if plan.gpus is None:
        found.append("plan.gpus: is not set; give the number of GPUs of the whole job, as in --plan.gpus=256")
        return found
    return found + check(config, plan.gpus)


def _questions(config: Config) -> list[str]:
    """Whether one thing is asked at a time: a search and a comparison are of the tables' predictions on plan.gpus."""
    plan = config.plan
    asked = {"plan.search": plan.search, "plan.diff": bool(plan.diff)}
    chosen = [key for key, is_asked in asked.items() if is_asked]
    others = {"plan.calibrate": plan.calibrate, "plan.scale": plan.scale, "plan.png": plan.png}
    beside = chosen[1:] + [key for key, value in others.items() if value]
    if chosen and beside:
        return [f"{chosen[0]}: answers without {' and '.join(beside)}; leave {'them' if beside[1:] else 'it'} out"]
    needs = {"plan.search_also": plan.search_also, "plan.toml": plan.toml}
    given = [] if plan.search else [key for key, value in needs.items() if value]
    return [f"{key}: is for a search; set plan.search, or leave it out" for key in given]


def _rates(config: Config) -> list[str]:
    """Whether the planner has rates of the GPU, and in the precision of the run."""
    try:
        planned = hardware.resolve(config.plan.hardware)
    except ValueError as error:
        return [f"plan.{error}"]
    recipe = config.precision.recipe
    if recipe not in RECIPES or recipe in planned.precisions:
        return []
    return [
        f'precision.recipe = "{recipe}": plan.hardware {planned.name} has no rate of it, so that it would be emulated, '
        f"which saves no time and is not in the planner; {planned.name} has {', '.join(planned.precisions)}"
    ]
