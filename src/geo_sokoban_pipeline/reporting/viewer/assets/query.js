"use strict";
// The language of the search field: words, `column:value`, `column>=1`, each with a `-` before it for the opposite.

const SIGNS = /^(-?)([a-z_][a-z_.]*?)(:|>=|<=|>|<|=)(.*)$/i;
// Short names of columns, and others that people may try.
const ALIASES = { iter: "iteration", tag: "tags", id: "trajectory_id", turns: "n_turns", images: "n_images",
  group: "group_index", sample: "sample_index", version: "policy_version", solved: "success", length: "response_tokens",
  gap: "max_log_prob_gap" };

// Words of a query; quotes keep spaces together.
function splitQuery(text) {
  return (text.match(/(?:[^\s"]+|"[^"]*"?)+/g) ?? []).map((word) => word.replaceAll('"', ""));
}

function parseQuery(text) {
  return splitQuery(text).map((word) => {
    const found = SIGNS.exec(word);
    const name = found && (ALIASES[found[2]] ?? found[2]);
    if (!found || !isColumn(name)) {
      const negative = word.startsWith("-") && word.length > 1;
      return { word, negative, text: (negative ? word.slice(1) : word).toLowerCase() };
    }
    return { word, negative: found[1] === "-", name, sign: found[3], value: found[4] };
  });
}

const isColumn = (name) => name in columns || name.startsWith("tag.");

// Value of a column for sorting and comparing: `tag.<name>` is the count of a tag, 0 without it.
function valueOf(name, row) {
  if (name.startsWith("tag.")) return cell("tags", row)[name.slice(4)] ?? 0;
  return cell(name, row);
}

function writeWord(word) {
  if (word === null) return "none";
  if (word === true) return "yes";
  if (word === false) return "no";
  return typeof word === "object" ? Object.keys(word).join(" ") : String(word);
}

// A test of one row.
function compile(condition) {
  const test = condition.name === undefined ? matchText(condition.text) : matchColumn(condition);
  return condition.negative ? (row) => !test(row) : test;
}

function matchText(text) {
  // Each different word is looked at once, not each row.
  const tests = Object.values(columns).filter((column) => column.kind === "word").map((column) => {
    const hits = column.words.map((word) => word !== null && writeWord(word).toLowerCase().includes(text));
    return (row) => hits[column.at[row]];
  });
  return (row) => tests.some((test) => test(row));
}

function matchColumn({ name, sign, value }) {
  const column = columns[name], number = Number(value);
  if (column?.kind === "word") {
    const hits = column.words.map((word) => matchWord(word, sign, value.toLowerCase()));
    return (row) => hits[column.at[row]];
  }
  if ((sign === ":" || sign === "=") && value.toLowerCase() === "none") return (row) => valueOf(name, row) === null;
  const compare = { ":": (x) => x === number, "=": (x) => x === number, ">": (x) => x > number, "<": (x) => x < number,
    ">=": (x) => x >= number, "<=": (x) => x <= number }[sign];
  return (row) => {
    const found = valueOf(name, row);
    return found !== null && compare(found);
  };
}

function matchWord(word, sign, value) {
  const text = writeWord(word).toLowerCase();
  if (word !== null && typeof word === "object") return value === "none" ? text === "" : text.split(" ").includes(value);
  if (sign === ":" || sign === "=") return text === value;
  const numbers = [Number(text), Number(value)];
  const [left, right] = word !== null && numbers.every(Number.isFinite) ? numbers : [text, value];
  if (word === null) return false;
  return { ">": left > right, "<": left < right, ">=": left >= right, "<=": left <= right }[sign];
}

// Rows that fulfil a query, in an order: a column's name, with `-` before it for the largest first.
let selected = { key: null, rows: [] };
function selectRows(query, sort) {
  const key = JSON.stringify([query, sort]);
  if (selected.key === key) return selected.rows;
  const tests = parseQuery(query).map(compile);
  const found = [];
  for (let row = 0; row < rows; row++) if (tests.every((test) => test(row))) found.push(row);
  const name = (sort ?? "").replace(/^-/, "");
  if (name && isColumn(name)) sortRows(found, name, sort.startsWith("-") ? -1 : 1);
  selected = { key, rows: found };
  return found;
}

function sortRows(found, name, direction) {
  const column = columns[name];
  let key;
  if (column?.kind === "word") {
    const order = column.words.map((_, place) => place).sort((a, b) => compareWords(column.words[a], column.words[b]));
    const ranks = [];
    order.forEach((place, rank) => { ranks[place] = column.words[place] === null ? NaN : rank; });
    key = (row) => ranks[column.at[row]];
  } else key = (row) => valueOf(name, row) ?? NaN;
  const keys = new Map(found.map((row) => [row, key(row)]));
  found.sort((a, b) => {
    const x = keys.get(a), y = keys.get(b);
    if (Number.isNaN(x) || Number.isNaN(y)) return Number.isNaN(x) - Number.isNaN(y) || a - b; // nothing comes last
    return (x - y) * direction || a - b;
  });
}

function compareWords(a, b) {
  const x = writeWord(a), y = writeWord(b), numbers = [Number(x), Number(y)];
  if (numbers.every(Number.isFinite)) return numbers[0] - numbers[1];
  return x < y ? -1 : x > y ? 1 : 0;
}

// A query with a condition put in place of those on the same column; null takes them away.
function setCondition(query, name, condition) {
  const kept = parseQuery(query).filter((one) => one.name !== name).map((one) => quote(one.word));
  return [...kept, ...(condition === null ? [] : [quote(condition)])].join(" ");
}

const quote = (word) => (/\s/.test(word) ? `"${word}"` : word);

function conditionOn(query, name, sign) {
  return parseQuery(query).find((one) => one.name === name && (!sign || one.sign === sign) && !one.negative)?.value ?? "";
}
