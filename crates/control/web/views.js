// The views: each makes its elements of what is known. Text goes in as text only, so no name can be markup.

import { MOST, MOST_BOXES, drawing, spark } from "./draw.js";
import { byName, bytes, count, each, hue, short } from "./model.js";

export function make(name, attributes = {}, ...children) {
  const e = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) e.addEventListener(key.slice(2), value);
    else if (key === "style") e.style.cssText = value;
    else if (value !== undefined && value !== false) e.setAttribute(key, value === true ? "" : value);
  }
  e.append(...children.flat().filter((c) => c !== undefined && c !== null));
  return e;
}

const link = (kind, name) => make("a", { href: `#/${kind}/${encodeURIComponent(name)}` }, name);
const soft = (text) => make("span", { class: "soft" }, text);
const card = (what, n, kind) => make("div", { class: "card" }, make("b", { class: kind }, String(n)), make("span", {}, what));

function groupTag(fleet, name) {
  return make("a", { class: "tag", style: `--h:${hue(fleet.groups, name)}`, href: `#/groups/${encodeURIComponent(name)}` }, name);
}

function hostState(fleet, name) {
  const state = fleet.hostStates.get(name);
  if (!state?.connected) return make("span", { class: "bad" }, "not connected");
  if (state.problems?.length) return make("span", { class: "warn" }, count(state.problems.length, "problem"));
  return make("span", { class: "good" }, "connected");
}

function vrnicState(fleet, v) {
  const state = fleet.vrnicStates.get(v.name);
  if (v.down) return make("span", { class: "warn" }, "link down");
  if (!v.host) return soft("on no host");
  if (!state?.there) return make("span", { class: "bad" }, "not on its host");
  return make("span", { class: "good" }, "up");
}

// Most rows that a table shows.
const ROWS = 500;

// A table that its heads sort. Columns: head, what it shows, what sorts it, and whether that is a number.
export class Table {
  constructor(columns, sort, down = false) {
    Object.assign(this, { columns, sort, down });
  }

  element(rows, caption, again) {
    const by = this.columns[this.sort];
    const order = ([x], [y]) => (typeof x === "number" ? x - y : byName(String(x), String(y))) * (this.down ? -1 : 1);
    const heads = this.columns.map((c, i) => {
      const press = () => {
        this.down = this.sort === i ? !this.down : c.n === true;
        this.sort = i;
        again();
      };
      const sorted = i === this.sort ? (this.down ? "descending" : "ascending") : undefined;
      const mark = i === this.sort ? (this.down ? " ↓" : " ↑") : "";
      return make("th", { scope: "col", class: c.n ? "n" : undefined, "aria-sort": sorted }, make("button", { type: "button", onclick: press, "data-key": `sort-${i}` }, c.head + mark));
    });
    const shown = rows.map((row) => [by.key(row), row]).sort(order).slice(0, ROWS).map((pair) => pair[1]);
    const line = (row) => make("tr", {}, this.columns.map((c) => make("td", { class: c.n ? "n" : undefined }, c.show(row))));
    if (rows.length === 0) return make("div", { class: "scroll empty" }, `No ${caption}`);
    const body = make("tbody", {}, shown.map(line));
    const more = rows.length > ROWS ? make("p", { class: "sub more" }, `The first ${ROWS} of ${rows.length}. Sort, or search, for the others.`) : null;
    return make("div", { class: "scroll" }, make("table", { "aria-label": caption }, make("thead", {}, make("tr", {}, heads)), body), more);
  }
}

const rate = (fleet, what, show) => ({ show: (v) => show(fleet.rates(v.name)[what]), key: (v) => fleet.rates(v.name)[what], n: true });

