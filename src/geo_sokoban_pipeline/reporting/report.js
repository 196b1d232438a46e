"use strict";
// Players and pointer of the report. Texts of a run go into the page by textContent only.
(function () {
  const store = JSON.parse(document.getElementById("players").textContent);
  const players = new Map();

  function makePlayer(root) {
    const find = (selector) => root.querySelector(selector);
    const image = find("img"), slider = find("input"), play = find("[data-do=play]");
    const step = find(".step"), response = find(".response"), note = find(".note");
    let frames = [], at = 0, timer = null;

    function show(index) {
      at = Math.max(0, Math.min(index, frames.length - 1));
      const frame = frames[at], last = at === frames.length - 1;
      const source = frame.image ? store.images[frame.image] : "";
      image.hidden = !source;
      if (source && image.getAttribute("src") !== source) image.src = source;
      image.alt = last ? "The end of the episode" : "What the policy saw at step " + frame.step;
      step.textContent = last ? "End" : "Turn " + frame.step;
      response.textContent = last ? "" : frame.response;
      note.textContent = frame.note;
      slider.value = String(at);
      slider.setAttribute("aria-valuetext", step.textContent);
      if (last) stop();
    }
    function stop() {
      clearInterval(timer);
      timer = null;
      play.textContent = "\u25B6";
      play.setAttribute("aria-label", "Play");
    }
    function start() {
      stop();
      show(at === frames.length - 1 ? 0 : at);
      timer = setInterval(() => show(at + 1), 750);
      play.textContent = "\u275A\u275A";
      play.setAttribute("aria-label", "Pause");
    }
    function load(number) {
      stop();
      frames = store.episodes[number].frames;
      slider.max = String(frames.length - 1);
      show(0);
    }
    play.addEventListener("click", () => (timer === null ? start() : stop()));
    find("[data-do=back]").addEventListener("click", () => { stop(); show(at - 1); });
    find("[data-do=next]").addEventListener("click", () => { stop(); show(at + 1); });
    slider.addEventListener("input", () => { stop(); show(Number(slider.value)); });
    // Small images are drawn with hard edges, photographs and diagrams are not.
    image.addEventListener("load", () => image.classList.toggle("pixels", image.naturalWidth < 200));
    load(Number(root.dataset.episode));
    return { load, start };
  }

  function press(buttons, chosen) {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button === chosen));
  }

  for (const root of document.querySelectorAll(".player")) players.set(root, makePlayer(root));
  const filters = document.querySelectorAll("[data-show]");
  for (const card of document.querySelectorAll(".card")) {
    const takes = card.querySelectorAll("[data-take]"), player = players.get(card.querySelector(".player"));
    for (const button of takes) {
      button.addEventListener("click", () => {
        press(takes, button);
        player.load(Number(button.dataset.take));
        player.start();
        // The filter is about the policy that was shown until now.
        showCards("all");
      });
    }
  }
  function showCards(kind) {
    for (const button of filters) button.setAttribute("aria-pressed", String(button.dataset.show === kind));
    for (const card of document.querySelectorAll(".card")) {
      // A filter looks at the policy whose episode a card shows.
      const shown = card.querySelector("[data-take][aria-pressed=true]");
      card.hidden = kind !== "all" && shown.dataset.solved !== kind;
    }
  }
  for (const button of filters) button.addEventListener("click", () => showCards(button.dataset.show));
  for (const button of document.querySelectorAll("[data-play-all]")) {
    button.addEventListener("click", () => {
      for (const card of document.querySelectorAll(".card:not([hidden])")) players.get(card.querySelector(".player")).start();
    });
  }

  // Values of a chart beside the pointer: a line for the x, then colour, name and value of each series.
  const box = document.body.appendChild(document.createElement("div"));
  box.className = "tip";
  box.hidden = true;
  document.addEventListener("pointerover", (event) => {
    const strip = event.target.closest(".chart .at");
    box.hidden = !strip;
    if (!strip) return;
    const [label, ...rows] = strip.dataset.at.split("\n"), place = strip.querySelector(".cursor").getBoundingClientRect();
    box.textContent = label;
    for (const row of rows) {
      const [colour, name, value] = row.split("\t"), line = document.createElement("div"), strong = document.createElement("strong");
      line.className = "s-" + colour;
      line.textContent = name + " ";
      strong.textContent = value;
      line.append(strong);
      box.append(line);
    }
    const after = place.left < document.documentElement.clientWidth / 2;
    box.style.left = (after ? place.left + 10 : place.left - box.offsetWidth - 10) + "px";
    box.style.top = place.top + "px";
  });
})();
