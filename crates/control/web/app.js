// The page: where it is (the part of the address after `#`), what the keys do, and how it stays connected.

import { Refused, token, watch } from "./api.js";
import { Fleet } from "./model.js";
import * as views from "./views.js";

const $ = (id) => document.getElementById(id);
const fleet = new Fleet();
const hidden = new Set();
const tables = {
  hosts: new views.Table(views.hostColumns(fleet), 0),
  groups: new views.Table(views.groupColumns(fleet), 0),
  vrnics: new views.Table(views.vrnicColumns(fleet), 0),
  rules: new views.Table(views.ruleColumns(), 5, true),
};

// ---- What is shown ----

function where() {
  const [view, name] = location.hash.replace(/^#\/?/, "").split("/");
  return { view: view || "map", name: name === undefined ? undefined : decodeURIComponent(name) };
}

function content() {
  const { view, name } = where();
  const list = tables.vrnics;
  if (!fleet.complete) return [views.make("p", { class: "empty" }, "Waiting for the centre.")];
  if (view === "map") return views.map(fleet, hidden, show, (where) => (location.hash = `#/${where}`));
  if (view === "search") return views.found(fleet, name ?? "", list, show);
  if (view === "hosts") return name === undefined ? views.hosts(fleet, tables.hosts, show) : views.host(fleet, name, list, show);
  if (view === "groups") return name === undefined ? [views.heading("Groups", "Within a group everybody may connect, between groups whom a rule allows."), tables.groups.element([...fleet.groups.values()], "groups", show)] : views.group(fleet, name, list, show);
  if (view === "rules") return [views.heading("Rules", "The highest rule that matches decides."), tables.rules.element([...fleet.rules.values()], "rules", show)];
  return name === undefined ? [views.heading("vRNICs", `${fleet.vrnics.size} vRNICs`), list.element([...fleet.vrnics.values()], "vRNICs", show)] : views.vrnic(fleet, name);
}

// What tells an element from the others after it was made anew.
const keyOf = (e) => e?.getAttribute?.("href") ?? e?.dataset?.key ?? e?.dataset?.name;

function show() {
  const main = $("main");
  const focus = main.contains(document.activeElement) ? keyOf(document.activeElement) : undefined;
  const scrolled = [...main.querySelectorAll(".scroll, .map")].map((e) => [e.scrollLeft, e.scrollTop]);
  main.replaceChildren(...content().flat().filter(Boolean));
  [...main.querySelectorAll(".scroll, .map")].forEach((e, i) => scrolled[i] && ([e.scrollLeft, e.scrollTop] = scrolled[i]));
  if (focus !== undefined) [...main.querySelectorAll("a, button, [data-name]")].find((e) => keyOf(e) === focus)?.focus({ preventScroll: true });
  const { view, name } = where();
  document.title = `${name ?? view} - uniRDMA`;
  for (const a of document.querySelectorAll("nav a")) a.toggleAttribute("aria-current", a.dataset.view === view);
}

let due = false;
// Many messages make one drawing. Who points at the drawing keeps what is there until the next one.
function changed() {
  if (due) return;
  due = true;
  requestAnimationFrame(() => {
    due = false;
    show();
  });
}

// ---- The stream ----

let stop = new AbortController();

function say(text, on) {
  $("live").textContent = text;
  $("live").classList.toggle("on", on);
  $("live").classList.toggle("off", !on);
}

const sleep = (ms) => new Promise((then) => setTimeout(then, ms));

async function follow() {
  stop.abort();
  stop = new AbortController();
  const { signal } = stop;
  $("leave").hidden = false;
  for (let pause = 500; !signal.aborted; pause = Math.min(pause * 2, 10000)) {
    try {
      say("connecting", false);
      fleet.forget();
      await watch((message) => {
        fleet.take(message);
        pause = 500;
        if (fleet.complete) {
          say(`live, revision ${fleet.revision}`, true);
          changed();
        }
      }, signal);
      say("the centre has ended the stream", false);
    } catch (e) {
      if (signal.aborted) return;
      if (e instanceof Refused) return ask(e.message);
      say(`no answer: ${e.message}`, false);
    }
    await sleep(pause);
  }
}

function ask(why = "") {
  token.drop();
  $("leave").hidden = true;
  $("token-error").textContent = why;
  $("secret").value = "";
  if (!$("token").open) $("token").showModal();
}

$("token").addEventListener("cancel", (e) => e.preventDefault());
$("token").addEventListener("close", () => {
  token.set($("secret").value.trim());
  follow();
});
$("leave").addEventListener("click", () => {
  stop.abort();
  fleet.forget();
  say("not connected", false);
  show();
  ask();
});

// ---- Keys, search, theme ----

function theme(next) {
  const dark = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  const now = document.documentElement.dataset.theme ?? dark;
  document.documentElement.dataset.theme = next ?? (now === "dark" ? "light" : "dark");
  sessionStorage.setItem("unirdma-theme", document.documentElement.dataset.theme);
}
if (sessionStorage.getItem("unirdma-theme")) theme(sessionStorage.getItem("unirdma-theme"));
$("theme").addEventListener("click", () => theme());

$("query").addEventListener("input", () => {
  const text = $("query").value.trim();
  location.hash = text ? `#/search/${encodeURIComponent(text)}` : "#/";
});
$("search").addEventListener("submit", (e) => {
  e.preventDefault();
  $("main").querySelector("td a, li a")?.focus();
});

const VIEWS = ["#/", "#/hosts", "#/groups", "#/vrnics", "#/rules"];

function step(by) {
  const stops = [...$("main").querySelectorAll("tbody td:first-child a, li a, .vrnic")];
  const at = stops.indexOf(document.activeElement);
  stops[Math.min(Math.max(at + by, 0), stops.length - 1)]?.focus();
}

document.addEventListener("keydown", (e) => {
  if (e.ctrlKey || e.metaKey || e.altKey || $("token").open) return;
  if (e.target.matches("input")) {
    if (e.key === "Escape") e.target.blur();
    return;
  }
  const keys = {
    "/": () => $("query").focus(),
    "?": () => $("help").showModal(),
    d: () => theme(),
    j: () => step(1),
    k: () => step(-1),
    ArrowDown: () => step(1),
    ArrowUp: () => step(-1),
    Backspace: () => history.back(),
    Enter: () => (location.hash = `#/${e.target.dataset.open}`),
  };
  const view = VIEWS[Number(e.key) - 1];
  const does = view ? () => (location.hash = view) : keys[e.key];
  if (!does || (e.key === "Enter" && !e.target.dataset.open)) return;
  e.preventDefault();
  does();
});

addEventListener("hashchange", () => {
  if (where().view !== "search") $("query").value = "";
  show();
  if (document.activeElement !== $("query")) $("main").focus({ preventScroll: true });
});
addEventListener("resize", changed);

show();
if (token.get()) follow();
else ask();
