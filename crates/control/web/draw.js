// The drawing: hosts as boxes, vRNICs in them in the colours of their groups, and lines between those that are connected, the thicker the
// more they carry.

import { element } from "./dom.js";
import { PAST, byName, bytes, clock, count, hue, to } from "./model.js";

const PILL = { width: 172, height: 38, gap: 8 };
const HOST = { head: 50, pad: 12, rows: 14, gap: [64, 200], below: 44 };
const MARGIN = 20;
// More vRNICs than this are not drawn one by one, and more than so many boxes not at all.
export const MOST = 300;
export const MOST_BOXES = 3000;

const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

// Where everything stands: the same each time, so that nothing jumps while numbers change.
function layout(fleet, nodes, width) {
  const by = new Map([...fleet.hosts.keys()].map((name) => [name, []]));
  for (const node of nodes) by.set(node.host, [...(by.get(node.host) ?? []), node]);
  const names = [...by.keys()].sort((a, b) => (a === "") - (b === "") || byName(a, b));
  const room = width - 2 * MARGIN;
  const most = Math.max(1, Math.floor((room - 2 * HOST.pad + PILL.gap) / (PILL.width + PILL.gap)));
  const boxes = names.filter((name) => name !== "" || by.get(name).length > 0).map((name) => {
    const inside = by.get(name).sort((a, b) => byName(a.group, b.group) || byName(a.name, b.name));
    const columns = Math.min(most, Math.max(1, Math.ceil(inside.length / HOST.rows)));
    const rows = Math.max(1, Math.ceil(inside.length / columns));
    return { name, inside, columns, width: columns * (PILL.width + PILL.gap) - PILL.gap + 2 * HOST.pad, height: HOST.head + rows * (PILL.height + PILL.gap) - PILL.gap + HOST.pad };
  });
  const lines = [];
  let used = Infinity;
  for (const box of boxes) {
    if (used + HOST.gap[0] + box.width > room) [lines[lines.length], used] = [[], -HOST.gap[0]];
    lines.at(-1).push(box);
    used += HOST.gap[0] + box.width;
  }
  // All rows have the gap of the fullest one, so that boxes stand below each other.
  const gaps = lines.filter((line) => line.length > 1).map((line) => (room - line.reduce((sum, box) => sum + box.width, 0)) / (line.length - 1));
  const gap = Math.min(HOST.gap[1], Math.max(HOST.gap[0], Math.min(...gaps)));
  let [y, right] = [MARGIN, 0];
  lines.forEach((line, row) => {
    let x = MARGIN;
    const bottom = y + Math.max(...line.map((box) => box.height));
    line.forEach((box, column) => {
      Object.assign(box, { x, y, row, column, right: x + box.width, bottom });
      x += box.width + gap;
      right = Math.max(right, box.right);
    });
    y = bottom + HOST.below;
  });
  const places = new Map();
  for (const box of boxes) {
    box.inside.forEach((node, i) => {
      const at = { x: box.x + HOST.pad + (i % box.columns) * (PILL.width + PILL.gap), y: box.y + HOST.head + Math.floor(i / box.columns) * (PILL.height + PILL.gap), box };
      places.set(node.id, at);
    });
  }
  // Lines leave a box on its right, too, and pass below it.
  return { boxes, places, width: Math.max(right + MARGIN, Math.min(width, right + 66)), height: y - HOST.below + (boxes.length > 2 ? HOST.below : MARGIN) };
}

const middle = (p) => p.y + PILL.height / 2;

// A line through points, with round corners.
function bend([[x, y], ...rest]) {
  const parts = [`M${x},${y}`];
  rest.forEach(([px, py], i) => {
    const next = rest[i + 1];
    if (!next) return parts.push(`L${px},${py}`);
    const toward = ([tx, ty]) => {
      const far = Math.hypot(tx - px, ty - py) || 1;
      const r = Math.min(9, far / 2) / far;
      return `${px + (tx - px) * r},${py + (ty - py) * r}`;
    };
    parts.push(`L${toward(rest[i - 1] ?? [x, y])}Q${px},${py} ${toward(next)}`);
  });
  return parts.join("");
}