export function vrnicColumns(fleet) {
  const state = (v) => fleet.vrnicStates.get(v.name) ?? {};
  return [
    { head: "vRNIC", show: (v) => link("vrnics", v.name), key: (v) => v.name },
    { head: "Group", show: (v) => groupTag(fleet, v.group), key: (v) => v.group },
    { head: "Host", show: (v) => (v.host ? link("hosts", v.host) : soft("none")), key: (v) => v.host ?? "" },
    { head: "Address", show: (v) => (v.ips ?? []).join(", "), key: (v) => v.ips?.[0] ?? "" },
    { head: "State", show: (v) => vrnicState(fleet, v), key: (v) => (v.down ? 1 : 0) },
    { head: "Sent", ...rate(fleet, "sent", bytes) },
    { head: "Received", ...rate(fleet, "received", bytes) },
    { head: "Requests", ...rate(fleet, "operations", each) },
    { head: "Errors", show: (v) => make("span", { class: fleet.rates(v.name).errors > 0 ? "bad" : "soft" }, each(fleet.rates(v.name).errors)), key: (v) => fleet.rates(v.name).errors, n: true },
    { head: "QPs", show: (v) => String(state(v).qps ?? 0), key: (v) => state(v).qps ?? 0, n: true },
    { head: "Connected to", show: (v) => String(new Set((state(v).connections ?? []).map((c) => c.peer || c.address)).size), key: (v) => (state(v).connections ?? []).length, n: true },
  ];
}

export function map(fleet, hidden, again, open) {
  const all = fleet.sum(fleet.vrnics.values());
  const hosts = [...fleet.hosts.keys()];
  const away = hosts.filter((h) => !fleet.hostStates.get(h)?.connected).length;
  const cards = make("div", { class: "cards" },
    card("hosts connected", `${hosts.length - away} of ${hosts.length}`, away ? "bad" : undefined),
    card("groups", fleet.groups.size),
    card("vRNICs", fleet.vrnics.size),
    card("programs", all.programs),
    card("bytes sent", bytes(all.sent)),
    card("requests", each(all.operations)),
    card("errors", each(all.errors), all.errors > 0 ? "bad" : undefined));
  const toggle = (name) => () => {
    if (!hidden.delete(name)) hidden.add(name);
    again();
  };
  const groups = [...fleet.groups.keys()].sort();
  const legend = make("div", { class: "legend", role: "group", "aria-label": "Groups that are drawn" },
    groups.map((name) => make("button", { type: "button", style: `--h:${hue(fleet.groups, name)}`, "aria-pressed": String(!hidden.has(name)), onclick: toggle(name), "data-key": `group-${name}` }, `${name} (${fleet.of("group", name).length})`)));
  const seen = fleet.nodes(hidden, MOST);
  const picture = seen.nodes.length + fleet.hosts.size > MOST_BOXES
    ? make("div", { class: "map empty" }, "These are too many for one drawing: hide groups, or see the lists.")
    : make("div", { class: "map" }, drawing(fleet, seen, Math.max(700, document.querySelector("main").clientWidth - 40), open));
  const note = seen.together ? make("p", { class: "sub" }, "Each box stands for the vRNICs of a group on a host. Hide groups to see them one by one.") : null;
  return [cards, legend, note, picture];
}

export function hosts(fleet, table, again) {
  return [heading("Hosts", count(fleet.hosts.size, "host")), table.element([...fleet.hosts.values()], "hosts", again)];
}

export function hostColumns(fleet) {
  const sum = (h) => fleet.sumOf("host", h.name);
  const state = (h) => fleet.hostStates.get(h.name) ?? {};
  return [
    { head: "Host", show: (h) => link("hosts", h.name), key: (h) => h.name },
    { head: "State", show: (h) => hostState(fleet, h.name), key: (h) => (state(h).connected ? 1 : 0) },
    { head: "Addresses", show: (h) => (h.addresses ?? []).join(", "), key: (h) => h.addresses?.[0] ?? "" },
    { head: "Version", show: (h) => state(h).version ?? soft("-"), key: (h) => state(h).version ?? "" },
    { head: "In force", show: (h) => String(state(h).applied ?? "-"), key: (h) => Number(state(h).applied ?? 0), n: true },
    { head: "vRNICs", show: (h) => String(fleet.of("host", h.name).length), key: (h) => fleet.of("host", h.name).length, n: true },
    { head: "Sent", show: (h) => bytes(sum(h).sent), key: (h) => sum(h).sent, n: true },
    { head: "Received", show: (h) => bytes(sum(h).received), key: (h) => sum(h).received, n: true },
    { head: "Errors", show: (h) => each(sum(h).errors), key: (h) => sum(h).errors, n: true },
  ];
}

