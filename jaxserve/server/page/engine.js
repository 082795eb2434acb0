// View of the running engine, from /dashboard/events.

import { Refused, call, duration, events, hasKey } from "./api.js";
import { colourOf, drawMap, drawPlot } from "./draw.js";

const $ = (id) => document.getElementById(id);
const SECONDS = 60, WINDOW = 1, LONGEST_WAIT = 8;
let history = []; // counters and rates of the last SECONDS
let following = null;
let watched = null;
let slotsShown = 4;

const put = (element, text) => {
  if (element.textContent !== text) element.textContent = text;
};
const whole = (value) => Math.round(value).toLocaleString("en");

// Return rates of counters over the last second, null without a count.
function remember({ at, stats, first_token, inter_token }) {
  if (history.length && at < history.at(-1).at) history = [];
  const counters = { tokens: [at, stats.generation_tokens], first_token, inter_token };
  const before = history.findLast((one) => one.at <= at - WINDOW) ?? history[0];
  const slope = (name) => {
    const [x, y] = counters[name], [x0, y0] = (before?.counters ?? counters)[name];
    return x > x0 ? (y - y0) / (x - x0) : null;
  };
  const first = slope("first_token"), between = slope("inter_token");
  history.push({ at, counters, rate: slope("tokens"), first, between });
  history = history.filter((one) => one.at > at - SECONDS - WINDOW);
}

function showFigures({ stats, pages }) {
  const hits = stats.prefix_queries ? stats.prefix_hits / stats.prefix_queries : 0;
  put($("running"), `${stats.num_running} of ${stats.num_slots}`);
  put($("waiting"), whole(stats.num_waiting));
  put($("hits"), `${Math.round(100 * hits)}%`);
  const missing = stats.num_programs_missing;
  put($("coming"), missing ? `${missing} programs to come` : "");
  for (const name of ["held", "shared", "cached"]) put($(name), whole(pages[name]));
  put($("blank"), whole(pages.total - pages.held - pages.cached));
  const scale = pages.per_cell > 1 ? [`one cell is ${pages.per_cell} pages`] : [];
  const kinds = Object.entries(stats.pages_by_kind).map(([name, n]) => `${name}: ${whole(n)} held`);
  put($("scale"), [...scale, ...kinds].join(", "));
  $("map").ariaLabel = `Page map: ${pages.held} of ${pages.total} pages held, ` +
    `${pages.shared} shared, ${pages.cached} cached and free`;
}

function drawAll({ pages }) {
  drawMap($("map"), pages.runs);
  for (const [id, name] of [["rate", whole], ["first", duration], ["between", duration]]) {
    const points = history.map((one) => [one.at, one[id]]);
    const value = points.findLast((point) => point[1] !== null)?.[1];
    put($(`${id}-now`), value === undefined ? "–" : name(value));
    drawPlot($(`${id}-plot`), points, SECONDS, name);
  }
}

// Row of the table, created once, so that rows do not move as requests come and go.
function lineAt(index) {
  if (!$("rows").rows[index]) $("rows").append($("line").content.cloneNode(true));
  return $("rows").rows[index];
}

function fill(line, row, slot) {
  const [, request, index, prompt, cached, computed, drawn, limit] = row ?? [];
  const [name, state, progress, before, after] = line.cells;
  const colour = row && slot >= 0 ? colourOf(slot) : "";
  line.className = !row ? "idle" : slot < 0 ? "waits" : "runs";
  name.firstChild.style.background = progress.firstChild.style.color = colour;
  put(name.lastChild, row ? request.replace(/^request-/, "#") + (index ? `.${index}` : "") : "");
  put(state, !row ? "idle" : slot < 0 ? "waits" : computed < prompt ? "prompt" : "answer");
  const shares = row
    ? [Math.min(computed, prompt) / prompt, cached / prompt, drawn / Math.max(limit, 1)]
    : [0, 0, 0];
  for (const [at, part] of [...progress.firstChild.children].entries()) {
    part.style.setProperty("--done", shares[at]);
  }
  put(before, row ? whole(prompt) : "");
  put(after, row ? `${whole(drawn)}/${whole(limit)}` : "");
}

function showRows({ stats, running, waiting }) {
  const bySlot = new Map(running.map((row) => [row[0], row]));
  slotsShown = Math.max(slotsShown, ...running.map((row) => row[0] + 1));
  const used = Math.min(slotsShown, stats.num_slots);
  for (let slot = 0; slot < used; slot++) fill(lineAt(slot), bySlot.get(slot), slot);
  for (const [index, row] of waiting.entries()) fill(lineAt(used + index), row, -1);
  while ($("rows").rows.length > used + waiting.length) $("rows").deleteRow(-1);
}

function show(snapshot) {
  remember(snapshot);
  showFigures(snapshot);
  showRows(snapshot);
  drawAll(snapshot);
}

async function follow(model, signal) {
  for (let wait = 1; ; wait = Math.min(2 * wait, LONGEST_WAIT)) {
    try {
      const path = `/dashboard/events?model=${encodeURIComponent(model)}`;
      for await (const { name, data } of events(await call(path, { signal }))) {
        if (name === "error") throw new Refused(503, JSON.parse(data));
        show(JSON.parse(data));
        put($("feed"), "");
        wait = 1;
      }
      put($("feed"), "The server has closed the connection; trying again.");
    } catch (error) {
      if (signal.aborted) return;
      const gone = error instanceof TypeError;
      put($("feed"), gone ? "The server cannot be reached; trying again." : error.message);
      if (error.status === 401 && !hasKey()) return;
    }
    await new Promise((resolve) => setTimeout(resolve, 1000 * wait));
    if (signal.aborted) return;
  }
}

// Show this model from now on. While the page is hidden, no events are requested.
export function watch(model) {
  following?.abort();
  following = new AbortController();
  if (model !== watched) {
    history = [];
    $("rows").replaceChildren();
    slotsShown = 4;
  }
  watched = model;
  if (!document.hidden) follow(model, following.signal);
}

export function start() {
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) following?.abort();
    else if (watched) watch(watched);
  });
}
