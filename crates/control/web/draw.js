// The drawing: hosts as boxes, vRNICs in them in the colours of their groups, and lines between those that are connected.

import { byName, bytes, count, hue } from "./model.js";

const NS = "http://www.w3.org/2000/svg";
const PILL = { width: 168, height: 40, gap: 10 };
const HOST = { head: 46, pad: 14, gap: 150, column: 14 };
// More vRNICs than this are not drawn one by one, and more than so many boxes not at all.
export const MOST = 300;
export const MOST_BOXES = 3000;

export function element(name, attributes = {}, ...children) {
  const e = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) {
    // The centre allows no style attributes; this is none.
    if (key === "style") e.style.cssText = value;
    else if (value !== undefined) e.setAttribute(key, value);
  }
  e.append(...children);
  return e;
}

const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

// Where everything stands: the same each time, so that nothing jumps while numbers change.
function layout(fleet, nodes, width) {
  const by = new Map([...fleet.hosts.keys()].map((name) => [name, []]));
  for (const node of nodes) by.set(node.host, [...(by.get(node.host) ?? []), node]);
  const names = [...by.keys()].sort((a, b) => (a === "") - (b === "") || byName(a, b));
  const boxes = names.map((name) => {
    const inside = by.get(name).sort((a, b) => byName(a.group, b.group) || byName(a.name, b.name));
    const columns = Math.max(1, Math.ceil(inside.length / HOST.column));
    const rows = Math.max(1, Math.ceil(inside.length / columns));
    return { name, inside, columns, width: columns * (PILL.width + PILL.gap) - PILL.gap + 2 * HOST.pad, height: HOST.head + rows * (PILL.height + PILL.gap) - PILL.gap + HOST.pad };
  }).filter((b) => b.name !== "" || b.inside.length > 0);
  let [x, y, row] = [30, 30, 0];
  let [right, bottom] = [0, 0];
  for (const box of boxes) {
    if (x > 30 && x + box.width > width - 30) [x, y, row] = [30, y + row + 60, 0];
    Object.assign(box, { x, y });
    x += box.width + HOST.gap;
    row = Math.max(row, box.height);
    [right, bottom] = [Math.max(right, box.x + box.width), Math.max(bottom, box.y + box.height)];
  }
  const places = new Map();
  for (const box of boxes) {
    box.inside.forEach((node, i) => {
      const at = { x: box.x + HOST.pad + (i % box.columns) * (PILL.width + PILL.gap), y: box.y + HOST.head + Math.floor(i / box.columns) * (PILL.height + PILL.gap) };
      places.set(node.id, { ...at, host: box.name });
    });
  }
  return { boxes, places, width: right + 30, height: bottom + 30 };
}

// From side to side between hosts; out to the right and back within one.
function path(a, b) {
  const middle = (p) => p.y + PILL.height / 2;
  if (a.x === b.x) {
    const bow = 24 + Math.min(60, Math.abs(a.y - b.y) / 6);
    const x = a.x + PILL.width;
    return `M${x},${middle(a)} C${x + bow},${middle(a)} ${x + bow},${middle(b)} ${x},${middle(b)}`;
  }
  const [left, right] = a.x < b.x ? [a, b] : [b, a];
  const [from, to] = [left.x + PILL.width, right.x];
  const reach = Math.max(30, (to - from) / 2);
  return `M${from},${middle(left)} C${from + reach},${middle(left)} ${to - reach},${middle(right)} ${to},${middle(right)}`;
}

