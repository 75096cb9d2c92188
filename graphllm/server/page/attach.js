// Files that become part of a message: read here as text, never sent as files.
import { count, el, quiet } from "./dom.js";

const MOST_BYTES = 512 * 1024; // of all files of one message: a model reads no more

// The files as [{name, text}]; throws an Error that says which one cannot be taken and why. present: those that are
// attached already.
export async function read(files, present) {
  const size = [...present.map(({ text }) => new Blob([text]).size), ...files.map((file) => file.size)]
    .reduce((sum, bytes) => sum + bytes, 0);
  if (size > MOST_BYTES) {
    throw new Error(`The files would have ${count(size)} bytes: one message takes ${count(MOST_BYTES)}. Attach less.`);
  }
  return Promise.all(files.map(async (file) => ({ name: oneLine(file.name), text: await asText(file) })));
}

const oneLine = (name) => name.replace(/[\p{C}`]/gu, " ").slice(0, 200);

async function asText(file) {
  const bytes = await file.arrayBuffer();
  let text = null;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
  } catch { /* other bytes */ }
  if (text === null || text.includes("\0")) {
    throw new Error(`${file.name} is not text in UTF-8: attach text files only.`);
  }
  return text;
}

// The files as a list, to read; with a button for each that takes it away, where remove is given.
export function fileList(files, remove) {
  return files.map((file) => {
    const summary = `${file.name} · ${count(file.text.length)} characters`;
    const details = el("details", {}, el("summary", { textContent: summary }),
      el("pre", { tabIndex: 0, ariaLabel: file.name, textContent: file.text }));
    if (!remove) return el("li", {}, details);
    const button = quiet("Remove", () => remove(file));
    button.ariaLabel = `Remove ${file.name}`;
    return el("li", {}, details, button);
  });
}