export function groupColumns(fleet) {
  const sum = (g) => fleet.sumOf("group", g.name);
  return [
    { head: "Group", show: (g) => groupTag(fleet, g.name), key: (g) => g.name },
    { head: "VNI", show: (g) => String(g.vni ?? "-"), key: (g) => g.vni ?? 0, n: true },
    { head: "Addresses", show: (g) => (g.ranges ?? ["10.77.0.0/16"]).join(", "), key: (g) => g.ranges?.[0] ?? "" },
    { head: "Secret", show: (g) => (g.secret ? make("span", { class: "good" }, "yes") : soft("no")), key: (g) => (g.secret ? 1 : 0) },
    { head: "vRNICs", show: (g) => String(fleet.of("group", g.name).length), key: (g) => fleet.of("group", g.name).length, n: true },
    { head: "Sent", show: (g) => bytes(sum(g).sent), key: (g) => sum(g).sent, n: true },
    { head: "Received", show: (g) => bytes(sum(g).received), key: (g) => sum(g).received, n: true },
    { head: "Requests", show: (g) => each(sum(g).operations), key: (g) => sum(g).operations, n: true },
    { head: "Errors", show: (g) => each(sum(g).errors), key: (g) => sum(g).errors, n: true },
  ];
}

function side(text) {
  const [kind, name] = (text ?? "").split(":");
  return name === undefined ? text ?? "" : make("span", {}, soft(`${kind} `), link(kind === "group" ? "groups" : "vrnics", name));
}

export function ruleColumns() {
  return [
    { head: "Rule", show: (r) => r.name, key: (r) => r.name },
    { head: "From", show: (r) => side(r.from), key: (r) => r.from ?? "" },
    { head: "", show: (r) => (r.both ? "↔" : "→"), key: (r) => (r.both ? 1 : 0) },
    { head: "To", show: (r) => side(r.to), key: (r) => r.to ?? "" },
    { head: "Action", show: (r) => (r.action === "DENY" ? make("span", { class: "bad" }, "deny") : make("span", { class: "good" }, "allow")), key: (r) => r.action ?? "ALLOW" },
    { head: "Priority", show: (r) => String(r.priority ?? 0), key: (r) => r.priority ?? 0, n: true },
  ];
}

const heading = (text, sub) => make("div", {}, make("h1", {}, text), make("p", { class: "sub" }, sub));

function facts(pairs) {
  return make("dl", { class: "facts" }, pairs.filter((p) => p[1] !== undefined && p[1] !== "").flatMap(([what, is]) => [make("dt", {}, what), make("dd", {}, is)]));
}

export const gone = (kind, name) => [heading(name, `There is no ${kind} of this name, or this token does not see it.`)];

export function host(fleet, name, table, again) {
  const h = fleet.hosts.get(name);
  if (!h) return gone("host", name);
  const state = fleet.hostStates.get(name) ?? {};
  const problems = (state.problems ?? []).map((p) => make("li", { class: "warn" }, p));
  return [
    heading(name, hostState(fleet, name)),
    facts([["Addresses", (h.addresses ?? []).join(", ")], ["Version", state.version], ["Revision in force", state.applied && `${state.applied} of ${fleet.revision}`], ["Heard", state.silentMs !== undefined ? `${(Number(state.silentMs) / 1000).toFixed(1)} s ago` : undefined], ["Clock", state.clockMs !== undefined ? `${state.clockMs} ms off` : undefined], ["Makes vRNICs by hand", h.mayAdd === false ? "no" : "yes"]]),
    problems.length ? make("h2", {}, "Problems") : null,
    problems.length ? make("ul", {}, problems) : null,
    make("h2", {}, "vRNICs"),
    table.element(fleet.of("host", name), "vRNICs", again),
  ];
}

export function group(fleet, name, table, again) {
  const g = fleet.groups.get(name);
  if (!g) return gone("group", name);
  const rules = [...fleet.rules.values()].filter((r) => [r.from, r.to].includes(`group:${name}`));
  return [
    heading(name, make("span", { class: "tag", style: `--h:${hue(fleet.groups, name)}` }, "group")),
    facts([["Number between hosts (VNI)", String(g.vni ?? "-")], ["Addresses", (g.ranges ?? ["10.77.0.0/16"]).join(", ")], ["Packets authenticated", g.secret ? "yes" : "no"], ["Weight", String(g.weight ?? 100)], ["Most vRNICs", g.maxVrnics !== undefined ? String(g.maxVrnics) : undefined], ["Rules", rules.length ? rules.map((r) => r.name).join(", ") : "none: it keeps to itself"]]),
    make("h2", {}, "vRNICs"),
    table.element(fleet.of("group", name), "vRNICs", again),
  ];
}

