// Conversations in this browser's own database. One that it does not take stays in memory; the page says so, and tries
// again.
import { mentions, newId } from "./tree.js";

const NAME = "graphllm", HEADS = "heads", WHOLE = "conversations";
const unsaved = new Map(); // by id: conversations that the database did not take
const seen = new Map(); // by id: when the one in the database was changed, as far as this tab knows
const news = new BroadcastChannel("graphllm.conversations"); // other tabs of this page
let opening = null, last = Promise.resolve();

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

// Runs the steps, an async function, in one transaction: all of it is kept, or nothing. Gives what they give.
async function transact(mode, steps) {
  const open = await database();
  return new Promise((resolve, reject) => {
    const transaction = open.transaction([HEADS, WHOLE], mode);
    let given;
    transaction.oncomplete = () => resolve(given);
    transaction.onabort = () => reject(transaction.error ?? new DOMException("aborted", "AbortError"));
    steps(transaction.objectStore(HEADS), transaction.objectStore(WHOLE)).then((value) => {
      given = value;
    }, (reason) => {
      reject(reason);
      transaction.abort();
    });
  });
}

const result = (request) => new Promise((resolve, reject) => {
  request.onsuccess = () => resolve(request.result);
  request.onerror = () => reject(request.error);
});

// Begins when all that this tab asked of the database before has ended: then `seen` and the ids say what is there.
function inTurn(work) {
  const done = last.then(work);
  last = done.catch(() => {});
  return done;
}

const head = ({ id, title, changed }) => ({ id, title, changed });

// Puts conversations into the database, all or none of them. Throws what it says; then they are kept in memory.
// check: called with the heads in the same transaction, so that no other tab writes in between.
async function put(conversations, check = async () => {}) {
  let copies;
  try {
    await transact("readwrite", async (heads, whole) => {
      await check(heads);
      copies = conversations.map((one) => structuredClone(one));
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

export const save = (...conversations) => inTurn(() => put(conversations));

// Puts a conversation that this tab changed. One that another tab changed too goes on under a new id: both stay.
const putChanged = (conversation) => put([conversation], async (heads) => {
  const there = await result(heads.get(conversation.id));
  if (there && there.changed !== seen.get(conversation.id)) conversation.id = newId();
});

// Keeps a conversation that grew.
export const saveChanged = (conversation) => inTurn(() => {
  conversation.changed = Math.max(Date.now(), conversation.changed + 1);
  return putChanged(conversation);
});

// Gives it another title; it stays where it is in the list.
export const rename = (conversation, title) => inTurn(() => {
  conversation.title = title;
  conversation.changed += 1;
  return putChanged(conversation);
});

const newestFirst = (heads) => heads.sort((a, b) => b.changed - a.changed);

// What there is: {id, title, changed}, newest first.
export const list = () => inTurn(async () => {
  const kept = await transact("readonly", (heads) => result(heads.getAll())).catch(() => []);
  const byId = new Map([...kept, ...[...unsaved.values()].map(head)].map((one) => [one.id, one]));
  return newestFirst([...byId.values()]);
});

// The same of those in which each of these words stands.
export const search = async (words) => newestFirst((await all()).filter((one) => mentions(one, words)).map(head));

export const load = (id) => inTurn(async () => {
  if (unsaved.has(id)) return unsaved.get(id);
  const found = await transact("readonly", (_, whole) => result(whole.get(id)));
  if (found) seen.set(id, found.changed);
  return found;
});

export const all = () => inTurn(async () => {
  const kept = await transact("readonly", (_, whole) => result(whole.getAll())).catch(() => []);
  return [...new Map([...kept, ...unsaved.values()].map((one) => [one.id, one])).values()];
});

// Deletes one; the room that it leaves may do for what had none.
export const remove = (id) => inTurn(async () => {
  unsaved.delete(id);
  seen.delete(id);
  await transact("readwrite", async (heads, whole) => {
    heads.delete(id);
    whole.delete(id);
  });
  news.postMessage("changed");
  for (const one of [...unsaved.values()]) await put([one]).catch(() => {});
});

export const anyUnsaved = () => unsaved.size > 0;
