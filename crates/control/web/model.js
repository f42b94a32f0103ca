// What is known of the fleet, as the stream tells it, and what follows from that.

// How long a vRNIC's page looks back, milliseconds.
export const PAST = 300_000;

const number = (text) => Number(text ?? 0);
const NOTHING = { sent: 0, received: 0, operations: 0, errors: 0 };

export class Fleet {
  constructor() {
    this.hosts = new Map();
    this.groups = new Map();
    this.vrnics = new Map();
    this.rules = new Map();
    // What is known of hosts and vRNICs beside what is declared.
    this.hostStates = new Map();
    this.vrnicStates = new Map();
    // Rates of each vRNIC in the last minutes: each holds until the next one.
    this.past = new Map();
    this.revision = 0;
    this.complete = false;
    this.began = performance.now();
  }

  // Becomes what another one is, and keeps the past of what is still there.
  become(other) {
    const kept = [...this.past].filter(([name]) => other.vrnics.has(name));
    Object.assign(this, other, { past: new Map([...kept, ...other.past]), began: this.began });
    this.#index = new Map();
  }

  // Takes a message of the stream.
  take(message, now = performance.now()) {
    this.#index = new Map();
    this.revision = Math.max(this.revision, number(message.revision));
    for (const { before, after } of message.changes ?? []) {
      if (after) this.#put(after, true);
      else if (before) this.#put(before, false);
    }
    for (const state of message.hosts ?? []) this.#meet(state);
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

  #meet(state) {
    this.hostStates.set(state.name, { ...state, heard: Date.now() - number(state.silentMs) });
  }

  #measure(state, now) {
    const rates = { sent: number(state.sentRate), received: number(state.receivedRate), operations: number(state.operationRate), errors: number(state.errorRate) };
    const connections = (state.connections ?? []).map((c) => ({ ...c, qps: c.qps ?? 0, sent: number(c.sentRate), received: number(c.receivedRate) }));
    this.vrnicStates.set(state.name, { ...state, connections, rates });
    const past = this.past.get(state.name) ?? [];
    // One from before the time that is looked back at says what was at its beginning.
    while (past.length > 1 && past[1].at < now - PAST) past.shift();
    past.push({ at: now, ...rates });
    this.past.set(state.name, past);
  }

  // How a host is: `connected`, `problems`, `away`, or `unknown` to whom this token does not show it.
  hostIs(name) {
    if (!this.hosts.has(name)) return "unknown";
    const state = this.hostStates.get(name);
    if (!state?.connected) return "away";
    return state.problems?.length ? "problems" : "connected";
  }

  // How a vRNIC is.
  vrnicIs(v) {
    if (v.down) return "down";
    if (!v.host) return "nowhere";
    if (this.hostIs(v.host) === "away") return "away";
    return this.vrnicStates.get(v.name)?.there ? "up" : "missing";
  }

  rates(name) {
    return this.vrnicStates.get(name)?.rates ?? NOTHING;
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

  // Each pair of vRNICs that are connected, once, with the bytes a second from the first to the second and back. Both ends count the same
  // bytes at moments of their own: the one that counts more is believed.
  links() {
    const links = new Map();
    for (const [name, state] of this.vrnicStates) {
      for (const c of state.connections) {
        if (!c.peer || !this.vrnics.has(name) || !this.vrnics.has(c.peer)) continue;
        const first = name < c.peer;
        const ends = first ? [name, c.peer] : [c.peer, name];
        const key = ends.join("\n");
        const [there, back] = first ? [c.sent, c.received] : [c.received, c.sent];
        const link = links.get(key) ?? { ends, qps: 0, there: 0, back: 0 };
        links.set(key, { ends, qps: Math.max(link.qps, c.qps), there: Math.max(link.there, there), back: Math.max(link.back, back) });
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
      const node = nodes.get(id) ?? { id, name: together ? v.group : v.name, group: v.group, host: v.host ?? "", vrnics: [], is: !together ? this.vrnicIs(v) : this.hostIs(v.host) === "away" && v.host ? "away" : "up", open: together ? `groups/${encodeURIComponent(v.group)}` : `vrnics/${encodeURIComponent(v.name)}` };
      node.vrnics.push(v);
      nodes.set(id, node);
    }
    for (const node of nodes.values()) node.rates = this.sum(node.vrnics);
    const links = new Map();
    for (const link of this.links()) {
      const [a, b] = link.ends.map((name) => key(this.vrnics.get(name)));
      if (a === b || !nodes.has(a) || !nodes.has(b)) continue;
      const [there, back] = a < b ? [link.there, link.back] : [link.back, link.there];
      const ends = a < b ? [a, b] : [b, a];
      const id = ends.join("\n");
      const all = links.get(id) ?? { ends, qps: 0, there: 0, back: 0 };
      links.set(id, { ends, qps: all.qps + link.qps, there: all.there + there, back: all.back + back });
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

// The address of a thing's own page.
export const to = (kind, name) => `#/${kind}/${encodeURIComponent(name)}`;

// The time of day, by this machine's clock.
export const clock = (ms) => new Date(ms).toLocaleTimeString([], { hour12: false });
