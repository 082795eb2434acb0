// API key, requests with this key, and events read through fetch (EventSource cannot send a key).

import { session } from "./storage.js";

const KEY = "jaxserve.key";
const $ = (id) => document.getElementById(id);
let asking = null;

// Error answer of the server. `param` is the field that caused it, or null.
export class Refused extends Error {
  constructor(status, body) {
    const error = body?.error ?? {};
    super(error.message ?? `The server answered with status ${status}.`);
    this.status = status;
    this.param = error.param;
  }
}

// Format a number of seconds.
export const duration = (seconds) =>
  seconds >= 1 ? `${seconds.toFixed(1)} s`
    : `${(1000 * seconds).toFixed(seconds < 0.01 ? 1 : 0)} ms`;

// Short name of a model: the last part of a path.
export const shortName = (id) => {
  const parts = id.split("/").filter(Boolean);
  return parts.length > 2 || id.startsWith("/") ? parts.at(-1) : id;
};

export const hasKey = () => session.getItem(KEY) !== null;

// Ask the user for a key, once for all waiting callers. Resolves to true if the user entered one.
export function askForKey(problem = "") {
  asking ??= new Promise((resolve) => {
    const dialog = $("ask"), input = $("secret");
    $("refused").textContent = problem;
    input.value = "";
    dialog.returnValue = "";
    dialog.querySelector("form").onsubmit = (event) => {
      const key = input.value.trim();
      if (/^[\x21-\x7e]+$/.test(key)) {
        session.setItem(KEY, key);
        dialog.returnValue = "given";
      } else {
        event.preventDefault();
        $("refused").textContent = "A key has no spaces, and is plain ASCII.";
      }
    };
    $("not-now").onclick = () => dialog.close("");
    dialog.onclose = () => {
      asking = null;
      input.value = "";
      $("key").hidden = false;
      resolve(hasKey() && dialog.returnValue !== "");
    };
    dialog.showModal();
    input.focus();
  });
  return asking;
}

// Fetch a path. Returns a successful response. Throws Refused for an error answer, and TypeError if
// the server cannot be reached.
export async function call(path, options = {}) {
  for (;;) {
    const key = session.getItem(KEY);
    const headers = { ...options.headers };
    if (key) headers.authorization = `Bearer ${key}`;
    const response = await fetch(`.${path}`, { ...options, headers });
    if (response.ok) return response;
    const body = await response.json().catch(() => null);
    if (response.status !== 401) throw new Refused(response.status, body);
    if (key && key === session.getItem(KEY)) session.removeItem(KEY);
    const other = hasKey(); // another request may have asked for the key
    if (!other && !(await askForKey(key ? "The server does not know that key." : "")))
      throw new Refused(401, { error: { message: "An API key is needed." } });
  }
}

// Yield the server-sent events of a response as { name, data }.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const blocks = (rest + value).split(/\r?\n\r?\n/);
      rest = blocks.pop();
      for (const block of blocks) {
        const event = { name: "message", data: "" };
        for (const line of block.split(/\r?\n/)) {
          if (line.startsWith("data:")) event.data += line.slice(5).replace(/^ /, "");
          if (line.startsWith("event:")) event.name = line.slice(6).trim();
        }
        if (event.data) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
