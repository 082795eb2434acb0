// Chats, stored only in this browser. Each has its own entry, so two tabs do not overwrite each
// other.

import { keys, local, put } from "./storage.js";

const PREFIX = "jaxserve.chat.";
const MOST = 50, MOST_CHARACTERS = 2_000_000; // browsers allow an origin about 5,000,000

export const fresh = (system = "") => ({
  id: `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`,
  title: "",
  system,
  messages: [],
});

function read(key) {
  const text = local.getItem(key);
  try {
    const chat = JSON.parse(text);
    return Array.isArray(chat.messages) ? { chat, size: text.length } : null;
  } catch {
    return null;
  }
}

// Return all chats with their sizes, the newest first.
function entries() {
  const found = keys().filter((key) => key.startsWith(PREFIX)).map(read);
  return found.filter(Boolean).sort((a, b) => b.chat.when - a.chat.when);
}

export const all = () => entries().map((entry) => entry.chat);
export const load = (id) => read(PREFIX + id)?.chat ?? null;
export const remove = (id) => local.removeItem(PREFIX + id);
export const removeAll = () => {
  for (const key of keys()) if (key.startsWith(PREFIX)) local.removeItem(key);
};

// Store a chat, and delete the oldest if there are too many. Returns an error message if it fails.
export function save(chat) {
  if (!chat.messages.length) {
    remove(chat.id);
    return "";
  }
  chat.when = Date.now();
  chat.title = chat.messages.find((message) => message.role === "user")?.content.slice(0, 80) ?? "";
  const text = JSON.stringify(chat);
  if (text.length > MOST_CHARACTERS) return "This chat has become too long to be kept.";
  const others = entries().filter((entry) => entry.chat.id !== chat.id);
  let size = others.reduce((sum, entry) => sum + entry.size, text.length);
  if (!put(local, PREFIX + chat.id, text)) {
    return "This chat is not kept: the browser's storage is full. Delete chats to make room.";
  }
  while (others.length >= MOST || size > MOST_CHARACTERS) {
    const oldest = others.pop();
    size -= oldest.size;
    remove(oldest.chat.id);
  }
  return "";
}
