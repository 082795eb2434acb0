// The engine as it runs: figures, page map, requests and plots, from /dashboard/events.

import { Refused, call, duration, events, hasKey } from "/page/api.js";
import { colourOf, drawMap, drawPlot } from "/page/draw.js";

const $ = (id) => document.getElementById(id);
const SECONDS = 60, WINDOW = 1, LONGEST_WAIT = 8;
let history = []; // snapshots' counters with what was made of them, of the last SECONDS
let following = null;
let latest = null;
let watched = null;

const whole = (value) => Math.round(value).toLocaleString("en");

// Counters become rates: over the last second, or null where nothing was counted.
function remember({ at, stats, first_token, inter_token }) {
  if (history.length && at < history.at(-1).at) history = [];
  const before = history.findLast((one) => one.at <= at - WINDOW) ?? history[0];
  const mean = (name, now) => {
    const [count, sum] = before ? before[name] : now;
    return now[0] > count ? (now[1] - sum) / (now[0] - count) : null;
  };
  const tokens = stats.generation_tokens, span = before ? at - before.at : 0;
  history.push({
    at, tokens, first: first_token, between: inter_token,
    rate: span ? (tokens - before.tokens) / span : 0,
    firstMean: mean("first", first_token), betweenMean: mean("between", inter_token),
  });
  history = history.filter((one) => one.at > at - SECONDS - WINDOW);
}

function showFigures({ stats, pages }) {
  const set = (id, text) => {
    if ($(id).textContent !== text) $(id).textContent = text;
  };
  set("running", `${stats.num_running} of ${stats.num_slots}`);
  set("waiting", whole(stats.num_waiting));
  set("held", whole(pages.held));
  const hits = stats.prefix_queries ? stats.prefix_hits / stats.prefix_queries : 0;
  set("hits", `${Math.round(100 * hits)}%`);
  set("shared", whole(pages.shared));
  set("cached", whole(pages.cached));
  set("blank", whole(pages.total - pages.held - pages.cached));
  set("scale", pages.per_cell > 1 ? `one cell is ${pages.per_cell} pages` : "");
  const label = `Page map: ${pages.held} of ${pages.total} pages held, ${pages.shared} shared, ` +
    `${pages.cached} cached and free`;
  if ($("map").ariaLabel !== label) $("map").ariaLabel = label;
}

const PLOTS = [["rate", "rate", whole], ["first", "firstMean", duration], ["between", "betweenMean", duration]];

function drawAll() {
  if (!latest || document.hidden) return;
  drawMap($("map"), latest.pages.runs);
  for (const [id, field, name] of PLOTS) {
    const points = history.map((one) => [one.at, one[field]]);
    const value = points.findLast((point) => point[1] !== null)?.[1];
    $(`${id}-now`).textContent = value === undefined ? "–" : name(value);
    drawPlot($(`${id}-plot`), points, SECONDS, name);
  }
}

// A line of the table, made once and filled again and again: nothing moves as requests come and go.
function lineAt(index) {
  const table = $("rows");
  if (table.rows[index]) return table.rows[index];
  const line = table.insertRow();
  for (let i = 0; i < 5; i++) line.insertCell();
  const mark = document.createElement("i"), bar = document.createElement("div");
  bar.className = "bar";
  for (const part of ["prompt", "cached", "answer"]) {
    bar.append(document.createElement("span"));
    bar.lastChild.className = part;
  }
  line.cells[0].append(mark, document.createElement("span"));
  line.cells[2].append(bar);
  return line;
}

function fill(line, row, slot) {
  const [, request, index, prompt, cached, computed, drawn, limit] = row ?? [];
  const [name, state, progress, before, after] = line.cells;
  const put = (cell, text) => {
    if (cell.textContent !== text) cell.textContent = text;
  };
  line.className = row ? (slot < 0 ? "waits" : "runs") : "idle";
  name.firstChild.style.background = slot < 0 || !row ? "" : colourOf(slot);
  const number = request?.replace(/^request-/, "#") + (index ? `.${index}` : "");
  put(name.lastChild, row ? number : "");
  put(state, !row ? "idle" : slot < 0 ? "waits" : computed < prompt ? "prompt" : "answer");
  const [known, found, out] = progress.firstChild.children;
  progress.firstChild.style.color = slot < 0 || !row ? "" : colourOf(slot);
  known.style.setProperty("--done", row ? Math.min(computed, prompt) / prompt : 0);
  found.style.setProperty("--done", row ? cached / prompt : 0);
  out.style.setProperty("--done", row ? drawn / Math.max(limit, 1) : 0);
  put(before, row ? whole(prompt) : "");
  put(after, row ? `${whole(drawn)}/${whole(limit)}` : "");
}

function showRows({ running, waiting }) {
  const bySlot = new Map(running.map((row) => [row[0], row]));
  const slots = Math.max(4, $("rows").dataset.slots ?? 0, ...running.map((row) => row[0] + 1));
  const used = Math.min(slots, latest.stats.num_slots);
  $("rows").dataset.slots = used;
  for (let slot = 0; slot < used; slot++) fill(lineAt(slot), bySlot.get(slot), slot);
  for (const [index, row] of waiting.entries()) fill(lineAt(used + index), row, -1);
  while ($("rows").rows.length > used + waiting.length) $("rows").deleteRow(-1);
}

function show(snapshot) {
  latest = snapshot;
  remember(snapshot);
  showFigures(snapshot);
  showRows(snapshot);
  drawAll();
}

const note = (text) => ($("feed").textContent = text);

async function follow(model, signal) {
  for (let wait = 1; ; wait = Math.min(2 * wait, LONGEST_WAIT)) {
    try {
      const path = `/dashboard/events?model=${encodeURIComponent(model)}`;
      for await (const { name, data } of events(await call(path, { signal }))) {
        if (name === "error") throw new Refused(503, JSON.parse(data));
        show(JSON.parse(data));
        note("");
        wait = 1;
      }
      note("The server has closed the connection; trying again.");
    } catch (error) {
      if (signal.aborted) return;
      const gone = error instanceof TypeError;
      note(gone ? "The server cannot be reached; trying again." : error.message);
      if (error.status === 401 && !hasKey()) return;
    }
    await new Promise((resolve) => setTimeout(resolve, 1000 * wait));
    if (signal.aborted) return;
  }
}

// Watch this model from now on; nothing is asked for while the page is out of sight.
export function watch(model) {
  following?.abort();
  following = new AbortController();
  watched = model;
  if (!document.hidden) follow(model, following.signal);
}

export function start() {
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) following?.abort();
    else if (watched) watch(watched);
  });
  new ResizeObserver(drawAll).observe($("map"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
  new MutationObserver(drawAll).observe(document.documentElement, { attributes: true });
}

export function forget() {
  history = [];
  latest = null;
  $("rows").replaceChildren();
  delete $("rows").dataset.slots;
}
