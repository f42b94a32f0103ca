// The page: where it is (the part of the address after `#`), what the keys and the mouse do, and how it stays connected.

import { Refused, token, watch } from "./api.js";
import { fill, make } from "./dom.js";
import { light, point } from "./draw.js";
import { Fleet, clock } from "./model.js";
import * as views from "./views.js";

const $ = (id) => document.getElementById(id);
const main = $("main");
const fleet = new Fleet();
// Groups that are not drawn.
const hidden = new Set();
const tables = {
  hosts: new views.Table(views.hostColumns(fleet), 0),
  groups: new views.Table(views.groupColumns(fleet), 0),
  vrnics: new views.Table(views.vrnicColumns(fleet), 0),
  rules: new views.Table(views.ruleColumns(), 5, true),
  peers: new views.Table(views.peerColumns(), 3, true),
};

// ---- What is shown ----

function where() {
  const [view, name] = location.hash.replace(/^#\/?/, "").split("/");
  try {
    return { view: view || "map", name: name === undefined ? undefined : decodeURIComponent(name) };
  } catch {
    return { view: view || "map", name };
  }
}

function content() {
  const { view, name } = where();
  const { hosts, groups, vrnics, rules, peers } = tables;
  if (!fleet.complete) return [make("p", { class: "empty" }, token.get() ? "Waiting for the centre." : "Not signed in.")];
  switch (view) {
    case "search": return views.found(fleet, name ?? "", vrnics);
    case "hosts": return name === undefined ? views.hosts(fleet, hosts) : views.host(fleet, name, vrnics);
    case "groups": return name === undefined ? views.groups(fleet, groups) : views.group(fleet, name, vrnics, rules);
    case "vrnics": return name === undefined ? views.vrnics(fleet, vrnics) : views.vrnic(fleet, name, peers, rules);
    case "rules": return views.rules(fleet, rules);
    default: return views.map(fleet, hidden, main.clientWidth - 2 * parseFloat(getComputedStyle(main).paddingLeft));
  }
}

let shown;

function show() {
  const { view, name } = where();
  const focus = document.activeElement;
  const [first, another] = [shown === undefined, shown !== location.hash];
  shown = location.hash;
  // Another view is made anew, so that nothing of the one before stays.
  if (another) main.replaceChildren();
  fill(main, content().flat().filter(Boolean));
  light();
  // An element that has moved to another place has lost the focus.
  if (main.contains(focus) && focus !== document.activeElement) focus.focus({ preventScroll: true });
  document.title = `${name ?? view} - uniRDMA`;
  for (const a of document.querySelectorAll("nav a")) {
    if (a.dataset.view === view) a.setAttribute("aria-current", "page");
    else a.removeAttribute("aria-current");
  }
  if (!another || focus === $("query")) return;
  $("query").value = view === "search" ? (name ?? "") : "";
  if (first) return;
  scrollTo(0, 0);
  main.focus({ preventScroll: true });
}

// Shows the view of the address. A key can come before the browser says that the address has changed, and is meant for that view.
function arrive() {
  if (shown !== location.hash) show();
}

let due = false;
// Many messages make one drawing, none while somebody presses a button of the mouse.
let pressed = false;
function changed() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    if (!pressed) show();
  });
}
addEventListener("pointerdown", () => (pressed = true));
for (const kind of ["pointerup", "pointercancel", "blur"]) addEventListener(kind, () => (pressed = false));

// ---- The stream ----

let stop = new AbortController();

function say(text, on) {
  if ($("live").textContent !== text) $("live").textContent = text;
  $("live").classList.toggle("on", on);
  const stale = !on && fleet.complete;
  main.classList.toggle("stale", stale);
  $("stale").hidden = !stale;
  if (stale && !$("stale").textContent) $("stale").textContent = `The centre does not answer. This is what was known at ${clock(Date.now())}.`;
  if (on) $("stale").textContent = "";
}

const sleep = (ms) => new Promise((then) => setTimeout(then, ms));

