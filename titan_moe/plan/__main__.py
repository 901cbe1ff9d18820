"""`python -m titan_moe.plan CONFIG.toml [--section.key=value ...]`: what `./run_train.sh CONFIG.toml --plan` runs.

Prints a report (JSON with --plan.json) and exits with status 0 whether or not the run fits, which the report says;
2 with all mistakes of the configuration on stderr. Starts no process, writes nothing but the pictures asked for by
--plan.png=FOLDER, and imports no torch: any Python 3.11 does, whether or not the training environment is set up.
"""

import importlib.util
import json
import os
import sys
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
    try:
        config = config_file.load(argv)
        path, _, _ = config_file.parse_arguments(argv)
        plan, shown = make(config, path)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    try:
        print(json.dumps(shown.to_json(plan), indent=2) if config.plan.json else shown.to_text(plan), flush=True)
    except BrokenPipeError:  # as of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if config.plan.png:
        from titan_moe.plan import pictures

        for written in pictures.draw(plan, config.plan.png):
            print(f"Picture: {written}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
