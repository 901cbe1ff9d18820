"""Whether torch.compile is done, or compiles again and again while training waits.

What is compiled is compiled in the first step, a variant that only turns up with accumulation in the second. From then
on shapes and modes repeat, so each compilation is a fault: a number that changes from step to step has become part of
the compiled code. Evaluation, without gradients, has variants of its own, made once in the first one, and not counted.
"""

from torchtitan.tools.logging import logger

SETTLED = 2
"""Steps after which nothing should be compiled any more"""


class Recompiles:
    """One per run. `count`: functions that training has compiled since step 2 of this start."""

    def __init__(self) -> None:
        self.steps = self.count = self.seen = 0

    def step(self) -> None:
        """After each step, but for what comes once in a while."""
        self.steps += 1
        more = compiled() - self.seen
        self.seen += more
        if more and self.steps > SETTLED:
            self.count += more
            logger.warning(
                f"torch.compile has compiled {more} functions again in the {self.steps}th step of this start, and "
                f"training has waited for it; {self.count} since the second. TORCH_LOGS=recompiles says why"
            )

    def overlook(self) -> None:
        """What has been compiled since the step was not training's."""
        self.seen = compiled()


def compiled() -> int:
    """Functions that dynamo has compiled in this process, each variant counted."""
    from torch._dynamo.utils import counters  # not before something is compiled: the import takes a second

    return counters["frames"]["ok"]
