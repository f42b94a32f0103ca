// Elements: how they are made, and how those that are there become what they are to be. What has not changed stays the same element, so
// that the focus, a selection, scrolling and movement go on.

export const SVG = "http://www.w3.org/2000/svg";

function fit(e, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    // The centre allows no style attributes; this is none.
    if (key === "style") e.style.cssText = value;
    else if (value !== undefined && value !== false) e.setAttribute(key, value === true ? "" : value);
  }
  e.append(...children.flat().filter((c) => c !== undefined && c !== null));
  return e;
}

// Text goes in as text only, so no name can be markup.
export const make = (name, attributes = {}, ...children) => fit(document.createElement(name), attributes, children);
export const element = (name, attributes = {}, ...children) => fit(document.createElementNS(SVG, name), attributes, children);

// What tells an element from its brothers.
const keyOf = (node) => node.dataset?.key;

function patch(was, is) {
  if (was.nodeType !== Node.ELEMENT_NODE) {
    if (was.data !== is.data) was.data = is.data;
    return;
  }
  for (const { name } of [...was.attributes]) if (!is.hasAttribute(name)) was.removeAttribute(name);
  for (const { name, value } of is.attributes) {
    if (was.getAttribute(name) === value) continue;
    if (name === "style") was.style.cssText = is.style.cssText;
    else was.setAttribute(name, value);
  }
  fill(was, [...is.childNodes]);
}

// Makes the children of an element these.
export function fill(parent, children) {
  const wanted = new Set(children.map(keyOf).filter((k) => k !== undefined));
  const there = new Map();
  for (const child of [...parent.childNodes]) {
    const key = keyOf(child);
    if (key === undefined) continue;
    if (wanted.has(key)) there.set(key, child);
    else child.remove();
  }
  let at = parent.firstChild;
  for (const child of children) {
    const key = keyOf(child);
    const was = key !== undefined ? there.get(key) : at && keyOf(at) === undefined ? at : undefined;
    if (was?.nodeName !== child.nodeName) {
      parent.insertBefore(child, at);
      continue;
    }
    if (was === at) at = at.nextSibling;
    else parent.insertBefore(was, at);
    patch(was, child);
  }
  while (at) [at] = [at.nextSibling, at.remove()];
}
