// View of an answer during streaming. Text becomes text nodes, never markup. Only fenced code of
// Markdown is recognized. If tokens have log-probabilities, each token is a span that shows them.

const MAY_BE_FENCE = /^ {0,3}(`{0,2}|```[^`]*)$/;
const OPENS = /^ {0,3}```[^`]*$/;
const CLOSES = /^ {0,3}```\s*$/;
const tip = document.getElementById("tip");

const percent = (logprob) => {
  const value = 100 * Math.exp(logprob);
  return value >= 99.95 ? "100%" : value >= 0.1 ? `${value.toFixed(1)}%` : "<0.1%";
};
const make = (name, className = "", text = "") => {
  const element = document.createElement(name);
  element.className = className;
  element.textContent = text;
  return element;
};

export class Answer {
  text = "";
  #line = ""; // current line of the text
  #held = []; // parts of a line that may be a fence
  #inCode = false;
  #block = null;
  #spans = [];
  #tokens = new Map();
  #at = -1;

  constructor(element) {
    this.element = element;
  }

  // Append new text, with its tokens as in `choices[0].logprobs.content`.
  add(text, tokens = []) {
    this.text += text;
    let from = 0;
    for (const [index, token] of tokens.entries()) {
      // A token that ends within a character is shown together with the tokens that complete it.
      if (!token.token || !text.startsWith(token.token, from)) {
        this.#write(text.slice(from), tokens.slice(index));
        return;
      }
      this.#write(token.token, [token]);
      from += token.token.length;
    }
    this.#write(text.slice(from), null);
  }

  end() {
    if (this.#inCode && CLOSES.test(this.#line)) this.#held = [];
    this.#release();
  }

  #write(text, tokens) {
    for (const [index, part] of text.split("\n").entries()) {
      if (index) this.#breakLine(tokens);
      if (!part) continue;
      this.#line += part;
      this.#held.push([part, tokens]);
      if (!MAY_BE_FENCE.test(this.#line)) this.#release();
    }
  }

  #breakLine(tokens) {
    if ((this.#inCode ? CLOSES : OPENS).test(this.#line)) {
      this.#inCode = !this.#inCode;
      this.#block = null;
      this.#held = [];
    } else {
      this.#held.push(["\n", tokens]);
      this.#release();
    }
    this.#line = "";
  }

  #release() {
    for (const [text, tokens] of this.#held) this.#put(text, tokens);
    this.#held = [];
  }

  #put(text, tokens) {
    if (!this.#block) {
      this.#block = make(this.#inCode ? "pre" : "p");
      this.element.append(this.#block);
    }
    if (tokens) this.#putTokens(text, tokens);
    else if (this.#block.lastChild?.nodeType === Node.TEXT_NODE) {
      this.#block.lastChild.appendData(text);
    } else this.#block.append(text);
  }

  #putTokens(text, tokens) {
    const span = make("span", "token", text);
    span.style.setProperty("--doubt", 1 - Math.exp(Math.min(...tokens.map((t) => t.logprob))));
    this.#block.append(span);
    this.#tokens.set(span, tokens);
    this.#spans.push(span);
    if (this.#spans.length === 1) this.#listen();
  }

  #listen() {
    const element = this.element;
    element.tabIndex = 0;
    element.setAttribute("role", "group");
    element.setAttribute("aria-label", "Answer. The arrow keys go through its tokens.");
    element.setAttribute("aria-describedby", "tip");
    element.addEventListener("pointerover", (event) => this.#tell(event.target));
    element.addEventListener("click", (event) => this.#tell(event.target));
    element.addEventListener("pointerleave", () => this.#tell(null));
    element.addEventListener("blur", () => this.#tell(null));
    element.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      this.#at = Math.max(0, Math.min(this.#spans.length - 1, this.#at + step));
      this.#tell(this.#spans[this.#at]);
    });
  }

  #tell(span) {
    this.element.querySelector(".token.now")?.classList.remove("now");
    const tokens = span && this.#tokens.get(span);
    tip.hidden = !tokens;
    if (!tokens) return;
    this.#at = this.#spans.indexOf(span);
    span.classList.add("now");
    tip.replaceChildren(...tokens.flatMap(describe));
    const place = span.getBoundingClientRect(), size = tip.getBoundingClientRect();
    const left = Math.min(place.left, innerWidth - size.width - 8);
    const above = place.top - size.height - 6;
    tip.style.left = `${Math.max(8, left)}px`;
    tip.style.top = `${above > 8 ? above : place.bottom + 6}px`;
  }
}

// Element for a token, with its probability and the alternatives.
function describe(token) {
  const line = ({ token: text, logprob }, name) => {
    const row = make("div", name);
    const bar = make("i");
    bar.style.setProperty("--p", Math.exp(logprob));
    row.append(make("code", "", JSON.stringify(text)), make("span", "", percent(logprob)), bar);
    return row;
  };
  const others = (token.top_logprobs ?? []).filter((other) => other.token !== token.token);
  return [line(token, "drawn"), ...others.map((other) => line(other, "other"))];
}
