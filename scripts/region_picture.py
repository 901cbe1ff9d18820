"""docs/moe_region.png: the way of eight tokens through plan, dispatch and experts, drawn from a real plan.

    python -m scripts.region_picture            draw it
    python -m scripts.region_picture --check    exit status 1 if the plan is no longer the one in the picture

Two gloo processes with four tokens and two experts each route them (`IDS`), and `dedup` plans; every row and every line
below is an entry of that plan. The picture carries the plan as metadata, by which a test knows whether it is current.

Shape letters: T tokens of a rank, K top-k, R rows of the padded slabs.
"""

import json
import sys
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import titan_moe.runtime  # noqa: F401

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from titan_moe.moe.contract import RowPlan
from titan_moe.moe.dispatch import make_dispatcher
from titan_moe.plan.pictures import COLORS, EDGE, GRID, INK, PALE, PAPER, WIDTH, Canvas

PICTURE = Path("docs/moe_region.png")
EXPERTS, ALIGNMENT = 4, 4
IDS = (((0, 1), (0, 2), (2, 3), (0, 3)), ((1, 0), (2, 3), (3, 2), (2, 0)))
"""The two experts of each token, by rank"""


@dataclass
class Way:
    """What one rank's plan says. `sent[i]`: the token in row i of the wire. `received[i]`: (rank, row) that arrives as
    row i. `slab_rows[i]`: the received row that row i of the slabs copies, -1 for padding. `slabs`: rows per expert."""

    sent: list[int]
    received: list[tuple[int, int]]
    slab_rows: list[int]
    slabs: list[int]


def plan_on(rank: int, folder: str) -> None:
    """One process: route, plan, write down what the plan says."""
    store = dist.FileStore(f"{folder}/store", len(IDS))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(IDS), timeout=timedelta(seconds=60))
    dispatcher = make_dispatcher("dedup", num_experts=EXPERTS, top_k=2, alignment=ALIGNMENT, ep_group=dist.group.WORLD)
    plan = dispatcher.plan(torch.tensor(IDS[rank]))
    assert isinstance(plan, RowPlan)
    (hop,) = plan.hops
    come, go = hop.row_splits
    outgoing = [[go[to], sum(go[:to])] for to in range(len(go))]  # how many rows go to each rank, and where they begin
    begins: list[Any] = [None] * len(IDS)
    dist.all_gather_object(begins, outgoing)
    received = [(source, begins[source][rank][1] + i) for source in range(len(IDS)) for i in range(come[source])]
    rows = [i if i < len(received) else -1 for i in plan.rows.source_R.tolist()]
    way = Way(hop.rows.source_R.tolist(), received, rows, plan.padded_counts_e.tolist())
    Path(f"{folder}/{rank}.json").write_text(json.dumps(asdict(way)))
    dist.destroy_process_group()


def ways() -> list[Way]:
    """Of all ranks, from processes of their own."""
    with TemporaryDirectory() as folder:
        mp.spawn(plan_on, (folder,), nprocs=len(IDS))
        found = [json.loads(Path(f"{folder}/{rank}.json").read_text()) for rank in range(len(IDS))]
    return [Way(**{**way, "received": [tuple(pair) for pair in way["received"]]}) for way in found]


def summary(found: list[Way]) -> str:
    return json.dumps([asdict(way) for way in found])


# ---------------------------------------------------------------------------------------------------------------------
# Drawing

CELL, BOX = 25, 21  # from row to row, height of a row
TOKENS, SENT, RECEIVED, SLABS, EXPERT = 40, 330, 610, 880, 1023  # left ends of the columns
WIDE = 110
RANK_HEIGHT, TOP = 362, 150


def token_name(rank: int, token: int) -> str:
    return "abcdefgh"[rank * len(IDS[0]) + token]


def draw(found: list[Way], path: Path) -> None:
    canvas = Canvas(TOP + RANK_HEIGHT * len(IDS) - 20)
    canvas.heading(
        "A token's way to its experts, and back",
        [
            f"two expert-parallel ranks, {EXPERTS} experts, top-2, dispatcher dedup, slabs of multiples of {ALIGNMENT} "
            "rows; every row and line is from a plan",
            "forward from left to right; combine, and the backward of dispatch, go the same ways from right to left "
            "and add up what meets",
        ],
    )
    heads = {TOKENS: "tokens, their experts", SENT: "rows sent", RECEIVED: "rows received", SLABS: "slabs: x_RD"}
    for x, head in (heads | {EXPERT: "one grouped GEMM"}).items():
        canvas.text(x, TOP - 18, head, 14, INK)
    canvas.text((TOKENS + WIDE + SENT) / 2 + 10, TOP - 18, "gather", 13, PALE, "mm")
    canvas.text((SENT + WIDE + RECEIVED) / 2, TOP - 18, "all-to-all", 13, PALE, "mm")
    canvas.text((RECEIVED + WIDE + SLABS) / 2, TOP - 18, "gather", 13, PALE, "mm")
    for rank, way in enumerate(found):
        _rank(canvas, rank, way, found)
    from PIL.PngImagePlugin import PngInfo

    metadata = PngInfo()
    metadata.add_text("Description", summary(found))
    canvas.image.quantize(64).save(path, pnginfo=metadata, optimize=True)


