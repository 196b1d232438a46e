"use strict";
// The page of one episode: every turn with image, text, action and reward, and its tokens under a chosen channel.

// Channels of the token strip. `value` is of the sampled token number k of a turn; `level` is the depth of its colour,
// from -1 to 1; `off` says why an episode does not have the channel.
const CHANNELS = {
  mask: { text: "loss mask", value: () => 1, level: () => 0.25, write: () => "sampled, trained on where the episode was" },
  probability: {
    text: "log-prob", value: (e, k) => e.log_probs[k], level: Math.exp, write: (value) => `${number(value, 4)} nats, ${percent(Math.exp(value))}`,
  },
  advantage: {
    text: "advantage", off: (e) => (e.largestAdvantage ? "" : "no advantage is stored"),
    value: (e, k, turn) => advantageOf(e, turn), level: (a, e) => a / e.largestAdvantage, write: (a) => signed(a),
  },
  value: {
    text: "value before", off: noValues, value: (e, k, turn) => turn.worth?.value, level: (v, e) => v / e.largestValue, write: (v) => number(v, 4),
  },
  measured: {
    text: "measured advantage", off: noValues, value: (e, k, turn) => turn.worth?.advantage, level: (a, e) => a / e.largestValue, write: (a) => signed(a),
  },
  gap: {
    text: "trainer − engine", off: (e) => (e.gaps ? "" : "the trainer's log-probs are not stored"),
    value: (e, k) => e.gaps[k], level: (gap, e) => gap / Math.max(e.largestGap, 1e-6), write: (gap) => nats(gap),
  },
  ratio: {
    text: "ratio new to old", off: noScores,
    value: (e, k) => e.scores.ratio[k], level: (ratio) => Math.log(ratio) / 0.5, write: (ratio) => number(ratio, 4),
  },
  clipped: {
    text: "clipped", off: (e) => noScores(e) || (e.largestAdvantage ? "" : "no advantage is stored") || (clipBounds(e) ? "" : "the run's bounds are unknown"),
    value: isClipped, level: (side) => side, write: (side) => (side ? "clipped" : "not clipped"),
  },
  reference: {
    text: "reference − engine", off: (e) => (e.ref_gaps ? "" : "there was no reference policy"),
    value: (e, k) => e.ref_gaps[k], level: (gap) => gap / 0.5, write: (gap) => nats(gap),
  },
  entropy: {
    text: "entropy", off: noScores, value: (e, k) => e.scores.entropy[k], level: (h) => h / 2, write: (h) => `${number(h, 4)} nats`,
  },
  reliance: {
    text: "use of the image", off: (e) => noScores(e) || (e.scores.image_reliance.some((one) => one !== null) ? "" : "not scored with blank images"),
    value: (e, k) => e.scores.image_reliance[k], level: (r) => r / 2, write: (r) => nats(r),
  },
};

function noScores(e) {
  const command = site.runs[cell("run", e.row)].score;
  return e.scores ? "" : `no token scores${command ? `: ${command} makes them` : ""}`;
}

function noValues(e) {
  const command = site.runs[cell("run", e.row)].fork;
  return e.valued_by ? "" : `the worth of turns is not measured${command ? `: ${command} measures it` : ""}`;
}

// The turn that loses most: of the chance to reach the goal, where that is known, else of the value. `lost` is the first
// response after which the goal is out of reach, as far as the task's solver knows.
function largestDrop(e) {
  const known = e.frames.filter((frame) => frame.turn?.worth).map(({ turn, at }) => {
    const { value, value_after, success, success_after, is_solvable, is_solvable_after } = turn.worth;
    const [before, after] = success === null || success_after === null ? [value, value_after] : [success, success_after];
    return { at, before, after, drop: before - after, isLost: is_solvable === true && is_solvable_after === false };
  });
  const worst = known.reduce((most, one) => (one.drop > (most?.drop ?? 0) ? one : most), null);
  return { worst, lost: known.find((one) => one.isLost) ?? null };
}

const responseLink = (e, at) => m("a", { href: `#turn-${at}`, onclick: (event) => { event.preventDefault(); document.getElementById(`turn-${at}`).scrollIntoView(); } },
  `response ${e.frames.findIndex((frame) => frame.at === at) + 1}`);

function dropFacts(e) {
  if (!e.valued_by) return [];
  const { worst, lost } = largestDrop(e), write = (value) => (cell("success", e.row) === null ? number(value, 2) : percent(value));
  return [
    ["worth measured by", e.valued_by],
    ["largest drop", worst && [responseLink(e, worst.at), `: ${write(worst.before)} → ${write(worst.after)}`]],
    ["out of reach after", lost && responseLink(e, lost.at)],
  ];
}

