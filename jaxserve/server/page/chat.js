// The conversation: send, stream, stop.

import { Answer } from "./answer.js";
import { Refused, call, duration, events } from "./api.js";

const $ = (id) => document.getElementById(id);
const WHOLE = new Set(["top_k", "max_tokens", "seed"]);
const ENDINGS = { stop: "", length: "cut off" };
const conversation = []; // { role, content }
let running = null; // an AbortController, while an answer streams
let model = null;

const fields = () => [...$("settings").querySelectorAll("input:not([type=checkbox])")];

// The sampler's fields that are filled in. Raises Refused.
function sampling() {
  const chosen = {};
  for (const { name, value } of fields()) {
    if (!value.trim()) continue;
    const number = Number(value);
    if (WHOLE.has(name) ? !Number.isSafeInteger(number) : !Number.isFinite(number)) {
      const kind = WHOLE.has(name) ? "a whole number" : "a number";
      throw new Refused(400, { error: { message: `${name} must be ${kind}`, param: name } });
    }
    chosen[name] = number;
  }
  const tick = $("probabilities");
  if (!tick.hidden && tick.querySelector("input").checked) {
    Object.assign(chosen, { logprobs: true, top_logprobs: 5 });
  }
  return chosen;
}

function showChosen() {
  const set = fields().filter((field) => field.value.trim());
  const text = set.map((field) => `${field.name} ${field.value.trim()}`).join(" · ");
  $("chosen").textContent = text || "as the model recommends";
}

function complain(error) {
  const field = error?.param && fields().find((one) => one.name === error.param);
  $("problem").textContent = error ? error.message : "";
  for (const one of fields()) one.removeAttribute("aria-invalid");
  if (!field) return;
  $("settings").open = true;
  field.setAttribute("aria-invalid", "true");
  field.focus();
}

// A message on the page: its head holds all that changes, so that nothing lies below the text.
function addMessage(role, text = "") {
  const message = $("message").content.firstChild.cloneNode(true);
  const [head, body] = message.children, [name, figures] = head.children;
  message.className = role;
  name.textContent = role === "user" ? "You" : model.id;
  body.textContent = text;
  $("empty").hidden = true;
  $("messages").append(message);
  return { message, figures, body };
}

// Keeps the end in sight, unless scrolled up.
let pinned = true, frame = 0;
function follow() {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    if (pinned) $("scroller").scrollTop = $("scroller").scrollHeight;
  });
}

// Tokens, speed and delay of an answer, shown beside its name.
class Clock {
  began = performance.now();
  tokens = 0;

  constructor(figures) {
    this.figures = figures;
    figures.textContent = "waiting";
  }

  show(tokens, ending = "") {
    if (tokens) {
      this.last = performance.now();
      this.first ??= this.last;
      this.tokens = tokens;
    }
    const parts = [`${this.tokens} token${this.tokens === 1 ? "" : "s"}`];
    const seconds = (this.last - this.first) / 1000, delay = (this.first - this.began) / 1000;
    if (ending) parts.unshift(ending);
    if (seconds > 0) parts.push(`${((this.tokens - 1) / seconds).toFixed(0)}/s`);
    if (this.first) parts.push(`first after ${duration(delay)}`);
    this.figures.textContent = parts.join(" · ");
  }
}

async function stream(body, signal, answer, clock) {
  const options = { method: "POST", signal, body: JSON.stringify(body) };
  options.headers = { "content-type": "application/json" };
  const response = await call("/v1/chat/completions", options);
  let reason = null;
  for await (const { data } of events(response)) {
    if (data === "[DONE]") return reason;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(response.status, chunk);
    const choice = chunk.choices[0];
    if (choice?.delta.content) answer.add(choice.delta.content, choice.logprobs?.content ?? []);
    reason = choice?.finish_reason ?? reason;
    clock.show(chunk.usage?.completion_tokens);
    follow();
  }
  throw new Error("The connection was closed before the end of the answer.");
}

async function answer(text) {
  let settings;
  try {
    settings = sampling();
  } catch (error) {
    complain(error);
    return;
  }
  complain(null);
  const asked = addMessage("user", text), reply = addMessage("assistant");
  conversation.push({ role: "user", content: text });
  $("text").value = "";
  running = new AbortController();
  setBusy(true);
  reply.message.setAttribute("aria-busy", "true");
  pinned = true;
  follow();
  const grown = new Answer(reply.body), clock = new Clock(reply.figures), { signal } = running;
  const options = { include_usage: true, continuous_usage_stats: true };
  const body = { model: model.id, messages: conversation, stream: true, ...settings };
  let ending = "", problem = null;
  try {
    const reason = await stream({ ...body, stream_options: options }, signal, grown, clock);
    ending = ENDINGS[reason] ?? reason ?? "";
  } catch (error) {
    ending = signal.aborted ? "stopped" : "failed";
    problem = signal.aborted ? null : error;
  }
  if (signal.reason === "cleared") return;
  grown.end();
  clock.show(0, ending);
  reply.message.removeAttribute("aria-busy");
  if (ending && !grown.text && ending !== ENDINGS.length) withdraw(text, asked, reply);
  else conversation.push({ role: "assistant", content: grown.text });
  if (!grown.text) reply.body.textContent = "(no text)";
  running = null;
  setBusy(false);
  if (problem) complain(problem);
  $("status").textContent = problem ? "" : `Answer ${ending || "complete"}: ${grown.text}`;
}

// Nothing came of a message: it goes back.
function withdraw(text, asked, reply) {
  conversation.pop();
  asked.message.remove();
  reply.message.remove();
  $("text").value ||= text;
  $("empty").hidden = conversation.length > 0;
}

function setBusy(busy) {
  $("send").textContent = busy ? "Stop" : "Send";
  $("send").classList.toggle("busy", busy);
}

function submit(event) {
  event.preventDefault();
  if (running) {
    running.abort("stopped");
    return;
  }
  const text = $("text").value.trim();
  if (text && model) answer(text);
}

function clear() {
  running?.abort("cleared");
  running = null;
  setBusy(false);
  complain(null);
  conversation.length = 0;
  for (const message of $("messages").querySelectorAll("article")) message.remove();
  $("empty").hidden = false;
  $("text").focus();
}

// Talk to this model, a card of /v1/models. What a user has typed stays.
export function talkTo(card) {
  model = card;
  for (const field of fields()) field.defaultValue = card.chat_sampling?.[field.name] ?? "";
  showChosen();
  $("probabilities").hidden = !card.capabilities?.logprobs;
}

export function start() {
  $("composer").addEventListener("submit", submit);
  $("clear").addEventListener("click", clear);
  $("settings").addEventListener("input", showChosen);
  new ResizeObserver(follow).observe($("scroller"));
  $("scroller").addEventListener("scroll", ({ target }) => {
    pinned = target.scrollTop + target.clientHeight > target.scrollHeight - 48;
  });
  $("text").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    if (!running) $("composer").requestSubmit();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && running && !$("ask").open) running.abort("stopped");
  });
}
