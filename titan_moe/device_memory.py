"""What this rank's device is: its name, the peak of its memory, and the rate that MFU is measured by."""

import os
import resource

from titan_moe.runtime import DEVICE_TYPE

from titan_moe.config import Config
from titan_moe.moe import te
from titan_moe.plan.hardware import Precision, of_device
from titan_moe.precision.recipes import RECIPES


class DeviceMemory:
    """Peak memory of this rank: of the accelerator, or of the process when the CPU computes."""

    def __init__(self) -> None:
        self.monitor = None
        self.device_name = "CPU"
        if DEVICE_TYPE != "cpu":
            from torchtitan.components.metrics import build_device_memory_monitor

            self.monitor = build_device_memory_monitor()
            self.device_name = self.monitor.device_name

    def peak(self) -> dict[str, float]:
        """torchtitan's TensorBoard tags; GiB and percent of what the device (the machine) has. A process's peak is
        since its start, an accelerator's since the last reset."""
        if self.monitor is None:
            gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # Linux counts KiB
            percent = 100 * gib * 2**30 / (os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
            return {
                "memory/max_active(GiB)": gib,
                "memory/max_active(%)": percent,
                "memory/max_reserved(GiB)": gib,
                "memory/max_reserved(%)": percent,
                "memory/num_alloc_retries": 0,
                "memory/num_ooms": 0,
            }
        stats = self.monitor.get_peak_stats()
        return {
            "memory/max_active(GiB)": stats.max_active_gib,
            "memory/max_active(%)": stats.max_active_pct,
            "memory/max_reserved(GiB)": stats.max_reserved_gib,
            "memory/max_reserved(%)": stats.max_reserved_pct,
            "memory/num_alloc_retries": stats.num_alloc_retries,
            "memory/num_ooms": stats.num_ooms,
        }

    def reset(self) -> None:
        if self.monitor is not None:
            self.monitor.reset_peak_stats()

    def precision(self, config: Config) -> Precision | None:
        """What the run's GEMMs compute in on this device, by the names of [precision]; None for a device or a type
        whose rate is not known. A recipe counts as soon as it holds for some of them. It needs a device that has it,
        and Transformer Engine to use that: where it is emulated, bf16 is what computes."""
        known, recipe = of_device(self.device_name), config.precision.recipe
        if known is None or config.training.mixed_precision_param != "bfloat16":
            return None
        if recipe not in RECIPES or recipe not in known.precisions or config.precision.backend == "emulated":
            return "bf16"
        return "bf16" if te.problem(te.facts()) else recipe

    def peak_flops(self, config: Config) -> float | None:
        """Dense FLOP/s of the device in what the run computes in, by its data sheet; None when unknown, so that nobody
        reads an MFU against a guess."""
        known, precision = of_device(self.device_name), self.precision(config)
        return None if known is None or precision is None else known.peak_tflops(precision) * 1e12