// From side to side between neighbours; out to the right and back within one host; else around the hosts between them, and
// `next` counts those, so that they keep apart.
function path(a, b, next) {
  if (a.box === b.box && a.x === b.x) {
    const bow = 18 + Math.min(44, Math.abs(a.y - b.y) / 8);
    const x = a.x + PILL.width;
    return `M${x},${middle(a)} C${x + bow},${middle(a)} ${x + bow},${middle(b)} ${x},${middle(b)}`;
  }
  const [left, right] = a.x < b.x || (a.x === b.x && a.y < b.y) ? [a, b] : [b, a];
  const [from, until] = [left.x + PILL.width, right.x];
  const neighbours = left.box.row === right.box.row && left.box.column + 1 === right.box.column;
  if (left.box === right.box || neighbours) {
    const reach = Math.max(4, (until - from) / 2);
    return `M${from},${middle(left)} C${from + reach},${middle(left)} ${until - reach},${middle(right)} ${until},${middle(right)}`;
  }
  const aside = 9 + (next() % 7) * 5;
  const out = left.box.right + aside;
  if (left.box.column === right.box.column) {
    return bend([[from, middle(left)], [out, middle(left)], [out, middle(right)], [right.x + PILL.width, middle(right)]]);
  }
  const lane = Math.min(left.box.bottom, right.box.bottom) + aside;
  const into = right.box.x - aside;
  return bend([[from, middle(left)], [out, middle(left)], [out, lane], [into, lane], [into, middle(right)], [until, middle(right)]]);
}

function hostBox(fleet, box) {
  const is = box.name === "" ? "nowhere" : fleet.hostIs(box.name);
  const state = fleet.hostStates.get(box.name);
  const what = {
    nowhere: () => "declared, but on no host yet",
    unknown: () => "",
    away: () => (state ? `not connected since ${clock(state.heard)}` : "not connected"),
    problems: () => count(state.problems.length, "problem"),
    connected: () => `${fleet.hosts.get(box.name).addresses?.[0] ?? ""}  ↑ ${bytes(fleet.sumOf("host", box.name).sent)}`,
  }[is]();
  const name = element("text", { x: box.x + HOST.pad, y: box.y + 21 }, cut(box.name || "no host", Math.floor(box.width / 9)));
  return element("g", { class: `host ${is}`, "data-key": `host ${box.name}` },
    element("rect", { x: box.x, y: box.y, width: box.width, height: box.height, rx: 8 }),
    is === "nowhere" || is === "unknown" ? name : element("a", { href: to("hosts", box.name) }, name),
    element("text", { x: box.x + HOST.pad, y: box.y + 38, class: "what" }, cut(what, Math.floor(box.width / 6.6))));
}

export function drawing(fleet, { nodes, links }, width) {
  const plan = layout(fleet, nodes, width);
  const groups = new Map(nodes.map((node) => [node.id, node.group]));
  const names = new Map(nodes.map((node) => [node.id, node.name]));
  let around = 0;
  const lines = links.sort((x, y) => byName(x.ends[0], y.ends[0]) || byName(x.ends[1], y.ends[1])).map((link) => {
    const [a, b] = link.ends;
    const all = link.there + link.back;
    const joins = groups.get(a) !== groups.get(b);
    return element("path", {
      class: `link${all >= 1 ? " busy" : ""}${joins ? " joins" : ""}`,
      d: path(plan.places.get(a), plan.places.get(b), () => around++),
      style: `--h:${hue(fleet.groups, groups.get(a))};stroke-width:${all >= 1 ? 1 + Math.min(4, Math.max(0, Math.log10(all / 1000)) * 0.55) : 1}`,
      "data-key": link.ends.join("\n"),
    }, element("title", {}, `${names.get(a)} to ${names.get(b)} ${bytes(link.there)}, back ${bytes(link.back)}, ${count(link.qps, "queue pair")}`));
  });
  return element("svg", { width: plan.width, height: plan.height, viewBox: `0 0 ${plan.width} ${plan.height}`, role: "group", "aria-label": "Hosts, their vRNICs and who is connected to whom" },
    plan.boxes.map((box) => hostBox(fleet, box)),
    element("g", {}, lines),
    plan.boxes.flatMap((box) => box.inside).map((node) => pill(fleet, node, plan.places.get(node.id))));
}

