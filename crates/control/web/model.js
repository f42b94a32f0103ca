// What is known of the fleet, as the stream tells it, and what follows from that.

// Points of a vRNIC's past that its page draws.
const PAST = 150;

const number = (text) => Number(text ?? 0);

export class Fleet {
  constructor() {
    this.forget();
  }

  forget() {
    this.hosts = new Map();
    this.groups = new Map();
    this.vrnics = new Map();
    this.rules = new Map();
    // What is known of hosts and vRNICs beside what is declared.
    this.hostStates = new Map();
    this.vrnicStates = new Map();
    this.past = new Map();
    this.#index = new Map();
    this.revision = 0;
    this.complete = false;
  }

  // Takes a message of the stream.
  take(message, now = performance.now()) {
    this.#index = new Map();
    this.revision = Math.max(this.revision, number(message.revision));
    for (const { before, after } of message.changes ?? []) {
      if (after) this.#put(after, true);
      else if (before) this.#put(before, false);
    }
    for (const state of message.hosts ?? []) this.hostStates.set(state.name, state);
    for (const state of message.vrnics ?? []) this.#measure(state, now);
    this.complete ||= message.complete === true;
  }

  #put(object, there) {
    for (const [kind, all] of [["host", this.hosts], ["group", this.groups], ["vrnic", this.vrnics], ["rule", this.rules]]) {
      const it = object[kind];
      if (!it) continue;
      if (there) all.set(it.name, it);
      else all.delete(it.name);
      if (there) continue;
      if (kind === "host") this.hostStates.delete(it.name);
      if (kind !== "vrnic") continue;
      this.vrnicStates.delete(it.name);
      this.past.delete(it.name);
    }
  }

  // Rates are differences to what was told before.
  #measure(state, now) {
    const is = { at: now, sent: number(state.sentBytes), received: number(state.receivedBytes), operations: number(state.operations), errors: number(state.errors) };
    const was = this.vrnicStates.get(state.name);
    const seconds = was ? (now - was.is.at) / 1000 : 0;
    // A worker that was started anew counts from 0.
    const rate = (what) => (seconds > 0 ? (is[what] >= was.is[what] ? is[what] - was.is[what] : is[what]) / seconds : 0);
    const rates = { sent: rate("sent"), received: rate("received"), operations: rate("operations"), errors: rate("errors") };
    this.vrnicStates.set(state.name, { ...state, is, rates });
    if (!was) return;
    const past = this.past.get(state.name) ?? [];
    past.push({ at: now, ...rates });
    this.past.set(state.name, past.slice(-PAST));
  }

  rates(name) {
    return this.vrnicStates.get(name)?.rates ?? { sent: 0, received: 0, operations: 0, errors: 0 };
  }

  sum(vrnics) {
    const all = { sent: 0, received: 0, operations: 0, errors: 0, programs: 0, qps: 0 };
    for (const v of vrnics) {
      const rates = this.rates(v.name);
      for (const what of ["sent", "received", "operations", "errors"]) all[what] += rates[what];
      const state = this.vrnicStates.get(v.name);
      all.programs += state?.programs ?? 0;
      all.qps += state?.qps ?? 0;
    }
    return all;
  }

  // Each pair of vRNICs that are connected, once, with an estimate of its traffic: a vRNIC's bytes divided by the queue pairs of its
  // connections, at the end that has fewer.
  links() {
    const links = new Map();
    for (const [name, state] of this.vrnicStates) {
      const qps = (state.connections ?? []).reduce((sum, c) => sum + (c.qps ?? 0), 0);
      for (const c of state.connections ?? []) {
        if (!c.peer || !this.vrnics.has(name) || !this.vrnics.has(c.peer)) continue;
        const key = [name, c.peer].sort().join("\n");
        const bytes = ((state.rates.sent + state.rates.received) * (c.qps ?? 0)) / Math.max(qps, 1);
        const link = links.get(key) ?? { ends: key.split("\n"), qps: 0, bytes: Infinity };
        links.set(key, { ...link, qps: Math.max(link.qps, c.qps ?? 0), bytes: Math.min(link.bytes, bytes) });
      }
    }
    return [...links.values()];
  }

  // The vRNICs of a group, or on a host.
  of(what, name) {
    return this.#all(what).get(name)?.vrnics ?? [];
  }

  // What they do together.
  sumOf(what, name) {
    const all = this.#all(what).get(name);
    return all ? (all.sum ??= this.sum(all.vrnics)) : this.sum([]);
  }

  // vRNICs by group or host, until there is news.
  #index = new Map();
  #all(what) {
    let all = this.#index.get(what);
    if (!all) {
      all = new Map();
      for (const v of this.vrnics.values()) {
        const name = v[what] ?? "";
        if (!all.has(name)) all.set(name, { vrnics: [] });
        all.get(name).vrnics.push(v);
      }
      this.#index.set(what, all);
    }
    return all;
  }

  // What the drawing shows: each vRNIC, or, if they are more than `most`, the vRNICs of each group on each host as one; and the connections
  // between these.
  nodes(hidden, most) {
    const vrnics = [...this.vrnics.values()].filter((v) => !hidden.has(v.group));
    const together = vrnics.length > most;
    const key = (v) => (together ? `${v.host ?? ""}/${v.group}` : v.name);
    const nodes = new Map();
    for (const v of vrnics) {
      const id = key(v);
      const node = nodes.get(id) ?? { id, name: together ? v.group : v.name, group: v.group, host: v.host ?? "", vrnics: [], down: !together && v.down, open: together ? `groups/${encodeURIComponent(v.group)}` : `vrnics/${encodeURIComponent(v.name)}` };
      node.vrnics.push(v);
      nodes.set(id, node);
    }
    for (const node of nodes.values()) node.rates = this.sum(node.vrnics);
    const links = new Map();
    for (const link of this.links()) {
      const ends = link.ends.map((name) => key(this.vrnics.get(name)));
      if (ends[0] === ends[1] || !ends.every((e) => nodes.has(e))) continue;
      const id = ends.sort().join("\n");
      const all = links.get(id) ?? { ends, qps: 0, bytes: 0 };
      links.set(id, { ends, qps: all.qps + link.qps, bytes: all.bytes + link.bytes });
    }
    return { nodes: [...nodes.values()], links: [...links.values()], together };
  }
}

// A group's hue: far from those of the groups that have been before it.
export function hue(groups, name) {
  const at = [...groups.keys()].sort().indexOf(name);
  return at < 0 ? 0 : Math.round((210 + at * 137.5) % 360);
}

export const count = (n, what) => `${n} ${what}${n === 1 ? "" : "s"}`;

export const byName = new Intl.Collator(undefined, { numeric: true }).compare;

const UNITS = ["", "K", "M", "G", "T", "P"];

export function short(n, base = 1000) {
  let unit = 0;
  while (n >= base * 0.99995 && unit + 1 < UNITS.length) {
    n /= base;
    unit += 1;
  }
  return `${n >= 100 || Number.isInteger(n) ? Math.round(n) : n.toFixed(1)}${unit ? ` ${UNITS[unit]}` : n === 0 ? "" : " "}`;
}

export const bytes = (n) => (n === 0 ? "0" : `${short(n)}B/s`);
export const each = (n) => (n === 0 ? "0" : `${short(n)}/s`.replace(" /", "/"));
