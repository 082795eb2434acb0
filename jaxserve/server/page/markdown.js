// Rendering of growing Markdown. A library parses it, and this module creates elements of the kinds
// listed below. Markup in the text never becomes an element, and no resources are loaded for it.

import { Lexer } from "./vendor/marked.esm.js";

// Larger parts are shown as plain text, since the parser takes quadratic time.
const LONGEST = 8_000, DEEPEST = 16;
const SHARE = 8; // after a frame of 1 ms, 8 ms are left for other work
const ENTITIES = {
  amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", hellip: "…",
  mdash: "—", ndash: "–", rarr: "→", larr: "←", times: "×", deg: "°", middot: "·", bull: "•",
};

class Parser extends Lexer {
  #depth = 0;

  constructor() {
    super({ gfm: true, breaks: true });
  }

  blockTokens(source, tokens = [], ...rest) {
    if (this.#depth === DEEPEST) {
      tokens.push({ type: "text", raw: source, text: source });
      return tokens;
    }
    this.#depth++;
    try {
      return super.blockTokens(source, tokens, ...rest);
    } finally {
      this.#depth--;
    }
  }

  inlineTokens(source, tokens = []) {
    if (source.length <= LONGEST) return super.inlineTokens(source, tokens);
    tokens.push({ type: "text", raw: source, text: source });
    return tokens;
  }
}

const decode = (text) =>
  text.replace(/&(?:#(\d{1,7})|#x([\da-f]{1,6})|(\w+));/gi, (whole, decimal, hex, name) => {
    if (name) return Object.hasOwn(ENTITIES, name) ? ENTITIES[name] : whole;
    const code = decimal ? Number(decimal) : parseInt(hex, 16);
    return code && code <= 0x10ffff ? String.fromCodePoint(code) : "\ufffd";
  });

const make = (name, ...children) => {
  const element = document.createElement(name);
  element.append(...children);
  return element;
};

// Return a link to another page, or its text if the link would do anything else.
function link(href, children) {
  let url = null;
  try {
    url = new URL(decode(href));
  } catch {}
  if (!["http:", "https:", "mailto:"].includes(url?.protocol)) return make("span", ...children);
  const anchor = make("a", ...children);
  anchor.href = anchor.title = url.href;
  anchor.rel = "noopener noreferrer";
  anchor.target = "_blank";
  return anchor;
}

const INLINE = {
  text: (token) => (token.tokens ? inline(token.tokens) : [decode(token.text)]),
  escape: (token) => [token.text],
  strong: (token) => [make("strong", ...inline(token.tokens))],
  em: (token) => [make("em", ...inline(token.tokens))],
  del: (token) => [make("del", ...inline(token.tokens))],
  codespan: (token) => [make("code", token.text)],
  br: () => [make("br")],
  checkbox: (token) => [token.checked ? "☑ " : "☐ "],
  link: (token) => [link(token.href, inline(token.tokens))],
  image: (token) => [link(token.href, [`image: ${decode(token.text) || token.href}`])],
  html: (token) => (/^<br\s*\/?>$/i.test(token.raw) ? [make("br")] : [token.raw]),
};

const inline = (tokens) => tokens.flatMap((token) => INLINE[token.type]?.(token) ?? [token.raw]);

const BLOCK = {
  space: () => [],
  def: () => [],
  hr: () => [make("hr")],
  paragraph: (token) => [make("p", ...inline(token.tokens))],
  heading: (token) => [make(`h${token.level ?? 6}`, ...inline(token.tokens))],
  blockquote: (token) => [make("blockquote", ...blocks(token.tokens))],
  code: (token) => [code(token)],
  list: (token) => [list(token)],
  table: (token) => [table(token)],
  html: (token) => [make("p", token.raw.trim())],
};

const blocks = (tokens) =>
  tokens.flatMap((token) => BLOCK[token.type]?.(token) ?? inline([token]));

function list(token) {
  const element = make(token.ordered ? "ol" : "ul");
  if (token.ordered && token.start !== 1) element.start = token.start;
  for (const item of token.items) element.append(make("li", ...blocks(item.tokens)));
  return element;
}

function table({ header, rows }) {
  const cells = (row, name) =>
    make("tr", ...row.map((cell) => {
      const isHead = name === "th" && cell.text; // an empty cell is not a header
      const element = make(isHead ? "th" : "td", ...inline(cell.tokens));
      if (isHead) element.scope = "col";
      if (cell.align) element.style.textAlign = cell.align;
      return element;
    }));
  const body = make("tbody", ...rows.map((row) => cells(row, "td")));
  return scrolls(make("div", make("table", make("thead", cells(header, "th")), body)), "Table");
}

