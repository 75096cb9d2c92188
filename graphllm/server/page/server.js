// Requests to the server that sent the page: with the key, their refusals and their streams of events.
import { $ } from "./dom.js";

const base = new URL("..", import.meta.url);
export const KEY = "graphllm.key";

// fetch with the API key; asks for one as long as the server refuses. onSend: called before each try.
export async function request(path, options = {}, onSend = () => {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = { ...options.headers, ...(key && { Authorization: `Bearer ${key}` }) };
    onSend();
    const response = await fetch(new URL(path, base), { ...options, headers });
    if (response.status !== 401) return response;
    if (sessionStorage.getItem(KEY) === key && !(await askKey(key !== null))) return response;
  }
}

let asking = null;

function askKey(refused) {
  asking ??= new Promise((resolve) => {
    const dialog = $("key-dialog"), form = dialog.querySelector("form");
    $("key-refused").hidden = !refused;
    form.reset();
    form.onsubmit = (event) => {
      event.preventDefault();
      sessionStorage.setItem(KEY, form.elements.key.value.trim());
      dialog.close("given");
    };
    $("cancel-key").onclick = () => dialog.close("");
    dialog.returnValue = "";
    dialog.onclose = () => {
      asking = null;
      resolve(dialog.returnValue === "given");
    };
    dialog.showModal();
  });
  return asking;
}

export async function explain(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message;
  } catch {
    return `${response.status} ${response.statusText} ${text}`.trim().slice(0, 500);
  }
}

export async function* serverEvents(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", data = [];
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
      else if (!line && data.length) {
        yield data.join("\n");
        data = [];
      }
    }
  }
}

// Whether the server can answer, as a word, and why not. It needs no key.
export async function health() {
  try {
    const signal = AbortSignal.timeout(5000);
    const response = await fetch(new URL("health/ready", base), { cache: "no-store", signal });
    const body = await response.json().catch(() => null);
    if (response.ok) return ["ready", ""];
    return ["waiting", `Not ready: ${body?.cause || body?.status || response.status}`];
  } catch {
    return ["away", "The server does not answer."];
  }
}