export function drawing(fleet, { nodes, links }, width, open) {
  const plan = layout(fleet, nodes, width);
  const groups = new Map(nodes.map((node) => [node.id, node.group]));
  const svg = element("svg", { width: plan.width, height: plan.height, viewBox: `0 0 ${plan.width} ${plan.height}`, role: "group", "aria-label": "Hosts, their vRNICs and who is connected to whom" });
  for (const box of plan.boxes) {
    const state = fleet.hostStates.get(box.name);
    const away = box.name !== "" && !state?.connected;
    const what = box.name === "" ? "declared, on no host yet" : `${away ? "not connected" : fleet.hosts.get(box.name)?.addresses?.join(", ") || "connected"}${state?.problems?.length ? `, ${count(state.problems.length, "problem")}` : ""}`;
    const inside = [
      element("rect", { x: box.x, y: box.y, width: box.width, height: box.height, rx: 10 }),
      element("text", { x: box.x + HOST.pad, y: box.y + 20 }, cut(box.name || "nowhere", 24)),
      element("text", { x: box.x + HOST.pad, y: box.y + 36, class: "what" }, cut(what, Math.floor(box.width / 7))),
    ];
    svg.append(element("g", { class: `host${away ? " away" : ""}` }, ...inside));
  }
  const lines = element("g");
  for (const link of links) {
    const [a, b] = link.ends.map((id) => plan.places.get(id));
    const group = groups.get(link.ends[0]);
    const line = element("path", {
      class: `link${link.bytes > 1000 ? " busy" : ""}`,
      d: path(a, b),
      style: `--h:${hue(fleet.groups, group)};stroke-width:${1.2 + Math.min(6, Math.log10(1 + link.bytes / 1000) * 0.8)}`,
      "data-ends": link.ends.join("\n"),
    });
    line.append(element("title", {}, `${link.ends.join(" and ")}: ${link.qps} queue pairs, about ${bytes(link.bytes)}`));
    lines.append(line);
  }
  svg.append(lines);
  for (const node of nodes) svg.append(pill(fleet, node, plan.places.get(node.id), open));
  highlight(svg);
  return svg;
}

function pill(fleet, node, at, open) {
  const { rates } = node;
  const classes = ["vrnic", node.down ? "down" : "", rates.errors > 0 ? "errors" : ""].filter(Boolean).join(" ");
  const many = node.vrnics.length > 1 ? ` (${node.vrnics.length})` : "";
  const about = `${node.name}${many} of group ${node.group}: sends ${bytes(rates.sent)}, receives ${bytes(rates.received)}${node.down ? ", link down" : ""}${rates.errors > 0 ? ", errors" : ""}`;
  const g = element(
    "g",
    { class: classes, tabindex: 0, role: "link", "aria-label": about, "data-name": node.id, "data-open": node.open, style: `--h:${hue(fleet.groups, node.group)}` },
    element("rect", { x: at.x, y: at.y, width: PILL.width, height: PILL.height, rx: 7 }),
    element("text", { x: at.x + 10, y: at.y + 17 }, cut(node.name, 21 - many.length) + many),
    element("text", { x: at.x + 10, y: at.y + 32, class: "rate" }, `↑ ${bytes(rates.sent)}  ↓ ${bytes(rates.received)}`),
    element("title", {}, about),
  );
  g.addEventListener("click", () => open(node.open));
  return g;
}

// The vRNIC that somebody points at or that has the focus. The drawing is made anew each time that numbers come.
let picked;

// Who points at a vRNIC, or gives it the focus, sees its connections alone.
function highlight(svg) {
  const pick = (name) => {
    picked = name;
    svg.classList.toggle("picked", name !== undefined);
    const near = new Set([name]);
    for (const line of svg.querySelectorAll(".link")) {
      const ends = line.dataset.ends.split("\n");
      line.classList.toggle("of", ends.includes(name));
      if (ends.includes(name)) ends.forEach((e) => near.add(e));
    }
    for (const v of svg.querySelectorAll(".vrnic")) v.classList.toggle("of", near.has(v.dataset.name));
  };
  const name = (event) => event.target.closest?.(".vrnic")?.dataset.name;
  for (const kind of ["pointerover", "focusin"]) svg.addEventListener(kind, (event) => pick(name(event)));
  for (const kind of ["pointerleave", "focusout"]) svg.addEventListener(kind, (event) => svg.isConnected && pick(name(event) === picked ? undefined : picked));
  if (picked !== undefined) pick(picked);
}

// The rates of the last minutes.
export function spark(past, seconds) {
  const [width, height] = [600, 110];
  const most = Math.max(1, ...past.flatMap((p) => [p.sent, p.received]));
  const line = (what) => past.map((p, i) => `${i ? "L" : "M"}${((i + 150 - past.length) / 149) * width},${height - 4 - (p[what] / most) * (height - 14)}`).join("");
  const svg = element("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", role: "img", "aria-label": `Bytes sent and received, at most ${bytes(most)}` });
  for (const what of ["sent", "received"]) svg.append(element("path", { class: what, d: line(what) || "M0,0" }));
  return { svg, most: past.length ? most : 0, seconds: past.length > 1 ? Math.round((past.at(-1).at - past[0].at) / 1000) : seconds };
}
