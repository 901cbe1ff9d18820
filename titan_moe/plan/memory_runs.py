"""Peaks of memory that others measured, and what memory.py says of the same runs.

    python -m titan_moe.plan.memory_runs

prints them with the layer of DeepSeek-V3 that memory.py is checked against item by item. Figures: SimuMax v1.2 (the two
four-layer runs), Megatron-Core's overlap study (Qwen3-30B), TorchTitan's GB300 runs. What a run left open is assumed,
and said; a run that leaves too much open is shown and not scored. Imports no torch.
"""

from dataclasses import dataclass, replace
from typing import Any

from titan_moe.flavors import FLAVORS, PUBLISHED, Flavor
from titan_moe.plan.hardware import HARDWARE
from titan_moe.plan.job import Job
from titan_moe.plan.memory import GIB, predict_memory
from titan_moe.plan.stages import balanced, from_counts

DEEPSEEK = FLAVORS["671B"]
FOUR_LAYERS = replace(DEEPSEEK, n_layers=4, n_dense_layers=1)


@dataclass(frozen=True, kw_only=True)
class PublishedPeak:
    name: str
    job: Job
    gib: tuple[float, float]
    """Peak allocated, of the pipeline rank with least and with most"""
    assumed: str
    scored: bool = True

    @property
    def predicted(self) -> tuple[float, float]:
        peaks = predict_memory(self.job).allocated_by_rank
        return min(peaks) / GIB, max(peaks) / GIB

    @property
    def error(self) -> float:
        """Of the rank with most."""
        return self.predicted[1] / self.gib[1] - 1


def job_of(model: Flavor, hardware: str, gpus: int, *, pp: int = 1, ep: int, **settings: Any) -> Job:
    """A BF16 run of single sequences of 4,096 tokens, everything else as Job has it."""
    stages = balanced(model.n_layers, pp * settings.get("vp", 1), model.n_dense_layers, model.num_mtp_layers)
    defaults: dict[str, Any] = {
        "stages": stages,
        "dp_shard": gpus // pp,
        "precision": "bf16",
        "global_batch_size": 16 * gpus,
        "micro_batch_size": 1,
        "seq_len": 4096,
    }
    return Job(model=model, model_name="", hardware=HARDWARE[hardware], gpus=gpus, pp=pp, ep=ep, **defaults | settings)


def published_peaks() -> list[PublishedPeak]:
    fsdp: dict[str, Any] = {
        "sharding": "fsdp",
        "param_dtype": "float32",
        "recompute_mode": "selective",
        "dispatcher": "hybridep",
    }
    return [
        PublishedPeak(
            name="DeepSeek-V3, 4 layers, 8 x B200, EP 8",
            job=job_of(FOUR_LAYERS, "B200", 8, ep=8),
            gib=(104.30, 104.30),
            assumed="",
        ),
        PublishedPeak(
            name="DeepSeek-V3, 4 layers, 8 x B200, PP 2 EP 4",
            job=job_of(FOUR_LAYERS, "B200", 8, pp=2, ep=4, stages=from_counts([2, 2], 1, 0)),
            gib=(114.00, 114.00),
            assumed="two layers per stage; one figure, of the fullest rank",
        ),
        PublishedPeak(
            name="Qwen3-30B-A3B, 16 x H100, EP 16",
            job=job_of(PUBLISHED["Qwen3-30B-A3B"], "H100", 16, ep=16, dispatcher="deepep"),
            gib=(62.2, 62.2),
            assumed="no recompute; routing weights at SwiGLU",
        ),
        PublishedPeak(
            name="DeepSeek-V3, 256 x GB300, TorchTitan FSDP 256 EP 64",
            job=job_of(DEEPSEEK, "GB300", 256, ep=64, loss_chunks=8, **fsdp),
            gib=(182.5, 182.5),
            assumed="16 sequences per GPU one after the other, gradients summed unsharded: at once, layer inputs and "
            "attention outputs alone would be 175 GiB beside 39 of states",
            scored=False,
        ),
        PublishedPeak(
            name="DeepSeek-V3, 256 x GB300, TorchTitan PP 8 EP 32",
            job=job_of(DEEPSEEK, "GB300", 256, pp=8, ep=32, reshard_after_forward=False, **fsdp),
            gib=(203.4, 246.3),
            assumed="1F1B and microbatches of one sequence: neither was published, and the peak is nearly proportional "
            "to the tokens in flight",
            scored=False,
        ),
    ]


def table() -> list[str]:
    """Markdown."""
    lines = ["| run | measured, GiB | predicted | error | assumed |", "|---|---|---|---|---|"]
    for peak in published_peaks():
        error = f"{peak.error:+.1%}" if peak.scored else "not scored"
        lines.append(f"| {peak.name} | {_span(peak.gib)} | {_span(peak.predicted)} | {error} | {peak.assumed} |")
    return lines


def _span(gib: tuple[float, float]) -> str:
    return f"{gib[1]:.1f}" if gib[0] == gib[1] else f"{gib[0]:.1f} - {gib[1]:.1f}"


if __name__ == "__main__":
    print("\n".join(table()))
