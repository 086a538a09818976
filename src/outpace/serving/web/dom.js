// Elements by id, and new ones. Text is always set as text, never parsed as HTML.

export const $ = (id) => document.getElementById(id);

// A new element: `className`, attributes by name (null and false: none), then children: elements or texts.
export function make(tag, className = "", attributes = {}, ...children) {
  const found = document.createElement(tag);
  if (className) found.className = className;
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) found.setAttribute(name, value);
  }
  found.append(...children);
  return found;
}

const SVG = "http://www.w3.org/2000/svg";

// A new element of a drawing.
export function draw(tag, attributes, ...children) {
  const found = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) found.setAttribute(name, value);
  found.append(...children);
  return found;
}

const NONE = "–";

// Numbers as they are shown; a dash where there is none.
export const number = (value, digits = 0) =>
  value === null || !Number.isFinite(value)
    ? NONE
    : value.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits });

export const percent = (value) => (value === null || !Number.isFinite(value) ? NONE : `${number(100 * value)}%`);

export const seconds = (value) =>
  value === null ? NONE : value < 1 ? `${number(1000 * value)} ms` : `${number(value, value < 10 ? 2 : 1)} s`;

// `part / whole`, or null where that is undefined.
export const ratio = (part, whole) => (whole > 0 ? part / whole : null);

export const plural = (count, what) => `${number(count)} ${what}${count === 1 ? "" : "s"}`;

// Tells screen readers what has happened.
export function say(text) {
  $("said").textContent = text;
}
