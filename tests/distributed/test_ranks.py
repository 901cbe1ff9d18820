"""What ranks.py does with a rank that fails: it is told, and the others, which would wait for it, are ended."""

import pytest

from tests.distributed.harness import forked

SCRIPT = """
import os, sys, time
print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], sys.argv[1:])
if os.environ["RANK"] == "1":
    {fails}
time.sleep(300)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fails", "told", "status"),
    [
        ("raise KeyError('lost')", "KeyError: 'lost'", 1),
        ("sys.exit('a word')", "a word", 1),
        ("os.kill(os.getpid(), 9)", "", -9),
    ],
)
def test_the_first_that_fails_ends_the_others(tmp_path, fails, told, status):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(fails=fails))
    finished = forked(2, str(script), "a b")
    assert finished.returncode == 1 and finished.stdout == "rank 0 of 2 ['a b']\n"
    assert told in finished.stderr and f"rank 1 of {script}: exit status {status}" in finished.stderr
