// Storage of the browser, or memory if the browser forbids storage.

class Memory {
  map = new Map();
  getItem = (key) => this.map.get(key) ?? null;
  setItem = (key, value) => void this.map.set(key, value);
  removeItem = (key) => void this.map.delete(key);
}

function open(name) {
  try {
    const storage = window[name];
    storage.getItem("jaxserve.theme");
    return storage;
  } catch {
    return new Memory();
  }
}

export const local = open("localStorage"), session = open("sessionStorage");
export const isKept = !(local instanceof Memory);
export const keys = () => (isKept ? Object.keys(local) : [...local.map.keys()]);

// Store a value. Returns false if there was no room.
export function put(storage, key, value) {
  try {
    storage.setItem(key, value);
    return true;
  } catch {
    return false;
  }
}
