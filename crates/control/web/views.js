// The views: each makes its elements of what is known.

import { make } from "./dom.js";
import { MOST, MOST_BOXES, chart, drawing } from "./draw.js";
import { byName, bytes, clock, count, each, hue, short, to } from "./model.js";

const link = (kind, name) => make("a", { href: to(kind, name) }, name);
const soft = (text) => make("span", { class: "soft" }, text);
const said = (mark, text) => make("span", { class: `state ${mark}` }, text);
const card = (what, n, mark) => make("div", { class: "card" }, make("span", {}, what), make("b", { class: mark }, String(n)));
const heading = (text, sub) => make("div", { class: "heading" }, make("h1", {}, text), make("p", { class: "sub" }, sub));
const mostly = (n, mark = "bad") => (n > 0 ? mark : undefined);

function groupTag(fleet, name) {
  return make("a", { class: "tag", style: `--h:${hue(fleet.groups, name)}`, href: to("groups", name) }, name);
}

function hostState(fleet, name) {
  const state = fleet.hostStates.get(name);
  switch (fleet.hostIs(name)) {
    case "unknown": return said("none", "not shown to this token");
    case "away": return said("bad", state ? `not connected since ${clock(state.heard)}` : "not connected");
    case "problems": return said("warn", count(state.problems.length, "problem"));
    default: return said("good", "connected");
  }
}

const VRNIC = { up: ["good", "up"], down: ["warn", "link down"], away: ["bad", "host not connected"], missing: ["bad", "not on its host"], nowhere: ["none", "on no host"] };
const vrnicState = (fleet, v) => said(...VRNIC[fleet.vrnicIs(v)]);

// Most rows that a table shows.
const ROWS = 500;

// A table that its heads sort. Columns: head, what it shows, what sorts it, and whether that is a number.
export class Table {
  constructor(columns, sort, down = false) {
    Object.assign(this, { columns, sort, down });
  }

  // Somebody has pressed a head.
  press(i) {
    this.down = this.sort === i ? !this.down : this.columns[i].n === true;
    this.sort = i;
  }

  element(rows, caption) {
    if (rows.length === 0) return make("div", { class: "scroll empty" }, `No ${caption}`);
    const by = this.columns[this.sort];
    const order = ([x, a], [y, b]) => (typeof x === "number" ? x - y : byName(String(x), String(y))) * (this.down ? -1 : 1) || byName(a.name, b.name);
    const heads = this.columns.map((c, i) => {
      const sorted = i === this.sort ? (this.down ? "descending" : "ascending") : undefined;
      const mark = i === this.sort ? (this.down ? " ↓" : " ↑") : "";
      return make("th", { scope: "col", class: c.n ? "n" : undefined, "aria-sort": sorted }, make("button", { type: "button", "data-sort": i, "data-key": `sort ${i}` }, c.head + mark));
    });
    const shown = rows.map((row) => [by.key(row), row]).sort(order).slice(0, ROWS).map((pair) => pair[1]);
    const line = (row) => make("tr", { "data-key": row.id ?? row.name }, this.columns.map((c) => make("td", { class: c.n ? "n" : undefined }, c.show(row))));
    const more = rows.length > ROWS ? make("p", { class: "sub more" }, `The first ${ROWS} of ${rows.length}. Sort, or search, for the others.`) : null;
    return make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": `Table of ${caption}` }, make("table", { "aria-label": caption }, make("thead", {}, make("tr", {}, heads)), make("tbody", {}, shown.map(line))), more);
  }
}

const figure = (head, of, show) => ({ head, show: (x) => (of(x) ? show(of(x)) : soft("0")), key: of, n: true });
const errors = (of) => ({ head: "Errors", show: (x) => (of(x) > 0 ? make("span", { class: "bad" }, each(of(x))) : soft("0")), key: of, n: true });