const WORDS = { up: "", down: ", link down", away: ", its host is not connected", missing: ", not on its host", nowhere: ", on no host" };

function pill(fleet, node, at) {
  const { rates } = node;
  const errors = rates.errors > 0;
  const busy = rates.sent + rates.received > 0;
  const many = node.vrnics.length > 1 ? ` (${node.vrnics.length})` : "";
  const about = `${node.name}${many} of group ${node.group}: sends ${bytes(rates.sent)}, receives ${bytes(rates.received)}${WORDS[node.is]}${errors ? ", errors" : ""}`;
  const does = node.is !== "up" ? WORDS[node.is].slice(2) : busy ? `↑ ${bytes(rates.sent)}  ↓ ${bytes(rates.received)}` : "idle";
  return element("a", { class: `vrnic ${node.is}${errors ? " errors" : ""}`, href: `#/${node.open}`, "aria-label": about, "data-key": node.id, style: `--h:${hue(fleet.groups, node.group)}` },
    element("rect", { x: at.x, y: at.y, width: PILL.width, height: PILL.height, rx: 6 }),
    element("rect", { class: "mark", x: at.x, y: at.y + 6, width: 3, height: PILL.height - 12 }),
    element("text", { x: at.x + 11, y: at.y + 16 }, cut(node.name, 22 - many.length) + many),
    element("text", { x: at.x + 11, y: at.y + 30, class: "rate" }, cut(does, 26)),
    element("title", {}, about));
}

const vrnicOf = (node) => node?.closest?.(".vrnic")?.dataset.key;

// The vRNIC that the mouse points at.
let pointed;

export function point(node) {
  pointed = vrnicOf(node);
  light();
}

// The connections of the vRNIC that the mouse points at, or else of the one that has the focus, alone are seen well.
export function light() {
  const svg = document.querySelector(".map svg");
  if (!svg) return;
  const picked = pointed ?? vrnicOf(document.activeElement);
  svg.classList.toggle("picked", picked !== undefined);
  if (picked === undefined) return;
  const near = new Set([picked]);
  for (const line of svg.querySelectorAll(".link")) {
    const ends = line.dataset.key.split("\n");
    line.classList.toggle("of", ends.includes(picked));
    if (ends.includes(picked)) ends.forEach((e) => near.add(e));
  }
  for (const v of svg.querySelectorAll(".vrnic")) v.classList.toggle("of", near.has(v.dataset.key));
}

// Rates of the last minutes: each holds until the next one.
export function chart(past, now, began) {
  const [width, height] = [600, 120];
  const first = Math.max(now - PAST, began);
  const span = Math.max(now - first, 30_000);
  const most = Math.max(0, ...past.flatMap((p) => [p.sent, p.received]));
  const x = (at) => (width * (1 - (now - Math.max(at, first)) / span)).toFixed(1);
  const y = (n) => (height - 3 - (n / Math.max(most, 1)) * (height - 16)).toFixed(1);
  const line = (what) => past.map((p, i) => (i ? `H${x(p.at)}V${y(p[what])}` : `M${x(p.at)},${y(p[what])}`)).join("") + (past.length ? `H${width}` : "");
  const svg = element("svg", { class: "chart", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": `Bytes sent and received, at most ${bytes(most)}` },
    [0.25, 0.5, 0.75].map((part) => element("line", { x1: 0, x2: width, y1: y(most * part), y2: y(most * part) })),
    ["sent", "received"].map((what) => element("path", { class: what, d: line(what) || "M0,0" })));
  return { svg, most, seconds: Math.round(span / 1000) };
}
