"use strict";
// Elements, and how numbers are written. Whatever models and clients say reaches the page as text nodes only;
// its policy forbids everything else.

const byId = (name) => document.getElementById(name);
const opened = new Set(), met = new Set(), shown = new WeakMap();

function h(tag, about, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(about || {})) {
    if (name === "on") for (const [event, then] of Object.entries(value)) made.addEventListener(event, then);
    else if (name === "css") Object.assign(made.style, value);
    else if (value !== null && value !== undefined && value !== false) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}
function s(tag, about, ...children) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(about || {})) made.setAttribute(name, value);
  made.append(...children);
  return made;
}
// Builds an element's children anew only if what they show has changed: the focus and texts that are typed stay.
function put(element, what, build) {
  const sign = JSON.stringify(what);
  if (shown.get(element) === sign) return;
  element.replaceChildren(...[build()].flat().filter(Boolean));
  shown.set(element, sign);
}
// A text that opens; ``open``: it is open when it is shown first.
function fold(key, open, summary, ...body) {
  if (open && !met.has(key)) opened.add(key);
  met.add(key);
  const made = h("details", { open: opened.has(key) ? "" : null }, h("summary", null, summary), ...body);
  made.addEventListener("toggle", () => (made.open ? opened.add(key) : opened.delete(key)));
  return made;
}
const pill = (text, kind) => h("span", { class: "pill " + (kind || "") }, text);

// -- numbers ----------------------------------------------------------------------------------

function number(value) {
  if (value >= 1e6) return (value / 1e6).toFixed(1) + " M";
  if (value >= 1e4) return Math.round(value).toLocaleString("en");
  return value >= 100 || Number.isInteger(value) ? String(Math.round(value)) : value.toPrecision(value < 1 ? 2 : 3);
}
function span(us) {
  if (us === null || Number.isNaN(us)) return "–";
  if (us === Infinity) return "> " + span(state.doc.duration_bounds_us.at(-1));
  if (us < 1000) return Math.round(us) + " µs";
  if (us < 1e6) return (us / 1e3).toPrecision(3) + " ms";
  const seconds = us / 1e6;
  if (seconds < 120) return seconds.toPrecision(3) + " s";
  if (seconds < 7200) return Math.round(seconds / 60) + " min";
  return seconds < 172800 ? Math.round(seconds / 3600) + " h" : Math.round(seconds / 86400) + " d";
}
function size(bytes) {
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (bytes < 1024 || unit === "GiB") return (unit === "B" ? bytes : bytes.toPrecision(bytes < 1000 ? 3 : 4)) + " " + unit;
    bytes /= 1024;
  }
}
const ago = (time) => { const gone = Math.max(0, state.doc.time - time); return gone < 2 ? "just now" : span(Math.floor(gone) * 1e6).replace(".0", "").replace(/(\d+)\.\d+ s/, "$1 s") + " ago"; };
const clock = (time) => new Date(time * 1000).toLocaleTimeString();
const sum = (values) => values.reduce((all, each) => all + each, 0);
// A table with a title and a help text for each column; ``numbers``: the columns that hold numbers. On narrow screens a row is a card.
function table(titles, cells, numbers = () => false) {
  const kind = (i) => (numbers(i) ? "n" : null);
  return h("div", { class: "scroll" }, h("table", null,
    h("thead", null, h("tr", null, titles.map(([title, help], i) => h("th", { scope: "col", title: help, class: kind(i) }, title)))),
    h("tbody", null, cells.map((row) => h("tr", null, row.map((cell, i) => h("td", { class: kind(i), "data-title": titles[i][0] }, cell)))))));
}
