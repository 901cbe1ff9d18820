"""Our low-precision GEMMs pass Transformer Engine's (TE's) own Python, on any machine: see drive_quantized.py.

The doubles may share a mistake of ours about TE's classes; these are the classes.
"""

import subprocess
import sys

from tests.te.signatures import REPO
from titan_moe.precision import support
from titan_moe.precision.recipes import RECIPES

CAPABILITIES = ((8, 9), (9, 0), (10, 0), (12, 0))  # of drive_quantized.py, which this process must not import


def test_every_recipe_on_every_path_through_tes_own_classes():
    """Forward, dgrad and wgrad, with the copy of x that was kept, twice, and with one that is made anew."""
    program = [sys.executable, "-m", "tests.te.drive_quantized"]
    done = subprocess.run(program, cwd=REPO, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    expected = []
    for capability in CAPABILITIES:
        for recipe in RECIPES:
            paths = [p for p in ("linears", "host splits", "device splits") if support.find(recipe, p, capability)]
            expected.append(f"{recipe} {capability[0]} {capability[1]} {2 * len(paths) - (len(paths) > 0)}")
    assert done.stdout.splitlines() == expected
