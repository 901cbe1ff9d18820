"""Which combinations of parallelism work: `python -m scripts.support_table` renews the tables in docs/parallelism.md.

Nothing in them is written by hand. Whether a combination works is what `config_check.check` says about a configuration
that has it, why not is its sentence, and a tested one is a training that tests/distributed/test_meshes.py compares with
one rank's: losses and the gradient of every parameter. So a table can be out of date, which
tests/test_parallelism_doc.py notices, but not wrong.
"""

import copy
from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.distributed.cases import cases
from tests.distributed.harness import SMALL_FP32
from tests.distributed.test_meshes import COMPARED
from titan_moe import config_file
from titan_moe.config import Config
from titan_moe.config_check import check
from titan_moe.mesh_check import data_parallel_degree, gradient_accumulation_steps

PAGE = Path("docs/parallelism.md")
BASE = config_file.load(["train_configs/debug_model.toml"])
SCHEDULES = ("1F1B", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
RECOMPUTE = ("none", "selective", "full")

DEGREE = {
    "HSDP": "parallelism.data_parallel_replicate_degree",
    "EP": "parallelism.expert_parallel_degree",
    "TP": "parallelism.tensor_parallel_degree",
    "CP": "parallelism.context_parallel_degree",
}
PP, SCHEDULE = "parallelism.pipeline_parallel_degree", "parallelism.pipeline_parallel_schedule"
FEATURES: dict[str, dict[str, Any]] = {
    "FSDP2": {"parallelism.data_parallel_shard_degree": 2},
    **{name: {degree: 2} for name, degree in DEGREE.items()},
    **{name: {PP: 2, SCHEDULE: name} for name in SCHEDULES},
    "MTP": {"model.num_mtp_layers": 1},
    **{f"recompute {mode}": {"activation_checkpoint.mode": mode} for mode in RECOMPUTE},
    "recompute parts": {"activation_checkpoint.mode": "none", "activation_checkpoint.recompute": ["norms", "swiglu"]},
    "accumulation": {"training.global_batch_size": 2},  # times what the other features make of a local one
    "compile": {"compile.enable": True},
}
"""What a configuration has, and how one says so"""

ONE_OF = (set(SCHEDULES), {name for name in FEATURES if name.startswith("recompute")})
"""Features that exclude each other, mostly as values of one key"""


def can_meet(features: Iterable[str]) -> bool:
    """Whether one configuration can say all of them."""
    return all(len(group & set(features)) <= 1 for group in ONE_OF)


def refusals(features: Iterable[str]) -> list[str]:
    """What the checks say about a debug model with these features; empty when it would train."""
    features, config = set(features), copy.deepcopy(BASE)
    shard = 2 if "FSDP2" in features or ("EP" in features and not features & {"TP", "CP"}) else 1  # EP needs its ranks
    replicate = 2 if "HSDP" in features else 1
    config.parallelism.data_parallel_shard_degree = shard
    for path, value in [setting for feature in features for setting in FEATURES[feature].items()]:
        section, _, key = path.rpartition(".")
        setattr(attrgetter(section)(config), key, value)
    if "accumulation" in features:
        config.training.global_batch_size *= config.training.local_batch_size * replicate * shard
    return check(
        config, shard * replicate * 2 ** len(features & {"TP", "CP"}) * config.parallelism.pipeline_parallel_degree
    )


def features_of(config: Config, world_size: int) -> set[str]:
    """What a configuration has of `FEATURES`."""
    p, ac = config.parallelism, config.activation_checkpoint
    _, shard = data_parallel_degree(config, world_size)
    has = {
        "FSDP2": shard > 1,
        **{name: attrgetter(degree)(config) > 1 for name, degree in DEGREE.items()},
        p.pipeline_parallel_schedule: p.pipeline_parallel_degree > 1,
        "MTP": bool(config.model.num_mtp_layers),
        f"recompute {'parts' if ac.recompute else ac.mode}": True,
        "accumulation": gradient_accumulation_steps(config, world_size) > 1,
        "compile": config.compile.enable,
    }
    return {feature for feature, there in has.items() if there}


def compared() -> dict[tuple[int, str], set[str]]:
    """(ranks, case) -> features of every training that is compared with one rank's, those with the fewest first."""
    with TemporaryDirectory() as out:  # where the cases of an edited train.py lie
        argvs = {ranks: cases(ranks, Path(out)) for ranks in {ranks for ranks, _, _ in COMPARED}}
    found = {
        (ranks, name): features_of(config_file.load([*SMALL_FP32, *argvs[ranks][name].argv]), ranks)
        for ranks, name, _ in COMPARED
    }
    return dict(sorted(found.items(), key=lambda item: len(item[1])))


def tables() -> str:
    """The generated part of the page."""
    tested, sentences = compared(), list[str]()
    numbers = {case: f"c{i}" for i, case in enumerate(tested, start=1)}

    def cell(row: str, column: str) -> str:
        if not can_meet({row, column}):
            return ""
        if problems := refusals({row, column}):
            sentences.extend(problem for problem in problems if problem not in sentences)
            return " ".join(f"**r{sentences.index(problem) + 1}**" for problem in problems)
        return next((numbers[case] for case, features in tested.items() if {row, column} <= features), "untested")

    names = list(FEATURES)
    rows = [
        f"| {row} | {' | '.join(cell(row, column) for column in names[: i + 1])}{' |' * (len(names) - i)}"
        for i, row in enumerate(names)
    ]
    lines = [
        f"| | {' | '.join(names)} |",
        "|---" * (len(names) + 1) + "|",
        *rows,
        "",
        "Refused:",
        "",
        *(f"- **r{i}** {sentence}" for i, sentence in enumerate(sentences, start=1)),
        "",
        "Compared with one rank:",
        "",
        "| | case | ranks | what it has |",
        "|---|---|---|---|",
        *(
            f"| {number} | `{case[1]}` | {case[0]} | {', '.join(name for name in names if name in tested[case])} |"
            for case, number in numbers.items()
        ),
    ]
    return "\n".join(lines)


def renewed(page: str) -> str:
    """The page with its generated part made again."""
    start, end = "<!-- python -m scripts.support_table -->\n", "<!-- end -->\n"
    before, rest = page.split(start)
    return f"{before}{start}{tables()}\n{end}{rest.split(end)[1]}"


if __name__ == "__main__":
    PAGE.write_text(renewed(PAGE.read_text()))