export function vrnic(fleet, name) {
  const v = fleet.vrnics.get(name);
  if (!v) return gone("vRNIC", name);
  const state = fleet.vrnicStates.get(name) ?? {};
  const rates = fleet.rates(name);
  const limits = Object.entries(v.limits ?? {}).map(([what, n]) => `${what.replace(/[A-Z]/g, (c) => ` ${c.toLowerCase()}`)} ${n}`);
  const share = v.share ?? {};
  const peers = (state.connections ?? []).map((c) => make("tr", {}, make("td", {}, c.peer ? link("vrnics", c.peer) : soft("no vRNIC of the fleet")), make("td", {}, c.address ?? ""), make("td", { class: "n" }, String(c.qps ?? 0))));
  const heads = [["Peer", ""], ["Address", ""], ["QPs", "n"]].map(([h, c]) => make("th", { scope: "col", class: c || undefined }, h));
  return [
    heading(name, make("span", {}, vrnicState(fleet, v), " in ", groupTag(fleet, v.group), v.host ? [" on ", link("hosts", v.host)] : null)),
    make("div", { class: "cards" }, card("sent", bytes(rates.sent)), card("received", bytes(rates.received)), card("requests", each(rates.operations)), card("errors", each(rates.errors), rates.errors > 0 ? "bad" : undefined), card("programs", state.programs ?? 0), card("queue pairs", state.qps ?? 0), card("memory regions", state.mrs ?? 0)),
    past(fleet, name),
    make("div", { class: "two" },
      make("section", {}, make("h2", {}, "Identity and limits"), facts([["Addresses", (v.ips ?? []).join(", ")], ["MAC", v.mac], ["GUID", v.guid], ["Made by", v.byHost ? "its host's administrator" : "the centre"], ["Sends with any address", v.allowSpoof ? "yes: it is a router" : undefined], ["Weight", String(share.weight ?? 100)], ["Rate", share.rate && share.rate !== "0" ? `${short(Number(share.rate))}bit/s` : "no limit"], ["Requests", share.ops && share.ops !== "0" ? `${short(Number(share.ops))}/s` : "no limit"], ["Limits", limits.join(", ") || "as by default"]])),
      make("section", {}, make("h2", {}, "Connected to"), peers.length ? make("div", { class: "scroll" }, make("table", { "aria-label": "connections" }, make("thead", {}, make("tr", {}, heads)), make("tbody", {}, peers))) : make("div", { class: "scroll empty" }, "nobody"))),
  ];
}

// Bytes a second of the time that this page has seen.
function past(fleet, name) {
  const { svg, most, seconds } = spark(fleet.past.get(name) ?? [], 0);
  const words = make("p", { class: "sub key" }, make("span", { class: "sent" }, "sent"), make("span", { class: "received" }, "received"), `at most ${bytes(most)} in the last ${count(seconds, "second")}`);
  return make("figure", {}, svg, make("figcaption", {}, words));
}

export function found(fleet, query, table, again) {
  const text = query.toLowerCase();
  const has = (...fields) => fields.some((f) => f?.toLowerCase().includes(text));
  const vrnics = [...fleet.vrnics.values()].filter((v) => has(v.name, v.group, v.host, v.mac, v.guid, ...(v.ips ?? [])));
  const named = (all, kind) => [...all.values()].filter((o) => has(o.name, ...(o.addresses ?? []), ...(o.ranges ?? []))).map((o) => make("li", {}, soft(`${kind.slice(0, -1)} `), link(kind, o.name)));
  const others = [...named(fleet.hosts, "hosts"), ...named(fleet.groups, "groups")];
  return [heading(`“${query}”`, `${count(vrnics.length, "vRNIC")}, ${others.length} hosts and groups`), others.length ? make("ul", {}, others) : null, table.element(vrnics, "vRNICs", again)];
}

export { heading };
