"""`python -m titan_moe.launch CONFIG.toml [--section.key=value ...]`: what run_train.sh asks before it calls torchrun.

Every mistake is so named once, not once per rank, and costs no process group. Exit status 2 with the mistakes on
stderr, or 0 with the run id and the run folder on stdout, a line each, for the shell. With `--print_config` it prints
the resolved configuration instead, each value with the place it comes from, and nothing is checked but the
configuration itself. Imports no torch, so the shell also tells how many GPUs there are (GPUS in the environment).
"""

import hashlib
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path

from titan_moe import (
    checkpoint_folder,
    config_file,
    config_help,
    placement,
    run_folder,
    titan_dispatchers_check,
)
from titan_moe.config import Config
from titan_moe.config_check import NEEDS_GPU
from titan_moe.config_file import ConfigError, Loaded
from titan_moe.config_keys import get
from titan_moe.huggingface import check as huggingface_check
from titan_moe.machine_check import refusal, this_machine, warning, without_te
from titan_moe.preflight import data_problems


def main(argv: list[str], env: Mapping[str, str]) -> int:
    if "--help" in argv:
        return config_help.main(argv[argv.index("--help") + 1 :])
    printing = {"--print_config", "--print-config"} & {*argv}
    argv = [word for word in argv if word not in printing]
    try:
        problems: list[str] = []
        nodes, per_node = count(env, "NNODES", problems), count(env, "NGPU", problems)
        world_size = nodes * per_node
        loaded = config_file.read(argv, max(world_size, 1))
        for note in loaded.notes:
            print(f"note: {note}", file=sys.stderr)
        if printing:
            return _print_config(loaded)
        gpus = env.get("GPUS", "0") != "0"
        run_id = _run_id(env, nodes, loaded.file, argv, problems)
        checked, machine = [], None
        if world_size:
            checked += config_file.check(loaded.config, world_size, accelerator=gpus)
            machine = this_machine(per_node, gpus)
            # Before the data is looked at: on another machine than it is meant for, it may not be there.
            if not loaded.problems and (text := refusal(loaded.config, argv, world_size, machine, gpus)):
                print(text, file=sys.stderr)
                return 2
        notes = _placement(loaded.config, nodes, per_node, env, problems) if world_size and not checked else []
        lacks = [*without_te(loaded.config), *titan_dispatchers_check.missing(loaded.config)]
        checked += lacks if gpus else _hardware(loaded.config)
        try:
            folder = run_folder.choose(loaded.config, {"RUN_ID": run_id})
            heads = {problem.split(": ")[0] for problem in checked}  # said before: one mistake, one line
            found = _named(loaded.config, data_problems(loaded.config, folder))
            checked += [problem for problem in found if problem.split(": ")[0] not in heads]
            checked += _checkpoints(loaded.config, folder)
            taken = run_folder.refusal(folder, run_id, resume=loaded.config.checkpoint.enable)
        except ValueError as error:
            folder, taken = Path(), None if str(error) in problems else str(error)
        problems = loaded.problems + problems + loaded.located([*checked, *([taken] if taken else [])])
        if problems:
            raise ConfigError(loaded.file, problems)
        if note := warning(loaded.config, world_size, machine):
            notes.append(note)
    except (ConfigError, OSError) as error:  # OSError: a run folder that cannot even be looked at
        print(error, file=sys.stderr)
        return 2
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"Run folder: {folder}", file=sys.stderr)
    print(run_id, folder, sep="\n")
    return 0


def _print_config(loaded: Loaded) -> int:
    if loaded.problems:
        raise ConfigError(loaded.file, loaded.problems)
    text = config_file.to_toml(loaded.config, loaded.origins)
    sys.stdout.buffer.write(text.encode())  # as TOML is, whatever the locale
    sys.stdout.flush()
    return 0


