"""The map of files: `python -m scripts.file_map` renews README's map (parts) and docs/files.md (files).

What a part is for stands in PARTS, what a file is for is the first sentence of its docstring. Numbers of lines are
rounded to two digits, and tests take them as current while they are within a fifth: a map need not change with every
commit, but it may not lie. A file that no part has, or a part without files, is a failure.
"""

import ast
import re
from fnmatch import fnmatch
from pathlib import Path

README, PAGE = Path("README.md"), Path("docs/files.md")

PARTS: dict[str, tuple[tuple[str, ...], str]] = {
    "train.py": (("train.py",), "the run: set-up, loop, step"),
    "configuration": (
        ("config*.py", "toml_text.py", "mistakes.py", "titan02*.py", "flavors.py", "flavor_check.py", "preflight.py"),
        "the schema, strict reading, help, files of torchtitan 0.2, model sizes",
    ),
    "checks": (("*_check.py",), "what must fit together, each refusal with its arithmetic"),
    "launch, runtime": (
        (
            *(
                "launch.py",
                "run_folder.py",
                "startup.py",
                "supervise.py",
                "torchrun.py",
                "processes.py",
                "placement.py",
            ),
            *("runtime.py", "device_memory.py", "random_state.py", "torch_helpers.py", "whole_file.py"),
        ),
        "from run_train.sh to processes and the run's folder; what knows a CPU from a GPU: device, meshes, seeds",
    ),
    "model": (
        (
            "model.py",
            "families.py",
            "attention.py",
            "block.py",
            "half_batch.py",
            "scale_down.py",
            "loss.py",
            "inputs.py",
        ),
        "flavor to torchtitan's model with our nodes in it; loss; inputs",
    ),
    "MoE dispatch": (
        tuple(
            f"moe/{name}.py"
            for name in (
                *("contract", "dispatch", "alltoall", "dedup", "layout", "plan_tensors", "rows", "exchange", "moving"),
                *("row_dispatcher", "static", "replay", "te_ep", "te_ep_ops", "titan_dispatchers"),
            )
        ),
        "what a dispatcher promises; the portable three; fixed buffers; NCCL EP, DeepEP, HybridEP",
    ),
    "MoE experts": (
        (
            "moe/experts.py",
            "moe/quantized_experts.py",
            "moe/te.py",
            "moe/te_experts.py",
            "moe/te_fused.py",
            "moe/te_*.py",
        ),
        "grouped GEMMs of torch, emulated ones, Transformer Engine's",
    ),
    "MoE layer": (("moe/*.py",), "layer and region, router, balancing, health of the experts, names"),
    "precision": (
        ("precision/*.py",),
        "low precision: recipes, formats, quantized tensors, emulated GEMMs, who runs it",
    ),
    "parallelism, memory": (
        (
            *("parallel.py", "pipeline*.py", "fsdp_traffic.py", "in_flight.py", "timeline.py"),
            *("recompute*.py", "rebuild.py", "offload*.py", "host_copies.py", "cuda_graph.py", "recompiles.py"),
        ),
        "sharding, pipelines, who waits for a collective; activation checkpointing, offload, CUDA graphs",
    ),
    "data": (
        ("data.py", "mixture.py", "packing.py", "sources/*.py", "tokenizer.py", "tokenize.py", "validation*.py"),
        "packed batches in one global order; one file per kind of source; tokenizers",
    ),
    "optimizer": (("optimizer.py", "adamw.py", "muon*.py"), "torchtitan's containers; moments in bf16; Muon"),
    "checkpoints": (
        ("checkpoint*.py", "convert.py", "huggingface/*.py", "upcycl*.py", "upcycl*/*.py", "sampl*.py"),
        "saving, verified loading, Hugging Face folders",
    ),
    "guards": (
        ("guards.py", "corruption.py", "local_gradients.py", "stop*.py", "watchdog.py", "out_of_memory.py"),
        "skipped steps, wrong hardware, stopping, hangs, memory",
    ),
    "telemetry": (
        (
            "metrics.py",
            "trackers.py",
            "heat_map.py",
            "phase*.py",
            "telemetry.py",
            "wire.py",
            "clock.py",
            "profiling.py",
        ),
        "console line, metrics.jsonl, dashboards, time of phases, traces",
    ),
    "report": (("report/*.py",), "the page of a run"),
    "planner, dry run": (
        ("plan/*.py", "dry_run/*.py", "doctor/*.py"),
        "memory, kernels, traffic, schedules, search; one rank on fake tensors; what a machine lacks",
    ),
    "tests": (("tests/**.py",), "mirrors titan_moe/; whole runs in tests/distributed, faults in tests/faults"),
    "scripts, benchmarks": (("scripts/**.py", "benchmarks/**.py"), "set-up, generated tables, measurements"),
}
"""Name -> (patterns, what it is for). A file is of the first part that has it; patterns are below titan_moe/ where they
do not begin with another folder."""


