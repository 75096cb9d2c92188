// Conversations in this browser's own database. What it does not take stays in memory, is told, and is tried again.
import { newId } from "./tree.js";

const NAME = "graphllm", HEADS = "heads", WHOLE = "conversations";
const unsaved = new Map(); // by id: conversations that the database did not take
const seen = new Map(); // by id: when the one in the database was changed, as far as this tab knows
const news = new BroadcastChannel("graphllm.conversations"); // other tabs of this page
let opening = null;

// Calls back when another tab changed the list.
export function onNews(callback) {
  news.onmessage = callback;
}

function database() {
  opening ??= new Promise((resolve, reject) => {
    const request = indexedDB.open(NAME, 1);
    request.onupgradeneeded = () => {
      for (const store of [HEADS, WHOLE]) request.result.createObjectStore(store, { keyPath: "id" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opening;
}

// Runs the steps in one transaction: all of it is kept, or nothing. Gives the last request's result.
async function transact(mode, steps) {
  const open = await database();
  return new Promise((resolve, reject) => {
    const transaction = open.transaction([HEADS, WHOLE], mode);
    let last = null;
    transaction.oncomplete = () => resolve(last?.result);
    transaction.onabort = () => reject(transaction.error ?? new DOMException("aborted", "AbortError"));
    last = steps(transaction.objectStore(HEADS), transaction.objectStore(WHOLE));
  });
}

const head = ({ id, title, changed }) => ({ id, title, changed });

// Keeps conversations, all or none of them. Throws what the database says; then they are kept in memory.
export async function save(...conversations) {
  const copies = conversations.map((one) => structuredClone(one));
  try {
    await transact("readwrite", (heads, whole) => {
      for (const copy of copies) {
        heads.put(head(copy));
        whole.put(copy);
      }
    });
  } catch (reason) {
    for (const one of conversations) unsaved.set(one.id, one);
    throw reason;
  }
  for (const { id, changed } of copies) {
    seen.set(id, changed);
    unsaved.delete(id);
  }
  news.postMessage("changed");
}

// Keeps a conversation that grew. One that another tab changed too goes on under a new id: both stay.
export async function saveChanged(conversation) {
  const there = await transact("readonly", (heads) => heads.get(conversation.id)).catch(() => null);
  if (there && there.changed !== seen.get(conversation.id)) conversation.id = newId();
  conversation.changed = Math.max(Date.now(), conversation.changed + 1);
  await save(conversation);
}

// What there is: {id, title, changed}, newest first.
export async function list() {
  const kept = await transact("readonly", (heads) => heads.getAll()).catch(() => []);
  const byId = new Map([...kept, ...[...unsaved.values()].map(head)].map((one) => [one.id, one]));
  return [...byId.values()].sort((a, b) => b.changed - a.changed);
}

export async function load(id) {
  const found = unsaved.get(id) ?? (await transact("readonly", (_, whole) => whole.get(id)));
  if (found && !unsaved.has(id)) seen.set(id, found.changed);
  return found;
}

export async function all() {
  const kept = await transact("readonly", (_, whole) => whole.getAll()).catch(() => []);
  return [...new Map([...kept, ...unsaved.values()].map((one) => [one.id, one])).values()];
}

// Deletes one; the room that it leaves may do for what had none.
export async function remove(id) {
  unsaved.delete(id);
  seen.delete(id);
  await transact("readwrite", (heads, whole) => {
    heads.delete(id);
    whole.delete(id);
  });
  news.postMessage("changed");
  for (const one of [...unsaved.values()]) await save(one).catch(() => {});
}

export const anyUnsaved = () => unsaved.size > 0;