const advantageOf = (e, turn) => turn.advantage ?? cell("advantage", e.row);

// Bounds of the ratio in PPO's loss, `dual` infinite where it is off; null with another loss, or where the run's settings are not known.
function clipBounds(e) {
  const setting = (name) => Object.entries(e.settings).find(([key]) => key.endsWith(`grpo.${name}`))?.[1];
  const [low, high, dual] = ["clip_low", "clip_high", "dual_clip"].map((name) => setting(`loss_args.${name}`));
  const isUnknown = setting("loss") !== "ppo" || low === undefined || high === undefined || dual === undefined;
  return isUnknown ? null : { low: 1 - low, high: 1 + high, dual: dual ?? Infinity };
}

// +1 where a ratio above the range is cut, -1 below it, 0 where the loss has its gradient.
function isClipped(e, k, turn) {
  const { low, high, dual } = clipBounds(e), ratio = e.scores.ratio[k], advantage = advantageOf(e, turn);
  if (advantage > 0 ? ratio > high : advantage < 0 && ratio > dual) return 1;
  return advantage < 0 && ratio < low ? -1 : 0;
}

function prepareEpisode(e) {
  const given = e.turns.filter((turn) => turn.role === "assistant").map((turn) => Math.abs(advantageOf(e, turn) ?? 0));
  e.largestAdvantage = Math.max(0, ...given);
  e.largestValue = Math.max(1e-6, ...e.turns.flatMap(({ worth }) => (worth ? [worth.value, worth.value_after, worth.advantage].map(Math.abs) : [])));
  e.largestGap = Math.max(0, ...(e.gaps ?? []).map(Math.abs));
  e.frames = framesOf(e);
  return e;
}

// Moments of an episode: each response with the image that it answers, then the end.
function framesOf(e) {
  const frames = [];
  let image = null, shown = null;
  e.turns.forEach((turn, at) => {
    if (turn.role === "assistant") frames.push({ image, number: shown, turn, at });
    else if (turn.images.length) [image, shown] = [turn.images.at(-1), turn.numbers.at(-1)];
  });
  return [...frames, { image: e.lastImage ?? image, number: e.lastImage ? null : shown, turn: null, at: e.turns.length }];
}

const player = { at: 0, timer: null };
let openEpisode = null; // for the keyboard

function EpisodePage() {
  const { run, id } = route.args, row = findRow(run, id);
  if (row === null) return { view: () => m("main", m("p.empty", `There is no episode ${id} in this site.`)) };
  const show = Loading(loadEpisode(row).then((found) => found && prepareEpisode(found)), (found) => episodeView(row, found));
  stopPlayer();
  player.at = Number(route.args.turn ?? 0);
  return {
    oncreate: () => scrollTo(0, 0),
    onremove: () => { stopPlayer(); openEpisode = null; },
    view: () => m("main.episode", episodeHead(row), show()),
  };
}

function episodeHead(row) {
  const found = matching(), at = found.indexOf(row), neighbour = (step) => found[at + step];
  const step = (text, other, title) => m("a.step", { href: at >= 0 && other !== undefined ? episodeLink(other) : undefined, title }, text);
  return [
    m("div.steps", m("a", { href: href("list", lastList) }, "‹ list"),
      at < 0 ? null : m("span.quiet", `${count(at + 1)} of ${count(found.length)}`),
      step("previous", neighbour(-1), "k"), step("next", neighbour(1), "j")),
    m("h1", badge(row), m("span.id", cell("trajectory_id", row))),
  ];
}

function episodeView(row, e) {
  if (e === null) return withoutPage(row);
  openEpisode = e;
  return [
    m("p.lead", e.end, e.error ? ` ${e.error}` : ""),
    m("div.top", m("div.side", playerView(e, player)), m("div", episodeFacts(row, e))),
    channelBar(e),
    mapHint(e),
    e.turns.map((turn, at) => turnCard(e, turn, at)),
    tokenDetail(e),
    m("span", { oncreate: showToken }),
  ];
}

// Of an episode without a page the list knows everything but texts, tokens and images.
function withoutPage(row) {
  const hidden = ["page", "chunk", "place", "trajectory_id", "tags"], known = Object.keys(columns).filter((name) => !hidden.includes(name) && cell(name, row) !== null);
  const write = (name) => (columns[name].kind === "word" ? writeWord(cell(name, row)) : GAPS.includes(name) ? `${writeGap(name, row)} nats` : number(cell(name, row), 4));
  const tags = tagList(row);
  return [
    m("p.empty", "This site has no page of this episode. Parameter `pages` raises the number of pages."),
    m("div.panel", facts([...known.map((name) => [name, write(name)]), ["tags", tags.length ? tags : null]])),
  ];
}

