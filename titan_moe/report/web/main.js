// Puts the parts into the page and listens to the controls.

const curveCharts = DATA.charts.map((chart) => new CurveChart(chart));
for (const [i, chart] of DATA.charts.entries()) {
  document.querySelector(`[data-group="${chart.group}"]`).append(curveCharts[i].figure);
}
for (const chart of curveCharts) chart.draw();
const phaseChart = document.getElementById("phase-chart") && new PhaseChart(document.getElementById("phase-chart"));
const heatPlace = document.getElementById("heat-map");
const heatMap = heatPlace && DATA.runs.some((run) => run.heat.length) && new HeatMap(heatPlace);
followers.push(() => curveCharts.forEach((chart) => chart.follow()), () => phaseChart && phaseChart.follow());

const control = (id) => document.getElementById(id);
const redraw = () => curveCharts.forEach((chart) => chart.draw());

control("controls").hidden = !DATA.charts.length;
control("smoothing").value = CHOICE.smoothing;
control("smoothed").value = CHOICE.smoothing.toFixed(2);
let waiting = 0;
control("smoothing").oninput = (event) => {
  CHOICE.smoothing = +event.target.value;
  control("smoothed").value = CHOICE.smoothing.toFixed(2);
  cancelAnimationFrame(waiting);
  waiting = requestAnimationFrame(() => curveCharts.forEach((chart) => chart.chart.smooth && chart.smooth()));
};
control("log").checked = CHOICE.log;
control("log").onchange = (event) => ((CHOICE.log = event.target.checked), redraw());
control("whole").onclick = () => look(null);
control("whole").disabled = !CHOICE.zoom;
for (const [mark, list] of [["checkpoint", "checkpoints"], ["restart", "restarts"], ["skip", "skips"]]) {
  control(`mark-${mark}`).hidden = !DATA.runs.some((run) => run[list].length);
}

if (DATA.runs.length > 1) {
  DATA.runs.forEach((run, i) => {
    const dot = element("i", { className: `dot run${i % 8}` });
    const button = element("button", { type: "button", title: "show or hide" }, dot, run.name);
    const tell = () => button.setAttribute("aria-pressed", String(!CHOICE.hidden.includes(i)));
    button.onclick = () => {
      CHOICE.hidden = CHOICE.hidden.includes(i) ? CHOICE.hidden.filter((other) => other !== i) : [...CHOICE.hidden, i];
      tell();
      redraw();
    };
    tell();
    control("legend").append(button);
  });
}

const keys = control("all-keys");
if (keys) {
  const table = document.querySelector("table.config");
  const apply = () => table.classList.toggle("all", (CHOICE.allKeys = keys.checked));
  keys.checked = CHOICE.allKeys;
  keys.onchange = apply;
  apply();
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  redraw();
  phaseChart?.draw();
  heatMap && heatMap.draw();
});
addEventListener("resize", () => heatMap && heatMap.draw());

document.documentElement.dataset.drawn = Math.round(performance.now()); // milliseconds since the page was asked for

document.querySelectorAll("details").forEach((each, i) => (each.open = CHOICE.open[i] ?? each.open));
scrollTo(0, CHOICE.scroll);

// While the run trains the file is written again and again. Nobody is disturbed who holds the mouse or looks elsewhere.
if (DATA.refresh) {
  let held = false;
  addEventListener("mousedown", () => (held = true));
  addEventListener("mouseup", () => (held = false));
  setInterval(() => {
    if (held || document.hidden) return;
    remember();
    location.reload();
  }, 1000 * DATA.refresh);
}