function scrolls(element, name) {
  element.tabIndex = 0;
  element.setAttribute("role", "group");
  element.setAttribute("aria-label", name);
  return element;
}

function code({ lang, text }) {
  const language = lang?.split(/\s/)[0] ?? "";
  const copy = make("button", "Copy");
  copy.type = "button";
  copy.dataset.act = "copy-code";
  copy.ariaLabel = "Copy code";
  const name = language ? `Code, ${language}` : "Code";
  const block = make("div", make("div", make("span", language || "code"), copy));
  block.className = "code";
  block.append(scrolls(make("pre", make("code", text)), name));
  return block;
}

// Levels of headings below the heading of a message, without gaps: "# a" and "### b" become h4 and
// h5.
function setLevels(tokens, outline) {
  for (const token of tokens) {
    if (token.type !== "heading") continue;
    while (outline.at(-1) >= token.depth) outline.pop();
    outline.push(token.depth);
    token.level = Math.min(6, 3 + outline.length);
  }
}

// Element that shows a text. Only changed blocks are rendered again, and while a text grows only
// its last blocks are parsed.
export class Markdown {
  text = "";
  #rest = ""; // text that is parsed again as it grows
  #outline = []; // headings of the final text
  #settled = 0; // number of final blocks
  #blocks = []; // { key, token, nodes }
  #frame = 0;
  #next = 0; // earliest time of the next frame

  // `drawn`: function called after each change.
  constructor(element, drawn = () => {}) {
    this.element = element;
    this.drawn = drawn;
  }

  add(text) {
    this.text += text;
    this.#rest += text;
    this.#frame ||= requestAnimationFrame((now) => this.#draw(now));
  }

  // Parse the whole text, and show it now.
  end() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 1;
    const tokens = parse(this.text);
    const hasTargets = tokens.some((token) => token.type === "def");
    setLevels(tokens, []);
    this.#settled = 0;
    this.#put(tokens, hasTargets);
    this.drawn();
  }

  #draw(now) {
    if (now < this.#next) {
      this.#frame = requestAnimationFrame((later) => this.#draw(later));
      return;
    }
    this.#frame = 0;
    const began = performance.now();
    const tokens = parse(this.#rest), outline = [...this.#outline];
    setLevels(tokens, outline);
    this.#put(tokens);
    this.#settle(tokens);
    this.drawn();
    const ended = performance.now();
    this.#next = ended + SHARE * (ended - began);
  }

  // All blocks before the last two are final.
  #settle(tokens) {
    const places = [...tokens.keys()].filter((index) => tokens[index].type !== "space");
    const done = tokens.slice(0, places.at(-2) ?? 0);
    const source = done.map((token) => token.raw).join("");
    if (!source || !this.#rest.startsWith(source)) return;
    setLevels(done, this.#outline);
    this.#rest = this.#rest.slice(source.length);
    this.#settled += done.length;
  }

  #put(tokens, all = false) {
    const old = this.#blocks.splice(this.#settled);
    for (const [index, token] of tokens.entries()) {
      const key = `${token.type} ${token.level} ${token.raw}`, before = old[index];
      if (before?.key === key && !all) this.#blocks.push(before);
      else this.#blocks.push({ key, token, nodes: this.#change(before, token) });
    }
    for (const { nodes } of old.slice(tokens.length)) for (const node of nodes) node.remove();
  }

  // Replace the nodes of a block. Growing code keeps its element.
  #change(before, token) {
    const was = before?.token;
    if (token.type === "code" && was?.type === "code" && token.lang === was.lang) {
      const element = before.nodes[0].querySelector("code");
      if (token.text.startsWith(was.text) && element.firstChild) {
        element.firstChild.appendData(token.text.slice(was.text.length));
      } else element.textContent = token.text;
      return before.nodes;
    }
    const nodes = blocks([token]).map((node) => (node.nodeType ? node : new Text(node)));
    const above = this.#blocks.findLast((block) => block.nodes.length)?.nodes.at(-1);
    if (above) above.after(...nodes);
    else this.element.prepend(...nodes);
    for (const node of before?.nodes ?? []) node.remove();
    return nodes;
  }
}

// Return the Markdown tokens of a text, or one paragraph if the parser fails.
function parse(text) {
  try {
    return new Parser().lex(text);
  } catch {
    return [{ type: "html", raw: text }];
  }
}
