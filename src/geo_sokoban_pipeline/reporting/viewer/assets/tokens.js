"use strict";
// The sampled tokens of a run: how often each was sampled, how likely, and where trainer and engine differ most on it.

const TOKEN_COLUMNS = {
  count: { text: "times", write: count },
  log_prob: { text: "mean log-prob", write: (value) => number(value, 3) },
  gap: { text: "mean gap", title: "mean of |trainer − engine|", write: (value) => gapText(value).replace("+", "") },
  widest: { text: "widest gap", title: "trainer − engine, where they differ most" },
  entropy: { text: "entropy", title: "mean, from scores", write: (value) => number(value, 3) },
  image_reliance: { text: "use of the image", title: "mean of the log-prob minus that with blank images, from scores", write: gapText },
};
const SHOWN_TOKENS = 300;

const tokenRun = () => (runNames().includes(route.args.run) ? route.args.run : runNames()[0]);

// Places of the tokens that a reader asks for, in their order; those without a value come last.
function chooseTokens(table, { q = "", least = "", sort = "-count" }) {
  const name = sort.replace(/^-/, "") in TOKEN_COLUMNS ? sort.replace(/^-/, "") : "count", direction = sort.startsWith("-") ? -1 : 1;
  // Gaps are sorted by their width; of equal ones the first in the run comes first.
  const value = (at) => (name === "widest" ? table.widest[at] && Math.abs(table.widest[at]) : table[name][at]);
  const times = ["entropy", "image_reliance"].includes(name) ? table.scored : table.count;
  const first = (at) => (name === "widest" && table.at[at] ? table.at[at] : [0, at]);
  const kept = table.id.map((_, at) => at).filter((at) => table.text[at].includes(q) && times[at] >= Number(least));
  return kept.sort((a, b) => {
    const x = value(a), y = value(b);
    if (x === null || y === null) return (x === null) - (y === null) || a - b;
    return (x - y) * direction || first(a)[0] - first(b)[0] || first(a)[1] - first(b)[1];
  });
}

function TokensPage() {
  const show = Loading(load("tokens"), tokensView);
  return { view: () => m("main.tokens", show()) };
}

function tokensView(tables) {
  const table = tables[tokenRun()], { sort = "-count", q = "", least = "" } = route.args, found = chooseTokens(table, route.args);
  const shown = Object.entries(TOKEN_COLUMNS).filter(([name]) => table[name].some((value) => value !== null));
  const head = ([name, column]) => m("th", { title: column.title }, m("a", { href: href("tokens", { ...route.args, sort: sort === `-${name}` ? name : `-${name}` }) },
    column.text, sort.endsWith(name) && sort.length - name.length < 2 ? (sort.startsWith("-") ? " ▾" : " ▴") : ""));
  const write = (name, column, at) => (name === "widest" ? widestLink(table, at) : column.write(table[name][at]));
  return [
    m("div.filters",
      runNames().length > 1 ? m("label", "run", m("select", { value: tokenRun(), onchange: (event) => setArgs({ run: event.target.value }) },
        runNames().map((name) => m("option", { value: name }, name)))) : null,
      m("label", "token contains", m("input", { type: "search", value: q, oninput: (event) => setArgs({ q: event.target.value }) })),
      m("label", "at least", m("span.range", m("input", { type: "number", min: 1, value: least, placeholder: "times", "aria-label": "at least so many times", oninput: (event) => setArgs({ least: event.target.value }) })))),
    m("p.summary", m("strong", count(found.length)), ` of ${plural(table.id.length, "different token")}, sampled in ${plural(table.episodes, "episode")}`,
      table.thinned ? ` (of ${count(table.thinned)} more the tokens were not kept; the list has their widest gaps)` : ""),
    m("div.scroll", m("table.grid",
      m("thead", m("tr", m("th.wide", "token"), m("th", "id"), shown.map(head))),
      m("tbody", found.slice(0, SHOWN_TOKENS).map((at) => m("tr", { key: table.id[at] }, m("td.wide", m("code", JSON.stringify(table.text[at]))), m("td.quiet", table.id[at]),
        shown.map(([name, column]) => m("td", write(name, column, at)))))))),
    found.length > SHOWN_TOKENS ? m("p.hint", `The first ${SHOWN_TOKENS} are shown.`) : null,
    m("p.hint", "Log-probs, gaps, entropy and use of the image are in nats. A gap is the trainer's log-prob minus the engine's. A click on a widest gap opens its episode at that token."),
  ];
}

function widestLink(table, at) {
  if (!table.at[at]) return "–";
  const [row, position] = table.at[at];
  const page = cell("page", row);
  return m("a", { href: page ? episodeLink(row, { channel: "gap", token: position }) : href("list", { q: `run:${cell("run", row)} id:${cell("trajectory_id", row)}` }),
    title: page ? undefined : `Token ${position} of ${cell("trajectory_id", row)}, which has no page in this site.` }, gapText(table.widest[at]));
}
