"""Run folders as a run leaves them, made of a few lines."""

import json
from pathlib import Path
from typing import Any

from titan_moe.config import Config
from titan_moe.config_print import to_toml

LAYERS = ("layers.1", "layers.2", "mtp_layers.0")


def line(step: int, attempt: int = 1, **more: Any) -> dict[str, Any]:
    """What every logged step has; `more` replaces and adds."""
    return {
        "step": step,
        "attempt": attempt,
        "loss": 8 / (1 + step / 10),
        "grad_norm": 0.5,
        "lr": 1e-3,
        "tps": 1000.0,
        "tflops": 0.5,
        "mfu": None,
        "step_s": 0.25,
        "data_percent": 0.1,
        "memory_gib": 1.5,
        "tokens_seen": 4096 * step,
        "skipped_steps": 0,
        **more,
    }


def phases(**seconds: float) -> dict[str, float]:
    """Phases with halves, a third of each forward; the slowest rank is rank 3, and takes twice as long."""
    found: dict[str, float] = {}
    for name, whole in seconds.items():
        for half, share in (("forward", 1 / 3), ("backward", 2 / 3)):
            found[f"phase/{name}.{half}"] = whole * share
            found[f"phase_max/{name}.{half}"] = 2 * whole * share
            found[f"phase_rank/{name}.{half}"] = 3
    return found


def loads(counts: list[int]) -> dict[str, Any]:
    """Of all layers."""
    heaviest = max(counts) * len(counts) / sum(counts)
    found: dict[str, Any] = {"moe_max/mean": heaviest}
    for layer in LAYERS:
        found |= {f"moe_load.{layer}": counts, f"moe_max/mean.{layer}": heaviest, f"moe_dead.{layer}": counts.count(0)}
    return found


def write(folder: Path, lines: list[dict[str, Any]], config: Config | None = None, **facts: Any) -> Path:
    """A run folder with all of its files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    if config is None:
        config = Config()
        config.training.steps = max((each["step"] for each in lines), default=10)
    (folder / "config.toml").write_text(to_toml(config))
    record = {"run_id": folder.name, "attempt": 1, "world": 2, "device": "CPU", "description": "a test"} | facts
    (folder / "run.json").write_text(json.dumps(record))
    return folder
