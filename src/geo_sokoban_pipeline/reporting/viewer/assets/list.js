"use strict";
// The list of all episodes: a query, its breakdown, and the rows in sight.

const FILTERS = ["run", "split", "success", "status", "difficulty", "tags", "page"];
const BREAKDOWNS = ["iteration", "policy_version", "difficulty", "tags", "answer", "split", "run", "status",
  "label", "finish_reason", "drop_reason", "n_turns", "widest_gap_token", "page"];
const HEADS = { n_turns: "turns", response_tokens: "tokens", max_log_prob_gap: "gap", widest_gap_token: "gap token", widest_gap_position: "gap at", task_id: "task",
  policy_version: "version", success: "", group_index: "sample" };
const CELLS = [
  { name: "success", width: "1.2rem", show: mark },
  { name: "run", width: "minmax(3.6rem, .8fr)", several: true, show: (row) => shortRun(cell("run", row)) },
  { name: "split", width: "5.2rem", several: true },
  { name: "iteration", width: "4.2rem", right: true, show: (row) => number(cell("iteration", row)) },
  { name: "group_index", width: "4.6rem", right: true, show: place },
  { name: "task_id", width: "5.2rem", show: (row) => m("code", short(cell("task_id", row), 7)) },
  { name: "difficulty", width: "minmax(4rem, .8fr)", several: true },
  { name: "answer", width: "minmax(0, 2fr)", show: (row) => cell("answer", row) ?? "–" },
  { name: "reward", width: "4rem", right: true, show: (row) => number(cell("reward", row)) },
  { name: "advantage", width: "5rem", right: true, several: true,
    show: (row) => m("span", { class: tone(cell("advantage", row)) }, signed(cell("advantage", row), 2)) },
  { name: "n_turns", width: "3rem", right: true, several: true, spare: true, show: (row) => number(cell("n_turns", row)) },
  { name: "response_tokens", width: "3.6rem", right: true, spare: true, show: (row) => number(cell("response_tokens", row)) },
  { name: "tags", width: "minmax(0, 3fr)", several: true, show: tagList },
  { name: "status", width: "5.6rem", several: true },
];
const GAPS = ["max_log_prob_gap", "widest_gap"];
const cursor = { at: 0, top: 0 }; // row under the keyboard, and where the page was scrolled to

// Group of a sample, and its number there.
function place(row) {
  return `${number(cell("group_index", row))} · ${number(cell("sample_index", row))}`;
}

// The shortest name that tells a run from the others: without the words that all run ids begin with.
function shortRun(name) {
  const names = runNames(), ids = names.map((one) => one.split("/").slice(1).join("/"));
  if (new Set(names.map((one) => one.split("/")[0])).size > 1) return name;
  const shared = ids[0].match(/[^-_.]*[-_.]/g)?.reduce(
    (start, word) => (ids.every((id) => id.startsWith(start + word) && id.length > start.length + word.length) ? start + word : start), "") ?? "";
  return name.slice(name.indexOf("/") + 1 + (ids.length > 1 ? shared.length : 0));
}

// `spare` columns are left out of windows of middle width.
const isRoomy = () => matchMedia("(min-width: 1200px)").matches;
const isWide = () => matchMedia("(min-width: 760px)").matches;
const rowHeight = () => (isWide() ? 34 : 62);
const matching = () => selectRows(listArgs().q ?? "", listArgs().sort);
let lastList = {}; // arguments of the list when it was left: other pages go through its rows
const listArgs = () => (route.page === "list" ? route.args : lastList);

function varies(name) {
  const column = columns[name];
  if (!column) return false;
  if (column.kind === "word") return column.words.length > 1;
  const first = column.values[0];
  return column.values.some((value) => value !== first && !(Number.isNaN(value) && Number.isNaN(first)));
}

// Columns of the table, and the one that it is sorted by.
function shownCells() {
  shownCells.known ??= CELLS.filter((one) => one.name in columns && (!one.several || varies(one.name)));
  const found = shownCells.known.filter((one) => !one.spare || isRoomy());
  const name = (listArgs().sort ?? "").replace(/^-/, "");
  if (!name || !isColumn(name) || found.some((one) => one.name === name)) return found;
  // A gap says little without its token.
  const names = GAPS.includes(name) ? [name, "widest_gap_token", "widest_gap_position"] : [name];
  return [...found, ...names.map((one) => ({ name: one, width: "6rem", right: columns[one]?.kind !== "word", show: (row) => sortedValue(one, row) }))];
}

// The widest gap of an episode, with its sign or as a size.
function writeGap(name, row) {
  const text = gapText(cell(name, row));
  return name === "max_log_prob_gap" ? text.replace("+", "") : text;
}

function sortedValue(name, row) {
  const value = valueOf(name, row);
  if (GAPS.includes(name)) return writeGap(name, row);
  if (name === "widest_gap_token") return value === null ? "–" : m("code", JSON.stringify(value));
  return columns[name]?.kind === "word" ? writeWord(value) : number(value, 4);
}

