// View of the conversation: send, stream, stop, edit, regenerate, copy, and switch conversations.

import { Refused, call, events } from "./api.js";
import * as chats from "./chats.js";
import { Clock, Message, change, copy } from "./message.js";
import * as settings from "./settings.js";
import { isKept, put as store, session } from "./storage.js";

const $ = (id) => document.getElementById(id);
const ENDINGS = { stop: "", tool_calls: "", length: "cut off" };
const OPEN = "jaxserve.open"; // id of the chat shown after a reload
let chat = chats.fresh();
let shown = []; // a Message for each message of the chat
let running = null; // { controller, done }, while an answer streams
let model = null;
let choose = () => {}; // selects a model by name

// Keep the end in view, unless the user has scrolled up.
let pinned = true, frame = 0;
function stay() {
  if (pinned) $("scroller").scrollTop = $("scroller").scrollHeight;
}
function follow() {
  frame ||= requestAnimationFrame(() => {
    frame = 0;
    stay();
  });
}

// Return a message in the form of requests. Thoughts are sent back only with calls, where models
// expect them.
function asSent({ role, content, calls, thoughts, id, name }) {
  if (role === "tool") return { role, content, name, tool_call_id: id };
  if (!calls) return { role, content };
  const tool_calls = calls.map((part) => {
    return { id: part.id, type: "function", function: { name: part.name, arguments: part.arguments } };
  });
  return { role, content: content || null, tool_calls, reasoning_content: thoughts };
}

// Return the body of the request for the next answer. Throws Refused.
function request() {
  const system = settings.system();
  const messages = chat.messages.map(asSent);
  if (system) messages.unshift({ role: "system", content: system });
  const stream_options = { include_usage: true, continuous_usage_stats: true };
  const chosen = { ...settings.tools(), ...settings.sampling() };
  return { model: model.id, messages, stream: true, ...chosen, stream_options };
}

function put(data, options) {
  const message = new Message(data, options);
  $("empty").hidden = true;
  $("messages").append(message.element);
  return message;
}

// Show the current chat. Elements are reused up to the first message that differs or that shows
// token probabilities, which only the newest answer has.
function draw() {
  const isSame = ({ data, isMarked }, index) => data === chat.messages[index] && !isMarked;
  let same = 0;
  while (same < shown.length && isSame(shown[same], same)) same += 1;
  for (const message of shown.splice(same)) message.element.remove();
  shown.push(...chat.messages.slice(same).map((data) => put(data).show()));
  $("empty").hidden = shown.length > 0;
  offerResults();
}

function keep() {
  store(session, OPEN, chat.id);
  chat.system = settings.system();
  const problem = chats.save(chat);
  if (problem) settings.complain(new Error(problem));
}

async function stream(body, signal, reply, clock) {
  const options = { method: "POST", signal, body: JSON.stringify(body) };
  options.headers = { "content-type": "application/json" };
  const response = await call("/v1/chat/completions", options);
  let reason = null;
  for await (const { data } of events(response)) {
    if (data === "[DONE]") return reason;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Refused(response.status, chunk);
    const choice = chunk.choices[0];
    if (choice) reply.grow(choice.delta, choice.logprobs?.content ?? []);
    reason = choice?.finish_reason ?? reason;
    reply.figures.textContent = clock.show(chunk.usage?.completion_tokens);
    follow();
  }
  throw new Error("The connection was closed before the end of the answer.");
}

// Request and show an answer to some messages. Returns false, without changes, if no text arrived.
async function answer(messages) {
  const before = chat.messages;
  chat.messages = messages;
  let body;
  try {
    body = request();
  } catch (error) {
    chat.messages = before;
    settings.complain(error);
    return false;
  }
  settings.complain(null);
  draw();
  keep();
  const data = { role: "assistant", model: model.id, content: "" };
  const reply = put(data, { drawn: stay, marked: settings.marksTokens() }), clock = new Clock();
  shown.push(reply);
  reply.figures.textContent = "waiting";
  reply.element.setAttribute("aria-busy", "true");
  const controller = new AbortController(), { signal } = controller;
  let finish;
  running = { controller, data, done: new Promise((resolve) => (finish = resolve)) };
  setBusy(true);
  pinned = true;
  follow();
  let ending = "", problem = null;
  try {
    const reason = await stream(body, signal, reply, clock);
    ending = ENDINGS[reason] ?? reason ?? "";
  } catch (error) {
    ending = signal.aborted ? "stopped" : "failed";
    problem = signal.aborted ? null : error;
  }
  data.figures = reply.figures.textContent = clock.show(0, ending);
  reply.end();
  reply.element.removeAttribute("aria-busy");
  running = null;
  setBusy(false);
  const isNothing = reply.isEmpty && ending && ending !== ENDINGS.length;
  if (isNothing) chat.messages = before;
  else chat.messages.push(data);
  if (isNothing) draw();
  keep();
  if (problem) settings.complain(problem);
  offerResults();
  $("status").textContent = problem ? "" : `Answer ${ending || "complete"}: ${data.content}`;
  finish();
  return !isNothing;
}

function setBusy(busy) {
  $("send").textContent = busy ? "Stop" : "Send";
  $("send").classList.toggle("busy", busy);
}

async function stop() {
  running?.controller.abort();
  await running?.done;
}

