"""`python -m titan_moe.plan CONFIG.toml [--section.key=value ...]`: what `./run_train.sh CONFIG.toml --plan` runs.

Prints a report (JSON with --plan.json) and exits with status 0 whether or not the run fits, which the report says;
2 with all mistakes of the configuration on stderr. With --plan.search it looks for the fastest layout instead, with
--plan.diff=OTHER.toml it says where two configurations differ. Starts no process, writes nothing but the pictures asked
for by --plan.png=FOLDER and the configuration by --plan.toml=FILE, and imports no torch: any Python 3.11 does, whether
or not the training environment is set up.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

if importlib.util.find_spec("tomli") is None:
    import tomllib  # the same reader, from the standard library; the environment's may be newer

    sys.modules["tomli"] = tomllib

from titan_moe import config_file
from titan_moe.config import Config
from titan_moe.config_file import ConfigError
from titan_moe.plan import report


def make(config: Config, path: str) -> tuple[Any, Any]:
    """The plan, and the module that shows it. Raises ConfigError with all problems."""
    if not config.plan.calibrate:
        return report.make(config, path), report
    from titan_moe.plan import calibrate, machine_report

    runs = calibrate.runs(config, path)
    if calibrate.on_cpus(runs):
        return machine_report.make(config, runs, path), machine_report
    return report.make(config, path, calibrate.corrections(runs, path)), report


def main(argv: list[str]) -> int:
    argv = [word for word in argv if word != "--plan"]
    plan = None
    try:
        config = config_file.load(argv)
        path, overrides, _ = config_file.parse_arguments(argv)
        if config.plan.diff and not config.plan.search:
            answer = _diff(config, path, overrides)
        elif config.plan.search:
            answer = _search(config, path)
        else:
            plan, shown = make(config, path)
            answer = json.dumps(shown.to_json(plan), indent=2) if config.plan.json else shown.to_text(plan)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        print(answer, flush=True)
    except BrokenPipeError:  # as of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if plan is not None and config.plan.png:
        from titan_moe.plan import pictures

        for written in pictures.draw(plan, config.plan.png):
            print(f"Picture: {written}", file=sys.stderr)
    return 0


def _diff(config: Config, path: str, overrides: list[tuple[str, str | None]]) -> str:
    """From the configuration in plan.diff to the one that was given."""
    from titan_moe.plan import diff

    asked = [f"--{key}" if raw is None else f"--{key}={raw}" for key, raw in overrides if key.startswith("plan.")]
    other = config.plan.diff
    before = config_file.load([other, *(word for word in asked if not word.startswith("--plan.diff"))])
    plans = [diff.plain(report.job_of(each, name)) for each, name in ((before, other), (config, path))]
    found = diff.of_plans(plans[0], plans[1], (before, config))
    return json.dumps(diff.to_json(found), indent=2) if config.plan.json else diff.to_text(found, (other, path))


def _search(config: Config, path: str) -> str:
    from titan_moe.plan import winner, winner_toml

    if config.plan.toml and (why := winner_toml.refusal(path, config.plan.toml)):
        raise ConfigError(path, [why])  # before, not after the search
    searched, toml = winner.run(config, path), ""
    if searched.best is not None:
        if config.plan.toml:
            toml = winner_toml.write(searched, path, config.plan.toml)
            print(f"Configuration: {config.plan.toml}", file=sys.stderr)
        else:
            toml = winner_toml.text(searched, path, Path())
    if config.plan.json:
        return json.dumps(winner.to_json(searched) | {"toml": toml}, indent=2)
    return winner.to_text(searched, path, toml)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
