// The heat map: experts x steps of one layer, or layers x steps.

// One byte a cell, see heat.py: 0 for nothing, 128 for the mean, 31.75 for each doubling.
const ratioOf = (byte) => (byte ? 2 ** ((byte - 128) / 31.75) : 0);
const VISIBLE = 2.2; // doublings at which the colors are full

const mix = (a, b, share) => a.map((value, i) => Math.round(value + (b[i] - value) * share));
function ramp() {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const middle = dark ? [38, 44, 54] : [240, 241, 243];
  const less = dark ? [86, 180, 233] : [0, 88, 150], more = dark ? [245, 150, 70] : [190, 70, 0];
  const none = dark ? [0, 0, 0] : [30, 30, 34];
  const colors = new Uint8ClampedArray(4 * 256);
  for (let byte = 0; byte < 256; byte++) {
    const doublings = (byte - 128) / 31.75, share = Math.min(Math.abs(doublings) / VISIBLE, 1) ** 0.8;
    const [r, g, b] = byte === 0 ? none : mix(middle, doublings < 0 ? less : more, share);
    colors.set([r, g, b, 255], 4 * byte);
  }
  return colors;
}

class HeatMap {
  constructor(place) {
    this.runs = DATA.runs.map((run, i) => i).filter((i) => DATA.runs[i].heat.length);
    this.run = this.runs.includes(CHOICE.run) ? CHOICE.run : this.runs[0];
    this.canvas = element("canvas", { height: 10 });
    this.canvas.setAttribute("role", "img");
    this.canvas.setAttribute("aria-label", "Load over steps; the newest numbers are in the table below");
    this.readout = element("div", { className: "readout" });
    this.x = element("div", { className: "x" });
    this.y = element("div", { className: "y" });
    this.head = element("div", { className: "picker" });
    this.ramp = element("i");
    const key = element("span", { className: "ramp" }, "less", this.ramp, "more than the mean; black: no token");
    const body = element("div", { className: "heat" }, this.y, this.canvas, this.x);
    place.append(element("div", { className: "card" }, this.head, body, element("div", { className: "picker" }, key), this.readout));
    this.canvas.onmousemove = (event) => this.tell(event);
    this.canvas.onmouseleave = () => this.tell();
    this.canvas.onclick = (event) => this.map.layer === "" && this.pick(this.map.names[this.cell(event)[1]]);
    this.pick(CHOICE.layer ?? this.worst());
  }

  // The layer that is most uneven now.
  worst() {
    const whole = DATA.runs[this.run].heat[0];
    if (whole.layer !== "") return whole.layer;
    const columns = whole.ends.length, bytes = atob(whole.cells);
    const last = whole.names.map((_, row) => bytes.charCodeAt((row + 1) * columns - 1));
    return whole.names[last.indexOf(Math.max(...last))];
  }

  pick(layer) {
    const maps = DATA.runs[this.run].heat;
    this.map = maps.find((map) => map.layer === layer) ?? maps[0];
    CHOICE.layer = this.map.layer;
    CHOICE.run = this.run;
    this.bytes = Uint8Array.from(atob(this.map.cells), (letter) => letter.charCodeAt(0));
    const layers = maps.map((map) => [map.layer, map.layer === "" ? "all layers: heaviest expert" : map.layer]);
    const choices = [element("label", {}, "layer ", picker(layers, this.map.layer, (name) => this.pick(name)))];
    if (this.runs.length > 1) {
      const names = this.runs.map((i) => [i, DATA.runs[i].name]);
      choices.unshift(element("label", {}, "run ", picker(names, this.run, (i) => ((this.run = +i), this.pick(CHOICE.layer)))));
    }
    this.head.replaceChildren(...choices);
    this.draw();
  }

  draw() {
    const { rows, ends } = this.map, columns = ends.length, colors = ramp();
    const image = new ImageData(columns, rows);
    this.bytes.forEach((byte, i) => image.data.set(colors.subarray(4 * byte, 4 * byte + 4), 4 * i));
    const small = element("canvas", { width: columns, height: rows });
    small.getContext("2d").putImageData(image, 0, 0);
    const height = Math.max(90, Math.min(420, rows * Math.max(2, Math.min(22, 360 / rows))));
    const dpr = devicePixelRatio || 1;
    this.canvas.style.height = `${height}px`;
    this.canvas.height = Math.round(height * dpr);
    this.canvas.width = Math.max(1, Math.round(this.canvas.clientWidth * dpr));
    const pen = this.canvas.getContext("2d");
    pen.imageSmoothingEnabled = false;
    pen.drawImage(small, 0, 0, this.canvas.width, this.canvas.height);
    const stops = [-2, -1, 0, 1, 2].map((doublings) => {
      const at = 4 * Math.round(128 + 31.75 * doublings);
      return `rgb(${colors.slice(at, at + 3).join(" ")})`;
    });
    this.ramp.style.background = `linear-gradient(90deg, ${stops.join(", ")})`;
    const name = (row) => (this.map.layer === "" ? this.map.names[row] : `expert ${row}`);
    this.y.replaceChildren(element("span", {}, name(0)), ...(rows > 1 ? [element("span", {}, name(rows - 1))] : []));
    const ticks = [...new Set([0, 0.25, 0.5, 0.75, 1].map((share) => Math.round(share * (columns - 1))))];
    this.x.replaceChildren(...ticks.map((at) => element("span", {}, show(ends[at]))));
    this.tell();
  }

  cell(event) {
    const box = this.canvas.getBoundingClientRect(), { rows, ends } = this.map;
    const at = (offset, size, count) => Math.min(count - 1, Math.max(0, Math.floor((offset / size) * count)));
    return [at(event.clientX - box.left, box.width, ends.length), at(event.clientY - box.top, box.height, rows)];
  }

  tell(event) {
    const { ends, layer, names } = this.map;
    if (!event) {
      const how = layer === "" ? "each layer's heaviest expert over the mean; click on a layer to see its experts" : "each expert's load over the mean of the layer";
      return this.readout.replaceChildren(element("span", {}, `${how}, over the steps`));
    }
    const [column, row] = this.cell(event);
    const from = column ? ends[column - 1] + 1 : DATA.first;
    const steps = from < ends[column] ? `steps ${show(from)} to ${show(ends[column])}` : `step ${show(ends[column])}`;
    const ratio = ratioOf(this.bytes[row * ends.length + column]);
    this.readout.replaceChildren(
      element("span", {}, steps),
      element("span", {}, layer === "" ? names[row] : `${layer}, expert ${row}`, " ", element("b", {}, `${ratio.toPrecision(3)} × mean`)),
    );
  }
}