def files() -> list[str]:
    """All Python files, as patterns name them."""
    found = ["train.py", *(str(path.relative_to("titan_moe")) for path in sorted(Path("titan_moe").rglob("*.py")))]
    found += [str(path) for folder in ("tests", "scripts", "benchmarks") for path in sorted(Path(folder).rglob("*.py"))]
    return [name for name in found if not name.endswith("__init__.py")]


def path_of(name: str) -> Path:
    return (
        Path(name)
        if name.startswith(("tests/", "scripts/", "benchmarks/")) or name == "train.py"
        else Path("titan_moe", name)
    )


def lines(name: str) -> int:
    return path_of(name).read_text(encoding="utf-8").count("\n")


def part_of(name: str) -> str | None:
    """The part that a file belongs to. A * does not go into folders, a ** does."""
    for part, (patterns, _) in PARTS.items():
        for pattern in patterns:
            if fnmatch(name, pattern) and ("**" in pattern or name.count("/") == pattern.count("/")):
                return part
    return None


def sizes() -> dict[str, int]:
    """Lines of each part."""
    found = dict.fromkeys(PARTS, 0)
    for name in files():
        if (part := part_of(name)) is not None:
            found[part] += lines(name)
    return found


def rounded(count: int) -> str:
    """To two digits."""
    unit = 10 ** max(0, len(str(count)) - 2)
    return f"{(count + unit // 2) // unit * unit:,}"


def purpose(name: str) -> str:
    """The first sentence of a file's docstring."""
    text = ast.get_docstring(ast.parse(path_of(name).read_text(encoding="utf-8"))) or ""
    first = re.split(r"(?<=\.)\s", " ".join(text.split("\n\n")[0].split()), maxsplit=1)[0]
    if len(first) > 110 and not first.startswith("`"):
        first = re.split(r"[:;]\s", first, maxsplit=1)[0]
    return first.rstrip(".:").replace("|", "\\|")


def parts_table() -> str:
    rows = [f"| {part} | {rounded(size)} | {PARTS[part][1]} |" for part, size in sizes().items()]
    return "\n".join(["| part | lines | what it holds |", "|---|---|---|", *rows])


def files_table() -> str:
    """Every file of titan_moe/ by its part."""
    lines_ = []
    for part, (_, text) in PARTS.items():
        names = [
            name for name in files() if part_of(name) == part and str(path_of(name)).startswith(("titan_moe", "train"))
        ]
        if names:
            lines_ += [
                f"## {part if part.endswith('.py') else part[0].upper() + part[1:]}",
                "",
                f"{text[0].upper()}{text[1:]}.",
                "",
            ]
            lines_ += ["| file | lines | what it holds |", "|---|---|---|"]
            lines_ += [f"| [{name}](../{path_of(name)}) | {rounded(lines(name))} | {purpose(name)} |" for name in names]
            lines_.append("")
    return "\n".join(lines_)


BLOCKS = {"parts": parts_table, "files": files_table}


def renewed(page: str) -> str:
    """The page with every generated part made again."""

    def made(match: re.Match[str]) -> str:
        return f"<!-- python -m scripts.file_map: {match[1]} -->\n{BLOCKS[match[1]]()}\n<!-- end -->"

    return re.sub(r"<!-- python -m scripts\.file_map: (\w+) -->\n.*?<!-- end -->", made, page, flags=re.DOTALL)


if __name__ == "__main__":
    for path in (README, PAGE):
        path.write_text(renewed(path.read_text()))