function episodeFacts(row, e) {
  const named = (title, values) => Object.keys(values).length
    ? m("details", { open: title === "Reward" }, m("summary", title), facts(Object.entries(values).map(([name, value]) => [name, number(value, 4)]))) : null;
  const task = taskOf(row), tags = tagList(row), widest = e.widest;
  return m("div.panel.columns",
    facts([
      ["reward", m("strong", number(cell("reward", row)))],
      ["advantage", cell("advantage", row) === null ? null : m("strong", { class: tone(cell("advantage", row)) }, signed(cell("advantage", row)))],
      ["in the update", cell("trained", row) ? "yes" : `no${cell("drop_reason", row) ? `: ${cell("drop_reason", row)}` : ""}`],
      ["group", m("a", { href: groupLink(row) }, `${cell("split", row)}, iteration ${cell("iteration", row)}, group ${cell("group_index", row)}`), ],
      ["sample", number(cell("sample_index", row)) + (cell("greedy", row) ? ", greedy" : "")],
      [task.unit, m("a", { href: taskLink(row) }, m("code", short(cell("task_id", row), 12)))],
      [task.difficulty, cell("difficulty", row)],
      ["label", e.label],
      ["answer", cell("answer", row) === null ? null : spaced(cell("answer", row))],
      ["tags", tags.length ? tags : null],
      ["policy version", number(cell("policy_version", row))],
      ["tokens", `${count(cell("tokens", row))}, sampled ${count(cell("response_tokens", row))}`],
      ["mean log-prob", number(cell("mean_log_prob", row))],
      ["widest gap", widest === null ? null : m("a", { href: episodeLink(row, { channel: "gap", token: widest }) }, `${nats(e.largestGap).replace("+", "")} at token ${widest}`)],
      ["scored by", e.scores ? `${e.scores.by}${e.scores.version === null ? "" : `, version ${e.scores.version}`}` : null],
      ...dropFacts(e),
      ["finish reason", cell("finish_reason", row)],
      ["run", Object.keys(site.runs).length > 1 ? cell("run", row) : null],
    ]),
    m("div", named("Reward", e.reward_parts), named("Metrics", e.metrics), named("Seconds", e.timings),
    m("details", m("summary", "Sampling"), facts([["seed", String(e.seed)], ...Object.entries(readJson(e.sampling)).map(([name, value]) => [name, writeValue(value)]),
      ["weights", e.weights.map(([version, start, end]) => `version ${version}: tokens ${start} to ${end}`).join("; ")]]))));
}

function readJson(text) {
  try {
    const found = JSON.parse(text);
    return found !== null && typeof found === "object" ? found : { value: found };
  } catch {
    return { value: text };
  }
}
const writeValue = (value) => (typeof value === "string" ? value : JSON.stringify(value));

// The player: the images in order.

function playerView(e, state) {
  const at = Math.min(state.at, e.frames.length - 1), frame = e.frames[at], end = frame.turn === null;
  return m("div.player", mappedPicture(frame.image, mapOf(e, frame.number), { class: "frame", alt: end ? "The end of the episode" : `What the policy saw before response ${at + 1}` }),
    m("div.controls",
      m("button", { type: "button", "aria-label": "One step back", onclick: () => { stopPlayer(); showFrame(e, state, at - 1); } }, "‹"),
      m("button", { type: "button", "aria-label": player.timer ? "Pause" : "Play", onclick: () => play(e, state) }, player.timer ? "❚❚" : "▶"),
      m("button", { type: "button", "aria-label": "One step on", onclick: () => { stopPlayer(); showFrame(e, state, at + 1); } }, "›"),
      m("input", { type: "range", min: 0, max: e.frames.length - 1, value: at, "aria-label": "Step of the episode",
        oninput: (event) => { stopPlayer(); showFrame(e, state, Number(event.target.value)); } })),
    m("p.quiet", end ? "End" : `Response ${at + 1} of ${e.frames.length - 1}`),
    m("p.action", end ? e.end : [m("code", frame.turn.action ?? taskOf(e.row).no_action),
      frame.turn.reward === null ? null : m("span", { class: tone(frame.turn.credit ?? frame.turn.reward) }, ` ${signed(frame.turn.credit ?? frame.turn.reward)}`)]));
}