const ListPage = {
  oncreate() {
    ListPage.watch = () => m.redraw();
    addEventListener("scroll", ListPage.watch, { passive: true });
    addEventListener("resize", ListPage.watch, { passive: true });
    scrollTo(0, cursor.top);
  },
  onremove() {
    removeEventListener("scroll", ListPage.watch);
    removeEventListener("resize", ListPage.watch);
  },
  onbeforeupdate() {
    lastList = route.args;
    return true;
  },
  view() {
    if (route.page === "list") cursor.top = scrollY;
    lastList = route.args;
    const found = matching();
    return m("main.list", searchBar(), filterBar(), summary(found), breakdown(found), table(found));
  },
};

function setQuery(query) {
  cursor.at = 0;
  setArgs({ q: query });
}

function searchBar() {
  const query = route.args.q ?? "";
  const unknown = parseQuery(query).filter((one) => one.name === undefined && SIGNS.test(one.word));
  return m("form.search", { role: "search", onsubmit: (event) => { event.preventDefault(); document.activeElement.blur(); } },
    m("input#search", { type: "search", value: query, placeholder: "search, or success:no tag:… reward>0.5",
      "aria-label": "Search the list", spellcheck: false, autocomplete: "off",
      oninput: (event) => setQuery(event.target.value) }),
    unknown.length ? m("p.hint", `No column is called ${unknown.map((one) => one.word).join(", ")}; searched as text.`) : null);
}

function filterBar() {
  const query = route.args.q ?? "";
  const choose = (name) => {
    const words = wordsOf(name);
    if (words.length < 2) return null;
    const value = conditionOn(query, name);
    return m("label", HEADS[name] || name, m("select", {
      value,
      onchange: (event) => setQuery(setCondition(query, name, event.target.value && `${name}:${event.target.value}`)),
    }, m("option", { value: "" }, "any"), words.map((word) => m("option", { value: word }, word))));
  };
  const range = (name) => [">=", "<="].map((sign) => m("input", {
    type: "number", value: conditionOn(query, name, sign), placeholder: sign === ">=" ? "from" : "to",
    "aria-label": `${name} ${sign === ">=" ? "from" : "to"}`,
    onchange: (event) => {
      const other = conditionOn(query, name, sign === ">=" ? "<=" : ">=");
      const limits = { ">=": sign === ">=" ? event.target.value : other, "<=": sign === "<=" ? event.target.value : other };
      let changed = setCondition(query, name, null);
      for (const [one, limit] of Object.entries(limits)) if (limit !== "") changed += ` ${name}${one}${limit}`;
      setQuery(changed.trim());
    },
  }));
  const numeric = ["iteration", "reward"].filter(varies).map((name) => m("label", name, m("span.range", range(name))));
  return m("div.filters", FILTERS.map(choose), numeric,
    m("label", "breakdown", m("select", { value: route.args.by ?? "", onchange: (event) => setArgs({ by: event.target.value }) },
      m("option", { value: "" }, "none"), BREAKDOWNS.filter(varies).map((name) => m("option", { value: name }, HEADS[name] || name)))),
    route.args.by ? m("label", "mean of", m("select", { value: meanName(), onchange: (event) => setArgs({ of: event.target.value }) },
      Object.keys(columns).filter((name) => columns[name].kind === "number" && !PLACES.includes(name) && varies(name)).map((name) => m("option", { value: name }, HEADS[name] || name)))) : null);
}

// Words of a column that a filter offers.
function wordsOf(name) {
  const column = columns[name];
  if (!column) return [];
  if (name === "tags") return [...new Set(column.words.flatMap(Object.keys))].sort();
  if (["success", "page"].includes(name)) return column.words.length < 2 ? [] : ["yes", "no", ...(column.words.includes(null) ? ["none"] : [])];
  return column.words.map(writeWord).sort((a, b) => Number(a) - Number(b) || (a < b ? -1 : 1)).slice(0, 200);
}

function summary(found) {
  const numbers = describe(found);
  return m("p.summary", { "aria-live": "polite" },
    m("strong", count(found.length)), found.length === rows ? " episodes" : ` of ${plural(rows, "episode")}`,
    varies("page") ? [", ", m("strong", count(found.filter((row) => cell("page", row)).length)), " with a page"] : null,
    numbers.known ? [" · solved ", m("strong", percent(numbers.solved / numbers.known))] : null,
    numbers.graded ? [" · mean reward ", m("strong", number(numbers.sum / numbers.graded))] : null);
}

function describe(found, name = "reward") {
  const sums = { rows: found.length, known: 0, solved: 0, graded: 0, sum: 0 };
  for (const row of found) {
    const solved = cell("success", row), value = cell(name, row);
    if (solved !== null) { sums.known++; sums.solved += solved; }
    if (value !== null) { sums.graded++; sums.sum += value; }
  }
  return sums;
}