async function follow() {
  stop.abort();
  stop = new AbortController();
  const { signal } = stop;
  for (let pause = 500; !signal.aborted; pause = Math.min(pause * 2, 10000)) {
    // What is shown stays until all has come again.
    const coming = new Fleet();
    let now = coming;
    try {
      if (!fleet.complete) say("connecting", false);
      await watch((message) => {
        now.take(message);
        if (!now.complete) return;
        if (now === coming) {
          fleet.become(coming);
          now = fleet;
          pause = 500;
          signedIn();
        }
        say(`live, revision ${fleet.revision}`, true);
        changed();
      }, signal);
      say("the centre has ended the stream", false);
    } catch (e) {
      if (signal.aborted) return;
      if (e instanceof Refused) return ask(e.message);
      say(`no answer: ${e.message}`, false);
      if ($("token").open) $("token-error").textContent = `No answer: ${e.message}`;
    }
    await sleep(pause);
  }
}

function signedIn() {
  $("leave").hidden = false;
  $("who").textContent = token.id();
  $("token").close();
}

function ask(why = "") {
  stop.abort();
  token.drop();
  fleet.become(new Fleet());
  say("not connected", false);
  show();
  $("leave").hidden = true;
  $("token-error").textContent = why;
  $("secret").value = "";
  if (!$("token").open) $("token").showModal();
  $("secret").focus();
}

$("token").addEventListener("cancel", (e) => e.preventDefault());
$("token-form").addEventListener("submit", (e) => {
  e.preventDefault();
  token.set($("secret").value.trim());
  $("token-error").textContent = "";
  follow();
});
$("leave").addEventListener("click", () => ask());

// ---- The mouse ----

main.addEventListener("click", (e) => {
  const button = e.target.closest("button");
  if (button?.dataset.toggle !== undefined) {
    const name = button.dataset.toggle;
    if (!hidden.delete(name)) hidden.add(name);
  } else if (button?.dataset.sort !== undefined) {
    // Which of the tables it is, its name says.
    const name = button.closest("table").getAttribute("aria-label").toLowerCase();
    (tables[name] ?? tables.peers).press(Number(button.dataset.sort));
  } else return;
  show();
});
main.addEventListener("pointerover", (e) => point(e.target));
for (const kind of ["pointerleave", "focusin", "focusout"]) main.addEventListener(kind, () => point());

// ---- Theme, search, keys ----

function theme(next) {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const now = document.documentElement.dataset.theme ?? system;
  document.documentElement.dataset.theme = next ?? (now === "dark" ? "light" : "dark");
  localStorage.setItem("unirdma-theme", document.documentElement.dataset.theme);
}
if (["dark", "light"].includes(localStorage.getItem("unirdma-theme"))) theme(localStorage.getItem("unirdma-theme"));
$("theme").addEventListener("click", () => theme());

$("query").addEventListener("input", () => {
  const text = $("query").value.trim();
  const hash = text ? `#/search/${encodeURIComponent(text)}` : "#/";
  // A word is one step of the history, not each of its letters.
  if (where().view === "search") location.replace(hash);
  else location.hash = hash;
});
const STOPS = "tbody td:first-child a, .others a, .vrnic";
$("search").addEventListener("submit", (e) => {
  e.preventDefault();
  arrive();
  main.querySelector(STOPS)?.focus();
});

const VIEWS = ["#/", "#/hosts", "#/groups", "#/vrnics", "#/rules"];

function step(by) {
  const stops = [...main.querySelectorAll(STOPS)];
  const at = stops.indexOf(document.activeElement);
  stops[Math.min(Math.max(at + by, 0), stops.length - 1)]?.focus();
}

document.addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey || document.querySelector("dialog[open]")) return;
  if (e.target.matches("input")) {
    if (e.key === "Escape") main.focus();
    return;
  }
  arrive();
  const inList = document.activeElement.matches(STOPS);
  const keys = {
    "/": () => $("query").select(),
    "?": () => $("help").showModal(),
    d: () => theme(),
    j: () => step(1),
    k: () => step(-1),
    ArrowDown: inList && (() => step(1)),
    ArrowUp: inList && (() => step(-1)),
    Backspace: () => history.back(),
    Escape: () => main.focus(),
  };
  const view = VIEWS[Number(e.key) - 1];
  const does = view ? () => (location.hash = view) : keys[e.key];
  if (!does) return;
  e.preventDefault();
  does();
});
$("keys").addEventListener("click", () => $("help").showModal());

addEventListener("hashchange", arrive);
addEventListener("resize", changed);

show();
if (token.get()) follow();
else ask();