def _hardware(config: Config) -> list[str]:
    """What the configuration asks of a GPU, for a machine that has none."""
    return [
        f'{key} = "{get(config, key)}": needs a GPU, and this machine shows none to nvidia-smi'
        for key, (_, values) in NEEDS_GPU.items()
        if get(config, key) in values
    ]


def _placement(config: Config, nodes: int, per_node: int, env: Mapping[str, str], problems: list[str]) -> list[str]:
    """What the first node says about where ranks lie; a problem when what should tell cannot be read."""
    try:
        domains = placement.domains_of_ranks(config, nodes, per_node, env)
    except ValueError as error:
        problems.append(str(error))
        return []
    return placement.notes(config, domains, per_node) if domains and env.get("NODE_RANK", "0") == "0" else []


def _named(config: Config, problems: list[str]) -> list[str]:
    """Problems of a data set with the key that names it, so that its line can be told."""
    keys = {spec.dataset: f"training.mixture[{i}]" for i, spec in enumerate(config.training.mixture)}
    keys = keys or {config.training.dataset: "training"}
    if config.validation.dataset:
        keys = {config.validation.dataset: "validation"} | keys
    keys = {each.dataset: f"validation.sets[{i}]" for i, each in enumerate(config.validation.sets)} | keys
    for name, key in keys.items():
        start, mixed = f'dataset = "{name}":', f'training.mixture, "{name}"'
        problems = [f"{key}.{problem}" if problem.startswith(start) else problem for problem in problems]
        problems = [problem.replace(mixed, f'{key}, "{name}"', 1) for problem in problems]
    return problems


def _checkpoints(config: Config, folder: Path) -> list[str]:
    """What is wrong with the checkpoints that the run is to start from."""
    if not config.checkpoint.enable:  # nothing is loaded, and config_check says so
        return []
    start, step, found = config.checkpoint.initial_load_path, config.checkpoint.load_step, []
    steps = checkpoint_folder.steps(folder / config.checkpoint.folder)[::-1]
    # A run with checkpoints of its own does not need it any more.
    if start and not steps:
        if problem := checkpoint_folder.misnamed(Path(start)):
            found.append(f"checkpoint.initial_load_path = {start!r}: {problem}")
        elif config.checkpoint.upcycle or checkpoint_folder.is_hugging_face(Path(start)):
            found += huggingface_check.problems(config, Path(start))
    if step >= 0 and step not in steps:
        found.append(f"checkpoint.load_step = {step}: {folder} has steps {steps}; choose one, or -1 for the newest")
    elif step >= 0 and (newer := [there for there in steps if there > step]):
        found.append(
            f"checkpoint.load_step = {step}: {folder} also has steps {newer}, which the next resume would take for the "
            "newest; move them away, or start a new run with checkpoint.initial_load_path"
        )
    return found


def count(env: Mapping[str, str], name: str, problems: list[str]) -> int:
    """NNODES (nodes) or NGPU (processes per node), 1 when unset; 0 and a problem when it is no count."""
    text = env.get(name) or "1"
    if re.fullmatch("[1-9][0-9]{0,5}", text):
        return int(text)
    problems.append(f"{name} = {text!r} in the environment: must be a whole number, 1 to 999999")
    return 0


def _run_id(env: Mapping[str, str], nodes: int, path: str, argv: list[str], problems: list[str]) -> str:
    """What tells a restart of this run from another run: the same for all nodes, and for a requeued job."""
    if run_id := env.get("RUN_ID"):
        if problem := run_folder.run_id_problem(run_id):
            problems.append(problem)
        return run_id
    if job := env.get("SLURM_JOB_ID"):
        # One allocation may train several configurations: the command tells them apart, and a requeue repeats it.
        command = hashlib.blake2b("\0".join(argv).encode(errors="surrogateescape"), digest_size=2).hexdigest()
        return f"slurm-{job}-{run_folder.stem(path)}-{command}"
    if nodes > 1:
        problems.append(f"RUN_ID is not set in the environment: {nodes} nodes must agree; set the same on each")
    return run_folder.new_run_id(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
