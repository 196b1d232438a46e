"use strict";
// Two policies on the same tasks: episodes are paired by task id, counted, tested, and played side by side.

const CLASSES = { win: "only the second", loss: "only the first", both: "both", neither: "neither" };
const SHOWN_PAIRS = 300;

// What can be compared: a run's episodes of a split by one policy version, or by all of them, version by version.
function listSides() {
  const found = new Map();
  for (let row = 0; row < rows; row++) {
    const run = cell("run", row), split = cell("split", row), version = cell("policy_version", row);
    for (const one of [version, "all"]) {
      const value = [run, split, one].join("|");
      if (!found.has(value)) found.set(value, { value, run, split, version: one, rows: [] });
      found.get(value).rows.push(row);
    }
  }
  const versions = (side) => [...found.values()].filter((one) => one.run === side.run && one.split === side.split).length;
  const order = ["evaluation", "validation"];
  return [...found.values()].filter((side) => (side.split === "train" ? side.version === "all" : side.version !== "all" || versions(side) > 2))
    .sort((a, b) => (order.indexOf(a.split) + 3) % 3 - (order.indexOf(b.split) + 3) % 3 || (a.version === "all") - (b.version === "all") || a.rows[0] - b.rows[0]);
}

// Without a choice: the last policies of the first two runs, or the first and the last one of a single run.
function chooseSides(sides, { a, b }) {
  const find = (value) => sides.find((side) => side.value === value);
  const names = runNames(), single = sides.filter((side) => side.version !== "all");
  const ofRun = (run) => (single.some((side) => side.run === run) ? single : sides).filter((side) => side.run === run);
  const same = (list) => list.filter((side) => side.split === list[0].split);
  const first = same(ofRun(names[0])), second = same(ofRun(names[1] ?? names[0]));
  const start = names.length > 1 ? first.at(-1) : first[0];
  return [find(a) ?? start, find(b) ?? second.at(-1)];
}

const nameSide = (side) => `${runNames().length > 1 ? `${shortRun(side.run)}, ` : ""}${side.split}, ${side.version === "all" ? "all versions" : `version ${side.version}`}`;

// Pairs of rows of two sides with the same task, and in comparisons of all versions the same version; by task.
function pairSides(first, second) {
  const every = [...first.rows, ...second.rows], sampled = every.some((row) => !cell("greedy", row));
  const all = first.version === "all" && second.version === "all";
  const group = (side) => {
    const found = new Map();
    for (const row of side.rows) {
      if (sampled && cell("greedy", row)) continue; // as in the tests of the reports
      const key = [cell("task", row), cell("task_id", row), all ? cell("policy_version", row) : ""].join("\n");
      if (!found.has(key)) found.set(key, []);
      found.get(key).push(row);
    }
    return found;
  };
  const left = group(first), right = group(second), tasks = new Map();
  for (const [key, own] of left) {
    const other = right.get(key) ?? [], id = key.split("\n").slice(0, 2).join("\n");
    for (let at = 0; at < Math.min(own.length, other.length); at++) {
      if (!tasks.has(id)) tasks.set(id, { row: own[at], pairs: [], win: 0, loss: 0, both: 0, neither: 0, differ: 0 });
      const task = tasks.get(id), kind = classify(own[at], other[at]);
      task[kind]++;
      const differ = cell("answer", own[at]) !== cell("answer", other[at]);
      task.pairs.push({ rows: [own[at], other[at]], kind, differ });
      task.differ += differ;
    }
  }
  return [...tasks.values()];
}

function classify(first, second) {
  const [one, other] = [first, second].map((row) => Boolean(cell("success", row))); // a failed episode is not solved
  return one ? (other ? "both" : "loss") : other ? "win" : "neither";
}

// Two-sided mid-p value of McNemar's test over clusters, as in the reports (evaluation/metrics.py): the chances of all
// sums of the clusters' net gains, if each is as likely with the other sign.
function mcnemar(gains) {
  const sizes = gains.map(Math.abs).filter(Boolean), total = Math.abs(gains.reduce((sum, gain) => sum + gain, 0));
  if (!total) return 1;
  let chances = Float64Array.of(1), most = 0; // of the sums −most, −most + 2, …
  for (const size of sizes) {
    const longer = new Float64Array(most + size + 1);
    for (let at = 0; at <= most; at++) {
      longer[at] += chances[at] / 2;
      longer[at + size] += chances[at] / 2;
    }
    most += size;
    chances = longer;
  }
  const at = (most + total) / 2;
  return Math.min(1, 2 * chances.subarray(at + 1).reduce((sum, chance) => sum + chance, 0) + chances[at]);
}

