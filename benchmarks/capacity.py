"""What dropping costs and saves: the debug model trained dropless and with capacity factors.

All variants start from the same weights and see the same batches. They train in one process, one step each in turn, in
a random order, so that a busy machine slows all of them alike. Loss is the mean of the last 5 steps; validation, after
the last step, drops as training does. "dropless, late" only rounds elsewhere: its loss says how much of a difference is
chance.

The drop share is of all routed copies, the mean over layers: of all steps, and of the last 5. max/mean is the load of
the heaviest over the mean expert in the worst layer, last 5 steps. In these, the first steps of a training, experts
take sides faster than the bias evens the loads out (1e-3 per step), so much is dropped; a faster bias, as in
--moe.load_balance_coeff=0.02, shows what a balanced router loses.

Numbers come from each run's metrics.jsonl, but for "padded / valid": rows of the padded slabs over the copies in them,
from the plans of training forwards.
"""

import gc
import random
import statistics
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks.stepping import QUIET, SteppedRun, load, one_process_group  # isort: skip - before torchtitan

import torch

from benchmarks.harness import Options, Record, Times, versus
from titan_moe.metrics import read_metrics
from titan_moe.moe.layer import moe_layers

SUITE = "capacity"

VARIANTS: dict[str, list[str]] = {
    "dropless": [],
    "dropless, late": ["--moe.weighting=late"],
    **{f"factor {f}, probs": [f"--moe.capacity_factor={f}", "--moe.drop_policy=probs"] for f in (1.0, 1.25, 2.0)},
    "factor 1.0, position": ["--moe.capacity_factor=1.0", "--moe.drop_policy=position"],
}
BASE = "dropless"
TAIL = 5
UNITS = {
    "loss": "nats/token",
    "validation loss": "nats/token",
    "dropped": "%",
    f"dropped, last {TAIL}": "%",
    "max/mean": "",
    "padded / valid": "",
}


class Variant(SteppedRun):
    """A training run that waits between its steps."""

    def __init__(self, words: list[str], folder: Path, steps: int) -> None:
        fixed = ["--metrics.log_freq=1", "--validation.enable=true", f"--training.steps={steps}"]
        super().__init__(load(["train_configs/debug_model.toml", *QUIET, *fixed, *words], folder))
        self.folder = folder
        self.rows: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for moe in moe_layers(self.run.model_parts[0]).values():
            self.watch(moe.routed_experts)
        self.others = ExitStack()
        self.wait()

    def watch(self, routed) -> None:
        """Note the counts of every plan that a training forward makes."""
        plan = routed.dispatcher.plan

        def noting(*inputs):
            found = plan(*inputs)
            if routed.training:
                self.rows.append((found.padded_counts_e, found.counts_E, found.dropped))
            return found

        routed.dispatcher.plan = noting

    def wait(self) -> None:
        """From here to the next step time is not this run's."""
        self.others.enter_context(self.run.telemetry.phase("validation"))

    def step(self, *, logs: bool = True, validates: bool = False) -> None:
        self.others.close()
        super().step(logs=logs, validates=validates)
        self.wait()

    def close(self) -> None:
        self.others.close()
        super().close()

    def measured(self) -> dict[str, float]:
        records = list(read_metrics(self.folder).values())
        shares = [100 * r.get("moe_dropped", 0.0) for r in records]
        padded, routed, dropped = (sum(t.sum().item() for t in tensors) for tensors in zip(*self.rows))
        return {
            "loss": statistics.mean(r["loss"] for r in records[-TAIL:]),
            "validation loss": records[-1]["validation_loss"],
            "dropped": statistics.mean(shares),
            f"dropped, last {TAIL}": statistics.mean(shares[-TAIL:]),
            "max/mean": statistics.mean(r["moe_max/mean"] for r in records[-TAIL:]),
            "padded / valid": padded / (routed - dropped),
        }

    def seconds(self) -> list[float]:
        """Of each step but the first two, which set things up."""
        return [record["step_s"] for record in read_metrics(self.folder).values()][2:]


def measure(options: Options) -> Iterator[Record]:
    steps, order = options.pick(4, 12, 40), random.Random(0)
    with one_process_group() as folder:
        variants = {
            name: Variant([*options.more, *words], folder / f"{i}", steps)
            for i, (name, words) in enumerate(VARIANTS.items())
        }
        gc.disable()
        for step in range(1, steps + 1):
            for name in order.sample(list(variants), len(variants)):
                variants[name].step(validates=step == steps)
            gc.collect()
        gc.enable()
        for variant in variants.values():
            variant.close()
        times = Times({name: variant.seconds() for name, variant in variants.items()})
        found = {name: variant.measured() for name, variant in variants.items()}
    for name, row in found.items():
        yield Record(suite=SUITE, case=name, metric="step", unit="ms", **times.against(name, BASE))
        for metric, value in row.items():
            base = versus(value, found[BASE][metric]) | {"against": BASE} if "loss" in metric else {}
            yield Record(suite=SUITE, case=name, metric=metric, value=value, unit=UNITS[metric], **base)
