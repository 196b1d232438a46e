"use strict";
// What all pages share: addresses, numbers as text, small pieces of markup. All texts go into the page as text nodes.

// Addresses: `#/episode?run=train_x/default&id=…`.
let route = readRoute();

function readRoute() {
  const [page, search] = location.hash.replace(/^#\/?/, "").split(/\?(.*)/s);
  return { page: page || "list", args: Object.fromEntries(new URLSearchParams(search ?? "")) };
}

function href(page, args = {}) {
  const given = Object.entries(args).filter(([, value]) => value !== undefined && value !== null && value !== "");
  const search = given.map(([name, value]) => `${name}=${encodeURIComponent(value).replaceAll("%2F", "/")}`).join("&");
  return `#/${page}${search ? `?${search}` : ""}`;
}

function go(page, args) {
  location.hash = href(page, args);
}

// Changes arguments of the page that is open, without a new entry in the browser's history.
function setArgs(changes) {
  route = { page: route.page, args: { ...route.args, ...changes } };
  history.replaceState(null, "", href(route.page, route.args));
  m.redraw();
}

const episodeLink = (row, more = {}) => href("episode", { run: cell("run", row), id: cell("trajectory_id", row), ...more });
const groupLink = (row) => href("group", { run: cell("run", row), id: cell("trajectory_id", row) });
const taskLink = (row) => href("task", { task: cell("task", row), id: cell("task_id", row) });

// Numbers.
const number = (value, digits = 3) => {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const text = Number.isInteger(value) ? String(value) : fixed(value, digits).replace(/0+$/, "").replace(/\.$/, "");
  return text === "-0" ? "0" : text.replace("-", "\u2212");
};
// A difference of log-probs with two digits or more, tiny ones with their power of ten.
const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";
function gapText(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value), sign = value > 0 ? "+" : value < 0 ? "\u2212" : "";
  if (size === 0 || size >= 0.1) return sign + number(size, 3);
  if (size >= 1e-4) return sign + size.toPrecision(2);
  const [digits, power] = size.toExponential(1).split("e-");
  return `${sign}${digits}·10⁻${[...power].map((one) => SUPERSCRIPTS[one]).join("")}`;
}
const nats = (value) => `${gapText(value)} nats`;
const isNothing = (value, digits) => value === null || Math.abs(value) < 0.5 * 10 ** -digits;
const signed = (value, digits = 3) => (isNothing(value, digits) ? number(value && 0) : (value > 0 ? "+" : "") + number(value, digits));
const count = (value) => value.toLocaleString("en");
// Rounded as Python's formats do, where the reports are written: a tie (41.25) goes to the even digit, not up. A binary
// number is a tie only if it is an odd multiple of 2 ** -(digits + 1); others that look like one, as 0.65, are none.
function fixed(value, digits) {
  if (Math.abs(value) * 2 ** (digits + 1) % 2 !== 1) return value.toFixed(digits);
  const whole = Math.floor(Math.abs(value) * 10 ** digits);
  return (Math.sign(value) * (whole + whole % 2) / 10 ** digits).toFixed(digits);
}
const percent = (value) => (Number.isFinite(value) ? `${fixed(value * 100, 1)} %` : "–");
const plural = (value, unit, units = `${unit}s`) => `${count(value)} ${value === 1 ? unit : units}`;
const kindText = (kind) => kind?.replaceAll("_", " ") ?? "–"; // a difficulty: a number, or the name of a family
const short = (text, length = 8) => (text !== null && text.length > length + 1 ? `${text.slice(0, length)}…` : text);
const tone = (value) => (isNothing(value, 6) ? "" : value > 0 ? "good" : "bad");
const spaced = (text) => text?.replaceAll(",", ", ") ?? "–"; // lists of actions may break into lines

// Markup.
function mark(row) {
  const solved = cell("success", row), words = taskOf(row);
  if (solved === null) return m("span.mark", { title: cell("status", row) }, "·");
  return m(`span.mark.${solved ? "good" : "bad"}`, { title: solved ? words.solved : words.unsolved }, solved ? "✓" : "✗");
}

function badge(row) {
  const solved = cell("success", row), words = taskOf(row), status = cell("status", row);
  const text = solved === null ? status : solved ? words.solved : words.unsolved;
  return m(`span.badge${solved === null ? "" : solved ? ".good" : ".bad"}`, text);
}

function tagList(row) {
  return Object.entries(cell("tags", row)).map(([tag, times]) => m("span.tag", times > 1 ? `${tag} ${times}` : tag));
}

// An image, small ones with hard edges.
function picture(source, attributes = {}) {
  const soften = (event) => event.target.classList.toggle("pixels", event.target.naturalWidth < 200);
  return source ? m("img", { alt: "", draggable: false, ...attributes, src: source, onload: soften }) : null;
}

// An image, with its occlusion map on it where `map` is given: see `mapOf`.
function mappedPicture(source, map, attributes = {}) {
  if (!map) return picture(source, attributes);
  const [width, height] = map.size;
  return m("span.mapped", { class: attributes.class, style: { aspectRatio: `${width} / ${height}` } }, picture(source, { alt: attributes.alt ?? "" }),
    map.parts.map((part) => m("i", { class: part.drop < 0 ? "less" : "", title: `${part.content ? `${part.content}: ` : ""}${nats(part.drop)}`,
      style: { left: `${(100 * part.left) / width}%`, top: `${(100 * part.top) / height}%`, width: `${(100 * part.width) / width}%`,
        height: `${(100 * part.height) / height}%`, "--level": (Math.abs(part.drop) / map.largest).toFixed(3) } })));
}

function buttons(label, chosen, choices, onchoose) {
  return m("div.choices", { role: "group", "aria-label": label }, choices.map(({ value, text, off }) =>
    m("button", { type: "button", disabled: Boolean(off), title: off || undefined, "aria-pressed": String(value === chosen),
      onclick: () => onchoose(value) }, text)));
}

function facts(pairs) {
  const known = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "");
  return m("dl.facts", known.map(([name, value]) => [m("dt", name), m("dd", value)]));
}

// Shows what a promise brings, or why it does not.
function Loading(promise, show) {
  const state = { content: undefined, error: null };
  promise.then((content) => { state.content = content; }, (error) => { state.error = error; }).finally(() => m.redraw());
  return () => {
    if (state.error) return m("p.empty", String(state.error.message));
    return state.content === undefined ? m("p.empty", "…") : show(state.content);
  };
}

// Where two sequences that are equal up to a place part.
function sharedLength(first, second, from = 0) {
  let at = from;
  while (at < first.length && at < second.length && first[at] === second[at]) at++;
  return at;
}