// Counts over pairs, and the test over clusters: tasks of one cluster (levels between the same walls, copies of a
// prompt) are one piece of evidence, and so are the pairs of a task.
function sumPairs(tasks) {
  const sums = { tasks: tasks.length, pairs: 0, win: 0, loss: 0, both: 0, neither: 0, differ: 0 };
  for (const task of tasks) {
    sums.pairs += task.pairs.length;
    sums.differ += task.differ;
    for (const kind of Object.keys(CLASSES)) sums[kind] += task[kind];
  }
  sums.single = sums.pairs === sums.tasks;
  const gains = new Map();
  for (const task of tasks) {
    const cluster = cell("cluster", task.row) ?? cell("task_id", task.row);
    gains.set(cluster, (gains.get(cluster) ?? 0) + task.win - task.loss);
  }
  return { ...sums, clusters: gains.size, p: tasks.length ? mcnemar([...gains.values()]) : null };
}

const flips = (task) => task.win + task.loss;
let compared = { key: null, tasks: [] };
function comparedTasks(first, second) {
  const key = `${first.value}\n${second.value}`;
  if (compared.key !== key) compared = { key, tasks: pairSides(first, second) };
  return compared.tasks;
}

// Tasks of the table: those of a class, or all that changed; those with the most flips first. With `answers` a flip is
// another answer, solved or not.
function shownTasks(tasks, show) {
  const size = show === "answers" ? (task) => task.differ : flips;
  const kept = tasks.filter((task) => (CLASSES[show] ? task[show] : show === "all" || size(task)));
  return kept.sort((a, b) => size(b) - size(a) || a.row - b.row);
}

const ComparePage = {
  oninit: stopPlayer,
  onremove: stopPlayer,
  view() {
    ComparePage.sides ??= listSides();
    const sides = ComparePage.sides, [first, second] = chooseSides(sides, route.args), tasks = comparedTasks(first, second);
    const choose = (name, chosen, title) => m("label", title, m("select", { value: chosen.value,
      onchange: (event) => { stopPlayer(); setArgs({ [name]: event.target.value, task: "", pair: "" }); } },
    sides.map((side) => m("option", { value: side.value }, `${nameSide(side)} (${count(side.rows.length)})`))));
    return m("main.compare",
      m("div.filters.sides", choose("a", first, "first"), choose("b", second, "second")),
      tasks.length ? comparison(first, second, tasks) : m("p.empty", "The two have no task in common."),
      settingsView(first, second));
  },
};

function comparison(first, second, tasks) {
  const sums = sumPairs(tasks), show = route.args.show ?? "", shown = shownTasks(tasks, show), words = taskOf(tasks[0].row);
  const units = plural(sums.tasks, words.unit, words.units);
  const distinct = sums.clusters === sums.tasks ? "" : words.cluster ? ` of ${plural(sums.clusters, ...words.cluster)}` : `, ${count(sums.clusters)} distinct`;
  const rate = (kind) => (sums.both + sums[kind]) / sums.pairs;
  const choices = [["", "changed", sums.win + sums.loss], ["win", CLASSES.win, sums.win], ["loss", CLASSES.loss, sums.loss],
    ["both", CLASSES.both, sums.both], ["neither", CLASSES.neither, sums.neither], ["answers", "other answer", sums.differ], ["all", "all", sums.pairs]];
  return [
    m("p.verdict", `${words.solved[0].toUpperCase()}${words.solved.slice(1)}: `, m("strong", percent(rate("loss"))), " by the first, ", m("strong", percent(rate("win"))),
      ` by the second, of ${sums.single ? "" : `${plural(sums.pairs, "pair")} of `}${units}${distinct}. `,
      sums.clusters === sums.pairs ? "McNemar's test" : "McNemar's test over clusters", ": p ", m("strong", writeP(sums.p)), sums.p < 0.05 ? "." : ", no significant difference."),
    buttons("Which pairs are listed", show, choices.map(([value, text, size]) => ({ value, text: `${text} ${count(size)}` })), (value) => setArgs({ show: value })),
    route.args.task ? [m(PlaySideBySide, { key: `${compared.key} ${route.args.task} ${route.args.pair}`, tasks })] : m("p.hint", `Choose a ${words.unit} to play both.`),
    m("div.scroll", m("table.grid.pairs",
      m("thead", m("tr", m("th.wide", words.unit), m("th.wide", words.difficulty), m("th.wide", "first"), m("th.wide", "second"), sums.single ? null : [m("th", { title: "solved by one alone" }, "flips"), m("th", { title: "answered otherwise" }, "answers")])),
      m("tbody", shown.slice(0, SHOWN_PAIRS).map((task) => pairRow(task, sums.single))))),
    shown.length > SHOWN_PAIRS ? m("p.hint", `The first ${SHOWN_PAIRS} of ${count(shown.length)} are shown.`) : null,
    kindsView(tasks, words),
  ];
}

