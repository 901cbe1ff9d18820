"""A `Job` from a row of published runs: what the columns of published_runs.csv mean.

Columns that a file lacks count as blank. What a run needs but its row leaves open is assumed and noted in `Job.notes`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from titan_moe.flavors import FLAVORS, PUBLISHED, Flavor
from titan_moe.plan import hardware as hardware_table
from titan_moe.plan import profiles
from titan_moe.plan import stages as stage_layout
from titan_moe.plan.hardware import Precision
from titan_moe.plan.job import RECOMPUTE_NAMES, Dispatcher, Graphs, Job, Overlap


def job_from_row(row: Mapping[str, str]) -> Job:
    """See `Job.from_row`."""
    tp, pp, ep = (_number(row, column) for column in ("tp", "pp", "ep"))
    cp, vp, mtp = _number(row, "cp", 1), _number(row, "vp", 1), _number(row, "mtp_layers", 0)
    model = replace(_model(row.get("model") or ""), num_mtp_layers=mtp)
    gpus = _number(row, "gpus")
    if gpus % (tp * cp * pp):
        raise ValueError(f"gpus = {gpus}: must be a multiple of tp x cp x pp = {tp} x {cp} x {pp} = {tp * cp * pp}")
    stages, assumed = _stages(row.get("pp_layout") or "", model, pp * vp)
    notes = [f"stages: {assumed}"] if assumed else []
    names = [] if is_blank(row.get("recompute")) else re.split(r"[+,; ]+", (row.get("recompute") or "").strip())
    mode = "full" if names == ["full"] else "none"
    release, taken_for = profiles.of_release(row.get("release") or "")
    notes += [taken_for] if taken_for else []
    notes += ["dispatcher: alltoall"] if ep > 1 and is_blank(row.get("dispatcher")) else []
    unknown = [name for name in names if name not in RECOMPUTE_NAMES and name not in ("none", "full")]
    notes += [f"recompute of {name} is not modelled" for name in unknown]
    routing = (row.get("routing") or "natural").lower()
    overlap = _overlap(row)
    return Job(
        model=model,
        model_name=(row.get("model") or "").strip(),
        hardware=hardware_table.resolve(row.get("hardware") or ""),
        gpus=gpus,
        precision=_precision(row.get("precision") or "bf16"),
        global_batch_size=_number(row, "global_batch_size"),
        micro_batch_size=_number(row, "micro_batch_size", 1),
        seq_len=_number(row, "seq_len"),
        tp=tp,
        cp=cp,
        pp=pp,
        vp=vp,
        ep=ep,
        dp_shard=gpus // (tp * cp * pp),
        stages=stages,
        schedule="DualPipeV" if overlap == "dualpipe" else "Interleaved1F1B" if vp > 1 else "1F1B",
        recompute_mode=mode,
        recompute=frozenset(RECOMPUTE_NAMES[name] for name in names if name in RECOMPUTE_NAMES),
        dispatcher=_dispatcher(row.get("dispatcher") or "", ep),
        routing="round_robin" if "round" in routing else "balanced_random" if "forced" in routing else "natural",
        overlap=overlap,
        comm_sms=_number(row, "comm_sms", 20),
        release=release.name,
        graphs=_graphs(row.get("graph_scope") or ""),
        fp8_attention=_yes(row, "fp8_attention"),
        fused_grouped_mlp=_yes(row, "fused_grouped_mlp"),
        sync_free=_yes(row, "sync_free"),
        notes=tuple(notes),
    )


def _stages(layout: str, model: Flavor, count: int) -> tuple[tuple[stage_layout.Stage, ...], str]:
    """The stages that a description of the layout means, and what was assumed."""
    pieces = model.n_layers + model.num_mtp_layers + 2
    if count > pieces or model.num_mtp_layers > model.n_layers:
        raise ValueError(
            f"pp x vp = {count} stages: more than the {pieces} pieces of the model, {model.n_layers} layers, "
            f"{model.num_mtp_layers} MTP layers, embedding and head"
        )
    sizes = {"layers": model.n_layers, "n_dense": model.n_dense_layers, "mtp": model.num_mtp_layers, "stages": count}
    try:
        return stage_layout.parse(layout, **sizes)
    except ValueError as error:
        return stage_layout.parse("", **sizes)[0], f"an even split, because {error}"


def is_blank(value: str | None) -> bool:
    return value is None or value.strip() in ("", "-", "unknown", "n/a")


class BadNumber(ValueError):
    """A value that should be a number; the message begins with the column."""


def real(row: Mapping[str, str], column: str) -> float:
    """The number in a column that is not blank."""
    value = row[column]
    try:
        number = float(value.replace(",", ""))
    except ValueError:
        raise BadNumber(f"{column} = {value!r}: must be a number") from None
    if not math.isfinite(number) or number < 0 or (number == 0 and column not in ("mtp_layers", "comm_sms")):
        raise BadNumber(f"{column} = {value!r}: must be a finite number greater than 0")
    return number


def _number(row: Mapping[str, str], column: str, default: int | None = None) -> int:
    if is_blank(row.get(column)):
        if default is None:
            raise LookupError(f"no layout: {column} is not given")
        return default
    number = real(row, column)
    if number != int(number):
        raise BadNumber(f"{column} = {row[column]!r}: must be a whole number")
    return int(number)


def _yes(row: Mapping[str, str], column: str) -> bool:
    return (row.get(column) or "").strip().lower().startswith("yes")


def _model(name: str) -> Flavor:
    known = {**FLAVORS, **PUBLISHED}
    plain = {re.sub(r"[^a-z0-9.]", "", key.lower()): flavor for key, flavor in known.items()}
    asked = re.sub(r"[^a-z0-9.]", "", name.lower())
    for key, flavor in plain.items():
        if asked in (key, key.removesuffix("671b"), key.removesuffix("a22b"), key.removesuffix("a3b")):
            return flavor
    raise LookupError(f'model "{name}": its sizes are not known; known: {", ".join(known)}')


def _precision(text: str) -> Precision:
    plain = re.sub(r"[^a-z0-9]", "", text.lower())
    names: dict[str, Precision] = {
        "bf16": "bf16",
        "bfloat16": "bf16",
        "fp8": "fp8_current",
        "fp8current": "fp8_current",
        "fp8cs": "fp8_current",
        "fp8block": "fp8_block",
        "fp8blockwise": "fp8_block",
        "fp8subchannel": "fp8_block",
        "fp8mx": "mxfp8",
        "mxfp8": "mxfp8",
        "nvfp4": "nvfp4",
        "fp4": "nvfp4",
    }
    if plain not in names:
        raise ValueError(f"precision = {text!r}: choose one of bf16, fp8_current, fp8_block, mxfp8, nvfp4")
    return names[plain]


def _graphs(text: str) -> Graphs:
    text = text.lower()
    if text.startswith("full"):
        return "full"
    return "attention" if "attn" in text or "attention" in text else "router" if "router" in text else "none"


def _overlap(row: Mapping[str, str]) -> Overlap:
    kind, flag = (row.get("overlap_kind") or "").lower(), _yes(row, "a2a_overlap")
    if "dualpipe" in kind or "dualpipe" in (row.get("a2a_overlap") or "").lower():
        return "dualpipe"
    if "delayed" in kind:
        return "1f1b_delayed_wgrad"
    return "1f1b" if "1f1b" in kind or (flag and is_blank(row.get("overlap_kind"))) else "none"


def _dispatcher(text: str, ep: int) -> Dispatcher:
    text = text.lower()
    named: tuple[Dispatcher, ...] = ("hybridep", "deepep", "te_ep", "dedup")
    for name in named:
        if name in text:
            return name
    return "alltoall" if ep > 1 else "local"
