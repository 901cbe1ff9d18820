"""One optimizer step, predicted: the list of its parts, and what would help most."""

from dataclasses import dataclass, field

from titan_moe.plan.job import Job


@dataclass(frozen=True, kw_only=True)
class Improvement:
    """A change, and what it would make of the step."""

    change: str
    tokens_per_s_per_gpu: float
    gain: float
    """Relative gain in tokens per second"""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a step of a Job takes. Times in seconds on the slowest pipeline rank."""

    step_seconds: float
    tokens_per_s_per_gpu: float
    tflops_causal: float
    """Per GPU, Megatron's convention"""
    tflops_full: float
    """Per GPU, torchtitan's convention: attention counted in full"""
    mfu: float
    """tflops_causal over the hardware's dense peak in the job's precision"""
    parts: dict[str, float] = field(default_factory=dict)
    """Seconds of the step by cause; they add up to step_seconds"""
    timeline: list[tuple[str, str, float, float]] = field(default_factory=list)
    """(lane, name, start, end) in seconds: one MoE layer's forward and backward of one microbatch"""
    limit: str = ""
    """What binds the speed"""
    band: tuple[float, float] = (0.0, 0.0)
    """80 % band of tokens_per_s_per_gpu, from the validation's errors with a cell left out"""
    exposed_comm: float = 0.0
    """Seconds of the step in which only communication runs"""


def predict(job: Job) -> Prediction:
    """The step of `job` (see the module's docstring)."""
    return Prediction(step_seconds=1.0, tokens_per_s_per_gpu=1.0, tflops_causal=1.0, tflops_full=1.0, mfu=0.5)


def improvements(job: Job) -> list[Improvement]:
    """The three changes of software or layout that would speed `job` up most, best first."""
    return []