const writeP = (p) => (p === null ? "–" : p < 0.001 ? "< 0.001" : `= ${fixed(p, 3)}`);

function pairRow(task, single) {
  const { row } = task, id = cell("task_id", row), kinds = Object.keys(CLASSES).filter((kind) => task[kind]);
  const changed = (pair) => (route.args.show === "answers" ? pair.differ : pair.kind === "win" || pair.kind === "loss");
  const at = Math.max(0, task.pairs.findIndex(changed)), pair = task.pairs[at];
  const shown = (one) => m("td.wide.text", mark(one), " ", spaced(cell("answer", one)));
  return m("tr", { key: row, class: id === route.args.task ? "on" : "", title: kinds.map((kind) => `${CLASSES[kind]}: ${task[kind]}`).join(", ") },
    m("td.wide", m("a", { href: href("compare", { ...route.args, task: id, pair: at || "" }) }, m("code", short(id, 7)))),
    m("td.wide.kind", kindText(cell("difficulty", row))), shown(pair.rows[0]), shown(pair.rows[1]), single ? null : [flips(task), task.differ].map((times) => m("td", `${times} of ${task.pairs.length}`)));
}

// By difficulty.
function kindsView(tasks, words) {
  const kinds = new Map();
  for (const task of tasks) {
    const kind = cell("difficulty", task.row);
    if (!kinds.has(kind)) kinds.set(kind, []);
    kinds.get(kind).push(task);
  }
  if (kinds.size < 2) return null;
  return [m("h2", `By ${words.difficulty}`), m("div.scroll", m("table.grid.kinds",
    m("thead", m("tr", m("th.wide", words.difficulty), ["pairs", "first", "second", "difference", CLASSES.win, CLASSES.loss].map((head) => m("th", head)))),
    m("tbody", [...kinds].sort(([a], [b]) => compareWords(a, b)).map(([kind, own]) => {
      const sums = sumPairs(own), gain = (sums.win - sums.loss) / sums.pairs;
      return m("tr", { key: String(kind) }, m("td.wide.kind", kindText(kind)), m("td", count(sums.pairs)), m("td", percent((sums.both + sums.loss) / sums.pairs)),
        m("td", percent((sums.both + sums.win) / sums.pairs)), m("td", { class: tone(gain) }, `${signed(gain * 100, 1)} points`), m("td", sums.win), m("td", sums.loss));
    }))))];
}

// Settings in which the two runs differ.
function settingsView(first, second) {
  if (first.run === second.run) return null;
  const [one, other] = [first, second].map((side) => site.runs[side.run].settings);
  if (!Object.keys(one).length || !Object.keys(other).length) return m("p.hint", "The settings of the runs are not known here.");
  const names = [...new Set([...Object.keys(one), ...Object.keys(other)])].sort().filter((name) => JSON.stringify(one[name]) !== JSON.stringify(other[name]));
  const write = (value) => (value === undefined ? "–" : writeValue(value));
  return [m("h2", "Settings that differ"), names.length ? m("table.grid",
    m("thead", m("tr", m("th.wide", "setting"), m("th.wide", shortRun(first.run)), m("th.wide", shortRun(second.run)))),
    m("tbody", names.map((name) => m("tr", { key: name }, [name, write(one[name]), write(other[name])].map((text) => m("td.wide.text", m("code", text)))))))
    : m("p.hint", "None.")];
}

