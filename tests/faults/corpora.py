"""A small text as every kind of source, for runs that go over all of it more than once in a few steps."""

from pathlib import Path

from tests.distributed.harness import REPO
from tests.pieces import TOKENIZER, jsonl, listed, write
from tests.test_own_data import parquet
from titan_moe import tokenize

TEXTS = [f"document {i}: " + "text " * (5 * i % 17) + "Grüße 漢字\n"[: i % 11] for i in range(40)]
HUB_FILES = {f"data/train-{i:05}-of-00004.parquet": parquet(TEXTS[i::4], row_group_size=4) for i in range(4)}


def written(folder: Path) -> dict[str, str]:
    """By kind, what to name in `dataset`. 3,000 tokens each; a step of SMALL_FP32 takes 512."""
    text = write(folder / "text", {f"{i:02}.txt": text.encode() for i, text in enumerate(TEXTS)})
    lines = write(folder / "lines", {"a.jsonl": jsonl(TEXTS[:15]), "b.jsonl": jsonl(TEXTS[15:])})
    rows = write(folder / "rows", {"a.parquet": parquet(TEXTS, row_group_size=4)})
    tokenize.write(listed(lines), TOKENIZER, "", folder / "tokens")
    return {"text": text, "lines": lines, "rows": rows, "tokens": str(folder / "tokens"), "synthetic": "synthetic"}


def mixture(datasets: dict[str, str], path: Path) -> Path:
    """The debug model's configuration with a mixture of them, of different weights."""
    entries = [
        f'[[training.mixture]]\ndataset = "{name}"\nweight = {i}\n' for i, name in enumerate(datasets.values(), 1)
    ]
    lines = (REPO / "train_configs" / "debug_model.toml").read_text().splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith("dataset =")]
    path.write_text("".join(kept) + "\n" + "\n".join(entries))
    return path
