"use strict";
// The frame around the pages: navigation, keyboard, start.

const PAGES = { list: ListPage, episode: EpisodePage, group: GroupPage, tasks: TasksPage, task: TaskPage,
  tokens: TokensPage, images: ImagesPage, compare: ComparePage };
const KEYS = [
  ["/", "search"], ["j  k", "next and previous row, or episode"], ["Enter", "open the row"], ["←  →", "previous and next response"],
  ["Space", "play"], [",  .", "previous and next sampled token"], ["c", "next channel of the tokens"], ["m", "occlusion maps"], ["g", "group of the episode"],
  ["t", "its task through training"], ["u", "back to the list"], ["?", "this help"], ["Esc", "close"],
];
let help = false;

// One page for each episode, group and task; queries and channels change within a page.
const pageKey = () => [route.page, route.args.run, route.args.id, route.page === "task" ? route.args.task : ""].join("\n");

const App = {
  view() {
    const page = PAGES[route.page];
    const link = (name, text) => m("a", { href: href(name, name === "list" ? lastList : {}), "aria-current": route.page === name ? "page" : undefined }, text);
    return [
      m("nav", link("list", "Episodes"), link("tasks", "Tasks"), link("tokens", "Tokens"),
        ablations().length ? link("images", "Images") : null, link("compare", "Compare"), m("span.runs", runNames().map((name, at) => [at ? ", " : "", site.runs[name].report ? m("a", { href: site.runs[name].report, title: "report of this run" }, name) : name])),
        m("button.help", { type: "button", "aria-label": "Keys", onclick: () => { help = !help; } }, "?")),
      page ? [m(page, { key: pageKey() })] : m("main", m("p.empty", `There is no page ${route.page}.`)),
      help ? m("aside.keys", { role: "dialog", "aria-label": "Keys" }, m("strong", "Keys"), facts(KEYS)) : null,
    ];
  },
};

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const field = event.target.closest?.("input, select, textarea");
  if (event.key === "Escape") {
    if (field) field.blur();
    else if (help) help = false;
    else if (route.args.token) setArgs({ token: "" });
    m.redraw();
    return;
  }
  if (field && !(field.type === "range")) return;
  const act = keyActions()[event.key];
  if (!act) return;
  event.preventDefault();
  act();
  m.redraw();
}

function keyActions() {
  const common = {
    "?": () => { help = !help; },
    "/": () => {
      if (route.page !== "list") go("list", lastList);
      setTimeout(() => document.getElementById("search")?.focus());
    },
    u: () => go("list", lastList),
  };
  if (route.page === "list") {
    const down = () => moveCursor(1), up = () => moveCursor(-1);
    const open = () => { const row = matching()[cursor.at]; if (row !== undefined) location.hash = episodeLink(row); };
    return { ...common, j: down, ArrowDown: down, k: up, ArrowUp: up, ...(document.activeElement === document.body ? { Enter: open } : {}) };
  }
  if (route.page === "episode" && openEpisode) {
    const row = openEpisode.row, found = matching(), at = found.indexOf(row);
    const other = (step) => () => { if (at >= 0 && found[at + step] !== undefined) { cursor.at = at + step; location.hash = episodeLink(found[at + step]); } };
    return {
      ...common, j: other(1), k: other(-1), ArrowRight: () => stepFrame(1), ArrowLeft: () => stepFrame(-1),
      " ": () => play(openEpisode, player), ",": () => stepToken(-1), ".": () => stepToken(1), c: nextChannel,
      m: () => { if (openEpisode.maps) toggleMap(); }, g: () => { location.hash = groupLink(row); }, t: () => { location.hash = taskLink(row); },
    };
  }
  if (route.page === "compare") {
    const step = (change) => () => { stopPlayer(); stepPair(change); };
    return { ...common, j: () => stepTask(1), k: () => stepTask(-1), ArrowRight: step(1), ArrowLeft: step(-1), " ": playPair };
  }
  return common;
}

function nextChannel() {
  const names = Object.keys(CHANNELS).filter((name) => !CHANNELS[name].off?.(openEpisode));
  setArgs({ channel: names[(names.indexOf(channelName()) + 1) % names.length] });
}

addEventListener("hashchange", () => {
  const token = route.args.token;
  route = readRoute();
  m.redraw.sync();
  if (route.args.token && route.args.token !== token) showToken();
});
addEventListener("keydown", onKey);

loadList().then(
  () => {
    document.title = `Episodes of ${runNames().join(", ")}`;
    m.mount(document.getElementById("app"), App);
    document.documentElement.dataset.ready = "list";
  },
  (error) => { document.getElementById("app").textContent = error.message; },
);
