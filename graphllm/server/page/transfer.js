// Conversations as a JSON file, and back. A file is taken as a whole, after every part of it was checked.
import { el } from "./dom.js";
import { newId } from "./tree.js";

const FORMAT = "graphllm-conversations", VERSION = 1, MOST_BYTES = 64 * 1024 * 1024;

const text = { is: (value) => typeof value === "string", name: "a text" };
const number = { is: (value) => Number.isFinite(value), name: "a number" };
const textOrNull = { is: (value) => value === null || typeof value === "string", name: "a text or null" };
const listOf = (fields) => ({ is: Array.isArray, name: "a list", fields });
const TURN = {
  id: text, parent: textOrNull, question: text, files: listOf({ name: text, text }), text, reasoning: text,
  calls: listOf({ id: text, name: text, json: text }), ending: textOrNull, error: textOrNull, figures: text,
  thought: text,
};
const CONVERSATION = { id: text, title: text, changed: number, leaf: textOrNull, turns: listOf(TURN) };

// The value with these fields and no others; throws an Error that names the first one that is wrong.
function checked(value, fields, place) {
  if (typeof value !== "object" || value === null || Array.isArray(value)) throw wrong(place, value, "an object");
  const unknown = Object.keys(value).find((name) => !Object.hasOwn(fields, name));
  if (unknown !== undefined) throw new Error(`${place}.${unknown.slice(0, 40)} is not known`);
  return Object.fromEntries(Object.entries(fields).map(([name, kind]) => {
    const inner = value[name], where = `${place}.${name}`;
    if (!kind.is(inner)) throw wrong(where, inner, kind.name);
    return [name, kind.fields ? inner.map((item, i) => checked(item, kind.fields, `${where}[${i}]`)) : inner];
  }));
}

function wrong(place, value, kind) {
  const shown = value === undefined ? "missing" : JSON.stringify(value).slice(0, 40);
  return new Error(`${place} is ${shown}: it must be ${kind}`);
}

// Turns come after the turn that they follow, so that there is no circle.
function connected(conversation, place) {
  const known = new Set();
  conversation.turns.forEach((turn, i) => {
    if (known.has(turn.id)) throw new Error(`${place}.turns[${i}].id stands twice`);
    if (turn.parent !== null && !known.has(turn.parent)) {
      throw new Error(`${place}.turns[${i}].parent names no turn before it`);
    }
    known.add(turn.id);
  });
  if (!known.has(conversation.leaf)) throw new Error(`${place}.leaf names no turn`);
  return conversation;
}

// The conversations in a file that are not there yet. present: {id, changed} of those that are; where one was changed
// since, the one from the file gets an id of its own.
export async function readConversations(file, present) {
  if (file.size > MOST_BYTES) throw new Error(`${file.name} has more than ${MOST_BYTES} bytes`);
  let data;
  try {
    data = JSON.parse(await file.text());
  } catch (reason) {
    throw new Error(`${file.name} is not JSON (${reason.message.slice(0, 100)})`);
  }
  if (data?.format !== FORMAT) {
    throw new Error(`${file.name} is not an export of this page: its format is not ${FORMAT}`);
  }
  if (data.version !== VERSION) throw new Error(`${file.name} has version ${data.version}: this page reads ${VERSION}`);
  if (!Array.isArray(data.conversations)) throw wrong("conversations", data.conversations, "a list");
  const taken = new Map(present.map(({ id, changed }) => [id, changed])), found = [];
  data.conversations.forEach((value, i) => {
    const place = `conversations[${i}]`, one = connected(checked(value, CONVERSATION, place), place);
    if (taken.get(one.id) === one.changed) return;
    if (taken.has(one.id)) one.id = newId();
    taken.set(one.id, one.changed);
    found.push(one);
  });
  return found;
}

// Lets the browser save the conversations as a file.
export function download(conversations) {
  const clean = conversations.map((one) => checked(one, CONVERSATION, one.title));
  const json = JSON.stringify({ format: FORMAT, version: VERSION, conversations: clean }, null, 1);
  const href = URL.createObjectURL(new Blob([json], { type: "application/json" }));
  el("a", { href, download: "graphllm-conversations.json" }).click();
  setTimeout(() => URL.revokeObjectURL(href), 60_000);
}
