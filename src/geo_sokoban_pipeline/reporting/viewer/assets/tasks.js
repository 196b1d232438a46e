"use strict";
// Tasks: all levels or problems with the iteration that first solved them, and the page of one through training.

const TASK_SORTS = ["first", "solved", "episodes", "difficulty", "last"];
const SHOWN_TASKS = 500;

// Tasks of the episodes that fulfil a query, with counts; `first` is the policy version that first solved one.
let summed = { key: null, tasks: [] };
function sumTasks(query) {
  if (summed.key === query) return summed.tasks;
  const found = new Map();
  for (const row of selectRows(query, "")) {
    const key = `${cell("task", row)}\n${cell("task_id", row)}`;
    if (!found.has(key)) found.set(key, { row, episodes: 0, solved: 0, first: null, last: null });
    const task = found.get(key), version = cell("policy_version", row);
    task.episodes++;
    if (cell("success", row)) {
      task.solved++;
      task.first = task.first === null ? version : Math.min(task.first, version);
      task.last = task.last === null ? version : Math.max(task.last, version);
    }
  }
  summed = { key: query, tasks: [...found.values()] };
  return summed.tasks;
}

// Tasks in an order, unsolved ones last; `after`: only those first solved by this version or later.
function chooseTasks({ q = "", sort = "first", after = "" }) {
  const name = sort.replace(/^-/, ""), direction = sort.startsWith("-") ? -1 : 1;
  const key = { first: (one) => one.first, last: (one) => one.last, episodes: (one) => one.episodes,
    solved: (one) => one.solved / one.episodes, difficulty: (one) => cell("difficulty", one.row) }[name] ?? ((one) => one.first);
  const kept = sumTasks(q).filter((one) => after === "" || (one.first !== null && one.first >= Number(after)));
  return [...kept].sort((a, b) => {
    const x = key(a), y = key(b);
    if (x === null || y === null) return (x === null) - (y === null);
    return (typeof x === "number" ? x - y : compareWords(x, y)) * direction || a.row - b.row;
  });
}

const TasksPage = {
  view() {
    const { q = "", sort = "first", after = "" } = route.args, found = chooseTasks(route.args);
    const words = taskOf(0), solved = found.filter((one) => one.first !== null).length;
    const head = (name, text, right = true) => m("th", { class: right ? "" : "wide" }, TASK_SORTS.includes(name)
      ? m("a", { href: href("tasks", { ...route.args, sort: sort === name ? `-${name}` : name }) }, text, sort.endsWith(name) ? (sort.startsWith("-") ? " ▾" : " ▴") : "") : text);
    return m("main.tasks",
      m("div.filters",
        m("label", "episodes that count", m("input", { type: "search", value: q, placeholder: "split:train", oninput: (event) => setArgs({ q: event.target.value }) })),
        m("label", "first solved by version", m("span.range", m("input", { type: "number", min: 0, value: after, placeholder: "from", oninput: (event) => setArgs({ after: event.target.value }) })))),
      m("p.summary", m("strong", count(found.length)), ` ${found.length === 1 ? words.unit : words.units}, `, m("strong", count(solved)), ` ${words.solved} at least once`),
      m("div.scroll", m("table.grid",
        m("thead", m("tr", head("id", words.unit, false), head("difficulty", words.difficulty, false), head("episodes", "episodes"), head("solved", "solved"),
          head("first", "first solved"), head("last", "last solved"))),
        m("tbody", found.slice(0, SHOWN_TASKS).map((one) => m("tr", { key: one.row },
          m("td.wide", m("a", { href: taskLink(one.row) }, m("code", short(cell("task_id", one.row), 7)))), m("td.wide.kind", kindText(cell("difficulty", one.row))),
          m("td", count(one.episodes)), m("td", percent(one.solved / one.episodes)), m("td", number(one.first)), m("td", number(one.last))))))),
      found.length > SHOWN_TASKS ? m("p.hint", `The first ${SHOWN_TASKS} are shown.`) : null,
      m("p.hint", "Versions are those of the policy: version k is the policy after k iterations of training."));
  },
};

function TaskPage() {
  const { task, id } = route.args, own = [];
  for (let row = 0; row < rows; row++) if (cell("task_id", row) === id && cell("task", row) === task) own.push(row);
  if (!own.length) return { view: () => m("main", m("p.empty", `There are no episodes of ${id} in this site.`)) };
  const withPage = own.find((row) => cell("chunk", row) >= 0);
  const prompt = withPage === undefined ? () => null : Loading(loadEpisode(withPage), promptView);
  return { oncreate: () => scrollTo(0, 0), view: () => m("main.task", taskView(own, prompt)) };
}

function promptView(e) {
  const given = e.turns.slice(0, e.turns.findIndex((turn) => turn.role === "assistant"));
  return [
    m("div.said", given.flatMap((turn) => turn.images).map((image) => picture(image, { class: "seen large" })), given.map((turn) => m(LongText, { text: turn.text }))),
    e.label === null ? null : facts([["label", e.label]]),
  ];
}

function taskView(own, prompt) {
  const words = taskOf(own[0]), series = new Map();
  for (const row of own) {
    const name = `${cell("run", row)} ${cell("split", row)}`;
    if (!series.has(name)) series.set(name, []);
    series.get(name).push(row);
  }
  return [
    m("div.steps", m("a", { href: href("tasks") }, `‹ ${words.units}`)),
    m("h1", words.unit, m("span.id", cell("task_id", own[0])), cell("difficulty", own[0]) === null ? null : m("span.quiet", `${words.difficulty} ${cell("difficulty", own[0])}`)),
    prompt(),
    [...series].map(([name, found]) => seriesView(found)),
  ];
}

// The episodes of a run and split by policy version.
function seriesView(found) {
  const versions = new Map();
  for (const row of [...found].sort((a, b) => cell("policy_version", a) - cell("policy_version", b) || a - b)) {
    const version = cell("policy_version", row);
    if (!versions.has(version)) versions.set(version, []);
    versions.get(version).push(row);
  }
  const first = [...versions].find(([, own]) => own.some((row) => cell("success", row)));
  const words = taskOf(found[0]);
  return m("section",
    m("h2", runNames().length > 1 ? `${cell("run", found[0])}, ${cell("split", found[0])}` : cell("split", found[0])),
    m("p.summary", first ? ["first ", words.solved, " by policy version ", m("strong", first[0])] : `never ${words.solved}`, `, ${plural(found.length, "episode")}`),
    m("table.grid",
      m("thead", m("tr", m("th", "version"), m("th", "solved"), m("th", "reward"), m("th.wide", "answers"))),
      m("tbody", [...versions].map(([version, own]) => m("tr", { key: version },
        m("td", m("a", { href: groupLink(own[0]) }, number(version))),
        m("td", `${own.filter((row) => cell("success", row)).length} of ${own.length}`),
        m("td", number(mean(own.map((row) => cell("reward", row) ?? 0)))),
        m("td.wide.text", own.map((row) => m("a.answer", { href: cell("chunk", row) < 0 ? undefined : episodeLink(row) }, mark(row), " ", spaced(cell("answer", row))))))))));
}