export function vrnicColumns(fleet) {
  const rate = (what) => (v) => fleet.rates(v.name)[what];
  const state = (v) => fleet.vrnicStates.get(v.name) ?? {};
  const peers = (v) => new Set((state(v).connections ?? []).map((c) => c.peer || c.address)).size;
  return [
    { head: "vRNIC", show: (v) => link("vrnics", v.name), key: (v) => v.name },
    { head: "Group", show: (v) => groupTag(fleet, v.group), key: (v) => v.group },
    { head: "Host", show: (v) => (!v.host ? soft("none") : fleet.hostIs(v.host) === "unknown" ? v.host : link("hosts", v.host)), key: (v) => v.host ?? "" },
    { head: "Address", show: (v) => (v.ips ?? []).map((ip) => ip.split("/")[0]).join(", "), key: (v) => v.ips?.[0] ?? "" },
    { head: "State", show: (v) => vrnicState(fleet, v), key: (v) => fleet.vrnicIs(v) },
    figure("Sent", rate("sent"), bytes),
    figure("Received", rate("received"), bytes),
    figure("Requests", rate("operations"), each),
    errors(rate("errors")),
    figure("QPs", (v) => state(v).qps ?? 0, String),
    figure("Peers", peers, String),
  ];
}

export function map(fleet, hidden, width) {
  const all = fleet.sum(fleet.vrnics.values());
  const hosts = [...fleet.hosts.keys()];
  const count_of = (is) => hosts.filter((h) => fleet.hostIs(h) === is).length;
  const [away, problems] = [count_of("away"), count_of("problems")];
  const cards = make("div", { class: "cards" },
    hosts.length ? card("hosts connected", `${hosts.length - away} of ${hosts.length}`, mostly(away)) : null,
    problems ? card("with problems", count(problems, "host"), "warn") : null,
    card("groups", fleet.groups.size),
    card("vRNICs", fleet.vrnics.size),
    card("programs", all.programs),
    card("sent", bytes(all.sent)),
    card("requests", each(all.operations)),
    card("errors", each(all.errors), mostly(all.errors)));
  const groups = [...fleet.groups.keys()].filter((name) => fleet.of("group", name).length > 0).sort(byName);
  const legend = make("div", { class: "legend", role: "group", "aria-label": "Groups that are drawn" },
    groups.map((name) => make("button", { type: "button", style: `--h:${hue(fleet.groups, name)}`, "aria-pressed": String(!hidden.has(name)), "data-toggle": name, "data-key": `group ${name}`, title: hidden.has(name) ? "Draw this group" : "Do not draw this group" }, name, soft(String(fleet.of("group", name).length)))));
  const seen = fleet.nodes(hidden, MOST);
  const boxes = seen.nodes.length + fleet.hosts.size;
  let picture = make("div", { class: "map", "data-key": "map" }, boxes ? drawing(fleet, seen, width - 2) : null);
  if (boxes === 0) picture = make("div", { class: "map empty" }, "There are no hosts and no vRNICs yet. `unirdma apply -f network.toml` declares them.");
  if (boxes > MOST_BOXES) picture = make("div", { class: "map empty" }, "These are too many for one drawing: hide groups, or see the lists.");
  const note = seen.together ? make("p", { class: "sub note" }, `More than ${MOST} vRNICs: each box stands for those of a group on a host. Hide groups to see them one by one.`) : null;
  return [make("h1", { class: "unseen" }, "Map"), cards, legend, note, picture];
}

export const hosts = (fleet, table) => [heading("Hosts", hostsLine(fleet)), table.element([...fleet.hosts.values()], "hosts")];

function hostsLine(fleet) {
  const away = [...fleet.hosts.keys()].filter((h) => fleet.hostIs(h) === "away").length;
  return `${count(fleet.hosts.size, "host")}, ${away ? `${away} not connected` : "all connected"}`;
}