function showFrame(e, state, at) {
  state.at = Math.max(0, Math.min(at, e.frames.length - 1));
  if (state === player && route.page === "episode") setArgs({ turn: state.at || "" });
  m.redraw();
}

function play(e, state, onstep = (at) => showFrame(e, state, at), last = e.frames.length - 1) {
  if (player.timer) return stopPlayer();
  if (state.at >= last) onstep(0);
  player.timer = setInterval(() => {
    onstep(state.at + 1);
    if (state.at >= last) stopPlayer();
    m.redraw();
  }, 700);
  m.redraw();
}

function stopPlayer() {
  clearInterval(player.timer);
  player.timer = null;
}

// Turns.

function turnCard(e, turn, at) {
  const own = turn.role === "assistant", number_of = e.frames.findIndex((frame) => frame.at === at);
  return m(`section.turn.${own ? "own" : "given"}`, { key: at, id: `turn-${at}`, class: own && number_of === player.at ? "now" : "" },
    m("header", m("span.who", own ? `response ${number_of + 1}` : turn.role),
      own ? m("code.action", turn.action ?? taskOf(e.row).no_action) : null,
      own && turn.reward !== null ? m("span", "reward ", m("strong", { class: tone(turn.reward) }, signed(turn.reward))) : null,
      own && turn.credit !== null ? m("span", "credit ", m("strong", { class: tone(turn.credit) }, signed(turn.credit))) : null,
      own && turn.advantage !== null ? m("span", "advantage ", m("strong", { class: tone(turn.advantage) }, signed(turn.advantage))) : null,
      own && turn.worth ? m("span.worth", "value ", number(turn.worth.value, 2), " → ", number(turn.worth.value_after, 2), ", measured advantage ",
        m("strong", { class: tone(turn.worth.advantage) }, signed(turn.worth.advantage))) : null),
    m("div.said", turn.images.map((image, place) => mappedPicture(image, mapOf(e, turn.numbers[place]), { class: "seen" })), turn.text ? m(LongText, { text: turn.text }) : null),
    m(TokenStrip, { e, turn, at }),
    turn.info ? m("details", m("summary", "info of the environment"), m("pre", JSON.stringify(readJson(turn.info), null, 1))) : null);
}

// A text; long ones are cut until they are asked for.
const LongText = {
  view({ attrs: { text }, state }) {
    const limit = 1200, long = text.length > limit && !state.whole;
    return m("div.text", m("pre", long ? text.slice(0, limit) : text),
      long ? m("button", { type: "button", onclick: () => { state.whole = true; } }, `${count(text.length - limit)} more characters`) : null);
  },
};

// Tokens.

const channelName = () => (CHANNELS[route.args.channel] ? route.args.channel : "probability");

function channelBar(e) {
  const choices = Object.entries(CHANNELS).map(([value, channel]) => ({ value, text: channel.text, off: channel.off?.(e) }));
  return m("div.channels", m("strong", "Tokens"), buttons("Channel of the tokens", channelName(), choices, (channel) => setArgs({ channel })),
    e.maps ? buttons("Occlusion maps of the images", route.args.map ?? "", [{ value: "on", text: "occlusion map" }], toggleMap) : null);
}

const toggleMap = () => setArgs({ map: route.args.map ? "" : "on" });

// Occlusion map of an image: by how much each part makes what follows the image likelier, the chosen token if it is
// one of these, else all of its tokens; null: none is stored, or it is switched off.
function mapOf(e, image) {
  const stored = route.args.map && e.maps?.[image];
  if (!stored) return null;
  const k = stored.positions.indexOf(Number(route.args.token || NaN));
  const parts = stored.parts.map(([left, top, width, height, content, drops]) => (
    { left, top, width, height, content, drop: k < 0 ? drops.reduce((sum, one) => sum + one, 0) : drops[k] }));
  return { size: stored.size, token: k < 0 ? null : stored.positions[k], parts, largest: Math.max(1e-6, ...parts.map((part) => Math.abs(part.drop))) };
}

function mapHint(e) {
  if (!route.args.map || !e.maps) return null;
  const maps = Object.keys(e.maps).map((image) => mapOf(e, image)), chosen = maps.find((map) => map.token !== null);
  const parts = (chosen ? [chosen] : maps).flatMap((map) => map.parts);
  const strongest = parts.reduce((most, part) => (Math.abs(part.drop) > Math.abs(most.drop) ? part : most), parts[0]);
  return m("p.hint.map", `Blue parts of an image make ${chosen ? `token ${chosen.token}` : "the response to it"} likelier, orange ones less likely. The strongest one`,
    strongest.content ? ` (${strongest.content})` : "", `: ${nats(strongest.drop)}. `, chosen ? "" : "Choose a token to see its own map.");
}

