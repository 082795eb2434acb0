// View of a message: head, thoughts, text, tool calls, and buttons.

import { Answer } from "./answer.js";
import { duration, shortName } from "./api.js";
import { Markdown } from "./markdown.js";

const $ = (id) => document.getElementById(id);

// Measurement of tokens, speed and delay of an answer.
export class Clock {
  began = performance.now();
  tokens = 0;

  // Return the figures as text.
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
    return parts.join(" · ");
  }
}

const pretty = (text) => {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
};

// View of a message { role, content }. Answers also have model, figures, thoughts, seconds and
// calls.
export class Message {
  #thinking = 0; // start time of the thoughts

  // `drawn`: function called after growth. `marked`: whether the answer shows token probabilities.
  constructor(data, { drawn, marked } = {}) {
    this.data = data;
    this.isMarked = marked;
    this.element = $("message").content.firstChild.cloneNode(true);
    this.element.className = data.role;
    const find = (selector) => this.element.querySelector(selector);
    [this.figures, this.thoughts, this.text] = ["h3 span", ".thoughts", ".text"].map(find);
    this.calls = find(".calls");
    const names = { user: "You", tool: `Result of ${data.name}` };
    find("h3 b").textContent = names[data.role] ?? shortName(data.model);
    this.figures.textContent = data.figures ?? "";
    for (const button of this.element.querySelectorAll(".acts button")) {
      button.hidden = !button.dataset.of.split(" ").includes(data.role);
    }
    if (data.role === "assistant") {
      this.prose = marked ? new Answer(this.text) : new Markdown(this.text, drawn);
      this.text.classList.toggle("prose", !marked);
    }
  }

  // Show the complete message.
  show() {
    const { data } = this;
    if (data.thoughts) this.#think(data.thoughts);
    if (!this.prose) this.text.textContent = data.content;
    else if (data.content) this.prose.add(data.content);
    this.#showCalls();
    this.end();
    return this;
  }

  // Append a delta of a stream.
  grow(delta, tokens = []) {
    const { data } = this, thought = delta.reasoning_content ?? delta.reasoning;
    if (thought) {
      this.#thinking ||= performance.now();
      data.thoughts = (data.thoughts ?? "") + thought;
      this.#think(thought);
    }
    if ((delta.content || delta.tool_calls) && this.#thinking) this.#stopThinking();
    if (delta.content) {
      data.content += delta.content;
      this.prose.add(delta.content, tokens);
    }
    for (const part of delta.tool_calls ?? []) {
      data.calls ??= [];
      const call = (data.calls[part.index ?? 0] ??= { id: "", name: "", arguments: "" });
      call.id ||= part.id ?? "";
      call.name += part.function?.name ?? "";
      call.arguments += part.function?.arguments ?? "";
    }
    if (delta.tool_calls) this.#showCalls();
  }

  // End the message.
  end() {
    const { data } = this;
    this.#stopThinking();
    this.prose?.end();
    this.#showCalls(pretty);
    if (data.role === "assistant" && !data.content && !data.calls) this.text.textContent = "(no text)";
  }

  get isEmpty() {
    return !this.data.content && !this.data.thoughts && !this.data.calls;
  }

  #think(text) {
    this.thoughts.hidden = false;
    this.thoughts.firstElementChild.textContent = "Thinking …";
    const place = this.thoughts.lastElementChild;
    if (place.firstChild) place.firstChild.appendData(text);
    else place.append(text);
  }

  #stopThinking() {
    if (this.#thinking) this.data.seconds = (performance.now() - this.#thinking) / 1000;
    this.#thinking = 0;
    const { seconds } = this.data;
    const words = seconds ? `Thought for ${duration(seconds)}` : "Thoughts";
    this.thoughts.firstElementChild.textContent = words;
  }

  #showCalls(form = (text) => text) {
    for (const [index, call] of (this.data.calls ?? []).entries()) {
      if (!this.calls.children[index]) this.calls.append($("call").content.cloneNode(true));
      const [summary, body] = this.calls.children[index].children;
      summary.lastChild.textContent = call.name;
      body.textContent = form(call.arguments);
      body.ariaLabel = `Arguments of ${call.name}`;
    }
  }
}

// Let the user edit a message in place. Resolves to the new text, or null.
export function change(message, label) {
  const form = $("editor").content.firstChild.cloneNode(true);
  const input = form.querySelector("textarea");
  const [save, cancel] = form.querySelectorAll("button");
  input.value = message.data.content;
  save.textContent = label;
  message.element.classList.add("edited");
  message.text.after(form);
  input.focus();
  return new Promise((resolve) => {
    const finish = (text) => {
      form.remove();
      message.element.classList.remove("edited");
      resolve(text);
    };
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (input.value.trim()) finish(input.value.trim());
    });
    cancel.addEventListener("click", () => finish(null));
    input.addEventListener("keydown", (event) => {
      if (event.key === "Escape") finish(null);
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      form.requestSubmit();
    });
  });
}

// Copy a text. Browsers disable the clipboard for pages loaded by plain HTTP from another machine.
export async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const input = document.createElement("textarea");
  input.value = text;
  document.body.append(input);
  input.select();
  const isDone = document.execCommand("copy");
  input.remove();
  if (!isDone) throw new Error("The browser does not let this page copy.");
}