const SHOWN_KINDS = 60;
const PLACES = ["chunk", "place", "group_index", "sample_index", "widest_gap_position"];
const meanName = () => (columns[route.args.of]?.kind === "number" ? route.args.of : "reward");

function breakdown(found) {
  const name = route.args.by;
  if (!name || !columns[name]) return null;
  const groups = new Map();
  for (const row of found) {
    const value = cell(name, row), keys = name === "tags" ? Object.keys(value) : [writeWord(value)];
    for (const key of keys) {
      if (!groups.has(key)) groups.set(key, []);
      groups.get(key).push(row);
    }
  }
  const numeric = columns[name].kind === "number" || name === "difficulty";
  const lines = [...groups].sort(([a, x], [b, y]) => (numeric ? compareWords(a, b) : y.length - x.length));
  const largest = Math.max(...lines.map(([, own]) => own.length));
  return m("div.breakdown", m("table",
    m("thead", m("tr", [HEADS[name] || name, "episodes", null, "solved", null, HEADS[meanName()] || meanName()].map((head) => m("th", { scope: "col", class: head ? "" : "bar" }, head)))),
    m("tbody", lines.slice(0, SHOWN_KINDS).map(([key, own]) => {
      const numbers = describe(own, meanName()), share = numbers.known ? numbers.solved / numbers.known : null;
      const condition = `${name}:${key}`;
      return m("tr", { key },
        m("th", { scope: "row" }, m("a", { href: href("list", { ...route.args, q: setCondition(route.args.q ?? "", name, condition), by: "" }) }, key)),
        m("td", count(own.length)), m("td.bar", m("i", { style: { width: `${(own.length / largest) * 100}%` } })),
        m("td", percent(share ?? NaN)), m("td.bar.solved", m("i", { style: { width: `${(share ?? 0) * 100}%` } })),
        m("td", numbers.graded ? number(numbers.sum / numbers.graded) : "–"));
    }))), lines.length > SHOWN_KINDS ? m("p.hint", `${lines.length - SHOWN_KINDS} more kinds are not shown.`) : null);
}

function table(found) {
  const height = rowHeight(), wide = isWide(), cells = shownCells();
  if (!found.length) return m("p.empty", "No episode fulfils the query.");
  const top = document.getElementById("rows")?.getBoundingClientRect().top ?? 300;
  const first = Math.max(0, Math.floor(-top / height) - 8);
  const last = Math.min(found.length, first + Math.ceil(innerHeight / height) + 24);
  const shown = found.slice(first, last);
  return m("div.table", { style: { "--cells": cells.map((one) => one.width).join(" ") } },
    wide ? m("div.head", cells.map((one) => sortLink(one))) : null,
    m("div#rows", { style: { height: `${found.length * height}px` } },
      shown.map((row, at) => line(row, first + at, height, wide, cells))));
}

function sortLink(one) {
  const sort = route.args.sort, now = sort === one.name ? "up" : sort === `-${one.name}` ? "down" : "";
  const next = now === "down" ? one.name : now === "up" ? "" : `-${one.name}`;
  return m(`a.${one.right ? "right" : "left"}`, { href: href("list", { ...route.args, sort: next }), title: `sort by ${one.name}` },
    HEADS[one.name] ?? one.name, now ? m("span.order", now === "down" ? "▾" : "▴") : null);
}

function line(row, at, height, wide, cells) {
  const page = cell("page", row);
  const attributes = {
    key: row, href: page ? episodeLink(row) : undefined, "data-at": at,
    class: `${at === cursor.at ? "on" : ""} ${page ? "" : "without"}`,
    title: page ? undefined : "This site has no page of this episode.",
    style: { transform: `translateY(${at * height}px)` },
    onclick: () => { cursor.at = at; },
  };
  if (wide) {
    return m("a.row", attributes, cells.map((one) => m(`span.${one.right ? "right" : "left"}`, one.show ? one.show(row) : writeWord(cell(one.name, row)))));
  }
  return m("a.row", attributes,
    m("span.first", mark(row), ` iteration ${number(cell("iteration", row))}, ${place(row)}`,
      m("span.right", `reward ${number(cell("reward", row))}`)),
    m("span.second", tagList(row), cell("answer", row) ?? "no answer"));
}

// j, k and the arrows move through the rows.
function moveCursor(step) {
  const found = matching();
  cursor.at = Math.max(0, Math.min(found.length - 1, cursor.at + step));
  const height = rowHeight(), box = document.getElementById("rows");
  if (box) {
    const top = box.getBoundingClientRect().top + cursor.at * height;
    if (top < 60) scrollBy(0, top - 60);
    else if (top + height > innerHeight) scrollBy(0, top + height - innerHeight + 8);
  }
  m.redraw();
}