const MOST_GIVEN = 60; // tokens of an observation that are shown at once

const TokenStrip = {
  view({ attrs: { e, turn }, state }) {
    const given = turn.ids.length > MOST_GIVEN && turn.role !== "assistant" && !state.open;
    if (given) {
      const images = turn.ids.filter((id) => id === e.pad).length;
      return m("button.fold", { type: "button", onclick: () => { state.open = true; } },
        `${count(turn.ids.length)} tokens, not sampled${images ? `, ${count(images)} of them of the image` : ""}`);
    }
    return m("div.strip", tokenPieces(e, turn, 0, turn.ids.length));
  },
};

// Tokens of a turn from one place to another; pads of an image are one piece.
function tokenPieces(e, turn, from, to) {
  const channel = CHANNELS[channelName()], off = Boolean(channel.off?.(e)), pieces = [];
  for (let at = from; at < to;) {
    const id = turn.ids[at], position = turn.start + at;
    let end = at + 1;
    if (id === e.pad) {
      while (end < to && turn.ids[end] === e.pad) end++;
      pieces.push(m("span.tok.image", { title: `${end - at} image tokens, id ${id}` }, `image ×${end - at}`));
    } else pieces.push(tokenPiece(e, turn, id, position, channel, off));
    at = end;
  }
  return pieces;
}

function tokenPiece(e, turn, id, position, channel, off) {
  const k = e.sampledAt.get(position), sampled = k !== undefined;
  const value = sampled && !off ? channel.value(e, k, turn) : null;
  const level = value === null || value === undefined ? 0 : Math.max(-1, Math.min(1, channel.level(value, e)));
  const text = tokenText(e, id);
  return m("span.tok", {
    class: `${sampled ? "made" : ""} ${level < 0 ? "less" : ""} ${String(position) === route.args.token ? "chosen" : ""}`,
    style: sampled ? { "--level": Math.abs(level).toFixed(2) } : undefined,
    title: sampled && value !== null && value !== undefined ? channel.write(value) : undefined,
    "data-token": position,
    onclick: route.page === "episode" ? () => setArgs({ token: String(position) === route.args.token ? "" : position }) : undefined,
  }, text.includes("\n") ? text.replaceAll("\n", "↵\n") : text || "∅");
}

// All that is known of the chosen token.
function tokenDetail(e) {
  if (!route.args.token) return null;
  const position = Number(route.args.token), k = e.sampledAt.get(position);
  const turn = e.turns.find((one) => position >= one.start && position < one.start + one.ids.length);
  if (!turn) return null;
  const id = turn.ids[position - turn.start];
  const values = k === undefined ? [["", "not sampled"]] : [
    ...Object.values(CHANNELS).slice(1).filter((one) => !one.off?.(e)).map((one) => {
      const value = one.value(e, k, turn);
      return [one.text, value === null || value === undefined ? null : one.write(value)];
    }),
    ["likeliest", e.scores ? e.scores.top[k].map(([text, value]) => `${JSON.stringify(text)} ${percent(Math.exp(value))}`).join("  ") : null],
  ];
  return m("aside.detail", m("button", { type: "button", "aria-label": "Close", onclick: () => setArgs({ token: "" }) }, "×"),
    m("strong", m("code", JSON.stringify(tokenText(e, id)))), ` token ${position} of ${e.length}, id ${id}`, facts(values));
}

// Brings the chosen token into sight.
function showToken() {
  document.querySelector(`[data-token="${Number(route.args.token || NaN)}"]`)?.scrollIntoView({ block: "nearest" });
}

function stepToken(step) {
  const sampled = [...openEpisode.sampledAt.keys()], now = sampled.indexOf(Number(route.args.token));
  const next = sampled[Math.max(0, Math.min(sampled.length - 1, now < 0 ? 0 : now + step))];
  if (next === undefined) return;
  setArgs({ token: next });
  m.redraw.sync();
  showToken();
}

function stepFrame(step) {
  stopPlayer();
  showFrame(openEpisode, player, player.at + step);
  m.redraw.sync();
  const frame = openEpisode.frames[player.at];
  document.getElementById(`turn-${Math.min(frame.at, openEpisode.turns.length - 1)}`)?.scrollIntoView({ block: "nearest" });
}