export const groups = (fleet, table) => [heading("Groups", "Within a group everybody may connect; between groups only whom a rule allows."), table.element([...fleet.groups.values()], "groups")];
export const rules = (fleet, table) => [heading("Rules", "The one with the highest priority that matches decides; of two that are equal, the one that denies."), table.element([...fleet.rules.values()], "rules")];
export const vrnics = (fleet, table) => [heading("vRNICs", count(fleet.vrnics.size, "vRNIC")), table.element([...fleet.vrnics.values()], "vRNICs")];

export function hostColumns(fleet) {
  const sum = (what) => (h) => fleet.sumOf("host", h.name)[what];
  const state = (h) => fleet.hostStates.get(h.name) ?? {};
  return [
    { head: "Host", show: (h) => link("hosts", h.name), key: (h) => h.name },
    { head: "State", show: (h) => hostState(fleet, h.name), key: (h) => fleet.hostIs(h.name) },
    { head: "Addresses", show: (h) => (h.addresses ?? []).join(", "), key: (h) => h.addresses?.[0] ?? "" },
    { head: "Version", show: (h) => state(h).version ?? soft("-"), key: (h) => state(h).version ?? "" },
    { head: "Revision", show: (h) => String(state(h).applied ?? "-"), key: (h) => Number(state(h).applied ?? 0), n: true },
    figure("vRNICs", (h) => fleet.of("host", h.name).length, String),
    figure("Programs", sum("programs"), String),
    figure("Sent", sum("sent"), bytes),
    figure("Received", sum("received"), bytes),
    errors(sum("errors")),
  ];
}

export function groupColumns(fleet) {
  const sum = (what) => (g) => fleet.sumOf("group", g.name)[what];
  return [
    { head: "Group", show: (g) => groupTag(fleet, g.name), key: (g) => g.name },
    { head: "VNI", show: (g) => String(g.vni ?? "-"), key: (g) => g.vni ?? 0, n: true },
    { head: "Addresses", show: (g) => ranges(g), key: (g) => ranges(g) },
    { head: "Secret", show: (g) => (g.secret ? said("good", "yes") : soft("no")), key: (g) => (g.secret ? 1 : 0) },
    figure("vRNICs", (g) => fleet.of("group", g.name).length, String),
    figure("Programs", sum("programs"), String),
    figure("Sent", sum("sent"), bytes),
    figure("Received", sum("received"), bytes),
    figure("Requests", sum("operations"), each),
    errors(sum("errors")),
  ];
}

const ranges = (g) => (g.ranges ?? ["10.77.0.0/16"]).join(", ");

function side(text = "") {
  const [kind, name] = text.split(":");
  return name === undefined ? text : make("span", {}, soft(`${kind} `), link(kind === "group" ? "groups" : "vrnics", name));
}

export function ruleColumns() {
  return [
    { head: "Rule", show: (r) => r.name, key: (r) => r.name },
    { head: "From", show: (r) => side(r.from), key: (r) => r.from ?? "" },
    { head: "Way", show: (r) => (r.both ? "both ways" : "one way"), key: (r) => (r.both ? 1 : 0) },
    { head: "To", show: (r) => side(r.to), key: (r) => r.to ?? "" },
    { head: "Action", show: (r) => (r.action === "DENY" ? said("bad", "deny") : said("good", "allow")), key: (r) => r.action ?? "ALLOW" },
    { head: "Priority", show: (r) => String(r.priority ?? 0), key: (r) => r.priority ?? 0, n: true },
  ];
}

// The rules that name one of these.
function rulesOf(fleet, table, ...names) {
  const those = [...fleet.rules.values()].filter((r) => names.includes(r.from) || names.includes(r.to));
  return [make("h2", {}, "Rules that name it"), those.length ? table.element(those, "rules") : make("p", { class: "sub" }, "None: it connects within its group, and to no other.")];
}

function facts(pairs) {
  return make("dl", { class: "facts" }, pairs.filter((p) => p[1] !== undefined && p[1] !== "").flatMap(([what, is]) => [make("dt", {}, what), make("dd", {}, is)]));
}

const gone = (kind, name) => [heading(name, `There is no ${kind} of this name, or this token does not see it.`)];