// Both episodes of a pair, step by step.

const together = { at: 0 };
let openPair = null; // for the keyboard

function PlaySideBySide({ attrs: { tasks } }) {
  const task = tasks.find((one) => cell("task_id", one.row) === route.args.task), pair = task?.pairs[Number(route.args.pair || 0)];
  together.at = 0;
  openPair = null;
  if (!pair) return { view: () => m("p.empty", "The two do not share this task.") };
  const show = Loading(Promise.all(pair.rows.map(loadEpisode)), (found) => (found.includes(null)
    ? m("p.empty", "This site has no pages of these episodes.") : sideBySide(found.map(prepareEpisode), pair)));
  return { onremove: () => { stopPlayer(); openPair = null; }, view: () => m("section.both", show(), task.pairs.length > 1 ? pairLinks(task) : null) };
}

function pairLinks(task) {
  return m("p.hint", "Pairs: ", task.pairs.map((pair, at) => [m("a", { href: href("compare", { ...route.args, pair: at || "" }) },
    `${at + 1} (${cell("policy_version", pair.rows[0])}, ${CLASSES[pair.kind]})`), " "]));
}

function sideBySide(found, pair) {
  openPair = found;
  const last = Math.max(...found.map((e) => e.frames.length - 1)), keys = found.map(tokenKeys), parted = sharedLength(...keys);
  const step = (change) => { stopPlayer(); stepPair(change); };
  const token = (e) => {
    const turn = e.turns.find((one) => parted >= one.start && parted < one.start + one.ids.length);
    return turn ? m("code", JSON.stringify(tokenText(e, turn.ids[parted - turn.start]))) : "its end";
  };
  return [
    m("div.controls",
      m("button", { type: "button", "aria-label": "One step back", onclick: () => step(-1) }, "‹"),
      m("button", { type: "button", "aria-label": player.timer ? "Pause" : "Play", onclick: playPair }, player.timer ? "❚❚" : "▶"),
      m("button", { type: "button", "aria-label": "One step on", onclick: () => step(1) }, "›"),
      m("input", { type: "range", min: 0, max: last, value: together.at, "aria-label": "Step of both episodes", oninput: (event) => step(Number(event.target.value) - together.at) })),
    m("div.pair", found.map((e, side) => {
      const frame = e.frames[Math.min(together.at, e.frames.length - 1)];
      return m("div", m("p", mark(pair.rows[side]), " ", m("a", { href: episodeLink(pair.rows[side]) }, side ? "second" : "first"), ` reward ${number(cell("reward", pair.rows[side]))}`),
        picture(frame.image, { class: "frame" }),
        m("p.action", frame.turn ? m("code", frame.turn.action ?? taskOf(e.row).no_action) : e.end), frame.turn ? [m(LongText, { key: together.at, text: frame.turn.text })] : null);
    })),
    keys[0].length === parted && keys[1].length === parted ? m("p.hint", "Both have the same tokens.")
      : m("p.hint", `They part at token ${parted}: `, token(found[0]), " and ", token(found[1]), "."),
  ];
}

function stepPair(change) {
  if (!openPair) return;
  const last = Math.max(...openPair.map((e) => e.frames.length - 1));
  together.at = Math.max(0, Math.min(last, together.at + change));
  m.redraw();
}

function playPair() {
  if (!openPair) return;
  const last = Math.max(...openPair.map((e) => e.frames.length - 1));
  play(null, together, (at) => { together.at = Math.min(at, last); }, last);
}

// j and k go through the listed tasks.
function stepTask(change) {
  const sides = chooseSides(ComparePage.sides, route.args), shown = shownTasks(comparedTasks(...sides), route.args.show ?? "");
  const now = shown.findIndex((task) => cell("task_id", task.row) === route.args.task);
  const next = shown[Math.max(0, Math.min(shown.length - 1, now < 0 ? 0 : now + change))];
  if (next) setArgs({ task: cell("task_id", next.row), pair: "" });
}