def _rank(canvas: Canvas, rank: int, way: Way, found: list[Way]) -> None:
    top = _top(rank)
    if rank:
        canvas.line(EDGE, top - 16, WIDTH - EDGE, top - 16, GRID, 2)
    canvas.text(TOKENS, top + 6, f"rank {rank}, experts {_experts(rank)}", 14, PALE)
    for token, ids in enumerate(IDS[rank]):
        _row(canvas, TOKENS, rank, token, (rank, token))
        canvas.text(TOKENS + WIDE + 8, _y(rank, token), f"{ids[0]}, {ids[1]}", 13, PALE)
    for i, token in enumerate(way.sent):
        _line(canvas, TOKENS + WIDE + 44, rank, token, SENT, rank, i, (rank, token))
        _row(canvas, SENT, rank, i, (rank, token))
    for i, (source, row) in enumerate(way.received):
        token = (source, found[source].sent[row])
        _line(canvas, SENT + WIDE, source, row, RECEIVED, rank, i, token)
        _row(canvas, RECEIVED, rank, i, token)
    end = 0
    for expert, size in enumerate(way.slabs):
        start, end = end, end + size
        for i in range(start, end):
            if way.slab_rows[i] < 0:
                _empty(canvas, i, rank)
                continue
            source, row = way.received[way.slab_rows[i]]
            token = (source, found[source].sent[row])
            _line(canvas, RECEIVED + WIDE, rank, way.slab_rows[i], SLABS, rank, i, token)
            _row(canvas, SLABS, rank, i, token)
        middle = (_y(rank, start) + _y(rank, end - 1)) / 2
        canvas.line(SLABS + WIDE + 12, _y(rank, start) - 9, SLABS + WIDE + 12, _y(rank, end - 1) + 9, PALE, 2)
        name = rank * len(way.slabs) + expert
        canvas.text(EXPERT, middle, f"expert {name}: {size} rows,", 14)
        canvas.text(
            EXPERT, middle + 18, f"{sum(row < 0 for row in way.slab_rows[start:end])} of them padding", 13, PALE
        )


def _top(rank: int) -> float:
    return TOP + rank * RANK_HEIGHT + 8


def _y(rank: int, row: int) -> float:
    return _top(rank) + 34 + CELL * row


def _experts(rank: int) -> str:
    local = EXPERTS // len(IDS)
    return " and ".join(str(rank * local + i) for i in range(local))


def _color(token: tuple[int, int]) -> str:
    return COLORS[token[0] * len(IDS[0]) + token[1]]


def _row(canvas: Canvas, x: float, rank: int, row: int, token: tuple[int, int]) -> None:
    y = _y(rank, row)
    canvas.box(x, y - BOX / 2, x + WIDE, y + BOX / 2, _color(token))
    canvas.text(x + WIDE / 2, y, token_name(*token), 14, PAPER, "mm")


def _empty(canvas: Canvas, row: int, rank: int) -> None:
    y = _y(rank, row)
    canvas.box(SLABS, y - BOX / 2, SLABS + WIDE, y + BOX / 2, GRID)
    canvas.text(SLABS + WIDE / 2, y, "0", 13, PALE, "mm")


def _line(canvas: Canvas, x0: float, rank0: int, row0: int, x1: float, rank1: int, row1: int, token: tuple) -> None:
    canvas.line(x0 + 3, _y(rank0, row0), x1 - 3, _y(rank1, row1), _color(token), 2)


def shown() -> str | None:
    """The plan in the picture; None if there is none."""
    from PIL import Image

    if not PICTURE.exists():
        return None
    with Image.open(PICTURE) as image:
        return image.info.get("Description")


if __name__ == "__main__":
    planned = ways()
    if sys.argv[1:] == ["--check"]:
        if shown() != summary(planned):
            sys.exit(f"{PICTURE} shows another plan: python -m scripts.region_picture")
    else:
        draw(planned, PICTURE)