export function host(fleet, name, table) {
  const h = fleet.hosts.get(name);
  if (!h) return gone("host", name);
  const state = fleet.hostStates.get(name) ?? {};
  const sum = fleet.sumOf("host", name);
  const problems = (state.problems ?? []).map((p) => make("li", { class: "warn" }, p));
  return [
    heading(name, hostState(fleet, name)),
    make("div", { class: "cards" }, card("vRNICs", fleet.of("host", name).length), card("programs", sum.programs), card("sent", bytes(sum.sent)), card("received", bytes(sum.received)), card("requests", each(sum.operations)), card("errors", each(sum.errors), mostly(sum.errors))),
    problems.length ? make("h2", {}, "Problems") : null,
    problems.length ? make("ul", { class: "problems" }, problems) : null,
    make("h2", {}, "Host"),
    facts([["Addresses", (h.addresses ?? []).join(", ")], ["Version", state.version], ["Revision in force", state.applied && `${state.applied} of ${fleet.revision}`], ["Clock", state.clockMs !== undefined ? `${state.clockMs} ms from the centre's` : undefined], ["Makes vRNICs by hand", h.mayAdd === false ? "no" : "yes"], ["VFs of real RNICs", (state.pools ?? []).map(pool).join("; ") || undefined]]),
    make("h2", {}, "vRNICs"),
    table.element(fleet.of("host", name), "vRNICs"),
  ];
}

const pool = (p) => `${p.pf}: ${p.vfs ?? 0}, of which ${p.ready ?? 0} ready and ${p.leased ?? 0} leased`;

export function group(fleet, name, table, ruleTable) {
  const g = fleet.groups.get(name);
  if (!g) return gone("group", name);
  const sum = fleet.sumOf("group", name);
  return [
    heading(name, make("span", { class: "tag", style: `--h:${hue(fleet.groups, name)}` }, "group")),
    make("div", { class: "cards" }, card("vRNICs", fleet.of("group", name).length), card("programs", sum.programs), card("sent", bytes(sum.sent)), card("received", bytes(sum.received)), card("requests", each(sum.operations)), card("errors", each(sum.errors), mostly(sum.errors))),
    make("h2", {}, "Network"),
    facts([["Addresses", ranges(g)], ["Number between hosts (VNI)", String(g.vni ?? "-")], ["VLAN of VFs", g.vlan && String(g.vlan)], ["Packets authenticated", g.secret ? "yes, with a secret" : "no"], ["Weight", String(g.weight ?? 100)], ["Most vRNICs", g.maxVrnics !== undefined ? String(g.maxVrnics) : undefined], ["Most rules", g.maxRules !== undefined ? String(g.maxRules) : undefined]]),
    ...rulesOf(fleet, ruleTable, `group:${name}`),
    make("h2", {}, "vRNICs"),
    table.element(fleet.of("group", name), "vRNICs"),
  ];
}

/** The way of a vRNIC's programs: the one that was asked for, and what is in force. */
function way(v, state) {
  const asked = (v.way ?? "SOFT").toLowerCase();
  if (asked === "soft") return undefined;
  if (state.vf) return `${asked}: ${state.vf}, ${state.realGid ?? ""}`;
  const now = `${asked}: ${(state.way ?? "SOFT").toLowerCase()}`;
  return state.there ? `${now}${state.why ? ` (${state.why})` : ""}` : asked;
}

const words = (name) => name.replace(/[A-Z]/g, (c) => ` ${c.toLowerCase()}`);

