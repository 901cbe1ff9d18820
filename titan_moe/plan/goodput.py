"""What failures cost: how often to save, and which share of the time is work that is kept.

Failures come at random, on average one in M seconds of the whole job (its MTBF). Training works for t seconds, saves,
which holds it up for d seconds, and so on. With saving in the background the file is whole only w seconds after that;
until then a failure falls back to the save before it. After a failure the job takes r seconds to train again, in which
it can fail too. Then

    goodput(t) = t exp(-(r + w)/M) / (M (exp((t + d)/M) - 1))

Derivation: a start is an attempt that lasts until the next failure, M seconds on average. Its j-th save is whole after
r + j (t + d) + w seconds, which happens with probability exp(-(r + j (t + d) + w)/M). The sum of these over j is the
expected number of saves that count, each of them t seconds of work. For w = 0 it is equation 13 of Daly (2006) over
the work.

The best t does not depend on r and w. The derivative is zero where (1 - t/M) exp(t/M) = exp(-d/M), which `best` solves.
To first order it is Young's sqrt(2 d M) (Young, CACM 17, 1974, 530); Daly's next terms (A higher order estimate of the
optimum checkpoint interval, FGCS 22, 2006, 303) are in `daly`. Neither is used: they are what to check against. A save
in the background has to be whole before the next one begins, so t is at least w - d.

What it leaves out: failures that come in groups, hangs that nobody notices for minutes, and errors that corrupt
numbers without a stop (6 of the 419 interruptions of Llama 3).
"""

import math
from dataclasses import dataclass

HOUR = 3600.0
FAILURE_GPU_HOURS = 50_700.0
"""GPU hours per interruption: Llama 3 405B, 419 unexpected ones in 54 days on 16,384 GPUs (arXiv 2407.21783, 3.3.4)"""
RESEARCH_GPU_HOURS = (8_100.0, 29_500.0)
"""The same of two research clusters: 7.9 h at 1,024 GPUs, 1.8 h at 16,384 (arXiv 2410.21680)"""
BACKGROUND_SHARE = 0.15
"""Of the seconds of a save in the foreground, that one in the background holds training up: 12 to 17 % on two CPU cores
(docs/checkpoints.md). Not measured on a GPU yet"""


@dataclass(frozen=True, kw_only=True)
class Saving:
    """What a save and a failure cost, in seconds."""

    mtbf: float
    """Of the whole job"""
    held_up: float
    """Training stands still while it saves"""
    written: float
    """After that, until the file is whole"""
    restart: float
    """From a failure to the first new step"""

    def goodput(self, work: float) -> float:
        """Share of the time that is kept work, with `work` seconds of it between saves. 0 where no save is ever whole
        before the next failure, as far as numbers go."""
        M = self.mtbf
        exponent = (work + self.held_up) / M
        if exponent > 500:  # e^500: beyond it nothing is left, and floats end
            return 0.0
        return work / M * math.exp(-(self.restart + self.written) / M) / math.expm1(exponent)

    @property
    def least(self) -> float:
        """Seconds of work between saves, so that one is whole before the next begins."""
        return max(self.written - self.held_up, 0.0)

    def best(self) -> float:
        """Seconds of work between saves at which goodput is largest."""
        return max(_optimum(self.held_up / self.mtbf) * self.mtbf, self.least)


def _optimum(d: float) -> float:
    """The x in (0, 1) with (1 - x) e^x = e^-d, for d > 0: bisection on its logarithm, which falls with x."""
    low, high = 0.0, 1.0
    while True:
        x = (low + high) / 2
        if x in (low, high):
            return x
        if math.log1p(-x) + x > -d:
            low = x
        else:
            high = x


def young(held_up: float, mtbf: float) -> float:
    """Seconds of work between saves, to first order in sqrt(held_up / mtbf)."""
    return math.sqrt(2 * held_up * mtbf)


def daly(held_up: float, mtbf: float) -> float:
    """The same to third order; for saves that take less than twice the MTBF."""
    x = math.sqrt(held_up / (2 * mtbf))
    return young(held_up, mtbf) * (1 + x / 3 + x * x / 9) - held_up
