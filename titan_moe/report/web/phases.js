// The phases of a step as bars on top of each other, over the steps of one run.

// Neighbours in a bar differ in lightness too, so that they can be told apart without seeing hues.
const PHASE_COLORS = {
  attention: "#2b5c8a", router: "#e8a33d", dispatch: "#d1603d", experts: "#7a3b69", combine: "#e58d74",
  shared_expert: "#b07aa8", dense: "#2f8f83", norms: "#8fc3b8", fsdp: "#c2577a", embedding: "#4b6043", loss: "#a8b84b",
  mtp: "#5b8fb9", pipeline: "#9478b3", wgrad: "#6a9a5b", graph: "#c97b63",
  clip: "#6e7fa8", optimizer: "#3d4a73", data: "#c9a66b", logging: "#b3954d", other: "#aeb6c1",
  validation: "#7f8c99", checkpoint: "#565f6b", profile: "#8a7f99",
  // what only the planner knows
  grouped_gemm: "#7a3b69", dense_gemm: "#2f8f83", elementwise: "#8fc3b8", permute: "#e58d74", quantize: "#b07aa8",
  "exposed EP": "#d1603d", "exposed DP": "#6e7fa8", "exposed PP": "#4b6043", bubble: "#aeb6c1", host: "#565f6b", stragglers: "#7f8c99",
};
const SPARE = ["#5b8fb9", "#c97b63", "#6a9a5b", "#9478b3", "#b3954d"];
function phaseColor(name) {
  let sum = 0;
  for (const letter of name) sum += letter.charCodeAt(0);
  return Object.hasOwn(PHASE_COLORS, name) ? PHASE_COLORS[name] : SPARE[sum % SPARE.length];
}

class PhaseChart extends StepChart {
  constructor(place) {
    super(240, "Seconds of each phase over the steps; the table below has the numbers");
    const runs = DATA.runs.map((run, i) => i).filter((i) => DATA.runs[i].phases.ends.length);
    this.run = runs.includes(CHOICE.run) ? CHOICE.run : runs[0];
    const head = element("figcaption", {}, element("b", {}, "Phases of a step"), element("small", {}, "s per step, mean of the ranks"));
    if (runs.length > 1) head.append(picker(runs.map((i) => [i, DATA.runs[i].name]), this.run, (i) => ((this.run = +i), this.draw())));
    head.append(this.readout);
    place.append(element("figure", {}, head, this.plot));
    this.draw();
  }

  draw() {
    const { ends, names, seconds } = DATA.runs[this.run].phases;
    const sums = [];
    seconds.forEach((values, i) => sums.push(values.map((value, at) => value + (i ? sums[i - 1][at] : 0))));
    // The tallest first: what comes after covers its lower part.
    const order = names.map((_, i) => i).reverse();
    this.names = names;
    this.seconds = seconds;
    this.replot({
      y: { range: (u, min, max) => [0, (max || 1) * 1.04] },
      series: order.map((i) => ({
        fill: phaseColor(names[i]), stroke: phaseColor(names[i]), width: 0, points: { show: false },
        paths: uPlot.paths.bars({ size: [0.86, 40], align: 0 }),
      })),
      data: [ends, ...order.map((i) => sums[i])],
      cursor: { points: { show: false } },
    });
  }

  tell() {
    const u = this.u;
    if (!u) return;
    const ends = u.data[0], hovers = u.cursor.left >= 0 && u.cursor.idx != null;
    const at = hovers ? u.cursor.idx : ends.length - 1;
    const from = at ? ends[at - 1] + 1 : DATA.first;
    const told = [element("span", {}, from < ends[at] ? `steps ${show(from)} to ${show(ends[at])}` : `step ${show(from)}`)];
    this.names.forEach((name, i) => {
      const dot = element("i", { className: "dot" });
      dot.style.background = phaseColor(name);
      told.push(element("span", {}, dot, `${name.replaceAll("_", " ")} `, element("b", {}, show(this.seconds[i][at]))));
    });
    this.readout.replaceChildren(...told);
  }
}

function picker(choices, chosen, changed) {
  const select = element("select", {}, ...choices.map(([value, name]) => element("option", { value }, name)));
  select.value = chosen;
  select.onchange = () => changed(select.value);
  return select;
}

for (const each of document.querySelectorAll("[data-phase]")) each.style.background = phaseColor(each.dataset.phase);
