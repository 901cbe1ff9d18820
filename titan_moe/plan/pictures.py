"""Two pictures of a plan: memory.png, what fills a GPU, and timeline.png, one MoE layer's kernels and transfers. A
third, scaling.png, is in scaling_chart.py.

Drawn with Pillow, which comes with tensorboard: bars and labels need no plotting library, and the planner stays quick.
Everything is laid out in units of a picture 1,200 wide and drawn twice as large.
"""

from collections.abc import Iterable
from pathlib import Path

from titan_moe import whole_file
from titan_moe.config_file import ConfigError
from titan_moe.plan.memory import GIB, Memory
from titan_moe.plan.report import Plan

SCALE = 2
WIDTH, EDGE, LABELS = 1200, 30, 330
INK, PALE, GRID, PAPER, ALARM = "#1f2430", "#6b7280", "#e3e6eb", "#ffffff", "#c2362b"
COLORS = ("#3b6fb6", "#e08a3c", "#4f9d69", "#8c6bb1", "#c95f7b", "#5aa6b8", "#a39158", "#5f6f9f", "#b07aa1", "#9aa1ac")
LANES = {"compute": "compute", "nvlink": "NVLink", "network": "network", "copy": "copies", "host": "host"}
SMALLEST = 0.008
"""Items below this share of the needed memory are one bar together"""


def draw(plan: Plan, folder: str) -> list[Path]:
    """Write the pictures into `folder`, making it, and return their paths. Raises ConfigError where that cannot be."""
    from titan_moe.plan import scaling_chart  # draws on the Canvas below

    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "pictures", ["plan.png: needs Pillow, which the training environment has; or pip install pillow"]
        ) from error
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        chart, lanes = paths(Path(folder))
        drawn = [memory_chart(plan, chart), timeline(plan, lanes)]
        return [*drawn, scaling_chart.draw(plan, Path(folder) / "scaling.png")] if plan.scaling else drawn
    except OSError as error:
        raise ConfigError("pictures", [f'plan.png = "{folder}": {error.strerror or error}']) from error


def paths(folder: Path) -> list[Path]:
    """The files that `draw` writes."""
    return [folder / "memory.png", folder / "timeline.png"]


def summary(plan: Plan) -> str:
    """The numbers in the pictures, which they carry as metadata, so that one can tell whether they are current."""
    return (
        f"{job_line(plan)}; {plan.speed.tokens_per_s_per_gpu:,.0f} tokens/s per GPU, "
        f"{plan.memory.needed / GIB:,.1f} of {plan.memory.capacity / GIB:,.1f} GiB"
    )


def shown_in(path: Path) -> str | None:
    """The `summary` of the plan that a picture shows; None if there is no such picture."""
    from PIL import Image

    if not path.exists():
        return None
    with Image.open(path) as image:
        return image.info.get("Description")


class Canvas:
    """Rectangles, lines and text in picture units."""

    def __init__(self, height: int) -> None:
        from PIL import Image, ImageDraw

        self.image = Image.new("RGB", (WIDTH * SCALE, height * SCALE), PAPER)
        self.pen = ImageDraw.Draw(self.image)
        self.height = height

    def _font(self, size: float):
        from PIL import ImageFont

        return ImageFont.load_default(size * SCALE)

    def box(self, x0: float, y0: float, x1: float, y1: float, color: str) -> None:
        if x1 > x0:
            self.pen.rectangle((x0 * SCALE, y0 * SCALE, x1 * SCALE, y1 * SCALE), fill=color)

    def line(self, x0: float, y0: float, x1: float, y1: float, color: str, width: float = 1) -> None:
        self.pen.line((x0 * SCALE, y0 * SCALE, x1 * SCALE, y1 * SCALE), fill=color, width=round(width * SCALE))

    def text(self, x: float, y: float, text: str, size: float = 14, color: str = INK, anchor: str = "lm") -> None:
        self.pen.text((x * SCALE, y * SCALE), text, fill=color, font=self._font(size), anchor=anchor)

    def width_of(self, text: str, size: float) -> float:
        return self.pen.textlength(text, font=self._font(size)) / SCALE

    def heading(self, title: str, lines: Iterable[str]) -> float:
        """Title and subtitles; returns where they end."""
        y = EDGE + 10
        self.text(EDGE, y, title, 21)
        for line in lines:
            y += 24
            self.text(EDGE, y, line, 14, PALE)
        return y + 16

    def save(self, path: Path, description: str) -> Path:
        from PIL.PngImagePlugin import PngInfo

        metadata = PngInfo()
        metadata.add_text("Description", description)
        with whole_file.replacing(path) as written:
            # A palette makes it a quarter of the size, and nothing here has more colors.
            self.image.quantize(64).save(written, "PNG", pnginfo=metadata, optimize=True)
        return path


