// What a user sets for the next message: sampling, a system prompt, tools, marks of tokens.

import { Refused } from "./api.js";

const $ = (id) => document.getElementById(id);
const WHOLE = new Set(["top_k", "max_tokens", "seed"]);

const fields = () => [...$("settings").querySelectorAll(".fields input:not([type=checkbox])")];
const refused = (param, message) => new Refused(400, { error: { message, param } });

// The sampler's fields that are filled in. Raises Refused.
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

// Tools of requests, a list of functions. Raises Refused.
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

// Tell of a problem, at its field if it has one; null where there is none any more.
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

// The values that the server gives a model; what a user has typed stays.
export function setDefaults(card) {
  for (const field of fields()) field.defaultValue = card.chat_sampling?.[field.name] ?? "";
  $("probabilities").hidden = !card.capabilities?.logprobs;
  showChosen();
}
