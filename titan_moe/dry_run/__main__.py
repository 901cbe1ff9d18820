"""`python -m titan_moe.dry_run CONFIG.toml [--section.key=value ...]`: what run_train.sh does with
--comm.mode=fake_backend. NNODES, NGPU and RANK in the environment say which rank of how many: the first of plan.gpus if
they do not. Exit status 2 with all mistakes on stderr."""

import os
import resource
import sys
import time
from collections.abc import Mapping

from titan_moe import config_file
from titan_moe.config_file import ConfigError
from titan_moe.dry_run import check


def main(argv: list[str], env: Mapping[str, str]) -> int:
    start = time.monotonic()
    try:
        problems: list[str] = []
        planned = config_file.read(argv).config.plan.gpus  # read twice: a twin depends on how many there are
        world_size, rank = check.place(env, planned, problems)
        loaded = config_file.read(argv, max(world_size, 1))
        config = loaded.config
        config.comm.mode = "default"  # that it is asked for brought us here; the rest is the run that it stands for
        found = check.problems(config)
        if world_size:
            found = config_file.check(config, world_size, accelerator=True) + found
        if problems := loaded.problems + problems + loaded.located(found):
            raise ConfigError(loaded.file, problems)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    from titan_moe.dry_run import build, report  # not before the mistakes: they import torch

    result = build.dry_run(config, world_size, rank)
    print(report.to_text(result))
    print(f"Took {time.monotonic() - start:,.0f} s and {_most_memory() / 2**30:.2f} GiB of this machine's memory.")
    return 0


def _most_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
