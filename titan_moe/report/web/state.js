"use strict";
// What all parts of the page share: the data, what the reader has chosen, and the steps that are looked at.

const DATA = JSON.parse(document.getElementById("data").textContent);

function element(tag, properties = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children); // strings become text, never markup
  return made;
}

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const runColor = (run) => color(`run${run % 8}`);

function show(value) {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e15) return value.toLocaleString("en-US");
  if (size >= 1e-4 && size < 1e6) return String(Number(value.toPrecision(5)));
  return value.toExponential(3);
}

// The choices outlive a reload of the page, which --watch makes every few seconds.
const KEY = `titan_moe.report ${DATA.key.join(" ")}`;
const CHOICE = { smoothing: 0.6, log: false, zoom: null, hidden: [], run: 0, layer: null, allKeys: false, scroll: 0, open: {} };
try {
  Object.assign(CHOICE, JSON.parse(sessionStorage.getItem(KEY) ?? "{}"));
} catch {} // no storage here: nothing is remembered
function remember() {
  CHOICE.scroll = scrollY;
  document.querySelectorAll("details").forEach((each, i) => (CHOICE.open[i] = each.open));
  try {
    sessionStorage.setItem(KEY, JSON.stringify(CHOICE));
  } catch {}
}
addEventListener("pagehide", remember);

// The range of steps in all charts: [first, last].
const WHOLE = DATA.last > DATA.first ? [DATA.first, DATA.last] : [DATA.first - 1, DATA.first + 1];
const range = () => CHOICE.zoom ?? WHOLE;
const followers = []; // functions to call when it has changed
function look(zoom) {
  const whole = !zoom || (zoom[0] <= WHOLE[0] && zoom[1] >= WHOLE[1]);
  CHOICE.zoom = whole ? null : zoom;
  document.getElementById("whole").disabled = whole;
  for (const follow of followers) follow();
}
