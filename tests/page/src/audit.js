// Returns a list of the page's faults for people who see little, or use no mouse: those rules of WCAG 2.2, level AA,
// that a program can check.
(() => {
  const wrong = [];
  const say = (e, what) => wrong.push(`${e.tagName.toLowerCase()}${e.id ? `#${e.id}` : ""} "${e.textContent.trim().slice(0, 40)}": ${what}`);
  const seen = (e) => e.checkVisibility({ checkOpacity: true, checkVisibilityCSS: true }) && e.getClientRects().length > 0 && !e.closest(".unseen, .skip");
  const all = (selector) => [...document.querySelectorAll(selector)].filter(seen);

  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const colours = new Map();
  function rgba(text) {
    if (!colours.has(text)) {
      canvas.clearRect(0, 0, 1, 1);
      canvas.fillStyle = text;
      canvas.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
      colours.set(text, [r, g, b, a / 255]);
    }
    return colours.get(text);
  }
  const over = ([r, g, b, a], [s, h, c]) => [r * a + s * (1 - a), g * a + h * (1 - a), b * a + c * (1 - a), 1];
  function behind(e) {
    // In the drawing, the box behind a text.
    const box = e.namespaceURI.endsWith("svg") && e.closest("g, a.vrnic")?.querySelector("rect");
    if (box) return rgba(getComputedStyle(box).fill);
    if (!e) return [255, 255, 255, 1];
    const own = rgba(getComputedStyle(e).backgroundColor);
    if (own[3] === 1) return own;
    return over(own, e.parentElement ? behind(e.parentElement) : [255, 255, 255, 1]);
  }
  const part = (v) => ((v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);

  // 1.4.3: contrast between text and background.
  const texts = new Set();
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) if (walk.currentNode.data.trim()) texts.add(walk.currentNode.parentElement);
  for (const e of texts) {
    if (e.closest("title, script") || !seen(e)) continue;
    const style = getComputedStyle(e);
    const size = parseFloat(style.fontSize);
    const least = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
    const ground = behind(e);
    const is = contrast(over(rgba(e instanceof SVGElement ? style.fill : style.color), ground), ground);
    if (is < least) say(e, `contrast ${is.toFixed(2)}, which must be ${least}`);
  }
  // 1.4.11: contrast of the borders of inputs.
  for (const e of all("input")) {
    const is = contrast(rgba(getComputedStyle(e).borderTopColor), behind(e.parentElement));
    if (is < 3) say(e, `its edge has the contrast ${is.toFixed(2)}, which must be 3`);
  }
  // 4.1.2: interactive elements have a name.
  for (const e of all("a, button, input, [role=img], dialog, table")) {
    const by = e.getAttribute("aria-labelledby");
    const name = e.getAttribute("aria-label") ?? (by && document.getElementById(by)?.textContent) ?? (e.labels?.[0]?.textContent || e.textContent);
    if (!name?.trim()) say(e, "no name");
  }
  // 2.5.8: interactive elements are large enough, except links within a text or a table.
  for (const e of all("button, input, nav a, a.vrnic")) {
    const r = e.getBoundingClientRect();
    if ((r.height < 24 || r.width < 24) && !e.closest("th")) say(e, `${Math.round(r.width)} by ${Math.round(r.height)} pixels are too small`);
  }
  // 1.3.1: table headers, one heading of the first level, no skipped level.
  for (const e of all("th")) if (e.getAttribute("scope") !== "col") say(e, "no scope");
  const main = document.querySelector("main");
  if (main.querySelectorAll("h1").length > 1) say(main, "several headings of the first level");
  if (main.querySelector("h2") && !main.querySelector("h1")) say(main, "no heading of the first level");
  // 2.4.3, 3.1.1, 2.4.2, 4.1.1
  for (const e of all("[tabindex]")) if (e.tabIndex > 0) say(e, "an order of its own");
  if (!document.documentElement.lang) say(document.documentElement, "no language");
  if (!document.title) say(document.documentElement, "no title");
  const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
  for (const id of new Set(ids)) if (ids.filter((i) => i === id).length > 1) wrong.push(`the id ${id} is there twice`);
  for (const e of all("[aria-current]")) if (e.getAttribute("aria-current") !== "page") say(e, "aria-current must be page");
  for (const e of all("[aria-sort]")) if (!["ascending", "descending"].includes(e.getAttribute("aria-sort"))) say(e, "aria-sort");
  // 1.4.10: only tables and the drawing may be wider than the window.
  if (document.documentElement.scrollWidth > innerWidth) wrong.push(`the page is ${document.documentElement.scrollWidth} pixels wide, the window ${innerWidth}`);
  return wrong;
})()
