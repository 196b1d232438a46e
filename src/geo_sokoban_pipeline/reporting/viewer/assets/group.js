"use strict";
// The samples of one prompt as a tree of tokens: what they share stands once, and each branch begins with the token
// where they part.

// Rows of the group of an episode.
function groupRows(row) {
  const same = ["run", "split", "iteration", "group_index", "policy_version", "task_id"];
  const wanted = same.map((name) => cell(name, row)), found = [];
  for (let other = 0; other < rows; other++) if (same.every((name, at) => cell(name, other) === wanted[at])) found.push(other);
  return found;
}

// What each token of an episode is compared by: its id, and which image it stands for.
function tokenKeys(e) {
  return e.turns.flatMap((turn) => {
    let image = -1;
    return turn.ids.map((id, at) => {
      if (id !== e.pad) return id;
      if (turn.ids[at - 1] !== e.pad) image++;
      return `${id} ${turn.keys[image] ?? ""}`;
    });
  });
}

// A node has the tokens [from, to) that its samples share, and a child for each way on.
function buildTree(samples, from = 0) {
  const [first, ...others] = samples;
  const to = Math.min(first.keys.length, ...others.map((other) => sharedLength(first.keys, other.keys, from)));
  const ways = new Map();
  for (const sample of samples) {
    const next = sample.keys[to];
    if (!ways.has(next)) ways.set(next, []);
    ways.get(next).push(sample);
  }
  const ended = ways.get(undefined) ?? [];
  ways.delete(undefined);
  const children = [...ways.values()].map((own) => buildTree(own, to));
  return { from, to, samples, ended, children: children.sort((a, b) => worth(b) - worth(a)) };
}

const mean = (values) => values.reduce((sum, one) => sum + one, 0) / values.length;
const worth = (node) => mean(node.samples.map((sample) => sample.worth));

// Advantage of a sample; where there is none, as in evaluations, how much its reward is above the group's mean.
function addWorth(samples) {
  const rewards = samples.map(({ row }) => cell("reward", row)).filter((one) => one !== null);
  const centre = rewards.length ? mean(rewards) : 0;
  const trained = samples.some(({ row }) => cell("advantage", row) !== null);
  for (const sample of samples) sample.worth = cell("advantage", sample.row) ?? (trained ? 0 : (cell("reward", sample.row) ?? centre) - centre);
  return trained;
}

async function loadGroup(row) {
  const found = groupRows(row);
  const loaded = await Promise.all(found.map(loadEpisode));
  const samples = found.map((one, at) => ({ row: one, e: loaded[at] })).filter((one) => one.e !== null);
  for (const sample of samples) {
    prepareEpisode(sample.e);
    sample.keys = tokenKeys(sample.e);
  }
  const trained = addWorth(samples);
  return { rows: found, samples, trained, tree: samples.length ? buildTree(samples) : null,
    scale: Math.max(1e-9, ...samples.map((sample) => Math.abs(sample.worth))) };
}

function GroupPage() {
  const { run, id } = route.args, row = findRow(run, id);
  if (row === null) return { view: () => m("main", m("p.empty", `There is no episode ${id} in this site.`)) };
  const state = { row, open: new Set() };
  const show = Loading(loadGroup(row), (group) => groupView(group, state));
  return { oncreate: () => scrollTo(0, 0), view: () => m("main.group", groupHead(row), show()) };
}

function groupHead(row) {
  const task = taskOf(row);
  return [
    m("div.steps", m("a", { href: href("list", lastList) }, "‹ list")),
    m("h1", `Group ${cell("group_index", row)}`, m("span.id", `${cell("split", row)}, iteration ${cell("iteration", row)}, policy version ${cell("policy_version", row)}`)),
    m("p.lead", `${task.unit} `, m("a", { href: taskLink(row) }, m("code", short(cell("task_id", row), 12))),
      cell("difficulty", row) === null ? null : `, ${task.difficulty} ${cell("difficulty", row)}`, runNames().length > 1 ? `, ${cell("run", row)}` : null),
  ];
}

