// Start of the page: theme, views, key and models, then chat and engine.

import { askForKey, call, hasKey, shortName } from "./api.js";
import * as chat from "./chat.js";
import * as engine from "./engine.js";
import { local, put } from "./storage.js";

const $ = (id) => document.getElementById(id);
const THEMES = ["auto", "light", "dark"];
const EXAMPLES = {
  demo_model: ["Reverse: s-t-o-n-e", "What is 47 + 8?"],
};
let cards = [];

function showTheme() {
  $("theme").textContent = `Theme: ${document.documentElement.dataset.theme}`;
}

function nextTheme() {
  const root = document.documentElement;
  root.dataset.theme = THEMES[(THEMES.indexOf(root.dataset.theme) + 1) % THEMES.length];
  put(local, "jaxserve.theme", root.dataset.theme);
  showTheme();
}

function showView(view) {
  document.body.dataset.view = view;
  for (const one of ["chat", "engine"]) {
    $(`show-${one}`).setAttribute("aria-pressed", String(one === view));
  }
}

// Select a model for the page, if it is served.
function choose(id) {
  const card = cards.find((one) => one.id === id);
  if (!card) return;
  $("model").value = id;
  chat.talkTo(card);
  engine.watch(card.id);
  const examples = EXAMPLES[card.id] ?? [];
  $("hint").textContent = examples.length
    ? "This is a tiny model that knows a few small tasks. Try one:"
    : `Write a message to ${shortName(card.id)}.`;
  $("examples").replaceChildren(
    ...examples.map((text) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = text;
      button.addEventListener("click", () => {
        $("text").value = text;
        $("text").focus();
      });
      return button;
    }),
  );
}

async function load() {
  try {
    cards = (await (await call("/v1/models")).json()).data;
  } catch (error) {
    const gone = error instanceof TypeError;
    $("feed").textContent = gone ? "The server cannot be reached." : error.message;
    $("problem").textContent = $("feed").textContent;
    return;
  }
  $("problem").textContent = "";
  $("key").hidden = !hasKey();
  $("model").replaceChildren(...cards.map((card) => new Option(shortName(card.id), card.id)));
  $("model").disabled = cards.length < 2;
  choose(cards[0].id);
  choose(chat.lastModel());
}

showTheme();
chat.start(choose);
engine.start();
$("theme").addEventListener("click", nextTheme);
$("show-chat").addEventListener("click", () => showView("chat"));
$("show-engine").addEventListener("click", () => showView("engine"));
$("model").addEventListener("change", () => choose($("model").value));
$("key").addEventListener("click", async () => {
  if (await askForKey()) load();
});
if (matchMedia("(min-width: 900px)").matches) $("text").focus();
load();
