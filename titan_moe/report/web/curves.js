// What charts over the steps share, and the line charts: each curve is one run's; raw values are pale behind the
// smoothed ones.

const RAW_BEHIND = 0.28; // opacity
const HEIGHT = 210;
const WHOLE_TICKS = [...Array(16).keys()].flatMap((digits) => [1, 2, 5].map((first) => first * 10 ** digits)); // distances

// Exponential moving average without the pull towards its start; over the means of buckets where points were left out.
function smoothed(curve, weight) {
  const x = curve.mx ?? curve.x, y = curve.my ?? curve.y;
  let sum = 0, total = 0;
  return [x, y.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return sum / total;
  })];
}

const positive = (y) => y.map((value) => (value > 0 ? value : null)); // all that a logarithmic axis has

function nearest(u, series, at) {
  const y = u.data[series];
  if (y[at] != null) return at;
  let left = at, right = at;
  while (left >= 0 && y[left] == null) left--;
  while (right < y.length && y[right] == null) right++;
  if (left < 0) return right < y.length ? right : null;
  if (right >= y.length) return left;
  return at - left <= right - at ? left : right;
}

// `whole`: no value lies between two whole numbers, so no tick does.
function axes(whole) {
  const look = { stroke: color("pale"), font: "11px system-ui, sans-serif", grid: { stroke: color("line"), width: 1 }, ticks: { show: false } };
  const steps = (u, splits) => splits.map((s) => (Number.isInteger(s) ? s.toLocaleString("en-US") : ""));
  return [
    { ...look, grid: { show: false }, values: steps, size: 22, gap: 3, label: "step", labelSize: 14, labelGap: 0, labelFont: look.font },
    { ...look, size: 54, gap: 4, ...(whole && { incrs: WHOLE_TICKS }), values: (u, splits) => splits.map((s) => (s === null ? "" : short(s))) },
  ];
}

// uPlot's own range, but for a curve that is 0 all the time, which it would put on an axis up to 100.
function linear(u, min, max) {
  if (min === 0 && max === 0) return [0, 1];
  return min === null ? [null, null] : uPlot.rangeNum(min, max, 0.1, true);
}