def job_line(plan: Plan) -> str:
    job = plan.job
    degrees = {"FSDP": job.dp_shard, "TP": job.tp, "CP": job.cp, "PP": job.pp, "EP": job.ep}
    layout = " x ".join(f"{name} {degree}" for name, degree in degrees.items() if degree > 1) or "one rank"
    return (
        f"{job.model_name} on {job.gpus:,} x {job.hardware.name}, {job.precision}, {layout}, microbatches of "
        f"{job.micro_batch_size} x {job.seq_len:,} tokens"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Memory


def memory_chart(plan: Plan, path: Path) -> Path:
    """All groups stacked against the GPU's memory, and below one bar for each item, in its group's color."""
    memory = plan.memory
    groups = memory.by_group() | {"margin for fragmentation": memory.margin}
    colors = dict(zip(groups, (COLORS[i % len(COLORS)] for i in range(len(groups)))))
    rows = _rows(memory)
    canvas = Canvas(height=290 + 26 * len(rows))
    state = f"{memory.free / GIB:,.1f} GiB free" if memory.fits else f"{-memory.free / GIB:,.1f} GiB too much"
    verdict = "It fits" if memory.fits else "It does not fit"
    top = canvas.heading(
        f"{verdict}: {memory.needed / GIB:,.1f} of {memory.capacity / GIB:,.1f} GiB per GPU, {state}", [job_line(plan)]
    )
    most = max(memory.needed, memory.capacity)
    span = (WIDTH - 2 * EDGE) / most
    x = float(EDGE)
    for group, size in groups.items():
        canvas.box(x, top + 20, x + size * span - 1, top + 60, colors[group])
        x += size * span
    limit = EDGE + memory.capacity * span
    canvas.line(limit, top + 8, limit, top + 72, INK if memory.fits else ALARM, 2)
    canvas.text(limit, top + 6, plan.job.hardware.name, 13, INK if memory.fits else ALARM, "rb")
    y = _legend(canvas, colors, top + 92) + 38
    canvas.text(EDGE, y, "Items, GiB", 15)
    largest = max(size for _, _, size in rows)
    for group, name, size in rows:
        y += 26
        canvas.text(EDGE + LABELS - 12, y, name, 13, INK, "rm")
        end = EDGE + LABELS + size / largest * (WIDTH - 2 * EDGE - LABELS - 70)
        canvas.box(EDGE + LABELS, y - 9, end, y + 9, colors.get(group, COLORS[-1]))
        canvas.text(end + 8, y, f"{size / GIB:,.2f}", 13)
    return canvas.save(path, summary(plan))


def _rows(memory: Memory) -> list[tuple[str, str, float]]:
    rows = [*memory.entries, ("margin for fragmentation", "margin for fragmentation", memory.margin)]
    rows = sorted(((group, name, size) for group, name, size in rows), key=lambda row: -row[2])
    small = [row for row in rows if row[2] < SMALLEST * memory.needed]
    if len(small) > 1:
        rows = [row for row in rows if row not in small]
        rows.append(("", f"{len(small)} smaller ones", sum(size for *_, size in small)))
    return rows


def _legend(canvas: Canvas, colors: dict[str, str], y: float) -> float:
    """Names beside their colors, over as many lines as it takes; returns the last one's y."""
    x = float(EDGE)
    for name, color in colors.items():
        wide = canvas.width_of(name, 13) + 46
        if x + wide > WIDTH - EDGE + 20:
            x, y = float(EDGE), y + 24
        canvas.box(x, y - 7, x + 14, y + 7, color)
        canvas.text(x + 21, y, name, 13)
        x += wide
    return y


# ---------------------------------------------------------------------------------------------------------------------
# Timeline


def timeline(plan: Plan, path: Path) -> Path:
    """Lanes of one MoE layer, forward and backward, over milliseconds; what belongs together has one color."""
    spans = plan.speed.timeline
    lanes = [lane for lane in LANES if any(span[0] == lane for span in spans)]
    lanes += sorted({span[0] for span in spans} - set(lanes))
    blocks = list(dict.fromkeys(name.split()[0] for _, name, *_ in spans))
    colors = {block: COLORS[i % len(COLORS)] for i, block in enumerate(blocks)}
    high, first = 64, 160
    canvas = Canvas(height=250 + high * len(lanes))
    end = max(stop for *_, stop in spans)
    speed = plan.speed
    top = canvas.heading(
        f"One MoE layer, one microbatch: {1e3 * end:,.1f} ms forward and backward",
        [job_line(plan), f"the whole step: {speed.step_seconds:,.2f} s, limited by {speed.limit}"],
    )
    _legend(canvas, colors, top + 12)
    left, right = EDGE + 90, WIDTH - EDGE
    scale = (right - left) / end
    bottom = first + high * len(lanes)
    for tick in _ticks(1e3 * end):
        x = left + tick / 1e3 * scale
        canvas.line(x, first, x, bottom, GRID)
        canvas.text(x, bottom + 16, f"{tick:g}", 13, PALE, "mm")
    canvas.text(right, bottom + 38, "milliseconds", 13, PALE, "rm")
    for row, lane in enumerate(lanes):
        y = first + high * row
        canvas.text(EDGE, y + high / 2, LANES.get(lane, lane), 15)
        canvas.line(left, y + high, right, y + high, GRID)
        for _, name, start, stop in (span for span in spans if span[0] == lane):
            x0, x1 = left + start * scale, left + stop * scale
            block, phase = (*name.split(" ", 1), "forward")[:2]
            canvas.box(x0, y + 10, x1 - 1, y + high - 10, colors[block])
            fitting = (word for word in (name, phase, phase[:1].upper()) if canvas.width_of(word, 12) < x1 - x0 - 5)
            canvas.text((x0 + x1) / 2, y + high / 2, next(fitting, ""), 12, PAPER, "mm")
    return canvas.save(path, summary(plan))


def _ticks(end: float) -> list[float]:
    """Five to twelve round numbers from 0 to `end`."""
    step = next(s for power in range(-4, 6) for s in (10.0**power, 2 * 10.0**power, 5 * 10.0**power) if end / s <= 12)
    return [i * step for i in range(int(end / step) + 1)]
