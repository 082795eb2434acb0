// Settings of the user for the next message: sampling, system prompt, tools, token probabilities.

import { Refused } from "./api.js";

const $ = (id) => document.getElementById(id);
const WHOLE = new Set(["top_k", "max_tokens", "seed"]);

const fields = () => [...$("settings").querySelectorAll(".fields input:not([type=checkbox])")];
const refused = (param, message) => new Refused(400, { error: { message, param } });

// Return the sampling fields that are set. Throws Refused.
export function sampling() {
  const chosen = {};
  for (const { name, value } of fields()) {
    if (!value.trim()) continue;
    const number = Number(value);
    if (WHOLE.has(name) ? !Number.isSafeInteger(number) : !Number.isFinite(number)) {
      throw refused(name, `${name} must be ${WHOLE.has(name) ? "a whole number" : "a number"}`);
    }
    chosen[name] = number;
  }
  if (marksTokens()) Object.assign(chosen, { logprobs: true, top_logprobs: 5 });
  return chosen;
}

// Return the tools of requests, a list of functions. Throws Refused.
export function tools() {
  const text = $("tools").value.trim();
  if (!text) return {};
  let list = null;
  try {
    list = JSON.parse(text);
  } catch (error) {
    throw refused("tools", `tools must be JSON: ${error.message}`);
  }
  if (!Array.isArray(list)) throw refused("tools", "tools must be a list, [{...}, ...]");
  const isWrapped = (tool) => tool?.type === "function";
  return { tools: list.map((tool) => (isWrapped(tool) ? tool : { type: "function", function: tool })) };
}

export const system = () => $("system").value.trim();

export function marksTokens() {
  const tick = $("probabilities");
  return !tick.hidden && tick.querySelector("input").checked;
}

export function showChosen() {
  const set = fields().filter((field) => field.value.trim());
  const parts = set.map((field) => `${field.name} ${field.value.trim()}`);
  if (!parts.length) parts.push("as the model recommends");
  if (system()) parts.unshift("system prompt");
  if ($("tools").value.trim()) parts.unshift("tools");
  $("chosen").textContent = parts.join(" · ");
}

// Show an error, at its field if it has one. Null clears the error.
export function complain(error) {
  const all = [...fields(), $("tools"), $("system")];
  const field = error?.param && all.find((input) => error.param.split(/[.[]/)[0] === input.name);
  $("problem").textContent = error ? error.message : "";
  for (const input of all) input.removeAttribute("aria-invalid");
  if (!field) return;
  $("settings").open = true;
  field.setAttribute("aria-invalid", "true");
  field.focus();
}

// Show the server's defaults for a model. Values entered by the user stay.
export function setDefaults(card) {
  for (const field of fields()) field.defaultValue = card.chat_sampling?.[field.name] ?? "";
  $("probabilities").hidden = !card.capabilities?.logprobs;
  showChosen();
}
