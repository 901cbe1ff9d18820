"""Tables of the configuration's keys: `python -m scripts.config_docs` renews docs/configuration.md, and README's short
one.

Types, defaults and texts come from the schema (titan_moe/config.py) as `--help` prints them; only what a section is for
stands here. A test notices when a page is out of date, or a section is missing below.
"""

import re
from pathlib import Path

from titan_moe.config_help import documentation, entries, type_text
from titan_moe.config_keys import LEAVES, SECTIONS, build, get
from titan_moe.config_print import literal

PAGE, README = Path("docs/configuration.md"), Path("README.md")

SECTION_TEXTS = {
    "job": "the run's folder and description",
    "model": "family, size and single numbers of it; tokenizer or Hugging Face folder",
    "moe": "dispatcher, experts, router, balancing ([backends.md](backends.md), [moe_region.md](moe_region.md))",
    "precision": "low-precision recipes: which GEMMs, by whom ([precision.md](precision.md))",
    "optimizer": "AdamW or Muon, and their numbers ([optimizer.md](optimizer.md))",
    "lr_scheduler": "warm-up, decay, length",
    "training": "data, sequence length, batch, steps, number types ([data.md](data.md))",
    "training.dataloader": "reading: text field, workers, what to do about broken documents",
    "loss": "how the cross-entropy is cut",
    "validation": "held-out documents, further sets by name, and how often ([data.md](data.md))",
    "parallelism": "degrees of each kind, pipeline schedule, FSDP's policies ([parallelism.md](parallelism.md))",
    "activation_checkpoint": "what backward computes again",
    "activation_offload": "what waits in host memory ([overlap.md](overlap.md))",
    "compile": "torch.compile",
    "cuda_graph": "a step as one CUDA graph",
    "checkpoint": "when, where, verified how; Hugging Face folders ([checkpoints.md](checkpoints.md))",
    "metrics": "what is logged, how often, to whom ([telemetry.md](telemetry.md))",
    "profiling": "traces, memory snapshots, NVTX ([profiling.md](profiling.md))",
    "comm": "time limits of collectives; dry run ([dry_run.md](dry_run.md))",
    "guards": "which steps are skipped, checks for hardware errors ([faults.md](faults.md))",
    "debug": "seed, determinism",
    "plan": "what --plan calculates with ([planner.md](planner.md))",
}


def cell(text: str) -> str:
    return text.replace("|", "\\|")


def keys(section: str) -> list[str]:
    return [key for key in LEAVES if key.rpartition(".")[0] == section]


def tables() -> str:
    """All keys, one table per section."""
    texts, defaults, lines = documentation(), build({}), []
    for section in SECTIONS:
        text = SECTION_TEXTS.get(section, "")
        lines += [f"## [{section}]", "", f"{text[:1].upper()}{text[1:]}.", ""]
        lines += ["| key | default | type | what it does |", "|---|---|---|---|"]
        for key in keys(section):
            default = get(defaults, key)
            shown = "" if default is None else f"`{cell(literal(default))}`"
            more = [
                f"<br>`{name}`: {rest}" for name, _, rest in (text.partition(": ") for text in entries(LEAVES[key]))
            ]
            what = cell(texts[key] + "".join(more))
            lines.append(f"| `{key.rpartition('.')[2]}` | {shown} | {cell(type_text(LEAVES[key]))} | {what} |")
        lines.append("")
    return "\n".join(lines)


SMALL = 3  # keys of a section that shares its line


def short_table() -> str:
    """One line per section, for README; small ones share the last."""
    lines, small = ["| section | keys | what it is about |", "|---|---|---|"], []
    for section in SECTIONS:
        text = re.sub(r"\((\w+\.md)\)", r"(docs/\1)", SECTION_TEXTS.get(section, ""))
        link = f"[\\[{section}\\]](docs/configuration.md#{section.replace('.', '')})"
        if len(keys(section)) <= SMALL:
            small.append((link, len(keys(section))))
        else:
            lines.append(f"| {link} | {len(keys(section))} | {text} |")
    links = ", ".join(link for link, _ in small)
    return "\n".join([*lines, f"| {links} | {sum(number for _, number in small)} | what they are called after |"])


BLOCKS = {"keys": tables, "sections": short_table}


def renewed(page: str) -> str:
    """The page with every generated part made again."""

    def made(match: re.Match[str]) -> str:
        return f"<!-- python -m scripts.config_docs: {match[1]} -->\n{BLOCKS[match[1]]()}\n<!-- end -->"

    pattern = r"<!-- python -m scripts\.config_docs: (\w+) -->\n.*?<!-- end -->"
    return re.sub(pattern, made, page, flags=re.DOTALL)


if __name__ == "__main__":
    for path in (PAGE, README):
        path.write_text(renewed(path.read_text()))
