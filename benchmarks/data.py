"""How fast one core turns each kind of source into batches, and what share of a step that is.

The text is this Python's standard library, as text, .jsonl, .parquet and token ids. Times are processor seconds of
this process, so that what else the machine does counts little; tokenizing by byte pairs is set against the tokenizers
library alone, on the same documents in calls of as many. The share is of the debug model's own step: processor time of
a batch over that of the step.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks.stepping import QUIET, SteppedRun, load, one_process_group  # isort: skip - before torchtitan

import pyarrow as pa
import pyarrow.parquet as pq
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from benchmarks.harness import Options, Record, interleaved, spread
from titan_moe import tokenize
from titan_moe.config import Config, DataSource
from titan_moe.data import build_dataloader
from titan_moe.packing import ENCODE_BYTES
from titan_moe.sources.listing import Source, list_source
from titan_moe.tokenizer import Tokenizer, build_tokenizer

SUITE = "data"
SEQ_LEN, BATCH = 4096, 4
MOST_SHARE = 2.0  # percent


def batches_of(sources: list[Source], tokenizer: Tokenizer):
    config = Config()
    config.training.seq_len = SEQ_LEN
    options = {"dp_rank": 0, "dp_degree": 1, "local_batch_size": BATCH, "seed": 0}
    return iter(build_dataloader(config, sources=sources, tokenizer=tokenizer, **options))


def write(folder: Path, texts: list[str], source: Source) -> dict[str, Source]:
    """`source`, whose documents are `texts`, and the same in other forms."""
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    pq.write_table(pa.table({"text": texts}), folder / "a.parquet", row_group_size=64)
    tokenize.write(source, build_tokenizer("", 258), "", folder / "ids")
    kinds = {".jsonl": "a.jsonl", ".parquet": "a.parquet", "token ids": "ids"}
    others = {kind: list_source(DataSource(dataset=str(folder / name))) for kind, name in kinds.items()}
    return {"text": source} | others


def train_bpe(folder: Path, texts: list[str]) -> None:
    """A byte-level BPE of GPT-2's kind."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=16_384, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))


def record(case: str, metric: str, **fields) -> Record:
    return Record(suite=SUITE, case=case, metric=metric, **fields)


def byte_level(sources: dict[str, Source], batches: int, repetitions: int) -> Iterator[Record]:
    """One byte is one token: what reading and packing cost."""
    tokenizer = build_tokenizer("", 258)
    groups = {**{kind: [source] for kind, source in sources.items()}, "all four, mixed": list(sources.values())}
    loaders = {name: batches_of(group, tokenizer) for name, group in groups.items()}

    def take(name: str) -> Callable[[], object]:
        return lambda: [next(loaders[name]) for _ in range(batches)]

    times = interleaved(
        {name: (lambda name=name: take(name)) for name in loaders}, repetitions, warm_up=1, clock=time.process_time
    )
    tokens = batches * BATCH * SEQ_LEN
    for name in loaders:
        speeds = [tokens / spent / 1e6 for spent in times.seconds[name]]
        low, high = spread(speeds)
        yield record(
            f"bytes, {name}", "loading", value=statistics.median(speeds), unit="M tokens/s", low=low, high=high
        )


def bpe(sources: dict[str, Source], folder: Path, every: int, repetitions: int) -> Iterator[Record]:
    """Byte pairs, of every so many pieces of the text."""
    tokenizer = build_tokenizer(str(folder), 16_384)
    library = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    for kind in ("text", ".jsonl"):
        source = replace(sources[kind], pieces=sources[kind].pieces[::every])
        loader = batches_of([source], tokenizer)
        next(loader)
        texts = [d.decode() for piece in source.pieces for d in piece.documents() if isinstance(d, bytes)]
        calls: list[list[str]] = [[]]
        for text in texts:
            if sum(map(len, calls[-1])) >= ENCODE_BYTES:
                calls.append([])
            calls[-1].append(text)
        tokens = sum(len(e.ids) for call in calls for e in library.encode_batch_fast(call, add_special_tokens=False))
        count = max(1, tokens // (BATCH * SEQ_LEN))
        variants = {
            "tokenizers": lambda calls=calls: [
                library.encode_batch_fast(call, add_special_tokens=False) for call in calls
            ],
            "ours": lambda loader=loader, count=count: [next(loader) for _ in range(count)],
        }
        times = interleaved(
            {name: (lambda call=call: call) for name, call in variants.items()},
            repetitions, warm_up=1, clock=time.process_time,
        )  # fmt: skip
        # Of as many tokens: the loader's batches hold fewer than the documents.
        scale = tokens / (count * BATCH * SEQ_LEN)
        ratios = [ratio / scale for ratio in times.ratios("ours", "tokenizers")]
        low, high = spread(ratios)
        yield record(
            f"byte pairs, {kind}", "loading", unit="M tokens/s", against="tokenizers alone", low=low, high=high,
            value=count * BATCH * SEQ_LEN / times.median("ours") / 1e6,
            baseline=tokens / times.median("tokenizers") / 1e6, ratio=statistics.median(ratios),
        )  # fmt: skip


def share_of_step(steps: int) -> Iterator[Record]:
    with one_process_group() as folder:
        run = SteppedRun(load(["train_configs/debug_model.toml", *QUIET], folder / "run"))
        run.step()
        shares = []
        for _ in range(steps):
            start = time.process_time()
            next(run.batches)
            loaded = time.process_time()
            run.step()
            shares.append(100 * (loaded - start) / (time.process_time() - loaded))
        run.close()
    low, high = spread(shares)
    yield record(
        "debug model, 8 x 128 tokens", "loading, share of a step", value=statistics.median(shares), unit="%", low=low,
        high=high, target=f"value <= {MOST_SHARE}",
    )  # fmt: skip


def measure(options: Options) -> Iterator[Record]:
    batches, repetitions, every = options.pick((2, 2, 256), (30, 5, 16), (100, 5, 4))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        stdlib = list_source(DataSource(dataset="python_stdlib"))
        stdlib = replace(stdlib, pieces=stdlib.pieces[:: options.pick(64, 1, 1)])
        texts = [d.decode(errors="replace") for piece in stdlib.pieces for d in piece.documents()]
        sources = write(folder, texts, stdlib)
        yield from byte_level(sources, batches, repetitions)
        train_bpe(folder, texts[:: options.pick(1, 16, 4)])
        yield from bpe(sources, folder, every, repetitions)
    yield from share_of_step(options.pick(1, 5, 20))