function short(value) {
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e9) return `${+(value / 1e9).toPrecision(4)}B`;
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(4)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(4)}k`;
  return size < 1e-3 ? value.toExponential(1).replace(".0e", "e") : String(+value.toPrecision(4));
}

// Restarts from top to bottom; with `events` checkpoints at the bottom and skipped steps at the top too.
function drawMarks(u, events) {
  const { ctx, bbox } = u, dpr = devicePixelRatio || 1;
  const [first, last] = range();
  const within = (step) => step >= first && step <= last;
  ctx.save();
  DATA.runs.forEach((run, i) => {
    if (CHOICE.hidden.includes(i)) return;
    const at = (step) => Math.round(u.valToPos(step, "x", true));
    ctx.strokeStyle = ctx.fillStyle = runColor(i);
    ctx.lineWidth = dpr;
    ctx.setLineDash([4 * dpr, 4 * dpr]);
    for (const [step] of run.restarts.filter(([step]) => within(step))) {
      ctx.beginPath();
      ctx.moveTo(at(step), bbox.top);
      ctx.lineTo(at(step), bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.setLineDash([]);
    for (const step of events ? run.checkpoints.filter(within) : []) {
      const x = at(step), y = bbox.top + bbox.height;
      ctx.beginPath();
      ctx.moveTo(x - 4 * dpr, y);
      ctx.lineTo(x + 4 * dpr, y);
      ctx.lineTo(x, y - 6 * dpr);
      ctx.fill();
    }
    ctx.strokeStyle = color("bad");
    ctx.lineWidth = 1.5 * dpr;
    for (const [step] of events ? run.skips.filter(([step]) => within(step)) : []) {
      const x = at(step), y = bbox.top + 5 * dpr, d = 3 * dpr;
      ctx.beginPath();
      ctx.moveTo(x - d, y - d);
      ctx.lineTo(x + d, y + d);
      ctx.moveTo(x - d, y + d);
      ctx.lineTo(x + d, y - d);
      ctx.stroke();
    }
  });
  ctx.restore();
}

// What happened within a few pixels of a step.
function marksAt(u, left) {
  const near = (step) => Math.abs(u.valToPos(step, "x") - left) < 4;
  return DATA.runs.flatMap((run, i) => CHOICE.hidden.includes(i) ? [] : [
    ...run.restarts.filter(([step]) => near(step)).map(([step, attempt]) => `restart, attempt ${attempt}, at ${show(step)}`),
    ...run.checkpoints.filter(near).map((step) => `checkpoint ${show(step)}`),
    ...run.skips.filter(([step]) => near(step)).map(([step, n]) => `${n} skipped before ${show(step + 1)}`),
  ]).slice(0, 3);
}

// A place for a chart over the steps, all of which are zoomed and pointed at together; `told` is what it says to those
// who do not see it. A kind of chart has `draw`, which calls `replot`, and `tell`, which writes the readout.
class StepChart {
  constructor(height, told) {
    this.height = height;
    this.readout = element("div", { className: "readout" });
    this.plot = element("div", { className: "plot" });
    this.plot.style.height = `${height}px`;
    this.plot.setAttribute("role", "img");
    this.plot.setAttribute("aria-label", told);
    new ResizeObserver(() => this.u && this.plot.clientWidth !== this.u.width && this.u.setSize(this.size())).observe(this.plot);
  }

  size() {
    return { width: this.plot.clientWidth, height: this.height };
  }

  replot({ y, series, data, cursor, hooks, whole }) {
    this.u?.destroy();
    this.u = new uPlot({
      ...this.size(),
      padding: [8, 28, 0, 0],
      legend: { show: false },
      scales: { x: { time: false, range: () => range() }, y },
      axes: axes(whole),
      series: [{}, ...series],
      cursor: {
        sync: { key: "steps" },
        y: false,
        drag: { x: true, y: false, setScale: false },
        bind: { dblclick: () => () => (look(null), null) },
        ...cursor,
      },
      hooks: { setCursor: [() => this.tell()], setSelect: [(u) => select(u)], ...hooks },
    }, data, this.plot);
    this.tell();
  }

  follow() {
    this.u.setScale("x", { min: range()[0], max: range()[1] });
  }
}

class CurveChart extends StepChart {
  constructor(chart) {
    super(HEIGHT, `${chart.title} over steps; its last values are in the table below`);
    this.chart = chart;
    const title = element("figcaption", {}, element("b", {}, chart.title), element("small", {}, chart.unit), this.readout);
    this.figure = element("figure", {}, title, this.plot);
  }

  curves() {
    return this.chart.curves.filter((curve) => !CHOICE.hidden.includes(curve.run));
  }

  // Pairs of (curve, whether it is the pale one behind), and uPlot's columns.
  layers() {
    const smooths = this.chart.smooth && CHOICE.smoothing > 0, log = this.chart.log && CHOICE.log;
    const layers = [], columns = [];
    for (const curve of this.curves()) {
      const behind = smooths && !curve.points;
      layers.push({ curve, behind });
      columns.push([curve.x, log ? positive(curve.y) : curve.y]);
      if (behind) {
        const [x, y] = smoothed(curve, CHOICE.smoothing);
        layers.push({ curve, behind: false });
        columns.push([x, log ? positive(y) : y]);
      }
    }
    return [layers, columns.length ? uPlot.join(columns) : [[...WHOLE]]];
  }

  series({ curve, behind }) {
    const names = [...new Set(this.chart.curves.map((each) => each.label))];
    const many = DATA.runs.length > 1;
    const which = names.indexOf(curve.label);
    const stroke = many || which === 0 ? runColor(curve.run) : runColor(which);
    this.strokes.set(curve, stroke);
    return {
      stroke,
      alpha: behind ? RAW_BEHIND : 1,
      width: behind ? 1 : 1.6,
      dash: many && which > 0 ? [6, 3] : curve.run >= 8 ? [2, 3] : undefined,
      points: { show: curve.x.length === 1 || (curve.points && curve.x.length <= 60), size: 5 },
    };
  }

  draw() {
    const [layers, data] = this.layers();
    const log = this.chart.log && CHOICE.log && data.slice(1).some((column) => column.some((value) => value > 0));
    this.strokes = new Map();
    this.shown = layers;
    this.replot({
      y: log ? { distr: 3, range: (u, min, max) => [min / 1.1, max * 1.1] } : { range: linear },
      whole: !log && this.curves().every((curve) => curve.y.every((value) => value === null || Number.isInteger(value))),
      series: layers.map((layer) => this.series(layer)),
      data,
      cursor: { dataIdx: nearest, points: { size: 6 } },
      hooks: { draw: [(u) => drawMarks(u, this.chart.group === "training")] },
    });
  }

  // After the slider has moved: the same curves, other values.
  smooth() {
    if (this.shown.length !== this.layers()[0].length) return this.draw();
    this.u.setData(this.layers()[1], false);
    this.follow();
  }

  // Values under the cursor, or else the newest.
  tell() {
    const u = this.u;
    if (!u) return;
    const hovers = u.cursor.left >= 0 && u.cursor.idx != null;
    const step = hovers ? Math.round(u.posToVal(u.cursor.left, "x")) : null;
    const told = hovers ? [element("span", {}, `step ${show(step)}`)] : [];
    const names = DATA.runs.length > 1 && this.curves().length <= 4; // elsewhere the colors tell the runs
    let before = "";
    this.shown.forEach(({ curve, behind }, i) => {
      if (behind) return;
      const raw = this.shown[i - 1]?.behind ? i : i + 1; // the column of what was logged
      const at = hovers ? nearest(u, raw, u.cursor.idx) : u.data[raw].findLastIndex((value) => value != null);
      const dot = element("i", { className: "dot" });
      dot.style.background = this.strokes.get(curve);
      const value = element("b", {}, show(at === null || at < 0 ? null : u.data[raw][at]));
      const name = names ? `${DATA.runs[curve.run].name.slice(0, 28)} ` : "";
      const label = curve.label && curve.label !== before ? `${curve.label} ` : "";
      before = curve.label;
      told.push(element("span", {}, label, dot, name, value));
    });
    if (hovers) told.push(...marksAt(u, u.cursor.left).map((mark) => element("span", {}, mark)));
    this.readout.replaceChildren(...told);
  }
}

function select(u) {
  if (u.select.width > 3) {
    const [from, to] = [u.select.left, u.select.left + u.select.width].map((at) => u.posToVal(at, "x"));
    u.setSelect({ left: 0, width: 0, top: 0, height: 0 }, false);
    if (to - from >= 1e-9) look([from, to]);
  }
}
