"use strict";
// What the images are worth: solve rates of an evaluation with the images as they are, blank, and of other prompts.
// Where observations carry images, only the first one is of another prompt, which proves no use of the images.

// Tables of all runs: see `describe_ablations`.
const ablations = () => runNames().flatMap((run) => site.runs[run].ablations.map((table) => ({ run, ...table })));

const ABLATIONS = { shuffled_first: "first image from another problem" };

const rateOf = ([solved, episodes]) => (episodes ? solved / episodes : NaN);

// Lines of a table, those that lose most without the content of the images first.
function sortLosses(table) {
  const loss = ([, cells]) => rateOf(cells[0]) - rateOf(cells[1]);
  return [...table.lines].sort((a, b) => loss(b) - loss(a));
}

const ImagesPage = {
  view() {
    const found = ablations().filter((one) => (!route.args.run || one.run === route.args.run) && (!route.args.mode || one.mode === route.args.mode));
    return m("main.images",
      m("p.lead", "Share of solved prompts when the policy sees its images, and when they are blank (or those of other prompts). The kinds that lose most come first."),
      found.length ? found.map(ablationView) : m("p.empty", "No evaluation of these runs has blank or shuffled images by the kind of prompt."));
  },
};

function ablationView(table) {
  const total = table.names.map((_, at) => [0, 1].map((part) => table.lines.reduce((sum, [, cells]) => sum + cells[at][part], 0)));
  const line = (kind, cells, key) => m("tr", { key }, m("td.wide.kind", kindText(kind)), m("td", cells[0][1]), m("td", percent(rateOf(cells[0]))),
    cells.slice(1).map((cell) => [m("td", percent(rateOf(cell))),
      m("td", { class: tone(rateOf(cell) - rateOf(cells[0])) }, `${signed(100 * (rateOf(cell) - rateOf(cells[0])), 1)} points`)]));
  return m("section", m("h2", `${table.policy}, ${table.mode}, by ${table.by}`, m("span.quiet", ` ${runNames().length > 1 ? `${table.run}, ` : ""}${table.evaluated}`)),
    m("div.scroll", m("table.grid",
      m("thead", m("tr", m("th.wide", table.by), m("th", "prompts"), table.names.map((name, at) => [m("th", ABLATIONS[name] ?? name), at ? m("th", "difference") : null]))),
      m("tbody", sortLosses(table).map(([kind, cells]) => line(kind, cells, kind))), m("tfoot", line("all", total)))));
}
