// Elements. All text that comes from peers enters the page here, as text and never as markup.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") element.textContent = value;
    else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

export function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

export function draw(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

// Sets text only where it changes: selections and screen readers are left in peace.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function mark(element, name, value) {
  if (element.dataset[name] !== value) element.dataset[name] = value;
}

// Keeps one child of `parent` for each row, found by its key: made once, shown in the order of the rows.
export function keep(parent, rows, key, build, update) {
  const found = new Map();
  for (const child of parent.children) found.set(child.dataset.key, child);
  let place = 0;
  for (const row of rows) {
    const name = String(key(row));
    let child = found.get(name);
    found.delete(name);
    if (child === undefined) {
      child = build(row);
      child.dataset.key = name;
    }
    if (parent.children[place] !== child) parent.insertBefore(child, parent.children[place] ?? null);
    update(child, row);
    place += 1;
  }
  for (const child of found.values()) child.remove();
}
