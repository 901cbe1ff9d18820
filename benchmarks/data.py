"""How fast one core turns each kind of source into batches, and what share of the debug model's step that is.

    OMP_NUM_THREADS=1 python benchmarks/data.py [--step]

The text is this Python's standard library, written as .jsonl, .parquet and token ids too. Processor seconds of this
process, so what else the machine does counts little; the tokenizers library is timed on the same documents, in calls of
as many, in turn with the loader. --step trains the debug model for 20 steps and reads the share that waiting for data
has of it.
"""

import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from titan_moe import tokenize
from titan_moe.config import Config, DataSource
from titan_moe.data import build_dataloader
from titan_moe.metrics import read_metrics
from titan_moe.packing import ENCODE_BYTES
from titan_moe.sources.listing import Source, list_source
from titan_moe.tokenizer import Tokenizer, build_tokenizer

ROOT = Path(__file__).parents[1]
SEQ_LEN, BATCH = 4096, 4
REPETITIONS = 5


def batches_of(sources: list[Source], tokenizer: Tokenizer):
    config = Config()
    config.training.seq_len = SEQ_LEN
    options = {"dp_rank": 0, "dp_degree": 1, "local_batch_size": BATCH, "seed": 0}
    return iter(build_dataloader(config, sources=sources, tokenizer=tokenizer, **options))


def seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def write(folder: Path, texts: list[str]) -> dict[str, Source]:
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pq.write_table(pa.table({"text": texts}), folder / "a.parquet", row_group_size=64)
    kinds = {"text": "python_stdlib", ".jsonl": f"{folder}/a.jsonl", ".parquet": f"{folder}/a.parquet"}
    found = {kind: list_source(DataSource(dataset=dataset)) for kind, dataset in kinds.items()}
    tokenize.write(found["text"], build_tokenizer("", 258), "", folder / "ids")
    return found | {"token ids": list_source(DataSource(dataset=str(folder / "ids")))}


def train_bpe(folder: Path, texts: list[str]) -> None:
    """A byte-level BPE of GPT-2's kind."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=16_384, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts[::4], trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def byte_level(sources: dict[str, Source]) -> None:
    tokenizer = build_tokenizer("", 258)
    mixture = {"all four, mixed": list(sources.values())}
    for name, group in {**{kind: [source] for kind, source in sources.items()}, **mixture}.items():
        batches = batches_of(group, tokenizer)
        next(batches)
        speeds = []
        for _ in range(REPETITIONS):
            taken = seconds(lambda batches=batches: [next(batches) for _ in range(100)])
            speeds.append(100 * BATCH * SEQ_LEN / taken / 1e6)
        print(f"bytes, {name:16} {statistics.median(speeds):6.1f} M tokens/s ({min(speeds):.1f} - {max(speeds):.1f})")


def bpe(sources: dict[str, Source], folder: Path) -> None:
    tokenizer = build_tokenizer(str(folder), 16_384)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for kind in ("text", ".jsonl"):
        source = replace(sources[kind], pieces=sources[kind].pieces[::4])
        batches = batches_of([source], tokenizer)
        next(batches)
        texts = [d.decode() for piece in source.pieces for d in piece.documents() if isinstance(d, bytes)]
        calls: list[list[str]] = [[]]
        for text in texts:
            if sum(map(len, calls[-1])) >= ENCODE_BYTES:
                calls.append([])
            calls[-1].append(text)
        tokens = sum(len(e.ids) for call in calls for e in library.encode_batch_fast(call, add_special_tokens=False))
        count = tokens // (BATCH * SEQ_LEN)
        ratios, speeds = [], []
        for _ in range(REPETITIONS):
            theirs = seconds(
                lambda calls=calls: [library.encode_batch_fast(call, add_special_tokens=False) for call in calls]
            )
            ours = seconds(lambda batches=batches, count=count: [next(batches) for _ in range(count)])
            speeds.append(count * BATCH * SEQ_LEN / ours / 1e6)
            ratios.append(speeds[-1] / (tokens / theirs / 1e6))
        quartiles = statistics.quantiles(ratios, n=4)
        print(
            f"BPE, {kind:18} {statistics.median(speeds):6.2f} M tokens/s, {statistics.median(ratios):.2f} "
            f"({quartiles[0]:.2f} - {quartiles[2]:.2f}) of the tokenizers library alone"
        )


def step() -> None:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "train.py", "train_configs/debug_model.toml", f"--job.dump_folder={folder}/run"]
        command += ["--training.steps=20", "--lr_scheduler.total_steps=160", "--metrics.log_freq=5"]
        subprocess.run([*command, "--validation.enable=false"], cwd=ROOT, check=True, capture_output=True)
        shares = [
            record["data_percent"] for record in itertools.islice(read_metrics(folder + "/run").values(), 1, None)
        ]
    print(f"debug model, data's share of a step: {statistics.mean(shares):.2f} % (at most 2 %)")


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stdlib = list_source(DataSource(dataset="python_stdlib"))
        texts = [d.decode(errors="replace") for piece in stdlib.pieces for d in piece.documents()]
        sources = write(folder, texts)
        byte_level(sources)
        train_bpe(folder, texts)
        bpe(sources, folder)
    if "--step" in sys.argv[1:]:
        step()


if __name__ == "__main__":
    main()