async function submit(event) {
  event.preventDefault();
  if (running) {
    stop();
    return;
  }
  const text = $("text").value.trim();
  if (!text || !model) return;
  const { id } = chat, sent = answer([...chat.messages, { role: "user", content: text }]);
  if (running) $("text").value = "";
  if (!(await sent) && chat.id === id) $("text").value ||= text; // the request failed
}

// Show input fields for the results of the last answer's calls.
function offerResults() {
  $("results")?.remove();
  const last = shown.at(-1);
  if (!last?.data.calls || running) return;
  const form = $("ask-results").content.firstChild.cloneNode(true);
  const fields = last.data.calls.map((part) => {
    const label = document.createElement("label"), input = document.createElement("textarea");
    label.append(`Result of ${part.name}`, input);
    form.lastElementChild.before(label);
    return [part, input];
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const results = fields.map(([{ id, name }, { value }]) => ({ role: "tool", id, name, content: value }));
    if (!running) answer([...chat.messages, ...results]);
  });
  last.calls.after(form);
}

const ACTS = {
  copy: (message, button) => tellCopied(message.data.content, button),
  "copy-code": (_, button) =>
    tellCopied(button.closest(".code").querySelector("code").textContent, button),
  regenerate: (message) => answer(chat.messages.slice(0, shown.indexOf(message))),
  edit: async (message) => {
    const { role } = message.data, isAnswer = role === "assistant";
    const text = await change(message, isAnswer ? "Keep" : "Send edited");
    const index = shown.indexOf(message);
    if (running || index < 0) return;
    if (text !== null) {
      const { calls, ...data } = message.data;
      const messages = [...chat.messages.slice(0, index), { ...data, content: text }];
      if (!isAnswer) {
        await answer(messages);
        return;
      }
      chat.messages = messages;
      draw();
      keep();
    }
    shown[index].element.querySelector("[data-act=edit]").focus();
  },
};

async function tellCopied(text, button) {
  try {
    await copy(text);
  } catch (error) {
    settings.complain(error);
    return;
  }
  $("status").textContent = "Copied";
  button.textContent = "Copied";
  setTimeout(() => (button.textContent = "Copy"), 1500);
}

function act({ target }) {
  const button = target.closest("[data-act]");
  if (!button) return;
  const article = button.closest("article");
  const message = shown.find((one) => one.element === article);
  if (!running || button.dataset.act === "copy-code") ACTS[button.dataset.act](message, button);
}

// Switch to another chat. A streaming answer is stopped, and its text so far is kept.
async function open(other) {
  await stop();
  settings.complain(null);
  chat = other;
  store(session, OPEN, chat.id);
  $("system").value = chat.system ?? "";
  settings.showChosen();
  choose(lastModel());
  pinned = true;
  draw();
  follow();
  $("text").focus();
}

function listChats() {
  const rows = chats.all().map((other) => {
    const row = $("kept-chat").content.firstChild.cloneNode(true);
    const [show, drop] = row.children;
    show.textContent = other.title || "(no text)";
    if (other.id === chat.id) show.setAttribute("aria-current", "true");
    drop.ariaLabel = `Delete: ${show.textContent}`;
    show.addEventListener("click", () => {
      $("chats").close();
      open(chats.load(other.id) ?? chats.fresh());
    });
    drop.addEventListener("click", () => forget([other.id]));
    return row;
  });
  $("kept").replaceChildren(...rows);
  $("no-chats").hidden = rows.length > 0;
  $("delete-all").hidden = !rows.length;
  $("delete-all").textContent = "Delete all";
}

// Delete some chats, or all.
async function forget(ids) {
  const isOpen = !ids || ids.includes(chat.id);
  if (isOpen) await stop();
  if (ids) ids.forEach(chats.remove);
  else chats.removeAll();
  if (isOpen) await open(chats.fresh(settings.system()));
  listChats();
  $("close-chats").focus();
}

function startChats() {
  $("where").textContent = isKept
    ? "They are kept in this browser, and nowhere else."
    : "This browser forbids pages to keep anything: they last until this tab is closed.";
  $("show-chats").addEventListener("click", () => {
    listChats();
    $("chats").showModal();
  });
  $("close-chats").addEventListener("click", () => $("chats").close());
  $("delete-all").addEventListener("click", ({ target }) => {
    if (target.textContent === "Delete all") target.textContent = "Really delete all";
    else forget(null);
  });
}

// Return the name of the model of the chat.
export const lastModel = () => chat.messages.findLast((message) => message.model)?.model;

// Use a model, an entry of /v1/models.
export function talkTo(card) {
  model = card;
  settings.setDefaults(card);
}

// Show the chat that this tab had open. `chooseModel` selects the page's model by name.
export function start(chooseModel) {
  choose = chooseModel;
  $("composer").addEventListener("submit", submit);
  $("messages").addEventListener("click", act);
  $("clear").addEventListener("click", () => open(chats.fresh(settings.system())));
  $("settings").addEventListener("input", settings.showChosen);
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
    if (event.key === "Escape" && running && !document.querySelector("dialog[open]")) stop();
  });
  addEventListener("pagehide", () => {
    const { content, thoughts, calls } = running?.data ?? {};
    if (content || thoughts || calls) {
      chats.save({ ...chat, messages: [...chat.messages, running.data] });
    }
  });
  startChats();
  const last = chats.load(session.getItem(OPEN));
  if (!last) return;
  chat = last;
  $("system").value = chat.system ?? "";
  settings.showChosen();
  draw();
  follow();
}