export function vrnic(fleet, name, peerTable, ruleTable) {
  const v = fleet.vrnics.get(name);
  if (!v) return gone("vRNIC", name);
  const state = fleet.vrnicStates.get(name) ?? {};
  const rates = fleet.rates(name);
  const limits = Object.entries(v.limits ?? {}).map(([what, n]) => `${words(what)} ${n}`);
  const share = v.share ?? {};
  const on = v.host ? [" on ", fleet.hostIs(v.host) === "unknown" ? v.host : link("hosts", v.host)] : null;
  const peers = (state.connections ?? []).map((c) => ({ ...c, id: c.address, name: c.peer || c.address }));
  return [
    heading(name, make("span", {}, vrnicState(fleet, v), " in ", groupTag(fleet, v.group), on)),
    make("div", { class: "cards" }, card("sent", bytes(rates.sent)), card("received", bytes(rates.received)), card("requests", each(rates.operations)), card("errors", each(rates.errors), mostly(rates.errors)), card("programs", state.programs ?? 0), card("queue pairs", state.qps ?? 0), card("memory regions", state.mrs ?? 0)),
    past(fleet, name),
    make("div", { class: "two" },
      make("section", {}, make("h2", {}, "Connected to"), peerTable.element(peers, "connections")),
      make("section", {}, make("h2", {}, "Identity and limits"), facts([["Addresses", (v.ips ?? []).join(", ")], ["MAC", v.mac], ["GUID", v.guid], ["Made by", v.byHost ? "its host's administrator" : "the centre"], ["Sends with any address", v.allowSpoof ? "yes: it is a router" : undefined], ["Way", way(v, state)], ["Instance", v.instance], ["Weight", String(share.weight ?? 100)], ["Rate", share.rate && share.rate !== "0" ? `${short(Number(share.rate))}bit/s` : "no limit"], ["Requests", share.ops && share.ops !== "0" ? `${short(Number(share.ops))}/s` : "no limit"], ["Limits", limits.join(", ") || "as by default"]]))),
    ...rulesOf(fleet, ruleTable, `vrnic:${name}`, `group:${v.group}`),
  ];
}

export function peerColumns() {
  return [
    { head: "Peer", show: (c) => (c.peer ? link("vrnics", c.peer) : soft("none of the fleet")), key: (c) => c.name },
    { head: "Address", show: (c) => c.address ?? "", key: (c) => c.address ?? "" },
    figure("QPs", (c) => c.qps, String),
    figure("Sent", (c) => c.sent, bytes),
    figure("Received", (c) => c.received, bytes),
  ];
}

// Bytes a second of the time that this page has seen.
function past(fleet, name) {
  const { svg, most, seconds } = chart(fleet.past.get(name) ?? [], performance.now(), fleet.began);
  const time = seconds < 120 ? count(seconds, "second") : count(Math.round(seconds / 60), "minute");
  return make("figure", {}, svg, make("figcaption", { class: "sub key" }, make("span", { class: "sent" }, "sent"), make("span", { class: "received" }, "received"), `the last ${time}, at most ${bytes(most)}`));
}

export function found(fleet, query, table) {
  const parts = query.toLowerCase().split(/\s+/).filter(Boolean);
  const has = (...fields) => parts.every((p) => fields.some((f) => f?.toLowerCase().includes(p)));
  const some = [...fleet.vrnics.values()].filter((v) => has(v.name, v.group, v.host, v.mac, v.guid, ...(v.ips ?? [])));
  const named = (all, kind) => [...all.values()].filter((o) => has(o.name, ...(o.addresses ?? []), ...(o.ranges ?? []))).map((o) => make("li", { "data-key": `${kind} ${o.name}` }, soft(`${kind.slice(0, -1)} `), link(kind, o.name)));
  const rule = [...fleet.rules.values()].filter((r) => has(r.name, r.from, r.to)).map((r) => make("li", { "data-key": `rules ${r.name}` }, soft("rule "), make("a", { href: "#/rules" }, r.name)));
  const others = [...named(fleet.hosts, "hosts"), ...named(fleet.groups, "groups"), ...rule];
  return [heading(`“${query}”`, `${count(some.length, "vRNIC")}${others.length ? `, and ${others.length} hosts, groups and rules` : ""}`), others.length ? make("ul", { class: "others" }, others) : null, table.element(some, "vRNICs")];
}