function groupView(group, state) {
  if (!group.samples.length) return m("p.empty", "This site has no pages of these episodes.");
  const missing = group.rows.length - group.samples.length;
  return [
    m("table.grid.samples",
      m("thead", m("tr", ["sample", "", "answer", "reward", "advantage", "tokens"].map((head) => m("th", { class: head === "answer" ? "wide" : "" }, head)))),
      m("tbody", group.rows.map((row) => m("tr", { key: row, class: row === state.row ? "on" : "" },
        m("td", m("a", { href: episodeLink(row) }, number(cell("sample_index", row)), cell("greedy", row) ? " greedy" : "")), m("td", mark(row)),
        m("td.wide.text", spaced(cell("answer", row))), m("td", number(cell("reward", row))),
        m("td", { class: tone(cell("advantage", row)) }, signed(cell("advantage", row))), m("td", number(cell("response_tokens", row))))))),
    missing ? m("p.hint", `${plural(missing, "sample")} have no page in this site.`) : null,
    m("h2", "Where the samples part"),
    m("p.hint", "Tokens that samples share stand once. The boxed token is the first one of a branch, with its probability. ",
      group.trained ? "Branches and their tokens are blue where the mean advantage of their samples is above 0, orange below: GRPO makes blue ones likelier."
        : "Branches and their tokens are blue where the mean reward of their samples is above that of the group, orange below."),
    m("div.tree", nodeView(group, group.tree, state, true)),
  ];
}

function nodeView(group, node, state, isRoot = false) {
  const value = worth(node), level = Math.abs(value) / group.scale, { e } = node.samples[0];
  const solved = node.samples.filter(({ row }) => cell("success", row)).length;
  return m("div.node", { class: isNothing(value, 6) ? "even" : value < 0 ? "less" : "", style: { "--level": level.toFixed(2), "--worth": level.toFixed(2) } },
    m("div.branch", m("strong", node.samples.length === group.samples.length ? `all ${node.samples.length}` : plural(node.samples.length, "sample")),
      m("span.quiet", node.samples.length > 1 ? `${solved} ${taskOf(node.samples[0].row).solved}` : null),
      m("span", { class: tone(value) }, `${group.trained ? "advantage" : "reward above the mean"} ${signed(value)}`),
      node.samples.length > 1 ? null : sampleLink(node.samples[0])),
    m("div.strip", spanView(e, node, state, isRoot)),
    node.ended.length && node.samples.length > 1 ? m("div.ended", node.ended.length === 1 ? "ends here: " : "end here, all the same: ", node.ended.map(sampleLink)) : null,
    node.children.map((child) => nodeView(group, child, state)));
}

function sampleLink({ row }) {
  return m("a.sample", { href: episodeLink(row) }, mark(row), ` sample ${cell("sample_index", row)}, reward ${number(cell("reward", row))}`);
}

const HEAD_TOKENS = 160, TAIL_TOKENS = 60;

// The tokens of a node, turn by turn; the prompt is folded, and so is the middle of what is long.
function spanView(e, node, state, isRoot) {
  const parts = [];
  e.turns.forEach((turn, at) => {
    const from = Math.max(node.from, turn.start), to = Math.min(node.to, turn.start + turn.ids.length);
    if (from >= to) return;
    const own = turn.role === "assistant";
    if (from === turn.start) {
      parts.push(m("div.begins", own ? `response ${e.frames.findIndex((frame) => frame.at === at) + 1}` : turn.role,
        turn.images.map((image) => picture(image, { class: "seen" })), own || !turn.text ? null : m("span.quiet", short(turn.text.replaceAll(/\s+/g, " "), 160))));
    }
    if (!own) return; // what was given is in the words above
    const folded = to - from > HEAD_TOKENS + TAIL_TOKENS && !state.open.has(`${e.row} ${at}`);
    const first = from === node.from && !isRoot;
    parts.push(first ? firstToken(e, turn, from) : null, folded
      ? [tokenPieces(e, turn, from - turn.start + first, from - turn.start + HEAD_TOKENS),
        m("button.fold", { type: "button", onclick: () => state.open.add(`${e.row} ${at}`) }, `${to - from - HEAD_TOKENS - TAIL_TOKENS} more tokens`),
        tokenPieces(e, turn, to - turn.start - TAIL_TOKENS, to - turn.start)]
      : tokenPieces(e, turn, from - turn.start + first, to - turn.start));
  });
  return parts;
}

// The token with which a branch begins, and how likely it was.
function firstToken(e, turn, position) {
  const k = e.sampledAt.get(position), id = turn.ids[position - turn.start];
  if (k === undefined) return tokenPieces(e, turn, position - turn.start, position - turn.start + 1);
  return m("span.tok.made.parts", { title: "here the samples part" }, tokenText(e, id) || "∅", m("small", percent(Math.exp(e.log_probs[k]))));
}
