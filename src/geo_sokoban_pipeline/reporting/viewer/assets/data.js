"use strict";
// Data of the site. The scripts below data/ call `put`; each is loaded when a page needs it.

const KEPT = 64; // scripts of episodes and images that stay in memory
const arrived = new Map(); // name → content
const asked = new Map(); // name → promise of the content
let site = null; // data/site.js: runs, tasks, columns of the list
let rows = 0; // episodes in the list
let columns = {}; // of the list, by name: NumberColumn or WordColumn

function put(name, text) {
  arrived.set(name, JSON.parse(text));
}

function load(name) {
  if (!asked.has(name)) {
    asked.set(name, new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = `data/${name}.js`;
      script.onload = () => {
        script.remove();
        const content = arrived.get(name);
        arrived.delete(name);
        if (content === undefined) reject(new Error(`data/${name}.js is damaged.`));
        else resolve(content);
      };
      script.onerror = () => reject(new Error(`data/${name}.js cannot be read.`));
      document.head.append(script);
    }));
    const spare = [...asked.keys()].find((key) => key.startsWith("episodes/") || key.startsWith("images/"));
    if (asked.size > KEPT && spare !== name) asked.delete(spare);
  }
  return asked.get(name);
}

// A column of numbers; NaN where there is none.
class NumberColumn {
  constructor(size) {
    this.kind = "number";
    this.values = new Float64Array(size).fill(NaN);
  }
  add(start, count, part) {
    if ("same" in part) this.values.fill(part.same ?? NaN, start, start + count);
    else part.values.forEach((value, at) => { this.values[start + at] = value ?? NaN; });
  }
  get(row) {
    const value = this.values[row];
    return Number.isNaN(value) ? null : value;
  }
}

// A column of texts, flags or tags: its different values, and the place of each row's among them.
class WordColumn {
  constructor(size) {
    this.kind = "word";
    this.words = [];
    this.at = new Int32Array(size);
    this.places = new Map();
  }
  place(word) {
    const key = word !== null && typeof word === "object" ? JSON.stringify(word) : word;
    let place = this.places.get(key);
    if (place === undefined) {
      place = this.words.length;
      this.places.set(key, place);
      this.words.push(word);
    }
    return place;
  }
  add(start, count, part) {
    if ("same" in part) this.at.fill(this.place(part.same), start, start + count);
    else if ("values" in part) part.values.forEach((word, at) => { this.at[start + at] = this.place(word); });
    else {
      const places = part.words.map((word) => this.place(word));
      part.at.forEach((word, at) => { this.at[start + at] = places[word]; });
    }
  }
  get(row) {
    return this.words[this.at[row]];
  }
}

async function loadList() {
  site = await load("site");
  rows = site.rows;
  for (const [name, kind] of site.columns) {
    columns[name] = kind === "number" ? new NumberColumn(rows) : new WordColumn(rows);
  }
  const names = Array.from({ length: site.chunks }, (_, number) => `list/${number}`);
  let start = 0;
  for (const part of await Promise.all(names.map(load))) {
    for (const [name, column] of Object.entries(columns)) column.add(start, part.rows, part.columns[name]);
    start += part.rows;
  }
  names.forEach((name) => asked.delete(name)); // the columns have it all
}

const cell = (name, row) => (columns[name] ? columns[name].get(row) : null);
const taskOf = (row) => site.tasks[cell("task", row)];
const runNames = () => Object.keys(site.runs);

// Row of an episode; without a run, of the first one with that id.
function findRow(run, id) {
  const column = columns.trajectory_id, place = column.places.get(id);
  if (place === undefined) return null;
  for (let row = 0; row < rows; row++) {
    if (column.at[row] === place && (!run || cell("run", row) === run)) return row;
  }
  return null;
}

// What the page of an episode shows beyond its row, with texts, tokens and images in place of their numbers; null: the
// site has no page of it.
async function loadEpisode(row) {
  const number = cell("chunk", row);
  if (number < 0) return null;
  const chunk = await load(`episodes/${number}`);
  const stored = chunk.episodes[cell("place", row)];
  const images = await Promise.all([...stored.images, stored.last_image].map((place) => place && loadImage(place)));
  const run = site.runs[cell("run", row)];
  let position = 0;
  const turns = stored.turns.map((turn) => {
    const ids = expand(chunk.spans[turn.span]), start = position;
    position += ids.length;
    return {
      ...turn,
      text: chunk.texts[turn.text],
      info: turn.info === null ? null : chunk.texts[turn.info],
      images: turn.images.map((image) => images[image]),
      numbers: turn.images,
      keys: turn.images.map((image) => stored.images[image].join(".")),
      start,
      ids,
    };
  });
  return { ...stored, row, turns, lastImage: images.at(-1), sampling: chunk.texts[stored.sampling], pad: run.pad,
    settings: run.settings, texts: chunk.tokens, length: position, sampledAt: sampledPlaces(stored.mask) };
}

// Token ids; a negative number says how often the one before it comes once more.
function expand(span) {
  const ids = [];
  for (const one of span) {
    if (one >= 0) ids.push(one);
    else for (let left = one; left < 0; left++) ids.push(ids.at(-1));
  }
  return ids;
}

// Number of each sampled token among the sampled ones, by its position.
function sampledPlaces(mask) {
  const places = new Map();
  for (const [start, end] of mask) for (let at = start; at < end; at++) places.set(at, places.size);
  return places;
}

async function loadImage([number, place]) {
  return `data:image/png;base64,${(await load(`images/${number}`))[place]}`;
}

function tokenText(episode, id) {
  return episode.texts[id] ?? String(id);
}
